"""The streams of every transport: what a node may rely on, whatever carries its bytes."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from conformance.transport_factories import (
    ALPN,
    DEADLINE_S,
    FACTORIES,
    MIB,
    OTHER_ALPN,
    Pair,
    TransportWorld,
    connected,
    soon,
    streams,
)

from primerl.node.p2p.transport import Stream, StreamClosed


@pytest.fixture(params=sorted(FACTORIES))
async def world(request: pytest.FixtureRequest) -> AsyncIterator[TransportWorld]:
    async with FACTORIES[request.param]((ALPN, OTHER_ALPN)) as world:
        yield world


async def test_what_is_written_is_read_in_order_and_answered(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        await near.write(b"ab")
        await near.write(bytearray(b"cd"))
        await near.write(memoryview(b"..ef")[2:])
        assert await soon(far.read_exact(3)) == b"abc"
        assert await soon(far.read_exact(3)) == b"def"
        await far.write(b"answer")
        assert await soon(near.read_exact(6)) == b"answer"


async def test_reading_and_writing_nothing_returns_at_once(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        await soon(near.write(b""))
        assert await soon(far.read_exact(0)) == b""


async def test_a_payload_larger_than_every_window_crosses_both_ways_at_once(
    world: TransportWorld,
) -> None:
    payload = bytes(range(256)) * (20 * MIB // 256)
    async with connected(world) as pair:
        near, far = await streams(pair)

        async def swap(stream: Stream) -> bytes:
            writing = asyncio.ensure_future(stream.write(payload))
            received = await stream.read_exact(16 * MIB)
            received += await stream.read_exact(len(payload) - len(received))
            await writing
            return received

        for received in await soon(asyncio.gather(swap(near), swap(far))):
            assert received == payload


async def test_a_writer_waits_for_a_reader_that_does_not_read(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, _far = await streams(pair)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await near.write(bytes(64 * MIB))


async def test_finishing_ends_one_direction_and_leaves_the_other_open(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        await near.write(b"last words")
        await near.finish()
        assert await soon(far.read_exact(10)) == b"last words"
        with pytest.raises(StreamClosed):
            await soon(far.read_exact(1))
        await far.write(b"heard")
        assert await soon(near.read_exact(5)) == b"heard"


async def test_a_stream_that_ends_in_the_middle_of_a_message_is_closed(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        await near.write(b"12345")
        await near.finish()
        with pytest.raises(StreamClosed):
            await soon(far.read_exact(6))


async def test_nothing_can_be_written_after_finish(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, _far = await streams(pair)
        await near.finish()
        with pytest.raises(StreamClosed):
            await soon(near.write(b"more"))


async def test_an_abort_is_seen_by_a_waiting_reader(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        reading = asyncio.ensure_future(far.read_exact(1))
        await asyncio.sleep(0)
        await near.abort()
        with pytest.raises(StreamClosed):
            await soon(reading)
        assert not pair.far.closed


async def test_an_abort_is_seen_by_a_waiting_writer(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        writing = asyncio.ensure_future(near.write(bytes(64 * MIB)))
        await asyncio.sleep(0.05)
        await far.abort()
        with pytest.raises(StreamClosed):
            await soon(writing)


async def test_an_abort_ends_our_own_waiting_calls_and_may_be_repeated(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        reading = asyncio.ensure_future(near.read_exact(1))
        writing = asyncio.ensure_future(near.write(bytes(64 * MIB)))
        await asyncio.sleep(0.05)
        await soon(near.abort())
        await soon(near.abort())
        for call in (reading, writing):
            with pytest.raises(StreamClosed):
                await soon(call)
        with pytest.raises(StreamClosed):
            await soon(far.read_exact(64 * MIB))


async def test_a_stream_aborted_before_anything_was_written_harms_nobody(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        silent = await pair.near.open_stream()
        await soon(silent.abort())
        near, far = await soon(later_stream(pair))
        await near.write(b"ok")
        assert await soon(far.read_exact(2)) == b"ok"


async def later_stream(pair: Pair) -> tuple[Stream, Stream]:
    """A stream opened after others; the peer may see dead ones first."""
    near = await pair.near.open_stream()
    await near.write(b"!")
    while True:
        far = await pair.far.accept_stream()
        try:
            assert await far.read_exact(1) == b"!"
        except StreamClosed:
            continue
        return near, far


@pytest.mark.usefixtures("small_heap")
async def test_a_stream_that_its_owner_forgot_ends_for_the_peer(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        reading = asyncio.ensure_future(far.read_exact(1))
        writing = asyncio.ensure_future(far.write(bytes(64 * MIB)))
        await asyncio.sleep(0)
        del near
        gc.collect()
        for call in (reading, writing):
            with pytest.raises(StreamClosed):
                await soon(call)


async def test_a_cancelled_read_spoils_its_stream_and_no_other(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        other_near, other_far = await streams(pair)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await far.read_exact(10)
        await near.write(b"0123456789")
        with pytest.raises(StreamClosed):
            await soon(far.read_exact(10))
        await soon(far.abort())
        await other_near.write(b"fine")
        assert await soon(other_far.read_exact(4)) == b"fine"


async def test_a_cancelled_write_cannot_be_finished_as_if_it_were_whole(
    world: TransportWorld,
) -> None:
    async with connected(world) as pair:
        near, far = await streams(pair)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await near.write(bytes(64 * MIB))
        with pytest.raises(StreamClosed):
            await soon(near.finish())
        await soon(near.abort())
        with pytest.raises(StreamClosed):
            await soon(far.read_exact(64 * MIB))


async def test_many_streams_of_one_connection_do_not_mix(world: TransportWorld) -> None:
    async with connected(world) as pair:

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(60):
                    group.create_task(echo(await pair.far.accept_stream()))

        async def echo(stream: Stream) -> None:
            await stream.write((await stream.read_exact(1000))[::-1])
            await stream.finish()

        async def ask(number: int) -> None:
            question = number.to_bytes(2, "big") * 500
            stream = await pair.near.open_stream()
            await stream.write(question)
            assert await stream.read_exact(1000) == question[::-1]

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(serve())
            for number in range(60):
                group.create_task(ask(number))


async def test_no_stream_is_lost_when_accepting_is_cancelled(world: TransportWorld) -> None:
    async with connected(world) as pair:
        kept: list[Stream] = []
        seen: set[bytes] = set()
        for number in range(80):
            accepting = asyncio.ensure_future(pair.far.accept_stream())
            await asyncio.sleep(0)
            kept.append(await pair.near.open_stream())
            await kept[-1].write(bytes([number]))
            await asyncio.sleep(0.0003 * (number % 4))
            accepting.cancel()
            (result,) = await asyncio.gather(accepting, return_exceptions=True)
            if not isinstance(result, BaseException):
                seen.add(await soon(result.read_exact(1)))
        while len(seen) < 80:
            seen.add(await soon((await soon(pair.far.accept_stream())).read_exact(1)))


async def test_two_accepting_calls_get_two_different_streams(world: TransportWorld) -> None:
    async with connected(world) as pair:
        accepting = [asyncio.ensure_future(pair.far.accept_stream()) for _ in range(2)]
        opened = [await pair.near.open_stream() for _ in range(2)]
        for number, stream in enumerate(opened):
            await stream.write(bytes([number]))
        accepted = await soon(asyncio.gather(*accepting))
        assert {await soon(stream.read_exact(1)) for stream in accepted} == {b"\0", b"\1"}


async def test_the_peer_sees_a_stream_once_something_was_written(world: TransportWorld) -> None:
    async with connected(world) as pair:
        near = await pair.near.open_stream()
        accepting = asyncio.ensure_future(pair.far.accept_stream())
        await asyncio.wait([accepting], timeout=0.1)
        assert not accepting.done()
        await near.write(b"now")
        assert await soon((await soon(accepting)).read_exact(3)) == b"now"
