"""Measure how often the checks catch each cheat, and how often they punish the honest.

    python scripts/bench/cheats.py [--quick] [--models tiny,50m] [--json FILE] [--save FILE | --load FILE...]
    bash scripts/bench/gpu.sh cheats --device cuda --engine vllm --models 0.6b:bfloat16 --audit bfloat16
        --tokens 128 --lr 1e-6 1e-5 --blocks 112000 --rollouts 256 --save FILE

Production parts end to end (Verifier, auditor, reputation), judged by the built-in bounds and by bounds
calibrated with the same honest rollouts; scripts/bench/cheat_book.py describes the cheats. Models are trained a
little (trained_model.py). Honest workers generate alone, a few at a time and in large batches. With --engine
vllm honest workers and cheats generate by vLLM. With several rates of the policy updates, those after the first
measure the cheats by older versions, and fewer honest rollouts. Tables can be made anywhere of what --save
keeps.
"""

import argparse
import asyncio
import math
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from primerl.node.config.run import EngineConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Engine
from primerl.node.inference.fingerprint import Projection
from primerl.node.verification.bounds import FalsePositives, bands, false_positives, upper_bound
from primerl.protocol.audits import audit_rate
from primerl.protocol.manifests import ProofContract
from primerl.protocol.reputation import (
    Audited,
    BanTest,
    Reputation,
    Trust,
    ban_test,
    outcome_of,
)
from primerl.protocol.rollouts import MEASURES
from primerl.scripts.bench.cheat_book import BOOK
from primerl.scripts.bench.cheat_world import (
    Outcome,
    World,
    learning_material,
    new_world,
    with_updates,
)
from primerl.scripts.bench.cheats_measure import (
    Sample,
    Setting,
    evidence_of,
    load,
    models_of,
    play_cheats,
    play_honestly,
    rejudged,
    save,
    start_auditors,
)
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

COMPANY = {
    "hf": ((1, 0.01), (8, 0.09), (256, 0.9)),
    "vllm": ((8, 0.01), (64, 0.09), (1024, 0.9)),
}
"""Numbers of concurrent rollouts, and their shares of the honest blocks."""
MOST = {"hf": 128, "vllm": 256}
"""Maximum number of concurrent rollouts of a cheat."""
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
"""On a GPU, which auditors and cheats use as well."""
UPDATES = 4
VERSIONS = ("previous policy version", "base model without deltas")
FEW = (
    *VERSIONS,
    *("int8 weights", "int4 weights", "fp8 KV cache", "temperature 0.9"),
)
LATER = 0.05
"""Share of --blocks at each rate but the first."""
EXPECTED_AUDITS = 200_000
"""Audits of the run that the thresholds are made for: 800 steps of 16 x 8 rollouts, twice."""
SUBMISSION = 8
"""Rollouts that arrive together."""
PATIENCE = 8192
"""Rollouts after which a simulated worker counts as never banned."""
ENVIRONMENT = "sums"
RECORD = 1000.0
"""Good rollouts of a proven worker before it begins to cheat."""
DRAWS = 2000
AUDITS = 100_000
LIVES = 200
SHARES = (0.5, 0.99, 0.999, 0.9999, 1.0)
FALSE_POSITIVES = 1e-4
PROOF_BYTES = 8.1
HARMLESS = "failures told as errors"
"""A cheat that costs the rollouts and nothing else; docs/proofs.md describes the remaining gap."""

COLUMNS = (
    "rollouts",
    "rejected",
    "suspect",
    "by",
    "audits",
    "caught within them",
    "by built-in bounds",
    "rollouts until ban, all audited",
    "proven, 10 %",
    "medians: fingerprint, sampling, logprob, other policy",
)


# -- measuring ------------------------------------------------------------------------------------


async def measure_rate(
    world: World,
    label: str,
    main: Engine | None,
    options: argparse.Namespace,
    *,
    blocks: int,
    cheats: Sequence[str],
) -> AsyncIterator[list[Setting]]:
    """Measure a world; yield its settings, one for each auditor, whenever they have new samples."""
    auditors = await start_auditors(world, options.audit.split(","))
    found = [
        Setting(f"{label}, audited in {dtype or world.engine.dtype}", world.run.proofs, [], [])
        for dtype in options.audit.split(",")
    ]
    try:
        for at_once, share in COMPANY[options.engine]:
            kind = f"{label}, {at_once} at once"
            wanted = max(1, int(share * blocks))
            samples = await play_honestly(
                world, auditors, kind, blocks=wanted, at_once=at_once, main=main, say=say
            )
            for setting, sample in zip(found, samples, strict=True):
                setting.honest.append(sample)
        yield found
        book = [BOOK[name] for name in cheats]
        most, at_once = options.rollouts, min(options.rollouts, MOST[options.engine])
        played = play_cheats(
            world, auditors, book, rollouts=most, at_once=at_once, main=main, say=say
        )
        async for samples in played:
            for setting, sample in zip(found, samples, strict=True):
                setting.cheats.append(sample)
            yield found
    finally:
        for auditor in auditors:
            await auditor.close()


