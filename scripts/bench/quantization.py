"""Compare vLLM with FP8 weights and with the run's own: tokens/s, and how long an update in place takes.

    bash scripts/bench/gpu.sh quantization [--shape tiny|0.6b|4b|8b] [--sequences N ...] [--tokens N]
        [--rounds N] [--quick] [--json FILE]

Random weights, this package's sampler and proofs. Two engines are up all the time and take turns; each round
sends both the same requests. An update changes one weight in a hundred. On a CPU vLLM only rounds the weights,
which makes nothing faster: --quick checks that all replies are complete.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.scripts.bench.models import SHAPES, moved, random_policy
from primerl.scripts.bench.report import at_least, conclude, make_parser

FASTER = 1.2
MEMORY = 0.42
"""Share of the GPU's memory for each of the two engines."""
PROMPT = 64
CHANGED = 0.01
"""Share of the weights that an update changes."""


class Engines:
    """An engine with each quantization."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        memory: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}
        if options.cuda:
            memory = {"gpu_memory_utilization": MEMORY}
        config = EngineConfig(
            type="vllm",
            dtype="bfloat16" if options.cuda else "float32",
            max_batch=max(options.sequences),
            max_model_len=PROMPT + options.tokens,
            vllm=memory,
        )
        self.plain = HostedEngine(config)
        self.fp8 = HostedEngine(config.model_copy(update={"quantization": "fp8"}))

    async def start(self, directory: Path) -> dict[str, float]:
        """Start both; return how long each takes to load a policy, and to update it in place, seconds."""
        tiny = {"head_dim": 32} if self._options.shape == "tiny" else {}
        state = random_policy(directory, self._options.shape, **tiny)
        new, changed = await asyncio.to_thread(moved, state, CHANGED)
        found: dict[str, float] = {}
        for name, engine in (("plain", self.plain), ("fp8", self.fp8)):
            await engine.start(directory, fingerprint="projection")
            for what, work in (
                ("load", engine.load(0, state)),
                ("update", engine.update(1, new, changed)),
            ):
                began = time.perf_counter()
                await work
                found[f"{what}, {name}, s"] = time.perf_counter() - began
        return found

    async def close(self) -> None:
        """Close both engines."""
        await asyncio.gather(self.plain.close(), self.fp8.close())

    async def measure(self, sequences: int) -> dict[str, float]:
        """Return medians of the rounds after one uncounted round."""
        speeds: dict[HostedEngine, list[float]] = {self.plain: [], self.fp8: []}
        tokens = self._options.tokens
        for number in range(1 + self._options.rounds):
            for engine, found in speeds.items():
                wanted = [
                    GenerateRequest(
                        tuple((7 * one + place) % 250 for place in range(PROMPT)),
                        tokens,
                        1.0,
                        1000 * number + one,
                        (),
                    )
                    for one in range(sequences)
                ]
                began = time.perf_counter()
                done = await asyncio.gather(*map(engine.generate, wanted))
                drawn = sum(len(one.token_ids) for one in done)
                found.append(drawn / (time.perf_counter() - began))
                if drawn < sequences * tokens:
                    raise RuntimeError(f"{drawn} tokens of {sequences * tokens} were drawn")
        plain, fp8 = (median(found[1:]) for found in speeds.values())
        return {"sequences": sequences, "plain": plain, "fp8": fp8, "ratio": fp8 / plain}


async def run(options: argparse.Namespace) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return a row for each number of sequences, and the times of loading."""
    rows: list[dict[str, float]] = []
    engines = Engines(options)
    with tempfile.TemporaryDirectory() as name:
        try:
            times = await engines.start(Path(name) / "model")
            for what, seconds in times.items():
                print(f"{what:20} {seconds:8.2f}", flush=True)
            print("sequences   tokens/s    with FP8   ratio")
            for sequences in options.sequences:
                row = await engines.measure(sequences)
                rows.append(row)
                print(
                    f"{sequences:9} {row['plain']:10,.0f} {row['fp8']:11,.0f} {row['ratio']:7.2f}",
                    flush=True,
                )
        finally:
            await engines.close()
    return rows, times


def parse() -> argparse.Namespace:
    """Parse the options; defaults depend on this machine's hardware."""
    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__, "one short round of a tiny model")
    parser.add_argument("--shape", default="4b" if cuda else "tiny", choices=list(SHAPES))
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256] if cuda else [8])
    parser.add_argument("--tokens", type=int, default=256 if cuda else 32, help="of a reply")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    options.cuda = cuda
    if options.quick:
        options.rounds, options.tokens = 1, min(options.tokens, 16)
    return options


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    options = parse()
    logging.basicConfig(level=logging.WARNING)
    where = torch.cuda.get_device_name() if options.cuda else "the CPU"
    print(f"shape {options.shape} on {where}, replies of {options.tokens} tokens", flush=True)
    rows, times = asyncio.run(run(options))
    goals = [at_least("replies are complete", 1.0, 1.0)]
    if options.cuda:
        goals += [
            at_least(f"with FP8 / without, {one['sequences']} sequences", one["ratio"], FASTER, "x")
            for one in rows
        ]
    return conclude(rows, goals, options.json, times=times)


if __name__ == "__main__":
    sys.exit(main())
