"""The lanes of a stage: keys and values of its layers for every sequence that is under way.

A row's tokens fill its slots from 0 on; what is behind them is never seen. Stage 0 says what to do
(lane_step.py), and what it says is checked against the plan's limits before anything is made of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ....protocol.pipelines import PipelineShape
from ...errors import EngineError
from ..transfers import upload
from .lane_step import NOTHING, Draws, LaneStep, Taken

if TYPE_CHECKING:
    from ..packed import Attend
    from ..qwen3 import Qwen3Network

SPARE = 32
"""Least slots to grow by."""


@dataclass
class Columns:
    """How each row of a lane draws, on the device; see sampling.draw()."""

    seeds: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    narrow: bool
    """Whether a row may draw from its likeliest tokens only."""

    @classmethod
    def of(cls, draws: Draws, device: torch.device) -> "Columns":
        """`draws` on the device. Raises EngineError if they are not of the same rows."""
        columns = (draws.seeds, draws.temperatures, draws.top_ks, draws.top_ps)
        if len({len(one) for one in columns}) != 1:
            raise EngineError("stage 0 says of different numbers of rows how they draw")
        types = (torch.int64, torch.float32, torch.int64, torch.float32)
        made = [
            upload(torch.tensor(one, dtype=kind), device)
            for one, kind in zip(columns, types, strict=True)
        ]
        return cls(*made, narrow=any(draws.top_ks) or min(draws.top_ps, default=1.0) < 1)

    def rows(self, rows: Tensor) -> "Columns":
        """Those of `rows` [N]."""
        taken = (one[rows] for one in self._tensors())
        return Columns(*taken, narrow=self.narrow)

    @classmethod
    def joined(cls, parts: Sequence["Columns"]) -> "Columns":
        """Those of all rows, in order."""
        columns = zip(*(one._tensors() for one in parts), strict=True)
        return cls(*map(torch.cat, columns), narrow=any(one.narrow for one in parts))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.seeds, self.temperatures, self.top_ks, self.top_ps

    def __len__(self) -> int:
        """Rows."""
        return len(self.seeds)


@dataclass
class Lane:
    """Rows of one length at most; `keys` and `values` are [layers, rows, KV, slots, D]."""

    keys: Tensor
    values: Tensor
    lengths: list[int]
    slots: int
    columns: Columns | None = None

    @property
    def room(self) -> int:
        """Tokens whose keys and values it may come to hold."""
        return len(self.lengths) * max(self.slots, self.keys.shape[3])

    def width(self, rows: Sequence[int], slots: int) -> int:
        """Tokens of each of `rows` that a copy of them for `slots` has to hold. Raises EngineError."""
        if rows and max(rows) >= len(self.lengths):
            raise EngineError("stage 0 names a row that its lane does not have")
        longest = max((self.lengths[row] for row in rows), default=0)
        return min(self.keys.shape[3], max(slots, longest))

    def take(self, rows: Sequence[int], slots: int, columns: Columns | None) -> "Lane":
        """A copy of `rows`, which draw by `columns`, or as before. Raises EngineError."""
        room = self.width(rows, slots)
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.keys.device)
        if columns is None and self.columns is not None:
            columns = self.columns.rows(index)
        if columns is not None and len(columns) != len(rows):
            raise EngineError("stage 0 does not say of every row how it draws")
        lengths = [self.lengths[row] for row in rows]
        keys, values = (
            one[:, :, :, :room].index_select(1, index) for one in (self.keys, self.values)
        )
        return Lane(keys, values, lengths, slots, columns)

    def grow(self, slots: int) -> None:
        """Make room for `slots` tokens a row."""
        more = slots - self.keys.shape[3]
        if more > 0:
            # zeros, not what was there: a slot that is masked still meets a product
            self.keys = F.pad(self.keys, (0, 0, 0, more))
            self.values = F.pad(self.values, (0, 0, 0, more))


class Lanes:
    """All lanes of a stage. One thread, under torch.inference_mode()."""

    def __init__(self, shape: PipelineShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._lanes: dict[int, Lane] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._lanes)

    def reset(self) -> None:
        """Forget them all."""
        self._lanes.clear()

    def step(self, network: "Qwen3Network", step: LaneStep, x: Tensor) -> tuple[Tensor, Lane]:
        """Put the lane in order and read `x` [T, d]: what comes of it [T, d], and the lane. Raises EngineError.

        T is the number of rows, or the tokens of `step.fill` one row after the other; `x` is overwritten.
        """
        lane = self._arrange(network, step)
        if step.fill:
            return self._fill(network, lane, step.fill, x), lane
        return self._next(network, lane, x), lane

    # -- which rows there are ----------------------------------------------------------------------

    def _arrange(self, network: "Qwen3Network", step: LaneStep) -> Lane:
        if step.slots > self._shape.max_model_len:
            raise EngineError("stage 0 wants sequences longer than the plan allows")
        lane = self._lanes.get(step.lane)
        sources = [(self._source(one), one) for one in step.taken]
        self._check_room(step, lane, sources)
        parts = [] if lane is None else [self._kept(lane, step)]
        parts += [self._taken(network, source, one, step.slots) for source, one in sources]
        for over in step.over:
            self._lanes.pop(over, None)
        lane = parts[0] if len(parts) == 1 else _joined(parts)
        lane.slots = step.slots
        self._lanes[step.lane] = lane
        return lane

    def _check_room(
        self, step: LaneStep, lane: Lane | None, sources: "list[tuple[Lane | None, Taken]]"
    ) -> None:
        """Raise EngineError if the plan has no room for that, before anything is copied."""
        if lane is None and not sources:
            raise EngineError("stage 0 names a lane that was never begun")
        rows, room = sum(len(one.rows) for _, one in sources), step.slots
        if lane is not None:
            kept = range(len(lane.lengths)) if step.keep is None else step.keep
            rows, room = rows + len(kept), max(room, lane.width(kept, step.slots))
        for source, one in sources:
            if source is not None:
                room = max(room, source.width(one.rows, step.slots))
        stay = {number for number in self._lanes if number not in step.over} - {step.lane}
        if rows * room + sum(self._lanes[one].room for one in stay) > self._shape.kv_tokens:
            raise EngineError("stage 0 wants more keys and values than the plan has room for")

    def _source(self, taken: Taken) -> Lane | None:
        """Whose rows are taken; None for those of nothing."""
        if taken.lane == NOTHING and any(taken.rows):
            raise EngineError("stage 0 names a row of nothing")
        if taken.lane != NOTHING and taken.lane not in self._lanes:
            raise EngineError("stage 0 takes rows of a lane that was never begun")
        return self._lanes.get(taken.lane)

    def _kept(self, lane: Lane, step: LaneStep) -> Lane:
        columns = None if step.draws is None else Columns.of(step.draws, self._device)
        if step.keep is not None:
            return lane.take(step.keep, step.slots, columns)
        if columns is not None:
            if len(columns) != len(lane.lengths):
                raise EngineError("stage 0 does not say of every row how it draws")
            lane.columns = columns
        return lane

    def _taken(
        self, network: "Qwen3Network", source: Lane | None, taken: Taken, slots: int
    ) -> Lane:
        columns = None if taken.draws is None else Columns.of(taken.draws, self._device)
        if source is not None:
            return source.take(taken.rows, slots, columns)
        rows = len(taken.rows)
        empty = network.empty_cache(rows, min(slots, SPARE)).zero_()
        return Lane(empty, empty.clone(), [0] * rows, slots, columns)

    # -- what they read ----------------------------------------------------------------------------

    def _fill(
        self, network: "Qwen3Network", lane: Lane, fill: Sequence[tuple[int, int]], x: Tensor
    ) -> Tensor:
        if len({row for row, _ in fill}) != len(fill) or max(fill)[0] >= len(lane.lengths):
            raise EngineError("stage 0 fills rows that the lane does not have")
        pieces = [(row, lane.lengths[row], count) for row, count in fill]
        if sum(count for _, count in fill) != len(x):
            raise EngineError("stage 0 sent other tokens than it says")
        longest = max(start + count for _, start, count in pieces)
        if longest > lane.slots:
            raise EngineError("stage 0 fills more slots than it said that there would be")
        lane.grow(longest)
        positions = torch.cat([torch.arange(at, at + count) for _, at, count in pieces])
        made = network.through(
            x, upload(positions, self._device), _attend_fill(network, lane, pieces)
        )
        for row, start, count in pieces:
            lane.lengths[row] = start + count
        return made

    def _next(self, network: "Qwen3Network", lane: Lane, x: Tensor) -> Tensor:
        if len(x) != len(lane.lengths) or not len(x):
            raise EngineError("stage 0 sent other tokens than the lane has rows")
        # a row that is at its end goes on writing its last slot until it is dropped; nobody reads it
        places = [min(length, lane.slots - 1) for length in lane.lengths]
        used = max(places) + 1
        if used > lane.keys.shape[3]:
            lane.grow(min(lane.slots, used + max(SPARE, used // 2)))
        at = upload(torch.tensor(places), self._device)
        made = network.through(x, at, _attend_next(lane, at, used, equal=min(places) + 1 == used))
        lane.lengths = [place + 1 for place in places]
        return made


def _joined(lanes: Sequence[Lane]) -> Lane:
    """All rows, in order."""
    room = max(one.keys.shape[3] for one in lanes)
    for one in lanes:
        one.grow(room)
    columns = [one.columns for one in lanes]
    held = [one for one in columns if one is not None]
    if held and len(held) < len(columns):
        raise EngineError("stage 0 does not say of every row how it draws")
    return Lane(
        torch.cat([one.keys for one in lanes], 1),
        torch.cat([one.values for one in lanes], 1),
        [length for one in lanes for length in one.lengths],
        lanes[0].slots,
        Columns.joined(held) if held else None,
    )


def _attend_fill(
    network: "Qwen3Network", lane: Lane, pieces: Sequence[tuple[int, int, int]]
) -> "Attend":
    """Attention of pieces (row, start, count) to what their rows hold, and to themselves."""
    counts = [count for _, _, count in pieces]
    fresh = network.among(counts) if not any(start for _, start, _ in pieces) else None

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = lane.keys[layer], lane.values[layer]
        for (row, start, count), k_part, v_part in zip(
            pieces, k.split(counts), v.split(counts), strict=True
        ):
            keys[row, :, start : start + count] = k_part.transpose(0, 1)
            values[row, :, start : start + count] = v_part.transpose(0, 1)
        if fresh is not None:
            return fresh(layer, q, k, v)
        parts = zip(pieces, q.split(counts), strict=True)
        return torch.cat([_look_back(part, keys, values, *piece) for piece, part in parts])

    return attend


def _look_back(q: Tensor, keys: Tensor, values: Tensor, row: int, start: int, count: int) -> Tensor:
    """q [count, H, D] at positions from `start` on, to all positions up to each."""
    end = start + count
    seen = torch.ones(count, end, dtype=torch.bool, device=q.device).tril(start)
    k, v = keys[row, :, :end][None], values[row, :, :end][None]
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=seen, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def _attend_next(lane: Lane, at: Tensor, used: int, *, equal: bool) -> "Attend":
    """Attention of one token a row, at slot `at` [rows] of its row; `used` slots are in use by some row."""
    rows = torch.arange(len(at), device=at.device)
    mask = None
    if not equal:
        mask = (torch.arange(used, device=at.device) <= at[:, None])[:, None, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = lane.keys[layer], lane.values[layer]
        if equal:
            keys[:, :, used - 1], values[:, :, used - 1] = k, v
        else:
            keys[rows, :, at], values[rows, :, at] = k, v
        # the heads that share a key head are its queries: nothing has to be repeated
        grouped = q.unflatten(1, (k.shape[1], -1))
        mixed = F.scaled_dot_product_attention(
            grouped, keys[:, :, :used], values[:, :, :used], attn_mask=mask
        )
        return mixed.flatten(1, 2)

    return attend
