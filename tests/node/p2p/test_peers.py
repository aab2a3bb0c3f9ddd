"""The peer table stays bounded, and keeps those that matter."""

from support.memory_network import MemoryNetwork
from support.protocol_cases import TRAINER

from primerl.node.p2p.peers import DROPPED, MAX_PEERS, PeerTable
from primerl.protocol.version import ALPN_CONTROL


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


async def test_bytes_of_a_connection_that_ended_unnoticed_are_not_forgotten() -> None:
    network = MemoryNetwork()
    here, there = network.transport(b"h" * 32), network.transport(b"t" * 32)
    connection = await here.connect(b"t" * 32, [there.address], ALPN_CONTROL, deadline=5.0)
    stream = await connection.open_stream()
    await stream.write(bytes(1000))
    table = PeerTable()
    table.connected(b"t" * 32, connection)
    before = table.get(b"t" * 32).traffic()
    assert before[0] >= 1000
    await connection.close()
    assert table.get(b"t" * 32).path() is None
    assert table.get(b"t" * 32).traffic() == before
    table.disconnected(b"t" * 32, connection)
    assert table.get(b"t" * 32).traffic() == before
