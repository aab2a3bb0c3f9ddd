"""Turn a lease into the records of its groups: play, score and pack rollouts.

Every sample is drawn from the lease's own seed; a rollout is never changed on the way. Groups are packed once
they are complete.
"""

import asyncio
import heapq
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from ...crypto.hashing import derive
from ...protocol.leases import Lease, TaskRef, environment_of, sample_seed
from ...protocol.manifests import RunManifest
from ...protocol.rollouts import (
    WITHDRAWN,
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
from ..environments.leased_prompts import of_lease
from ..environments.policies import PlayFailed
from ..environments.stop_strings import StopStrings, generate_until
from ..errors import EngineLost, first_cause
from ..inference.concurrency import Concurrency
from ..inference.engine import Completion, Engine, GenerateRequest
from ..verification.checks import late_samples

logger = logging.getLogger(__name__)

POLL_S = 1.0
RATE_POLLS = 60
"""Polls over which the rate of tokens per second is measured."""
MAX_LOSSES = 3
"""Most retries of a sequence whose engine died while others went on."""

Order = tuple[int, int]
"""(number of the lease, index of the task in it): smaller ones go first, groups together."""
Waiting = tuple[Order, int, "asyncio.Future[None]"]


class AdmissionControl:
    """Admission of sequences to the engine, by permits."""

    def __init__(
        self,
        engine: Engine,
        concurrency: Concurrency,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._concurrency = concurrency
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: list[Waiting] = []
        self._inflight: dict[int, asyncio.Timeout | None] = {}
        """Timeout of each permit's holder, the oldest first; None if it has not begun yet."""
        self._turnstile = TurnLimiter()
        self._generated = 0
        self._counted = deque[tuple[float, int]](maxlen=RATE_POLLS)
        self.taken_back = 0
        """Sequences that were stopped for lack of room, since the start."""

    @property
    def cap(self) -> int:
        """Most sequences in flight."""
        return self._concurrency.cap

    @property
    def inflight(self) -> int:
        """Sequences in flight."""
        return len(self._inflight)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second, over the last minute."""
        if len(self._counted) < 2:
            return 0.0
        (begun, before), (now, after) = self._counted[0], self._counted[-1]
        return (after - before) / max(now - begun, POLL_S)

    def groups_of(self, size: int) -> None:
        """Set the group size of the concurrency controller."""
        self._concurrency.groups_of(size)

    async def run(self) -> None:
        """Poll the engine until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Poll the engine once, and adjust the number of sequences in flight."""
        before = self.cap
        self._counted.append((self._clock(), self._generated))
        decision = self._concurrency.observe(
            self._engine.stats(),
            inflight=self.inflight,
            version=self._engine.policy_version,
            now=self._clock(),
        )
        if decision.why:
            logger.info(
                "%d sequences in flight at most, not %d: %s", self.cap, before, decision.why
            )
        self._take_back(decision.take_back)
        self._admit()

    async def generate(
        self, request: GenerateRequest, order: Order, stops: StopStrings | None = None
    ) -> Completion:
        """Sample one completion when it is its turn, up to the first of `stops`.

        Raises EngineError; EngineLost only if no engine works now, or after MAX_LOSSES retries.
        """
        losses, number = 0, next(self._numbers)
        while True:
            try:
                async with self._permit(order, number):
                    completion = await generate_until(self._engine.generate, request, stops)
            except _TakenBack:
                self.taken_back += 1
            except EngineLost:
                losses += 1
                if self._engine.stats().fault or losses > MAX_LOSSES:
                    raise
            else:
                self._generated += len(completion.token_ids)
                await self._turnstile.pass_through()
                return completion

    @asynccontextmanager
    async def _permit(self, order: Order, number: int) -> AsyncGenerator[None]:
        """Wait for a permit, and hold it until the block ends or the permit is taken back.

        `number` orders requests by their first attempt: a sequence that was stopped goes before those of its
        group that have not begun (checks.late_samples).
        """
        stop = asyncio.timeout(None)
        try:
            await self._enter(order, number)
            async with stop:
                self._inflight[number] = stop
                yield
            self._concurrency.finished()
        except TimeoutError:
            if stop.expired():
                raise _TakenBack from None
            raise
        finally:
            if number in self._inflight:
                del self._inflight[number]
                self._admit()

    async def _enter(self, order: Order, number: int) -> None:
        entrance: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, number, entrance))
        self._admit()
        await entrance

    def _admit(self) -> None:
        """Admit waiting requests while there is room; skip cancelled ones."""
        room = self._concurrency.room(len(self._inflight), self._clock())
        while room > 0 and self._waiting:
            _, number, entrance = heapq.heappop(self._waiting)
            if not entrance.done():
                # It counts from now on, though its task has not run yet.
                self._inflight[number] = None
                entrance.set_result(None)
                room -= 1

    def _take_back(self, count: int) -> None:
        """Stop the `count` youngest sequences."""
        now = asyncio.get_running_loop().time()
        running = [stop for stop in self._inflight.values() if stop and not stop.expired()]
        for stop in running[len(running) - min(count, len(running)) :]:
            stop.reschedule(now)


class TurnLimiter:
    """Let one caller through per turn of the event loop.

    Scoring a rollout takes a millisecond or more. When hundreds end in one step of the engine, the sequences
    that replace them do not have to wait until all of them are scored.
    """

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def pass_through(self) -> None:
        """Return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._queue.append(turn)
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._queue and self._queue[0].done():  # it was cancelled
            self._queue.popleft()
        self._turning = bool(self._queue)
        if self._queue:
            self._queue.popleft().set_result(None)
            loop.call_soon(self._turn, loop)


class _TakenBack(Exception):
    """Signal that a permit was taken back."""


MAX_DETAIL = 500
"""Most characters of the reason why a rollout failed."""
LARGE = 32_768
"""Tokens from which on a group is packed in a thread: it takes some milliseconds."""


@dataclass(frozen=True)
class LeaseResult:
    """Result of a lease; see Submission."""

    groups: tuple[GroupRecord, ...]
    plan: bytes
    crossed: tuple[Crossed, ...]


class RolloutGenerator:
    """Generator of the rollouts of leases, several at a time."""

    def __init__(
        self,
        *,
        run_id: bytes,
        run: RunManifest,
        node: bytes,
        environments: Mapping[int, Environment],
        admission: AdmissionControl,
        rollout_ended: Callable[[int], None] = lambda lease_id: None,
    ) -> None:
        """`environments` are those available here, by their index in the run.

        `rollout_ended` is called with the lease of every rollout that has ended.
        """
        self._run_id = run_id
        self._run = run
        self._node = node
        self._environments = environments
        self._admission = admission
        self._rollout_ended = rollout_ended

    async def play(self, lease: Lease) -> LeaseResult:
        """Generate the groups of a lease. Raises EngineError, EngineLost; all its rollouts end then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [
                    tasks.create_task(self._group(lease, task, (lease.lease_id, place)))
                    for place, task in enumerate(lease.tasks)
                ]
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        records, episodes = zip(*(group.result() for group in groups), strict=True)
        return LeaseResult(records, *crossed(episodes))

    async def _group(
        self, lease: Lease, reference: TaskRef, order: Order
    ) -> tuple[GroupRecord, list[Episode]]:
        environment = of_lease(self._environments[lease.environment], lease)
        try:
            task = await environment.task(reference.index)
        except EnvironmentGivenUp:
            raise
        except EnvironmentFailed as error:
            return _failed(lease, reference, str(error)), []
        if task.digest != reference.digest:
            detail = "this node's environment makes another task of that index"
            return _failed(lease, reference, detail), []
        group = ActiveGroup(lease, task, order)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(lease.group_size):
                tasks.create_task(self._rollout(group, environment))
        episodes = group.in_order()
        if sum(map(tokens, episodes)) > LARGE:
            records = await asyncio.to_thread(pack, episodes)
        else:
            records = pack(episodes)
        return GroupRecord(reference.index, reference.digest, records), episodes

    async def _rollout(self, group: "ActiveGroup", environment: Environment) -> None:
        index, lease = -1, group.lease
        sampling = environment_of(self._run, lease).sampling

        async def policy(prompt: Sequence[int], turn: int) -> Completion:
            nonlocal index
            if index < 0:
                index = group.begin()
            if len(prompt) >= self._run.limits.max_model_len:
                raise PlayFailed(
                    f"the conversation has {len(prompt)} tokens, and the run's model takes "
                    f"{self._run.limits.max_model_len}"
                )
            if max(prompt) >= self._run.model.vocab_size:
                raise PlayFailed(f"the run's model has no token {max(prompt)}")
            room = self._run.limits.max_model_len - len(prompt)
            request = GenerateRequest(
                prompt=tuple(prompt),
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                seed=sample_seed(self._run_id, lease, self._node, group.task.digest, index, turn),
                stop_token_ids=self._run.model.stop_token_ids,
                group=group.name,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                supported=sampling.truncates,
            )
            return await self._admission.generate(request, group.order, environment.stops)

        episode = await environment.run(group.task, policy)
        group.end(index, episode)
        self._rollout_ended(lease.lease_id)


class ActiveGroup:
    """Rollouts of one task in progress.

    A rollout gets its index when it asks for its first reply, so that samples begin in the order of their
    indices however long the environment takes to set each one up. The trainer checks this (late_samples).
    """

    def __init__(self, lease: Lease, task: Task, order: Order) -> None:
        self.lease = lease
        self.task = task
        self.order = order
        self.name = group_name(lease, task)
        self._indices = itertools.count()
        self._episodes: dict[int, Episode] = {}
        self._unbegun: list[Episode] = []
        """Episodes of rollouts that failed before they asked for a reply."""

    def begin(self) -> int:
        """Return the index of the sample that asks for its first reply now."""
        return next(self._indices)

    def end(self, index: int, episode: Episode) -> None:
        """Keep the episode of a sample; `index` below 0: it never asked for a reply."""
        if index < 0:
            self._unbegun.append(episode)
        else:
            self._episodes[index] = episode

    def in_order(self) -> list[Episode]:
        """Return all episodes by index, once all have ended.

        Samples that were begun anew after later ones are withdrawn if a new policy came in between, as the
        trainer would refuse the group because of them.
        """
        episodes = [self._episodes[index] for index in sorted(self._episodes)] + self._unbegun
        late = late_samples(
            {i: episode.branches for i, episode in enumerate(episodes) if not episode.error}
        )
        for index, why in late.items():
            logger.info("lease %d: sample %d is withdrawn: it %s", self.lease.lease_id, index, why)
            episodes[index] = Episode([], Score(0.0), f"{WITHDRAWN}it {why}")
        return episodes


class GenerationClock:
    """Clock of a worker's time, and of the part of it with at least one lease in progress."""

    def __init__(self) -> None:
        self._first = 0.0
        self._begun = 0.0
        self._leases = 0
        self._total = 0.0

    @contextmanager
    def generating(self) -> Generator[None, None, None]:
        """Count the time inside the block; several leases at once count once."""
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
        """Return (seconds since the first lease, seconds of these spent generating)."""
        if not self._first:
            return 0.0, 0.0
        return now - self._first, self._total + (now - self._begun if self._leases else 0.0)


def _failed(lease: Lease, reference: TaskRef, detail: str) -> GroupRecord:
    """Make a group whose rollouts all failed before they began."""
    records = (RolloutRecord((), 0.0, detail[:MAX_DETAIL]),) * lease.group_size
    return GroupRecord(reference.index, reference.digest, records)


def group_name(lease: Lease, task: Task) -> bytes:
    """Name the rollouts of one task of one lease, so that the engine keeps them together."""
    return derive("group", lease.lease_id.to_bytes(8, "big"), task.digest)[:16]


def tokens(episode: Episode) -> int:
    """Return the number of tokens of an episode."""
    return sum(len(branch.token_ids) for branch in episode.branches)


def pack(episodes: Sequence[Episode]) -> tuple[RolloutRecord, ...]:
    """Convert episodes to their records on the wire."""
    return tuple(rollout_record(episode) for episode in episodes)


def rollout_record(episode: Episode) -> RolloutRecord:
    """Convert an episode to its record on the wire."""
    branches = tuple(branch_record(branch) for branch in episode.branches)
    return RolloutRecord(branches, episode.score.reward, episode.error[:MAX_DETAIL])


def crossed(groups: Sequence[Sequence[Episode]]) -> tuple[bytes, tuple[Crossed, ...]]:
    """Return the plan of most branches, and the boundary fingerprints made under that plan.

    Branches of another plan, begun before a change of stages, are left out.
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
    return plan, tuple(
        boundary for boundary, made_by in placed if made_by == plan and boundary.boundaries
    )


def branch_record(branch: Branch) -> BranchRecord:
    """Convert a branch to its record on the wire."""
    sampled_logprobs = [
        value for value, flag in zip(branch.logprobs, branch.sampled, strict=True) if flag
    ]
    return BranchRecord(
        tokens=pack_u32(branch.token_ids),
        sampled=bytes(branch.sampled),
        logprobs=pack_f32(sampled_logprobs),
        policy_first=branch.policy_first,
        policy_last=branch.policy_last,
        finish=branch.finish,
        spans=tuple(Span(start, version) for start, version in branch.spans),
        proof=branch.proof,
        routes=branch.routes,
        support=branch.support,
    )
