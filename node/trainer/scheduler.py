"""Lease out the tasks of a run: number of groups, order of tasks, turns of workers.

Invariant: capacity bounds staleness, so no more groups are leased than the next batches can train in time.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...crypto.hashing import short
from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.manifests import RouteShape
from ...protocol.messages import MAX_LEASES, LeaseReply, LeaseRequest
from ...protocol.pipelines import MAX_STAGES
from ...protocol.reputation import Reputation
from ...protocol.version import MAX_SUBMISSION, MIB
from ..config.run import RolloutsConfig, RunConfig
from ..environments.environment import Environment, EnvironmentFailed, ScoreMismatch, Task
from ..models.support import support_bytes
from ..training.buffer import RolloutBuffer, RolloutGroup, peer_cap, peer_room
from .lease_book import Held, LeaseBook, LeasePolicy, LeaseShare, MixtureShare
from .publisher import Publisher
from .state import Progress
from .workers import PendingRequest, WorkerRegistry, WorkerState

logger = logging.getLogger(__name__)

HOLD_S = 1.0
"""Time that a lease request waits for work before the worker is asked to retry."""
MAX_HOLD_S = 8.0
POLLS = 20
"""Approximate requests per second of all who wait, and of newcomers: the more wait, the longer each is held."""
RETRY_MS = 50
NEWCOMER_RETRY_MS, MAX_RETRY_MS = 10, 5000
"""Addition to the retry delay for each waiting newcomer, and the maximum delay."""
SLOW_WORKERS_SHARE = 1 / 12
"""Share of the lease timeout that a full buffer waits for other workers' groups at most."""
PREPARED_TASKS = 128
"""Tasks whose digests are made before they are leased."""
KEPT_DIGESTS = 4096
MAX_PASSED_OVER = 4096
"""Tasks in a row whose prompts are too long: the environment does not fit the model."""
VERDICT_BYTES = 256 * 1024
"""Maximum bytes of verdicts in one reply."""
LEASE_BYTES = 64 * 1024
"""Maximum bytes of leases in one reply, exceeded by at most one lease."""
BYTES_PER_TOKEN = 64 + 8 * (MAX_STAGES - 1)
"""Upper bound for one token in a submission: id, mask, logprob, proof, framing, and the fingerprints of the
stages of the longest pipeline."""


def lease_policy(config: RunConfig, routes: RouteShape | None = None) -> LeasePolicy:
    """Make the lease policy of a run; `routes` is the shape of the routes in its rollouts."""
    rollouts, mixture = config.rollouts, config.mixture
    # a turn may be a sample of its own, with its whole prompt
    samples = [
        1 if environment.earlier_reasoning == "keep" else environment.max_turns
        for environment in mixture
    ]
    largest = max(
        environment.group_size * count for environment, count in zip(mixture, samples, strict=True)
    )
    tokens = config.training.seq_len * largest * rollouts.groups_per_lease
    size = BYTES_PER_TOKEN + (routes.token_bytes if routes else 0)
    sampled = map(config.sampling_of, mixture)
    size += max(
        (support_bytes(sampling.top_k) for sampling in sampled if sampling.truncates), default=0
    )
    return LeasePolicy(
        environments=tuple(
            MixtureShare(environment.group_size, environment.ratio) for environment in mixture
        ),
        groups_per_batch=rollouts.groups_per_batch,
        groups_per_lease=rollouts.groups_per_lease,
        max_off_policy_steps=rollouts.max_off_policy_steps,
        leases_per_worker=rollouts.leases_per_worker,
        timeout_s=rollouts.lease_timeout_s,
        max_bytes=min(MIB + tokens * size, MAX_SUBMISSION),
    )


