"""The auditor seam: branches under the policies that they claim, in; what was measured on each, out.

It measures and does not judge: judge.py does. What comes in is hostile but already passed the cheap
checks. Implementations: hf_auditor.py (one batched prefill, in a process that can be killed), remote
validators (roles), and a fake in the tests.
Suite: tests/conformance/test_auditor.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...protocol.manifests import RunManifest
from ...protocol.pipelines import Encoding
from ..weights.state import State


@dataclass(frozen=True)
class SampledSpan:
    """One run of sampled tokens: positions start..end-1 of the branch, drawn by the noise of `seed`."""

    start: int
    end: int
    seed: int


@dataclass(frozen=True)
class BoundaryClaim:
    """What is claimed of the states that crossed from one stage of a pipeline to the next."""

    layers: int
    """Of the model, below it."""
    encoding: Encoding
    """How they travelled: they are compared as they arrived."""
    proof: bytes
    """Of each sampled token [S], ROW bytes; they may be anything, and are far off then."""


@dataclass(frozen=True)
class AuditItem:
    """One branch; S is the number of its sampled tokens."""

    token_ids: Sequence[int]
    replies: Sequence[SampledSpan]
    """In order, none empty."""
    logprobs: Sequence[float]
    """[S], claimed."""
    versions: Sequence[int]
    """[S], claimed: the policy version that drew each token; never decreasing."""
    proof: bytes
    boundaries: Sequence[BoundaryClaim] = ()
    """From the lowest on; empty if one node computed all, or does not say."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one branch; the fields are explained at protocol/rollouts.py: Evidence."""

    tokens: int
    fingerprint: float
    sampling: float
    sampling_max: float
    logprob: float
    logprob_max: float
    other_policy: float
    boundaries: tuple[float, ...] = ()
    """Distance at each boundary of the item, like `fingerprint`."""


@dataclass(frozen=True)
class Unreadable:
    """The branch's proof is no proof, or the audit of this branch alone came to no end."""

    detail: str
    proof: bool
    """Whether the proof is at fault; if not, nobody is to blame."""


class Auditor(Protocol):
    """Recomputes what workers claim."""

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """Read the architecture from `model_dir` (no weights there). Raises EngineError."""
        ...

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> list[Measured | Unreadable]:
        """Measure every item, in order.

        `states` holds every version that an item claims and every one in `others`: claimed version ->
        versions that a worker might have used instead. Raises EngineError when it cannot audit at all.
        """
        ...

    async def close(self) -> None:
        """Free everything."""
        ...
