"""A run whose trainer is real ranks, or one alone, of which one is killed in the middle: nobody notices."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.swarm import Running, Swarm, until
from support.training_cases import FAST
from support.training_cases import make_model as make_real_model

from primerl.node.app.factories import Factories
from primerl.node.config.run import RunConfig
from primerl.node.models.model_files import read_state
from primerl.node.training.backend import TrainBackend
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.rank_group import RankGroup
from primerl.node.weights.state import digests, state_digest

pytestmark = pytest.mark.nightly


class RealBackend(FsdpBackend):
    """Trains a real model, whatever the run's contract says about its shape."""

    def __init__(self, config: RunConfig, model_dir: Path) -> None:
        super().__init__(config.training, max_steps=config.max_steps, seed=config.seed)
        self._real = model_dir

    async def start(self, model_dir: Path) -> None:
        await super().start(self._real)

    def ranks(self) -> RankGroup:
        assert self._ranks is not None
        return self._ranks


class RealSwarm(Swarm):
    """A swarm with real ranks."""

    def __init__(self, *args: Any, real: Path, **overrides: Any) -> None:
        super().__init__(*args, **overrides)
        self._real = real
        self.made: list[RealBackend] = []

    async def __aenter__(self) -> "RealSwarm":
        return self

    def _factories(self, running: Running, ledger: Any = None) -> Factories:
        def backend(config: RunConfig) -> TrainBackend:
            self.made.append(RealBackend(config, self._real))
            return self.made[-1]

        return replace(super()._factories(running, ledger), backend=backend)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_rank_that_is_killed_costs_a_running_swarm_no_version(
    tmp_path: Path, model_dir: Path, ranks: int
) -> None:
    real = make_real_model(tmp_path / "real")
    training = FAST.model_dump(mode="json", include={"lr", "threads", "device", "seq_len"})
    training |= {"backend": "fsdp", "fsdp": {"ranks": ranks, "timeout_s": 60.0}}
    async with RealSwarm(tmp_path, model_dir, real=real, max_steps=5, training=training) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        swarm.add_worker("w2")
        await swarm.wait_step(2, timeout=120.0)
        first = swarm.made[0].ranks()
        os.kill(first.pids[-1], signal.SIGKILL)
        await until(lambda: len(swarm.made) == 2, timeout=100.0)
        await swarm.finished(timeout=180.0)
        for worker in swarm.workers.values():
            await worker.ended()
        heads = swarm.heads()
        weights = read_state(swarm.run_dir / "weights" / "step_5")
    assert sorted(heads) == [(0, version) for version in range(6)]
    assert state_digest(digests(weights)) == heads[0, 5].state
    for name in swarm.workers:
        for event in swarm.fakes.loads(name):
            assert event.state == heads[0, event.version].state
