"""The tables and the goals of cheats.py, in Markdown."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from cheats_measure import Sample, evidence_of, rejudged
from cheats_store import Setting
from cheats_trust import Stopped, caught_within, false_bans, until_ban

from primerl.node.verification.auditor import MEASURES
from primerl.node.verification.bounds import FalsePositives, bands, false_positives, upper_bound
from primerl.protocol.manifests import ProofContract
from primerl.tests.attacks.cheat_book import BOOK
from primerl.tests.attacks.cheat_world import Outcome

SHARES = (0.5, 0.99, 0.999, 0.9999, 1.0)
FALSE_POSITIVES = 1e-4
PROOF_BYTES = 8.1
HARMLESS = "failures told as errors"
"""Costs the rollouts and nothing else; what it leaves open stands in docs/proofs.md."""

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

Goal = dict[str, Any]


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
    """By bounds made of the other half."""
    bans: tuple[int, int]
    """In 100,000 audits drawn from these, by built-in and by calibrated bounds."""
    quantiles: dict[str, list[float]]
    """Per measure, at SHARES."""
    generated_per_s: float
    """Tokens."""
    verified_per_s: float


@dataclass(frozen=True)
class CheatRow:
    """Rollouts of one cheat."""

    setting: str
    name: str
    rollouts: int
    rejected: float
    """Share, by calibrated bounds like what follows."""
    suspected: float
    """Share, the rejected audits included."""
    reasons: dict[str, int]
    within: int
    caught: float
    """Within so many audited rollouts, by calibrated bounds."""
    caught_built_in: float
    """By the bounds that are built in for the dtype."""
    wanted: float
    newcomer: Stopped
    proven: Stopped
    medians: dict[str, float]
    """Of every measure."""


def honest_row(setting: Setting) -> HonestRow:
    """The honest of one setting."""
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
    """The setting's contract with the bounds that its honest rollouts give."""
    evidence = [one for sample in setting.honest for one in evidence_of(sample.outcomes)]
    return bands(evidence).contract(setting.contract)


def cheat_rows(settings: Sequence[Setting]) -> list[CheatRow]:
    """All cheats of all settings."""
    rows: list[CheatRow] = []
    for setting in settings:
        calibrated = calibrate(setting)
        rows += [_cheat_row(setting, sample, calibrated) for sample in setting.cheats]
    return rows


def _cheat_row(setting: Setting, sample: Sample, calibrated: ProofContract) -> CheatRow:
    """What was measured, and what trust makes of it."""
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
    """Why rollouts were rejected, the commonest first."""
    found = Counter(one.reason.value for one in outcomes if one.reason is not None)
    return dict(found.most_common())


def medians(sample: Sample) -> dict[str, float]:
    """The median of every measure over the audited rollouts."""
    evidence = evidence_of(sample.outcomes)
    if not evidence:
        return {}
    return {
        field: float(np.median([getattr(one, field) for one in evidence])) for field in MEASURES
    }


def show(settings: Sequence[Setting]) -> None:
    """All tables."""
    show_honest([honest_row(one) for one in settings])
    print()
    for one in settings:
        show_bounds(f"{one.label}, built in", one.contract)
        show_bounds(f"{one.label}, calibrated", calibrate(one))
    show_cheats(cheat_rows(settings))


# -- tables ----------------------------------------------------------------------------------------


def show_honest(rows: Sequence[HonestRow]) -> None:
    """Error rates, then quantiles."""
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
    """The bounds that were judged by."""
    for kind, bounds in (("reject", contract.reject), ("suspect", contract.suspect)):
        values = ", ".join(f"{field} {getattr(bounds, field):g}" for field in MEASURES)
        print(f"{name}, {kind}: {values}")


def show_cheats(rows: Sequence[CheatRow]) -> None:
    """One table a setting."""
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


# -- goals -----------------------------------------------------------------------------------------


def judge(
    honest: Sequence[HonestRow], cheats: Sequence[CheatRow], proof_bytes: dict[str, float]
) -> list[Goal]:
    """Every goal with what was reached, printed and returned."""
    goals: list[Goal] = []

    def add(name: str, value: float, goal: float, most: bool = False) -> None:
        ok = value <= goal if most else value >= goal
        goals.append({"name": name, "value": value, "goal": goal, "ok": ok})
        sign = "<=" if most else ">="
        print(f"{'ok  ' if ok else 'MISS'} {name}: {value:.4g} (goal {sign} {goal:g})")

    print()
    for row in cheats:
        if row.name != HARMLESS:
            add(f"{row.setting}: {row.name}, caught within {row.within}", row.caught, row.wanted)
    rollouts = sum(row.rollouts for row in honest)
    for kind, rejected in (
        ("built in", sum(row.rejected for row in honest)),
        ("calibrated", sum(row.calibrated.rejected for row in honest)),
    ):
        share = rejected / max(1, rollouts)
        add(f"honest rollouts rejected, {kind}, share", share, FALSE_POSITIVES, most=True)
        bound = upper_bound(rejected, rollouts)
        print(f"     {rejected} of {rollouts:,}, at most {bound:.1e} with 95 % confidence")
    bans = sum(row.bans[1] for row in honest)
    add("false bans, calibrated, in 100,000 audits of each setting", bans, 0, most=True)
    for name, size in proof_bytes.items():
        add(f"{name}: proof bytes per token", size, PROOF_BYTES, most=True)
    return goals


def as_json(
    honest: Sequence[HonestRow], cheats: Sequence[CheatRow], goals: list[Goal]
) -> dict[str, Any]:
    """The report."""
    return {
        "honest": [asdict(row) for row in honest],
        "cheats": [asdict(row) for row in cheats],
        "goals": goals,
    }
