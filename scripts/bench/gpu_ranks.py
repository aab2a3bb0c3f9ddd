"""The fsdp backend on real GPUs: what each call costs, and that a killed rank is an error and a new start.

    bash scripts/bench/gpu.sh gpu_ranks [--ranks 2] [--shape 0.6b|tiny] [--tokens 16384] [--device cuda|cpu]

Needs torch with CUDA and transformers. Random weights; every figure is seconds.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from primerl.node.config.run import ModelCreateConfig, TrainingConfig
from primerl.node.config.training import FsdpConfig
from primerl.node.models import huggingface
from primerl.node.ops.errors import RankFailed
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.rank_group import RankGroup
from primerl.node.weights.state import digests, state_bytes

T = TypeVar("T")

SHAPES = {
    "tiny": ModelCreateConfig(),
    "0.6b": ModelCreateConfig(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
}


def batch(step: int, ranks: int, tokens: int, vocabulary: int) -> TrainBatch:
    """One sequence of `tokens` for each rank."""
    rng = random.Random(step)
    rows = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(ranks)]
    mask, logprobs = [False] + [True] * (tokens - 1), [0.0] + [-8.0] * (tokens - 1)
    return TrainBatch(
        step, [Sample(row, mask, logprobs, (-1.0) ** n) for n, row in enumerate(rows)]
    )


async def timed(name: str, work: Awaitable[T]) -> T:
    """Do it, and print how long it took."""
    began = time.perf_counter()
    found = await work
    print(f"{name:36} {time.perf_counter() - began:8.2f}", flush=True)
    return found


async def measure(arguments: argparse.Namespace, directory: Path) -> None:
    """Steps, copies, checkpoints; a killed rank; and again from the checkpoint."""
    shape, ranks = SHAPES[arguments.shape], arguments.ranks
    model_dir = directory / "model"
    await asyncio.to_thread(huggingface.create, model_dir, shape, 1)
    config = TrainingConfig(
        backend="fsdp",
        seq_len=arguments.tokens,
        device=arguments.device,
        lr=1e-5,
        fsdp=FsdpConfig(ranks=ranks, timeout_s=120.0),
    )
    group = RankGroup(config, ranks)
    await timed("ranks start", group.start())
    backend = FsdpBackend(config, max_steps=100, seed=0, ranks=group)
    await timed("model is loaded", backend.start(model_dir))
    first = await timed("first snapshot", backend.snapshot())
    print(f"{'policy, MB':36} {state_bytes(first.state) / 1e6:8.0f}")
    for step in range(1, 5):
        name = "first step (compiles)" if step == 1 else "step"
        values = (
            await timed(name, backend.step(batch(step, ranks, arguments.tokens, shape.vocab_size)))
        ).values
        for key in ("perf/throughput", "perf/mfu", "perf/peak_memory", "optim/grad_norm"):
            print(f"    {key:32} {values.get(key, 0.0):8.2f}")
        await timed("snapshot", backend.snapshot())
    await timed("state", backend.state())
    await timed("save", backend.save(directory / "saved"))
    await timed("stage", backend.stage())
    await timed("write what was staged", backend.write_staged(directory / "staged"))
    saved = digests((await backend.snapshot()).state)
    call = backend.step(batch(5, ranks, arguments.tokens, shape.vocab_size))
    asyncio.get_running_loop().call_later(0.2, os.kill, group.pids[-1], signal.SIGKILL)
    began = time.perf_counter()
    try:
        await call
        await asyncio.sleep(1.0)
        await backend.step(TrainBatch(6, []))
    except RankFailed as error:
        print(f"{'killed rank: error after':36} {time.perf_counter() - began:8.2f}  {error}")
    await backend.close()
    await group.close()
    again = FsdpBackend(config, max_steps=100, seed=0)
    await timed("new ranks", again.start(model_dir))
    await timed("load", again.load(directory / "saved"))
    assert digests(await again.state()) == saved, "the checkpoint is another policy"
    await timed("step", again.step(batch(5, ranks, arguments.tokens, shape.vocab_size)))
    await timed("export", again.export(directory / "exported"))
    await timed("close", again.close())


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(parser.parse_args(), Path(directory)))


if __name__ == "__main__":
    main()
