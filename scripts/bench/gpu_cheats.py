"""Run the cheat book on a GPU: vLLM generates, and a prefill by transformers judges.

    bash scripts/bench/gpu.sh gpu_cheats [--minutes 8] [--blocks 100000] [--quick] [--json FILE]

vLLM generates honestly and with cheats, with a model of 0.6B parameters, trained for a minute, in bf16. All
measured rollouts are written to $OUT; tables can be made of them anywhere: python scripts/bench/cheats.py
--load $OUT/h200.json
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from primerl.node.config.run import EngineConfig
from primerl.node.inference.hosted import HostedEngine
from primerl.node.verification.auditor import Auditor
from primerl.scripts.bench.cheats_measure import (
    Sample,
    Setting,
    judge_all,
    models_of,
    play_cheats,
    play_honestly,
    save,
    start_auditors,
)
from primerl.scripts.bench.report import conclude, make_parser
from primerl.tests.attacks.cheat_book import BOOK, audited_by_content
from primerl.tests.attacks.cheat_world import (
    Workshop,
    World,
    learning_material,
    new_world,
    with_updates,
)

TOKENS = 128
UPDATES = 3
FEW = (
    "previous policy version",
    "base model without deltas",
    "int8 weights",
    "int4 weights",
    "fp8 KV cache",
    "temperature 0.9",
)
VERSIONS = ("previous policy version", "base model without deltas")
VLLM: dict[str, Any] = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, *range(32, 257, 32)],
    },
    "max_num_batched_tokens": 16384,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.35,
}
BEGAN = time.monotonic()


def say(line: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", flush=True)


@dataclass
class Bench:
    """The engine, world and options of all settings."""

    engine: HostedEngine
    world: World
    options: argparse.Namespace

    @property
    def left(self) -> float:
        """Seconds left of --minutes."""
        return 60 * self.options.minutes - (time.monotonic() - BEGAN)


def make_worlds(options: argparse.Namespace) -> list[World]:
    """Make the run after some steps at each learning rate."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    right, small = models_of(options.model, device, small=not options.few)
    say(f"trained: loss {right.loss:.3f}, the smaller one {small.loss:.3f}")
    config = EngineConfig(
        type="hf", dtype="bfloat16", device=device, max_batch=256, max_model_len=TOKENS + 64
    )
    fresh = new_world(right, small, config, max_tokens=TOKENS)
    material = asyncio.run(learning_material(fresh, 4 * UPDATES))
    say(f"{len(material)} rollouts to learn from")
    found = [with_updates(fresh, material, lr=lr, updates=UPDATES) for lr in options.lr]
    for lr, world in zip(options.lr, found, strict=True):
        say(f"lr {lr:g}: {changed(world):.3%} of the weights change in the last update")
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def changed(world: World) -> float:
    """Return the share of bf16 weights that differ between the last two versions."""
    new, old = world.states[world.version], world.states[world.version - 1]
    moved = sum(int((new[name].data != old[name].data).sum()) for name in new)
    return moved / sum(one.data.size for one in new.values())


