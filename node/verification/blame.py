"""Which stage of a pipeline a fault can be of: pure, from the distances at its boundaries.

A stage whose input is right and whose output is wrong computed something else than it should have. Where a
fault can be of several stages all of them are given: no honest one is to be named for a quick answer's sake.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from ...protocol.errors import Reason
from ...protocol.manifests import ProofContract, Thresholds
from ...protocol.reputation import Outcome
from ...protocol.rollouts import Evidence
from .judge import Judgement

CLEAR = 0.5
"""Share of the suspect bound below which an input is surely right where an output is only suspect."""


@dataclass(frozen=True)
class StageAttribution:
    """What an audited rollout says of the stages that made it."""

    group: int
    rollout: int
    distances: tuple[float, ...]
    outcome: Outcome
    stages: tuple[int, ...]
    """One of these did it; empty if nothing is wrong, or no boundaries were stated."""
    other_policy: float = 0.0
    """As in the evidence: which stage stayed on another version cannot be told."""

    @property
    def named(self) -> int | None:
        """The only stage that can have done it."""
        return self.stages[0] if len(self.stages) == 1 else None


def blame(
    evidence: Evidence, judgement: Judgement, distances: Sequence[float], contract: ProofContract
) -> StageAttribution:
    """Whose fault it can be what `judgement` says of a rollout with these `distances` at its boundaries.

    Without distances it cannot be told: some of it may have been made by stages that are gone.
    The last output is what feeds the head, of which `evidence` tells. Boundaries have the bounds of that:
    honest noise grows with every layer, and is at the last one about what it is at the end (docs/proofs.md).
    """
    outputs = (*distances, evidence.fingerprint)
    outcome: Outcome = "clean"
    stages: tuple[int, ...] = ()
    if not distances:
        outcome = "rejected" if judgement.reason else "suspect" if judgement.suspect else "clean"
    elif judgement.reason is not None:
        outcome = "rejected"
        stages = _rejected(judgement.reason, outputs, contract)
    elif judgement.suspect:
        outcome = "suspect"
        stages = _suspect(evidence, outputs, contract.suspect)
    elif off := _first_off(distances, contract.reject.fingerprint, inf):
        # What came out is right, so all was: whoever had the trail in hands since then may have changed it.
        outcome = "suspect"
        stages = (0, *range(max(1, off[0]), len(outputs)))
    return StageAttribution(
        evidence.group,
        evidence.rollout,
        tuple(distances),
        outcome,
        stages,
        evidence.other_policy,
    )


def most_named(blames: Iterable[StageAttribution]) -> int | None:
    """The stage that is named alone by most rejected rollouts; None if none is."""
    counts = Counter(
        one.named for one in blames if one.outcome == "rejected" and one.named is not None
    )
    return max(counts, key=lambda stage: (counts[stage], -stage), default=None)


def words(one: StageAttribution, nodes: Sequence[bytes]) -> str:
    """Who it can have been, for a rejection's detail; `nodes` of the stages."""
    last = len(nodes) - 1
    who = [f"{stage} of 0..{last} ({nodes[stage].hex()[:8]})" for stage in one.stages]
    return f"stage {' or '.join(who)}" if who else ""


def _rejected(reason: Reason, outputs: Sequence[float], contract: ProofContract) -> tuple[int, ...]:
    if reason is Reason.WRONG_POLICY:
        return tuple(range(len(outputs)))  # any of them can have stayed on another version
    found = _first_off(outputs, contract.reject.fingerprint, contract.suspect.fingerprint)
    return found or _drawing(outputs)


def _suspect(evidence: Evidence, outputs: Sequence[float], bounds: Thresholds) -> tuple[int, ...]:
    if not evidence.other_policy <= bounds.other_policy:
        return tuple(range(len(outputs)))
    bound = bounds.fingerprint
    return _first_off(outputs, bound, CLEAR * bound) or _drawing(outputs)


def _first_off(outputs: Sequence[float], bound: float, clear: float) -> tuple[int, ...]:
    """The first stage whose output is above `bound`, and those right before it that are not below `clear`."""
    # written so that NaN is above every bound
    off = next((stage for stage, out in enumerate(outputs) if not out <= bound), None)
    if off is None:
        return ()
    first = off
    while first > 0 and not outputs[first - 1] <= clear:
        first -= 1
    return tuple(range(first, off + 1))


def _drawing(outputs: Sequence[float]) -> tuple[int, ...]:
    """States are right and tokens are not: the last stage draws them, the first takes and states them."""
    return (0, len(outputs) - 1)
