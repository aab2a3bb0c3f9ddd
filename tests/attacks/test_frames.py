"""Bytes that are no messages, messages out of place, and too many of either: refused, and others are served."""

import asyncio
import time

import msgspec
import pytest
from support.hostile import Rogue, reason_of
from support.swarm import Swarm
from support.waiting import until

from primerl.node.p2p.connections import (
    CONNECTIONS_PER_PEER,
    UNPROVEN_BURST,
    UNPROVEN_PER_SECOND,
)
from primerl.node.p2p.rpc import Refused, receive_reply, send
from primerl.node.p2p.transport import TransportError
from primerl.protocol import messages
from primerl.protocol.errors import Reason
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, MAX_MESSAGE

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAVE = 20
"""Requests at once: fewer than the streams that a peer may have open."""
NESTED = b"\x91" * 5000
FRAMES: dict[str, tuple[bytes, Reason]] = {
    "longer than any message": ((MAX_MESSAGE + 1).to_bytes(4, "big"), Reason.TOO_LARGE),
    "4 GiB": (b"\xff" * 4, Reason.TOO_LARGE),
    "an empty frame": (bytes(4), Reason.MALFORMED),
    "noise": (b"\x00\x00\x00\x08" + b"\xc1" * 8, Reason.MALFORMED),
    "a number": (b"\x00\x00\x00\x01\x07", Reason.MALFORMED),
    "a map without a tag": (b"\x00\x00\x00\x01\x80", Reason.MALFORMED),
    "text that is none": (b"\x00\x00\x00\x03\xa2\xff\xfe", Reason.MALFORMED),
    "very deep": (len(NESTED).to_bytes(4, "big") + NESTED, Reason.MALFORMED),
    "an array that promises a lot": (b"\x00\x00\x00\x05\xdd\xff\xff\xff\xff", Reason.MALFORMED),
}


class Unheard(msgspec.Struct, frozen=True, tag=True):
    """A message that no version has."""


class WatchHeadsAndMore(msgspec.Struct, frozen=True, tag="WatchHeads"):
    term: int = 0
    after: int = -1
    more: str = "x"


@pytest.mark.parametrize("alpn", [ALPN_CONTROL, ALPN_BLOBS])
@pytest.mark.parametrize("name", FRAMES)
async def test_what_is_no_message_is_refused(siege: Swarm, alpn: bytes, name: str) -> None:
    raw, reason = FRAMES[name]
    async with Rogue(siege, f"babbler {alpn} {name}") as rogue:
        stream = await (await rogue.connect(alpn)).open_stream()
        await stream.write(raw)
        assert await reason_of(receive_reply(stream, messages.Accepted)) == reason


@pytest.mark.parametrize(
    ("message", "alpn"),
    [
        (Unheard(), ALPN_CONTROL),
        (Unheard(), ALPN_BLOBS),
        (WatchHeadsAndMore(), ALPN_CONTROL),
        (messages.GetChunk(bytes(32)), ALPN_CONTROL),
        (messages.WatchHeads(0, -1), ALPN_BLOBS),
        (messages.RunEnded("it is over"), ALPN_CONTROL),
        (messages.Welcome(b"", ""), ALPN_CONTROL),
    ],
)
async def test_a_message_out_of_place_is_refused(
    siege: Swarm, message: msgspec.Struct, alpn: bytes
) -> None:
    async with Rogue(siege, f"confused {message} {alpn}") as rogue:
        stream = await (await rogue.connect(alpn)).open_stream()
        await send(stream, message)
        assert await reason_of(receive_reply(stream, messages.Accepted)) == Reason.MALFORMED


async def test_a_chunk_that_is_not_there_is_refused_at_once(siege: Swarm) -> None:
    async with Rogue(siege, "seeker") as rogue:
        connection = await rogue.connect(ALPN_BLOBS)
        start = time.monotonic()
        for wait_ms in (0, 60_000):
            stream = await connection.open_stream()
            await send(stream, messages.GetChunk(b"?" * 32, wait_ms))
            assert await reason_of(receive_reply(stream, messages.ChunkFollows)) == Reason.NOT_FOUND
        assert time.monotonic() - start < 30.0


async def test_a_peer_that_floods_is_limited_and_others_are_served(siege: Swarm) -> None:
    async with Rogue(siege, "flood") as flood, Rogue(siege, "patient") as patient:
        await patient.hello()
        await flood.control()
        began = time.monotonic()
        asking = [asyncio.create_task(flood.head()) for _ in range(4 * int(UNPROVEN_BURST))]
        assert (await patient.work()).lease_id
        answered = sum(one.done() and one.exception() is None for one in asking)
        seconds = time.monotonic() - began  # after the count: what may be answered only grows
        assert answered <= UNPROVEN_BURST + UNPROVEN_PER_SECOND * seconds + 1
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def refusal(rogue: Rogue) -> Reason:
    """Why a request is refused, once one is: asked far more slowly than the limit of requests."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                await rogue.head()
            except Refused as error:
                return error.reason
            await asyncio.sleep(0.1)


async def test_streams_that_are_held_open_are_limited_and_others_are_served(siege: Swarm) -> None:
    async with Rogue(siege, "holder") as holder, Rogue(siege, "calm") as calm:
        await calm.hello()
        connection = await holder.control()
        watches = [await connection.open_stream() for _ in range(40)]
        for stream in watches:
            await send(stream, messages.WatchHeads(9, 9))
        assert await refusal(holder) == Reason.RATE_LIMITED
        assert (await calm.work()).lease_id
        for stream in watches:
            await stream.abort()


async def test_connections_of_one_peer_are_limited_and_others_are_served(siege: Swarm) -> None:
    async with Rogue(siege, "dialler") as dialler, Rogue(siege, "quiet") as quiet:
        await quiet.hello()
        connections = [await dialler.connect() for _ in range(CONNECTIONS_PER_PEER + 5)]
        await until(lambda: sum(one.closed for one in connections) >= 5)
        assert sum(one.closed for one in connections) == 5
        assert (await quiet.work()).lease_id


async def test_a_stream_that_ends_in_the_middle_harms_nobody(siege: Swarm) -> None:
    whole = msgspec.msgpack.encode(messages.WatchHeads(0, -1))
    async with Rogue(siege, "stutterer") as rogue:
        connection = await rogue.control()
        for piece in (b"", b"\x00", b"\x00\x00\x00\x20", b"\x00\x00\x00\x20" + whole[:5]):
            stream = await connection.open_stream()
            await stream.write(piece)
            await stream.finish()
            with pytest.raises(TransportError):
                await receive_reply(stream, messages.Heads | messages.SubmitFrom)  # type: ignore[arg-type]
        assert await rogue.head()
