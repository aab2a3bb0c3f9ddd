"""Encode and decode pipeline frames, without I/O.

Layout: u32 length of the head, head (MessagePack), body, trail, tensors.

A reader checks the head against the plan's limits before it allocates memory for the rest. A relay forwards
body, trail and tensors without decoding them. A head of length 0 is a beat (keepalive).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Annotated, Any, Literal, get_args

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
    """Frame types."""

    RESET = "reset"
    """Begin a ring epoch: drop all sequences. Travels the whole ring, so its return shows that the ring
    works."""
    SWITCH = "switch"
    """Apply the weights prepared for version `number`; later steps use them."""
    STEP = "step"
    """A micro-batch: its schedule, and the hidden states of the previous stage."""
    DRAWN = "drawn"
    """From the last stage: the tokens sampled in micro-batch `number`."""
    FAULT = "fault"
    """A stage failed; `body` holds the reason as text. Ends the ring epoch."""
    PING = "ping"
    """Travels the ring and returns unchanged."""


@dataclass(frozen=True)
class Frame:
    """One message between neighbouring stages, or between a node and its engine."""

    kind: Kind
    epoch: int
    """Ring epoch; frames of an older one are dropped."""
    number: int
    """Index of the micro-batch, counted by stage 0. In a SWITCH: the version. In a FAULT: the failed stage, as
    far as the sender knows."""
    body: bytes = b""
    """Payload of the engine, encoded without pickle."""
    tensors: tuple[Array, ...] = ()
    """Hidden states [tokens, width] first; bfloat16 as uint16 bits (`BITS`)."""
    trail: bytes = b""
    """Fingerprints of the boundaries so far, as packed by trails.py."""
    busy_us: int = 0
    """Compute time of the slowest stage so far, microseconds."""
    waited_us: int = 0
    """Time spent in the queues of busy stages, microseconds."""


BITS = np.dtype(np.uint16)
"""numpy dtype that holds bfloat16 bits, as numpy has no bfloat16."""


PREFIX_BYTES = 4
BEAT = bytes(PREFIX_BYTES)
MAX_HEAD = 16 * KIB
MAX_BODY = 64 * MIB
MAX_TENSORS = 8
BODY_PER_SEQUENCE = 4 * KIB
"""Bytes for a sequence's fields in a step, apart from its tokens and blocks."""
BODY_PER_TOKEN = 12
"""Bytes for a token id and its share of a block number in MessagePack, with a margin."""
FINGERPRINT_BYTES = 8
"""Bytes of one row's fingerprint (node/inference/fingerprint.py)."""
MAX_WORDS = 4 * KIB
"""Limit of a FAULT's text."""

Buffer = bytes | memoryview
DType = Literal["float32", "float16", "uint16", "uint8", "int8", "int32", "int64"]
DTYPES: tuple[DType, ...] = get_args(DType)
Dim = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Micros = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class TensorHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Dtype and shape of a tensor."""

    dtype: DType
    shape: Annotated[tuple[Dim, ...], msgspec.Meta(max_length=4)]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header of a frame: all fields, and the sizes of the contents."""

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
        return self.body + self.trail + sum(tensor.size for tensor in self.tensors)


@dataclass(frozen=True)
class FrameLimits:
    """Largest valid size of each part of a frame, in bytes."""

    body: int
    trail: int
    tensors: int

    @classmethod
    def of(cls, shape: PipelineShape) -> "FrameLimits":
        """Derive the limits for pipelines of this shape.

        Room for a body that describes every sequence with all its tokens, for two states per token (hidden and
        residual) with a scale each, and for a fingerprint of every token at every boundary.
        """
        width = 4 if shape.dtype == "float32" else 2
        sequence = BODY_PER_TOKEN * shape.max_model_len + BODY_PER_SEQUENCE
        return cls(
            body=min(MAX_BODY, 64 * KIB + shape.max_sequences * sequence),
            trail=KIB + shape.max_step_tokens * FINGERPRINT_BYTES * MAX_STAGES,
            tensors=2 * shape.max_step_tokens * (shape.hidden_size * width + 4),
        )

    def fault(self, head: Head) -> str:
        """Describe the part of a frame that is too large; "" if none is."""
        body = self.body if head.kind in (Kind.STEP, Kind.DRAWN) else MAX_WORDS
        tensors = sum(tensor.size for tensor in head.tensors)
        sizes = (("body", head.body, body), ("trail", head.trail, self.trail))
        for name, size, limit in (*sizes, ("tensors", tensors, self.tensors)):
            if size > limit:
                return f"{name} of {size} bytes in a {head.kind} frame, at most {limit} here"
        return ""