class LeaseDemand:
    """Counts how many more groups may be leased, in total and to one worker."""

    def __init__(
        self,
        config: RunConfig,
        registry: WorkerRegistry,
        buffer: RolloutBuffer,
        progress: Progress,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns Unix seconds."""
        self._clock = clock
        self._config = config
        self._registry = registry
        self._book = registry.book
        self._buffer = buffer
        self._progress = progress

    def waiting_groups(self) -> int:
        """Count the groups that have come back: in the buffer, in verification, in the queue."""
        return len(self._buffer) + self._unverified().total()

    def capacity(self, node: bytes | None) -> int:
        """Count the groups that may be leased to `node` now; None for all newcomers together."""
        training, now = self._progress.training, self._clock()
        book, unverified = self._book, self._unverified()
        waiting = len(self._buffer) + unverified.total()
        free = self._free(waiting, now, newcomers=node is None)
        if node is None or free < 1:
            return free
        rollouts = self._config.rollouts
        own = sum(group.node == node for group in self._buffer.groups()) + unverified[node]
        on_lease = book.leased(newcomers=not book.staffed(now), now=now)
        own_leased, leased = on_lease[node], on_lease.total()
        room = peer_room(
            rollouts.groups_per_batch,
            rollouts.max_peer_share,
            book.allowed_groups(training),
            self._registry.present(),
            own + own_leased,
            waiting - own + leased - own_leased,
        )
        return min(free, room)

    def exhausted(self) -> bool:
        """Return whether no proven node may be leased anything now, whichever it is."""
        return self._free(self.waiting_groups(), self._clock(), newcomers=False) < 1

    def _free(self, waiting: int, now: float, *, newcomers: bool) -> int:
        """Count the groups that all newcomers, or all proven nodes, may be leased together; 0 or more."""
        training, book = self._progress.training, self._book
        remaining = self._config.max_steps - self._progress.step - (1 if training else 0)
        if remaining <= 0:
            return 0
        coming = book.coming_groups(now)
        last = remaining * self._config.rollouts.groups_per_batch - waiting - coming
        count = book.newcomer_capacity if newcomers else book.capacity
        free = count(waiting_groups=waiting, training=training, now=now, coming=coming)
        return max(0, min(last, free))

    def coming(self) -> Counter[bytes]:
        """Count the groups that the next batch may wait for, by worker: in verification, or on lease.

        Leases that are out for longer than their workers usually take do not count, nor do those of newcomers
        while proven workers are present.
        """
        book, now = self._book, self._clock()
        on_lease = book.leased(newcomers=not book.staffed(now), now=now, times=1.0)
        return on_lease + self._unverified()

    def _unverified(self) -> Counter[bytes]:
        """Count the groups not verified yet, by worker; newcomers as in coming().

        Work on leases of an earlier start counts as whole leases.
        """
        used, unjudged = self._progress.used, self._book.unjudged
        staffed = self._book.staffed(self._clock())
        ledger = self._registry.services.ledger
        counted = Counter[bytes]()
        for arrival, node, lease_id in ledger.waiting(self._progress.verified_up_to):
            if arrival not in used and (not staffed or self._registry.proven(node)):
                grant = unjudged.get(lease_id)
                whole = self._config.rollouts.groups_per_lease
                counted[node] += len(grant.lease.tasks) if grant else whole
        return counted


class BatchCutter:
    """Cuts batches in which no worker exceeds its share, and waits for none longer than it usually takes."""

    def __init__(
        self, rollouts: RolloutsConfig, buffer: RolloutBuffer, demand: LeaseDemand
    ) -> None:
        self._rollouts = rollouts
        self._buffer = buffer
        self._demand = demand
        self._full_since = math.inf

    def begin(self) -> None:
        """Begin to collect the next batch."""
        self._full_since = math.inf

    def cut(self, now: float) -> list[RolloutGroup] | None:
        """Cut the batch if it is there; `now` in seconds of any clock.

        Once the buffer has been full for some time, slow workers are not waited for any longer.
        """
        rollouts = self._rollouts
        wanted = rollouts.groups_per_batch
        if len(self._buffer) < wanted:
            return None
        self._full_since = min(self._full_since, now)
        if now - self._full_since > SLOW_WORKERS_SHARE * rollouts.lease_timeout_s:
            return self._buffer.cut(wanted)
        cap = peer_cap(
            wanted, rollouts.max_peer_share, self._buffer.by_node(), self._demand.coming()
        )
        return self._buffer.cut(wanted, per_node=cap)


class TaskSupply:
    """Prepares the digests of an environment's next tasks before they are leased."""

    NONE_READY = "the next tasks of the environments that it can play are being made"
    """Answer to an idle worker while no task is prepared."""

    def __init__(
        self,
        environment: Environment,
        book: LeaseBook,
        number: int = 0,
        *,
        longest: float = math.inf,
    ) -> None:
        """`number` is the environment's index in the run, `longest` the tokens of prompt and reply that fit."""
        self._environment = environment
        self._book = book
        self._number = number
        self._longest = longest
        self.passed_over = 0
        """Tasks that were not leased, as their prompts leave no room for a reply."""
        self._passed_in_a_row = 0
        self.digests: dict[int, bytes] = {}
        """Digests of the tasks that the next leases may name."""
        self._short = asyncio.Event()
        """Set when tasks are leased: more of them are to be prepared."""

    async def run(self, scheduler: "LeaseScheduler") -> None:
        """Keep the next tasks prepared, until cancelled. Raises EnvironmentFailed."""
        policy = self._book.policy
        # tasks drawn by rewards are drawn shortly before they are leased
        chosen = self._book.tasks[self._number].draw is not None
        ahead = policy.groups_per_batch if chosen else PREPARED_TASKS
        leases = max(1, ahead // policy.groups_per_lease)
        while True:
            self._short.clear()
            if await self._prepare(leases):
                await scheduler.work_changed()
            await self._short.wait()

    async def make_ready(self, leases: int) -> None:
        """Prepare the tasks of a request; a slow environment delays it by HOLD_S at most.

        Raises RemoteProtocolError (BUSY) if the environment fails.
        """
        try:
            async with asyncio.timeout(HOLD_S):
                await self._prepare(leases)
        except TimeoutError:
            logger.info("the next tasks are not ready: %s", self._environment.status or "slow")
        except EnvironmentFailed as error:
            self._short.set()  # run() fails with the same error, and ends the run
            raise RemoteProtocolError(Reason.BUSY, "the trainer's environment fails") from error

    def is_ready(self, leases: int = 1) -> bool:
        """Return whether the tasks of so many further leases are prepared."""
        upcoming = self._book.upcoming(self._number, leases)
        ready = bool(upcoming) and all(index in self.digests for index in upcoming)
        if not ready:
            self._short.set()
        return ready

    async def _prepare(self, leases: int) -> bool:
        """Make the missing digests of the next leases; return whether there were any.

        Tasks whose prompts are too long are passed over. Raises EnvironmentFailed if all are.
        """
        prepared = False
        while missing := [index for index in self._upcoming(leases) if index not in self.digests]:
            tasks = await asyncio.gather(*map(self._environment.task, missing))
            lengths = await asyncio.gather(*map(self._prompt_length, tasks))
            for task, length in zip(tasks, lengths, strict=True):
                if length < self._longest:
                    self.digests[task.index] = task.digest
                    self._passed_in_a_row, prepared = 0, True
                else:
                    self._pass_over(task.index, length)
        if len(self.digests) > KEPT_DIGESTS:
            known = self.digests
            wanted = self._upcoming(leases)
            self.digests = {index: known[index] for index in wanted if index in known}
        return prepared

    def _upcoming(self, leases: int) -> list[int]:
        """List the tasks of the next leases. Raises EnvironmentFailed if only unfit ones are left."""
        book, queue = self._book, self._book.tasks[self._number]
        upcoming = book.upcoming(self._number, leases)
        if (
            not upcoming
            and queue.unfit
            and all(
                grant.lease.environment != self._number
                for grant in (*book.held.values(), *book.unjudged.values())
            )
        ):
            raise EnvironmentFailed(
                self._too_long(f"none of its {len(queue.unfit)} remaining prompts fits")
            )
        return upcoming

    async def _prompt_length(self, task: Task) -> int:
        try:
            return len(await self._environment.prompt(task))
        except ScoreMismatch:  # its content changed: the next lease names the new one
            return 0

    def _pass_over(self, index: int, length: int) -> None:
        """Pass over a task whose prompt of `length` tokens is too long."""
        queue = self._book.tasks[self._number]
        if index not in queue.unfit:  # another request found it meanwhile
            self.passed_over += 1
            self._passed_in_a_row += 1
        queue.pass_over(index)
        if self.passed_over == 1:
            logger.warning(
                "%s; such tasks are passed over, and counted as leases/passed_over",
                self._too_long(f"the prompt of task {index} has {length} tokens and does not fit"),
            )
        if self._passed_in_a_row >= MAX_PASSED_OVER:
            raise EnvironmentFailed(
                self._too_long(f"none of {self._passed_in_a_row} prompts in a row fits")
            )

    def _too_long(self, what: str) -> str:
        return (
            f"{self._environment.name}: {what} into {self._longest} tokens (training.seq_len, the model's "
            "positions, engine.max_model_len)"
        )

    def complete(self, lease: Lease) -> Lease:
        """Return a granted lease of these tasks with all data that a worker needs; prepare further tasks."""
        self._short.set()
        return lease


class LeaseScheduler:
    """Answers lease requests, at once or as soon as there is work."""

    def __init__(
        self,
        registry: WorkerRegistry,
        tasks: Sequence[TaskSupply],
        publisher: Publisher,
        demand: LeaseDemand,
    ) -> None:
        """`tasks` are the supplies of the run's environments, in its order."""
        self.registry = registry
        self.book = registry.book
        self.tasks = tasks
        self._publisher = publisher
        self.demand = demand

    @property
    def version(self) -> int:
        """Newest policy version; -1 before the first."""
        return self._publisher.order[1]

    async def work_changed(self) -> None:
        """Answer waiting lease requests for which there is work now: capacity may have grown."""
        if not self.demand.exhausted():  # else one look, not one for each of hundreds that wait
            self._serve_proven()
        self._serve_newcomers()

    def _serve_proven(self) -> None:
        """Lease to the proven nodes that wait and may hold more, those first that hold nothing."""
        book, now = self.book, time.time()
        waiting = [
            node
            for node, pending in self.registry.pending.items()
            if pending.proven and node not in book.full and not book.resting(node, now)
        ]
        waiting.sort(key=book.held.nodes.__contains__)
        for node in waiting:
            if leases := self._grant(node, self.registry.pending[node].wanted):
                self.registry.answer(node, leases)
            elif self.demand.exhausted() or not self._ready():
                return

    def take_back(self, now: float) -> list[Held]:
        """Take back the leases that expired or whose stage 0 is lost.

        Their tasks will be leased again. `now` in Unix seconds. Called regularly, as newcomers' slots are
        passed on with time.
        """
        late = self.book.expire(now)
        self.registry.warn()
        self.registry.sweep()
        for node in self.registry.pipelines.orphans():
            lost = self.book.release(node, now)
            if lost:
                logger.warning(
                    "stage 0 %s is gone: %d lease(s) go to others", short(node), len(lost)
                )
            late += lost
        self._serve_newcomers()
        return late

    async def lease(self, peer: bytes, request: LeaseRequest) -> LeaseReply:
        """Answer a lease request. Raises RemoteProtocolError."""
        worker = self.registry.update(peer, request.stats)
        worker.left, worker.failure = False, ""
        self.registry.note_paused(worker, request.paused)
        self.registry.note_playable(worker, self._playable(request))
        now = time.time()
        if request.numerics is not None:
            worker.numerics = request.numerics
            self.registry.bounds.claim(peer, request.numerics)
        reputation = self.registry.reputations.get(peer)
        if reputation is not None:
            reputation.age(now)
            if reputation.banned_until:
                self.registry.end_bans(now)
            if refusal := self.registry.refusal(peer):
                raise RemoteProtocolError(Reason.BANNED, refusal)
        if self.registry.proven(peer) and not request.paused:
            self.book.present(peer, now)
        holding = request.holding
        if holding is not None and self.book.release_lost(peer, holding, now):
            await self.work_changed()
        if request.wanted:
            leases = min(request.wanted, self.book.policy.leases_per_worker)
            able = (self.tasks[number] for number in self.registry.leasable(peer))
            short = [supply.make_ready(leases) for supply in able if not supply.is_ready(leases)]
            await asyncio.gather(*short)
        leases = await self._wait_for_work(worker, peer, request.wanted) if request.wanted else []
        before, after = self.registry.sources(peer)
        verdicts = take_verdicts(worker.verdicts)
        why = "" if leases or not request.wanted else self._no_lease(peer, now)
        successors = self.registry.successors()
        return LeaseReply(
            tuple(leases), verdicts, before, self._retry_ms(peer), after, why, successors
        )

    def _playable(self, request: LeaseRequest) -> frozenset[int]:
        """Return the environments that a node says it can play. Raises RemoteProtocolError."""
        every = range(len(self.tasks))
        playable = every if request.environments is None else request.environments
        if not set(playable) <= set(every):
            detail = f"environment {max(playable)}: the run has {len(every)}"
            raise RemoteProtocolError(Reason.MALFORMED, detail)
        return frozenset(playable)

    def _ready(self) -> frozenset[int]:
        """Return the environments whose next tasks are prepared."""
        return frozenset(number for number, supply in enumerate(self.tasks) if supply.is_ready())

    async def _wait_for_work(self, worker: WorkerState, peer: bytes, wanted: int) -> list[bytes]:
        """Grant leases to `peer` as soon as there is work; none after a while, or with a verdict."""
        self.registry.answer(peer)  # a new request makes its earlier one obsolete
        if worker.left:  # while its tasks were made: it said goodbye, or its key was retired
            return []
        proven = self.registry.proven(peer)
        if proven and (leases := self._grant(peer, wanted)):
            return leases
        origin = self.registry.origin(peer)
        pending = self.registry.pending[peer] = PendingRequest(wanted, origin, proven)
        if not proven:
            self.book.newcomers.enter(peer, origin, time.time())
            self._serve_newcomers()
        try:
            if not worker.verdicts:
                async with asyncio.timeout(self._hold_s(proven)):
                    await pending.answered.wait()
        except TimeoutError:
            pass  # nothing to do right now; the reply has a retry delay
        finally:
            if self.registry.pending.get(peer) is pending:
                self.registry.answer(peer)
        return pending.leases

    def _hold_s(self, proven: bool) -> float:
        """Return the seconds to hold a request: the more wait, the longer, which bounds their request rate."""
        waiting = len(self.registry.pending) if proven else len(self.book.newcomers)
        return min(max(HOLD_S, waiting / POLLS), MAX_HOLD_S)

    def _retry_ms(self, peer: bytes) -> int:
        waiting = 0 if self.registry.proven(peer) else len(self.book.newcomers)
        return min(RETRY_MS + NEWCOMER_RETRY_MS * waiting, MAX_RETRY_MS)

    def _serve_newcomers(self) -> None:
        """Lease to newcomers in turn, as long as there is a slot."""
        while len(self.book.newcomers):
            free, ready = self.demand.capacity(None), self._ready()
            if free < 1:
                return

            def able(node: bytes, ready: frozenset[int] = ready) -> bool:
                waits = node in self.registry.pending
                return waits and not ready.isdisjoint(self.registry.leasable(node))

            node = self.book.next_newcomer(free, time.time(), able)
            if node is None or not (leases := self._grant(node, 1)):
                return
            self.registry.answer(node, leases)

    def _no_lease(self, peer: bytes, now: float) -> str:
        """Return why an admitted node gets no lease now, for its operator."""
        rest = self.book.record(peer).rest_until - now
        if self.version < 0:
            return "the run has no policy version yet"
        if rest > 0:
            return (
                f"this node rests {rest:.0f} s, as its leases did not come back or brought nothing"
            )
        if peer in self.book.held.nodes:
            return "it holds as many leases as its record allows"
        if waiting := self.registry.waits_for_bounds(peer):
            return waiting
        playable = self.registry.leasable(peer)
        if not playable:
            return "it can play none of the run's environments"
        if self._ready().isdisjoint(playable):
            return self.tasks[min(playable)].NONE_READY
        if self.book.ahead(playable, self.registry.staffed(), now):
            names = ", ".join(repr(self.registry.environments[number].name) for number in playable)
            return f"the run has a batch more of {names} than its ratio: this node can play nothing else"
        if self.book.staffed(now) and not self.registry.proven(peer):
            waiting = len(self.book.newcomers)
            return f"newcomers take turns until work of theirs is accepted, {waiting} wait"
        return "enough work is out for the next steps"

    async def take_back_from_stage(self, peer: bytes) -> None:
        """Take back the leases of a node that offers to be a stage and is not stage 0.

        Such a node cannot work on them.
        """
        if not self.registry.pipelines.leads(peer) and self.book.release(peer, time.time()):
            await self.work_changed()

    def _grant(self, peer: bytes, wanted: int) -> list[bytes]:
        sealed: list[bytes] = []
        epoch, version = self._publisher.order
        proven = self.registry.proven(peer)
        reputation = self.registry.reputations.get(peer) or Reputation()
        playable = self.registry.leasable(peer)
        named = self.registry.named(peer)
        share = LeaseShare(
            waiting={node for node, other in self.registry.pending.items() if other.proven},
            earned=math.inf if named else reputation.accepted / self.book.policy.largest_group,
            standings={} if named else self.registry.standings(peer),
            newcomer=None if proven else self.registry.origin(peer),
            staffed=self.registry.staffed(),
        )
        while len(sealed) < wanted and version >= 0 and sum(map(len, sealed)) <= LEASE_BYTES:
            lease = self.book.grant(
                peer,
                version=version,
                epoch=epoch,
                capacity=self.demand.capacity(peer if proven else None),
                digest_of=lambda environment, index: self.tasks[environment].digests[index],
                seed=secrets.token_bytes(32),
                now=time.time(),
                share=replace(share, playable=playable & self._ready()),
            )
            if lease is None:
                break
            sealed.append(
                self.registry.services.seal(
                    Purpose.LEASE,
                    self.tasks[lease.environment].complete(lease),
                    recipient=peer,
                    sequence=lease.lease_id,
                    expires=int(lease.deadline) + 60,
                )
            )
        return sealed


def take_verdicts(waiting: deque[bytes]) -> tuple[bytes, ...]:
    """Take the verdicts that fit into one reply beside its leases; the rest come with the next."""
    verdicts: list[bytes] = []
    size = 0
    while waiting and len(verdicts) < MAX_LEASES and size + len(waiting[0]) <= VERDICT_BYTES:
        size += len(waiting[0])
        verdicts.append(waiting.popleft())
    return tuple(verdicts)
