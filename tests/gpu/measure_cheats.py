"""The cheat book on a GPU: vLLM generates, honest and not, and a prefill by transformers' weights judges.

    bash tests/gpu/measure_cheats.sh [--minutes 8] [--blocks 100000]

A model of 0.6B parameters, trained for a minute, in bf16. Written to $OUT are all measured rollouts; tables
are made of them anywhere: python scripts/bench/cheats.py --load $OUT/h200.json
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from primerl.node.config import EngineConfig
from primerl.node.engines.vllm import VllmEngine
from primerl.node.proofs.prefill import PrefillCore
from primerl.tests.attacks.cheat_book import BOOK, Cheat, audited_by_content
from primerl.tests.attacks.cheat_court import Court
from primerl.tests.attacks.cheat_run import (
    learning_material,
    new_world,
    with_fingerprint,
    with_updates,
)
from primerl.tests.attacks.cheat_world import Workshop, World

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
from cheats import ON_TOPLOC, models_of  # pyright: ignore
from cheats_measure import Sample, play_cheats, play_honestly  # pyright: ignore
from cheats_store import Setting, save  # pyright: ignore

TOKENS = 128
UPDATES = 3
LR = (1e-6, 1e-5)
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
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", flush=True)


@dataclass
class Bench:
    """What stays the same over all settings."""

    engine: VllmEngine
    world: World
    options: argparse.Namespace

    @property
    def left(self) -> float:
        """Seconds."""
        return 60 * self.options.minutes - (time.monotonic() - BEGAN)


def make_worlds(options: argparse.Namespace) -> tuple[World, World]:
    """The run after some steps at each learning rate."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    right, small = models_of(options.model, device)
    say(f"trained: loss {right.loss:.3f}, the smaller one {small.loss:.3f}")
    config = EngineConfig(
        type="hf", dtype="bfloat16", device=device, max_batch=256, max_model_len=TOKENS + 64
    )
    fresh = new_world(right, small, config, max_tokens=TOKENS)
    material = asyncio.run(learning_material(fresh, 4 * UPDATES))
    say(f"{len(material)} rollouts to learn from")
    found = [with_updates(fresh, material, lr=lr, updates=UPDATES) for lr in LR]
    for lr, world in zip(LR, found, strict=True):
        say(f"lr {lr:g}: {changed(world):.3%} of the weights change in the last update")
    if device == "cuda":
        torch.cuda.empty_cache()
    return found[0], found[1]


def changed(world: World) -> float:
    """Share of bf16 weights that differ between the last two versions."""
    new, old = world.states[world.version], world.states[world.version - 1]
    moved = sum(int((new[name].data != old[name].data).sum()) for name in new)
    return moved / sum(one.data.size for one in new.values())