def encode(frame: Frame, limits: FrameLimits) -> list[Buffer]:
    """Encode `frame` as buffers to send in order; contiguous tensors are not copied.

    Raises LocalProtocolError for a frame that exceeds `limits`, which no stage would accept.
    """
    tensors = [np.ascontiguousarray(tensor) for tensor in frame.tensors]
    try:
        head = Head(
            frame.kind,
            frame.epoch,
            frame.number,
            len(frame.body),
            len(frame.trail),
            tuple(TensorHead(_name(tensor), tensor.shape) for tensor in tensors),
            frame.busy_us,
            frame.waited_us,
        )
        raw = msgspec.msgpack.encode(head)
        read_head(raw, limits)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"no stage would accept this frame: {error.detail}") from error
    contents = [tensor.data.cast("B") for tensor in tensors if tensor.size]
    start = len(raw).to_bytes(PREFIX_BYTES, "big") + raw
    return [start, *(part for part in (frame.body, frame.trail) if part), *contents]


def head_size(prefix: bytes) -> int:
    """Read the length of the head from its prefix; 0 is a beat.

    Raises RemoteProtocolError(TOO_LARGE).
    """
    size = int.from_bytes(prefix, "big")
    if size > MAX_HEAD:
        raise RemoteProtocolError(
            Reason.TOO_LARGE, f"a frame's head has {size} bytes, at most {MAX_HEAD} are allowed"
        )
    return size


def read_head(raw: bytes, limits: FrameLimits) -> Head:
    """Decode a head and check it against `limits`, before its `size` bytes are read.

    Raises RemoteProtocolError.
    """
    head = decode_struct(raw, Head)
    if fault := limits.fault(head):
        raise RemoteProtocolError(Reason.TOO_LARGE, fault)
    return head


def decode(head: Head, contents: bytes | bytearray | memoryview) -> Frame:
    """Decode the contents that follow a head, `head.size` bytes.

    Aligned tensors are views of them. Raises RemoteProtocolError(MALFORMED) for another size.
    """
    view = memoryview(contents)
    if len(view) != head.size:
        raise RemoteProtocolError(
            Reason.MALFORMED, f"a frame has {len(view)} bytes, its head says {head.size}"
        )
    at = head.body + head.trail
    tensors: list[Array] = []
    for tensor in head.tensors:
        data = np.frombuffer(view[at : at + tensor.size], np.dtype(tensor.dtype))
        # The body may have any length, which leaves tensors unaligned; not every kernel reads those.
        tensors.append((data if data.flags.aligned else data.copy()).reshape(tensor.shape))
        at += tensor.size
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
    """Make a FAULT frame that blames stage `rank`."""
    return Frame(Kind.FAULT, epoch, max(0, rank), words.encode()[:MAX_WORDS])


def words_of(contents: Sequence[int] | bytes) -> str:
    """Decode a FAULT's text as one printable line; it is untrusted."""
    text = bytes(contents)[:MAX_WORDS].decode(errors="replace")
    return "".join(char if char.isprintable() else " " for char in text)


def _name(array: Array) -> DType:
    name = array.dtype.name
    if name not in DTYPES:
        raise LocalProtocolError(
            f"a tensor of {name} cannot be sent: convert it to one of {', '.join(DTYPES)}"
        )
    return name  # type: ignore[return-value]


PIECE = 256 * KIB
"""Bytes of a frame's contents that are read under one timeout, so a large frame may take longer."""
JOINED = 512 * KIB
"""Contents up to this size are written together with their head."""

Read = Callable[[int], Awaitable[bytes]]
Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class Packet:
    """One encoded frame, with its head decoded."""

    head: Head
    start: bytes
    """Length prefix and encoded head."""
    contents: bytes

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return len(self.start) + len(self.contents)

    @property
    def kind(self) -> Kind:
        """The frame's type."""
        return self.head.kind

    async def write(self, write: Write) -> None:
        """Write the whole packet."""
        if len(self.contents) <= JOINED:
            await write(self.start + self.contents)
            return
        await write(self.start)
        await write(self.contents)


def packet(frame: Frame, limits: FrameLimits) -> Packet:
    """Encode `frame` as a packet, for frames that a relay creates. Raises LocalProtocolError."""
    start, *contents = encode(frame, limits)
    start = bytes(start)
    return Packet(read_head(start[PREFIX_BYTES:], limits), start, b"".join(contents))


async def read_packet(
    read: Read, limits: FrameLimits, *, patience_s: float | None
) -> Packet | None:
    """Read the next packet; None for a beat. Each piece must arrive within `patience_s` seconds.

    Raises RemoteProtocolError for malformed or oversized frames, TimeoutError, and the errors of `read`.
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
