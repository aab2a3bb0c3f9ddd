"""What a training step costs, option by option: tokens/s, MFU, memory, and how it scales.

    python scripts/bench/trainer.py [--shape tiny|50m|0.6b|4b|8b|moe] [--tokens N ...] [--rows NAME ...]
        [--ranks N ...] [--steps N] [--quick] [--json FILE]

Fake data, random weights: the model has the shape's config, a step is one packed row of `--tokens` tokens a
rank (one sequence, or as many as a row says), and everything else is what a run does: the same learner, losses,
clipping, fp32 masters. Beside it a plain loop in the same run: transformers' model in bf16 with its own AdamW,
compiled per layer, chunked cross entropy, cuDNN attention (trainer_plain.py). Rows with torch's flash kernel
show what training is without the extra `flash`.

    MFU = (6 N + 6 L S H D) x tokens/s / peak        as prime-rl's published figures (node/training/meter.py)

With `--ranks 1 4` it starts itself under torchrun with one rank and with four, and compares: weak scaling.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from goals import conclude
from shapes import SHAPES
from trainer_goals import judge
from trainer_plain import PlainLoop
from trainer_rows import ROWS, Row, fake_batch, make_model

from primerl.node.config.training import TrainingConfig
from primerl.node.training import attention_kernels
from primerl.node.training.backend import TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.training.meter import cost_of, peak_flops
from primerl.node.training.world import World

ON_CUDA = torch.cuda.is_available()
GIB = 1 << 30
PLAIN = {
    "plain loop": {"recompute": False, "tuned": False},
    "plain loop, tuned": {"recompute": False, "tuned": True},
    "plain loop, full recompute": {"recompute": True, "tuned": False},
}


def measure(
    row: Row, model_dir: Path, tokens: int, steps: int, world: World | None
) -> dict[str, Any]:
    """One row of the table; on every rank the same figures."""
    lengths = row.lengths(tokens)
    changes: dict[str, Any] = {"seq_len": tokens, "threads": 0 if ON_CUDA else 1, **row.options}
    config = TrainingConfig().model_copy(update=changes)
    gc.collect()  # layers of the row before are in circles: uncollected they count as this row's memory
    if ON_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    agrees = attention_kernels.flash4_agrees
    if not row.flash4:
        attention_kernels.flash4_agrees = lambda *_: False
    learner = Learner.build(model_dir, config, max_steps=1000, seed=0, temperature=1.0, world=world)
    ranks = world.data_size if world else 1
    vocabulary = learner.vocabulary
    batches = [
        TrainBatch(step, fake_batch(lengths * ranks, vocabulary, seed=step), row.objective)
        for step in range(1, steps + 3)
    ]
    try:
        began = time.perf_counter()
        learner.step(batches[0])
        first = time.perf_counter() - began
        learner.step(batches[1])  # shapes that vary are compiled once more
        found = [learner.step(batch).values for batch in batches[2:]]
    finally:
        learner.close(keep_world=world is not None)
        attention_kernels.flash4_agrees = agrees
    seconds = sorted(one["time/step"] for one in found)[len(found) // 2]
    busy = sorted(one["time/forward_backward"] + one["time/optimizer"] for one in found)[
        len(found) // 2
    ]
    return {
        "row": row.name,
        "tokens": tokens,
        "sequences": len(lengths),
        "ranks": world.size if world else 1,
        "step_ms": 1e3 * seconds,
        "tokens_per_s": sum(lengths) * ranks / seconds,
        "mfu": found[-1].get("perf/mfu", 0.0) * found[-1]["time/step"] / seconds,
        "peak_gib": found[-1].get("perf/peak_memory", 0.0),
        "overhead": 1 - busy / seconds,
        "first_s": first,
        "skipped": sum(one["optim/skipped"] for one in found),
    }


def measure_plain(name: str, model_dir: Path, tokens: int, steps: int) -> dict[str, Any]:
    """The same for the plain loop."""
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loop = PlainLoop(model_dir, **PLAIN[name])
    (sample,) = fake_batch([tokens], loop.config.vocab_size, seed=0)
    began = time.perf_counter()
    loop.step(sample.token_ids)
    first = time.perf_counter() - began
    loop.step(sample.token_ids)
    seconds = sorted(_timed(lambda: loop.step(sample.token_ids)) for _ in range(steps))[steps // 2]
    cost = cost_of(loop.config, loop.parameters)
    peak = peak_flops(torch.cuda.get_device_name()) if ON_CUDA else None
    return {
        "row": name,
        "tokens": tokens,
        "sequences": 1,
        "ranks": 1,
        "step_ms": 1e3 * seconds,
        "tokens_per_s": tokens / seconds,
        "mfu": 100 * cost.flops([tokens]) / seconds / peak if peak else 0.0,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if ON_CUDA else 0.0,
        "overhead": 0.0,
        "first_s": first,
        "skipped": 0.0,
    }


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def agreement(model_dir: Path) -> float:
    """Largest difference of a token's logprob between a packed row and a row of its own, nats."""
    config = TrainingConfig(seq_len=4096, threads=0 if ON_CUDA else 1)
    learner = Learner.build(model_dir, config, max_steps=1, seed=0, temperature=1.0)
    try:
        samples = fake_batch(
            [512, 300, 200, 77, 33], learner.vocabulary, seed=9
        )  # as they are packed
        apart = [value for one in samples for value in learner.packed_logprobs([one])]
        together = learner.packed_logprobs(samples)
        return max(abs(a - b) for a, b in zip(apart, together, strict=True))
    finally:
        learner.close()


