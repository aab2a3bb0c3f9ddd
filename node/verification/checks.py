"""Check a submission without a model: pure functions of bytes, cheapest first.

Limits come from the run manifest and the lease, never from the submission. A fault of a rollout is returned as
a Rejection with a reason code and costs that rollout; a fault of the bundle raises and costs the bundle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise

import numpy as np

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, environment_of
from ...protocol.manifests import EnvironmentContract, RunManifest, SamplingContract
from ...protocol.pipelines import PipelinePlan
from ...protocol.rollouts import (
    WITHDRAWN,
    BranchRecord,
    GroupRecord,
    Rejection,
    RolloutRecord,
    Submission,
    clipped,
    unpack_f32,
    unpack_u32,
)
from ..environments.environment import Branch
from ..inference.fingerprint import TOKEN_BYTES, BadProof, Projection, split
from ..models.routes import route_fault
from ..models.support import support_fault

ORDER_SLACK = 2
"""Tokens by which an honest sample may trail a later one, as a pipeline's micro-batches alternate."""


@dataclass
class CheckedRollout:
    """A rollout that passed the cheap checks."""

    group: int
    index: int
    branches: list[Branch]
    claimed_reward: float
    crossed: list[tuple[bytes, ...]] = field(default_factory=list[tuple[bytes, ...]])
    """Per branch, fingerprints of the states that a pipeline's stages sent; empty unless complete."""


@dataclass
class CheckedSubmission:
    """Rollouts that passed, and the rejections."""

    rollouts: list[CheckedRollout] = field(default_factory=list[CheckedRollout])
    rejections: list[Rejection] = field(default_factory=list[Rejection])


