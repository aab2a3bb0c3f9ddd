"""libp2p discovery against peers that keep to no rule: plain libp2p with none of our limits."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import trio
from support.libp2p_cases import DEADLINE_S, RUN, heard, key, living, node, port_of
from support.waiting import until

from primerl.node.p2p.discovery import GossipFact, peer_id_of
from primerl.node.p2p.libp2p import MAX_FRAME, Libp2pDiscovery
from primerl.node.p2p.trio_bridge import TrioThread
from primerl.protocol.version import MAX_GOSSIP

if TYPE_CHECKING:
    from libp2p.abc import IHost
    from libp2p.crypto.keys import KeyPair
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.pubsub import Pubsub

TOPIC = f"primerl/{RUN.hex()}/1"
FLOOD = 400
POINT = bytes.fromhex("0279be667ef9dcbbac55a06295ce870b07029bfcdb2dce28d959f2815b16f81798")
SECP256K1 = b"\x08\x02\x12\x21" + POINT
"""A sound secp256k1 key, as libp2p writes it; for it a node needs no library, and may have none."""


@pytest_asyncio.fixture
async def victim(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Libp2pDiscovery]:
    """The node under attack, which may not die of it, not even to come back."""
    discovery = node(1)
    await discovery.start([])
    yield discovery
    assert "died" not in caplog.text
    await discovery.close()


@pytest_asyncio.fixture
async def friend(victim: Libp2pDiscovery) -> AsyncIterator[Libp2pDiscovery]:
    """An honest neighbour of the victim."""
    discovery = node(2)
    await discovery.start(victim.addresses())
    await until(lambda: discovery.neighbours() and victim.neighbours())
    yield discovery
    await discovery.close()


async def heard_until(discovery: Libp2pDiscovery, last: bytes) -> list[bytes]:
    """Everything that comes in before `last` does."""
    facts: list[bytes] = []
    while (fact := await heard(discovery)).sealed != last:
        facts.append(fact.sealed)
    return facts


class Stranger:
    """A plain libp2p peer of the victim. Its methods run in its own trio thread."""

    def __init__(self, host: "IHost", pubsub: "Pubsub", thread: TrioThread) -> None:
        self.host = host
        self._pubsub = pubsub
        self._thread = thread

    async def tell(self, facts: Sequence[bytes]) -> None:
        """Publish every fact, properly signed, as fast as they leave."""

        async def tell() -> None:
            for fact in facts:
                await self._pubsub.publish(TOPIC, fact)
                await trio.sleep(0.0005)

        await self._thread.call(tell)

    async def send(self, frame: bytes) -> None:
        """Write raw bytes into the gossip stream of every neighbour."""

        async def send() -> None:
            for stream in list(self._pubsub.peers.values()):
                await stream.write(frame)

        await self._thread.call(send)

    async def send_rpc(self, rpc: "rpc_pb2.RPC") -> None:
        """Send a pubsub frame of our own making to every neighbour."""
        from libp2p.utils.varint import encode_uvarint

        frame = rpc.SerializeToString()
        await self.send(encode_uvarint(len(frame)) + frame)

    async def abuse(self, protocol: str, data: bytes) -> None:
        """Open a stream of another protocol to every peer, write `data` and hang up."""
        from libp2p.custom_types import TProtocol

        async def abuse() -> None:
            for peer in self.host.get_connected_peers():
                stream = await self.host.new_stream(peer, [TProtocol(protocol)])
                await stream.write(data)
                await stream.close()

        await self._thread.call(abuse)

    def is_connected(self) -> bool:
        return bool(self.host.get_connected_peers())


def stranger(i: int, victim: Libp2pDiscovery) -> AbstractAsyncContextManager[Stranger]:
    """A stranger that is connected to the victim and has joined its topic."""

    async def build(stack: AsyncExitStack, thread: TrioThread) -> Stranger:
        host, pubsub = await open_stranger(i, stack)
        await connect(host, pubsub, victim.addresses()[0])
        return Stranger(host, pubsub, thread)

    return living(build)


async def open_stranger(i: int, stack: AsyncExitStack) -> "tuple[IHost, Pubsub]":
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.pubsub.gossipsub import GossipSub
    from libp2p.pubsub.pubsub import Pubsub
    from libp2p.tools.anyio_service import background_trio_service
    from multiaddr import Multiaddr

    listen = [Multiaddr("/ip4/127.0.0.1/tcp/0")]
    host = new_host(key_pair=create_new_key_pair(key(i).seed()), listen_addrs=listen)
    router = GossipSub([TProtocol("/meshsub/1.1.0")], 6, 4, 12, spam_protection_enabled=False)
    pubsub = Pubsub(host, router)
    stack.callback(pubsub.seen_messages.stop)
    await stack.enter_async_context(host.run(listen))
    await stack.enter_async_context(background_trio_service(pubsub))
    await stack.enter_async_context(background_trio_service(router))
    stack.push_async_callback(host.close)
    await pubsub.wait_until_ready()
    await pubsub.subscribe(TOPIC)
    return host, pubsub


async def connect(host: "IHost", pubsub: "Pubsub", address: str) -> None:
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    victim = info_from_p2p_addr(Multiaddr(address))
    await host.connect(victim)
    await pubsub.wait_for_subscription(victim.peer_id, TOPIC)
    await pubsub.wait_for_peer(victim.peer_id)


async def test_an_oversized_fact_of_a_stranger_is_dropped(victim: Libp2pDiscovery) -> None:
    async with stranger(9, victim) as other:
        await other.tell([bytes(MAX_GOSSIP + 1), bytes(MAX_GOSSIP)])
        assert (await heard(victim)).sealed == bytes(MAX_GOSSIP)
        assert victim.gate.dropped["too_large"] == 1


async def test_a_fact_is_heard_once_though_two_sign_and_spread_it(victim: Libp2pDiscovery) -> None:
    async with stranger(8, victim) as one, stranger(9, victim) as other:
        await one.tell([b"the same", b"the same"])
        await until(lambda: victim.gate.dropped["repeated"])
        await other.tell([b"the same", b"the last"])
        assert await heard_until(victim, b"the last") == [b"the same"]


async def test_a_flood_is_limited_and_the_others_still_get_through(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery
) -> None:
    async with stranger(9, victim) as other:
        await other.tell([b"flood %d" % i for i in range(FLOOD)])
        await friend.publish(b"honest")
        flood = await heard_until(victim, b"honest")
    dropped = victim.gate.dropped
    assert len(flood) < FLOOD / 2
    assert dropped["neighbour_rate"] + dropped["origin_rate"] > 0


@pytest.mark.parametrize(
    "frame",
    [b"\x04\xff\xff\xff\xff", b"\xff" * 11, b"\x81\x80\x10", b"\x40" + b"\xa5" * 64],
    ids=["no protobuf", "no length", "one byte too long", "noise"],
)
async def test_a_broken_frame_costs_its_sender_the_connection_and_nobody_else(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery, frame: bytes
) -> None:
    assert MAX_FRAME + 1 == 0x40001  # which is 81 80 10 as a varint
    async with stranger(9, victim) as other:
        await other.send(frame)
        await until(lambda: not other.is_connected())
    await friend.publish(b"alive")
    assert (await heard(victim)).sealed == b"alive"


async def test_a_message_that_its_origin_did_not_sign_is_not_heard(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery
) -> None:
    from libp2p.pubsub.pb.rpc_pb2 import RPC, Message

    forged = Message(data=b"forged", topicIDs=[TOPIC], seqno=bytes(8), signature=bytes(64))
    forged.from_id = peer_id_of(key(2).node_id)
    async with stranger(9, victim) as other:
        await other.send_rpc(RPC(publish=[forged]))
        await asyncio.sleep(0.2)
    await friend.publish(b"forged")  # and it does not keep the honest one out
    assert await heard(victim) == GossipFact(b"forged", key(2).node_id)


@pytest.mark.parametrize(
    ("origin", "signer"),
    [
        (b"\x12\x20" + bytes(32), b"\x08\x00\x12\x04junk"),
        (peer_id_of(b"\xff" * 32), b"junk"),
        (b"\x00\x25" + SECP256K1, b""),
        (b"\x00\x25" + SECP256K1, SECP256K1),
    ],
    ids=["another kind of key", "no key at all", "secp256k1 in the id", "secp256k1 beside the id"],
)
async def test_an_origin_that_is_no_key_of_ours_does_not_disturb(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery, origin: bytes, signer: bytes
) -> None:
    from libp2p.pubsub.pb.rpc_pb2 import RPC, Message

    forged = Message(data=b"forged", topicIDs=[TOPIC], seqno=bytes(8), signature=bytes(64))
    forged.from_id, forged.key = origin, signer
    async with stranger(9, victim) as other:
        await other.send_rpc(RPC(publish=[forged]))
        await asyncio.sleep(0.2)
    await friend.publish(b"alive")
    assert (await heard(victim)).sealed == b"alive"


@pytest.mark.parametrize("kind", ["Secp256k1", "ECDSA", "ECC_P256", "RSA", "X25519"])
async def test_a_peer_with_another_kind_of_key_does_not_get_in_and_disturbs_nobody(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery, kind: str
) -> None:
    thread = TrioThread("stranger")
    await thread.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            address = victim.addresses()[0]
            assert await thread.call(call_with_key_of_kind, "Ed25519", address)
            assert not await thread.call(call_with_key_of_kind, kind, address)
    finally:
        await thread.stop()
    await until(lambda: victim.neighbours() == 1)
    await friend.publish(b"alive")
    assert await heard(victim) == GossipFact(b"alive", key(2).node_id)


async def call_with_key_of_kind(kind: str, address: str) -> bool:
    """Connect under a key that claims to be of that kind; returns whether the victim takes a stream."""
    from libp2p import new_host
    from libp2p.custom_types import TProtocol
    from libp2p.exceptions import BaseLibp2pError
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    listen = [Multiaddr("/ip4/127.0.0.1/tcp/0")]
    host = new_host(key_pair=key_pair_of_kind(kind), listen_addrs=listen)
    async with host.run(listen):
        victim = info_from_p2p_addr(Multiaddr(address))
        try:
            await host.connect(victim)
            await host.new_stream(victim.peer_id, [TProtocol("/meshsub/1.1.0")])
        except BaseLibp2pError:
            return False
        finally:
            await host.close()
    return True


def key_pair_of_kind(kind: str) -> "KeyPair":
    """An Ed25519 key pair; for another kind its public half says that it is a point of another curve."""
    from libp2p.crypto.ed25519 import Ed25519PrivateKey, Ed25519PublicKey, create_new_key_pair
    from libp2p.crypto.keys import KeyPair, KeyType, PublicKey

    class Public(Ed25519PublicKey):
        def to_bytes(self) -> bytes:
            return POINT

        def get_type(self) -> KeyType:
            return KeyType[kind]

    class Private(Ed25519PrivateKey):
        def get_public_key(self) -> PublicKey:
            return public

    pair = create_new_key_pair(key(9).seed())
    if kind == "Ed25519":
        return pair
    assert isinstance(pair.private_key, Ed25519PrivateKey)
    assert isinstance(pair.public_key, Ed25519PublicKey)
    public = Public(pair.public_key.impl)
    return KeyPair(Private(pair.private_key.impl), public)


async def test_nonsense_in_control_messages_does_not_disturb(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery
) -> None:
    from libp2p.pubsub.pb import rpc_pb2 as pb

    names = [b"", b"abc", bytes(1000), b"\xff" * 46]
    control = pb.ControlMessage(
        ihave=[pb.ControlIHave(topicID=topic, messageIDs=names) for topic in ("", TOPIC, "other")],
        iwant=[pb.ControlIWant(messageIDs=names)],
        graft=[pb.ControlGraft(topicID=topic) for topic in ("", TOPIC, TOPIC, "other")],
        prune=[pb.ControlPrune(topicID=topic, backoff=2**60) for topic in ("", "other")],
    )
    async with stranger(9, victim) as other:
        await other.send_rpc(pb.RPC(control=control))
        await other.send_rpc(pb.RPC(subscriptions=[pb.RPC.SubOpts(topicid="x" * 60_000)]))
        await other.send_rpc(pb.RPC(senderRecord=b"junk"))
        await asyncio.sleep(0.3)
    await friend.publish(b"alive")
    assert (await heard(victim)).sealed == b"alive"


async def test_nonsense_in_other_protocols_does_not_disturb(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery
) -> None:
    async with stranger(9, victim) as other:
        for protocol in ("kad/1.0.0", "id/1.0.0", "id/push/1.0.0", "ping/1.0.0"):
            for data in (b"\xff" * 11, b"\x40" + b"\xa5" * 64, b"\x04\x08\x02\x12\x00"):
                await other.abuse(f"/ipfs/{protocol}", data)
        await asyncio.sleep(0.2)
    await friend.publish(b"alive")
    assert (await heard(victim)).sealed == b"alive"


async def test_a_connection_without_encryption_is_refused(victim: Libp2pDiscovery) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(victim))
    async with asyncio.timeout(DEADLINE_S):
        for line in (b"/multistream/1.0.0\n", b"/plaintext/2.0.0\n"):
            writer.write(bytes([len(line)]) + line)
        assert await reader.readexactly(20) == b"\x13/multistream/1.0.0\n"
        assert await reader.readexactly(4) == b"\x03na\n"
    writer.close()
    await writer.wait_closed()


async def test_garbage_on_the_port_does_not_disturb(
    victim: Libp2pDiscovery, friend: Libp2pDiscovery
) -> None:
    port = port_of(victim)
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100_000),
        random.Random(0).randbytes(100_000),
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    await friend.publish(b"alive")
    assert (await heard(victim)).sealed == b"alive"


async def test_strangers_write_nothing_into_the_operators_log(
    victim: Libp2pDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    async with stranger(9, victim) as other:
        await other.send(b"\x04\xff\xff\xff\xff")
        await until(lambda: not other.is_connected())
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert not logging.getLogger("libp2p.pubsub.pubsub").isEnabledFor(logging.ERROR)
