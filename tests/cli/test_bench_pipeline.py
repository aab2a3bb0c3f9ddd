import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primerl.node.inference.vllm_arguments import is_installed

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "pipeline.py"
TOY = "--quick --shape tiny --batch 3 --lanes 1 --rates 4 --tokens 5 --prompt 4".split()


@pytest.mark.skipif(is_installed(), reason="vLLM is installed")
def test_without_vllm_the_bench_of_pipelines_says_what_it_needs() -> None:
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 2
    assert "pipelines run vLLM: vLLM is not installed" in found.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not is_installed(), reason="vLLM is not installed")
@pytest.mark.timeout(900)
def test_the_bench_of_pipelines_runs_at_toy_size_and_every_way_draws_the_same_tokens(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.json"
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *TOY, f"--json={report}"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert report.is_file(), found.stdout + found.stderr
    told = json.loads(report.read_text())
    ways = {(row["way"], row["rtt_ms"]) for row in told["rows"]}
    narrow = {("4 Mbit/s raw", 20.0), ("4 Mbit/s int8", 20.0)}
    assert ways == {("whole", 0.0)} | narrow | {
        (way, rtt) for way in ("one", "overlap") for rtt in (0.0, 50.0, 100.0)
    }
    assert all(row["tokens_per_s"] > 0 for row in told["rows"])
    others = next(goal for goal in told["goals"] if goal["name"].startswith("ways that draw"))
    assert (others["value"], others["ok"]) == (0.0, True)