async def measure_model(
    model: str, options: argparse.Namespace
) -> AsyncIterator[tuple[float, list[Setting]]]:
    """Measure a model at every rate; yield (rate, settings) whenever they have new samples."""
    name, _, dtype = model.partition(":")
    own = EngineConfig.model_validate(
        {
            "dtype": dtype or "float32",
            "device": options.device,
            "max_batch": 256,
            "max_model_len": options.tokens + 64,
        }
    )
    right, small = models_of(name, options.train_device or options.device, small=not options.few)
    fresh = new_world(right, small, own, max_tokens=options.tokens)
    material = await learning_material(fresh, 4 * UPDATES)
    worlds = [with_updates(fresh, material, lr=lr, updates=UPDATES) for lr in options.lr]
    main: Engine | None = None
    try:
        if options.engine == "vllm":
            torch.cuda.empty_cache()
            vllm = {} if options.device == "cpu" else VLLM
            main = build_engine(own.model_copy(update={"type": "vllm", "vllm": vllm}))
            await main.start(fresh.model_dir, fingerprint=fresh.run.proofs.fingerprint)
        for number, (lr, world) in enumerate(zip(options.lr, worlds, strict=True)):
            cheats = VERSIONS if number else FEW if options.few else tuple(BOOK)
            blocks = int(LATER * options.blocks) if number else options.blocks
            label = f"{name}, {own.dtype}, lr {lr:g}"
            async for found in measure_rate(
                world, label, main, options, blocks=blocks, cheats=cheats
            ):
                yield lr, found
    finally:
        if main is not None:
            await main.close()


async def measure(options: argparse.Namespace) -> list[Setting]:
    """Measure every setting, and print its tables."""
    settings: list[Setting] = []
    for model in options.models.split(","):
        by_rate: dict[float, list[Setting]] = {}
        async for lr, found in measure_model(model, options):
            by_rate[lr] = found
            keep(options, [*settings, *(one for some in by_rate.values() for one in some)])
        new = [one for some in by_rate.values() for one in some]
        settings += new
        show(new)
    return settings


def keep(options: argparse.Namespace, settings: list[Setting]) -> None:
    """Write the settings so far, with --save."""
    if options.save:
        save(options.save, settings)


def say(line: str) -> None:
    """Print progress."""
    print(line, flush=True)


# -- simulated reputation, from resampled outcomes -------------------------------------------------


@dataclass(frozen=True)
class Stopped:
    """Rollouts sent until the ban, over many simulated workers."""

    banned: float
    """Share of the workers that were banned at all."""
    median: float
    slowest: float
    """Rollouts within which 95 % of all workers were banned; infinite if fewer ever were."""
    quarantined: float
    """Median until nothing was leased any more, by ban or quarantine."""


def caught_within(
    outcomes: Sequence[Outcome], audited: int, contract: ProofContract, chance: random.Random
) -> float:
    """Estimate P(some rollout rejected, or the worker banned) among `audited` audited rollouts."""
    test = ban_test(contract, EXPECTED_AUDITS)
    caught = 0
    for _ in range(DRAWS):
        drawn = chance.choices(outcomes, k=audited)
        caught += any(one.caught for one in drawn) or _banned(drawn, test)
    return caught / DRAWS


def _banned(drawn: Sequence[Outcome], test: BanTest) -> bool:
    reputation = Reputation()
    reputation.observe(observed(drawn), test)
    return bool(reputation.banned)


def false_bans(honest: Sequence[Outcome], contract: ProofContract, chance: random.Random) -> int:
    """Count bans of honest workers in AUDITS audited rollouts; a banned worker starts anew.

    The contract promises at most false_bans of them in EXPECTED_AUDITS.
    """
    test = ban_test(contract, EXPECTED_AUDITS)
    reputation, bans = Reputation(), 0
    for one in observed(chance.choices(honest, k=AUDITS)):
        reputation.observe([one], test)
        if reputation.banned:
            bans += 1
            reputation = Reputation()
    return bans


