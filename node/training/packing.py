"""Pack samples of many lengths into rows, equally many of similar cost for every rank.

No torch. A row holds whole sequences, one after the other; nothing is truncated, and samples that do not fit
are returned. Ranks work in lockstep, row by row, so rows of the same turn cost about the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..models.support import unpack_supports
from .backend import Sample

Number = TypeVar("Number", bound=np.generic)

PADDING_ID = 0
"""Token id of padding. Padding is a sequence of its own and never trained; any id of the vocabulary would
do."""
NOWHERE = np.empty(0, np.int64)
WIDTHS = (16, 64, 256)
"""Widths of supports: few, as a GPU's kernels are compiled for each. The last holds MAX_SUPPORT."""
EVEN = 8192
"""Sequence length at which attention costs as much as all other layers (0.6B: 10,400; 4B: 15,000)."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of T tokens; the states at `rows` predict N trained tokens."""

    token_ids: NDArray[np.int64]
    """[T]."""
    positions: NDArray[np.int64]
    """[T], from 0 in each sequence."""
    lengths: list[int]
    """Lengths of the sequences, padding included; their sum is T."""
    rows: NDArray[np.int64]
    """[N], ascending: position before each trained token, whose state predicts it."""
    targets: NDArray[np.int64]
    """[N]: the trained tokens."""
    logprobs: NDArray[np.float32]
    """[N]: the sampler's."""
    reference: NDArray[np.float32]
    """[N]: those of a teacher behind an endpoint (Sample.reference); 0 without one."""
    advantages: NDArray[np.float32]
    sequences: NDArray[np.int64]
    """[N]: index of the sequence in the row."""
    environments: list[str]
    """Environment of each sequence but the padding."""
    echo: NDArray[np.bool_]
    """[N]: whether the token is the environment's (Sample.echo)."""
    given: NDArray[np.bool_]
    """[N]: whether the token is a demonstration's (Sample.given)."""
    routed: NDArray[np.int64]
    """[R], ascending: the positions with routes."""
    routes: NDArray[np.uint8]
    """[R, bytes of a route], in the wire format."""
    support: NDArray[np.int32] | None
    """[N, W]: tokens that logprobs are over, filled up with -1; -1 alone: all. None: all, everywhere."""

    @property
    def tokens(self) -> int:
        """Number of trained tokens."""
        return len(self.rows)

    def part(self, index: int, count: int) -> "MicroBatch":
        """Return part `index` of `count` equal parts of the row, inputs and targets; lengths stay."""
        size = len(self.token_ids) // count
        start, stop = index * size, (index + 1) * size
        own = slice(*np.searchsorted(self.rows, [start, stop]))
        replayed = slice(*np.searchsorted(self.routed, [start, stop]))
        return MicroBatch(
            token_ids=self.token_ids[start:stop],
            positions=self.positions[start:stop],
            lengths=self.lengths,
            rows=self.rows[own] - start,
            targets=self.targets[own],
            logprobs=self.logprobs[own],
            reference=self.reference[own],
            advantages=self.advantages[own],
            sequences=self.sequences[own],
            environments=self.environments,
            echo=self.echo[own],
            given=self.given[own],
            routed=self.routed[replayed] - start,
            routes=self.routes[replayed],
            support=None if self.support is None else self.support[own],
        )


@dataclass(frozen=True)
class Packed:
    """The rows of a step: `dealt[r][t]` is rank r's row in turn t; all ranks have equally many.

    A row is built only for its reader, when that one gets to it: a GPU computes meanwhile.
    """

    dealt: list[list[list[Sample]]]
    too_long: list[Sample]
    multiple: int = 1

    def rank(self, rank: int, *, hinted: bool = False) -> Iterator[MicroBatch]:
        """Yield a rank's rows; `hinted`: the teacher's rows, with the same trained tokens."""
        for row in self.dealt[rank]:
            yield _row([_hinted(sample) for sample in row] if hinted else row, self.multiple)

    @cached_property
    def tokens(self) -> int:
        """Count the trained tokens of the model in the step, over all ranks: the divisor of losses."""
        return sum(_drawn(sample) for sample in self._samples if not sample.given)

    @cached_property
    def echo_tokens(self) -> int:
        """Count the trained tokens of the environment in the step, over all ranks."""
        return sum(_trained(sample) - _drawn(sample) for sample in self._samples)

    @cached_property
    def given_tokens(self) -> int:
        """Count the trained tokens of demonstrations in the step, over all ranks."""
        return sum(_drawn(sample) for sample in self._samples if sample.given)

    @property
    def _samples(self) -> list[Sample]:
        return [sample for rows in self.dealt for row in rows for sample in row]

    @property
    def lengths(self) -> list[int]:
        """Lengths of all sequences, padding included."""
        rows = [row for rows in self.dealt for row in rows]
        return [length for row in rows for length in _lengths(row, self.multiple)]


