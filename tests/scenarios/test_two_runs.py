"""Two whole runs at once on one machine, each by `primerl-node rl`: nothing of theirs is the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from .processes import CONFIG, Nodes, nodes

pytestmark = [pytest.mark.net, pytest.mark.nightly, pytest.mark.timeout(1200)]
STEPS = 6


def rl(started: Nodes, name: str) -> Any:
    output = str(started.directory / "outputs")
    return started.start(
        name, "rl", "@", str(CONFIG), "--output-dir", output, "--name", name, "--launch.workers", "1",
        "--max-steps", str(STEPS), "--evaluation.prompts", "0",
    )  # fmt: skip


def test_two_runs_of_one_machine_both_end_well(tmp_path: Path) -> None:
    with nodes(tmp_path) as started:
        programs = {name: rl(started, name) for name in ("left", "right")}
        again = rl(started, "left")  # the same directory: only one of them may have it
        codes = {name: program.wait(900) for name, program in programs.items()}
        assert sorted([codes["left"], again.wait(900)]) == [0, 4], started.logs()
        assert codes["right"] == 0, started.logs()
    runs: set[str] = set()
    for name in programs:
        run_dir = tmp_path / "outputs" / name
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["steps"] == STEPS
        assert summary["accepted"] > 0
        runs.add((run_dir / "ticket.txt").read_text())
        assert {log.name for log in (run_dir / "logs").glob("*.log")} == {
            *("trainer.log", "worker_1.log"),
        }
    assert len(runs) == 2
