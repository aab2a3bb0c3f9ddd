"""`primerl-node replay`: a table of steps and an exit code."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.replay_cases import KEEP, LearningSwarm, finished, real_model
from support.swarm import quiet_registry

from primerl.cli.replay import StepTable
from primerl.node.app.factories import make_backend
from primerl.node.app.replay import ReplayedStep
from primerl.node.storage.rollouts import RolloutFiles

from .conftest import Cli

__all__ = ["quiet_registry"]

LOST = [ReplayedStep(step, "unchecked", "its rollouts are not kept") for step in (1, 2, 3)]
EQUAL = ReplayedStep(4, "equal", "", 96, "ab" * 32, "ab" * 32, weights=True)
WRONG = ReplayedStep(5, "departs", "another state", 80, "cd" * 32, "ef" * 32, True, 0.5, 0.25)


def test_steps_are_listed_and_those_not_checked_for_one_reason_share_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = StepTable()
    for step in (*LOST, EQUAL, WRONG, replace(LOST[0], step=6)):
        table.add(step)
    table.flush()
    heading, lost, equal, wrong, last = capsys.readouterr().out.splitlines()
    assert heading.split() == ["STEP", "SAMPLES", "STATE", "WEIGHTS", "RESULT"]
    assert lost.split() == ["1-3", "-", "-", *"not checked: its rollouts are not kept".split()]
    assert equal.split() == ["4", "96", "abababababab", "held", "equal"]
    assert wrong.endswith("departs (largest difference 0.5, 25.00% of the way): another state")
    assert last.split()[0] == "6"


def test_a_run_follows_until_a_kept_reward_is_changed(cli: Cli, tmp_path: Path) -> None:
    model = real_model(tmp_path / "model")
    training = {"lr": 1e-3, "threads": 1, "device": "cpu"}
    run = LearningSwarm(tmp_path, model, backend=make_backend, training=training, **KEEP)
    run_dir = str(asyncio.run(finished(run)))
    ran = cli("replay", run_dir)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1].startswith("4 equal, 0 close, 0 depart, 0 not checked")
    files = RolloutFiles(run.run_dir / "rollouts", fsync=False)
    record, kept = files.record(4), files.read(4)
    files.write(record, [replace(one, reward=1.0 - one.reward) for one in kept])
    ran = cli("replay", run_dir, "--json")
    assert ran.code == 1
    told = json.loads(ran.out)
    assert [one["outcome"] for one in told["steps"]] == ["equal"] * 3 + ["departs"]
    assert told["follows"] is False
    for path in files.directory.iterdir():
        path.unlink()
    ran = cli("replay", run_dir)
    assert ran.code == 1, "nothing could be checked"
    assert "1-4" in ran.out


def test_a_directory_without_a_run_is_refused(cli: Cli, tmp_path: Path) -> None:
    cli("replay", str(tmp_path)).refused(2, "holds no run")
