"""Record tokens on a pipeline: the last stage tells those that it drew, stage 0 keeps them for collect()."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..inference.device import Mark, download
from ..inference.vllm_sampling import Recorder, SampledStep, StepRequests
from ..ops.errors import EngineError
from .trails import ROW, BadTrail, check

Floats = NDArray[np.float32]
ROUNDING = 1e-3
"""A logprob is at most 0; anything up to this is put down to rounding."""


class StepTokens:
    """The tokens of a step on their way to the host, not waited for yet."""

    def __init__(self, ids: Sequence[str], tokens: Tensor, numbers: Tensor) -> None:
        """Of the sequences `ids`, whose rows these are."""
        self._ids = list(ids)
        self._tokens, self._numbers = download(tokens), download(numbers)
        self._mark = Mark(tokens.device)

    def wait(self, names: Sequence[str]) -> tuple[tuple[int, ...], Floats]:
        """Tokens, and numbers [n, columns], of these sequences in this order."""
        self._mark.wait()
        where = dict(zip(self._ids, range(len(self._ids)), strict=True))
        rows = [where[name] for name in names]
        return tuple(self._tokens.numpy()[rows].tolist()), self._numbers.numpy()[rows]


class LastStageRecorder(Recorder):
    """In the last stage: tells each token, and keeps none."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._numbers: Tensor | None = None
        self._lanes: dict[str, StepRequests] = {}
        """First sequence of a lane -> its batch: lanes take turns."""

    def tell(self, step: SampledStep, logits: Tensor) -> StepTokens:
        """Draw in a step whose logits [n, vocabulary] are these, in fp32; the device is not waited for."""
        self._batch = self._lanes.get(step.ids[0])
        self.begin(step)
        assert self._batch is not None  # begin() makes it
        self._lanes[step.ids[0]] = self._batch
        tokens = self.draw(logits)
        assert self._numbers is not None  # and draw() these
        return StepTokens(step.ids, tokens, self._numbers)

    def leave(self, names: Sequence[str]) -> None:
        """These sequences are over."""
        for name in names:
            self._lanes.pop(name, None)
            if name in self._slots.of:
                self._slots.leave(number_of(name))

    def _record(self, batch: StepRequests, step: SampledStep, logprobs: Tensor) -> None:
        self._numbers = self._project(step.hidden, logprobs)


def number_of(name: str) -> int:
    """The number under which a sequence of that name is admitted (step_codec.py makes names of them)."""
    return int(name.rpartition("-")[2])


class HeadRecorder(Recorder):
    """In stage 0: told of every token that came back; it answers collect()."""

    def __init__(self, *, boundaries: int, length: int, requests: int, **named: Any) -> None:
        """`boundaries`: of how many a fingerprint comes with each token."""
        super().__init__(torch.device("cpu"), length=length, requests=requests, **named)
        self._count = boundaries
        self._crossed = np.empty((requests, length, boundaries * ROW), np.uint8)

    @property
    def columns(self) -> int:
        """Numbers that come with every token."""
        return self._columns

    def file(
        self, names: Sequence[str], lengths: Sequence[int], rows: Floats, trail: bytes
    ) -> None:
        """Keep `rows` [n, columns]: of each of these sequences the token that was drawn at that length.

        `trail` holds their fingerprints, or nothing. Raises EngineError for what has another shape.
        """
        if rows.dtype != np.float32 or rows.shape != (len(names), self._columns):
            raise EngineError("the last stage sent other numbers than asked for")
        if not np.isfinite(rows).all():
            raise EngineError("the last stage sent numbers that are none: are the weights finite?")
        if (rows[:, 0] > ROUNDING).any():
            raise EngineError("the last stage sent a logprob above 0: it is no sampler's")
        crossed = self._split(trail, len(names))
        slots = self._slots
        where = np.fromiter((slots.of.get(name, -1) for name in names), np.int64, len(names))
        known = np.flatnonzero(where >= 0)  # others were given up
        where = where[known]
        at = np.fromiter(lengths, np.int64, len(names))[known] - slots.prompts[where]
        if (at > slots.drawn[where]).any() or (at < 0).any():
            raise EngineError("a token came back out of turn")
        slots.drawn[where] = slots.filed[where] = at + 1
        slots.stamp(where, at, self.version)
        self._rows[where, at] = rows[known]
        self._crossed[where, at] = crossed[known]

    def _split(self, trail: bytes, rows: int) -> NDArray[np.uint8]:
        """[rows, boundaries x 8]"""
        try:
            check(trail, rows, self._count)
        except BadTrail as error:
            raise EngineError(f"the last stage sent no trail of this plan ({error})") from error
        parts = np.frombuffer(trail, np.uint8).reshape(self._count, rows, ROW)
        return parts.transpose(1, 0, 2).reshape(rows, self._count * ROW)

    def _grow(self) -> None:
        old = self._crossed
        super()._grow()
        self._crossed = np.empty((self._slots.size, *old.shape[1:]), np.uint8)
        for slot in self._slots.of.values():
            self._crossed[slot] = old[slot]

    def _collected(self, key: int, slot: int, count: int) -> list[Any]:
        crossed = self._crossed[slot, :count].reshape(count, self._count, ROW)
        boundaries = [crossed[:, one].tobytes() for one in range(self._count)]
        return [*super()._collected(key, slot, count), boundaries]
