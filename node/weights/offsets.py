"""Where every tensor begins in a payload: noted as it is made, so that others can fetch a part of it.

Offsets stand in the signed manifest; wrong ones cost a download, for every tensor is proved by its own digest.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ...protocol.manifests import Artifact
from .blocks import BLOCK
from .errors import CodecError
from .payload import HEADER_BYTES, Layout
from .state import numel


class Offsets:
    """Watches one payload go by, block by block as codec.py gives it."""

    def __init__(self, layout: Sequence[Layout]) -> None:
        """`layout` of the state, by name."""
        self._blocks = [-(-numel(shape) // BLOCK) for _, _, shape in layout]
        self._found: list[int] = []

    def watch(self, payload: Iterable[bytes]) -> Iterator[bytes]:
        """`payload` unchanged: its header, then one item for every block."""
        parts = iter(payload)
        head = next(parts)
        at = len(head)
        yield head
        for blocks in self._blocks:
            self._found.append(at)
            for _ in range(blocks):
                block = next(parts)
                at += len(block)
                yield block
        yield from parts

    @property
    def found(self) -> tuple[int, ...]:
        """Where the first block of each tensor begins, in the order of the layout; once all has gone by."""
        return tuple(self._found)


def regions(artifact: Artifact, count: int) -> list[tuple[int, int]]:
    """Where each of `count` tensors, by name, begins and ends in the payload.

    Raises CodecError for offsets that make no sense; the artifact has some.
    """
    edges = (*artifact.offsets, artifact.size)
    rising = all(before <= after for before, after in pairwise(edges))
    if len(artifact.offsets) != count or edges[0] != HEADER_BYTES or not rising:
        raise CodecError("the offsets of an artifact do not fit its tensors")
    if sum(chunk.size for chunk in artifact.chunks) != artifact.size:
        raise CodecError("the chunks of an artifact are not as large as the whole")
    return list(pairwise(edges))
