"""Frames as bytes, sans I/O: u32 length of the head, the head in MessagePack, body, trail, tensors.

A reader checks the head against the limits of the plan before it allocates the rest. A relay
passes the bytes on and never looks into body, trail and tensors. A head of length 0 is a beat: still there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import LocalProtocolError, Reason, RemoteProtocolError
from ...protocol.manifests import Version
from ...protocol.pipelines import MAX_STAGES, PipelineShape
from ...protocol.session import decode as decode_struct
from ...protocol.version import KIB, MIB

Array = NDArray[Any]


class Kind(StrEnum):
    """What a frame is for."""

    RESET = "reset"
    """A chain begins: forget all sequences. Comes back once the ring is whole."""
    SWITCH = "switch"
    """Write the weights that were prepared for the version in `number`; what follows is computed by them."""
    STEP = "step"
    """A micro-batch: what to compute, and what the stage before made of it."""
    DRAWN = "drawn"
    """From the last stage: the tokens drawn in the micro-batch of that number."""
    FAULT = "fault"
    """A stage cannot go on; `body` says why, in words. The chain is of no use any more."""
    PING = "ping"
    """Comes back unchanged."""


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: Kind
    epoch: int
    """Of the chain; frames of an older one are dropped."""
    number: int
    """Of the micro-batch, counted by stage 0; of a SWITCH the version; of a FAULT the stage whose fault it is,
    as far as the sender knows."""
    body: bytes = b""
    """What the engine wants to say, encoded by it without pickle."""
    tensors: tuple[Array, ...] = ()
    """Hidden states [tokens, width] first; bfloat16 as uint16 bits (`BITS`)."""
    trail: bytes = b""
    """Fingerprints of the boundaries so far, as trails.py packs them."""
    busy_us: int = 0
    """Longest time that one stage needed for this micro-batch so far, microseconds."""
    waited_us: int = 0
    """Time that it lay in the queues of stages that were busy with others."""


BITS = np.dtype(np.uint16)
"""How bfloat16 is held where numpy has none."""


PREFIX_BYTES = 4
BEAT = bytes(PREFIX_BYTES)
MAX_HEAD = 16 * KIB
MAX_BODY = 64 * MIB
MAX_TENSORS = 8
BODY_PER_SEQUENCE = 4 * KIB
"""Room for what a step says of a sequence apart from its tokens and blocks."""
BODY_PER_TOKEN = 12
"""A token id and its share of a block's number in MessagePack, with room to spare."""
PROJECTION_BYTES = 8
MAX_WORDS = 4 * KIB
"""Of a FAULT."""

Buffer = bytes | memoryview
DType = Literal["float32", "float16", "uint16", "uint8", "int8", "int32", "int64"]
Dim = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Micros = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class TensorHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a tensor looks like."""

    dtype: DType
    shape: Annotated[tuple[Dim, ...], msgspec.Meta(max_length=4)]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything of a frame but its contents."""

    kind: Kind
    epoch: Version
    number: Version
    body: Size
    """Bytes."""
    trail: Size
    """Bytes."""
    tensors: Annotated[tuple[TensorHead, ...], msgspec.Meta(max_length=MAX_TENSORS)] = ()
    busy_us: Micros = 0
    waited_us: Micros = 0

    @property
    def size(self) -> int:
        """Bytes that follow the head."""
        return self.body + self.trail + sum(one.size for one in self.tensors)


@dataclass(frozen=True)
class FrameLimits:
    """The most bytes of each part that a plan has any use for."""

    body: int
    trail: int
    tensors: int

    @classmethod
    def of(cls, shape: PipelineShape) -> "FrameLimits":
        """Of the frames between stages of that shape.

        A body may describe every sequence with all of its tokens; two states of a token (hidden and residual)
        with a scale each may travel; every token may have a fingerprint at every boundary.
        """
        width = 4 if shape.dtype == "float32" else 2
        sequence = BODY_PER_TOKEN * shape.max_model_len + BODY_PER_SEQUENCE
        return cls(
            body=min(MAX_BODY, 64 * KIB + shape.max_sequences * sequence),
            trail=KIB + shape.max_step_tokens * PROJECTION_BYTES * MAX_STAGES,
            tensors=2 * shape.max_step_tokens * (shape.hidden_size * width + 4),
        )

    def fault(self, head: Head) -> str:
        """What of a frame is too large; "" if nothing."""
        body = self.body if head.kind in (Kind.STEP, Kind.DRAWN) else MAX_WORDS
        tensors = sum(one.size for one in head.tensors)
        sizes = (("body", head.body, body), ("trail", head.trail, self.trail))
        for name, size, limit in (*sizes, ("tensors", tensors, self.tensors)):
            if size > limit:
                return f"{name} of {size} bytes in a {head.kind} frame, at most {limit} here"
        return ""


