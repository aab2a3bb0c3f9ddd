"""A swarm of workers that share one small real model: real stages, trainer and audits in one process."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from even_environment import EvenEnvironment
from swarm import Running, Swarm

from primerl.node import parts, worker_node
from primerl.node.config import EngineConfig, EnvironmentConfig
from primerl.node.engines.engine import Engine
from primerl.node.environments.environment import Environment
from primerl.node.planning.stages import cannot_hold

STALL_S = 6.0
"""Above the beat of a line."""


def on_small_machines(patch: pytest.MonkeyPatch) -> None:
    """Let every worker find a megabyte of free memory: not one sequence fits beside the model."""
    patch.setattr(worker_node, "cannot_hold", partial(cannot_hold, free=1 << 20))


class StageSwarm(Swarm):
    """Real parts in place of fakes."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        training = {"lr": 1e-4, "weight_decay": 0.0, "threads": 1, "device": "cpu"}
        engine = {"device": "cpu", "max_model_len": 64, "max_batch": 16}
        sampling = {"max_tokens": 8}
        base: dict[str, Any] = {"training": training, "engine": engine, "sampling": sampling}
        super().__init__(directory, model, **{**base, **settings})

    async def __aenter__(self) -> "StageSwarm":
        return self

    def add_small(self, name: str) -> Running:
        """Start a worker that nobody told to share the model: on_small_machines() it finds that it has to."""
        pp = {"memory_gib": 0.01, "stall_s": STALL_S}
        section = {"device": "cpu", "max_batch": 16}
        return self.add_worker(name, engine_section=section, pp=pp)

    def add_stage(
        self, name: str, stages: int, rank: int = -1, stall_s: float = STALL_S, **engine: Any
    ) -> Running:
        """Start a worker that holds a part of the model, or start one again; `engine` says what computes."""
        pp = {"world_size": stages, "rank": rank, "memory_gib": 0.01, "stall_s": stall_s}
        section = {"device": "cpu", "max_model_len": 64, "max_batch": 16, **engine}
        return self.add_worker(name, engine_section=section, pp=pp)

    async def stage(self, rank: int) -> tuple[str, dict[str, Any]]:
        """Name and stage row of who holds that rank in a ring that is whole; waits for one."""
        async with asyncio.timeout(100.0):
            while True:
                for name, worker in self.workers.items():
                    if worker.task is not None and not worker.task.done():
                        row = (await worker.status())["stage"]
                        if row and row["rank"] == rank and row["state"] == "whole":
                            return name, row
                await asyncio.sleep(0.05)

    def _parts(self, running: Running, ledger: Any = None) -> parts.Parts:
        def engine(config: EngineConfig) -> Engine:
            return parts.build_engine(config)

        def environment(
            config: EnvironmentConfig, model: Path, seed: int, max_tokens: int, temperature: float
        ) -> Environment:
            return EvenEnvironment(max_tokens=max_tokens)

        return replace(
            super()._parts(running, ledger),
            backend=parts.make_backend,
            engine=engine,
            evaluation_engine=parts.make_evaluation_engine,
            auditor=parts.make_auditor,
            environment=environment,
        )
