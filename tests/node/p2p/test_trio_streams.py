"""Streams in a trio thread: whole writes, bounded reads, and callers that are turned away."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from support.waiting import until

from primerl.node.p2p import trio_bridge
from primerl.node.p2p.transport import StreamClosed

DEADLINE_S = 60.0


class Raw:
    """A foreign stream: every write takes `seconds`, every read gives `said`."""

    def __init__(self, said: bytes = b"", seconds: float = 0.0) -> None:
        self.said = said
        self.asked: list[int | None] = []
        self.written: list[bytes] = []
        self.resets = 0
        self.cuts = 0
        self._seconds = seconds

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        self.asked.append(n)
        if self.said == b"fault":
            raise RuntimeError("a slip of the library")
        piece, self.said = self.said[:n], self.said[n:]
        return piece

    async def write(self, data: bytes) -> None:
        await trio.sleep(self._seconds)
        self.written.append(data)

    async def close_write(self) -> None:
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        self.resets += 1

    async def cut(self) -> None:
        """End the connection."""
        await trio.lowlevel.checkpoint()
        self.cuts += 1


def run(test: Callable[[], Awaitable[None]]) -> None:
    """In trio, on a clock that jumps."""
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_read_asks_for_no_more_than_is_wanted() -> None:
    async def read() -> None:
        raw = Raw(bytes(trio_bridge.PIECE + 100))
        assert await trio_bridge.TrioStream(raw, raw.cut).read_exact(
            trio_bridge.PIECE + 10
        ) == bytes(trio_bridge.PIECE + 10)
        assert raw.asked == [trio_bridge.PIECE, 10]

    run(read)


@pytest.mark.parametrize("said", [b"", b"abc", b"fault"])
def test_an_end_or_a_slip_of_the_library_is_a_closed_stream(said: bytes) -> None:
    async def read() -> None:
        raw = Raw(said)
        with pytest.raises(StreamClosed):
            await trio_bridge.TrioStream(raw, raw.cut).read_exact(4)

    run(read)


def test_a_cancelled_write_writes_its_piece_and_no_further_one() -> None:
    async def write() -> None:
        raw = Raw(seconds=1.0)
        with trio.move_on_after(1.5) as scope:
            await trio_bridge.TrioStream(raw, raw.cut).write(bytes(3 * trio_bridge.PIECE))
        assert scope.cancelled_caught
        assert raw.written == [bytes(trio_bridge.PIECE)] * 2
        assert raw.cuts == 0

    run(write)


def test_a_peer_that_takes_a_piece_too_slowly_loses_its_connection() -> None:
    async def write() -> None:
        raw = Raw(seconds=trio_bridge.WRITE_SECONDS + 1)
        with pytest.raises(StreamClosed, match="given up"):
            await trio_bridge.TrioStream(raw, raw.cut).write(b"x")
        assert raw.cuts == 1

    run(write)


def test_a_stream_that_opens_too_late_is_reset() -> None:
    async def cancelled() -> None:
        raw = Raw()

        async def begin() -> Raw:
            await trio.sleep(2)
            return raw

        with trio.move_on_after(1):
            await trio_bridge.open_whole(begin, raw.cut)
        assert (raw.resets, raw.cuts) == (1, 0)

    async def never() -> None:
        raw = Raw()

        async def begin() -> Raw:
            await trio.sleep_forever()
            return raw

        with pytest.raises(StreamClosed):
            await trio_bridge.open_whole(begin, raw.cut)
        assert (raw.resets, raw.cuts) == (0, 1)

    run(cancelled)
    run(never)


async def test_callers_are_served_up_to_a_limit_of_each_and_of_all() -> None:
    thread = trio_bridge.TrioThread("test")
    await thread.start()
    callers = trio_bridge.AcceptQueue(thread)
    callers.bind(asyncio.get_running_loop())
    raws: list[Raw] = []

    async def call(peer: bytes) -> None:
        raw = Raw(b"request")
        raws.append(raw)
        thread.nursery.start_soon(callers.take, peer, trio_bridge.TrioStream(raw, raw.cut))

    await thread.call(call, b"early")
    await until(lambda: raws[0].resets)  # nobody listens yet
    reader = callers.listen()
    for _ in range(trio_bridge.STREAMS_PER_PEER + 1):
        await thread.call(call, b"greedy")
    await until(lambda: raws[-1].resets)
    for number in range(trio_bridge.STREAMS - trio_bridge.STREAMS_PER_PEER + 1):
        await thread.call(call, number.to_bytes(2, "big"))
    await until(lambda: raws[-1].resets)
    assert sum(raw.resets for raw in raws) == 3

    for _ in range(trio_bridge.STREAMS):
        peer, stream = await anext(reader)
        assert await stream.read_exact(7) == b"request"
        await stream.write(peer)
        await stream.abort()
        await stream.abort()
    assert [raw.written for raw in raws].count([b"greedy"]) == trio_bridge.STREAMS_PER_PEER
    await thread.call(call, b"greedy")
    assert (await anext(reader))[0] == b"greedy"
    callers.close()
    assert [caller async for caller in reader] == []
    await thread.stop()


async def test_a_stream_of_a_thread_that_stopped_is_closed() -> None:
    thread = trio_bridge.TrioThread("test")
    await thread.start()
    callers = trio_bridge.AcceptQueue(thread)
    callers.bind(asyncio.get_running_loop())
    reader = callers.listen()

    async def call() -> None:
        raw = Raw(b"request")
        thread.nursery.start_soon(callers.take, b"peer", trio_bridge.TrioStream(raw, raw.cut))

    await thread.call(call)
    _, stream = await anext(reader)
    await thread.stop()
    for failing in (stream.read_exact(1), stream.write(b"x"), stream.finish()):
        with pytest.raises(StreamClosed, match="stopped"):
            await failing
    await stream.abort()
