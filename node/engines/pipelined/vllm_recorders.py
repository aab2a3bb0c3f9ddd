"""vllm_recorder.py on a pipeline: the last stage tells what it drew, stage 0 keeps it and is asked for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import EngineError
from ...pipeline.boundaries import ROW, BadTrail, split
from ..vllm_recorder import Batch, Recorder
from ..vllm_sampling import Step
from .fingerprinted import check_numbers

Floats = NDArray[np.float32]


class Teller(Recorder):
    """In the last stage: keeps nothing but the numbers of the step that was drawn last."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._told: dict[str, int] = {}
        self._numbers: Tensor | None = None

    def tell(self, names: Sequence[str]) -> Floats:
        """[n, columns] of these sequences of the last step, in this order; waits for the device."""
        if self._numbers is None:
            raise EngineError("vLLM drew nothing in a step that draws")
        numbers = self._numbers.cpu().numpy()
        return numbers[[self._told[name] for name in names]]

    def leave(self, names: Sequence[str]) -> None:
        """These sequences are over."""
        for name in names:
            if name in self._slots.of:
                self._slots.leave(number_of(name))

    def _record(self, batch: Batch, step: Step, logprobs: Tensor) -> None:
        if not self.collecting:
            return
        self._told = {name: row for row, name in enumerate(batch.ids)}
        self._numbers = self._project(step.hidden, logprobs)


def number_of(name: str) -> int:
    """The number under which a sequence of that name is admitted (step_codec.py makes names of them)."""
    return int(name.rpartition("-")[2])


class Keeper(Recorder):
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
        check_numbers(rows[:, 0])
        crossed = self._split(trail, len(names))
        slots = self._slots
        known = [row for row, name in enumerate(names) if name in slots.of]  # others were given up
        where = np.fromiter((slots.of[names[row]] for row in known), np.int64, len(known))
        at = np.fromiter((lengths[row] for row in known), np.int64, len(known))
        at -= slots.prompts[where]
        if (at > slots.drawn[where]).any() or (at < 0).any():
            raise EngineError("a token came back out of turn")
        slots.drawn[where] = slots.filed[where] = at + 1
        slots.stamp(where, at, self.version)
        self._rows[where, at] = rows[known]
        self._crossed[where, at] = crossed[known]

    def _split(self, trail: bytes, rows: int) -> NDArray[np.uint8]:
        """[rows, boundaries x 8]"""
        try:
            parts = split(trail, rows, self._count)
        except BadTrail as error:
            raise EngineError(f"the last stage sent no trail of this plan ({error})") from error
        joined = b"".join(b"".join(one) for one in parts)
        return np.frombuffer(joined, np.uint8).reshape(rows, self._count * ROW)

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
