"""The arithmetic of adjustment.py, for the rows of a batch that ask for it; no other row comes near it.

What a request has said is kept by position on the device, for those with penalties only: so a token that is
thrown away and drawn again counts once, and no step waits for the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .adjustment import Adjustment
from .transfers import upload_array

FIRST_ROWS = 4
"""Requests with penalties that there is room for at first; twice as many whenever there are more."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Penalties:
    """Those of N rows, and what each has said."""

    presence: Tensor
    """[N] fp32, as the next two."""
    frequency: Tensor
    repetition: Tensor
    starts: Tensor
    """[N] int64: positions of the first tokens of the completions."""
    history: Tensor
    """[requests, length] int32: token ids by position; those that were not drawn yet are any."""
    where: Tensor
    """[N] int64: rows of `history`. Row 0 is of those without penalties."""

    def apply(self, logits: Tensor, positions: Tensor, part: slice) -> Tensor:
        """`logits` [n, V] fp32 of the rows `part`, of which the tokens at `positions` are drawn next."""
        said = self.history.index_select(0, self.where[part]).long()
        places = torch.arange(said.shape[1], device=said.device)
        before = places < positions[:, None]
        drawn = before & (places >= self.starts[part][:, None])
        known = torch.zeros_like(logits).scatter_add_(1, said, before.float()) > 0
        counts = torch.zeros_like(logits).scatter_add_(1, said, drawn.float())
        by = self.repetition[part][:, None].expand_as(logits)
        by = torch.where(logits > 0, by.reciprocal(), by)
        found = torch.where(known, logits * by, logits)
        found -= self.frequency[part][:, None] * counts
        found -= self.presence[part][:, None] * (counts > 0)
        return found

    def note(self, positions: Tensor, tokens: Tensor, drawn: Tensor) -> None:
        """`tokens` [N] are at `positions` [N] now, where `drawn` [N] bool says so."""
        at = positions.clamp(max=self.history.shape[1] - 1)  # of rows that ended, and still compute
        place = (self.where, at)
        self.history.index_put_(place, torch.where(drawn, tokens.int(), self.history[place]))


@dataclass(frozen=True)
class Adjusted:
    """What is done to the logits of N rows; narrower ones than the widest are padded with what does nothing."""

    min_p: Tensor
    """[N] fp32."""
    biased: Tensor
    """[N, B] int64, token ids."""
    bias: Tensor
    """[N, B] fp32."""
    ends: Tensor
    """[N, E] int64: tokens that cannot be drawn at positions below `until`."""
    until: Tensor
    """[N] int64."""
    penalties: Penalties | None

    def apply(self, logits: Tensor, positions: Tensor, part: slice) -> Tensor:
        """`logits` [n, V] fp32 of the rows `part` as they go to the temperature; the given ones stay."""
        found = logits.scatter_add(1, self.biased[part], self.bias[part])
        ends, early = self.ends[part], positions < self.until[part]
        found.scatter_(1, ends, found.gather(1, ends).masked_fill(early[:, None], -torch.inf))
        if self.penalties is None:
            return found
        return self.penalties.apply(found, positions, part)

    def cut(self, scaled: Tensor, part: slice) -> Tensor:
        """Logits / temperature [n, V] of the rows `part` without those that min_p leaves out."""
        shares = torch.softmax(scaled, -1)
        least = shares.amax(-1, keepdim=True) * self.min_p[part][:, None]
        return scaled.masked_fill(shares < least, -torch.inf)


@dataclass(frozen=True)
class _Asked:
    """A request with an adjustment."""

    adjustment: Adjustment
    start: int
    """Position of the first token of its completion."""
    row: int
    """Of the history; 0 is none."""


