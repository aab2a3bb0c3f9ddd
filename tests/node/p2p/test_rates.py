"""A line with a limit: its rate is kept, own submissions go first, and no peer waits beyond its deadline."""

import asyncio
import time

import pytest
from support.exchange_world import KIB, Bare, ExchangeNetwork, payload, references
from support.virtual_time import on_virtual_time

from primerl.node.p2p.download_state import ChunkDownload
from primerl.node.p2p.limits import Pacer, Rates
from primerl.node.p2p.peers import Tier
from primerl.node.p2p.rpc import Refused, receive_reply, send
from primerl.node.p2p.serve import LEAST_RATE, MAX_UPLOADS
from primerl.protocol.errors import Reason
from primerl.protocol.messages import ChunkFollows, GetChunk, InLine, WatchChunks
from primerl.protocol.version import ALPN_BLOBS

HALF_MBIT = 62_500
"""Bytes per second of the least upload limit."""
MBIT = 125_000
"""Of the least download limit."""
MIB = 1024 * KIB
BIG = 4 * MIB
"""A chunk of the largest usual size."""


async def fetched(
    nodes: list[Bare], chunks: list[bytes], neighbours: list[Bare], origin: Bare
) -> float:
    """Let all nodes fetch; return the seconds until the last has everything."""
    begun = time.monotonic()
    wanted = references(chunks)
    await asyncio.gather(*(node.fetch(wanted, neighbours, origin) for node in nodes))
    assert all(node.holds(wanted) for node in nodes)
    return time.monotonic() - begun


@on_virtual_time
async def test_what_a_slow_line_serves_to_many_at_once_comes_at_its_rate_and_breaks_off_nowhere() -> (
    None
):
    chunks = payload(1, MIB)
    async with ExchangeNetwork() as world:
        home = world.add("home", pacer=Pacer(HALF_MBIT))
        home.hold(chunks)
        others = [world.add(f"w{number}") for number in range(8)]
        for node in others:
            home.peers.admit(
                node.id, Tier.MEMBER
            )  # connections of strangers are closed while they rest
        seconds = await fetched(others, chunks, [], home)
        sent = sum(home.server.served.values())
        assert sent == len(others) * MIB
        assert sent <= HALF_MBIT * (seconds + 1) + MIB
        assert sum(sum(node.fetcher.wasted.values()) for node in others) == 0
        assert [node.peers.get(home.id).success for node in others] == [1.0] * len(others)


@pytest.mark.parametrize(("count", "size"), [(3, BIG), (60, 64 * KIB)])
@on_virtual_time
async def test_what_comes_in_keeps_the_limit_and_no_sender_hangs_up(count: int, size: int) -> None:
    chunks = payload(count, size)
    async with ExchangeNetwork() as world:
        origin, home = world.add("origin"), world.add("home", downlink=Pacer(MBIT))
        others = [world.add(f"w{number}") for number in range(3)]
        for node in [origin, *others]:
            node.hold(chunks)
        seconds = await fetched([home], chunks, others, origin)
        total = count * size
        assert sum(home.fetcher.wasted.values()) == 0
        assert total / MBIT - 2 <= seconds <= 1.5 * total / MBIT + 10
        assert all(home.peers.reliability(other.id) > 0.5 for other in others)


@on_virtual_time
async def test_a_chunk_waits_while_a_submission_of_ours_has_the_line_and_says_so_meanwhile() -> (
    None
):
    chunks = payload(1)
    async with ExchangeNetwork() as world:
        pacer = Pacer(MBIT)
        home, asker = world.add("home", pacer=pacer), world.add("w0")
        home.hold(chunks)
        connection = await asker.transport.connect(
            home.id, home.transport.addresses(), ALPN_BLOBS, deadline=5.0
        )
        async with pacer.own():
            stream = await connection.open_stream()
            await send(stream, GetChunk(references(chunks)[0].digest))
            reply: ChunkFollows | InLine = InLine()
            for _ in range(10):
                reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
                assert isinstance(reply, InLine)
        while isinstance(reply, InLine):
            reply = await receive_reply(stream, ChunkFollows | InLine)  # type: ignore[arg-type]
        assert await stream.read_exact(reply.size) == chunks[0]


@on_virtual_time
async def test_a_line_that_stays_taken_is_a_busy_answer_in_time() -> None:
    chunks = payload(1)
    async with ExchangeNetwork() as world:
        pacer = Pacer(MBIT)
        home, asker = world.add("home", pacer=pacer), world.add("w0")
        home.hold(chunks)
        chunk, download = references(chunks)[0], ChunkDownload(home.id, 0.0, 0.0)
        asker.peers.hint(home.id, home.transport.addresses())
        begun = time.monotonic()
        async with pacer.own():
            with pytest.raises(Refused) as refusal:
                await asker.fetcher.client.one(chunk, download, start=lambda: True)
        assert refusal.value.reason == Reason.BUSY
        assert time.monotonic() - begun < 25


async def largest_number_of_submissions_at_a_time(pacer: Pacer) -> int:
    """Let three have the line."""
    inside, seen = 0, list[int]()

    async def submit() -> None:
        nonlocal inside
        async with pacer.own():
            inside += 1
            seen.append(inside)
            await asyncio.sleep(1)
            inside -= 1

    await asyncio.gather(*(submit() for _ in range(3)))
    assert not pacer.is_taken
    return max(seen)


@on_virtual_time
async def test_submissions_take_turns_on_a_line_with_a_limit_alone() -> None:
    assert await largest_number_of_submissions_at_a_time(Pacer(MBIT)) == 1
    assert await largest_number_of_submissions_at_a_time(Pacer()) == 3


@on_virtual_time
async def test_a_node_that_serves_nothing_says_busy_and_others_are_asked() -> None:
    chunks = payload(6)
    async with ExchangeNetwork() as world:
        origin, paused, asker = (world.add(name) for name in ("origin", "paused", "w0"))
        for node in (origin, paused):
            node.hold(chunks)
        paused.server.closed = True
        for request in (GetChunk(references(chunks)[0].digest), WatchChunks((bytes(32),))):
            connection = await asker.transport.connect(
                paused.id, paused.transport.addresses(), ALPN_BLOBS, deadline=5.0
            )
            stream = await connection.open_stream()
            await send(stream, request)
            with pytest.raises(Refused) as refusal:
                await receive_reply(stream, ChunkFollows)
            assert refusal.value.reason == Reason.BUSY
        seconds = await fetched([asker], chunks, [paused], origin)
        assert seconds < 2
        assert not paused.server.served
        assert not paused.peers.get(asker.id).blamed


def test_a_rate_may_change_and_no_limit_waits_for_nothing() -> None:
    rates = Rates(0.0, 8.0)
    assert rates.up.charge(10**9) == 0.0
    assert rates.down.rate == 1_000_000
    assert rates.down.charge(3_000_000) == pytest.approx(2.0, abs=0.1)
    assert rates.down.exhausted
    rates.set(4.0, 0.0)
    assert not rates.down.exhausted
    assert rates.up.rate == 500_000


def test_fewer_uploads_share_a_slow_line() -> None:
    shared = [Pacer(rate).sharers(LEAST_RATE, MAX_UPLOADS) for rate in (0, HALF_MBIT, MBIT, 10**9)]
    assert shared == [MAX_UPLOADS, 1, 2, MAX_UPLOADS]
