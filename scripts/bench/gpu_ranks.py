"""Measure the fsdp backend's calls on real GPUs, and recovery from a killed rank.

    bash scripts/bench/gpu.sh gpu_ranks [--ranks 2] [--shape 0.6b|tiny] [--tokens 16384] [--device cuda|cpu]
        [--quick] [--json FILE]

A killed rank must raise an error; then training starts again from the checkpoint. Needs torch with CUDA and
transformers. Random weights; every figure is in seconds.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from primerl.node.config.run import TrainingConfig
from primerl.node.config.training import FsdpConfig
from primerl.node.errors import RankFailed
from primerl.node.models.model_files import vocab_size
from primerl.node.training.backend import TrainBatch
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.rank_group import RankGroup
from primerl.node.weights.state import digests
from primerl.node.weights.state_history import state_bytes
from primerl.scripts.bench.models import SHAPES, fake_batch, make_model
from primerl.scripts.bench.report import Goal, at_least, conclude, make_parser

T = TypeVar("T")
Row = dict[str, str | float]
FIGURES = ("perf/throughput", "perf/mfu", "perf/peak_memory", "optim/grad_norm")


async def measure(options: argparse.Namespace, directory: Path) -> tuple[list[Row], list[Goal]]:
    """Measure steps, copies and checkpoints, kill a rank, and resume from the checkpoint."""
    rows: list[Row] = []

    async def timed(name: str, work: Awaitable[T]) -> T:
        began = time.perf_counter()
        found = await work
        note(name, time.perf_counter() - began)
        return found

    def note(name: str, seconds: float) -> None:
        rows.append({"what": name, "seconds": seconds})
        print(f"{name:36} {seconds:8.2f}", flush=True)

    model_dir = directory / "model"
    await asyncio.to_thread(make_model, model_dir, options.shape)
    vocabulary = vocab_size(model_dir)

    def batch(step: int) -> TrainBatch:
        return TrainBatch(step, fake_batch([options.tokens] * options.ranks, vocabulary, seed=step))

    config = TrainingConfig(
        backend="fsdp",
        seq_len=options.tokens,
        device=options.device,
        lr=1e-5,
        fsdp=FsdpConfig(ranks=options.ranks, timeout_s=120.0),
    )
    group = RankGroup(config, options.ranks)
    await timed("ranks start", group.start())
    backend = FsdpBackend(config, max_steps=100, seed=0, ranks=group)
    await timed("model is loaded", backend.start(model_dir))
    first = await timed("first snapshot", backend.snapshot())
    print(f"{'policy, MB':36} {state_bytes(first.state) / 1e6:8.0f}")
    for step in range(1, 5):
        name = "first step (compiles)" if step == 1 else "step"
        values = (await timed(name, backend.step(batch(step)))).values
        for key in FIGURES:
            print(f"    {key:32} {values.get(key, 0.0):8.2f}")
        await timed("snapshot", backend.snapshot())
    await timed("state", backend.state())
    await timed("save", backend.save(directory / "saved"))
    await timed("stage", backend.stage())
    await timed("write what was staged", backend.write_staged(directory / "staged"))
    saved = digests((await backend.snapshot()).state)
    call = backend.step(batch(5))
    asyncio.get_running_loop().call_later(0.2, os.kill, group.pids[-1], signal.SIGKILL)
    began, failed = time.perf_counter(), False
    try:
        await call
        await asyncio.sleep(1.0)
        await backend.step(TrainBatch(6, []))
    except RankFailed as error:
        failed = True
        note("killed rank: error after", time.perf_counter() - began)
        print(f"    {error}")
    await backend.close()
    await group.close()
    again = FsdpBackend(config, max_steps=100, seed=0)
    await timed("new ranks", again.start(model_dir))
    await timed("load", again.load(directory / "saved"))
    same = digests(await again.state()) == saved
    await timed("step", again.step(batch(5)))
    await timed("export", again.export(directory / "exported"))
    await timed("close", again.close())
    return rows, [
        at_least("a killed rank is an error", float(failed), 1.0),
        at_least("the checkpoint is the policy that was saved", float(same), 1.0),
    ]


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "a tiny model on the CPU")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.quick:
        options.shape, options.tokens, options.device = "tiny", 128, "cpu"
    with tempfile.TemporaryDirectory() as directory:
        rows, goals = asyncio.run(measure(options, Path(directory)))
    return conclude(rows, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
