"""The peer table stays bounded, and keeps those that matter."""

import time

from support.memory_network import MemoryNetwork
from support.protocol_cases import TRAINER
from support.sizes import kept_by

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.peers import DROPPED, MAX_PEERS, PeerScores, PeerTable
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.manifests import Holding, PeerRecord
from primerl.protocol.version import ALPN_CONTROL

SCORES = 8
"""Figures that are kept of a source."""
SOME, OTHER = b"s" * 32, b"o" * 32


def test_a_flood_of_nodes_that_nobody_saw_costs_neither_memory_nor_those_that_we_know() -> None:
    table = PeerTable()
    table.hint(TRAINER.node_id, ["127.0.0.1:1"])
    known = b"k" * 32
    table.seen(known)
    for number in range(MAX_PEERS + 500):
        table.get(number.to_bytes(32, "big"))
    nodes = {peer.node for peer in table.rows()}
    assert MAX_PEERS - DROPPED <= len(nodes) <= MAX_PEERS
    assert {TRAINER.node_id, known, (MAX_PEERS + 499).to_bytes(32, "big")} <= nodes
    assert table.get(TRAINER.node_id).addresses == ("127.0.0.1:1",)


def test_a_flood_of_sources_that_fail_in_every_way_costs_no_memory() -> None:
    """Anybody can announce that nodes hold chunks which do not exist."""
    scores = PeerScores()

    def fail(source: bytes) -> None:
        scores.lied(source, 0.0)
        scores.path_failed(source, 0.0, detour=False)
        scores.rest(source, 0.0)
        scores.silent(source)
        for _ in range(3):
            scores.fetched(
                source, 0.0, waited=9.0, delivered=False, doubted=True, idle=False, seconds=9.0
            )

    for number in range(MAX_PEERS):
        fail(number.to_bytes(32, "big"))
    assert kept_by(scores) == SCORES * MAX_PEERS
    for number in range(MAX_PEERS, MAX_PEERS + 100):
        fail(number.to_bytes(32, "big"))
    assert kept_by(scores) == SCORES * MAX_PEERS
    newest = (MAX_PEERS + 99).to_bytes(32, "big")
    assert (scores.shunned(newest, 1.0), scores.resting(newest, 1.0)) == (True, True)
    assert (scores.detoured(newest, 1.0), scores.awaited(newest)) == (True, False)


def record_of(address: str, expires: float) -> tuple[PeerRecord, bytes]:
    key = SecretKey.from_seed(b"p" * 32)
    body = PeerRecord(key.node_id, "inference", "test", (address,), (), True)
    return body, seal(key, Purpose.PEER, bytes(32), body, expires=int(expires))


def test_an_older_record_of_a_node_does_not_replace_its_newer_address() -> None:
    table = PeerTable()
    now = time.time()
    older, newer = record_of("10.0.0.1:1", now + 1000), record_of("10.0.0.2:2", now + 2000)
    for record in (older, newer, older):
        table.learn(*record)
    peer = table.get(older[0].node)
    assert peer.addresses == ("10.0.0.2:2",)
    assert peer.sealed == newer[1], "nor is the older one passed on"


def test_once_a_record_has_expired_any_valid_one_replaces_it() -> None:
    """The clock of its node may have been set back."""
    table = PeerTable()
    now = time.time()
    table.learn(*record_of("10.0.0.1:1", now - 5))
    table.learn(*record_of("10.0.0.2:2", now - 10))
    assert table.get(record_of("", now)[0].node).addresses == ("10.0.0.2:2",)


def test_a_record_is_here_byte_for_byte_and_while_it_is_valid() -> None:
    """Only then is its signature not verified again."""
    table = PeerTable()
    now = time.time()
    record, sealed = record_of("10.0.0.1:1", now + 1000)
    table.learn(record, sealed)
    assert table.has_record(record.node, sealed, now)
    assert not table.has_record(record.node, sealed[:-1] + bytes([sealed[-1] ^ 1]), now)
    assert not table.has_record(TRAINER.node_id, sealed, now)
    assert not table.has_record(record.node, sealed, now + 1001)
    table.retire(record.node)
    assert not table.has_record(record.node, sealed, now)
    assert not table.has_record(record.node, b"", now)


async def test_bytes_of_a_connection_that_ended_unnoticed_are_not_forgotten() -> None:
    network = MemoryNetwork()
    here, there = network.transport(b"h" * 32), network.transport(b"t" * 32)
    connection = await here.connect(b"t" * 32, [there.address], ALPN_CONTROL, deadline=5.0)
    stream = await connection.open_stream()
    await stream.write(bytes(1000))
    table = PeerTable()
    table.connected(b"t" * 32, connection)
    assert table.get(b"t" * 32).connected
    before = table.get(b"t" * 32).traffic()
    assert before[0] >= 1000
    await connection.close()
    assert not table.get(b"t" * 32).connected
    assert table.get(b"t" * 32).path_and_traffic()[0] is None
    assert table.get(b"t" * 32).traffic() == before
    table.disconnected(b"t" * 32, connection)
    assert table.get(b"t" * 32).traffic() == before


def test_a_peer_that_failed_counts_for_less_until_enough_has_come_from_others() -> None:
    table = PeerTable()
    for _ in range(3):
        table.failed(SOME)
    after, weight = table.reliability(SOME), table.weight(SOME)
    assert after < 0.6
    table.served(OTHER, 1000, 1.0)
    assert after < table.reliability(SOME) < 1.0
    assert weight < table.weight(SOME) < table.weight(OTHER), "in the rates of those that served"
    for _ in range(2000):
        table.served(OTHER, 1000, 1.0)
    assert table.reliability(SOME) == 1.0
    assert table.weight(SOME) == table.weight(OTHER)


def test_a_peer_that_was_forgotten_holds_nothing_and_sets_no_rate() -> None:
    table = PeerTable()
    record, _ = record_of("10.0.0.1:1", 0.0)
    some = record.node
    table.learn(record, b"")
    table.hold(Holding(some, 0, 5, True), 100.0)
    table.served(some, 1000, 1.0)
    assert table.holders(0, 5, 99.0) == [some]
    assert table.holders(0, 5, 101.0) == []
    assert table.weight(OTHER) == 1000.0
    table.forget(some)
    assert table.holders(0, 5, 99.0) == []
    assert table.weight(OTHER) == 1.0
