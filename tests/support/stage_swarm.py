"""Swarms of workers that share one model: of scripted stages, or of real engines, trainer and audits."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.counting_environment import EvenEnvironment
from support.offer_cases import CONFIG
from support.scripted_stages import ScriptedAuditor, ScriptedHead, ScriptedStage
from support.swarm import Running, Swarm, make_model
from support.witness import WitnessBackend

from primerl.node.app import factories, worker
from primerl.node.config.run import EngineConfig, EnvironmentConfig, RunConfig
from primerl.node.environments.environment import Environment
from primerl.node.inference.engine import Engine
from primerl.node.memory_plan.stages import cannot_hold
from primerl.node.pipeline.hosted_stage import HostedHead, HostedStage
from primerl.node.verification.auditor import Auditor
from primerl.node.weights.state import State, Tensor

STALL_S = 6.0
"""Above the beat of a line."""
GUARD_S = 250.0
"""A busy machine takes long for what a quiet one does in seconds."""
LAYERS = 4


def make_cut_model(directory: Path) -> Path:
    """A model directory of LAYERS layers for scripted stages."""
    make_model(directory)
    known = json.loads((directory / "config.json").read_text())
    sized = {**CONFIG, **known, "num_hidden_layers": LAYERS}
    (directory / "config.json").write_text(json.dumps(sized))
    return directory


class LayeredBackend(WitnessBackend):
    """A WitnessBackend whose policy has tensors for every layer; all change at every step."""

    def policy(self) -> State:
        """The policy."""
        state = dict(super().policy())
        seed = int.from_bytes(state["history.weight"].data.tobytes(), "little")
        layers = [f"model.layers.{layer}.weight" for layer in range(LAYERS)]
        for number, name in enumerate(["model.embed_tokens.weight", *layers, "model.norm.weight"]):
            bits = np.random.default_rng([seed, number]).integers(0, 2**16, 64, dtype="<u2")
            state[name] = Tensor("BF16", (64,), bits)
        return state


def on_small_machines(patch: pytest.MonkeyPatch) -> None:
    """Let every worker find a megabyte of free memory: not one sequence fits beside the model."""
    patch.setattr(worker, "cannot_hold", partial(cannot_hold, free=1 << 20))


class StageSwarm(Swarm):
    """A swarm whose workers run scripted stages; all other parts are the product's."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        engine = {"device": "cpu", "max_model_len": 64, "max_batch": 16}
        base: dict[str, Any] = {"engine": engine, "sampling": {"max_tokens": 8}}
        super().__init__(directory, model, **{**base, **settings})

    def add_small(self, name: str) -> Running:
        """Start a worker without pipeline settings, which on_small_machines() has to join one."""
        pp = {"memory_gib": 0.01, "stall_s": STALL_S}
        section = {"type": "vllm", "device": "cpu", "max_batch": 16}
        return self.add_worker(name, engine_section=section, pp=pp)

    def add_stage(
        self, name: str, stages: int, rank: int = -1, stall_s: float = STALL_S, **engine: Any
    ) -> Running:
        """Start or restart a worker that runs a stage."""
        pp = {"world_size": stages, "rank": rank, "memory_gib": 0.01, "stall_s": stall_s}
        section = {"type": "vllm", "device": "cpu", "max_model_len": 64, "max_batch": 16, **engine}
        return self.add_worker(name, engine_section=section, pp=pp)

    def learn_until(self, step: int = 2**31) -> None:
        """Block the trainer before later steps, so that the run does not end before the test."""
        self.fakes.last_step = step
        self.fakes.go.set()
        self.fakes.go.clear()

    async def stage(
        self, rank: int, holds: Callable[[dict[str, Any]], bool] = lambda row: True
    ) -> tuple[str, dict[str, Any]]:
        """Wait for a healthy ring; return name and stage row of the worker with this rank, once `holds`."""
        async with asyncio.timeout(GUARD_S):
            while True:
                for name, worker in self.workers.items():
                    if worker.task is not None and not worker.task.done():
                        row = (await worker.status())["stage"]
                        healthy = row and row["rank"] == rank and row["state"] == "healthy"
                        if healthy and holds(row):
                            return name, row
                await asyncio.sleep(0.05)

    async def until_broken(self, worker: Running, row: dict[str, Any]) -> None:
        """Wait until the ring of a worker has broken since `row`: it may have another plan by now."""
        async with asyncio.timeout(GUARD_S):
            while True:
                now = (await worker.status())["stage"]
                if not now or now["state"] != "healthy" or now["epoch"] > row["epoch"]:
                    return
                await asyncio.sleep(0.05)

    def _factories(self, running: Running, ledger: Any = None) -> factories.Factories:
        def backend(config: RunConfig) -> WitnessBackend:
            self.backends.append(LayeredBackend(self.fakes))
            return self.backends[-1]

        def auditor(config: EngineConfig, timeout_s: float) -> Auditor:
            return ScriptedAuditor()

        return replace(
            super()._factories(running, ledger),
            backend=backend,
            pipeline_head=ScriptedHead,
            pipeline_stage=ScriptedStage,
            auditor=auditor,
            environment=_environment,
        )


class RealStageSwarm(StageSwarm):
    """A swarm with vLLM stages, real audits and real training."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        training = {"lr": 1e-4, "weight_decay": 0.0, "threads": 1, "device": "cpu"}
        super().__init__(directory, model, **{"training": training, **settings})

    def _factories(self, running: Running, ledger: Any = None) -> factories.Factories:
        def engine(config: EngineConfig) -> Engine:
            return factories.build_engine(config)

        return replace(
            super()._factories(running, ledger),
            backend=factories.make_backend,
            engine=engine,
            evaluation_engine=factories.make_evaluation_engine,
            auditor=factories.make_auditor,
            pipeline_head=HostedHead,
            pipeline_stage=HostedStage,
        )


def _environment(
    config: EnvironmentConfig, model: Path, seed: int, max_tokens: int, temperature: float
) -> Environment:
    return EvenEnvironment(max_tokens=max_tokens)
