"""The peer table stays bounded, and keeps those that matter."""

from protocol_cases import TRAINER

from primerl.node.network.peers import MAX_PEERS, PeerTable


def test_a_flood_of_nodes_that_nobody_saw_costs_neither_memory_nor_those_that_we_know() -> None:
    table = PeerTable()
    table.hint(TRAINER.node_id, ["127.0.0.1:1"])
    known = b"k" * 32
    table.seen(known)
    for number in range(MAX_PEERS + 500):
        table.get(number.to_bytes(32, "big"))
    nodes = {peer.node for peer in table.rows()}
    assert len(nodes) == MAX_PEERS
    assert {TRAINER.node_id, known, (MAX_PEERS + 499).to_bytes(32, "big")} <= nodes
    assert table.get(TRAINER.node_id).addresses == ("127.0.0.1:1",)
