"""Audits: the interface Auditor, the items that it takes, and the measures of each item.

An auditor recomputes branches under the policies that they claim. It measures; judgement.py judges.
Its input is hostile but has passed the cheap checks. HfAuditor (hf_auditor.py) implements it by one batched
prefill in a process that can be killed; AuditService runs audits here or on validators
(node/trainer/audits.py). Suite: tests/conformance/test_auditor.py.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.leases import Lease, sample_seed
from ...protocol.manifests import (
    AdapterContract,
    ProofContract,
    RouteShape,
    RunManifest,
    SamplingContract,
)
from ...protocol.pipelines import Encoding, PipelinePlan, check_plan
from ...protocol.rollouts import MEASURES, Evidence, Submission
from ..config.engine import Quantization
from ..environments.environment import Branch
from ..errors import EngineError
from ..weights.state import State
from ..weights.state_history import HeldState
from .checks import CheckedRollout, sampled_runs


@dataclass(frozen=True)
class SampledSpan:
    """One run of sampled tokens: positions start..end-1 of the branch, sampled with `seed`."""

    start: int
    end: int
    seed: int


@dataclass(frozen=True)
class BoundaryClaim:
    """Claimed states that one pipeline stage sent to the next."""

    layers: int
    """Layers of the model below the boundary."""
    encoding: Encoding
    """Encoding of the states on the wire: they are compared as they arrived."""
    proof: bytes
    """TOKEN_BYTES for each sampled token [S]; any bytes are valid, but wrong ones are far off."""


@dataclass(frozen=True)
class AuditItem:
    """One branch to audit; S is the number of its sampled tokens."""

    token_ids: Sequence[int]
    replies: Sequence[SampledSpan]
    """Replies in order, none empty."""
    logprobs: Sequence[float]
    """Claimed logprobs of the sampled tokens [S]."""
    versions: Sequence[int]
    """Claimed policy version of each sampled token [S]; never decreasing."""
    proof: bytes
    boundaries: Sequence[BoundaryClaim] = ()
    """Boundaries, lowest first; empty if one node computed all, or stated none."""
    routes: bytes = b""
    """S routes of the run's shape, or empty."""
    support: bytes = b""
    """Supports of the S tokens, as in BranchRecord, or empty."""
    temperature: float = 1.0
    """Temperature of the lease's environment; the worker may have used another one."""
    top_k: int = 0
    """Like the temperature; 0: all tokens may be drawn."""
    top_p: float = 1.0
    """Like the temperature."""
    others: Sequence[int] = ()
    """Versions that the worker may have used for the whole branch instead: it is compared with them."""
    drawn: Sequence[int] = ()
    """Tokens that another reader of this text drew at the sampled positions [S]; empty: those of the text."""

    @cached_property
    def claimed(self) -> frozenset[int]:
        """Policy versions that the item claims."""
        return frozenset(self.versions)

    @property
    def wanted(self) -> list[int]:
        """Policy versions under which the item is read, ascending."""
        return sorted(self.claimed.union(self.others))


class Measured(Evidence, frozen=True, array_like=False, tag="measured"):
    """Evidence of one branch.

    An auditor knows no places: `group` and `rollout` stay 0 until evidence() sets those of the rollout.
    """

    boundaries: tuple[float, ...] = ()
    """Distance at each boundary of the item, like `fingerprint`."""


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """What another reader of a branch claims at its S sampled positions, given the tokens before each."""

    drawn: list[int]
    """Tokens that it draws with the seeds of the branch."""
    logprobs: list[float]
    """Their logprobs, as an item states them."""
    proof: bytes
    support: bytes = b""
    """Supports of these tokens, of an item that states its own."""


class Unreadable(msgspec.Struct, frozen=True, tag="unreadable"):
    """A branch with a malformed proof, or one whose audit failed by itself."""

    detail: str
    proof: bool
    """Whether the proof is at fault; if not, the worker is not to blame."""


@dataclass(frozen=True)
class AuditTerms:
    """Parameters that all audits of a run share."""

    model_dir: str
    dtype: str
    """The run's dtype: the prefill rounds as the workers do, so much of the rounding cancels."""
    device: str
    """Device; `auto` is cuda if there is one."""
    adapters: AdapterContract | None = None
    """Shape of the adapters, in a run whose states are adapters; `model_dir` then holds the base."""
    base_state: bytes = b""
    """Digest of the base's weights."""
    routes: RouteShape | None = None
    """Shape of routes, in a run whose rollouts may bring them."""
    quantization: Quantization = "none"
    """Rounding of the weights that workers compute with."""


def audit_terms(model_dir: Path, run: RunManifest, device: str) -> AuditTerms:
    """Make the terms of a run's audits from its manifest."""
    return AuditTerms(
        str(model_dir),
        run.proofs.dtype,
        device,
        run.adapters,
        run.model.base_state,
        run.routes,
        run.proofs.quantization,
    )


