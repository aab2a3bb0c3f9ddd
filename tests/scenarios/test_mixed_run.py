"""A run with three environments and two workers, one of which can play only two of them."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.counting_environment import CountingEnvironment
from support.swarm import Swarm
from support.waiting import until
from support.witness import Fakes

from primerl.node.environments import environment
from primerl.node.environments.chat import DATE
from primerl.node.errors import NodeError, UsageError
from primerl.node.storage.run_files import MARK, begun_on

ENVIRONMENTS: list[dict[str, Any]] = [
    {"id": "reverse-text", "name": "letters", "group_size": 2},
    {"id": "arithmetic", "ratio": 2, "sampling": {"max_tokens": 6}},
    {"id": "word-game", "group_size": 6, "advantage": "rloo"},
]
NAMES = ["letters", "arithmetic", "word-game"]


class Missing(CountingEnvironment):
    """Does not start."""

    async def start(self) -> None:
        """See Environment."""
        raise environment.EnvironmentFailed("its package is not installed: install it")


class Dying(CountingEnvironment):
    """No process of it stays up."""

    async def run(self, task: environment.Task, policy: environment.Policy) -> environment.Episode:
        """See Environment."""
        raise environment.EnvironmentGivenUp("its process was lost five times")


async def test_a_run_with_several_environments_learns_from_all_of_them(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes, evaluated = Fakes(last_step=4), {"prompts": 2}
    async with Swarm(
        tmp_path,
        model_dir,
        fakes=fakes,
        environments=ENVIRONMENTS,
        max_steps=12,
        evaluation=evaluated,
    ) as swarm:
        swarm.environments["w2"] = {"word-game": Missing()}
        await swarm.start_trainer()
        all_of_them, some = swarm.add_worker("w1"), swarm.add_worker("w2")
        for worker in (all_of_them, some):
            await swarm.until_row(worker, lambda row: row["accepted"] > 0, 60.0)
        await swarm.wait_step(4)
        rows = {row["name"]: row for row in (await swarm.trainer.status())["environments"]}
        assert [rows[name]["workers"] for name in NAMES] == [2, 2, 1]
        assert [rows[name]["share"] for name in NAMES] == [0.25, 0.5, 0.25]
        assert (await swarm.trainer.status())["warnings"] == []
        fakes.go.set()
        summary = await swarm.finished()
        assert summary["rejected"].keys() <= {"stale"}  # a slow worker may come too late
        for worker in (all_of_them, some):
            await worker.ended()
        sizes = [len(batch.samples) for batch in swarm.backend.batches]
        lines = [line for line in swarm.metrics() if "reward/mean" in line]
    assert len(sizes) == len(lines) == 12
    accepted = {name: lines[-1][f"accepted/{name}"] for name in NAMES}
    assert all(accepted.values())
    assert sum(accepted.values()) == lines[-1]["rollouts/accepted"]
    assert sum(lines[-1][f"rejected/{name}"] for name in NAMES) == lines[-1]["rollouts/rejected"]
    # of four groups a batch, one is of 2, two are of 4 and one is of 6, in some order; those that take longest
    # to verify come last
    groups = Counter(
        {name: accepted[name] / size for name, size in zip(NAMES, (2, 4, 6), strict=True)}
    )
    assert 0.15 < groups["word-game"] / groups.total() < 0.4
    assert 0.35 < groups["arithmetic"] / groups.total() < 0.65
    for name in NAMES:
        rewards = [line[f"reward/{name}"] for line in lines]
        assert all(reward is None or 0.0 <= reward <= 1.0 for reward in rewards)
        assert summary["environments"][name]["reward_after"] >= 0.0


async def test_every_node_of_a_run_writes_the_date_of_its_beginning_into_prompts(
    tmp_path: Path, model_dir: Path
) -> None:
    model = Path(shutil.copytree(model_dir, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}")
    async with Swarm(tmp_path, model, environments=ENVIRONMENTS[:2], max_steps=3) as swarm:
        await swarm.start_trainer()
        mark = swarm.trainer.data_dir.parent / MARK
        began = begun_on(mark.parent)
        swarm.add_worker("w1")
        await swarm.wait_step(1)
        await swarm.crash_trainer()
        mark.write_text(
            mark.read_text().replace(began, "2020-02-20")
        )  # what the manifest says counts
        await swarm.start_trainer(resume=True)
        await swarm.finished()
        dates = [one.chat_template_kwargs for one in swarm.played]
    assert len(dates) >= 6  # of two trainers and a worker
    assert dates == [{DATE: began}] * len(dates)


async def test_a_run_goes_on_with_what_its_workers_can_play_and_says_what_is_missing(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=2)
    async with Swarm(
        tmp_path, model_dir, fakes=fakes, environments=ENVIRONMENTS, max_steps=3
    ) as swarm:
        swarm.environments["w2"] = {"word-game": Missing()}
        await swarm.start_trainer()
        swarm.add_worker("w2")
        await swarm.wait_step(2)
        (warning,) = (await swarm.trainer.status())["warnings"]
        assert "'word-game'" in warning
        fakes.go.set()
        summary = await swarm.finished()
    assert summary["environments"]["word-game"]["accepted"] == 0
    assert summary["environments"]["letters"]["accepted"] > 0


async def test_a_worker_that_can_play_nothing_of_a_run_says_why(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, environments=ENVIRONMENTS) as swarm:
        swarm.environments["w1"] = {one["id"]: Missing() for one in ENVIRONMENTS}
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        assert worker.task is not None
        await until(worker.task.done)
        error = worker.task.exception()
        assert isinstance(error, NodeError)
        assert "the environment 'letters' does not start: its package is not installed" in str(
            error
        )


async def test_an_environment_that_is_given_up_costs_its_worker_that_environment_alone(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, environments=ENVIRONMENTS, max_steps=4) as swarm:
        swarm.environments["w1"] = {"word-game": Dying(name="word-game")}
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        summary = await swarm.finished()
        await worker.ended()
    assert summary["environments"]["word-game"]["accepted"] == 0
    assert summary["environments"]["letters"]["accepted"] > 0
    assert summary["environments"]["arithmetic"]["accepted"] > 0


async def test_a_resumed_run_goes_on_in_each_environment_where_it_was(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=2)
    async with Swarm(
        tmp_path, model_dir, fakes=fakes, environments=ENVIRONMENTS, max_steps=4
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(2)
        await swarm.crash_trainer()
        fakes.go.set()
        with pytest.raises(UsageError, match="began with the environments letters"):
            await swarm.start_trainer(resume=True, environments=ENVIRONMENTS[:2])
        hotter = [{**one, "sampling": {"temperature": 1.5}} for one in ENVIRONMENTS]
        with pytest.raises(
            UsageError, match="samples letters with temperature 1, max_tokens 4, top_p"
        ):
            await swarm.start_trainer(resume=True, environments=hotter)
        for key, value in (
            ("args", {"alphabet": "abc"}),
            ("max_turns", 3),
            ("tool_call_parser", "none"),
            ("chat_template_kwargs", {"a": 1}),
            ("earlier_reasoning", "drop"),
            ("stop", ["."]),
        ):
            other = [{**one, key: value} for one in ENVIRONMENTS]
            with pytest.raises(UsageError, match=f"began with another {key} of letters"):
                await swarm.start_trainer(resume=True, environments=other)
        with pytest.raises(UsageError, match=r"began with another seed of letters \(0, now 7\)"):
            await swarm.start_trainer(resume=True, environments=ENVIRONMENTS, seed=7)
        await swarm.start_trainer(resume=True, environments=ENVIRONMENTS, seed=0)
        summary = await swarm.finished()
    assert summary["steps"] == 4
    assert all(summary["environments"][name]["accepted"] for name in NAMES)
