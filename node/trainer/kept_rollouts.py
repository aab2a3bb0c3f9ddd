"""Store rollouts for reading and replay: collect their outcomes, write them by step.

Invariant: nothing here delays training. Rows and texts are made in a background thread, its queue is bounded,
and a file that cannot be written is reported and costs only that step's file.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from pathlib import Path
from types import MappingProxyType

from ...crypto.hashing import digest
from ...protocol.errors import RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.rollouts import BranchRecord, RolloutRecord, Submission, unpack_f32, unpack_u32
from ..config.run import KeepConfig
from ..environments.chat import ChatFormat
from ..process.background import BackgroundThread
from ..storage.rollouts import KeptRollout, Outcome, RolloutFiles, StepRecord, StepSettings
from ..training.backend import Sample
from ..training.buffer import AgentShare, BranchTokens, RolloutGroup, ScoredRollout
from ..verification.verdict import Verified

logger = logging.getLogger(__name__)

STEPS_WAITING = 4
"""Steps that may wait to be written; with a slower disk further ones are left out."""
LOST_BYTES = 64 * 2**20
"""Maximum bytes of tokens kept per step of rollouts in no batch: a hostile worker sends many."""
CLOSE_S = 30.0
"""Longest wait for the last files when a trainer ends."""
TOO_FEW = "too_few"
ZERO_ADVANTAGE = "zero_advantage"
NOT_ADMITTED = "not_admitted"
"""Reason of rollouts rejected by a gate of training.curriculum."""


@dataclass(frozen=True)
class LostRollout:
    """A rollout of a submission that is in no group."""

    key: tuple[int, int]
    """Lease, and group in it."""
    index: int
    verdict: Outcome
    reason: str
    detail: str
    environment: str
    task: bytes
    worker: bytes
    record: RolloutRecord | None
    """None: the worker sent nothing for this index."""


@dataclass
class Lost:
    """Rollouts since the last step that are in no batch."""

    rollouts: list[LostRollout] = field(default_factory=list[LostRollout])
    groups: list[tuple[RolloutGroup, str]] = field(default_factory=list[tuple[RolloutGroup, str]])
    """Accepted groups, and the reason why they are not trained."""
    size: int = 0
    """Bytes of their tokens, approximately."""
    count: int = 0
    """Rollouts, including those left out for lack of room."""
    left_out: int = 0

    def room(self, size: int, rollouts: int) -> bool:
        """Count rollouts of that size; return whether there is room for them."""
        self.count += rollouts
        if self.size + size > LOST_BYTES:
            self.left_out += rollouts
            return False
        self.size += size
        return True


@dataclass(frozen=True)
class TrainedStep:
    """The batch of a step, in order, and the rollouts lost before it."""

    step: int
    groups: Sequence[RolloutGroup]
    samples: Sequence[Sample]
    lost: Lost
    baselines: Mapping[str, Mapping[str, float]]
    """CreditedBatch.baselines before the step."""


Shown = Callable[[Sequence[int]], str]
"""Conversion of token ids to text, special tokens included."""


class RolloutKeeper:
    """Collects the rollouts of a run, and writes each step's once its version is published."""

    def __init__(
        self,
        files: RolloutFiles,
        config: KeepConfig,
        *,
        environments: Sequence[str],
        model_dir: Path,
        settings: StepSettings | None = None,
    ) -> None:
        """`environments` are the names of the run's environments, in order.

        The tokenizer of `model_dir` makes the texts. `settings` are written with each step.
        """
        self._files = files
        self._settings = settings
        self._config = config
        self._environments = environments
        self._model_dir = model_dir
        self._shown: Shown | None = None
        self._lost = Lost()
        self._writer = BackgroundThread("the writer of rollouts", STEPS_WAITING)

    def lost(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Record accepted groups that are never trained."""
        for group in groups:
            size = sum(8 * len(b.token_ids) for rollout in group.rollouts for b in rollout.branches)
            if self._chosen(group.lease, group.task) and self._lost.room(size, len(group.rollouts)):
                self._lost.groups.append((group, reason))

    def judged(
        self, worker: bytes, submission: Submission, lease: Lease, verified: Verified
    ) -> None:
        """Record a submission's rejected rollouts, and single survivors of a group."""
        if not self._config.share:
            return
        name = lease.lease_id.to_bytes(8, "big")
        rejected = {
            (rejection.group, rejection.rollout): rejection for rejection in verified.rejections
        }
        for number, task in enumerate(lease.tasks):
            if not self._chosen(name, task.digest):
                continue
            sent = submission.groups[number].rollouts if number < len(submission.groups) else ()
            indices = range(lease.group_size)
            survivors = [index for index in indices if (number, index) not in rejected]
            for index in indices:
                fault = rejected.get((number, index))
                if fault is None and len(survivors) > 1:
                    continue
                record = sent[index] if index < len(sent) else None
                size = (
                    sum(len(b.tokens) + len(b.logprobs) for b in record.branches) if record else 0
                )
                if not self._lost.room(size, 1):
                    continue
                self._lost.rollouts.append(
                    LostRollout(
                        key=(lease.lease_id, number),
                        index=index,
                        verdict="unused" if fault is None else "rejected",
                        reason=TOO_FEW if fault is None else fault.reason.value,
                        detail="" if fault is None else fault.detail,
                        environment=self._environments[lease.environment],
                        task=task.digest,
                        worker=worker,
                        record=record,
                    )
                )

    def trained(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        samples: Sequence[Sample],
        baselines: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> TrainedStep:
        """Close a step: rollouts lost from now on belong to the next one.

        `baselines` are those before the step.
        """
        lost, self._lost = self._lost, Lost()
        return TrainedStep(step, groups, samples, lost, baselines)

    def write(self, step: TrainedStep, head: bytes) -> None:
        """Write a step in the background; `head` is the sealed head of the version made by it."""
        if self._config.share:
            self._writer.put(lambda: self._write(step, head))

    def end(self, step: int) -> None:
        """Write the rollouts lost after `step`, the last one."""
        left = self.trained(step + 1, [], [])
        if left.lost.count:
            self.write(left, b"")

    def go_back(self, step: int) -> None:
        """Remove the files of later steps: the run continues after `step`. Raises StorageError."""
        self._lost = Lost()
        self._files.go_back(step)

    def close(self) -> None:
        """Wait up to CLOSE_S for the last files."""
        self._writer.close(CLOSE_S)

    def _chosen(self, lease: bytes, task: bytes) -> bool:
        """Return whether a group is in the stored share; the same for all its rollouts and outcomes."""
        lot = int.from_bytes(digest(lease + task)[:8], "big") / 2**64
        return lot < self._config.share

    def _write(self, step: TrainedStep, head: bytes) -> None:
        if self._shown is None:
            chat = ChatFormat.load(self._model_dir, needs_template=False)
            self._shown = lambda ids: chat.shown(ids, special=True)
        batch = [
            (at, group)
            for at, group in enumerate(step.groups)
            if self._chosen(group.lease, group.task)
        ]
        record = StepRecord(
            step.step,
            groups=len(step.groups),
            kept=len(batch),
            rejected=step.lost.count,
            left_out=step.lost.left_out,
            head=head,
            settings=self._settings,
            baselines={name: dict(rewards) for name, rewards in step.baselines.items()},
        )
        self._files.write(record, rows(step, batch, self._shown))
        self._files.prune(self._config.steps, self._config.max_gib * 2**30)


def kept_batch(kept: Sequence[KeptRollout], groups: int) -> list[RolloutGroup]:
    """Rebuild the stored groups of a batch, in order, from its step's rows.

    The batch had `groups` groups; rows of higher group numbers are lost rollouts. Raises ValueError, TypeError
    for rows that no batch produces.
    """
    by_group: dict[int, dict[int, list[KeptRollout]]] = {}
    for row in kept:
        if row.group < groups:
            by_group.setdefault(row.group, {}).setdefault(row.rollout, []).append(row)
    return [_kept_group([*rollouts.values()]) for rollouts in by_group.values()]


def _kept_group(rollouts: Sequence[Sequence[KeptRollout]]) -> RolloutGroup:
    first = rollouts[0][0]
    return RolloutGroup(
        task=bytes.fromhex(first.task),
        environment=first.environment,
        rollouts=[*map(_kept_rollout, rollouts)],
        policy_oldest=min(branch.policy_first for rollout in rollouts for branch in rollout),
        node=bytes.fromhex(first.worker),
        lease=first.lease.to_bytes(8, "big"),
    )


def _kept_rollout(rows: Sequence[KeptRollout]) -> ScoredRollout:
    """Rebuild a rollout from the rows of its branches, in order."""
    branches = [*map(_kept_branch, rows)]
    if not rows[0].agent:
        return ScoredRollout(branches, float(rows[0].reward))
    traces = [[*trace] for _, trace in groupby(rows, lambda row: row.trace)]
    agents = [AgentShare(trace[0].agent, float(trace[0].reward), len(trace)) for trace in traces]
    mean = math.fsum(agent.reward for agent in agents) / len(agents)
    return ScoredRollout(branches, mean, agents)


def _kept_branch(row: KeptRollout) -> BranchTokens:
    read = len(row.prompt_ids)
    return BranchTokens(
        [*row.prompt_ids, *row.completion_ids],
        [False] * read + row.completion_mask,
        [0.0] * read + row.completion_logprobs,
        (row.policy_first, row.policy_last),
        row.routes,
        row.support,
    )


def rows(
    step: TrainedStep, batch: Sequence[tuple[int, RolloutGroup]], shown: Shown
) -> Iterator[KeptRollout]:
    """Make the rows of a step: those of the groups of `batch`, then those of lost rollouts.

    `batch` holds the groups to store with their positions.
    """
    # a sample holds the same list object as its branch (advantages.py)
    advantages = {id(sample.token_ids): sample.advantage for sample in step.samples}
    for place, group in batch:
        trained = any(id(b.token_ids) in advantages for r in group.rollouts for b in r.branches)
        reason = TOO_FEW if trained or len(group.rollouts) < 2 else ZERO_ADVANTAGE
        yield from _group_rows(step.step, place, group, reason, advantages, shown)
    places = count(len(step.groups))
    for group, reason in step.lost.groups:
        yield from _group_rows(step.step, next(places), group, reason, {}, shown)
    numbers: dict[tuple[int, int], int] = {}
    for rollout in step.lost.rollouts:
        if rollout.key not in numbers:
            numbers[rollout.key] = next(places)
        yield from _lost_rows(step.step, numbers[rollout.key], rollout, shown)


def _group_rows(
    step: int,
    place: int,
    group: RolloutGroup,
    reason: str,
    advantages: dict[int, float],
    shown: Shown,
) -> Iterator[KeptRollout]:
    for index, rollout in enumerate(group.rollouts):
        parts = [
            (place, agent, trace.reward, branch)
            for place, (agent, trace) in enumerate(rollout.traces())
            for branch in trace.branches
        ]
        for number, (trace, agent, reward, branch) in enumerate(parts):
            advantage = advantages.get(id(branch.token_ids))
            yield _row(
                KeptRollout(
                    step=step,
                    group=place,
                    rollout=index,
                    branch=number,
                    verdict="unused" if advantage is None else "trained",
                    reason=reason if advantage is None else "",
                    detail="",
                    reward=reward,
                    advantage=advantage,
                    environment=group.environment,
                    task=group.task.hex(),
                    worker=group.node.hex(),
                    lease=int.from_bytes(group.lease[:8], "big"),
                    policy_first=branch.versions[0],
                    policy_last=branch.versions[1],
                    agent=agent,
                    trace=trace,
                ),
                branch,
                shown,
            )


def _lost_rows(step: int, place: int, lost: LostRollout, shown: Shown) -> Iterator[KeptRollout]:
    record = lost.record
    branches = [_readable(branch) for branch in record.branches] if record else []
    for number, branch in enumerate(branches or [BranchTokens([], [], [])]):
        yield _row(
            KeptRollout(
                step=step,
                group=place,
                rollout=lost.index,
                branch=number,
                verdict=lost.verdict,
                reason=lost.reason,
                detail=lost.detail,
                reward=record.reward if record else 0.0,
                advantage=None,
                environment=lost.environment,
                task=lost.task.hex(),
                worker=lost.worker.hex(),
                lease=lost.key[0],
                policy_first=branch.versions[0],
                policy_last=branch.versions[1],
            ),
            branch,
            shown,
        )


def _readable(record: BranchRecord) -> BranchTokens:
    """Unpack the consistent part of a branch: a rejected rollout may be malformed."""
    versions = (record.policy_first, record.policy_last)
    try:
        tokens, logprobs = unpack_u32(record.tokens), iter(unpack_f32(record.logprobs))
    except RemoteProtocolError:
        return BranchTokens([], [], [], versions)
    mask = [flag == 1 for flag in record.sampled[: len(tokens)]]
    mask += [False] * (len(tokens) - len(mask))
    return BranchTokens(
        tokens, mask, [next(logprobs, 0.0) if flag else 0.0 for flag in mask], versions
    )


def _row(row: KeptRollout, branch: BranchTokens, shown: Shown) -> KeptRollout:
    """Fill in the tokens and texts of a row."""
    mask = branch.mask
    start = mask.index(True) if True in mask else len(mask)
    ids = branch.token_ids
    turns = [at for at in range(start + 1, len(mask)) if mask[at] != mask[at - 1]]
    return replace(
        row,
        prompt=shown(ids[:start]),
        completion=shown(ids[start:]),
        cuts=[len(shown(ids[start:at])) for at in turns],
        prompt_ids=ids[:start],
        completion_ids=ids[start:],
        completion_mask=mask[start:],
        completion_logprobs=branch.logprobs[start:],
        routes=branch.routes,
        support=branch.support,
    )
