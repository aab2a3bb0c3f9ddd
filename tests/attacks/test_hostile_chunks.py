"""The chunk exchange under attack: impossible bitmaps, floods, hoarding of watches and of upload slots."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.exchange_world import KIB, Bare, ExchangeNetwork, payload
from support.exchange_world import references as refs
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.rpc import Refused, ask, receive, receive_reply, send
from primerl.node.p2p.serve import WATCHES_PER_PEER
from primerl.node.p2p.transport import Connection, Stream, StreamClosed
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import (
    BlobRequest,
    ChunkFollows,
    GetAnyChunk,
    GetChunk,
    HaveChunks,
    WatchChunks,
)
from primerl.protocol.version import ALPN_BLOBS

SIZE = 32 * KIB
COUNT = 12
Answer = Callable[[Stream], Awaitable[None]]


async def dial(one: Bare, other: Bare) -> Connection:
    return await one.transport.connect(
        other.id, other.transport.addresses(), ALPN_BLOBS, deadline=60.0
    )


async def flood(stream: Stream) -> None:
    while True:
        await send(stream, HaveChunks(bytes(2)))


def say(held: bytes) -> Answer:
    async def answer(stream: Stream) -> None:
        await send(stream, HaveChunks(held))
        await asyncio.sleep(3600)

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (say(b"\x01"), Reason.MALFORMED),
        (say(b"\x01\x00\x00"), Reason.MALFORMED),
        (say(b"\x00\x10"), Reason.MALFORMED),
        (flood, Reason.RATE_LIMITED),
    ],
    ids=["too short", "too long", "a chunk beyond the last", "flood"],
)
@on_virtual_time
async def test_impossible_news_of_chunks_cost_their_sender(answer: Answer, reason: Reason) -> None:
    chunks = payload(COUNT, SIZE)

    async def handler(peer: bytes, stream: Stream) -> None:
        request: BlobRequest = await receive(stream, BlobRequest)  # type: ignore[arg-type]
        assert isinstance(request, WatchChunks)
        await answer(stream)

    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        bad = world.add("bad", handler=handler)
        origin.hold(chunks)
        world.network.window = 1024  # so that a flood is read while the fetch goes on
        await worker.fetch(refs(chunks), [bad], origin)
        assert worker.holds(refs(chunks))
        assert worker.peers.get(bad.id).blamed == {reason: 1}


@pytest.mark.parametrize("lie", ["index", "size", "bytes"])
@on_virtual_time
async def test_an_origin_that_gives_what_was_not_asked_for_is_blamed_and_asked_again(
    lie: str,
) -> None:
    chunks = payload(COUNT, SIZE)
    lies = [lie]

    async def handler(peer: bytes, stream: Stream) -> None:
        if not lies:
            return await honest.server.handle(peer, stream)
        lies.pop()
        await receive(stream, BlobRequest)  # type: ignore[arg-type]
        says = {"index": ChunkFollows(SIZE, COUNT), "size": ChunkFollows(SIZE + 1)}
        await send(stream, says.get(lie, ChunkFollows(SIZE)))
        await stream.write(bytes(SIZE + 1))
        await stream.finish()

    async with ExchangeNetwork() as world:
        honest, worker = world.add("honest"), world.add("w0")
        origin = world.add("origin", handler=handler)
        honest.hold(chunks)
        await worker.fetch(refs(chunks), [], origin)
        assert worker.holds(refs(chunks))
        assert worker.peers.get(origin.id).blamed == {Reason.WRONG_DIGEST: 1}


@on_virtual_time
async def test_a_request_for_something_unknown_is_refused_without_blame() -> None:
    async with ExchangeNetwork() as world:
        origin, asker = world.add("origin"), world.add("w0")
        origin.hold(payload(3))
        connection = await dial(asker, origin)
        unknown = tuple(digest(bytes([number])) for number in range(200))
        for request in (GetAnyChunk(unknown, urgent=True), GetChunk(unknown[0])):
            with pytest.raises(Refused) as refusal:
                await ask(connection, request, ChunkFollows, deadline=60.0)
            assert refusal.value.reason == Reason.NOT_FOUND
        assert not origin.peers.get(asker.id).blamed


@on_virtual_time
async def test_a_chunk_cannot_be_watched_twice() -> None:
    async with ExchangeNetwork() as world:
        origin, asker = world.add("origin"), world.add("w0")
        connection = await dial(asker, origin)
        with pytest.raises(Refused) as refusal:
            await ask(connection, WatchChunks((bytes(32),) * 2), HaveChunks, deadline=60.0)
        assert refusal.value.reason == Reason.MALFORMED


@on_virtual_time
async def test_watches_are_few_and_end_with_their_watcher() -> None:
    async with ExchangeNetwork() as world:
        origin, asker = world.add("origin"), world.add("w0")
        connection = await dial(asker, origin)
        names = tuple(digest(number.to_bytes(2, "big")) for number in range(500))
        open_streams: list[Stream] = []
        refused: list[Reason] = []
        for _ in range(300):
            stream = await connection.open_stream()
            await send(stream, WatchChunks(names))
            try:
                assert await receive_reply(stream, HaveChunks) == HaveChunks(bytes(63))
                open_streams.append(stream)
            except Refused as refusal:
                refused.append(refusal.reason)
        assert len(open_streams) == WATCHES_PER_PEER
        assert len(refused) == 300 - WATCHES_PER_PEER
        assert set(refused) <= {Reason.BUSY, Reason.RATE_LIMITED}
        assert origin.arrivals.watched == WATCHES_PER_PEER * 500
        for stream in open_streams:
            await stream.abort()
        await until(lambda: not origin.arrivals.watched)


@on_virtual_time
async def test_a_peer_that_reads_nothing_cannot_keep_others_from_their_chunks() -> None:
    chunks = payload(4, 512 * KIB)
    async with ExchangeNetwork() as world:
        origin, greedy, worker = (world.add(name) for name in ("origin", "greedy", "w0"))
        origin.hold(chunks)
        connection = await dial(greedy, origin)
        held: list[Stream] = []
        for chunk in refs(chunks):
            stream = await connection.open_stream()
            await send(stream, GetChunk(chunk.digest))
            held.append(stream)
        await receive_reply(held[0], ChunkFollows)
        async with asyncio.timeout(60.0):
            await worker.fetch(refs(chunks), [], origin)
        for stream in held:
            await stream.abort()


@on_virtual_time
async def test_bytes_after_a_watch_end_it() -> None:
    async with ExchangeNetwork() as world:
        origin, asker = world.add("origin"), world.add("w0")
        stream = await (await dial(asker, origin)).open_stream()
        await send(stream, WatchChunks((bytes(32),)))
        await receive_reply(stream, HaveChunks)
        await stream.write(b"more")
        with pytest.raises(StreamClosed):
            await receive_reply(stream, HaveChunks)
        await until(lambda: not origin.arrivals.watched)


@on_virtual_time
async def test_news_come_only_of_what_is_in_the_store() -> None:
    chunks = payload(2)
    async with ExchangeNetwork() as world:
        origin, asker = world.add("origin"), world.add("w0")
        origin.hold(chunks[:1])
        stream = await (await dial(asker, origin)).open_stream()
        await send(stream, WatchChunks(tuple(one.digest for one in refs(chunks))))
        assert (await receive_reply(stream, HaveChunks)).held == b"\x01"
        origin.arrivals.arrived(digest(b"something else"))
        origin.hold(chunks[1:])
        assert (await receive_reply(stream, HaveChunks)).held == b"\x03"
        with pytest.raises(StreamClosed):
            await receive_reply(stream, HaveChunks)


@on_virtual_time
async def test_a_fault_after_a_chunk_was_announced_resets_the_stream() -> None:
    """A refusal there would be taken for the chunk's bytes."""
    chunks = payload(1, 512 * KIB)

    class Failing(Pacer):
        async def pace(self, size: int) -> None:
            raise RemoteProtocolError(Reason.BUSY, "in the middle")

    async with ExchangeNetwork() as world:
        origin, asker = world.add("origin", pacer=Failing(0)), world.add("w0")
        origin.hold(chunks)
        stream = await (await dial(asker, origin)).open_stream()
        await send(stream, GetChunk(refs(chunks)[0].digest))
        with pytest.raises(StreamClosed):  # not Refused
            await stream.read_exact(512 * KIB)