def until_ban(
    outcomes: Sequence[Outcome],
    contract: ProofContract,
    chance: random.Random,
    *,
    proven: bool,
) -> Stopped:
    """Simulate bans of a fully audited newcomer, or of a proven worker that begins to cheat."""
    lives = [_live(outcomes, contract, chance, proven=proven) for _ in range(LIVES)]
    bans = sorted(ban for ban, _ in lives)
    return Stopped(
        banned=sum(ban < float("inf") for ban in bans) / LIVES,
        median=median(bans),
        slowest=bans[int(0.95 * LIVES)],
        quarantined=median(quarantine for _, quarantine in lives),
    )


def _live(
    outcomes: Sequence[Outcome], contract: ProofContract, chance: random.Random, *, proven: bool
) -> tuple[float, float]:
    """Return the rollouts sent until the ban, and until quarantine or ban."""
    test = ban_test(contract, EXPECTED_AUDITS)
    reputation = Reputation(clean_streak=10**6 if proven else 0)
    trust = reputation.environments[ENVIRONMENT] = Trust(good=RECORD if proven else 0.0)
    quarantined = float("inf")
    for sent in range(SUBMISSION, PATIENCE + 1, SUBMISSION):
        rate = 1.0
        if proven:
            rate = audit_rate(trust, contract.audit_rate, 0.0, reputation.recent_fault)
        batch = chance.choices(outcomes, k=SUBMISSION)
        audited = _audited(batch, rate, chance)
        seen = [one for one in batch if one.caught and one.evidence is None]
        rejected = Counter(one.reason for one in [*seen, *audited] if one.reason is not None)
        reputation.record(ENVIRONMENT, SUBMISSION - rejected.total(), rejected, now=1.0)
        reputation.observe(observed(audited), test)
        if reputation.refused or trust.quarantined:
            quarantined = min(quarantined, sent)
        if reputation.banned:
            return sent, quarantined
    return float("inf"), quarantined


def _audited(batch: Sequence[Outcome], rate: float, chance: random.Random) -> list[Outcome]:
    """Return a random share `rate` of the rollouts that pass cheap checks; all if one is guilty."""
    passed = [one for one in batch if one.evidence is not None]
    drawn = [one for one in passed if chance.random() < rate]
    return passed if any(one.caught for one in drawn) else drawn


def observed(outcomes: Sequence[Outcome]) -> list[Audited]:
    """Return the input of the sequential tests."""
    found: list[Audited] = []
    for one in outcomes:
        kind = outcome_of(one.reason, one.suspect)
        if kind is not None and one.evidence is not None:
            found.append(Audited(kind, one.evidence.other_policy))
    return found


# -- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HonestRow:
    """Honest rollouts of one kind."""

    name: str
    rollouts: int
    blocks: int
    rejected: int
    suspected: int
    rejected_at_most: float
    """95 % upper bound of the share, Clopper-Pearson."""
    suspected_at_most: float
    calibrated: FalsePositives
    """False positives by bounds made of the other half."""
    bans: tuple[int, int]
    """Bans in 100,000 audits drawn from these, by built-in and by calibrated bounds."""
    quantiles: dict[str, list[float]]
    """Quantiles at SHARES, per measure."""
    generated_per_s: float
    """Tokens per second."""
    verified_per_s: float


@dataclass(frozen=True)
class CheatRow:
    """Rollouts of one cheat."""

    setting: str
    name: str
    rollouts: int
    rejected: float
    """Share, by calibrated bounds like the following figures."""
    suspected: float
    """Share, the rejected audits included."""
    reasons: dict[str, int]
    within: int
    caught: float
    """Probability of being caught within `within` audited rollouts, by calibrated bounds."""
    caught_built_in: float
    """Same probability by the built-in bounds of the dtype."""
    wanted: float
    newcomer: Stopped
    proven: Stopped
    medians: dict[str, float]
    """Median of every measure."""


def honest_row(setting: Setting) -> HonestRow:
    """Make the row of a setting's honest rollouts."""
    samples = setting.honest
    played = [one for sample in samples for one in sample.outcomes]
    outcomes = rejudged(played, setting.contract)
    rejected = sum(one.caught for one in outcomes)
    suspected = sum(one.suspect for one in outcomes)
    evidence = evidence_of(outcomes)
    tokens = sum(one.tokens for one in samples)
    return HonestRow(
        name=setting.label,
        rollouts=len(outcomes),
        blocks=sum(one.blocks for one in samples),
        rejected=rejected,
        suspected=suspected,
        rejected_at_most=upper_bound(rejected, len(outcomes)),
        suspected_at_most=upper_bound(suspected, len(outcomes)),
        calibrated=false_positives(evidence, setting.contract),
        bans=_bans(setting, outcomes),
        quantiles={
            field: np.quantile([getattr(one, field) for one in evidence], SHARES).tolist()
            for field in MEASURES
        },
        generated_per_s=tokens / max(1e-9, sum(one.generating for one in samples)),
        verified_per_s=tokens / max(1e-9, sum(one.verifying for one in samples)),
    )