class Rejected(Exception):
    """One rollout fails a check."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


def check_submission(
    submission: Submission,
    lease: Lease,
    run: RunManifest,
    version: int,
    plan: PipelinePlan | None = None,
) -> CheckedSubmission:
    """Compare a submission with its lease and the run's contract; `version`: newest published.

    `plan` is the submission's plan_of().

    Raises RemoteProtocolError: WRONG_TASK or TOO_LARGE if the bundle is not the work of this lease, or the
    lease is not for an environment of the run; MALFORMED if its boundaries do not fit its branches.
    """
    environment_of(run, lease)
    if len(submission.groups) != len(lease.tasks):
        raise RemoteProtocolError(Reason.WRONG_TASK, "not the tasks of the lease")
    checked = CheckedSubmission()
    for number, (group, task) in enumerate(zip(submission.groups, lease.tasks, strict=True)):
        if (group.task_index, group.task_digest) != (task.index, task.digest):
            raise RemoteProtocolError(Reason.WRONG_TASK, f"group {number} is of another task")
        if len(group.rollouts) > lease.group_size:
            raise RemoteProtocolError(Reason.TOO_LARGE, f"group {number} has too many rollouts")
        # the last stage of a pipeline draws, and states no supports
        _check_group(number, group, lease, run, version, checked, supported=plan is None)
    if plan is not None:
        _attach(submission, plan, checked)
    return checked


def _attach(submission: Submission, plan: PipelinePlan, checked: CheckedSubmission) -> None:
    """Attach boundary fingerprints to their branches; a rollout that lacks some gets none.

    Only sizes are checked: other stages wrote the bytes, so only an audit can tell whether they are
    fingerprints.
    """
    of = {(row.group, row.rollout, row.branch): row.boundaries for row in submission.crossed}
    if len(of) != len(submission.crossed):
        raise RemoteProtocolError(Reason.MALFORMED, "boundaries of one branch twice")
    for rollout in checked.rollouts:
        boundaries = [
            of.get((rollout.group, rollout.index, number), ())
            for number in range(len(rollout.branches))
        ]
        if not all(boundaries):
            continue
        for branch, parts in zip(rollout.branches, boundaries, strict=True):
            sizes = {len(part) for part in parts}
            if len(parts) != len(plan.stages) - 1 or sizes != {TOKEN_BYTES * sum(branch.sampled)}:
                raise RemoteProtocolError(Reason.MALFORMED, "boundaries of another size")
        rollout.crossed = boundaries


def _check_group(
    number: int,
    group: GroupRecord,
    lease: Lease,
    run: RunManifest,
    version: int,
    checked: CheckedSubmission,
    *,
    supported: bool,
) -> None:
    passed: list[CheckedRollout] = []
    for index in range(lease.group_size):
        try:
            if index >= len(group.rollouts):
                raise Rejected(Reason.MISSING_INDEX, "an index that is missing counts as failed")
            record = group.rollouts[index]
            branches = _check_rollout(record, lease, run, version, supported=supported)
        except Rejected as fault:
            checked.rejections.append(Rejection(number, index, fault.reason, clipped(fault.detail)))
        else:
            passed.append(CheckedRollout(number, index, branches, record.reward))
    late = late_samples({rollout.index: rollout.branches for rollout in passed})
    if not late:
        checked.rollouts += passed
        return
    # Reject the whole group: the sample that had two tries cannot be identified.
    index, why = min(late.items())
    detail = clipped(f"sample {index} {why}")
    checked.rejections += [
        Rejection(number, rollout.index, Reason.WRONG_ORDER, detail) for rollout in passed
    ]


def late_samples(samples: Mapping[int, Sequence[Branch]]) -> dict[int, str]:
    """Find the samples of one group that were drawn out of order: index -> explanation.

    `samples`: the branches of each sample by its index. Samples begin in the order of their indices, in one
    engine, and running ones draw in step. So whenever the policy changed, a sample whose first reply was not
    finished had drawn at least as much of it as every later sample, up to ORDER_SLACK. A worker that generates
    with two versions and sends the better one, sample by sample, violates this (docs/proofs.md). Without the
    returned samples the others are in order.
    """
    firsts = {index: branches[0] for index, branches in samples.items() if branches}
    if len({version for first in firsts.values() for _, version in _spans(first)}) < 2:
        return {}  # most groups: the policy did not change meanwhile
    replies = {index: _first_reply(first) for index, first in firsts.items()}
    late: dict[int, str] = {}
    for version in sorted({version for _, spans in replies.values() for _, version in spans}):
        furthest, furthest_index = 0, 0
        for index in sorted(replies.keys() - late.keys(), reverse=True):
            length, spans = replies[index]
            tokens = min((start for start, drew in spans if drew >= version), default=length)
            if tokens < length and furthest > (tokens + ORDER_SLACK if tokens else 0):
                late[index] = (
                    f"had drawn {tokens} tokens when policy {version} came, "
                    f"the later sample {furthest_index} {furthest}"
                )
            elif tokens > furthest:
                furthest, furthest_index = tokens, index
    return late


def _first_reply(branch: Branch) -> tuple[int, list[tuple[int, int]]]:
    """Return the length and spans of a branch's first reply.

    The environment determines the pace of later turns.
    """
    start = branch.sampled.index(True)
    try:
        end = branch.sampled.index(False, start)
    except ValueError:
        end = len(branch.sampled)
    return end - start, [(at, version) for at, version in _spans(branch) if at < end - start]


def _spans(branch: Branch) -> tuple[tuple[int, int], ...]:
    return branch.spans or ((0, branch.policy_first),)


def _check_rollout(
    record: RolloutRecord, lease: Lease, run: RunManifest, version: int, *, supported: bool
) -> list[Branch]:
    if record.error.startswith(WITHDRAWN):
        raise Rejected(Reason.WITHDRAWN, record.error.removeprefix(WITHDRAWN))
    if record.error:
        raise Rejected(Reason.ENVIRONMENT_ERROR, record.error)
    if not record.branches:
        raise Rejected(Reason.MISSING_INDEX, "no tokens")
    if record.reward != record.reward or abs(record.reward) > 1e9:
        raise Rejected(Reason.BAD_REWARD, "not a finite reward")
    return [
        _check_branch(branch, lease, run, version, supported=supported)
        for branch in record.branches
    ]


def _check_branch(
    record: BranchRecord, lease: Lease, run: RunManifest, version: int, *, supported: bool
) -> Branch:
    branch = _unpack(record)
    _check_lengths(branch, run)
    if branch.policy_last > version:
        raise Rejected(Reason.FUTURE_POLICY, f"policy {branch.policy_last}, newest is {version}")
    if branch.policy_first > branch.policy_last:
        raise Rejected(Reason.MALFORMED, "first policy version after the last")
    if branch.policy_first < lease.min_version:
        raise Rejected(
            Reason.STALE, f"policy {branch.policy_first}, the lease asks for {lease.min_version}"
        )
    check_termination(branch, run, environment_of(run, lease))
    _check_spans(branch)
    _check_proof(branch, run)
    _check_routes(branch, run)
    sampling = environment_of(run, lease).sampling
    _check_support(branch, sampling, run.model.vocab_size, supported=supported)
    return branch


def _unpack(record: BranchRecord) -> Branch:
    try:
        tokens, logprobs = unpack_u32(record.tokens), unpack_f32(record.logprobs)
    except RemoteProtocolError as error:
        raise Rejected(error.reason, error.detail) from error
    if max(record.sampled, default=0) > 1 or len(record.sampled) != len(tokens):
        raise Rejected(Reason.MALFORMED, "the mask does not fit the tokens")
    mask = np.frombuffer(record.sampled, np.bool_)
    if len(logprobs) != np.count_nonzero(mask):
        raise Rejected(Reason.MALFORMED, "not one logprob per sampled token")
    spread = np.zeros(len(mask))
    spread[mask] = logprobs
    return Branch(
        token_ids=tokens,
        sampled=mask.tolist(),
        logprobs=spread.tolist(),
        policy_first=record.policy_first,
        policy_last=record.policy_last,
        finish=record.finish,
        spans=tuple((span.start, span.version) for span in record.spans),
        proof=record.proof,
        routes=record.routes,
        support=record.support,
    )


def _check_lengths(branch: Branch, run: RunManifest) -> None:
    if not 2 <= len(branch.token_ids) <= run.limits.max_model_len:
        raise Rejected(Reason.TOO_LARGE, f"{len(branch.token_ids)} tokens")
    if branch.sampled[0] or not any(branch.sampled):
        raise Rejected(Reason.MALFORMED, "a prompt and then sampled tokens are expected")
    if max(branch.token_ids) >= run.model.vocab_size:
        raise Rejected(Reason.TOKEN_OUT_OF_RANGE, f"token {max(branch.token_ids)}")
    if max(branch.logprobs) > 1e-3:
        raise Rejected(Reason.BAD_LOGPROBS, "a logprob above zero")


def check_termination(branch: Branch, run: RunManifest, environment: EnvironmentContract) -> None:
    """Check that every reply ends with a stop token or at full length, without an earlier stop.

    Where strings end replies, too, the environment finds these as it plays the rollout again.
    """
    stops = frozenset(run.model.stop_token_ids)
    runs = sampled_runs(branch.sampled)
    longest, strings = environment.sampling.max_tokens, environment.sampling.stop
    if len(runs) > environment.max_turns:
        raise Rejected(Reason.TOO_LARGE, f"{len(runs)} turns")
    for number, (start, end) in enumerate(runs):
        reply = branch.token_ids[start:end]
        if not stops.isdisjoint(reply[:-1]):
            raise Rejected(Reason.BAD_TERMINATION, "tokens after a stop token")
        full = len(reply) == longest or end == run.limits.max_model_len
        is_last, ended = number == len(runs) - 1, reply[-1] in stops
        by_string = bool(strings) and (not is_last or branch.finish == "stop")
        if len(reply) > longest or not (full or ended or by_string):
            raise Rejected(Reason.BAD_TERMINATION, f"reply of {len(reply)} tokens was cut short")
        if is_last and (branch.finish == "stop") != ended and not by_string:
            raise Rejected(Reason.BAD_TERMINATION, f"did not finish by {branch.finish}")


def _check_spans(branch: Branch) -> None:
    """Check that a branch has one version, or ascending spans from its first version to its last."""
    if not branch.spans:
        if branch.policy_first != branch.policy_last:
            raise Rejected(Reason.MALFORMED, "several policy versions and no spans")
        return
    starts, versions = zip(*branch.spans, strict=True)
    if starts[0] != 0 or starts[-1] >= sum(branch.sampled):
        raise Rejected(Reason.MALFORMED, "the spans do not fit the tokens")
    if (versions[0], versions[-1]) != (branch.policy_first, branch.policy_last):
        raise Rejected(Reason.MALFORMED, "the spans do not fit the policy versions")
    if not (_rising(starts) and _rising(versions)):
        raise Rejected(Reason.MALFORMED, "spans and their versions must rise")


def _rising(numbers: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))


def _check_proof(branch: Branch, run: RunManifest) -> None:
    """Check that a proof is well formed and as long as the replies; an audit checks its content."""
    fingerprint = Projection()
    try:
        lengths = [end - start for start, end in sampled_runs(branch.sampled)]
        fingerprint.check_all(split(branch.proof, lengths, fingerprint))
    except BadProof as error:
        raise Rejected(Reason.BAD_PROOF, str(error)) from error


def _check_routes(branch: Branch, run: RunManifest) -> None:
    """Check that routes are expected and well formed; an audit checks whether they were taken."""
    if not branch.routes:
        return
    if run.routes is None:
        raise Rejected(Reason.BAD_ROUTES, "routes in a run that replays none")
    if fault := route_fault(branch.routes, sum(branch.sampled), run.routes):
        raise Rejected(Reason.BAD_ROUTES, fault)


def _check_support(
    branch: Branch, sampling: SamplingContract, vocabulary: int, *, supported: bool
) -> None:
    """Check the form of the supports, which `supported` work under truncation has; an audit checks the rest."""
    if not branch.support:
        if sampling.truncates and supported:
            raise Rejected(Reason.MALFORMED, "no supports, though top_p or top_k truncate")
        return
    if not sampling.truncates:
        raise Rejected(Reason.MALFORMED, "supports of tokens that are drawn from all")
    tokens = list(compress(branch.token_ids, branch.sampled))
    if fault := support_fault(branch.support, tokens, vocabulary, sampling.top_k, sampling.top_p):
        raise Rejected(Reason.MALFORMED, fault)


def sampled_runs(sampled: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the half-open index ranges of runs of sampled tokens: one per reply."""
    flags = bytes(sampled)
    runs: list[tuple[int, int]] = []
    end = 0
    while (start := flags.find(1, end)) >= 0:
        end = flags.find(0, start)
        end = end if end >= 0 else len(flags)
        runs.append((start, end))
    return runs