def encode(frame: Frame, limits: FrameLimits) -> list[Buffer]:
    """The buffers that say `frame`, in order; those of tensors are views of them where these are contiguous.

    Raises LocalProtocolError for a frame that no stage would accept.
    """
    tensors = [np.ascontiguousarray(one) for one in frame.tensors]
    try:
        head = Head(
            frame.kind,
            frame.epoch,
            frame.number,
            len(frame.body),
            len(frame.trail),
            tuple(TensorHead(_name(one), one.shape) for one in tensors),
            frame.busy_us,
            frame.waited_us,
        )
        raw = msgspec.msgpack.encode(head)
        read_head(raw, limits)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"a frame that no stage would take: {error.detail}") from error
    contents = [one.data.cast("B") for one in tensors if one.size]
    start = len(raw).to_bytes(PREFIX_BYTES, "big") + raw
    return [start, *(part for part in (frame.body, frame.trail) if part), *contents]


def head_size(prefix: bytes) -> int:
    """Bytes of the head that follows; 0 for a beat. Raises RemoteProtocolError(TOO_LARGE)."""
    size = int.from_bytes(prefix, "big")
    if size > MAX_HEAD:
        raise RemoteProtocolError(
            Reason.TOO_LARGE, f"a frame's head of {size} bytes, at most {MAX_HEAD} here"
        )
    return size


def read_head(raw: bytes, limits: FrameLimits) -> Head:
    """The head in `raw`; only then may `head.size` bytes be read. Raises RemoteProtocolError."""
    head = decode_struct(raw, Head)
    if fault := limits.fault(head):
        raise RemoteProtocolError(Reason.TOO_LARGE, fault)
    return head


def decode(head: Head, contents: bytes | bytearray | memoryview) -> Frame:
    """The frame whose head is followed by `contents`, of `head.size` bytes; tensors are views if possible."""
    view = memoryview(contents)
    if len(view) != head.size:
        raise RemoteProtocolError(
            Reason.MALFORMED, f"{len(view)} bytes in a frame that says {head.size}"
        )
    at = head.body + head.trail
    tensors: list[Array] = []
    for one in head.tensors:
        data = np.frombuffer(view[at : at + one.size], np.dtype(one.dtype))
        # Behind a body of any length numbers may lie across words, which not every kernel reads.
        tensors.append((data if data.flags.aligned else data.copy()).reshape(one.shape))
        at += one.size
    return Frame(
        head.kind,
        head.epoch,
        head.number,
        bytes(view[: head.body]),
        tuple(tensors),
        bytes(view[head.body : head.body + head.trail]),
        head.busy_us,
        head.waited_us,
    )


def fault_frame(epoch: int, rank: int, words: str) -> Frame:
    """A FAULT of stage `rank` in that epoch."""
    return Frame(Kind.FAULT, epoch, max(0, rank), words.encode()[:MAX_WORDS])


def words_of(contents: Sequence[int] | bytes) -> str:
    """The text of a FAULT as one printable line; it may come from a stranger."""
    text = bytes(contents)[:MAX_WORDS].decode(errors="replace")
    return "".join(char if char.isprintable() else " " for char in text)


def _name(array: Array) -> DType:
    name = array.dtype.name
    if name not in DTYPES:
        raise LocalProtocolError(f"a tensor of {name} does not travel: {', '.join(DTYPES)} do")
    return name  # type: ignore[return-value]


DTYPES: tuple[DType, ...] = ("float32", "float16", "uint16", "uint8", "int8", "int32", "int64")


PIECE = 256 * KIB
"""Of a frame's contents: each has to come in time, so a large frame may take longer than a small one."""
JOINED = 512 * KIB
"""Contents up to this size leave together with their head."""

Read = Callable[[int], Awaitable[bytes]]
Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class Packet:
    """One frame, as it is on the wire."""

    head: Head
    start: bytes
    """Length of the head, and the head."""
    contents: bytes

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return len(self.start) + len(self.contents)

    @property
    def kind(self) -> Kind:
        """What it is for."""
        return self.head.kind

    async def write(self, write: Write) -> None:
        """All of it."""
        if len(self.contents) <= JOINED:
            await write(self.start + self.contents)
            return
        await write(self.start)
        await write(self.contents)


def packet(frame: Frame, limits: FrameLimits) -> Packet:
    """`frame`, said by a relay itself."""
    start, *contents = encode(frame, limits)
    start = bytes(start)
    return Packet(read_head(start[PREFIX_BYTES:], limits), start, b"".join(contents))


async def read_packet(
    read: Read, limits: FrameLimits, *, patience_s: float | None
) -> Packet | None:
    """The next frame; None for a beat. Every piece has to come within `patience_s` seconds.

    Raises RemoteProtocolError for bytes that are no frame or too large, TimeoutError, and what `read` raises.
    """

    async def timely(size: int) -> bytes:
        async with asyncio.timeout(patience_s):
            return await read(size)

    prefix = await timely(PREFIX_BYTES)
    size = head_size(prefix)
    if not size:
        return None
    raw = await timely(size)
    head = read_head(raw, limits)
    pieces = [await timely(min(PIECE, head.size - start)) for start in range(0, head.size, PIECE)]
    contents = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Packet(head, prefix + raw, contents)
