"""One trainer for most attacks: it stands through all of them and still finishes with honest workers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.swarm import Swarm, model_dir, quiet_registry
from support.witness import Fakes

__all__ = ["model_dir", "quiet_registry", "siege"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def siege(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, quiet_registry: None
) -> AsyncIterator[Swarm]:
    """A run at version 1 or later, waiting for work. Batches are large, so that attackers alone end nothing."""
    rollouts = {"groups_per_batch": 64, "groups_per_lease": 1, "lease_timeout_s": 60.0}
    directory = tmp_path_factory.mktemp("siege")
    fakes = Fakes(pause=lambda: asyncio.sleep(0))
    async with Swarm(directory, model_dir, fakes=fakes, max_steps=3, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        # it leaves few tasks to be leased again
        swarm.add_worker("honest", engine_section={"max_batch": 4})
        await swarm.wait_step(1)
        await swarm.stop_worker("honest")
        yield swarm
        swarm.add_worker("honest")
        summary = await swarm.finished(30.0)
    assert summary["steps"] == 3
    assert [step for step, _ in summary["reward_curve"]] == [1, 2, 3]
