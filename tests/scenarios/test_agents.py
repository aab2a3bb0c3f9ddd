"""A run of an environment with two agents: what the trainer learns from, and a replay."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

from support.counting_environment import DuelEnvironment
from support.replay_cases import KEEP, STEPS
from support.swarm import Swarm
from support.witness import Fakes, WitnessBackend

from primerl.node.app.factories import Factories
from primerl.node.app.replay import KeptRun, RunReplay
from primerl.node.storage.rollouts import RolloutFiles


async def test_a_run_of_two_agents_learns_from_each_ones_rewards_and_can_be_replayed(
    tmp_path: Path, model_dir: Path
) -> None:
    training: dict[str, Any] = {"advantage": "rae", "rae_decay": 0.5}
    async with Swarm(tmp_path, model_dir, training=training, **KEEP) as swarm:
        for node in ("trainer", "w1"):
            swarm.environments[node] = {"reverse-text": DuelEnvironment(name="reverse-text")}
        await swarm.start_trainer()
        swarm.add_worker("w1")
        summary = await swarm.finished()
    assert summary["rejected"].keys() <= {"stale"}

    files = RolloutFiles(swarm.run_dir / "rollouts")
    rows = [one for step in files.steps() for one in files.read(step) if one.verdict == "trained"]
    assert {one.agent for one in rows} == {"first", "second"}
    assert {one.reward for one in rows} == {-1.0, 0.0, 1.0}
    baselines: dict[str, float] = {}
    for one in rows:  # one after the other, over all steps
        before = baselines.get(one.agent, 0.0)
        assert one.advantage == one.reward - before
        baselines[one.agent] = 0.5 * before + 0.5 * one.reward
    run = KeptRun.open(swarm.run_dir)
    backend = Factories(backend=lambda config: WitnessBackend(Fakes()))
    async with RunReplay(run, factories=backend) as replay, aclosing(replay.steps()) as steps:
        assert [one.outcome async for one in steps] == ["equal"] * STEPS
