"""A process that codes blocks of changes, seen from both ends.

Only numbers and bytes go across, by pipes: what a process is sent cannot make it run anything else.
"""

import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from io import BufferedIOBase
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .blocks import encode_changes
from .moves import Bits, Changes

PIPE = 1 << 20
"""Bytes that a pipe holds: with the usual 64 KiB both ends wait for each other all the time."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 26)}
"""For glibc: arrays come from the heap, which is not given back after each of them to be zeroed anew."""

_HEAD = struct.Struct("<II")
"""Bytes of an element, and the number of blocks."""
_TABLE = np.dtype([("size", "<u4"), ("count", "<u4")])
_CODED = np.dtype([("method", "<u4"), ("length", "<u4")])
_PLACE = np.dtype("<u4")

Coded = tuple[int, bytes]


class EncoderProcess:
    """One process, by its pipes. Not for two threads at once."""

    def __init__(self) -> None:
        alone = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE,
            env=os.environ | alone | KEEP_MEMORY,
            start_new_session=True,  # a terminal's ctrl-C is not for it: it ends with its input
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out: Any = self._process.stdin
        self._in: Any = self._process.stdout

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def code(
        self, blocks: Sequence[tuple[int, int]], index: NDArray[Any], moves: Bits
    ) -> list[Coded]:
        """What encode_changes() makes of `blocks`: of each the size, and the number of its changes."""
        table = np.array(blocks, _TABLE)
        index = index.astype(_PLACE)
        self._out.write(_HEAD.pack(moves.itemsize, table.size))
        for array in (table, index, moves):
            self._out.write(array.view(np.uint8).data)
        self._out.flush()
        coded = _read(self._in, _CODED, table.size)
        bodies = _read(self._in, np.dtype(np.uint8), int(coded["length"].sum())).tobytes()
        ends = np.cumsum(coded["length"], dtype=np.int64).tolist()
        starts = [0, *ends[:-1]]
        return [
            (int(method), bodies[start:end])
            for method, start, end in zip(coded["method"], starts, ends, strict=True)
        ]

    def end(self) -> None:
        """Close its input, upon which it leaves, and wait for that."""
        try:
            self._out.close()
        except BrokenPipeError:  # it has left
            pass
        self._in.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(source: BufferedIOBase, sink: BinaryIO) -> None:
    """Answer until the input ends."""
    while head := source.read(_HEAD.size):
        width, blocks = _HEAD.unpack(head)
        dtype = np.dtype(f"<u{width}")
        table = _read(source, _TABLE, blocks)
        total = int(table["count"].sum())
        index = _read(source, _PLACE, total)
        coded = code_all(table.tolist(), index, _read(source, dtype, total))
        sink.write(np.array([(method, len(body)) for method, body in coded], _CODED).tobytes())
        sink.writelines(body for _, body in coded)
        sink.flush()


def code_all(blocks: Sequence[tuple[int, int]], index: NDArray[Any], moves: Bits) -> list[Coded]:
    """What EncoderProcess.code() gives, made here."""
    coded: list[Coded] = []
    at = 0
    for size, count in blocks:
        part = slice(at, at + count)
        changes = Changes(index[part].astype(np.int64), moves[part])
        coded.append(encode_changes(changes, size))
        at += count
    return coded


def _read(source: BufferedIOBase, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """The next `count` values. Raises EOFError."""
    values = np.empty(count, dtype)
    view = memoryview(values.view(np.uint8).data)
    while view.nbytes:
        size = source.readinto(view)
        if not size:
            raise EOFError("the pipe ends early")
        view = view[size:]
    return values


if __name__ == "__main__":
    with (
        open(0, "rb", closefd=False) as source,
        open(1, "wb", closefd=False) as sink,
    ):
        serve(source, sink)
