"""Record sampled tokens: the last stage sends them, stage 0 keeps them for collect()."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import EngineError
from ..inference.sampler import SampledTokens
from ..inference.vllm_sampling import Recorder, SampledStep, StepRequests
from ..models.device import Mark, download
from .frames import FINGERPRINT_BYTES
from .trails import BadTrail, check

Floats = NDArray[np.float32]
ROUNDING = 1e-3
"""Logprobs above 0 by up to this much are accepted as rounding."""


class StepTokens:
    """The tokens of a step and their records, being copied to the host."""

    def __init__(self, ids: Sequence[str], tokens: Tensor, records: Tensor) -> None:
        """`tokens` [n] and `records` [n, columns] are of the sequences `ids` [n]."""
        self._ids = list(ids)
        self._tokens, self._records = download(tokens), download(records)
        self._mark = Mark(tokens.device)

    def wait(self, names: Sequence[str]) -> tuple[tuple[int, ...], Floats]:
        """Wait for the copy.

        Return tokens and records [n, columns] of the sequences `names`, in order.
        """
        self._mark.wait()
        where = dict(zip(self._ids, range(len(self._ids)), strict=True))
        rows = [where[name] for name in names]
        return tuple(self._tokens.numpy()[rows].tolist()), self._records.numpy()[rows]


class LastStageRecorder(Recorder):
    """Recorder of the last stage: samples tokens and returns their records."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._records: Tensor | None = None
        self._lanes: dict[str, StepRequests] = {}
        """First sequence of a lane -> the lane's batch."""

    def sample(self, step: SampledStep, logits: Tensor) -> StepTokens:
        """Sample a step's tokens from logits [n, vocabulary] fp32; does not wait for the device."""
        self._batch = self._lanes.get(step.ids[0])
        self.begin(step)
        assert self._batch is not None  # set by begin()
        self._lanes[step.ids[0]] = self._batch
        tokens = self.draw(logits)
        assert self._records is not None  # set by draw()
        return StepTokens(step.ids, tokens, self._records)

    def release(self, names: Sequence[str]) -> None:
        """Release the slots of ended sequences."""
        for name in names:
            self._lanes.pop(name, None)
            if name in self._slots.of:
                self._slots.leave(number_of(name))

    def _keep(self, batch: StepRequests, step: SampledStep, sampled: SampledTokens) -> None:
        self._records = self._project(step.hidden, sampled.logprobs)


def number_of(name: str) -> int:
    """Return the serial number in a sequence name (step_codec.py): its key in the recorder."""
    return int(name.rpartition("-")[2])


class HeadRecorder(Recorder):
    """Recorder of stage 0: keeps the records of returned tokens for collect()."""

    def __init__(self, *, boundaries: int, length: int, requests: int, **named: Any) -> None:
        """`boundaries`: number of boundary fingerprints that come with each token."""
        super().__init__(torch.device("cpu"), length=length, requests=requests, **named)
        self._count = boundaries
        self._fingerprints = np.empty((requests, length, boundaries * FINGERPRINT_BYTES), np.uint8)

    @property
    def columns(self) -> int:
        """Elements of a token's record."""
        return self._columns

    def record(
        self, names: Sequence[str], lengths: Sequence[int], rows: Floats, trail: bytes
    ) -> None:
        """Keep the records `rows` [n, columns] of tokens sampled at these sequence lengths.

        `trail` holds the boundary fingerprints, or is empty. Raises EngineError for invalid values or shapes.
        """
        if rows.dtype != np.float32 or rows.shape != (len(names), self._columns):
            raise EngineError("the last stage sent records of the wrong shape or dtype")
        if not np.isfinite(rows).all():
            raise EngineError("the last stage sent records that are not finite: check the weights")
        if (rows[:, 0] > ROUNDING).any():
            raise EngineError("the last stage sent a logprob above 0")
        fingerprints = self._split(trail, len(names))
        slots = self._slots
        where = np.fromiter((slots.of.get(name, -1) for name in names), np.int64, len(names))
        known = np.flatnonzero(where >= 0)  # the others were given up
        where = where[known]
        at = np.fromiter(lengths, np.int64, len(names))[known] - slots.prompts[where]
        if (at > slots.drawn[where]).any() or (at < 0).any():
            raise EngineError("a token returned out of order")
        slots.drawn[where] = slots.filed[where] = at + 1
        slots.stamp(where, at, self.version)
        self._rows[where, at] = rows[known]
        self._fingerprints[where, at] = fingerprints[known]

    def _split(self, trail: bytes, rows: int) -> NDArray[np.uint8]:
        """Split a trail into [rows, boundaries x 8] bytes. Raises EngineError."""
        try:
            check(trail, rows, self._count)
        except BadTrail as error:
            raise EngineError(f"the last stage sent an invalid trail ({error})") from error
        parts = np.frombuffer(trail, np.uint8).reshape(self._count, rows, FINGERPRINT_BYTES)
        return parts.transpose(1, 0, 2).reshape(rows, self._count * FINGERPRINT_BYTES)

    def _grow(self) -> None:
        old = self._fingerprints
        super()._grow()
        self._fingerprints = np.empty((self._slots.size, *old.shape[1:]), np.uint8)
        for slot in self._slots.of.values():
            self._fingerprints[slot] = old[slot]

    def _collected(self, key: int, slot: int, count: int) -> list[Any]:
        fingerprints = self._fingerprints[slot, :count].reshape(
            count, self._count, FINGERPRINT_BYTES
        )
        boundaries = [fingerprints[:, number].tobytes() for number in range(self._count)]
        return [*super()._collected(key, slot, count), boundaries]
