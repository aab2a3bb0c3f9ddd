"""A run of an environment with two agents: what the trainer learns from, a resume, and a replay."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

from support.counting_environment import DuelEnvironment
from support.replay_cases import KEEP
from support.swarm import Swarm, until
from support.witness import Fakes, WitnessBackend

from primerl.node.app.factories import Factories
from primerl.node.app.replay import KeptRun, RunReplay
from primerl.node.app.trainer import Farewell
from primerl.node.storage.rollouts import RolloutFiles


async def test_a_run_of_two_agents_goes_on_with_its_baselines_and_can_be_replayed(
    tmp_path: Path, model_dir: Path
) -> None:
    training: dict[str, Any] = {"advantage": "rae", "rae_decay": 0.5}
    options: dict[str, Any] = KEEP | {"max_steps": 8, "training": training}
    async with Swarm(tmp_path, model_dir, farewell=Farewell(1.0, 1.0, 1.0), **options) as swarm:
        for node in ("trainer", "w1"):
            swarm.environments[node] = {"reverse-text": DuelEnvironment(name="reverse-text")}
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(RolloutFiles(swarm.run_dir / "rollouts").path(2).exists)
        await swarm.stop_trainer()
        await swarm.start_trainer(resume=True)
        summary = await swarm.finished()
    assert summary["rejected"].keys() <= {"stale"}

    files = RolloutFiles(swarm.run_dir / "rollouts")
    rows = [one for step in files.steps() for one in files.read(step) if one.verdict == "trained"]
    assert {one.agent for one in rows} == {"first", "second"}
    assert {one.reward for one in rows} == {-1.0, 0.0, 1.0}
    baselines: dict[str, float] = {}
    for one in rows:  # one after the other, over the steps and over the resume
        before = baselines.get(one.agent, 0.0)
        assert one.advantage == one.reward - before
        baselines[one.agent] = 0.5 * before + 0.5 * one.reward
    run = KeptRun.open(swarm.run_dir)
    backend = Factories(backend=lambda config: WitnessBackend(Fakes()))
    async with RunReplay(run, factories=backend) as replay, aclosing(replay.steps()) as steps:
        assert [one.outcome async for one in steps] == ["equal"] * 8
