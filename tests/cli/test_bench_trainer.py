import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "trainer.py"
ROWS = ["none", "full recompute", "sft", "packed, 16 sequences", "plain"]


def test_the_bench_of_the_trainer_runs_at_toy_size_and_says_what_it_was_to_reach(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--tokens", "128", f"--json={report}"]
    found = subprocess.run(
        [*command, "--rows", *ROWS],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    told = json.loads(report.read_text())
    names = [row["row"] for row in told["rows"]]
    assert names[:4] == ROWS[:4]
    assert {"plain loop", "plain loop, tuned"} <= set(names)
    assert all(row["tokens_per_s"] > 0 and not row["skipped"] for row in told["rows"])
    assert [goal["name"] for goal in told["goals"]] == ["packed and alone differ by"]
