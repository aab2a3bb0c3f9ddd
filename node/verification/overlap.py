"""Who audits the validators: a share of their jobs is measured again, and what both found is compared.

Two honest machines differ by noise: what one finds clean, the other may find suspect, never guilty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ...protocol.manifests import ProofContract
from .auditor import Measured, Unreadable
from .checks import CheckedRollout
from .items import evidence
from .judge import judge

MIN_COMPARED = 32
"""Rollouts that were measured twice before small differences in judgement may count."""
MAX_DIFFERING = 0.25
"""Share of them that may be judged otherwise; with honest noise it is a few in a hundred."""


class OverlapLevel(IntEnum):
    """What the bounds of the manifest make of what was measured on one rollout."""

    CLEAN = 0
    SUSPECT = 1
    GUILTY = 2


def level(
    rollout: CheckedRollout, measured: Sequence[Measured | Unreadable], contract: ProofContract
) -> OverlapLevel:
    """The level of one rollout; unreadable without anybody's fault is somewhere between."""
    unreadable = [one for one in measured if isinstance(one, Unreadable)]
    if unreadable:
        return OverlapLevel.GUILTY if any(one.proof for one in unreadable) else OverlapLevel.SUSPECT
    found = evidence(rollout, [one for one in measured if isinstance(one, Measured)])
    judgement = judge(found, contract)
    if judgement.reason is not None:
        return OverlapLevel.GUILTY
    return OverlapLevel.SUSPECT if judgement.suspect else OverlapLevel.CLEAN


@dataclass
class ValidatorRecord:
    """How a validator's reports compared with the trainer's own audits."""

    jobs: int = 0
    """Reports taken from it."""
    compared: int = 0
    differing: int = 0
    disqualified: str = ""
    """Why its reports count no more in this run; empty while they do."""

    def compare(self, told: Sequence[OverlapLevel], own: Sequence[OverlapLevel]) -> bool:
        """Take in one job that was measured twice; whether both came to the same judgements."""
        differing = 0
        for ours, theirs in zip(own, told, strict=True):
            self.compared += 1
            differing += ours != theirs
            if abs(ours - theirs) > 1:
                self.disqualified = (
                    f"it called {theirs.name.lower()} what the trainer finds {ours.name.lower()}"
                )
        self.differing += differing
        enough = self.compared >= MIN_COMPARED
        if enough and self.differing > MAX_DIFFERING * self.compared and not self.disqualified:
            self.disqualified = (
                f"{self.differing} of {self.compared} rollouts were judged otherwise by the trainer"
            )
        return not differing
