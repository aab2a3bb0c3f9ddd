"""Plays honest workers and cheats for leases and has every rollout judged: the sample behind the tables."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from primerl.node.engines.engine import Engine
from primerl.node.proofs.auditor import Auditor
from primerl.node.proofs.judgement import judge
from primerl.protocol.manifests import ProofContract
from primerl.protocol.rollouts import Evidence
from primerl.tests.attacks.cheat_book import Cheat, Work, honest_work
from primerl.tests.attacks.cheat_court import Court, Outcome
from primerl.tests.attacks.cheat_run import GROUP_SIZE
from primerl.tests.attacks.cheat_world import Workshop, World

Say = Callable[[str], None]

BLOCK = 32
"""Tokens of a block, as TOPLOC counts."""
EVERY_S = 10.0
NODE = bytes(31) + b"w"


@dataclass
class Sample:
    """Judged rollouts of one kind, and what they cost."""

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


def rejudged(outcomes: Sequence[Outcome], contract: ProofContract) -> list[Outcome]:
    """The same rollouts by other bounds; what was not audited stays as it is."""
    found: list[Outcome] = []
    for one in outcomes:
        if one.evidence is not None:
            judged = judge(one.evidence, contract)
            one = Outcome(judged.reason, judged.suspect, one.evidence)
        found.append(one)
    return found


def evidence_of(outcomes: Sequence[Outcome]) -> list[Evidence]:
    """What audits measured."""
    return [one.evidence for one in outcomes if one.evidence is not None]


async def play_honestly(
    world: World,
    auditor: Auditor,
    name: str,
    *,
    blocks: int,
    at_once: int,
    main: Engine | None = None,
    say: Say = print,
) -> Sample:
    """At least `blocks` honest audited blocks of 32 tokens, generated `at_once` rollouts at a time."""
    shop = Workshop(world, NODE, main)
    sample = Sample(name)
    told = time.monotonic()
    try:
        while sample.blocks < blocks:
            await _play(shop, auditor, honest_work, sample, at_once)
            if time.monotonic() - told > EVERY_S:
                told = time.monotonic()
                say(f"honest, {name}: {sample.blocks} of {blocks} blocks")
    finally:
        await shop.close()
    return sample


async def play_cheats(
    world: World,
    auditor: Auditor,
    cheats: Sequence[Cheat],
    *,
    rollouts: int,
    at_once: int,
    main: Engine | None = None,
    say: Say = print,
) -> list[Sample]:
    """At least `rollouts` of every cheat."""
    shop = Workshop(world, NODE, main)
    samples: list[Sample] = []
    try:
        for cheat in cheats:
            sample = Sample(cheat.name)
            while len(sample.outcomes) < rollouts:
                await _play(shop, auditor, cheat.work, sample, at_once)
            samples.append(sample)
            caught = sum(one.caught for one in sample.outcomes)
            say(f"{cheat.name}: {caught} of {len(sample.outcomes)} rollouts rejected")
    finally:
        await shop.close()
    return samples


async def _play(shop: Workshop, auditor: Auditor, work: Work, sample: Sample, at_once: int) -> None:
    """One lease; its tasks are new ones."""
    world = shop.world
    groups = max(1, at_once // GROUP_SIZE)
    size = min(GROUP_SIZE, at_once)
    lease = world.lease(groups, size)
    started = time.perf_counter()
    played = await work(shop, lease)
    generated = time.perf_counter()
    sample.outcomes += await Court(world, auditor).judge(shop, lease, played)
    sample.verifying += time.perf_counter() - generated
    sample.generating += generated - started
