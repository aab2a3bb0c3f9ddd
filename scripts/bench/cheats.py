"""How often the checks catch each cheat of the cheat book, and how often they punish the honest.

    python scripts/bench/cheats.py [--quick] [--models tiny,50m] [--json FILE] [--save FILE | --load FILE...]

Production parts end to end (Verifier, auditor, reputation), judged by the bounds that are built in and by
bounds that are calibrated with the same honest rollouts; tests/attacks/cheat_book.py says what each cheat
does. Models are trained a little (trained_model.py). Honest workers generate alone, a few at a time and in
large batches; with --engine vllm by vLLM. On a GPU: scripts/bench/gpu.sh gpu_cheats.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from cheats_measure import Sample, play_cheats, play_honestly, start_auditors
from cheats_report import as_json, cheat_rows, honest_row, judge, show
from cheats_store import Setting, load, save

from primerl.node.config.run import EngineConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Engine
from primerl.node.inference.fingerprint import Projection
from primerl.scripts.bench.trained_model import Trained, recipe, trained_model
from primerl.tests.attacks.cheat_book import BOOK, Cheat
from primerl.tests.attacks.cheat_world import World, learning_material, new_world, with_updates

COMPANY = ((1, 0.01), (8, 0.09), (256, 0.9))
"""Rollouts at once, and the share of the honest blocks."""
MOST = 128
"""Rollouts of a cheat at once."""
UPDATES = 4


def models_of(name: str, device: str, *, small: bool = True) -> tuple[Trained, Trained]:
    """A trained model and a smaller one; the same again without `small`."""
    right = recipe(name)
    if not small:
        found = trained_model(right, device=device)
        return found, found
    shape = dict(right.shape)
    narrow = {"hidden_size": max(48, shape.get("hidden_size", 96) // 2)}
    layers = {"num_hidden_layers": max(1, shape.get("num_hidden_layers", 2) // 2)}
    less = recipe(name, steps=max(60, right.steps // 2), **narrow, **layers)
    return trained_model(right, device=device), trained_model(less, device=device)


async def start_main(world: World, config: EngineConfig) -> Engine | None:
    """vLLM, if that is what generates."""
    if config.type != "vllm":
        return None
    engine = build_engine(config)
    await engine.start(world.model_dir, fingerprint=world.run.proofs.fingerprint)
    return engine


async def measure_honest(
    world: World, name: str, config: EngineConfig, options: argparse.Namespace, blocks: int
) -> list[list[Sample]]:
    """For each auditor, samples of honest workers in every company."""
    auditors = await start_auditors(world, options.audit.split(","))
    main = await start_main(world, config)
    found: list[list[Sample]] = [[] for _ in auditors]
    try:
        for at_once, share in COMPANY:
            kind = f"{name}, {at_once} at once"
            wanted = max(1, int(share * blocks))
            samples = await play_honestly(
                world, auditors, kind, blocks=wanted, at_once=at_once, main=main, say=say
            )
            for sink, sample in zip(found, samples, strict=True):
                sink.append(sample)
    finally:
        if main is not None:
            await main.close()
        for auditor in auditors:
            await auditor.close()
    return found


async def measure_cheats(
    world: World,
    cheats: Sequence[Cheat],
    settings: Sequence[Setting],
    *,
    dtypes: Sequence[str],
    rollouts: int,
) -> AsyncIterator[Cheat]:
    """Adds samples of each cheat to the settings, one for each auditor."""
    auditors = await start_auditors(world, dtypes)
    at_once = min(rollouts, MOST)
    try:
        played = play_cheats(world, auditors, cheats, rollouts=rollouts, at_once=at_once, say=say)
        async for samples in played:
            for setting, sample in zip(settings, samples, strict=True):
                setting.cheats.append(sample)
            yield BOOK[samples[0].name]
    finally:
        for auditor in auditors:
            await auditor.close()


async def measure(options: argparse.Namespace) -> list[Setting]:
    """Every setting, its tables printed when it is done."""
    settings: list[Setting] = []
    for model in options.models.split(","):
        name, _, dtype = model.partition(":")
        config = EngineConfig.model_validate(
            {
                "type": options.engine,
                "dtype": dtype or "float32",
                "device": options.device,
                "max_batch": 256,
                "max_model_len": options.tokens + 64,
            }
        )
        own = config.model_copy(update={"type": "hf"})
        right, small = models_of(name, options.train_device or options.device)
        fresh = new_world(right, small, own, max_tokens=options.tokens)
        material = await learning_material(fresh, 4 * UPDATES)
        world = with_updates(fresh, material, lr=options.lr, updates=UPDATES)
        label = f"{name}, {own.dtype}"
        honest = await measure_honest(world, label, config, options, options.blocks)
        dtypes = options.audit.split(",")
        new = [
            Setting(f"{label}, audited in {dtype or own.dtype}", world.run.proofs, samples, [])
            for dtype, samples in zip(dtypes, honest, strict=True)
        ]
        settings += new
        keep(options, settings)
        book = list(BOOK.values())
        async for _ in measure_cheats(world, book, new, dtypes=dtypes, rollouts=options.rollouts):
            keep(options, settings)
        show(new)
    return settings


def keep(options: argparse.Namespace, settings: list[Setting]) -> None:
    """Write what there is, if that is wanted."""
    if options.save:
        save(options.save, settings)


def say(line: str) -> None:
    """Progress."""
    print(line, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="tiny,tiny:bfloat16,50m", help="NAME[:DTYPE],...")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="of honest workers")
    parser.add_argument("--blocks", type=int, default=10_000, help="honest, per model")
    parser.add_argument("--rollouts", type=int, default=128, help="of every cheat")
    parser.add_argument("--tokens", type=int, default=96, help="of a rollout at most")
    parser.add_argument("--lr", type=float, default=1e-5, help="of the policy updates")
    parser.add_argument("--audit", default="", help="dtypes to audit in, DTYPE,...; as the run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train-device", default="", help="where models are trained")
    parser.add_argument("--quick", action="store_true", help="tiny model: about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep what was measured")
    parser.add_argument("--load", type=Path, nargs="+", metavar="FILE", help="measure nothing")
    return parser.parse_args()


def main() -> int:
    """Measure, print, write the report, and say by the exit code whether every goal was met."""
    import torch

    options = arguments()
    if options.quick:
        options.models, options.blocks, options.rollouts = "tiny", 600, 32
    torch.set_num_threads(options.threads)
    if options.load:
        settings = [one for path in options.load for one in load(path)]
    else:
        settings = asyncio.run(measure(options))
    print("\n# all")
    show(settings)
    sizes = {Projection().name: Projection().size(options.tokens) / options.tokens}
    honest, cheats = [honest_row(one) for one in settings], cheat_rows(settings)
    goals = judge(honest, cheats, sizes)
    if options.json:
        options.json.write_text(json.dumps(as_json(honest, cheats, goals), indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
