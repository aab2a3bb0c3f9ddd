"""The round trip to a peer, over real QUIC, and what its name may be."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.bare_node import bare_services, serving
from support.protocol_cases import RECORD

from primerl.crypto.keys import SecretKey
from primerl.node.errors import UsageError
from primerl.node.p2p.connections import ConnectionPool, Handler
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.ping import find_peer, ping
from primerl.node.p2p.rpc import receive
from primerl.node.p2p.services import NodeServices
from primerl.node.p2p.status_view import shown_name
from primerl.node.p2p.transport import Stream
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import GetHeads, Heads
from primerl.protocol.session import frame
from primerl.protocol.version import ALPN_CONTROL

OWN, PEER = SecretKey.from_seed(b"o" * 32), SecretKey.from_seed(b"p" * 32)
NAME = PEER.node_id.hex()[:8]


async def no_heads(peer: bytes, stream: Stream) -> None:
    del peer
    await receive(stream, GetHeads)
    await stream.write(frame(Heads(())))
    await stream.finish()


async def refuses(peer: bytes, stream: Stream) -> None:
    raise RemoteProtocolError(Reason.KEY_IN_USE, "in use\x1b[31m elsewhere")


async def silent(peer: bytes, stream: Stream) -> None:
    await asyncio.sleep(60)


@asynccontextmanager
async def pair(handler: Handler) -> AsyncGenerator[NodeServices]:
    """Yield the services of a node that knows another one, which answers by `handler`."""
    ends = [
        IrohTransport(key, host="127.0.0.1", port=0, alpns=[ALPN_CONTROL]) for key in (OWN, PEER)
    ]
    for end in ends:
        await end.start()
    peers = PeerTable()
    links = ConnectionPool(ends[0], peers, connect_timeout_s=10.0)
    peers.hint(PEER.node_id, ends[1].addresses())
    peers.get(OWN.node_id)
    async with serving(ends[1], {ALPN_CONTROL: handler}):
        yield bare_services(OWN, peers=peers, links=links)
    await links.close()
    await ends[0].close()


async def test_a_reply_is_timed_and_says_which_way_it_came() -> None:
    async with pair(no_heads) as services:
        first, second = await ping(services, NAME, 5.0), await ping(services, NAME, 5.0)
        assert len(services.peers.get(PEER.node_id).connections) == 1, "the connection stays"
    assert first.rtt_ms is not None
    assert (first.path, first.why) == ("direct", "")
    assert first.remote in ("127.0.0.1", "::1")
    assert second.path_rtt_ms is not None


async def test_a_refusal_is_an_answer_too() -> None:
    async with pair(refuses) as services:
        row = await ping(services, NAME, 5.0)
    assert row.rtt_ms is not None
    assert row.why == "key_in_use: in use?[31m elsewhere"


async def test_a_peer_that_says_nothing_costs_no_more_than_the_time_given() -> None:
    async with pair(silent) as services:
        row = await ping(services, NAME, 0.1)
    assert row.rtt_ms is None
    assert row.why.startswith("no reply")


@pytest.mark.parametrize("wait_s", [0.0, 8.1, float("nan")])
async def test_a_wait_without_end_is_refused(wait_s: float) -> None:
    with pytest.raises(UsageError, match=r"between 0\.1 and 8 s"):
        await ping(bare_services(OWN, peers=PeerTable()), NAME, wait_s)


def named(*names: str) -> PeerTable:
    """Make a table of peers that call themselves so."""
    table = PeerTable()
    for number, name in enumerate(names):
        node = bytes([0xAA, 0xBB, number]) + bytes(29)
        table.learn(msgspec.structs.replace(RECORD, node=node, name=name), b"")
    return table


@pytest.mark.parametrize(("wanted", "number"), [("anna", 0), ("aabb01", 1), ("AABB02", 2)])
def test_a_peer_is_found_by_its_name_or_the_digits_of_its_id(wanted: str, number: int) -> None:
    assert find_peer(named("anna", "ben", "").rows(), wanted).node[2] == number


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("aab", "no peer is called"),
        ("", "no peer is called"),
        ("ben", "2 peers"),
        ("aabb", "3 peers"),
    ],
)
def test_a_name_that_several_have_leads_to_nobody(wanted: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_peer(named("anna", "ben", "ben").rows(), wanted)


def test_a_name_that_looks_like_an_id_does_not_hide_the_node_of_that_id() -> None:
    assert find_peer(named("", "aabb00").rows(), "aabb00").node[2] == 0


@pytest.mark.parametrize(
    ("name", "shown"),
    [("anna's GPU", "anna's GPU"), ("a\x1b[2J\n", "a?[2J?"), (" \u202e ", "?"), ("", "")],
)
def test_a_name_is_made_fit_for_a_terminal(name: str, shown: str) -> None:
    (peer,) = named(name).rows()
    assert shown_name(peer) == shown
