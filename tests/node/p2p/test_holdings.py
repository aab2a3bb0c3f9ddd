"""Want and have: what is told of holdings, whose are believed, and what a flood of them may cost."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import msgspec
import pytest
from support.memory_network import MemoryDiscovery, MemoryNetwork
from support.protocol_cases import OTHER_RUN, RECORD, RUN, STRANGER, TRAINER, WORKER, refuses
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.gossip import (
    HOLDERS,
    HOLDING_INTERVAL_S,
    HOLDING_TTL_S,
    Gossip,
    HoldingsAnnouncer,
    read_holding,
    record_interval,
)
from primerl.node.p2p.heads import HeadStore
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.services import RECORD_TTL_S
from primerl.node.storage.ledger import Ledger
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import Holding, PeerRecord
from primerl.protocol.retirement import Retirement, retire
from primerl.protocol.trust import TrustedRun

ME = SecretKey.from_seed(bytes([9]) * 32)
LATER = 2.0**40
NODE = WORKER.node_id


def fact(
    version: int,
    *,
    key: SecretKey = WORKER,
    node: bytes = b"",
    run: bytes = RUN,
    term: int = 0,
    complete: bool = True,
    lasts_s: int = HOLDING_TTL_S,
) -> bytes:
    """A holding as it is gossiped."""
    body = Holding(node or key.node_id, term, version, complete)
    return seal(key, Purpose.HOLDING, run, body, expires=int(time.time()) + lasts_s)


def record_of(key: SecretKey) -> PeerRecord:
    return msgspec.structs.replace(RECORD, node=key.node_id)


def table(*nodes: bytes) -> PeerTable:
    """A table with the records of these nodes."""
    peers = PeerTable()
    for node in nodes:
        peers.learn(msgspec.structs.replace(RECORD, node=node), b"")
    return peers


@dataclass
class Heard:
    """A node that listens, and a neighbour that says what it likes."""

    peers: PeerTable
    own: HoldingsAnnouncer
    neighbour: MemoryDiscovery

    def holds(self, key: SecretKey = WORKER) -> tuple[int, int, bool] | None:
        return self.peers.holds(key.node_id, time.time())

    def blamed(self) -> int:
        return sum(self.peers.get(STRANGER.node_id).blamed.values())


@asynccontextmanager
async def listening(
    directory: Path,
    admitted: asyncio.Event | None = None,
    *,
    nodes: int = 1,
    draws: Sequence[float] = (0.0,),
) -> AsyncGenerator[Heard]:
    network = MemoryNetwork()
    mine, other = network.discovery(ME.node_id), network.discovery(STRANGER.node_id)
    await other.start([])
    await mine.start(other.addresses())
    ledger = Ledger(directory / "ledger.db", fsync=False)
    others = (digest(b"node %d" % number) for number in range(1, nodes))
    heard = Heard(table(NODE, *others), HoldingsAnnouncer(ME, RUN), other)
    gossip = Gossip(
        mine,
        HeadStore(TrustedRun(RUN, TRAINER.node_id), ledger),
        heard.peers,
        record=lambda: seal(ME, Purpose.PEER, RUN, record_of(ME), expires=int(LATER)),
        holdings=heard.own,
        on_fraud=lambda error: pytest.fail(str(error)),
        admitted=admitted,
        chance=cycle(draws).__next__,
    )
    pumping = asyncio.create_task(gossip.run())
    try:
        yield heard
    finally:
        pumping.cancel()
        await asyncio.wait([pumping])
        await mine.close()
        await other.close()
        ledger.close()


# -- whose are believed ---------------------------------------------------------------------------------


async def test_the_newest_holding_of_a_node_counts_and_older_ones_blame_no_node(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as heard:
        for sealed in (fact(3, complete=False), fact(3), fact(3, complete=False, lasts_s=90)):
            await heard.neighbour.publish(sealed)
        await heard.neighbour.publish(fact(2))
        await heard.neighbour.publish(fact(1, term=1, complete=False))
        await until(lambda: heard.holds() == (1, 1, False))
        await heard.neighbour.publish(fact(9))
        await heard.neighbour.publish(fact(2, term=1))
        await until(lambda: heard.holds() == (1, 2, True))
        assert heard.blamed() == 0


def with_another_end(sealed: bytes) -> bytes:
    """The last byte of a signature is below 17: a fixed one would be the right one now and then."""
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (lambda: fact(5, key=STRANGER, node=NODE), Reason.WRONG_SIGNER),
        (lambda: fact(5, run=OTHER_RUN), Reason.WRONG_RUN),
        (lambda: fact(5, lasts_s=-3600), Reason.EXPIRED),
        (lambda: with_another_end(fact(5)), Reason.BAD_SIGNATURE),
    ],
    ids=["of somebody else", "of another run", "of an hour ago", "with another signature"],
)
async def test_a_forged_holding_counts_for_nothing_and_against_the_node_that_passed_it_on(
    tmp_path: Path, forged: Callable[[], bytes], reason: Reason
) -> None:
    with refuses(reason):
        read_holding(forged(), RUN, int(time.time()))
    async with listening(tmp_path) as heard:
        await heard.neighbour.publish(forged())
        await until(heard.blamed)
        assert heard.peers.get(STRANGER.node_id).blamed == {reason: 1}
        assert heard.holds() is None


def test_a_holding_is_believed_for_ten_minutes_whatever_it_says() -> None:
    now = int(time.time())
    holding, until_s = read_holding(fact(5, lasts_s=10**9), RUN, now)
    assert until_s == now + HOLDING_TTL_S
    peers = table(NODE)
    peers.hold(holding, until_s)
    assert peers.holds(NODE, now) == (0, 5, True)
    assert peers.holds(NODE, now + HOLDING_TTL_S) is None
    assert peers.holders(0, 5, now + HOLDING_TTL_S) == []


async def test_what_others_say_in_our_name_is_not_taken_in(tmp_path: Path) -> None:
    async with listening(tmp_path) as heard:
        heard.peers.learn(record_of(ME), b"")
        await heard.neighbour.publish(fact(5, key=ME))
        await heard.neighbour.publish(fact(5))
        await until(heard.holds)
        assert heard.holds(ME) is None


# -- floods ---------------------------------------------------------------------------------------------


async def test_a_flood_of_one_node_leaves_one_holding_and_one_of_strangers_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as heard:
        for number in range(600):
            await heard.neighbour.publish(fact(number))
            key = SecretKey.from_seed(digest(b"stranger %d" % number))
            await heard.neighbour.publish(fact(5, key=key))
            if number % 256 == 0:
                await asyncio.sleep(0)
        await until(lambda: heard.holds() == (0, 599, True))
        assert {row.node for row in heard.peers.rows()} <= {NODE, STRANGER.node_id}
        assert heard.peers.holders(0, 5, time.time()) == [NODE]


def test_nothing_is_kept_of_a_node_whose_record_we_do_not_have() -> None:
    peers = PeerTable()
    peers.hint(NODE, ("192.0.2.2:4000",))
    peers.hold(Holding(NODE, 0, 5, True), LATER)
    assert peers.holds(NODE, 0.0) is None
    peers.learn(RECORD, b"")
    peers.hold(Holding(NODE, 0, 5, True), LATER)
    assert peers.holds(NODE, 0.0) == (0, 5, True)


# -- nodes named as holders -----------------------------------------------------------------------------


def test_holders_of_a_version_hold_it_or_a_later_one_of_its_term() -> None:
    nodes = [bytes([number]) * 32 for number in range(6)]
    peers = table(*nodes)
    told = [(1, 4, True), (1, 5, True), (1, 5, False), (1, 6, True), (1, 6, False), (0, 9, True)]
    for node, (term, version, complete) in zip(nodes, told, strict=True):
        peers.hold(Holding(node, term, version, complete), LATER)
    assert peers.holders(1, 5, 0.0) == [nodes[1], nodes[3], nodes[2]]
    assert peers.holders(0, 9, 0.0) == [nodes[5]]
    assert peers.holders(2, 0, 0.0) == []


def test_a_node_that_only_wants_a_version_is_named_where_few_hold_it() -> None:
    nodes = [bytes([number]) * 32 for number in range(5)]
    peers = table(*nodes)
    for node in nodes[:4]:
        peers.hold(Holding(node, 0, 5, node != nodes[0]), LATER)
    assert peers.holders(0, 5, 0.0) == [*nodes[1:4], nodes[0]]
    peers.hold(Holding(nodes[4], 0, 5, True), LATER)
    assert peers.holders(0, 5, 0.0) == nodes[1:]


# -- what we tell ---------------------------------------------------------------------------------------


def opened(sealed: bytes) -> tuple[int, int, bool]:
    body = unseal(sealed, Purpose.HOLDING, Holding, now=0, run=RUN, signer=ME.node_id).body
    assert body.node == ME.node_id
    return body.term, body.version, body.complete


async def test_only_the_latest_holding_is_published_and_nothing_twice() -> None:
    own = HoldingsAnnouncer(ME, RUN)
    own.tell(0, 0, False)
    assert opened(await own.take()) == (0, 0, False)
    for version in range(5):
        own.tell(0, version, False)
        own.tell(0, version, True)
    assert opened(await own.take()) == (0, 4, True)
    own.tell(0, 4, True)
    own.tell(0, 4, False)
    own.tell(0, 3, True)
    waiting = asyncio.ensure_future(own.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    own.tell(1, 3, False)
    assert opened(await waiting) == (1, 3, False)


async def test_of_versions_that_pass_faster_than_one_a_second_only_the_latest_is_gossiped(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path) as heard:
        told: list[tuple[int, int, bool]] = []
        start = time.monotonic()
        for version in range(50):
            heard.own.tell(0, version, True)
            await asyncio.sleep(0.005)
        async with asyncio.timeout(60.0):
            async for one in heard.neighbour.facts():
                told += _holdings(one.sealed)
                if told and told[-1] == (0, 49, True):
                    break
        assert len(told) <= 2 + (time.monotonic() - start) / HOLDING_INTERVAL_S
        assert told == sorted(told)


@on_virtual_time
async def test_of_a_large_swarm_as_many_announce_a_version_as_of_a_small_one(
    tmp_path: Path,
) -> None:
    async with listening(tmp_path, nodes=10 * HOLDERS, draws=(0.101, 0.099)) as heard:
        for version in (1, 2):
            heard.own.tell(0, version, True)
            await asyncio.sleep(2 * HOLDING_INTERVAL_S)
        told: list[tuple[int, int, bool]] = []
        async with asyncio.timeout(60.0):
            async for one in heard.neighbour.facts():
                told += _holdings(one.sealed)
                if told:
                    break
        assert told == [(0, 2, True)]


def test_records_of_a_large_swarm_are_no_more_frequent_than_those_of_a_hundred_nodes() -> None:
    assert record_interval(3) == record_interval(100) == 20.0
    assert record_interval(5000) == 1000.0
    assert record_interval(10**6) < RECORD_TTL_S / 2


def _holdings(sealed: bytes) -> list[tuple[int, int, bool]]:
    purpose: str = msgspec.msgpack.decode(sealed)[1]
    return [opened(sealed)] if purpose == Purpose.HOLDING else []


# -- retired keys ----------------------------------------------------------------------------------------


async def test_a_node_whose_key_is_retired_is_no_source_any_more_and_stays_forgotten(
    tmp_path: Path,
) -> None:
    now = int(time.time())
    async with listening(tmp_path) as heard:
        await heard.neighbour.publish(fact(3))
        await until(heard.holds)
        forged = seal(
            STRANGER, Purpose.RETIREMENT, bytes(32), Retirement(NODE, now), expires=int(LATER)
        )
        await heard.neighbour.publish(forged)
        await until(heard.blamed)
        assert heard.holds() is not None
        await heard.neighbour.publish(retire(WORKER, now))
        await until(lambda: heard.holds() is None)
        sealed = seal(WORKER, Purpose.PEER, RUN, record_of(WORKER), expires=now + 600)
        await heard.neighbour.publish(sealed)
        await heard.neighbour.publish(fact(4))
        await heard.neighbour.publish(fact(1, key=STRANGER))
        stranger = seal(STRANGER, Purpose.PEER, RUN, record_of(STRANGER), expires=now + 600)
        await heard.neighbour.publish(stranger)
        await until(lambda: heard.peers.get(STRANGER.node_id).record is not None)
        assert heard.peers.get(NODE).record is None
        assert heard.peers.get(NODE).addresses == ()
        assert heard.holds() is None


async def test_a_node_announces_itself_once_it_is_admitted_and_listens_before(
    tmp_path: Path,
) -> None:
    admitted = asyncio.Event()
    async with listening(tmp_path, admitted) as heard:
        await heard.neighbour.publish(fact(3))
        await until(heard.holds)
        facts = aiter(heard.neighbour.facts())
        announced = asyncio.ensure_future(anext(facts))
        await asyncio.sleep(0.05)
        assert not announced.done()
        admitted.set()
        async with asyncio.timeout(10.0):
            assert (await announced).source == ME.node_id
