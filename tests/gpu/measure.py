"""Engine, backend and scorer on a GPU, beside the CPU: run by hand, prints a short table.

    python tests/gpu/measure.py

Needs torch with CUDA and transformers; no vLLM.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import torch

from primerl.node.config.run import EngineConfig, ModelCreateConfig, TrainingConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.hf import HfEngine
from primerl.node.models import huggingface
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.local_backend import LocalBackend
from primerl.node.weights.state import State

SEQUENCES, TOKENS = 256, 64


async def generate(directory: Path, state: State, device: str) -> tuple[list[Completion], float]:
    """SEQUENCES completions, and tokens per second of the second round."""
    engine = HfEngine(EngineConfig(device=device, max_batch=SEQUENCES))
    await engine.start(directory)
    await engine.load(0, state)
    requests = [
        GenerateRequest((259, 97 + seed % 26, 258, 260), TOKENS, 1.0, seed, ())
        for seed in range(SEQUENCES)
    ]
    await asyncio.gather(*map(engine.generate, requests))
    started = time.perf_counter()
    done = await asyncio.gather(*map(engine.generate, requests))
    seconds = time.perf_counter() - started
    await engine.close()
    return done, sum(len(one.token_ids) for one in done) / seconds


async def train(directory: Path, device: str) -> tuple[float, float]:
    """Loss of a step, and milliseconds of a later one."""
    backend = LocalBackend(TrainingConfig(lr=1e-3, device=device), max_steps=9, seed=0)
    await backend.start(directory)
    ids = [259, *range(97, 110), 258, 260, *range(109, 96, -1), 258]
    sample = Sample(ids, [False] * 16 + [True] * 14, [-1.0] * len(ids), 1.0)
    loss = seconds = 0.0
    for step in range(1, 6):
        started = time.perf_counter()
        figures = await backend.step(TrainBatch(step, [sample] * 128))
        seconds = time.perf_counter() - started
        loss = figures.values["loss/mean"] if step == 1 else loss
    await backend.close()
    return loss, 1e3 * seconds


async def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        huggingface.create(directory, ModelCreateConfig(hidden_size=256, num_hidden_layers=4), 0)
        model = huggingface.load_model(directory, dtype="float32", device="cpu")
        state = huggingface.policy_state(model)
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        runs = {device: await generate(directory, state, device) for device in devices}
        for device, (done, speed) in runs.items():
            same = sum(
                a.token_ids == b.token_ids for a, b in zip(done, runs["cpu"][0], strict=True)
            )
            print(f"{device:5} hf engine {speed:10.0f} tokens/s, {same}/{SEQUENCES} as on the CPU")
        for device in devices:
            loss, milliseconds = await train(directory, device)
            print(f"{device:5} backend   {milliseconds:10.1f} ms/step, first loss {loss:.6f}")


if __name__ == "__main__":
    asyncio.run(main())