def _bans(setting: Setting, outcomes: Sequence[Outcome]) -> tuple[int, int]:
    chance = random.Random(setting.label)
    contracts = (setting.contract, calibrate(setting))
    built_in, calibrated = (
        false_bans(rejudged(outcomes, contract), contract, chance) for contract in contracts
    )
    return built_in, calibrated


def calibrate(setting: Setting) -> ProofContract:
    """Return the setting's contract with bounds calibrated on its honest rollouts."""
    evidence = [one for sample in setting.honest for one in evidence_of(sample.outcomes)]
    return bands(evidence).contract(setting.contract)


def cheat_rows(settings: Sequence[Setting]) -> list[CheatRow]:
    """Make the rows of all cheats of all settings."""
    rows: list[CheatRow] = []
    for setting in settings:
        calibrated = calibrate(setting)
        rows += [_cheat_row(setting, sample, calibrated) for sample in setting.cheats]
    return rows


def _cheat_row(setting: Setting, sample: Sample, calibrated: ProofContract) -> CheatRow:
    """Make the row of one cheat, with its simulated effect on reputation."""
    cheat = BOOK[sample.name.partition(" @ ")[0]]
    chance = random.Random(sample.name)
    outcomes = rejudged(sample.outcomes, calibrated)
    by_built_in = rejudged(sample.outcomes, setting.contract)
    return CheatRow(
        setting=setting.label,
        name=sample.name,
        rollouts=len(outcomes),
        rejected=sum(one.caught for one in outcomes) / len(outcomes),
        suspected=sum(one.suspect for one in outcomes) / len(outcomes),
        reasons=reasons(outcomes),
        within=cheat.within,
        caught=caught_within(outcomes, cheat.within, calibrated, chance),
        caught_built_in=caught_within(by_built_in, cheat.within, setting.contract, chance),
        wanted=cheat.wanted,
        newcomer=until_ban(outcomes, calibrated, chance, proven=False),
        proven=until_ban(outcomes, calibrated, chance, proven=True),
        medians=medians(sample),
    )


