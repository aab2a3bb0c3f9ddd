"""Compare the memory plans of `primerl-node doctor` with measurements on a GPU. Run by hand.

    bash scripts/bench/gpu.sh gpu_plan [--shapes 0.6b 4b] [--skip-trainer] [--skip-engines] [--quick]
        [--json FILE]

Engines: vLLM is started with a share of the GPU; its cache in tokens is compared with the planned cache, and
the memory reported by nvidia-smi with the whole plan. Learners: each row of scripts/bench/trainer.py runs in a
separate process (leftovers of an earlier row would count), and its peak is compared with the plan's. A slightly
careful plan passes: the goal is that a plan never promises more memory than there is, and wastes at most a
tenth.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from primerl.node import gpus
from primerl.node.config.run import EngineConfig
from primerl.node.config.training import TrainingConfig
from primerl.node.inference.build import build_engine
from primerl.node.memory_plan.memory import GIB, Device, plan_engine, plan_learner, token_bytes
from primerl.node.memory_plan.shape import ModelShape, read_shape
from primerl.node.models import huggingface
from primerl.node.models.json_files import read_json
from primerl.scripts.bench.models import SHAPES, make_model
from primerl.scripts.bench.report import at_most, conclude, make_parser

BENCH = Path(__file__).resolve().parent
ROWS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective recompute": {"activation_checkpointing": "selective"},
    "full recompute": {"activation_checkpointing": "full"},
    "optimizer offload": {"optimizer_offload": True},
    "head chunk 1,024": {"head_chunk": 1024},
}
WASTE = 0.1
TOKENS = 16384


class Row(NamedTuple):
    """One comparison; a plan is good if it is not below the measurement, and not far above."""

    what: str
    planned: float
    found: float
    goal: str
    good: bool


def engines(
    shape_name: str, directory: Path, shape: ModelShape, device: Device, *, quick: bool
) -> list[Row]:
    """Compare vLLM's cache and memory with the plan, with and without CUDA graphs."""
    rows: list[Row] = []
    for eager in (True,) if quick else (True, False):
        fingerprint = "projection"
        config = EngineConfig(
            type="vllm",
            dtype="bfloat16",
            max_batch=256,
            max_model_len=2048,
            vllm={"gpu_memory_utilization": 0.5, "enforce_eager": eager},
        )
        plan = plan_engine(config, shape, device, fingerprint=fingerprint)
        tokens, taken = asyncio.run(started(config, directory, fingerprint))
        cache = tokens * token_bytes(config, shape) / GIB
        name = f"{shape_name} vLLM, {'eager' if eager else 'graphs'}, {fingerprint}"
        close = plan.cache / GIB <= cache * 1.001 and plan.cache / GIB >= cache * (1 - WASTE)
        rows.append(Row(f"{name}: cache", plan.cache / GIB, cache, "<= found, 10 %", close))
        # no update is in progress
        beside = [one.nbytes for one in plan.beside if "update" not in one.name]
        most = (plan.budget + sum(beside)) / GIB
        rows.append(Row(f"{name}: of the GPU", most, taken / GIB, ">= found", most >= taken / GIB))
    return rows


async def started(config: EngineConfig, directory: Path, fingerprint: str) -> tuple[int, int]:
    """Return the tokens of the cache, and the GPU bytes taken after a first load."""
    before = gpus.visible_memory()[0].free
    engine = build_engine(config)
    try:
        await engine.start(directory, fingerprint=fingerprint)
        await engine.load(0, huggingface.policy_state(huggingface.load_model(directory)))
        return engine.stats().kv_tokens, before - gpus.visible_memory()[0].free
    finally:
        await engine.close()


def learners(shape_name: str, shape: ModelShape, *, quick: bool) -> list[Row]:
    """Compare the peak of each row, in a separate process, with the plan."""
    rows: list[Row] = []
    for name, options in list(ROWS.items())[: 1 if quick else None]:
        found = peak(shape_name, name)
        if found is None:
            continue
        plan = plan_learner(
            TrainingConfig.model_validate({"seq_len": TOKENS, **options}),
            shape,
            gpu=True,
            exports=False,
        )
        lines = {item.name: item.nbytes for item in plan.peak}
        # torch's allocator does not count the context
        planned = (plan.total - lines.get("CUDA context, libraries", 0)) / GIB
        good = found <= planned <= found * (1 + WASTE)
        rows.append(Row(f"{shape_name} learner, {name}", planned, found, ">= found, 10 %", good))
    return rows


def peak(shape_name: str, row: str) -> float | None:
    """Return the peak in GiB from scripts/bench/trainer.py; None if it gives no figures."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "row.json")
        command = [
            *(sys.executable, str(BENCH / "trainer.py"), "--shape", shape_name, "--steps", "2"),
            *("--tokens", str(TOKENS), "--rows", row, "--json", str(report)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if not report.is_file():
            print(f"{row}: no figures ({done.stderr.strip()[-300:]})")
            return None
        rows = json.loads(report.read_text())["rows"]
        return next((one["peak_gib"] for one in rows if one.get("row") == row), None)


def show(rows: list[Row]) -> None:
    """Print the table."""
    print("| | planned, GiB | found, GiB | goal | |\n|---|---|---|---|---|")
    for row in rows:
        verdict = "ok" if row.good else "MISSED"
        print(f"| {row.what} | {row.planned:.2f} | {row.found:.2f} | {row.goal} | {verdict} |")


def main() -> int:
    """Measure, print, and return exit code 1 if some plan was wrong."""
    parser = make_parser(__doc__, "one engine, one row of the learner")
    parser.add_argument("--shapes", nargs="+", default=["0.6b"], choices=sorted(SHAPES))
    parser.add_argument("--skip-trainer", action="store_true")
    parser.add_argument("--skip-engines", action="store_true")
    options = parser.parse_args()
    there = gpus.visible_memory()
    if not there:
        print("no GPU: nothing to compare")
        return 2
    device = Device("cuda", there[0].total)
    rows: list[Row] = []
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as where:
            directory = Path(where)
            make_model(directory, name)
            shape = read_shape(read_json(directory / "config.json"))
            if not options.skip_engines:
                rows += engines(name, directory, shape, device, quick=options.quick)
        if not options.skip_trainer:
            rows += learners(name, shape, quick=options.quick)
        show(rows)
    wrong = sum(not row.good for row in rows)
    goals = [at_most("plans that are wrong", wrong, 0)]
    return conclude([row._asdict() for row in rows], goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
