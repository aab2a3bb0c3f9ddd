"""Replayable runs: a swarm whose trainer keeps everything, with a fake or real learner."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.counting_environment import STOP
from support.swarm import Running, Swarm
from support.training_cases import make_model

from primerl.node.app.factories import Factories, MakeLedger
from primerl.node.config.run import RunConfig
from primerl.node.training.backend import TrainBackend

STEPS = 4
KEEP: dict[str, Any] = {
    "max_steps": STEPS,
    "rollouts": {"keep": {"steps": 0}},
    "checkpoint": {"interval": 1, "keep_first": True, "keep_last": 2},
}


class LearningSwarm(Swarm):
    """A swarm whose trainer has a backend of the test's choice."""

    def __init__(self, *args: Any, backend: Callable[[RunConfig], TrainBackend], **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._learner = backend

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        return replace(super()._factories(running, ledger), backend=self._learner)


async def finished(swarm: Swarm) -> Path:
    """Run to the end; returns the directory of the run."""
    async with swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.finished()
    return swarm.run_dir


def real_model(directory: Path) -> Path:
    """A tiny Qwen3 whose end is the counting environment's."""
    make_model(directory)
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": STOP}))
    return directory
