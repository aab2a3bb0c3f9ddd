"""Code deltas of many changes in several processes.

Where the positions of the changes are known, coding a block is many short operations on arrays, and Python's
threads wait for each other's lock at each of them: for 0.6 B weights on 16 cores 0.6 s with two threads, 0.8 s
with sixteen, 0.3 s with four processes. All other threads of a trainer wait with them: beside the coding of two
million changes a busy one has four times as much time with processes. Where states are compared first, most of
the time is long operations, and threads are as fast: no process is asked then. Processes get numbers and give
bytes, those of encode_delta().
"""

import logging
import os
import queue
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import accumulate, groupby, pairwise
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .blocks import (
    SKIP,
    SMALL,
    Bits,
    Changes,
    Positions,
    encode_block,
    encode_changes,
    is_large,
    measure,
)
from .codec import encode_delta
from .payload import DELTA, blocks_of, framed, header, layout_of, ordered, together
from .state import Changed, CodecError, State

PIPE = 1 << 20
"""Bytes that a pipe holds: with the usual 64 KiB both ends wait for each other all the time."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 26)}
"""Settings of glibc: arrays come from the heap, which is not given back and zeroed anew after each of
them."""

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
        """Process id."""
        return self._process.pid

    def code(
        self, blocks: Sequence[tuple[int, int]], index: NDArray[Any], moves: Bits
    ) -> list[Coded]:
        """Do encode_changes() for every one of `blocks`: (size, number of changes)."""
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
    """Do EncoderProcess.code() in this process."""
    coded: list[Coded] = []
    at = 0
    for size, count in blocks:
        part = slice(at, at + count)
        changes = Changes(index[part].astype(np.int64), moves[part])
        coded.append(encode_changes(changes, size))
        at += count
    return coded


def _read(source: BufferedIOBase, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Read the next `count` values. Raises EOFError."""
    values = np.empty(count, dtype)
    view = memoryview(values.view(np.uint8).data)
    while view.nbytes:
        size = source.readinto(view)
        if not size:
            raise EOFError("the pipe ends early")
        view = view[size:]
    return values


logger = logging.getLogger(__name__)

MAX_PROCESSES = 16
THREADS = 4
"""Threads that compare states; more wait for each other."""
WORTH_IT = 1 << 18
"""Changes below which threads are as good; 6 ms of work for one core."""
MOST_COMPARED = 1 << 20
"""Elements to compare above which threads are as good."""
SHARE = 1 << 19
"""Changes for each process."""
GONE = "an encoding process is gone (%s): coding here"
"""Logged when a process ended, killed for memory, say. This process then encodes; the others end with it."""

NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Block:
    """A block of a tensor, and positions in it that may have changed."""

    base: Bits
    new: Bits
    dtype: str
    hint: Positions


