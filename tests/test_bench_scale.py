"""A small swarm in virtual time: how soon it has a version, and what that costs its trainer."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.simulated_swarm import Home

from primerl.scripts.bench.scale import COPIES, TIMES, Row, simulate_spread

HOME = Home(version_bytes=1_000_000, step_s=3.0, seed=3)
WORKERS = 5


def test_a_version_soon_reaches_a_swarm_at_home_and_leaves_its_trainer_at_most_twice() -> None:
    row = measured()
    assert row.most_s <= TIMES * row.ideal_s
    assert row.copies <= COPIES


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_in_a_process_with_other_hashes() -> None:
    """Nothing depends on the machine, on addresses of objects, or on the order of sets."""
    figures = [in_process(hashes) for hashes in ("1", "2")]
    assert figures[0] == figures[1] == without_cpu(measured())


def in_process(hashes: str) -> dict[str, Any]:
    """Return the figures that a process with that PYTHONHASHSEED finds."""
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": str(here)}
    program = "import json, test_bench_scale as test; print(json.dumps(test.without_cpu(test.measured())))"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        check=True,
        timeout=300,
        text=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def measured() -> Row:
    """Simulate the small swarm."""
    return simulate_spread(HOME, WORKERS, versions=1)


def without_cpu(row: Row) -> dict[str, Any]:
    """Return the figures of a row that another machine would find, too."""
    return {name: value for name, value in asdict(row).items() if name != "cpu_s"}
