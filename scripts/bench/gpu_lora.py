"""Adapters beside all weights, on a GPU: speed, memory, and what a version weighs. Prints a short table.

    bash scripts/bench/gpu.sh gpu_lora [--small]

A model of Qwen3-0.6B's shape with random weights; needs torch with CUDA and transformers, no vLLM.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch

from primerl.node.config.run import ModelCreateConfig, TrainingConfig
from primerl.node.config.training import LoraConfig
from primerl.node.models import huggingface, model_files
from primerl.node.models.tensors import bf16_state, to_torch
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.weights.adapters import MergedAdapters, changes, merge
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.state import State, state_bytes

SHAPE = ModelCreateConfig(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
)
SMALL = ModelCreateConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
STEPS = 6
THREADS = 8


def batch(step: int, tokens: int, length: int) -> TrainBatch:
    """Random sequences with behaviour logprobs of a random policy."""
    chance = random.Random(step)
    half = length // 2
    samples = [
        Sample(
            [chance.randrange(256) for _ in range(length)],
            [False] * half + [True] * half,
            [0.0] * half + [-12.0] * half,
            chance.choice((-1.0, 1.0)),
        )
        for _ in range(tokens // length)
    ]
    return TrainBatch(step, samples)


def measure(directory: Path, config: TrainingConfig, tokens: int, length: int) -> list[State]:
    """Train, print a row, and return the last two policies."""
    torch.cuda.reset_peak_memory_stats()
    learner = Learner.build(directory, config, max_steps=STEPS, seed=0, temperature=1.0)
    states: list[State] = []
    seconds = taken = 0.0
    for step in range(1, STEPS + 1):
        started = time.perf_counter()
        learner.step(batch(step, tokens, length))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        states.append(learner.snapshot().state)
        taken = time.perf_counter() - started
    started = time.perf_counter()
    delta = sum(map(len, encode_delta(states[-2], states[-1], threads=THREADS)))
    encoding = time.perf_counter() - started
    print(
        f"{'adapters' if config.lora else 'all':>9} {tokens / seconds:10.0f} "
        f"{torch.cuda.max_memory_allocated() / 2**30:9.2f} {1e3 * taken:12.1f} "
        f"{state_bytes(states[-1]) / 2**20:10.1f} {delta / 2**20:9.2f} {1e3 * encoding:10.1f}",
        flush=True,
    )
    learner.close()
    return states


def show_merging(directory: Path, lora: LoraConfig, before: State, after: State) -> None:
    """What a worker does with two versions."""
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
    print(
        f"merging with {THREADS} threads: {merging:.2f} s; the next version, compared: {updating:.2f} s; "
        f"{different / sum(one.data.size for one in base.values()):.2%} of the weights differ"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="to see that this runs")
    parser.add_argument("--lr", type=float, default=1e-5)
    small = parser.parse_args().small
    lr = parser.parse_args().lr
    tokens, length = (512, 64) if small else (131_072, 4096)
    lora = LoraConfig(rank=16, alpha=32.0)
    print("  trained   tokens/s  peak GiB  snapshot ms  state MiB  delta MiB  encode ms")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        huggingface.create(directory, SMALL if small else SHAPE, seed=0)
        config = TrainingConfig(lr=lr, seq_len=4 * length)
        measure(directory, config, tokens, length)
        states = measure(directory, config.model_copy(update={"lora": lora}), tokens, length)
        show_merging(directory, lora, *states[-2:])


if __name__ == "__main__":
    main()
