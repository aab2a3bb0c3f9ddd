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
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..process.spawn import without_secrets
from .blocks import Block, Coded, encode_changes, encode_found
from .codec import NONE, encode_delta
from .sparse import Changes
from .state import Changed, State

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


class EncoderProcess:
    """One process, by its pipes. Not for two threads at once."""

    def __init__(self) -> None:
        alone = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=PIPE,
            env=without_secrets(os.environ) | alone | KEEP_MEMORY,
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

    def code(self, changes: Changes, counts: Sequence[int], sizes: Sequence[int]) -> list[Coded]:
        """Do encode_changes()."""
        table = np.array([*zip(sizes, counts, strict=True)], _TABLE)
        index = changes.index.astype(_PLACE)
        self._out.write(_HEAD.pack(changes.moves.itemsize, table.size))
        for array in (table, index, changes.moves):
            self._out.write(array.view(np.uint8).data)
        self._out.flush()
        coded = _read(self._in, _CODED, table.size)
        bodies = _read(self._in, np.dtype(np.uint8), int(coded["length"].sum())).tobytes()
        ends = np.cumsum(coded["length"], dtype=np.int64).tolist()
        return [
            (method, bodies[start:end])
            for method, (start, end) in zip(
                coded["method"].tolist(), pairwise([0, *ends]), strict=True
            )
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
        changes = Changes(index, _read(source, dtype, total))
        coded = encode_changes(changes, table["count"].tolist(), table["size"].tolist())
        sink.write(np.array([(method, len(body)) for method, body in coded], _CODED).tobytes())
        sink.writelines(body for _, body in coded)
        sink.flush()


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
        in_threads = min(THREADS, self._count)
        if changed is None or self._count < 2:
            return encode_delta(base, new, threads=in_threads, changed=changed)
        to_compare = sum(new[name].data.size for name in new if changed.get(name, NONE) is None)
        known = sum(positions.size for positions in changed.values() if positions is not None)
        if to_compare >= MOST_COMPARED or to_compare + known < WORTH_IT:
            return encode_delta(base, new, threads=in_threads, changed=changed)
        self.start(max(2, known // SHARE))
        threads = len(self._running)
        return encode_delta(base, new, threads=threads, changed=changed, encode=self._encode)

    def _encode(self, blocks: Sequence[Block]) -> list[Coded]:
        return encode_found(blocks, self._ask)

    def _ask(self, changes: Changes, counts: Sequence[int], sizes: Sequence[int]) -> list[Coded]:
        if not changes.index.size:
            return encode_changes(changes, counts, sizes)
        process = self._idle.get()
        try:
            return process.code(changes, counts, sizes)
        except (OSError, EOFError) as error:
            logger.warning(GONE, error)
            return encode_changes(changes, counts, sizes)
        finally:
            self._idle.put(process)


if __name__ == "__main__":
    with (
        open(0, "rb", closefd=False) as source,
        open(1, "wb", closefd=False) as sink,
    ):
        serve(source, sink)
