"""Three steps of every recipe for a laptop, as its comment says, with the data that its script writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

CONFIGS = ROOT / "configs"
LAPTOPS = [
    "debug",
    "demo",
    "mixture",
    *(f"{path.parent.name}/laptop" for path in CONFIGS.glob("*/laptop.toml")),
]
LAPTOPS.remove("smollm2/laptop")  # its model is installed: test_smollm2.py
SHORT = "--max-steps 3 --evaluation.prompts 0 --training.filter-zero-advantages false".split()
"""A model that was shown nothing has no reward yet: its groups are trained all the same."""
PATIENCE_S = 280.0


def run(home: Path, *arguments: str) -> None:
    """Run a program in `home`, which is its HOME, too; fails with what it printed."""
    environment = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAPTOPS)
def test_three_steps_of_a_recipe_for_a_laptop(tmp_path: Path, name: str) -> None:
    program = ("-m", "primerl.cli.main")
    run(tmp_path, str(ROOT / "scripts" / "recipe_data.py"))
    taught = CONFIGS / f"{name.replace('/laptop', '/sft_laptop')}.toml"
    more = ["--warmup.max-steps", "3"]
    if "/" in name and taught.is_file():
        sft = taught.relative_to(CONFIGS).with_suffix("").as_posix()
        run(tmp_path, *program, "sft", "@", sft, "--max-steps", "3")
        (weights,) = (tmp_path / "outputs").glob("*/weights/step_3")
        more = ["--model.name", str(weights)]
    run(tmp_path, *program, "rl", "@", name, *SHORT, *more)
    (metrics,) = (tmp_path / "outputs").glob(
        f"{name.replace('_', '-').replace('/', '-')}/metrics.jsonl"
    )
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert max(steps) == 3
