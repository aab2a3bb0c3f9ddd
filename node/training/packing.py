"""From samples of many lengths to padded micro-batches of few shapes. No torch.

Each row of a micro-batch is one sample from position 0, padded on the right: with causal attention a
sample sees itself only, so no mask has to keep neighbours apart and nothing can leak. Rows are sorted by
length, which leaves little padding; nothing is truncated, what does not fit is returned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .backend import Sample

PADDING_ID = 0
"""Padding is never attended to and never trained; any id of the vocabulary would do."""


@dataclass(frozen=True)
class MicroBatch:
    """B samples of at most T tokens, all arrays [B, T]; `mask` is False on padding and position 0."""

    token_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class Packed:
    """The micro-batches of a step; `too_long` are the samples that no micro-batch may hold."""

    micro_batches: list[MicroBatch]
    too_long: list[Sample]

    @property
    def tokens(self) -> int:
        """Trained tokens of the step: what losses are divided by."""
        return sum(micro_batch.tokens for micro_batch in self.micro_batches)


def pack(samples: Iterable[Sample], seq_len: int, *, token_budget: int | None = None) -> Packed:
    """Longest first into micro-batches of B * T <= token_budget (default: seq_len).

    Samples longer than `seq_len` are returned, not cut: half a rollout has no reward. Samples without a
    trained token are left out. The order is a function of the samples alone.
    """
    budget = max(token_budget or seq_len, seq_len)
    fitting: list[Sample] = []
    too_long: list[Sample] = []
    for sample in samples:
        if len(sample.token_ids) > seq_len:
            too_long.append(sample)
        elif any(sample.mask[1:]):
            fitting.append(sample)
    fitting.sort(key=lambda sample: -len(sample.token_ids))
    micro_batches: list[MicroBatch] = []
    start = 0
    while start < len(fitting):
        rows = max(1, budget // len(fitting[start].token_ids))
        micro_batches.append(_pad(fitting[start : start + rows]))
        start += rows
    return Packed(micro_batches, too_long)


def _pad(rows: Sequence[Sample]) -> MicroBatch:
    """One micro-batch; rows[0] is the longest."""
    shape = (len(rows), len(rows[0].token_ids))
    token_ids = np.full(shape, PADDING_ID, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    logprobs = np.zeros(shape, dtype=np.float32)
    advantages = np.zeros(shape, dtype=np.float32)
    for row, sample in enumerate(rows):
        length = len(sample.token_ids)
        token_ids[row, :length] = sample.token_ids
        mask[row, :length] = sample.mask
        logprobs[row, :length] = sample.logprobs
        advantages[row, :length] = sample.advantage
    mask[:, 0] = False  # nothing before it that could have predicted it
    return MicroBatch(token_ids, mask, logprobs, advantages)
