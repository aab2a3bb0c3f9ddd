"""The streams of bytes, bits and numbers that a block's body is made of.

The size of every stream is known before it is read; a zstd frame that announces another one is refused before
anything is allocated. (python-zstandard ignores max_output_size when a frame announces its size.)
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from .state import CodecError

MAX_STREAM = 1 << 20
"""Bytes of the longest stream: one byte plane of a full block. Also bounds the zstd window."""

HUFFMAN = zstandard.ZstdCompressionParameters(
    format=zstandard.FORMAT_ZSTD1_MAGICLESS,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    chain_log=6,
    search_log=1,
    target_length=0,
    window_log=MAX_STREAM.bit_length() - 1,
)
"""Nearly no search for repetitions: a delta has none, and those that zstd finds cost 5 to 15 % of size and
half of the speed. A target_length above 0 would switch Huffman off."""

SHORTEST = 48
"""Bytes below which a Huffman table costs more than it saves."""
STORED, ZEROS = 0, 1
"""Codes in place of a length, as no frame is so short: stored bytes, and only zeros."""

Bytes = NDArray[np.uint8]
PADS = [np.zeros(bits, np.uint8) for bits in range(8)]
"""What fills the last byte of a bit string, by the number of missing bits."""


def varint(value: int) -> bytes:
    """Write `value` in groups of seven bits, lowest first; all but the last have the high bit set."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(next_byte: Callable[[], int], most: int, what: str) -> int:
    """Read what varint() wrote; CodecError if it is above `most` or does not end."""
    value = 0
    for shift in range(0, most.bit_length() + 7, 7):
        byte = next_byte()
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value <= most:
            return value
        if byte < 0x80:
            break
    raise CodecError(f"{value} or more {what}, at most {most} are possible")


def plane(values: NDArray[Any], at: int) -> Bytes:
    """Take byte `at` of unsigned `values`, 0 being the lowest, as an array of its own."""
    return (values >> (8 * at)).astype(np.uint8) if at else values.astype(np.uint8)


def join_planes(parts: list[Bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Make unsigned integers from their byte planes, lowest first."""
    out = parts[-1].astype(dtype)
    for part in reversed(parts[:-1]):
        out <<= 8
        out |= part
    return out


def pack(parts: Iterable[Sequence[NDArray[Any]]]) -> list[memoryview]:
    """Write the bits of each part, which is several arrays, eight to a byte: each part begins with a byte."""
    arrays: list[NDArray[Any]] = [PADS[0]]
    ends = [0]
    for part in parts:
        bits = sum(array.size for array in part)
        arrays += part
        arrays.append(PADS[-bits % 8])
        ends.append(ends[-1] + (bits + 7) // 8)
    packed = np.packbits(np.concatenate(arrays)).data
    return [packed[start:end] for start, end in pairwise(ends)]


def coded_stream(values: Bytes) -> bytes:
    """Code bytes: nothing when empty, else a coded length and the shortest coding."""
    if not values.size:
        return b""
    if not values.any():
        return varint(ZEROS)
    frame = b"" if values.size < SHORTEST else _compressor().compress(values.data)
    if frame and len(frame) < values.size:
        return varint(len(frame)) + frame
    return varint(STORED) + values.tobytes()


def coded_planes(values: NDArray[Any]) -> bytes:
    """Code all byte planes of unsigned values."""
    return b"".join(coded_stream(plane(values, at)) for at in range(values.itemsize))


_of_thread = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """Return this thread's compressor: making one takes longer than a short stream."""
    if not hasattr(_of_thread, "compressor"):
        _of_thread.compressor = zstandard.ZstdCompressor(compression_params=HUFFMAN)
    return _of_thread.compressor


class StreamReader:
    """Reads numbers, bits and streams from untrusted bytes; every fault is a CodecError."""

    def __init__(self, body: bytes | memoryview) -> None:
        self._body = memoryview(body)
        self._at = 0

    def number(self, most: int, what: str) -> int:
        """Read a number; CodecError above `most`."""
        return read_varint(lambda: self._take(1)[0], most, what)

    def bits(self, count: int) -> memoryview:
        """Read `count` bits, eight to a byte."""
        return self._take((count + 7) // 8)

    def stream(self, size: int) -> Bytes:
        """Read a stream of exactly `size` bytes, at most MAX_STREAM."""
        if not size:
            return np.empty(0, np.uint8)
        coded = self.number(size - 1 or ZEROS, f"coded bytes of a stream of {size}")
        if coded == ZEROS:
            return np.zeros(size, np.uint8)
        if coded == STORED:
            return np.frombuffer(self._take(size), np.uint8)
        return np.frombuffer(inflate(self._take(coded), size), np.uint8)

    def planes(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Read `count` unsigned values from their byte planes."""
        return join_planes([self.stream(count) for _ in range(dtype.itemsize)], dtype)

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
    """Decompress one zstd frame without magic of exactly `size` bytes, which it must announce itself."""
    magicless = zstandard.FORMAT_ZSTD1_MAGICLESS
    try:
        announced = zstandard.get_frame_parameters(frame, format=magicless)
        if announced.content_size != size or announced.dict_id:
            raise CodecError(f"zstd frame does not announce the {size} bytes that are due")
        if announced.window_size > MAX_STREAM:
            raise CodecError(f"zstd window of {announced.window_size} bytes exceeds {MAX_STREAM}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_STREAM, format=magicless)
        plain = decompressor.decompress(
            frame, max_output_size=size, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if len(plain) != size:
        raise CodecError(f"zstd frame holds {len(plain)} bytes, {size} are due")
    return plain
