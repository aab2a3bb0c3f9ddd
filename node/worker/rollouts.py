"""From a lease to the records of its groups: rollouts are played and scored, groups packed when they are whole.

Every sample is drawn from the lease's own seed; what a rollout said is never changed on the way.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ...crypto.hashing import derive
from ...protocol.leases import Lease, TaskRef, sample_seed
from ...protocol.manifests import RunManifest
from ...protocol.rollouts import (
    BranchRecord,
    Crossed,
    GroupRecord,
    RolloutRecord,
    Span,
    pack_f32,
    pack_u32,
)
from ..environments.environment import (
    Branch,
    Environment,
    EnvironmentFailed,
    EnvironmentGivenUp,
    Episode,
    Score,
    Task,
)
from ..inference.engine import Completion, GenerateRequest
from ..ops.errors import first_cause
from ..verification.checks import late_samples
from .admission import Admission, Order

logger = logging.getLogger(__name__)

MAX_DETAIL = 500
"""Characters of why a rollout failed."""
LARGE = 32_768
"""Tokens of a group from which on it is packed beside the event loop: some milliseconds of work."""


@dataclass(frozen=True)
class Played:
    """What a lease led to; see Submission."""

    groups: tuple[GroupRecord, ...]
    plan: bytes
    crossed: tuple[Crossed, ...]


class Generation:
    """Plays leases, several at a time."""

    def __init__(
        self,
        *,
        run_id: bytes,
        run: RunManifest,
        node: bytes,
        environment: Environment,
        admission: Admission,
        rollout_ended: Callable[[int], None] = lambda lease_id: None,
    ) -> None:
        """`rollout_ended` is told the lease of every rollout that has ended."""
        self._run_id = run_id
        self._run = run
        self._node = node
        self._environment = environment
        self._admission = admission
        self._rollout_ended = rollout_ended

    async def play(self, lease: Lease) -> Played:
        """The groups of a lease. Raises EngineError, EngineLost; then nothing of it goes on."""
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [
                    tasks.create_task(self._group(lease, task, (lease.lease_id, place)))
                    for place, task in enumerate(lease.tasks)
                ]
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        records, episodes = zip(*(group.result() for group in groups), strict=True)
        return Played(records, *crossed(episodes))

    async def _group(
        self, lease: Lease, reference: TaskRef, order: Order
    ) -> tuple[GroupRecord, list[Episode]]:
        try:
            task = await self._environment.task(reference.index)
        except EnvironmentGivenUp:
            raise
        except EnvironmentFailed as error:
            return _failed(lease, reference, str(error)), []
        if task.digest != reference.digest:
            detail = "this node's environment makes another task of that index"
            return _failed(lease, reference, detail), []
        group = GroupInPlay(lease, task, order)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(lease.group_size):
                tasks.create_task(self._rollout(group))
        episodes = group.in_order()
        if sum(map(tokens, episodes)) > LARGE:
            records = await asyncio.to_thread(pack, episodes)
        else:
            records = pack(episodes)
        return GroupRecord(reference.index, reference.digest, records), episodes

    async def _rollout(self, group: "GroupInPlay") -> None:
        index = -1

        async def policy(prompt: Sequence[int], turn: int) -> Completion:
            nonlocal index
            if index < 0:
                index = group.begin()
            request = GenerateRequest(
                prompt=tuple(prompt),
                max_tokens=self._run.sampling.max_tokens,
                temperature=self._run.sampling.temperature,
                seed=sample_seed(
                    self._run_id, group.lease, self._node, group.task.digest, index, turn
                ),
                stop_token_ids=self._run.model.stop_token_ids,
                group=group.name,
            )
            return await self._admission.generate(request, group.order)

        episode = await self._environment.run(group.task, policy)
        group.end(index, episode)
        self._rollout_ended(group.lease.lease_id)


class GroupInPlay:
    """The rollouts of one task while they are played.

    A rollout gets its index when it asks for its first reply, so that samples begin in the order of their
    indices however long the environment takes to set each one up: the trainer checks it (late_samples).
    """

    def __init__(self, lease: Lease, task: Task, order: Order) -> None:
        self.lease = lease
        self.task = task
        self.order = order
        self.name = group_name(lease, task)
        self._indices = itertools.count()
        self._episodes: dict[int, Episode] = {}
        self._unbegun: list[Episode] = []
        """Of rollouts that failed before they asked for a reply."""

    def begin(self) -> int:
        """The index of the sample that asks for its first reply now."""
        return next(self._indices)

    def end(self, index: int, episode: Episode) -> None:
        """Keep what became of a sample; `index` below 0: it never asked for a reply."""
        if index < 0:
            self._unbegun.append(episode)
        else:
            self._episodes[index] = episode

    def in_order(self) -> list[Episode]:
        """All episodes by index, once all have ended. Samples that were begun anew after later ones are
        given up where a new policy came in between, as the trainer would refuse the group for them."""
        episodes = [self._episodes[index] for index in sorted(self._episodes)] + self._unbegun
        late = late_samples({i: one.branches for i, one in enumerate(episodes) if not one.error})
        for index, why in late.items():
            logger.info("lease %d: sample %d is given up: it %s", self.lease.lease_id, index, why)
            episodes[index] = Episode([], Score(0.0), f"given up: drawn out of order: it {why}")
        return episodes


class GenerationClock:
    """How long a worker has worked, and how much of that at least one lease was being rolled out."""

    def __init__(self) -> None:
        self._first = 0.0
        self._begun = 0.0
        self._leases = 0
        self._total = 0.0

    @contextmanager
    def generating(self) -> Generator[None, None, None]:
        """Count the time inside; several leases at once count once."""
        now = time.monotonic()
        self._first = self._first or now
        self._begun = self._begun if self._leases else now
        self._leases += 1
        try:
            yield
        finally:
            self._leases -= 1
            if not self._leases:
                self._total += time.monotonic() - self._begun

    def read(self, now: float) -> tuple[float, float]:
        """(seconds since the first lease, seconds of these spent generating)."""
        if not self._first:
            return 0.0, 0.0
        return now - self._first, self._total + (now - self._begun if self._leases else 0.0)


def _failed(lease: Lease, reference: TaskRef, detail: str) -> GroupRecord:
    """A group of which nothing was played."""
    records = (RolloutRecord((), 0.0, detail[:MAX_DETAIL]),) * lease.group_size
    return GroupRecord(reference.index, reference.digest, records)


def group_name(lease: Lease, task: Task) -> bytes:
    """What the rollouts of one task of one lease have in common, for the engine."""
    return derive("group", lease.lease_id.to_bytes(8, "big"), task.digest)[:16]


def tokens(episode: Episode) -> int:
    """Tokens of an episode."""
    return sum(len(branch.token_ids) for branch in episode.branches)


def pack(episodes: Sequence[Episode]) -> tuple[RolloutRecord, ...]:
    """Episodes as they travel."""
    return tuple(rollout_record(episode) for episode in episodes)


def rollout_record(episode: Episode) -> RolloutRecord:
    """An episode as it travels."""
    branches = tuple(branch_record(branch) for branch in episode.branches)
    return RolloutRecord(branches, episode.score.reward, episode.error[:MAX_DETAIL])


def crossed(groups: Sequence[Sequence[Episode]]) -> tuple[bytes, tuple[Crossed, ...]]:
    """The plan that most branches were drawn under, and what crossed between the stages in these.

    What another plan made goes without: after a change of stages that is what was begun before.
    """
    placed = [
        (Crossed(group, index, number, branch.boundaries), branch.plan)
        for group, episodes in enumerate(groups)
        for index, episode in enumerate(episodes)
        for number, branch in enumerate(episode.branches)
        if branch.plan
    ]
    if not placed:
        return b"", ()
    ((plan, _),) = Counter(plan for _, plan in placed).most_common(1)
    return plan, tuple(one for one, made_by in placed if made_by == plan and one.boundaries)


def branch_record(branch: Branch) -> BranchRecord:
    """A branch as it travels."""
    drawn = [value for value, flag in zip(branch.logprobs, branch.sampled, strict=True) if flag]
    return BranchRecord(
        tokens=pack_u32(branch.token_ids),
        sampled=bytes(branch.sampled),
        logprobs=pack_f32(drawn),
        policy_first=branch.policy_first,
        policy_last=branch.policy_last,
        finish=branch.finish,
        spans=tuple(Span(start, version) for start, version in branch.spans),
        proof=branch.proof,
    )