class Adjusting:
    """The adjustments of the requests of an engine, by the number that it gives each."""

    def __init__(self, device: torch.device, length: int) -> None:
        """`length`: the most tokens of a sequence."""
        self._device, self._length = device, length
        self._asked: dict[int, _Asked] = {}
        self._history: Tensor | None = None
        self._free: list[int] = []

    def start(self, slot: int, adjustment: Adjustment, prompt: Sequence[int]) -> None:
        """A request begins. What adjusted() gave before is of no use then."""
        self.leave(slot)
        row = 0
        if adjustment.penalises:
            row = self._row()
            assert self._history is not None  # _row() made it
            tokens = upload_array(np.array(prompt, np.int64), self._device)
            self._history[row, : len(prompt)] = tokens.int()
        self._asked[slot] = _Asked(adjustment, len(prompt) - adjustment.drawn, row)

    def leave(self, slot: int) -> None:
        """The request of this number is over, or had none."""
        asked = self._asked.pop(slot, None)
        if asked is not None and asked.row:
            self._free.append(asked.row)

    def has(self, slot: int) -> bool:
        """Whether the request of this number has an adjustment."""
        return slot in self._asked

    def wanted(self, slots: Ints) -> Ints:
        """At which places of `slots` are requests with adjustments."""
        if not self._asked:
            return np.empty(0, np.int64)
        return np.flatnonzero([slot in self._asked for slot in slots.tolist()])

    def adjusted(self, slots: Ints) -> Adjusted:
        """What is done to rows of these requests, all of which have adjustments."""
        asked = [self._asked[slot] for slot in slots.tolist()]
        changes = [one.adjustment for one in asked]
        ends = [one.ends if one.min_tokens else () for one in changes]
        until = [
            one.start + one.adjustment.min_tokens if kept else 0
            for one, kept in zip(asked, ends, strict=True)
        ]
        return Adjusted(
            min_p=self._numbers([one.min_p for one in changes]),
            biased=self._ids([[token for token, _ in one.bias] for one in changes]),
            bias=self._table([[value for _, value in one.bias] for one in changes]),
            ends=self._ids(ends),
            until=upload_array(np.array(until, np.int64), self._device),
            penalties=self._penalties(asked),
        )

    def _penalties(self, asked: Sequence[_Asked]) -> Penalties | None:
        if self._history is None or not any(one.row for one in asked):
            return None
        changes = [one.adjustment for one in asked]
        return Penalties(
            presence=self._numbers([one.presence for one in changes]),
            frequency=self._numbers([one.frequency for one in changes]),
            repetition=self._numbers([one.repetition for one in changes]),
            starts=upload_array(np.array([one.start for one in asked], np.int64), self._device),
            history=self._history,
            where=upload_array(np.array([one.row for one in asked], np.int64), self._device),
        )

    def _row(self) -> int:
        """A row of the history that nobody has."""
        if not self._free:
            old = self._history
            held = 0 if old is None else len(old)
            size = max(1 + FIRST_ROWS, 2 * held)
            history = torch.zeros((size, self._length), dtype=torch.int32, device=self._device)
            if old is not None:
                history[:held] = old
            self._history, self._free = history, list(range(max(1, held), size))
        return self._free.pop()

    def _numbers(self, values: Sequence[float]) -> Tensor:
        """[N] fp32."""
        return self._table([[value] for value in values])[:, 0]

    def _table(self, rows: Sequence[Sequence[float]]) -> Tensor:
        """[N, longest, at least 1] fp32, filled up with 0."""
        columns = np.zeros((len(rows), max(1, *map(len, rows))), np.float64)
        for column, row in zip(columns, rows, strict=True):
            column[: len(row)] = row
        return upload_array(columns.view(np.int64), self._device).view(torch.float64).float()

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[N, longest, at least 1] int64, filled up with the first of each row, or with 0."""
        columns = np.zeros((len(rows), max(1, *map(len, rows))), np.int64)
        for column, row in zip(columns, rows, strict=True):
            column[:] = row[0] if row else 0
            column[: len(row)] = row
        return upload_array(columns, self._device)
