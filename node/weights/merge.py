"""Several deltas in a row as one: moves add up, so neither state is needed to make it.

The result is the delta that encode_delta() would make of the first base and the last state, byte for
byte, unless that stores a block raw: whoever merges the same deltas makes the same chunks.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...protocol.manifests import TensorInfo
from .blocks import decode_changes, encode_changes
from .errors import CodecError
from .moves import (
    Changes,
    measure,
    unzigzag,
    where,
)
from .payload import (
    DELTA,
    Layout,
    PayloadReader,
    blocks_of,
    check_layout,
    framed,
    header,
    ordered,
)
from .state import BITS

MAX_MERGED = 64
"""Deltas in one: each is read through its own window, some blocks and a chunk at a time."""

_Body = tuple[int, memoryview]
"""Method and bytes of one block of one delta."""


def merge(
    payloads: Sequence[Iterable[bytes]], tensors: Sequence[TensorInfo], *, threads: int = 1
) -> Iterator[bytes]:
    """One delta that does what `payloads`, oldest first, do one after the other; block by block.

    All are deltas of states laid out as `tensors`. Holds a few coded blocks of each payload and what
    its iterator holds. Raises CodecError, also at a raw block: such a delta cannot be merged.
    """
    if not 0 < len(payloads) <= MAX_MERGED:
        raise CodecError(f"{len(payloads)} deltas to merge: give 1 to {MAX_MERGED}")
    readers = [PayloadReader(payload) for payload in payloads]
    return _merged(check_layout(tensors), readers, threads)


def combine(several: Sequence[Changes], size: int) -> Changes:
    """What `several` changes of one block of `size` elements, oldest first, come to; at least one."""
    some = [changes for changes in several if changes.index.size]
    if len(some) <= 1:
        return some[0] if some else several[0]
    moved = np.zeros(size, some[0].moves.dtype)
    for changes in some:
        moved[changes.index] += unzigzag(changes.moves)
    index = where(moved != 0)
    sums = moved[index]
    # Integers stand in their own order, so this is how far each sum is from 0, whatever moved.
    return Changes(index, measure(np.zeros_like(sums), sums, "I64"))


def _merged(
    layout: Sequence[Layout], readers: Sequence[PayloadReader], threads: int
) -> Iterator[bytes]:
    """All payloads in step: in deltas of one layout the tensors are cut into the same blocks."""
    for reader in readers:
        reader.header(DELTA, layout)
    yield header(DELTA, layout)
    jobs = (
        (name, dtype, part.stop - part.start, [reader.block(part, dtype) for reader in readers])
        for name, dtype, shape in layout
        for part in blocks_of(shape)
    )
    for method, body in ordered(_merge_block, jobs, threads):
        yield framed(method, body)
    for reader in readers:
        reader.finish()


def _merge_block(name: str, dtype: str, size: int, bodies: Sequence[_Body]) -> tuple[int, bytes]:
    """(method, body) of one block of all deltas together."""
    try:
        changes = [decode_changes(method, body, size, BITS[dtype]) for method, body in bodies]
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error
    return encode_changes(combine(changes, size), size)
