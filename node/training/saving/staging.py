"""Copies of a learner in the host's memory: made in moments, written while training goes on. Imports torch.

The same memory is used for every copy, page-locked where it is copied from a GPU: so a copy is that of its
checkpoint only until the next one is made.
"""

import logging
import math

import torch

from .shards import Slice

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 28
"""Page-locked memory is given in powers of two: small slices share a piece of it."""
ALIGNED = 64


class HostRoom:
    """Host memory for the slices of one learner. One thread at a time."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._pinned = torch.cuda.is_available()

    def copy(self, slices: list[Slice]) -> list[Slice]:
        """Copies of `slices`, complete when this returns."""
        copies: list[Slice] = []
        for one in slices:
            held = self._held.get(one.name)
            if held is None or held.shape != one.data.shape or held.dtype != one.data.dtype:
                held = self._held[one.name] = self._room(one.data)
            held.copy_(one.data, non_blocking=True)
            copies.append(Slice(one.name, one.offsets, held))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _room(self, data: torch.Tensor) -> torch.Tensor:
        size = data.numel() * data.element_size()
        if size > SLAB_BYTES:
            room = self._allocate(size)
        else:
            if self._slab.numel() < size:
                self._slab = self._allocate(SLAB_BYTES if data.is_cuda else size)
            room = self._slab[:size]
            self._slab = self._slab[math.ceil(size / ALIGNED) * ALIGNED :]
        return room.view(data.dtype).view(data.shape)

    def _allocate(self, size: int) -> torch.Tensor:
        if self._pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # the system gives no more of it
                logger.warning("copies for checkpoints take longer: %s", error)
                self._pinned = False
        return torch.empty(size, dtype=torch.uint8)
