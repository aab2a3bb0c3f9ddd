"""TOPLOC inside vLLM's worker: the largest numbers of every 32 hidden states, found on the device.

A ring on the device holds the last 64 hidden states of each request, as bfloat16: two blocks, because
vLLM may throw away its latest tokens and draw them again. When a block is full its 128 largest numbers
are found, for all requests whose blocks are full at once; the last, short block follows when the
request is collected. Positions and bit patterns go to the host, where the node makes proofs of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..fingerprints.toploc import BLOCK, PER_TOKEN

RING = 2 * BLOCK

Ints = NDArray[np.int64]
Later = Callable[[Callable[[], None]], None]
"""Calls its argument once everything enqueued on the device until now is done."""


class Largest:
    """The largest numbers of the blocks of every slot."""

    def __init__(self, device: torch.device, slots: int, width: int) -> None:
        self._device, self._width = device, width
        # one more than slots: the first takes the rows of prompts
        self._ring = torch.zeros((slots + 1, RING, width), dtype=torch.bfloat16, device=device)
        self._blocks: dict[int, dict[int, bytes]] = {}
        self._asked: dict[int, int] = {}

    def grow(self, slots: int) -> None:
        """Make room for so many slots."""
        ring = torch.zeros(
            (slots + 1, RING, self._width), dtype=torch.bfloat16, device=self._device
        )
        ring[: len(self._ring)] = self._ring
        self._ring = ring

    def start(self, slot: int) -> None:
        """A new request has this slot."""
        self._blocks[slot] = {}
        self._asked.pop(slot, None)

    def add(self, hidden: Tensor, chosen: Any, slots: Ints, rows: Ints, later: Later) -> None:
        """Take the hidden states [n, width] of a step.

        Those at `chosen` led to the tokens number `rows` of `slots`; the others are of no use.
        """
        places = np.zeros(len(hidden), np.int64)
        places[chosen] = (slots + 1) * RING + rows % RING
        self._ring.view(-1, self._width).index_copy_(
            0, upload(places, self._device), hidden.to(torch.bfloat16)
        )
        full = rows % BLOCK == BLOCK - 1
        if full.any():
            self._find(slots[full], rows[full] // BLOCK, later)

    def finish(self, asked: Sequence[tuple[int, int]], later: Later) -> None:
        """Begin with the short last blocks of slots that ended after so many tokens."""
        new = [
            (slot, count)
            for slot, count in asked
            if count % BLOCK and self._asked.get(slot) != count
        ]
        if new:
            self._asked |= dict(new)
            slots, counts = np.array(new, np.int64).T
            self._find(slots, counts // BLOCK, later, counts % BLOCK)

    def complete(self, slot: int, count: int) -> bool:
        """Whether collected() has every block of `count` tokens."""
        blocks = self._blocks[slot]
        return all(block in blocks for block in range(-(-count // BLOCK))) and (
            not count % BLOCK or self._asked.get(slot) == count
        )

    def collected(self, slot: int, count: int) -> bytes:
        """The blocks one after the other, each of t tokens: 4 t positions int32, 4 t patterns int16."""
        return b"".join(self._blocks[slot][block] for block in range(-(-count // BLOCK)))

    def _find(self, slots: Ints, blocks: Ints, later: Later, tokens: Ints | None = None) -> None:
        """Find the largest numbers of one block of each slot, of which `tokens` are there (None: 32)."""
        halves = upload((slots + 1) * 2 + blocks % 2, self._device)
        numbers = self._ring.view(-1, BLOCK * self._width).index_select(0, halves)
        size = numbers.abs()
        longest = BLOCK
        if tokens is not None:
            longest = int(tokens.max())
            beyond = np.arange(BLOCK)[None, :] >= tokens[:, None]
            mask = upload(beyond.astype(np.int64), self._device).bool()
            size.view(len(slots), BLOCK, -1).masked_fill_(mask[:, :, None], -1.0)
        # sorted, so that a shorter block's are the first of them
        index = size.topk(PER_TOKEN * longest, sorted=tokens is not None).indices
        patterns = to_host(numbers.view(torch.int16).gather(1, index))
        positions = to_host(index.to(torch.int32))
        counts = [BLOCK] * len(slots) if tokens is None else tokens.tolist()

        def file() -> None:
            found = zip(slots.tolist(), blocks.tolist(), counts, strict=True)
            for row, (slot, block, count) in enumerate(found):
                most = PER_TOKEN * count
                where, what = positions[row, :most].numpy(), patterns[row, :most].numpy()
                self._blocks[slot][block] = where.tobytes() + what.tobytes()

        later(file)


def upload(numbers: Ints, device: torch.device) -> Tensor:
    """A copy on the device; nobody waits for it."""
    found = torch.from_numpy(numbers)
    if device.type == "cpu":
        return found.clone()
    return found.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, there once what is enqueued until now is done."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