def reasons(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Count rejected rollouts by reason, the commonest first."""
    found = Counter(one.reason.value for one in outcomes if one.reason is not None)
    return dict(found.most_common())


def medians(sample: Sample) -> dict[str, float]:
    """Return the median of every measure over the audited rollouts."""
    evidence = evidence_of(sample.outcomes)
    if not evidence:
        return {}
    return {
        field: float(np.median([getattr(one, field) for one in evidence])) for field in MEASURES
    }


# -- tables and goals -----------------------------------------------------------------------------


def show(settings: Sequence[Setting]) -> None:
    """Print all tables."""
    show_honest([honest_row(one) for one in settings])
    print()
    for one in settings:
        show_bounds(f"{one.label}, built in", one.contract)
        show_bounds(f"{one.label}, calibrated", calibrate(one))
    show_cheats(cheat_rows(settings))


def show_honest(rows: Sequence[HonestRow]) -> None:
    """Print error rates, then quantiles."""
    print(
        "\n| honest | rollouts | blocks | built in: rejected (at most) | suspected (at most) "
        "| calibrated: rejected (at most) | suspected (at most) "
        "| false bans in 100,000 audits: built in, calibrated | tokens/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.name} | {row.rollouts:,} | {row.blocks:,} "
            f"| {row.rejected} ({row.rejected_at_most:.1e}) "
            f"| {row.suspected} ({row.suspected_at_most:.2%}) "
            f"| {row.calibrated.rejected} ({row.calibrated.rejected_at_most:.1e}) "
            f"| {row.calibrated.suspected} ({row.calibrated.suspected_at_most:.2%}) "
            f"| {row.bans[0]}, {row.bans[1]} "
            f"| {row.generated_per_s:,.0f} drawn, {row.verified_per_s:,.0f} verified |"
        )
    print("\n| honest, 50 / 99 / 99.9 / 99.99 % / max | " + " | ".join(MEASURES) + " |")
    print("|---" * (len(MEASURES) + 1) + "|")
    for row in rows:
        cells = (" / ".join(f"{value:.3g}" for value in row.quantiles[f]) for f in MEASURES)
        print(f"| {row.name} | " + " | ".join(cells) + " |", flush=True)


def show_bounds(name: str, contract: ProofContract) -> None:
    """Print the bounds of a contract."""
    for kind, bounds in (("reject", contract.reject), ("suspect", contract.suspect)):
        values = ", ".join(f"{field} {getattr(bounds, field):g}" for field in MEASURES)
        print(f"{name}, {kind}: {values}")


def show_cheats(rows: Sequence[CheatRow]) -> None:
    """Print one table per setting."""
    for setting in dict.fromkeys(row.setting for row in rows):
        print(f"\n| {setting} | " + " | ".join(COLUMNS) + " |")
        print("|---" * (len(COLUMNS) + 1) + "|")
        for row in rows:
            if row.setting == setting:
                print(_line(row))


def _line(row: CheatRow) -> str:
    by = ", ".join(f"{name} {count}" for name, count in row.reasons.items()) or "-"
    shown = ("fingerprint", "sampling", "logprob", "other_policy")
    found = ", ".join(f"{row.medians[name]:.3g}" for name in shown) if row.medians else "-"
    return (
        f"| {row.name} | {row.rollouts} | {row.rejected:.1%} | {row.suspected:.1%} | {by} "
        f"| {row.within} | {row.caught:.1%} | {row.caught_built_in:.1%} "
        f"| {_stopped(row.newcomer)} | {_stopped(row.proven)} | {found} |"
    )


def _stopped(found: Stopped) -> str:
    if found.banned > 0.5:
        return f"{found.median:.0f} (95 %: {_number(found.slowest)})"
    if math.isfinite(found.quarantined):
        return f"quarantine {found.quarantined:.0f}"
    return "never"


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "never"


def judge(
    honest: Sequence[HonestRow], cheats: Sequence[CheatRow], proof_bytes: dict[str, float]
) -> list[Goal]:
    """Return every goal with the value reached."""
    goals = [
        at_least(f"{row.setting}: {row.name}, caught within {row.within}", row.caught, row.wanted)
        for row in cheats
        if row.name != HARMLESS
    ]
    rollouts = sum(row.rollouts for row in honest)
    for kind, rejected in (
        ("built in", sum(row.rejected for row in honest)),
        ("calibrated", sum(row.calibrated.rejected for row in honest)),
    ):
        share, bound = rejected / max(1, rollouts), upper_bound(rejected, rollouts)
        goals.append(at_most(f"honest rollouts rejected, {kind}, share", share, FALSE_POSITIVES))
        print(
            f"{kind}: {rejected} of {rollouts:,} rejected, at most {bound:.1e} with 95 % confidence"
        )
    bans = sum(row.bans[1] for row in honest)
    goals.append(at_most("false bans, calibrated, in 100,000 audits of each setting", bans, 0))
    for name, size in proof_bytes.items():
        goals.append(at_most(f"{name}: proof bytes per token", size, PROOF_BYTES))
    return goals


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, "tiny model: about a minute")
    parser.add_argument("--models", default="tiny,tiny:bfloat16,50m", help="NAME[:DTYPE],...")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="that generates")
    parser.add_argument("--blocks", type=int, default=10_000, help="honest, per model")
    parser.add_argument("--rollouts", type=int, default=128, help="of every cheat")
    parser.add_argument("--tokens", type=int, default=96, help="of a rollout at most")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-5], help="of the policy updates")
    parser.add_argument("--few", action="store_true", help="a few cheats, no smaller model")
    parser.add_argument("--tf32", action="store_true", help="audits in float32 multiply in TF32")
    parser.add_argument("--audit", default="", help="dtypes to audit in, DTYPE,...; as the run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train-device", default="", help="where models are trained")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep what was measured")
    parser.add_argument("--load", type=Path, nargs="+", metavar="FILE", help="measure nothing")
    return parser.parse_args()


def main() -> int:
    """Measure, print, write the report, and return exit code 0 if every goal was met."""
    options = arguments()
    if options.quick:
        options.models, options.blocks, options.rollouts = "tiny", 600, 32
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    if options.load:
        settings = [one for path in options.load for one in load(path)]
    else:
        settings = asyncio.run(measure(options))
    print("\n# all")
    show(settings)
    sizes = {Projection().name: Projection().size(options.tokens) / options.tokens}
    honest, cheats = [honest_row(one) for one in settings], cheat_rows(settings)
    goals = judge(honest, cheats, sizes)
    rows: list[dict[str, Any]] = [asdict(row) for row in (*honest, *cheats)]
    return conclude(rows, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
