"""One suite for every way to a chunk beside iroh: whatever the other side does, an error in time."""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from conformance.chunk_source_factories import FACTORIES, Mood, Place

from primerl.crypto.hashing import digest
from primerl.node.p2p.rpc import Refused, TooSlow
from primerl.node.p2p.transport import StreamClosed, TransportError
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.version import MAX_CHUNK

DEADLINE_S = 60.0
SOON_S = 0.3
GRACE_S = 40.0
"""On a busy machine. Without a deadline these tests would wait for a minute."""


@pytest_asyncio.fixture(params=sorted(FACTORIES))
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with FACTORIES[request.param]() as built:
        yield built


def put(place: Place, size: int, seed: int = 0) -> tuple[ChunkRef, bytes]:
    """A chunk that the server has."""
    data = random.Random(seed).randbytes(size)
    return ChunkRef(place.store.put(data), size), data


@pytest.mark.parametrize("size", [1, 1_000_003, MAX_CHUNK])
async def test_a_chunk_comes_whole(place: Place, size: int) -> None:
    chunk, data = put(place, size)
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data


async def test_many_chunks_come_at_once_each_whole(place: Place) -> None:
    put_there = [put(place, 300_000 + seed, seed) for seed in range(12)]
    gets = [place.source.get(chunk, deadline=DEADLINE_S) for chunk, _ in put_there]
    assert await asyncio.gather(*gets) == [data for _, data in put_there]


async def test_an_unknown_chunk_is_refused_and_the_next_is_not(place: Place) -> None:
    chunk, data = put(place, 1000)
    with pytest.raises(Refused) as refusal:
        await place.source.get(ChunkRef(digest(b"nobody has it"), 10), deadline=DEADLINE_S)
    assert refusal.value.reason == Reason.NOT_FOUND
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data


@pytest.mark.parametrize("mood", ["silent", "stalling"])
async def test_a_server_that_says_nothing_more_costs_the_deadline(place: Place, mood: Mood) -> None:
    chunk, data = put(place, 100_000)
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data
    place.mood = mood
    start = time.monotonic()
    with pytest.raises(TooSlow):
        await place.source.get(chunk, deadline=SOON_S)
    assert time.monotonic() - start < GRACE_S
    place.mood = "honest"
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data


async def test_a_server_that_sends_too_little_is_noticed(place: Place) -> None:
    chunk, _ = put(place, 100_000)
    place.mood = "short"
    with pytest.raises(StreamClosed):
        await place.source.get(chunk, deadline=DEADLINE_S)


async def test_a_server_that_sends_too_much_is_noticed(place: Place) -> None:
    chunk, data = put(place, 100_000)
    place.mood = "long"
    with pytest.raises((TransportError, RemoteProtocolError)):
        await place.source.get(chunk, deadline=DEADLINE_S)
    place.mood = "honest"
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data


@pytest.mark.parametrize(
    "lies", [b"\xff" * 600, b"\x00\x00\x00\x01\xc1", b"HTTP/9 \r\n\r\n", b"\x00" * 64]
)
async def test_a_server_that_talks_rubbish_is_noticed(place: Place, lies: bytes) -> None:
    chunk, data = put(place, 1000)
    place.mood, place.lies = "garbage", lies
    with pytest.raises((TransportError, RemoteProtocolError)):
        await place.source.get(chunk, deadline=DEADLINE_S)
    place.mood = "honest"
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data


async def test_a_smaller_or_larger_file_than_was_signed_is_an_error(place: Place) -> None:
    chunk, data = put(place, 1000)
    for size in (1, 999, 1001, MAX_CHUNK):
        with pytest.raises((TransportError, RemoteProtocolError)):
            await place.source.get(ChunkRef(chunk.digest, size), deadline=DEADLINE_S)
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data


async def test_a_server_that_died_is_unreachable_in_time(place: Place) -> None:
    chunk, data = put(place, 1000)
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data
    place.stop()
    await asyncio.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(TransportError):
        await place.source.get(chunk, deadline=2.0)
    assert time.monotonic() - start < 2.0 + GRACE_S


async def test_a_cancelled_get_leaves_the_source_usable(place: Place) -> None:
    chunk, data = put(place, MAX_CHUNK)
    for pause in (0.0, 0.001, 0.01, 0.03):
        getting = asyncio.ensure_future(place.source.get(chunk, deadline=DEADLINE_S))
        await asyncio.sleep(pause)
        getting.cancel()
        await asyncio.wait([getting])
    assert await place.source.get(chunk, deadline=DEADLINE_S) == data
