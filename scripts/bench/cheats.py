"""How often the checks catch each cheat of the cheat book, and how often they punish the honest.

    python scripts/bench/cheats.py [--quick] [--models tiny,50m] [--json FILE]

Production parts end to end (Verifier, auditor, reputation) with production bounds; tests/attacks/cheat_book.py
says what each cheat does. Models are trained a little (trained_model.py). Honest workers generate alone, a few
at a time and in large batches; with --engine vllm by vLLM. The GPU's figures: tests/gpu/measure_cheats.py.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

from cheats_measure import Sample, evidence_of, play_cheats, play_honestly, rejudged
from cheats_report import (
    CheatRow,
    HonestRow,
    as_json,
    honest_row,
    judge,
    medians,
    reasons,
    show_bounds,
    show_cheats,
    show_honest,
)
from cheats_trust import caught_within, until_ban

from primerl.node.config import EngineConfig
from primerl.node.engines.build import build_engine
from primerl.node.engines.engine import Engine
from primerl.node.fingerprints.build import KNOWN, find
from primerl.node.proofs.bands import bands
from primerl.node.proofs.prefill import PrefillCore
from primerl.protocol.manifests import ProofContract
from primerl.scripts.bench.trained_model import Trained, recipe, trained_model
from primerl.tests.attacks.cheat_book import BOOK, Cheat
from primerl.tests.attacks.cheat_run import new_world, with_fingerprint, with_updates
from primerl.tests.attacks.cheat_world import World

COMPANY = ((1, 0.05), (8, 0.15), (256, 0.8))
"""Rollouts at once, and the share of the honest blocks."""
UPDATES = 4
DEFAULT_LR = 1e-5
ON_TOPLOC = (
    "smaller model",
    "previous policy version",
    "int8 weights",
    "int4 weights",
    "fp8 KV cache",
    "zero proof",
    "constant proof",
    "random proof",
    "shuffled proof",
    "truncated proof",
    "null modulus",
    "proof of a longer text",
    "proof of an older version's rollout",
)
"""Cheats for which the fingerprint matters."""


def models_of(name: str, device: str) -> tuple[Trained, Trained]:
    """A trained model and a smaller one."""
    right = recipe(name)
    shape = dict(right.shape)
    narrow = {"hidden_size": max(48, shape.get("hidden_size", 96) // 2)}
    layers = {"num_hidden_layers": max(1, shape.get("num_hidden_layers", 2) // 2)}
    small = recipe(name, steps=max(60, right.steps // 2), **narrow, **layers)
    return trained_model(right, device=device), trained_model(small, device=device)


async def start_main(world: World, config: EngineConfig) -> Engine | None:
    """vLLM, if that is what generates."""
    if config.type != "vllm":
        return None
    engine = build_engine(config)
    await engine.start(world.model_dir, fingerprint=world.run.proofs.fingerprint)
    return engine


async def measure_honest(
    world: World, name: str, config: EngineConfig, blocks: int
) -> tuple[HonestRow, ProofContract]:
    """The row of one setting, and bounds that are calibrated by it."""
    auditor = PrefillCore(world.engine)
    await auditor.start(world.model_dir, world.run)
    main = await start_main(world, config)
    samples: list[Sample] = []
    try:
        for at_once, share in COMPANY:
            kind = f"{name}, {at_once} at once"
            wanted = max(1, int(share * blocks))
            samples.append(
                await play_honestly(
                    world, auditor, kind, blocks=wanted, at_once=at_once, main=main, say=say
                )
            )
    finally:
        if main is not None:
            await main.close()
        await auditor.close()
    built_in = world.run.proofs
    evidence = [one for sample in samples for one in evidence_of(sample.outcomes)]
    return honest_row(samples, name, built_in), bands(evidence).contract(built_in)


async def measure_cheats(
    world: World, cheats: Sequence[Cheat], rollouts: int, config: EngineConfig
) -> list[Sample]:
    """Judged by the bounds that are built in."""
    auditor = PrefillCore(world.engine)
    await auditor.start(world.model_dir, world.run)
    main = await start_main(world, config)
    try:
        return await play_cheats(
            world, auditor, cheats, rollouts=rollouts, at_once=32, main=main, say=say
        )
    finally:
        if main is not None:
            await main.close()
        await auditor.close()


def cheat_row(
    cheat: Cheat,
    sample: Sample,
    setting: str,
    *,
    built_in: ProofContract,
    calibrated: ProofContract,
) -> CheatRow:
    """What was measured, and what trust makes of it."""
    chance = random.Random(cheat.name)
    outcomes = rejudged(sample.outcomes, calibrated)
    return CheatRow(
        setting=setting,
        name=cheat.name,
        rollouts=len(outcomes),
        rejected=sum(one.caught for one in outcomes) / len(outcomes),
        suspected=sum(one.suspect for one in outcomes) / len(outcomes),
        reasons=reasons(outcomes),
        within=cheat.within,
        caught=caught_within(outcomes, cheat.within, calibrated, chance),
        caught_built_in=caught_within(sample.outcomes, cheat.within, built_in, chance),
        wanted=cheat.wanted,
        newcomer=until_ban(outcomes, calibrated, chance, proven=False),
        proven=until_ban(outcomes, calibrated, chance, proven=True),
        medians=medians(sample),
    )


async def run(options: argparse.Namespace) -> tuple[list[HonestRow], list[CheatRow]]:
    """All rows."""
    honest: list[HonestRow] = []
    cheats: list[CheatRow] = []
    for setting in options.models.split(","):
        name, _, dtype = setting.partition(":")
        dtype = dtype or "float32"
        right, small = models_of(name, options.device)
        config = EngineConfig(
            type=options.engine,
            dtype=dtype,
            device=options.device,
            max_batch=256,
            max_model_len=options.tokens + 64,
        )
        own = config.model_copy(update={"type": "hf"})
        fresh = new_world(right, small, own, max_tokens=options.tokens)
        world = await with_updates(fresh, lr=options.lr, updates=UPDATES)
        for fingerprint in options.fingerprints.split(","):
            seen = with_fingerprint(world, fingerprint)
            label = f"{name}, {dtype}, {fingerprint}"
            show_bounds(label, seen.run.proofs)
            first = fingerprint == "projection"
            blocks = options.blocks if first else options.blocks // 4
            row, calibrated = await measure_honest(seen, label, config, blocks)
            honest.append(row)
            show_honest([row])
            show_bounds(f"{label}, calibrated", calibrated)
            book = [one for one in BOOK.values() if first or one.name in ON_TOPLOC]
            count = options.rollouts if first else options.rollouts // 2
            samples = await measure_cheats(seen, book, max(16, count), own)
            bounds = {"built_in": seen.run.proofs, "calibrated": calibrated}
            pairs = zip(book, samples, strict=True)
            cheats += [cheat_row(cheat, one, label, **bounds) for cheat, one in pairs]
            show_cheats([row for row in cheats if row.setting == label])
    return honest, cheats


def say(line: str) -> None:
    """Progress."""
    print(line, flush=True)


def main() -> int:
    """Measure, print, write the report, and say by the exit code whether every goal was met."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="tiny,tiny:bfloat16,50m", help="NAME[:DTYPE],...")
    parser.add_argument("--fingerprints", default=",".join(KNOWN))
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="of honest workers")
    parser.add_argument("--blocks", type=int, default=10_000, help="honest, per model")
    parser.add_argument("--rollouts", type=int, default=128, help="of every cheat")
    parser.add_argument("--tokens", type=int, default=96, help="of a rollout at most")
    parser.add_argument("--lr", type=float, default=DEFAULT_LR, help="of the policy updates")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny model: about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    if options.quick:
        options.models, options.blocks, options.rollouts = "tiny", 600, 32
        options.fingerprints = "projection"
    torch.set_num_threads(options.threads)
    honest, cheats = asyncio.run(run(options))
    print("\n# all")
    show_honest(honest)
    show_cheats(cheats)
    sizes = {name: find(name).size(options.tokens) / options.tokens for name in KNOWN}
    goals = judge(honest, cheats, sizes)
    if options.json:
        options.json.write_text(json.dumps(as_json(honest, cheats, goals), indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
