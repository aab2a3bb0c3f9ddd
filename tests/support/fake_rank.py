"""A fake rank: a step's first token makes it die, hang or differ.

Run by torchrun, or as the only one; the protocol, the groups and the deadlines are the real ones.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from primerl.node.config.training import TrainingConfig
from primerl.node.errors import EngineError, StorageError
from primerl.node.training import rank
from primerl.node.training.backend import Sample, StepMetrics, TrainBatch
from primerl.node.training.operations import StepCall
from primerl.node.training.rank_messages import RankStart
from primerl.node.training.world import RankChannel, World

FINE, REFUSED, DIFFERS, RAISES, HANGS, SLOW, MEMORY = range(7)
"""Tokens. REFUSED: all ranks raise a ValueError; DIFFERS: the last one does; RAISES: the last one has a bug;
HANGS: the last one never comes to the collective; MEMORY: the last one has none left."""
SLOW_S = 1.5
STEPS_BESIDE = 4
"""A staged checkpoint is written once so many steps were done."""


class FakeLearner:
    """Counts its steps; every step has a collective."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0
        self.channel = RankChannel.open(20.0)

    def compile_step(self) -> None:
        self.steps = 0

    def step(self, batch: TrainBatch) -> StepMetrics:
        kind = batch.samples[0].token_ids[0] if batch.samples else FINE
        odd = self.world.rank == self.world.size - 1
        if kind == REFUSED or (kind == DIFFERS and odd):
            raise ValueError(f"step {batch.step} is refused")
        if kind == RAISES and odd:
            raise KeyError(f"a bug of rank {self.world.rank}")
        if kind == MEMORY and odd:
            raise RuntimeError("CUDA out of memory")
        if kind == HANGS and odd:
            time.sleep(600)
        if kind == SLOW:
            time.sleep(SLOW_S)
        self.steps += 1
        return StepMetrics({"steps": float(self.steps), "ranks": self.world.total([1.0])[0]})

    def evaluate(self, samples: list[Sample]) -> dict[str, float]:
        if self.world.rank == samples[0].token_ids[0]:
            raise StorageError(f"the disk of rank {self.world.rank} is full")
        return {"tokens": 1.0}

    def supervised_step(self, examples: list[tuple[list[int], list[int]]], lr: float) -> float:
        return lr

    def end_supervised(self) -> None:
        self.steps = 0

    def write_state(self, path: Path) -> None:
        raise NotImplementedError

    def write_snapshot(self, path: Path, *, whole: bool) -> None:
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        (directory / f"rank{self.world.rank}").write_text(str(os.getpid()))

    def stage(self) -> None:
        pass

    def write_staged(self, directory: Path) -> None:
        while self.steps < STEPS_BESIDE:
            time.sleep(0.01)
        self.channel.together(lambda: self.save(directory))

    def load(self, directory: Path) -> None:
        raise EngineError(f"{directory} is not for this model: load another one")

    def export(self, directory: Path) -> None:
        print("noise on the standard output", directory)

    def close(self, *, keep_world: bool) -> None:
        print("closed", file=sys.stderr)


def batch(number: int, kind: int) -> TrainBatch:
    """Make a batch that makes every rank behave as `kind`."""
    return TrainBatch(number, [Sample([kind, 1], [False, True], [0.0, -1.0], 1.0)])


def step(kind: int) -> StepCall:
    """Make the call of such a step."""
    return StepCall(batch(1, kind))


async def gone(*pids: int | None) -> None:
    """Wait until none of these processes is left, not even as a zombie of ours."""
    async with asyncio.timeout(60.0):
        for pid in filter(None, pids):
            while True:
                try:
                    os.kill(pid, 0)
                except ProcessLookupError:
                    break
                await asyncio.sleep(0.05)


def build(start: RankStart, config: TrainingConfig, world: World) -> Any:
    """Make the learner of one rank."""
    return FakeLearner(world)


if __name__ == "__main__":
    rank.main(build)
