"""Samples of judged rollouts of honest workers and cheats, for the tables.

The measurements of a setting can be written to disk: tables can be made of them anywhere, with any bounds.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from primerl.node.inference.engine import Engine
from primerl.node.inference.hf import ComputeThread
from primerl.node.verification.auditor import AuditItem, Auditor, Measured, Unreadable, audit_terms
from primerl.node.verification.bounds import BUILT_IN, BUILT_IN_SCALE
from primerl.node.verification.judgement import judge
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease
from primerl.protocol.manifests import ProofContract, RunManifest
from primerl.protocol.rollouts import Evidence
from primerl.scripts.bench.cheat_book import Cheat, Work, honest_work
from primerl.scripts.bench.cheat_world import GROUP_SIZE, Court, Groups, Outcome, Workshop, World
from primerl.scripts.bench.trained_model import Trained, recipe, trained_model

Say = Callable[[str], None]

BLOCK = 32
"""Tokens of a block, the unit of the goals."""
EVERY_S = 10.0
KEEP_BYTES = 2**34
PORTION = 512
"""Maximum number of branches per audit call."""
NODE = bytes(31) + b"w"


@dataclass
class Sample:
    """Judged rollouts of one kind, and their cost."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    generating: float = 0.0
    """Seconds."""
    verifying: float = 0.0

    @property
    def tokens(self) -> int:
        """Sampled tokens that were audited."""
        return sum(one.evidence.tokens for one in self.outcomes if one.evidence is not None)

    @property
    def blocks(self) -> int:
        """Audited blocks."""
        return sum(
            -(-one.evidence.tokens // BLOCK) for one in self.outcomes if one.evidence is not None
        )


@dataclass(frozen=True)
class Setting:
    """One model, dtype and fingerprint; outcomes are judged by `contract`."""

    label: str
    contract: ProofContract
    honest: list[Sample]
    cheats: list[Sample]


def save(path: Path, settings: list[Setting]) -> None:
    """Write all measurements."""
    path.write_text(json.dumps([_plain(one) for one in settings]))


def load(path: Path) -> list[Setting]:
    """Read the settings that save() wrote, with today's built-in bounds."""
    return [
        Setting(
            plain["label"],
            _today(plain["contract"]),
            [_sample(one) for one in plain["honest"]],
            [_sample(one) for one in plain["cheats"]],
        )
        for plain in json.loads(path.read_text())
    ]


def _today(contract: dict[str, Any]) -> ProofContract:
    dtype = contract["dtype"]
    reject, suspect = BUILT_IN[dtype]
    scale = {"other_scale": BUILT_IN_SCALE[dtype]}  # older files have none
    read = msgspec.convert(contract | scale, ProofContract)
    return msgspec.structs.replace(read, reject=reject, suspect=suspect)


def _plain(setting: Setting) -> dict[str, Any]:
    return {
        "label": setting.label,
        "contract": msgspec.to_builtins(setting.contract),
        "honest": [_plain_sample(one) for one in setting.honest],
        "cheats": [_plain_sample(one) for one in setting.cheats],
    }


def _plain_sample(sample: Sample) -> dict[str, Any]:
    outcomes = [
        [
            one.reason.value if one.reason else "",
            one.suspect,
            None if one.evidence is None else msgspec.structs.astuple(one.evidence),
        ]
        for one in sample.outcomes
    ]
    return {
        "name": sample.name,
        "seconds": [sample.generating, sample.verifying],
        "outcomes": outcomes,
    }


def _sample(plain: dict[str, Any]) -> Sample:
    outcomes = [
        Outcome(Reason(reason) if reason else None, suspect, Evidence(*seen) if seen else None)
        for reason, suspect, seen in plain["outcomes"]
    ]
    return Sample(plain["name"], outcomes, *plain["seconds"])


def rejudged(outcomes: Sequence[Outcome], contract: ProofContract) -> list[Outcome]:
    """Judge the same rollouts by other bounds; outcomes without an audit stay unchanged."""
    found: list[Outcome] = []
    for one in outcomes:
        if one.evidence is not None:
            judged = judge(one.evidence, contract)
            one = Outcome(judged.reason, judged.suspect, one.evidence)
        found.append(one)
    return found


def evidence_of(outcomes: Sequence[Outcome]) -> list[Evidence]:
    """Return the evidence of the audited outcomes."""
    return [one.evidence for one in outcomes if one.evidence is not None]


def models_of(name: str, device: str, *, small: bool = True) -> tuple[Trained, Trained]:
    """Return a trained model and a smaller one; without `small` the same one twice."""
    right = recipe(name)
    if not small:
        found = trained_model(right, device=device)
        return found, found
    shape = dict(right.shape)
    narrow = {"hidden_size": max(48, shape.get("hidden_size", 96) // 2)}
    layers = {"num_hidden_layers": max(1, shape.get("num_hidden_layers", 2) // 2)}
    less = recipe(name, steps=max(60, right.steps // 2), **narrow, **layers)
    return trained_model(right, device=device), trained_model(less, device=device)


class BenchAuditor:
    """An auditor in a thread, in a dtype of choice, that keeps the models of all versions."""

    loading_s = 0.0

    def __init__(self, world: World, dtype: str) -> None:
        """`dtype` "" is that of the run."""
        common = audit_terms(world.model_dir, world.run, world.engine.device)
        self._terms = replace(common, dtype=dtype) if dtype else common
        self._thread = ComputeThread("bench auditor")
        self._prefill: PrefillAudit | None = None

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor.start()."""
        self._prefill = PrefillAudit(self._terms, keep_bytes=KEEP_BYTES)

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """See Auditor.audit()."""
        assert self._prefill is not None  # start() makes it
        found: list[Measured | Unreadable] = []
        for start in range(0, len(items), PORTION):
            part = items[start : start + PORTION]
            found += await self._thread.run(self._prefill.measure, part, states)
        return found

    async def close(self) -> None:
        """See Auditor.close()."""
        self._prefill = None
        await self._thread.close()


async def start_auditors(world: World, dtypes: Sequence[str]) -> list[Auditor]:
    """Start one auditor for each dtype."""
    found: list[Auditor] = [BenchAuditor(world, dtype) for dtype in dtypes]
    for one in found:
        await one.start(world.model_dir, world.run)
    return found


async def play_honestly(
    world: World,
    auditors: Sequence[Auditor],
    name: str,
    *,
    blocks: int,
    at_once: int,
    main: Engine | None = None,
    say: Say = print,
) -> list[Sample]:
    """Play at least `blocks` honest audited blocks of 32 tokens, `at_once` rollouts at a time.

    Returns one sample for each auditor, of the same rollouts.
    """
    shop = Workshop(world, NODE, main)
    samples = [Sample(name) for _ in auditors]
    told = time.monotonic()
    try:
        while samples[0].blocks < blocks:
            await _play(shop, auditors, honest_work, samples, at_once)
            if time.monotonic() - told > EVERY_S:
                told = time.monotonic()
                say(f"honest, {name}: {samples[0].blocks} of {blocks} blocks")
    finally:
        await shop.close()
    return samples


async def play_cheats(
    world: World,
    auditors: Sequence[Auditor],
    cheats: Sequence[Cheat],
    *,
    rollouts: int,
    at_once: int,
    main: Engine | None = None,
    say: Say = print,
) -> AsyncIterator[list[Sample]]:
    """Play at least `rollouts` of each cheat in turn; yield one sample for each auditor."""
    shop = Workshop(world, NODE, main)
    try:
        for cheat in cheats:
            samples = [Sample(cheat.name) for _ in auditors]
            while len(samples[0].outcomes) < rollouts:
                await _play(shop, auditors, cheat.work, samples, at_once)
            caught = [sum(one.caught for one in sample.outcomes) for sample in samples]
            say(f"{cheat.name}: {caught} of {len(samples[0].outcomes)} rollouts rejected")
            yield samples
    finally:
        await shop.close()


async def _play(
    shop: Workshop,
    auditors: Sequence[Auditor],
    work: Work,
    samples: Sequence[Sample],
    at_once: int,
) -> None:
    """Play and judge one lease of new tasks."""
    world = shop.world
    groups = max(1, at_once // GROUP_SIZE)
    size = min(GROUP_SIZE, at_once)
    lease = await world.lease(groups, size)
    started = time.perf_counter()
    played = await work(shop, lease)
    generated = time.perf_counter() - started
    await judge_all(shop, auditors, lease, played, samples)
    for sample in samples:
        sample.generating += generated


async def judge_all(
    shop: Workshop,
    auditors: Sequence[Auditor],
    lease: Lease,
    played: Groups,
    samples: Sequence[Sample],
) -> None:
    """Add each auditor's outcomes to its sample."""
    for auditor, sample in zip(auditors, samples, strict=True):
        started = time.perf_counter()
        sample.outcomes += await Court(shop.world, auditor).judge(shop, lease, played)
        sample.verifying += time.perf_counter() - started
    shop.sent_before.clear()
