"""Compare training of adapters and of all weights on a GPU: speed, memory, version size.

    bash scripts/bench/gpu.sh gpu_lora [--lr F] [--quick] [--json FILE]

A model of Qwen3-0.6B's shape with random weights; needs torch with CUDA and transformers, no vLLM. --quick
takes a tiny model that a CPU can train.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from primerl.node.config.run import TrainingConfig
from primerl.node.config.training import LoraConfig
from primerl.node.models import model_files
from primerl.node.models.tensors import bf16_state, to_torch
from primerl.node.training.backend import TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.weights.adapters import MergedAdapters, changes, merge
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.state import State, state_bytes
from primerl.scripts.bench.models import fake_batch, make_model
from primerl.scripts.bench.report import conclude, make_parser

STEPS = 6
THREADS = 8
CUDA = torch.cuda.is_available()


def measure(
    directory: Path, config: TrainingConfig, tokens: int, length: int
) -> tuple[dict[str, Any], list[State]]:
    """Train and print a row; return it and the last two policies."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    learner = Learner.build(directory, config, max_steps=STEPS, seed=0, temperature=1.0)
    states: list[State] = []
    seconds = taken = 0.0
    for step in range(1, STEPS + 1):
        batch = TrainBatch(step, fake_batch([length] * (tokens // length), 256, seed=step))
        started = time.perf_counter()
        learner.step(batch)
        if CUDA:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        states.append(learner.snapshot().state)
        taken = time.perf_counter() - started
    started = time.perf_counter()
    delta = sum(map(len, encode_delta(states[-2], states[-1], threads=THREADS)))
    row = {
        "trained": "adapters" if config.lora else "all",
        "tokens_per_s": tokens / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0,
        "snapshot_ms": 1e3 * taken,
        "state_mib": state_bytes(states[-1]) / 2**20,
        "delta_mib": delta / 2**20,
        "encode_ms": 1e3 * (time.perf_counter() - started),
    }
    name, *figures = row.values()
    print(f"{name:>9} " + " ".join(f"{one:11.2f}" for one in figures), flush=True)
    learner.close()
    return row, states[-2:]


def show_merging(directory: Path, lora: LoraConfig, before: State, after: State) -> dict[str, Any]:
    """Time a worker's merging of two versions, and return the figures."""
    stored = model_files.read_state(directory)
    base = bf16_state((name, to_torch(tensor)) for name, tensor in stored.items())
    started = time.perf_counter()
    first = merge(base, before, lora, threads=THREADS)
    merging = time.perf_counter() - started
    started = time.perf_counter()
    second = merge(base, after, lora, before=MergedAdapters(before, first), threads=THREADS)
    found = changes(first, second)
    updating = time.perf_counter() - started
    different = sum(int((first[name].data != second[name].data).sum()) for name in found)
    share = different / sum(one.data.size for one in base.values())
    print(
        f"merging with {THREADS} threads: {merging:.2f} s; the next version, compared: {updating:.2f} s; "
        f"{share:.2%} of the weights differ"
    )
    return {"merging_s": merging, "updating_s": updating, "different": share}


def main() -> int:
    """Measure and print the table."""
    parser = make_parser(__doc__, "a tiny model, to see that this runs")
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()
    tokens, length = (512, 64) if options.quick else (131_072, 4096)
    lora = LoraConfig(rank=16, alpha=32.0)
    print("  trained    tokens/s    peak GiB snapshot ms   state MiB   delta MiB   encode ms")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(directory, "tiny" if options.quick else "0.6b")
        config = TrainingConfig(lr=options.lr, seq_len=4 * length, threads=0 if CUDA else 1)
        whole, _ = measure(directory, config, tokens, length)
        adapters, states = measure(
            directory, config.model_copy(update={"lora": lora}), tokens, length
        )
        merging = show_merging(directory, lora, *states)
    return conclude([whole, adapters | merging], [], options.json)


if __name__ == "__main__":
    sys.exit(main())
