"""A whole run with a curriculum: what it chooses, what it replaces, and that a crash costs it nothing."""

from pathlib import Path
from typing import Any

import msgspec
from support.swarm import Swarm
from support.waiting import until
from support.witness import Fakes

from primerl.node.config.run import RunConfig
from primerl.node.storage.rollouts import RolloutFiles
from primerl.node.trainer.state import TrainerState
from primerl.node.training.checkpoint import Checkpoints

TASKS = 24
CURRICULUM = {
    "curriculum": {
        "sampler": {"num_tasks": TASKS},
        "gates": {"signal": {}},
    }
}


async def saved(run_dir: Path, step: int) -> TrainerState:
    parts = await Checkpoints(run_dir / "checkpoints", keep_last=1).read(step)
    return msgspec.json.decode(parts["cursor"], type=TrainerState)


async def test_a_killed_trainer_goes_on_with_the_rewards_of_its_tasks(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=3)
    settings: dict[str, Any] = {
        "training": CURRICULUM,
        "checkpoint": {"interval": 1, "keep_last": 9},
    }
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=6, **settings) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until(lambda: fakes.newest("w1") == 3)
        await swarm.crash_trainer()
        fakes.go.set()
        await swarm.start_trainer(resume=True)
        summary = await swarm.finished()
        for worker in swarm.workers.values():
            await worker.ended()
        batches = swarm.backend.batches
    states = {step: await saved(swarm.run_dir, step) for step in range(1, 7)}
    rewards = {step: state.curriculum["reverse-text"] for step, state in states.items()}
    assert rewards[1]
    for step in range(1, 6):  # also over the crash: what was seen stays seen
        assert rewards[step].keys() <= rewards[step + 1].keys()
    assert rewards[6].keys() <= set(range(TASKS))
    assert [batch.step for batch in batches] == [4, 5, 6]
    assert set(summary["rejected"]) <= {"stale"}
    lines = {line["step"]: line for line in swarm.metrics()}
    pools = ("unseen", "hard", "normal", "easy")
    for step, line in lines.items():
        assert sum(line[f"curriculum/reverse-text/sampler/pool/{name}"] for name in pools) == TASKS
        assert line["batch/filtered"] == 0, f"step {step} holds a group without signal"


async def test_groups_of_equal_rewards_are_replaced_and_kept_to_be_read(
    tmp_path: Path, model_dir: Path
) -> None:
    gate = {"curriculum": {"gates": {"signal": {}}}}
    async with Swarm(tmp_path, model_dir, max_steps=3, training=gate) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        summary = await swarm.finished()
        lines = swarm.metrics()
    wanted = RunConfig.model_validate(swarm.settings).rollouts.groups_per_batch
    assert [line["batch/groups"] for line in lines] == [wanted] * 3
    assert [line["batch/zero_advantage"] for line in lines] == [0] * 3
    assert not summary["rejected"]
    files = RolloutFiles(swarm.run_dir / "rollouts", fsync=False)
    rows = [row for step in (1, 2, 3) for row in files.read(step)]
    replaced = [row for row in rows if row.reason == "not_admitted"]
    share = min(line["curriculum/reverse-text/admission_rate"] for line in lines)
    assert bool(replaced) is (share < 1)
    by_group: dict[tuple[int, int], set[float]] = {}
    for row in replaced:
        assert row.verdict == "unused"
        by_group.setdefault((row.step, row.group), set()).add(row.reward)
    assert all(len(found) == 1 for found in by_group.values())
