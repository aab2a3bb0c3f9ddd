"""Code deltas of large models in several processes.

Where the positions of what changed are known, coding a block is many short operations on arrays, and Python's
threads wait for each other's lock at each of them: for 0.6 B weights on 16 cores 0.6 s with two threads, 0.8 s
with sixteen, 0.3 s with four processes. Where states are compared first, most of the time is long
operations, and threads are as fast: no process is asked then. Processes get numbers and give bytes, those of
encode_delta().
"""

import logging
import os
import queue
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .blocks import BLOCK, SKIP, SMALL, encode_block, is_large
from .codec import encode_delta
from .encoder_process import Coded, EncoderProcess, code_all
from .errors import CodecError
from .moves import Bits, measure
from .payload import DELTA, blocks_of, framed, header, layout_of, ordered
from .state import Changed, State

logger = logging.getLogger(__name__)

MAX_PROCESSES = 16
GROUP = 8
"""Blocks that a process gets at once."""
THREADS = 4
"""Where states are compared; more wait for each other."""
WORTH_IT = 1 << 22
"""Changes below which, and elements to compare above which threads are as good; 0.1 s of work for one core."""
GONE = "an encoding process is gone (%s): coding here"
"""Killed for memory, say. What it would have done is done here; it ends with the others."""

Positions = NDArray[np.int64]
NONE = np.empty(0, np.int64)
Work = tuple[Bits, Bits, str, Sequence[slice], Positions]
"""Bits before and after, dtype, consecutive blocks, and positions that may have changed."""


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

    def start(self) -> None:
        """Start the processes, if they are not running; encode_delta() does it when there is need."""
        for _ in range(self._count - len(self._running)):
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
        """What codec.encode_delta() gives, and raises; by processes where enough positions are known."""
        if changed is None or self._count < 2:
            return encode_delta(base, new, threads=min(THREADS, self._count), changed=changed)
        if layout_of(base) != layout_of(new):
            raise CodecError(
                "base and new state differ in names, types or shapes: publish an anchor"
            )
        unknown = [name for name in new if changed.get(name, NONE) is None]
        to_compare = sum(new[name].data.size for name in unknown)
        known = sum(hint.size for hint in changed.values() if hint is not None)
        if to_compare >= WORTH_IT or to_compare + known < WORTH_IT:
            return encode_delta(base, new, threads=min(THREADS, self._count), changed=changed)
        found = {name: np.flatnonzero(base[name].data != new[name].data) for name in unknown}
        self.start()
        return self._encode(base, new, {**changed, **found})

    def _encode(self, base: State, new: State, changed: Changed) -> Iterator[bytes]:
        layout = layout_of(new)
        yield header(DELTA, layout)
        jobs = (
            ((base[name].data, new[name].data, dtype, parts, positions),)
            for name, dtype, shape in layout
            for positions in (changed.get(name, NONE),)
            for parts in _groups(list(blocks_of(shape)))
        )
        for group in ordered(self._code, jobs, len(self._running)):
            for method, body in group:
                yield framed(method, body)

    def _code(self, work: Work) -> list[Coded]:
        """The coded blocks of one group: by a process, if anything changed."""
        base, new, dtype, parts, positions = work
        edges = [parts[0].start, *(part.stop for part in parts)]
        low, high = np.searchsorted(positions, (edges[0], edges[-1]))
        where = positions[low:high]
        old, now = base.take(where), new.take(where)
        differ = old != now
        if not differ.all():
            where, old, now = where[differ], old[differ], now[differ]
        if not where.size:
            return [(SKIP, b"")] * len(parts)
        counts = np.diff(np.searchsorted(where, edges)).tolist()
        blocks = [
            (part.stop - part.start, count) for part, count in zip(parts, counts, strict=True)
        ]
        coded = self._ask(blocks, where & (BLOCK - 1), measure(old, now, dtype))
        at = 0
        for number, (part, (size, count)) in enumerate(zip(parts, blocks, strict=True)):
            # As encode_block(): such a block may be shorter as it stands.
            if size <= SMALL or is_large(coded[number][1], new[part]):
                hint = where[at : at + count] - part.start
                coded[number] = encode_block(base[part], new[part], dtype, hint)
            at += count
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


def _groups(parts: Sequence[slice]) -> Iterator[Sequence[slice]]:
    return (parts[at : at + GROUP] for at in range(0, len(parts), GROUP))