async def speeds(bench: Bench, auditor: PrefillCore) -> dict[str, float]:
    """Tokens per second of generation and of verification, each with the GPU to itself."""
    world = bench.world
    shop = Workshop(world, bytes(31) + b"s", bench.engine)
    sampler = await shop.honest()
    found: dict[str, float] = {}
    for turn in range(2):  # the first one warms up
        lease = world.lease(bench.options.at_once // 8, 8)
        began = time.perf_counter()
        groups = await shop.play(lease, sampler)
        drawn = time.perf_counter()
        outcomes = await Court(world, auditor).judge(shop, lease, groups)
        ended = time.perf_counter()
        tokens = sum(one.evidence.tokens for one in outcomes if one.evidence)
        found = {"generated": tokens / (drawn - began), "verified": tokens / (ended - drawn)}
        say(f"tokens/s, turn {turn}: {found}")
    return found


async def honest(bench: Bench, auditor: PrefillCore, blocks: int, reserve: float) -> Sample:
    """Honest rollouts: the next ones are generated while the last ones are audited."""
    world = bench.world
    shop = Workshop(world, bytes(31) + b"h", bench.engine)
    sampler = await shop.honest()
    sample = Sample("vLLM, 256 at once")
    judging: asyncio.Task[list[Any]] | None = None
    while sample.blocks < blocks and bench.left > reserve:
        lease = world.lease(bench.options.at_once // 8, 8)
        groups = await shop.play(lease, sampler)
        if judging is not None:
            sample.outcomes += await judging
        judging = asyncio.create_task(Court(world, auditor).judge(shop, lease, groups))
        say(f"honest: {sample.blocks} of {blocks} blocks")
    if judging is not None:
        sample.outcomes += await judging
    return sample


async def cheats_on(
    bench: Bench, world: World, auditor: PrefillCore, cheats: Sequence[Cheat], suffix: str = ""
) -> list[Sample]:
    found = await play_cheats(
        world,
        auditor,
        cheats,
        rollouts=bench.options.rollouts,
        at_once=min(256, bench.options.at_once),
        main=bench.engine,
        say=say,
    )
    return [replace(one, name=one.name + suffix) for one in found]


async def measure(worlds: tuple[World, World], out: Path, options: argparse.Namespace) -> None:
    world, faster = worlds
    config = world.engine.model_copy(
        update={"type": "vllm", "vllm": VLLM if torch.cuda.is_available() else {}}
    )
    engine = VllmEngine(config)
    bench = Bench(engine, world, options)
    auditor = PrefillCore(world.engine)
    setting = Setting("0.6b, bfloat16, projection", world.run.proofs, [], [])
    other = Setting("0.6b at lr 1e-5, bfloat16, projection", world.run.proofs, [], [])
    settings = [setting, other]
    try:
        await engine.start(world.model_dir, fingerprint="projection")
        say("vLLM started")
        await auditor.start(world.model_dir, world.run)
        (out / "speeds.json").write_text(json.dumps(await speeds(bench, auditor)))
        for at_once, blocks in ((8, options.blocks // 400), (64, options.blocks // 100)):
            setting.honest.append(
                await play_honestly(
                    world, auditor, f"vLLM, {at_once} at once",
                    blocks=blocks, at_once=at_once, main=engine, say=say,
                )
            )  # fmt: skip
        setting.cheats.extend(
            await cheats_on(bench, world, auditor, [BOOK[name] for name in audited_by_content()])
        )
        save(out / "h200.json", settings)
        blocks, at_once = options.blocks // 25, options.at_once
        other.honest.append(
            await play_honestly(
                faster, auditor, "vLLM", blocks=blocks, at_once=at_once, main=engine, say=say
            )
        )
        versions = [BOOK["previous policy version"], BOOK["base model without deltas"]]
        other.cheats.extend(await cheats_on(bench, faster, auditor, versions))
        save(out / "h200.json", settings)
        setting.honest.append(await honest(bench, auditor, options.blocks, reserve=90.0))
        save(out / "h200.json", settings)
    finally:
        await engine.close()
        await auditor.close()
    settings += await toploc(bench)
    save(out / "h200.json", settings)


async def toploc(bench: Bench) -> list[Setting]:
    """The other fingerprint, generated by the embedded engine."""
    world = with_fingerprint(bench.world, "toploc")
    auditor = PrefillCore(world.engine)
    await auditor.start(world.model_dir, world.run)
    found = Setting("0.6b, bfloat16, toploc, hf engine", world.run.proofs, [], [])
    try:
        found.honest.append(
            await play_honestly(
                world, auditor, "hf", blocks=bench.options.blocks // 100, at_once=256, say=say
            )
        )
        for name in ON_TOPLOC:
            if bench.left < 15:
                break
            found.cheats.extend(
                await play_cheats(world, auditor, [BOOK[name]], rollouts=128, at_once=128, say=say)
            )
    finally:
        await auditor.close()
    return [found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--model", default="0.6b")
    parser.add_argument("--at-once", type=int, default=1024, help="of which vLLM runs 256")
    options = parser.parse_args()
    worlds = make_worlds(options)
    asyncio.run(measure(worlds, Path(os.environ.get("OUT", ".")), options))


if __name__ == "__main__":
    main()