class Auditor(Protocol):
    """Recomputation of workers' claims."""

    @property
    def loading_s(self) -> float:
        """Seconds so far in which a held policy was replaced by another; 0 if several are held at a time."""
        ...

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """Read the architecture from `model_dir` (no weights there). Raises EngineError."""
        ...

    async def audit(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """Measure every item, in order; `states` holds every version that an item wants.

        Raises EngineError when it cannot audit at all.
        """
        ...

    async def close(self) -> None:
        """Free all resources."""
        ...


# -- the versions that an item needs ---------------------------------------------------------------


def other_versions(claimed: Set[int], others: Mapping[int, Sequence[int]]) -> list[int]:
    """List the versions that may have sampled a whole branch instead of those that it claims, ascending.

    `others`: claimed version -> versions that a worker may have used instead. A branch of one version is not
    compared with itself.
    """
    candidates = set[int]().union(*(others.get(version, ()) for version in claimed))
    return sorted(candidates if len(claimed) > 1 else candidates - claimed)


COMPARISONS = 16
"""Latest comparisons with another version that are remembered."""
TELLING_NATS = 3.0
"""Versions are alike if the mean evidence of these is below this: less makes no rollout suspect."""
SELDOM = 8
"""Of this many audits one compares versions that are alike."""


class VersionComparisons:
    """Chooses the audits that compare rollouts with the version before the claimed one, too.

    To read a rollout under another version costs as much as under its own, and says nothing where rounding
    exceeds the difference, as after steps of lr 1e-6 in bfloat16. Versions that differ more are always
    compared; an eighth of 64 rollouts of TELLING_NATS each are still enough for a ban.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=COMPARISONS)
        self._audits = 0

    def due(self) -> bool:
        """Return whether the next audit compares."""
        self._audits += 1
        known = len(self._seen) == COMPARISONS
        alike = known and sum(self._seen) < TELLING_NATS * COMPARISONS
        return not alike or self._audits % SELDOM == 0

    def note(self, other_policy: float) -> None:
        """Count the evidence of a rollout, nats; 0 if it was not compared."""
        if other_policy:
            self._seen.append(abs(other_policy))


async def check_model_routes(model_dir: Path, run: RunManifest) -> None:
    """Raise EngineError if the run has routes of experts, and its model cannot take them."""
    if run.routes is not None:
        from ..models.routers import check_route_shape

        await asyncio.to_thread(check_route_shape, model_dir, run.routes)


def check_versions(items: Sequence[AuditItem], states: Mapping[int, object]) -> None:
    """Raise EngineError unless every version that `items` want is held."""
    needed = {version for item in items for version in item.wanted}
    if missing := needed - states.keys():
        raise EngineError(f"the state of policy {min(missing)} is missing: hand it to audit(), too")


class SameState:
    """Identity of a state, a version of a history or tensor objects, without keeping it alive.

    Equal bits in other objects count as another state: that costs time, but never gives a wrong answer.
    """

    def __init__(self, state: State) -> None:
        in_history = isinstance(state, HeldState)  # its tensors are not built for this
        self._version = weakref.ref(state) if in_history else None
        self._tensors = (
            {} if in_history else {name: weakref.ref(tensor) for name, tensor in state.items()}
        )

    @property
    def gone(self) -> bool:
        """Whether no tensor of the state is alive."""
        alive = self._tensors.values() if self._version is None else [self._version]
        return all(reference() is None for reference in alive)

    def matches(self, state: State) -> bool:
        """Return whether `state` is that version, or holds exactly these objects, all still alive."""
        if self._version is not None or isinstance(state, HeldState):
            return self._version is not None and self._version() is state
        tensors = self._tensors
        return tensors.keys() == state.keys() and all(
            tensors[name]() is state[name] for name in state
        )


# -- from a rollout to items, and from measurements to evidence ------------------------------------
# The trainer and validators build the same items from the same bundle, so neither has to trust the other.


def plan_of(submission: Submission, leaders: Leaders, node: bytes) -> PipelinePlan | None:
    """Open the pipeline plan that a submission of `node` names; None if it names none.

    Raises:
        RemoteProtocolError: no leader signed it, or `node` is not its first stage.
    """
    if not submission.plan:
        return None
    # A plan of any age is accepted: work done under it may arrive late.
    plan = leaders.unseal(submission.plan, Purpose.PIPELINE, PipelinePlan).body
    check_plan(plan)
    if plan.rank_of(node) != 0:
        raise RemoteProtocolError(Reason.WRONG_SIGNER, "a plan whose first stage is another node")
    return plan


def plain_turns(branches: Sequence[Branch]) -> Sequence[Sequence[int]] | None:
    """Number the turns of a rollout of one branch; None if it has more: only the environment can."""
    if len(branches) != 1:
        return None
    return [range(len(sampled_runs(branches[0].sampled)))]


def audit_items(
    rollout: CheckedRollout,
    turns: Sequence[Sequence[int]],
    *,
    lease: Lease,
    run: bytes,
    sampling: SamplingContract,
    node: bytes,
    plan: PipelinePlan | None = None,
    others: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> list[AuditItem]:
    """Make one item per branch.

    `turns` holds, per branch, the turn number of each reply; `run` is the run id, `sampling` that of the
    lease's environment, `node` the worker, `plan` that of its pipeline, `others` as in other_versions().
    """
    task = lease.tasks[rollout.group].digest
    crossed = rollout.crossed or [()] * len(rollout.branches)

    def item(branch: Branch, numbers: Sequence[int], proofs: Sequence[bytes]) -> AuditItem:
        seeds = (sample_seed(run, lease, node, task, rollout.index, turn) for turn in numbers)
        spans = zip(sampled_runs(branch.sampled), seeds, strict=True)
        claimed = versions(branch)
        return AuditItem(
            token_ids=branch.token_ids,
            replies=[SampledSpan(start, end, seed) for (start, end), seed in spans],
            logprobs=list(compress(branch.logprobs, branch.sampled)),
            versions=claimed,
            proof=branch.proof,
            boundaries=_boundaries(plan, proofs),
            routes=branch.routes,
            support=branch.support,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            others=other_versions(set(claimed), others),
        )

    return [item(*parts) for parts in zip(rollout.branches, turns, crossed, strict=True)]


def _boundaries(plan: PipelinePlan | None, proofs: Sequence[bytes]) -> list[BoundaryClaim]:
    if plan is None or not proofs:
        return []
    stages = zip(plan.stages[:-1], proofs, strict=True)
    return [BoundaryClaim(stage.end, plan.shape.encoding, proof) for stage, proof in stages]


def versions(branch: Branch) -> list[int]:
    """List the policy version of each sampled token."""
    spans = branch.spans or ((0, branch.policy_first),)
    ends = [start for start, _ in spans[1:]] + [sum(branch.sampled)]
    claimed: list[int] = []
    for (_, version), end in zip(spans, ends, strict=True):
        claimed += [version] * (end - len(claimed))
    return claimed


def evidence(rollout: CheckedRollout, measured: Iterable[Measured]) -> Evidence:
    """Return the worst value of each measure over a rollout's branches, and the mean of the signed ones."""
    branches = list(measured)
    tokens = sum(branch.tokens for branch in branches)
    means: tuple[float, ...] = ()
    if all(branch.means for branch in branches):
        columns = zip(*(branch.means for branch in branches), strict=True)
        weights = [branch.tokens / tokens for branch in branches]
        means = tuple(
            sum(w * value for w, value in zip(weights, column, strict=True)) for column in columns
        )
    return Evidence(
        rollout.group,
        rollout.index,
        tokens,
        *(max((getattr(branch, name) for branch in branches), key=_nan_last) for name in MEASURES),
        means=means,
    )


def boundary_distances(measured: Iterable[Measured]) -> tuple[float, ...]:
    """Return the worst distance at each boundary over a rollout's branches; () if some have none."""
    rows = [branch.boundaries for branch in measured]
    if not all(rows) or len({len(row) for row in rows}) != 1:
        return ()
    return tuple(max(column, key=_nan_last) for column in zip(*rows, strict=True))


def _nan_last(value: float) -> float:
    """Map NaN to infinity, as it is worse than any number."""
    return value if value == value else inf


# -- audits of rollouts, wherever they are made ----------------------------------------------------


@dataclass(frozen=True)
class AuditTarget:
    """One rollout to audit, with its items: one per branch."""

    rollout: CheckedRollout
    items: Sequence[AuditItem]


@dataclass(frozen=True)
class AuditCall:
    """Rollouts of one submission to audit."""

    sealed: bytes
    """The submission as the worker sealed it."""
    digest: bytes
    lease: Lease
    node: bytes
    challenge: bytes
    """Random bytes drawn after the receipt, which chose the rollouts to audit."""
    chosen: Sequence[AuditTarget]
    states: Mapping[int, State]
    """States of all versions that the items want."""
    others: Mapping[int, Sequence[int]]
    """Claimed version -> versions that the items are compared with: a validator makes its own items."""
    contract: ProofContract
    """Proof contract with the bounds to apply."""
    by_trainer: bool = False
    """Whether only the trainer may measure the rollouts, as bounds are derived from them."""


@dataclass(frozen=True)
class AuditAnswer:
    """Measurements: `measured` holds one list per chosen rollout, one entry per branch."""

    measured: Sequence[Sequence[Measured | Unreadable]]
    validator: bytes = b""
    """The validator that measured, if not this node."""


class AuditService(Protocol):
    """Service that audits rollouts, here or on validators."""

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        """Measure every chosen rollout. Raises EngineError when that is not possible."""
        ...