async def speeds(bench: Bench, auditors: Sequence[Auditor]) -> dict[str, float]:
    """Return tokens per second of generation and of verification, each with the GPU to itself."""
    world = bench.world
    shop = Workshop(world, bytes(31) + b"s", bench.engine)
    sampler = await shop.honest()
    found: dict[str, float] = {}
    for turn in range(2):  # the first one warms up
        lease = await world.lease(bench.options.at_once // 8, 8)
        began = time.perf_counter()
        groups = await shop.play(lease, sampler)
        drawn = time.perf_counter() - began
        samples = [Sample(dtype) for dtype in bench.options.audit]
        await judge_all(shop, auditors, lease, groups, samples)
        found = {"generated": samples[0].tokens / drawn}
        found |= {f"verified in {one.name}": one.tokens / one.verifying for one in samples}
        say(f"tokens/s, turn {turn}: {found}")
    return found


async def honest(
    bench: Bench, auditor: Auditor, sample: Sample, blocks: int, reserve: float
) -> None:
    """Measure honest rollouts: the next ones are generated while the last ones are audited."""
    world = bench.world
    shop = Workshop(world, bytes(31) + b"h", bench.engine)
    sampler = await shop.honest()
    judging: asyncio.Task[None] | None = None
    while sample.blocks < blocks and bench.left > reserve:
        lease = await world.lease(bench.options.at_once // 8, 8)
        groups = await shop.play(lease, sampler)
        if judging is not None:
            await judging
        judging = asyncio.create_task(judge_all(shop, [auditor], lease, groups, [sample]))
        say(f"honest: {sample.blocks} of {blocks} blocks")
    if judging is not None:
        await judging


async def some_honest(
    bench: Bench,
    world: World,
    auditors: Sequence[Auditor],
    settings: Sequence[Setting],
    *,
    blocks: int,
    at_once: int,
) -> None:
    """Measure honest rollouts for every setting."""
    name = f"vLLM, {at_once} at once"
    samples = await play_honestly(
        world, auditors, name, blocks=blocks, at_once=at_once, main=bench.engine, say=say
    )
    for setting, sample in zip(settings, samples, strict=True):
        setting.honest.append(sample)


async def some_cheats(
    bench: Bench,
    world: World,
    auditors: Sequence[Auditor],
    settings: Sequence[Setting],
    names: Sequence[str],
) -> None:
    """Measure cheats for every setting."""
    options = bench.options
    played = play_cheats(
        world,
        auditors,
        [BOOK[name] for name in names],
        rollouts=options.rollouts,
        at_once=min(256, options.at_once),
        main=bench.engine,
        say=say,
    )
    async for samples in played:
        for setting, sample in zip(settings, samples, strict=True):
            setting.cheats.append(sample)


async def measure(
    worlds: Sequence[World], out: Path, options: argparse.Namespace
) -> dict[str, float]:
    """Measure everything, the most important parts first; return the speeds."""
    world = worlds[0]
    config = world.engine.model_copy(
        update={"type": "vllm", "vllm": VLLM if torch.cuda.is_available() else {}}
    )
    bench = Bench(HostedEngine(config), world, options)
    auditors = await start_auditors(world, options.audit)
    settings: list[Setting] = []
    try:
        await bench.engine.start(world.model_dir, fingerprint="projection")
        say("vLLM started")
        found = await speeds(bench, auditors)
        (out / "speeds.json").write_text(json.dumps(found))
        for number, (lr, one) in enumerate(zip(options.lr, worlds, strict=True)):
            names = VERSIONS if number else FEW if options.few else audited_by_content()
            settings += await measure_rate(bench, one, auditors, lr, names)
            save(out / "h200.json", settings)
        sample = Sample("vLLM")
        settings[0].honest.append(sample)
        await honest(bench, auditors[0], sample, options.blocks, reserve=options.reserve)
        save(out / "h200.json", settings)
        return found
    finally:
        await bench.engine.close()
        for auditor in auditors:
            await auditor.close()


async def measure_rate(
    bench: Bench, world: World, auditors: Sequence[Auditor], lr: float, names: Sequence[str]
) -> list[Setting]:
    """Return the settings of one learning rate, one per auditor."""
    options = bench.options
    label = f"{options.model}, bfloat16, lr {lr:g}, audited in"
    found = [Setting(f"{label} {dtype}", world.run.proofs, [], []) for dtype in options.audit]
    for at_once, share in ((8, 400), (64, 100), (options.at_once, 25)):
        blocks = options.blocks // share
        await some_honest(bench, world, auditors, found, blocks=blocks, at_once=at_once)
    await some_cheats(bench, world, auditors, found, names)
    return found


def main() -> int:
    """Generate, measure and save."""
    parser = make_parser(__doc__, "a tiny model and a few cheats, to see that this runs")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--reserve", type=float, default=60.0, help="seconds kept at the end")
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--model", default="0.6b")
    parser.add_argument("--at-once", type=int, default=1024, help="of which vLLM runs 256")
    parser.add_argument("--audit", nargs="+", default=["bfloat16", "float32"], help="dtypes")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-6, 1e-5], help="of the updates")
    parser.add_argument("--few", action="store_true", help="a few cheats, no small model")
    parser.add_argument("--tf32", action="store_true", help="audits in float32 multiply in TF32")
    options = parser.parse_args()
    if options.quick:
        options.model, options.few, options.lr = "tiny", True, options.lr[:1]
        options.blocks, options.rollouts, options.at_once = 400, 16, 32
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    worlds = make_worlds(options)
    found = asyncio.run(measure(worlds, Path(os.environ.get("OUT", ".")), options))
    return conclude(found, [], options.json)


if __name__ == "__main__":
    sys.exit(main())
