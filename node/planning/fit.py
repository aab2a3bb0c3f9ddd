"""What fits, and what to change where it does not: the flags to give, nearest to what was asked for first."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..engine_config import EngineConfig
from .bill import gib
from .shape import ModelShape
from .worker import (
    BLOCK_TOKENS,
    Device,
    WorkerPlan,
    plan_worker,
    sequence_bytes,
    tensor_parallel,
)

WAYS = (2, 4, 8)
"""Ranks that are tried."""
SHORTEST = 256
"""Tokens; a sequence that is shorter is not proposed."""


@dataclass(frozen=True)
class Way:
    """A change of the config, as flags, and what it leads to."""

    flags: str
    plan: WorkerPlan
    gpus: int = 1
    """That each engine takes."""


@dataclass(frozen=True)
class Advice:
    """What is to be said about a plan."""

    verdict: str
    ways: tuple[Way, ...] = ()
    """Of which each does by itself; the nearest to the config first."""


def advise(
    config: EngineConfig, shape: ModelShape, device: Device, *, fingerprint: str = "projection"
) -> Advice:
    """Whether `config` fits `device`, and what fits instead. engine.tp must be a number."""
    search = _Search(config, shape, device, fingerprint)
    plan = search.plan()
    if plan.holds_all:
        return Advice(f"fits: {plan.at_once} sequences of {plan.length} tokens at once")
    if plan.fits:
        verdict = (
            f"fits, but only {plan.at_once} of {plan.wanted} sequences may reach {plan.length} tokens at once: "
            "the others wait, or are computed anew"
        )
        return Advice(verdict, tuple(search.roomier(plan)))
    verdict = f"does not fit: {gib(plan.missing)} short of one sequence of {plan.length} tokens"
    return Advice(verdict, tuple(search.smaller()))


def longest(config: EngineConfig, shape: ModelShape, device: Device, room: int, count: int) -> int:
    """The longest sequences, in blocks, of which `count` fit into `room` bytes of cache; 0 if none."""
    block = BLOCK_TOKENS[device.kind]
    low, high = 0, max(1, (shape.longest or 1 << 20) // block)
    while low < high:
        middle = (low + high + 1) // 2
        taken = _sequence(config, shape, device, middle * block)
        low, high = (middle, high) if taken * count <= room else (low, middle - 1)
    return low * block


def _sequence(config: EngineConfig, shape: ModelShape, device: Device, length: int) -> int:
    if config.type == "vllm":
        ranks = config.pp * tensor_parallel(config) if device.kind == "cpu" else 1
        return ranks * sequence_bytes(config, shape, length, device.kind)
    return plan_worker(config.model_copy(update={"max_model_len": length}), shape, device).sequence


class _Search:
    """Tries changes of one config."""

    def __init__(
        self, config: EngineConfig, shape: ModelShape, device: Device, fingerprint: str
    ) -> None:
        self._config, self._shape, self._device = config, shape, device
        self._fingerprint = fingerprint

    def plan(self, **changes: Any) -> WorkerPlan:
        config = self._config.model_copy(update=changes)
        return plan_worker(config, self._shape, self._device, fingerprint=self._fingerprint)

    def roomier(self, plan: WorkerPlan) -> Iterator[Way]:
        """Where one sequence fits and all of them do not."""
        yield self._way(max_batch=plan.at_once)
        length = longest(self._config, self._shape, self._device, plan.room, plan.wanted)
        if length >= SHORTEST:
            yield self._way(max_model_len=length)
        yield from self._wider(all_of_them=True)

    def smaller(self) -> Iterator[Way]:
        """Where not even one fits."""
        half = {"dtype": "bfloat16"} if self._config.dtype == "float32" else {}
        if half and (way := self._batch_that_fits(half)):
            yield way
        for batch in (None, 32, 8, 1):
            if batch is not None and batch >= self._config.max_batch:
                continue
            changes = half | ({} if batch is None else {"max_batch": batch})
            if way := self._length_that_fits(changes):
                yield way
                break
        yield from self._wider(all_of_them=False)

    def _length_that_fits(self, changes: dict[str, Any]) -> Way | None:
        plan = self.plan(**changes)
        config = self._config.model_copy(update=changes)
        length = min(longest(config, self._shape, self._device, plan.room, 1), plan.length)
        if plan.overdrawn > 0 or length < min(SHORTEST, plan.length):
            return None
        if length < plan.length:
            changes = changes | {"max_model_len": length}
        return self._batch_that_fits(changes)

    def _batch_that_fits(self, changes: dict[str, Any]) -> Way | None:
        """With as few sequences at once as the cache holds."""
        plan = self.plan(**changes)
        if not plan.fits:
            return None
        if not plan.holds_all:
            changes = changes | {"max_batch": plan.at_once}
        return self._way(**changes)

    def _wider(self, *, all_of_them: bool) -> Iterator[Way]:
        """The fewest GPUs that do, by layers cut up; else by stages in a row."""
        config = self._config
        if config.type != "vllm" or self._device.kind == "cpu" or config.pp > 1:
            return
        half = {"dtype": "bfloat16"} if config.dtype == "float32" and not all_of_them else {}
        tried = [
            half | {name: ranks}
            for ranks in WAYS
            for name in ("tp", "pp")
            if self._suits(name, ranks)
        ]
        if all_of_them:
            enough = (one for one in tried if self.plan(**one).holds_all)
            yield from (self._way(**one) for one in itertools.islice(enough, 1))
            return
        for find in (self._batch_that_fits, self._length_that_fits):
            if way := next(filter(None, map(find, tried)), None):
                yield way
                return

    def _suits(self, name: str, ranks: int) -> bool:
        config, shape = self._config, self._shape
        if name == "pp":
            return config.tp == 1 and config.dp == 1 and ranks <= shape.layers
        even = shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0
        cut = shape.heads % ranks == 0 and shape.intermediate % ranks == 0
        return ranks > tensor_parallel(config) and cut and even

    def _way(self, **changes: Any) -> Way:
        flags = " ".join(
            f"--engine.{name.replace('_', '-')} {value}" for name, value in changes.items()
        )
        plan = self.plan(**changes)
        config = self._config.model_copy(update=changes)
        return Way(flags, plan, tensor_parallel(config) * config.pp)