def pack(
    samples: Iterable[Sample], seq_len: int, *, row: int = 0, ranks: int = 1, multiple: int = 1
) -> Packed:
    """Pack samples of at most `seq_len` tokens, hints included, into rows of at most `row`; 0: as many.

    Rows are padded to a multiple of `multiple`. First-fit-decreasing finds the number of rows; it is rounded up
    to a multiple of `ranks`, and the sequences are spread evenly over the rows, the costliest first. Samples
    longer than `seq_len` are returned, not cut: half a rollout has no reward. Samples without a trained token
    are left out. The order is a function of the samples alone. Without samples there are no rows.
    """
    fitting: list[Sample] = []
    too_long: list[Sample] = []
    for sample in samples:
        if _size(sample) > seq_len:
            too_long.append(sample)
        elif _trained(sample):
            fitting.append(sample)
    fitting.sort(key=lambda sample: -_size(sample))
    room = row or seq_len
    rows = _first_fit(fitting, room)
    count = -(-len(rows) // ranks) * ranks
    rows = _spread(fitting, room, count) or [*rows, *([] for _ in range(count - len(rows)))]
    rows.sort(key=_cost, reverse=True)
    return Packed([rows[rank::ranks] for rank in range(ranks)], too_long, multiple)


def _first_fit(samples: Sequence[Sample], room: int) -> list[list[Sample]]:
    """Put each sample into the first row with room; `samples` are sorted by falling length."""
    rows: list[list[Sample]] = []
    free: list[int] = []
    for sample in samples:
        length = _size(sample)
        place = next((index for index, unused in enumerate(free) if unused >= length), len(rows))
        if place == len(rows):
            rows.append([])
            free.append(room)
        rows[place].append(sample)
        free[place] -= length
    return rows


def _spread(samples: Sequence[Sample], room: int, count: int) -> list[list[Sample]] | None:
    """Put each sample into the cheapest of `count` rows with room; None if a sample finds none."""
    rows: list[list[Sample]] = [[] for _ in range(count)]
    free, costs = [room] * count, [0.0] * count
    for sample in samples:
        length = _size(sample)
        places = [index for index in range(count) if free[index] >= length]
        if not places:
            return None
        place = min(places, key=costs.__getitem__)
        rows[place].append(sample)
        free[place] -= length
        costs[place] += _cost([sample])
    return rows


def _cost(row: Sequence[Sample]) -> float:
    """Return the cost of linear layers and attention, in tokens of a very short sequence."""
    return sum(_size(sample) * (1 + _size(sample) / EVEN) for sample in row)


def _size(sample: Sample) -> int:
    """Return the tokens that the policy or, with a hint, its teacher reads."""
    return len(sample.token_ids) + len(sample.hint)


def _hinted(sample: Sample) -> Sample:
    """Return the sample as the teacher reads it; the sample's first token stays untrained."""
    hint = sample.hint
    blank, untrained = [0.0] * len(hint), [False] * (len(hint) + 1)
    return replace(
        sample,
        token_ids=[*hint, *sample.token_ids],
        mask=[*untrained, *sample.mask[1:]],
        logprobs=[*blank, *sample.logprobs],
        echo=None if sample.echo is None else [*untrained, *sample.echo[1:]],
        hint=[],
    )


def _row(samples: Sequence[Sample], multiple: int) -> MicroBatch:
    """Build one row; without samples it is padding alone, for a rank without work in this turn."""
    lengths = _lengths(samples, multiple)
    padding = sum(lengths[len(samples) :])
    starts = np.cumsum([0, *lengths[:-1]])
    own = [_flags(sample.mask) for sample in samples]
    predicting = [np.flatnonzero(_targets(sample)) for sample in samples]  # positions that predict
    tokens = [np.array(sample.token_ids, dtype=np.int64) for sample in samples]
    led = [
        np.flatnonzero(mask[1:]) if sample.routes else NOWHERE
        for sample, mask in zip(samples, own, strict=True)
    ]
    routes = [np.frombuffer(sample.routes, np.uint8) for sample in samples if sample.routes]
    routed = _joined([at + start for at, start in zip(led, starts, strict=False)], np.int64)
    return MicroBatch(
        token_ids=_joined([*tokens, np.full(padding, PADDING_ID, np.int64)], np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        lengths=lengths,
        rows=_joined([at + start for at, start in zip(predicting, starts, strict=False)], np.int64),
        targets=_joined(
            [ids[at + 1] for ids, at in zip(tokens, predicting, strict=True)], np.int64
        ),
        logprobs=_joined(
            [
                np.fromiter(sample.logprobs, np.float32, len(sample.logprobs))[at + 1]
                for sample, at in zip(samples, predicting, strict=True)
            ],
            np.float32,
        ),
        reference=_joined(
            [
                np.array(sample.reference)[at + 1] if sample.reference else np.zeros(len(at))
                for sample, at in zip(samples, predicting, strict=True)
            ],
            np.float32,
        ),
        advantages=_joined(
            [
                np.full(len(at), sample.advantage)
                for sample, at in zip(samples, predicting, strict=True)
            ],
            np.float32,
        ),
        sequences=_joined(
            [np.full(len(at), index) for index, at in enumerate(predicting)], np.int64
        ),
        environments=[sample.environment for sample in samples],
        echo=~_joined([mask[at + 1] for mask, at in zip(own, predicting, strict=True)], np.bool_),
        given=_joined(
            [
                np.full(len(at), sample.given)
                for sample, at in zip(samples, predicting, strict=True)
            ],
            np.bool_,
        ),
        routed=routed,
        routes=_joined(routes, np.uint8).reshape(len(routed), -1 if len(routed) else 0),
        support=_supports(samples, predicting),
    )


def _supports(
    samples: Sequence[Sample], predicting: Sequence[NDArray[np.int64]]
) -> NDArray[np.int32] | None:
    """Return the supports of the tokens after the positions `predicting` of each sample."""
    stated = unpack_supports(
        [
            (sample.support, list(compress(sample.token_ids[1:], sample.mask[1:])))
            for sample in samples
        ],
        -1,
    )
    if stated is None:
        return None
    masks = _joined(
        [_flags(sample.mask)[at + 1] for sample, at in zip(samples, predicting, strict=True)],
        np.bool_,
    )
    width = next(width for width in WIDTHS if width >= stated.shape[1])
    rows = np.full((len(masks), width), -1, np.int32)
    rows[masks, : stated.shape[1]] = stated
    return rows


def _lengths(samples: Sequence[Sample], multiple: int) -> list[int]:
    """Return the lengths of a row's sequences, the padding last if there is any."""
    lengths = [len(sample.token_ids) for sample in samples]
    used = sum(lengths)
    padding = max(used, 1) + -max(used, 1) % multiple - used
    return [*lengths, padding] if padding else lengths


def _flags(mask: list[bool]) -> NDArray[np.bool_]:
    return np.frombuffer(bytes(mask), np.bool_)  # six times as fast as np.array()


def _targets(sample: Sample) -> NDArray[np.bool_]:
    """Return the mask of trained tokens from the second on: the first is never predicted."""
    mask = _flags(sample.mask)
    return (mask if sample.echo is None else mask | _flags(sample.echo))[1:]


def _trained(sample: Sample) -> int:
    return int(np.count_nonzero(_targets(sample)))


def _drawn(sample: Sample) -> int:
    return sample.mask[1:].count(True)


def _joined(parts: Sequence[NDArray[Any]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)