def run_alone(options: argparse.Namespace, model_dir: Path) -> list[dict[str, Any]]:
    """Every row on one rank, the plain loop beside it."""
    found: list[dict[str, Any]] = []

    def add(name: str, tokens: int, work: Callable[[], dict[str, Any]]) -> None:
        found.append(_guarded(name, tokens, work))
        show(found[-1])

    steps = options.steps
    for tokens in options.tokens:
        for row in chosen(options.rows, tokens):
            add(row.name, tokens, partial(measure, row, model_dir, tokens, steps, None))
        for name in PLAIN:
            if not options.rows or name in options.rows:
                add(name, tokens, partial(measure_plain, name, model_dir, tokens, steps))
    return found


def _guarded(name: str, tokens: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ran out of memory is a row that says so."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return {"row": name, "tokens": tokens, "failed": "out of memory"}


def run_ranks(options: argparse.Namespace, model_dir: Path) -> list[dict[str, Any]]:
    """The rows under torchrun, for each number of ranks."""
    found: list[dict[str, Any]] = []
    for ranks, rows in groups(options):
        with tempfile.TemporaryDirectory() as name:
            report = Path(name, "rows.json")
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                f"--nproc-per-node={ranks}",
                __file__,
                f"--as-rank={model_dir}",
                f"--json={report}",
                f"--steps={options.steps}",
                "--tokens",
                *map(str, options.tokens),
                "--rows",
                *(row.name for row in rows),
            ]
            threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
            subprocess.run(command, check=True, timeout=540, env={**os.environ, **threads})
            found += json.loads(report.read_text())
    return found


def groups(options: argparse.Namespace) -> Iterator[tuple[int, list[Row]]]:
    """Ranks, and the rows that run in one start of them: a layout of ranks is made once a process."""
    names = options.rows or ["none", "weights kept whole"]
    for ranks in options.ranks:
        layouts: dict[tuple[int, int], list[Row]] = {}
        for tokens in options.tokens:
            for row in chosen(names, tokens, ranks):
                rows = layouts.setdefault(row.mesh, [])
                rows += [row] if row not in rows else []
        for rows in layouts.values():
            yield ranks, rows


def run_as_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank does; the first shows it."""
    kind = "auto" if ON_CUDA else "cpu"
    # one rank is the local backend, which shards nothing: what many are compared with
    alone = os.environ["WORLD_SIZE"] == "1"
    layout = next(row.options for row in ROWS if row.name in options.rows)
    world = (
        World.alone(torch.device("cuda" if ON_CUDA else "cpu"))
        if alone
        else World.join(TrainingConfig(device=kind).model_copy(update=layout))
    )
    found: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for row in chosen(options.rows, tokens, world.size):
            work = partial(measure, row, Path(options.as_rank), tokens, options.steps, world)
            # a rank of several that lacks memory leaves the others waiting: that ends the bench
            found.append(_guarded(row.name, tokens, work) if alone else work())
            if world.is_first:
                show(found[-1])
    first = world.is_first
    world.close()
    return found if first else []


def chosen(names: Sequence[str], tokens: int, ranks: int = 1) -> list[Row]:
    """The rows of these names, all if there are none, that make sense there."""
    wanted = [row for row in ROWS if not names or row.name in names]
    return [row for row in wanted if row.suits(tokens, ranks)]


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    head = f"{row['row']:34} {row['tokens']:7,}"
    if "failed" in row:
        print(f"{head}  {row['failed']}", flush=True)
        return
    print(
        f"{head} x{row['ranks']}  {row['step_ms']:9.1f} ms {row['tokens_per_s']:9,.0f} tok/s"
        f"  MFU {row['mfu']:5.1f} %"
        f"  {row['peak_gib']:6.1f} GiB  outside {100 * row['overhead']:4.1f} %  first {row['first_s']:5.1f} s",
        flush=True,
    )


def main() -> int:
    """Measure, print, and say by the exit code whether every goal was met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="0.6b" if ON_CUDA else "tiny", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of a row")
    parser.add_argument(
        "--rows",
        nargs="*",
        default=[],
        help=f"some of: {'; '.join([*(row.name for row in ROWS), *PLAIN])}",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--as-rank", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = options.tokens or ([16384] if ON_CUDA else [512])
    options.steps = 2 if options.quick else options.steps
    if options.as_rank:
        rows, goals = run_as_rank(options), []
        if options.json and rows:
            options.json.write_text(json.dumps(rows))
        return 0
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), options.shape)
        alone = options.ranks == [1]
        device = torch.cuda.get_device_name() if ON_CUDA else "CPU"
        print(f"shape {options.shape}, {device}, torch {torch.__version__}")
        rows = run_alone(options, Path(name)) if alone else run_ranks(options, Path(name))
        goals = judge(rows, agreement(Path(name)) if alone else None, cuda=ON_CUDA)
    return conclude(goals, options.json, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
