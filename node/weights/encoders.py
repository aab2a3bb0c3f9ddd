"""Deltas of large models, coded by several processes.

Coding a block is many short operations on arrays, and Python's threads pass one lock around for each of
them: sixteen threads code slower than one. The processes get numbers and give bytes, those of encode_delta().
"""

import logging
import os
import queue
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .blocks import BLOCK, SKIP, SMALL, encode_block, encode_changes
from .codec import encode_delta
from .errors import CodecError
from .moves import Bits, Changes, measure
from .payload import DELTA, blocks_of, framed, header, layout_of, ordered
from .state import Changed, State

logger = logging.getLogger(__name__)

MAX_PROCESSES = 16
PIPE = 1 << 20
"""Bytes that a pipe holds: with the usual 64 KiB both ends wait for each other all the time."""
GROUP = 8
"""Blocks that a process gets at once."""
WORTH_IT = 1 << 22
"""Changed elements below which threads are as good: 0.1 s of work for one core."""

_HEAD = struct.Struct("<II")
"""Bytes of an element, blocks."""
_TABLE = np.dtype([("size", "<u4"), ("count", "<u4")])
_CODED = np.dtype([("method", "<u4"), ("length", "<u4")])
_PLACE = np.dtype("<u4")

Coded = tuple[int, bytes]
Work = tuple[Bits, Bits, str, Sequence[slice], NDArray[np.int64] | None]
"""Bits before and after, dtype, consecutive blocks, and positions that may have changed."""


class Encoders:
    """Processes that are started when they are first of use; leaving ends them.

    One caller at a time.
    """

    def __init__(self, processes: int = 0) -> None:
        """`processes`: 0 for one a core."""
        self._count = processes or min(MAX_PROCESSES, os.cpu_count() or 1)
        self._running: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that were started."""
        return [process.pid for process in self._running]

    def start(self) -> None:
        """Start the processes, if they are not running; encode_delta() does it when there is need."""
        for _ in range(self._count - len(self._running)):
            process = _Process()
            self._running.append(process)
            self._idle.put(process)

    def close(self) -> None:
        """End the processes."""
        running, self._running, self._idle = self._running, [], queue.SimpleQueue()
        for process in running:
            process.end()

    def encode_delta(self, base: State, new: State, changed: Changed | None) -> Iterator[bytes]:
        """What codec.encode_delta() gives, and raises. Without `changed` no process is asked."""
        told = [one.size for one in (changed or {}).values() if one is not None]
        if changed is None or self._count < 2 or sum(told) < WORTH_IT:
            return encode_delta(base, new, threads=self._count, changed=changed)
        if layout_of(base) != layout_of(new):
            raise CodecError(
                "base and new state differ in names, types or shapes: publish an anchor"
            )
        self.start()
        return self._encode(base, new, changed)

    def _encode(self, base: State, new: State, changed: Changed) -> Iterator[bytes]:
        layout = layout_of(new)
        yield header(DELTA, layout)
        none = np.empty(0, np.int64)
        jobs = (
            ((base[name].data, new[name].data, dtype, parts, changed.get(name, none)),)
            for name, dtype, shape in layout
            for parts in _groups(list(blocks_of(shape)))
        )
        for group in ordered(self._code, jobs, len(self._running)):
            for method, body in group:
                yield framed(method, body)

    def _code(self, work: Work) -> list[Coded]:
        """The coded blocks of one group: by a process, if there are changes at known places."""
        base, new, dtype, parts, positions = work
        if positions is None:
            return [encode_block(base[part], new[part], dtype) for part in parts]
        edges = [parts[0].start, *(part.stop for part in parts)]
        low, high = np.searchsorted(positions, (edges[0], edges[-1]))
        where = positions[low:high]
        old, now = base.take(where), new.take(where)
        differ = old != now
        if not differ.all():
            where, old, now = where[differ], old[differ], now[differ]
        if not where.size:
            return [(SKIP, b"")] * len(parts)
        counts = np.diff(np.searchsorted(where, edges))
        moves = measure(old, now, dtype)
        coded = self._ask(parts, counts, (where & (BLOCK - 1)).astype(_PLACE), moves)
        ends = np.cumsum(counts)
        for number, part in enumerate(parts):
            # As encode_block(): such a block may be shorter as it stands.
            if part.stop - part.start <= SMALL or len(coded[number][1]) * 2 > new[part].nbytes:
                hint = where[ends[number] - counts[number] : ends[number]] - part.start
                coded[number] = encode_block(base[part], new[part], dtype, hint)
        return coded

    def _ask(
        self, parts: Sequence[slice], counts: NDArray[Any], index: NDArray[Any], moves: Bits
    ) -> list[Coded]:
        table = np.empty(len(parts), _TABLE)
        table["size"] = [part.stop - part.start for part in parts]
        table["count"] = counts
        process = self._idle.get()
        try:
            return process.code(table, index, moves)
        except (OSError, EOFError) as error:
            # Killed for memory, say. What it would have done is done here; it ends with the others.
            logger.warning("an encoding process is gone (%s): coding here", error)
            return _code_all(table, index, moves)
        finally:
            self._idle.put(process)


class _Process:
    """One process, by its pipes."""

    def __init__(self) -> None:
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE,
            env=os.environ | one,
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

    def code(self, table: NDArray[Any], index: NDArray[Any], moves: Bits) -> list[Coded]:
        """What encode_changes() makes of every block of `table`."""
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
    """What a process does: answer until the input ends."""
    while head := source.read(_HEAD.size):
        width, blocks = _HEAD.unpack(head)
        table = _read(source, _TABLE, blocks)
        total = int(table["count"].sum())
        index = _read(source, _PLACE, total)
        coded = _code_all(table, index, _read(source, np.dtype(f"<u{width}"), total))
        answer = np.empty(blocks, _CODED)
        answer["method"] = [method for method, _ in coded]
        answer["length"] = [len(body) for _, body in coded]
        sink.write(answer.tobytes())
        sink.writelines(body for _, body in coded)
        sink.flush()


def _code_all(table: NDArray[Any], index: NDArray[Any], moves: Bits) -> list[Coded]:
    coded: list[Coded] = []
    at = 0
    for size, count in table.tolist():
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


def _groups(parts: Sequence[slice]) -> Iterator[Sequence[slice]]:
    return (parts[at : at + GROUP] for at in range(0, len(parts), GROUP))


if __name__ == "__main__":
    with open(0, "rb", closefd=False) as source, open(1, "wb", closefd=False) as sink:
        serve(source, sink)
