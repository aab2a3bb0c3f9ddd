"""Byte streams of a block: integers in byte planes, small integers with escapes, zstd frames.

The size of every stream is known before it is read; a frame that announces another one is refused
before anything is allocated. (python-zstandard ignores max_output_size when a frame announces its size.)
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from .errors import CodecError

LEVEL = 1
"""zstd level: 3 and 9 gain at most 2 % on these streams and cost 2 to 8 times the time."""
MAX_STREAM = 1 << 20
"""Bytes of the longest stream: one byte plane of a full block. Also bounds the zstd window."""

ESCAPE = 255
U32 = struct.Struct("<I")
Bytes = NDArray[np.uint8]


def planes(values: NDArray[Any], width: int) -> list[Bytes]:
    """The `width` low bytes of unsigned `values`, lowest first, each as its own array."""
    return [
        (values >> (8 * i)).astype(np.uint8) if i else values.astype(np.uint8) for i in range(width)
    ]


def merge(parts: Sequence[Bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Inverse of planes(), as `dtype`."""
    out = parts[-1].astype(dtype)
    for part in reversed(parts[:-1]):
        out <<= 8
        out |= part
    return out


class StreamWriter:
    """Collects the streams of one block. Not for two threads at once."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=LEVEL)
        self._parts: list[bytes] = []

    def uint32(self, value: int) -> None:
        """Append one number."""
        self._parts.append(U32.pack(value))

    def stream(self, values: Bytes) -> None:
        """Append bytes: nothing when empty, else a coded length and the shortest coding.

        Length 0 stands for all zeros, the full length for stored bytes, anything between for a
        zstd frame.
        """
        if not values.size:
            return
        if not values.any():
            self.uint32(0)
            return
        frame = self._zstd.compress(values.data)
        coded = frame if len(frame) < values.size else values.tobytes()
        self.uint32(len(coded))
        self._parts.append(coded)

    def planes(self, values: NDArray[Any], width: int) -> None:
        """Append `width` byte planes of unsigned values."""
        for part in planes(values, width):
            self.stream(part)

    def small(self, values: NDArray[Any], width: int) -> None:
        """Append mostly small unsigned values: one byte each, 255 and above as escapes in planes."""
        escaped = values >= ESCAPE
        large = values[escaped]
        low = values.astype(np.uint8)
        low[escaped] = ESCAPE
        self.stream(low)
        self.planes(large, width)

    def finish(self) -> bytes:
        """All that was appended."""
        return b"".join(self._parts)


class StreamReader:
    """Reads what StreamWriter wrote from untrusted bytes; every fault is a CodecError."""

    def __init__(self, body: bytes | memoryview) -> None:
        self._body = memoryview(body)
        self._at = 0

    def uint32(self) -> int:
        """The next number."""
        (value,) = U32.unpack(self._take(U32.size))
        return value

    def stream(self, size: int) -> Bytes:
        """The next stream, of exactly `size` bytes, at most MAX_STREAM."""
        if not size:
            return np.empty(0, np.uint8)
        coded = self.uint32()
        if coded == 0:
            return np.zeros(size, np.uint8)
        if coded > size:
            raise CodecError(f"stream of {size} bytes announces {coded} coded bytes")
        data = self._take(coded)
        return np.frombuffer(data if coded == size else inflate(data, size), np.uint8)

    def planes(self, count: int, width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The next `count` unsigned values, from `width` planes."""
        return merge([self.stream(count) for _ in range(width)], dtype)

    def small(self, count: int, width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The next `count` values that StreamWriter.small() wrote."""
        low = self.stream(count)
        escaped = low == ESCAPE
        values = low.astype(dtype)
        large = int(np.count_nonzero(escaped))
        if large:
            values[escaped] = self.planes(large, width, dtype)
        return values

    def finish(self) -> None:
        """Refuse bytes after the last stream."""
        if self._at != len(self._body):
            raise CodecError(f"{len(self._body) - self._at} bytes after the end of a block")

    def _take(self, size: int) -> memoryview:
        if size > len(self._body) - self._at:
            raise CodecError("block ends inside a stream")
        self._at += size
        return self._body[self._at - size : self._at]


def inflate(frame: memoryview, size: int) -> bytes:
    """Decompress one zstd frame of exactly `size` bytes, which it must announce itself."""
    try:
        announced = zstandard.get_frame_parameters(frame)
        if announced.content_size != size or announced.dict_id:
            raise CodecError(f"zstd frame does not announce the {size} bytes that are due")
        if announced.window_size > MAX_STREAM:
            raise CodecError(f"zstd window of {announced.window_size} bytes exceeds {MAX_STREAM}")
        plain = zstandard.ZstdDecompressor(max_window_size=MAX_STREAM).decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if len(plain) != size:
        raise CodecError(f"zstd frame holds {len(plain)} bytes, {size} are due")
    return plain