class Encoders:
    """Processes that are started when they are first of use; leaving ends them.

    One caller at a time.
    """

    def __init__(self, processes: int = 0) -> None:
        """`processes`: 0 for one a core."""
        self._count = processes or min(MAX_PROCESSES, os.cpu_count() or 1)
        self._running: list[EncoderProcess] = []
        self._idle: queue.SimpleQueue[EncoderProcess] = queue.SimpleQueue()

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that were started."""
        return [process.pid for process in self._running]

    def start(self, processes: int = 2) -> None:
        """Start processes, if fewer are running; encode_delta() does it when there is need."""
        for _ in range(min(self._count, processes) - len(self._running)):
            process = EncoderProcess()
            self._running.append(process)
            self._idle.put(process)

    def close(self) -> None:
        """End the processes."""
        running, self._running, self._idle = self._running, [], queue.SimpleQueue()
        for process in running:
            process.end()

    def encode_delta(
        self, base: State, new: State, changed: Changed | None = None
    ) -> Iterator[bytes]:
        """Do codec.encode_delta(), in processes where enough positions are known."""
        if changed is None or self._count < 2:
            return encode_delta(base, new, threads=min(THREADS, self._count), changed=changed)
        if layout_of(base) != layout_of(new):
            raise CodecError(
                "base and new state differ in names, types or shapes: publish a snapshot"
            )
        known: dict[str, Positions] = {}
        unknown: list[str] = []
        for name in new:
            positions = changed.get(name, NONE)
            if positions is None:
                unknown.append(name)
            else:
                known[name] = positions
        to_compare = sum(new[name].data.size for name in unknown)
        count = to_compare + sum(positions.size for positions in known.values())
        if to_compare >= MOST_COMPARED or count < WORTH_IT:
            return encode_delta(base, new, threads=min(THREADS, self._count), changed=changed)
        for name in unknown:
            known[name] = np.flatnonzero(base[name].data != new[name].data)
        self.start(max(2, count // SHARE))
        return self._encode(base, new, known)

    def _encode(self, base: State, new: State, changed: Mapping[str, Positions]) -> Iterator[bytes]:
        layout = layout_of(new)
        yield header(DELTA, layout)
        blocks = (
            _Block(base[name].data[part], new[name].data[part], dtype, hint)
            for name, dtype, shape in layout
            for part, hint in _hints(list(blocks_of(shape)), changed[name])
        )
        jobs = (
            (group,)
            for _, alike in groupby(blocks, lambda block: block.dtype)
            for group in together(alike, lambda block: (block.hint.size, block.new.size))
        )
        for coded in ordered(self._code, jobs, len(self._running)):
            for method, body in coded:
                yield framed(method, body)

    def _code(self, blocks: Sequence[_Block]) -> list[Coded]:
        """Code blocks of one dtype, in a process if anything changed."""
        edges = [0, *accumulate(block.hint.size for block in blocks)]
        index = np.concatenate([block.hint for block in blocks])
        old, now = (np.empty(index.size, blocks[0].new.dtype) for _ in range(2))
        for block, (start, end) in zip(blocks, pairwise(edges), strict=True):
            block.base.take(block.hint, out=old[start:end], mode="clip")  # none is clipped
            block.new.take(block.hint, out=now[start:end], mode="clip")
        differ = old != now
        if not differ.all():
            index, old, now = index[differ], old[differ], now[differ]
            edges = np.concatenate([[0], np.cumsum(differ)])[edges].tolist()
        if not index.size:
            return [(SKIP, b"")] * len(blocks)
        sizes = [
            (block.new.size, end - start)
            for block, (start, end) in zip(blocks, pairwise(edges), strict=True)
        ]
        coded = self._ask(sizes, index, measure(old, now, blocks[0].dtype))
        for number, block in enumerate(blocks):
            # As encode_block(): such a block may be shorter as it stands.
            if block.new.size <= SMALL or is_large(coded[number][1], block.new):
                hint = index[edges[number] : edges[number + 1]]
                coded[number] = encode_block(block.base, block.new, block.dtype, hint)
        return coded

    def _ask(self, blocks: Sequence[tuple[int, int]], index: Positions, moves: Bits) -> list[Coded]:
        process = self._idle.get()
        try:
            return process.code(blocks, index, moves)
        except (OSError, EOFError) as error:
            logger.warning(GONE, error)
            return code_all(blocks, index, moves)
        finally:
            self._idle.put(process)


def _hints(parts: Sequence[slice], positions: Positions) -> Iterator[tuple[slice, Positions]]:
    """Yield each block of a tensor with the positions in it, counted from its start."""
    edges = np.searchsorted(positions, [0, *(part.stop for part in parts)]).tolist()
    for part, (low, high) in zip(parts, pairwise(edges), strict=True):
        yield part, positions[low:high] - part.start


if __name__ == "__main__":
    with (
        open(0, "rb", closefd=False) as source,
        open(1, "wb", closefd=False) as sink,
    ):
        serve(source, sink)
