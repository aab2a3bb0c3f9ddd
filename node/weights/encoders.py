"""Deltas of large models, coded by several processes.

Coding a block is many short operations on arrays, and Python's threads pass one lock around for each of
them: sixteen threads code slower than one. The processes get numbers and give bytes, those of encode_delta().
"""

import logging
import os
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from .blocks import (
    BLOCK,
    DENSE_FROM,
    SKIP,
    SMALL,
    compare,
    encode_block,
    is_large,
)
from .codec import encode_delta, hint_of
from .encoder_process import Coded, EncoderProcess, code_all
from .errors import CodecError
from .moves import (
    Bits,
    Changes,
    find,
    measure,
)
from .payload import (
    DELTA,
    blocks_of,
    framed,
    header,
    layout_of,
    ordered,
)
from .state import Changed, State

logger = logging.getLogger(__name__)

MAX_PROCESSES = 16
GROUP = 8
"""Blocks that a process gets at once."""
SAMPLE = 1 << 12
"""Elements of a tensor looked at to see whether most of them changed."""
WORTH_IT = 1 << 22
"""Elements to look at below which threads are as good: 0.1 s of work for one core."""
GONE = "an encoding process is gone (%s): coding here"
"""Killed for memory, say. What it would have done is done here; it ends with the others."""

Positions = NDArray[np.int64]
NONE = np.empty(0, np.int64)
Work = tuple[Bits, Bits, str, Sequence[slice], Positions]
"""Bits before and after, dtype, consecutive blocks, and positions that may have changed."""


@dataclass(frozen=True)
class _Sent:
    """A block that is being coded: by a process, unless it is done."""

    base: Bits
    new: Bits
    dtype: str
    process: EncoderProcess | None = None
    done: Coded | None = None

    def result(self) -> Coded:
        """The coded block."""
        coded = self.done
        if self.process is not None:
            try:
                coded = self.process.receive(self.new.nbytes // 2)
            except (OSError, EOFError) as error:
                logger.warning(GONE, error)
        # As encode_block(): without such a short answer, the block may be shorter as it stands.
        return coded or encode_block(self.base, self.new, self.dtype)


def _share(base: State, new: State) -> float:
    """About which share of the elements changed, from a sample of every tensor."""
    found = 0.0
    for name, tensor in new.items():
        every = slice(None, None, max(1, tensor.data.size // SAMPLE))
        differ = base[name].data[every] != tensor.data[every]
        found += float(differ.mean()) * tensor.data.size if differ.size else 0.0
    return found / max(1, sum(tensor.data.size for tensor in new.values()))


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
        """What codec.encode_delta() gives, and raises. Little to do is done without a process."""
        hints = [NONE if one is None else one for one in (changed or {}).values()]
        untold = sum(
            tensor.data.size
            for name, tensor in new.items()
            if changed is None or changed.get(name, NONE) is None
        )
        few = sum(hint.size for hint in hints) + untold < WORTH_IT
        if self._count < 2 or few or not hasattr(os, "memfd_create"):
            return encode_delta(base, new, threads=self._count, changed=changed)
        if layout_of(base) != layout_of(new):
            raise CodecError(
                "base and new state differ in names, types or shapes: publish an anchor"
            )
        if untold and _share(base, new) >= DENSE_FROM:
            # Long operations on whole blocks: threads do not wait for each other, and nothing is copied.
            return encode_delta(base, new, threads=self._count, changed=changed)
        self.start()
        return (
            self._compare(base, new, changed) if untold else self._encode(base, new, changed or {})
        )

    def _compare(self, base: State, new: State, changed: Changed | None) -> Iterator[bytes]:
        """Without threads: two read two states no faster than one, and wait for each other's lock."""
        yield header(DELTA, layout_of(new))
        turns = cycle(self._running)
        sent: deque[_Sent] = deque()
        try:
            for name, dtype, shape in layout_of(new):
                for part in blocks_of(shape):
                    old, now = base[name].data[part], new[name].data[part]
                    found = _look(old, now, dtype, hint_of(changed, name, part))
                    if len(sent) == len(self._running):
                        yield framed(*sent.popleft().result())
                    sent.append(_send(next(turns), old, now, dtype, found))
            while sent:
                yield framed(*sent.popleft().result())
        finally:
            for block in sent:  # answers that nobody waits for any more
                block.result()

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


def _look(base: Bits, new: Bits, dtype: str, hint: Positions | None) -> Changes | Bits | None:
    """What a process is to code; None for a block that is done faster here."""
    if new.size <= SMALL:
        return None
    return compare(base, new, dtype) if hint is None else find(base, new, dtype, hint)


def _send(
    process: EncoderProcess, base: Bits, new: Bits, dtype: str, found: Changes | Bits | None
) -> _Sent:
    if found is None:
        return _Sent(base, new, dtype)
    if isinstance(found, Changes) and not found.index.size:
        return _Sent(base, new, dtype, done=(SKIP, b""))
    try:
        process.send(found, new.size)
    except OSError as error:
        logger.warning(GONE, error)
        return _Sent(base, new, dtype)
    return _Sent(base, new, dtype, process)


def _groups(parts: Sequence[slice]) -> Iterator[Sequence[slice]]:
    return (parts[at : at + GROUP] for at in range(0, len(parts), GROUP))
