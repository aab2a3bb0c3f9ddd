"""The trainer role: lease out, verify, learn, publish; one loop, one policy version per turn.

A version is told to nobody before a checkpoint can reproduce it (with `checkpoint.interval = 1`; else a
resume begins a new term). What is trained is never older than the staleness bound: the buffer sees to it.
"""

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import msgspec

from ...crypto.hashing import short
from ...protocol.errors import Reason
from ..config.run import RunConfig
from ..ops.errors import RunFailed
from ..ops.metrics import MetricsLog, PhaseClock
from ..p2p.heads import HeadStore
from ..storage.ledger import Ledger
from ..storage.run_files import weights_dir
from ..training.advantages import CreditedBatch, credit, has_equal_rewards
from ..training.backend import TrainBackend, TrainBatch
from ..training.buffer import BufferSnapshot, RolloutBuffer, RolloutGroup, peer_cap, peer_room
from ..training.checkpoint import Checkpoints
from .publisher import Publisher
from .scheduler import LeaseScheduler, WorkerState
from .state import Progress, TrainerState, snapshots
from .submission_queue import SubmissionQueue

SILENT_S = 15.0
"""Workers say something every five seconds (worker/loop.py, HEARTBEAT_S)."""
REFUSED = "refused work"
SILENT = "silent"
EXPLAIN = "`primerl-node explain` says why"
STALE = "set a smaller rollouts.groups_per_lease, or a higher rollouts.max_off_policy_steps"


def next_batch(
    config: RunConfig,
    progress: Progress,
    buffer: RolloutBuffer,
    unjudged: int,
    desk: LeaseScheduler,
    now: float,
) -> str:
    """What the next batch waits for; `unjudged` submissions are in verification, `now` is in Unix seconds."""
    wanted = config.rollouts.groups_per_batch
    on_lease = desk.book.leased()
    said = f"{len(buffer)} of {wanted} groups are in"
    equal = _equal_rewards(config, buffer)
    if equal:
        said += f", all of equal rewards ({equal})"
    if on_lease:
        said += f", {on_lease.total()} on lease{_silent_holders(desk, on_lease)}"
    if unjudged:
        said += f", {unjudged} submissions in verification"
    if len(buffer) >= wanted:
        said += "; other workers' groups are waited for"
    elif not on_lease and not unjudged:
        said += f"; {_workers(desk, now)}"
    return "; ".join([*_no_progress(config, progress), said])


def _equal_rewards(config: RunConfig, buffer: RolloutBuffer) -> str:
    """The rewards in the buffer, if several groups are there and none of them teaches anything."""
    training = config.training
    if not (training.filter_zero_advantages and training.loss.reads_advantages) or len(buffer) < 2:
        return ""
    if not all(has_equal_rewards(group, training) for group in buffer.groups()):
        return ""
    rewards = [group.rollouts[0].reward for group in buffer.groups()]
    return reward_range(min(rewards), max(rewards))


def reward_range(low: float, high: float) -> str:
    """Rewards in two decimals, from the lowest to the highest."""
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _silent_holders(desk: LeaseScheduler, on_lease: Counter[bytes]) -> str:
    silence = min(desk.silence(node) for node in on_lease)
    if silence < SILENT_S:
        return ""
    return f" to workers that have been silent for {silence:.0f} s"


def _no_progress(config: RunConfig, progress: Progress) -> list[str]:
    """Batches that taught nothing, and a batch of which everything is rejected."""
    rollouts, said = config.rollouts, list[str]()
    limit = f"the run stops after {rollouts.max_empty_batches} without signal"
    if progress.zero_advantage:
        count = progress.zero_advantage
        which = "batch" if count == 1 else f"{count} batches"
        rewards = reward_range(*progress.equal_rewards)
        said.append(f"every group of the last {which} had equal rewards ({rewards}): {limit}")
    if progress.late:
        tried = f"{progress.late} x {rollouts.batch_timeout_s:.0f} s"
        said.append(f"no batch was full within {tried}: {limit}")
    lost = progress.all_rejected()
    if lost:
        ordered = ", ".join(f"{name} {count}" for name, count in lost.most_common(3))
        advice = STALE if set(lost) == {Reason.STALE.value} else EXPLAIN
        said.append(f"everything since step {progress.step} was rejected ({ordered}): {advice}")
    return said


def _workers(desk: LeaseScheduler, now: float) -> str:
    """Why nobody is at work on a lease, and what to do."""
    workers = {n: one for n, one in desk.workers.items() if n not in desk.audits.validators}
    if not workers:
        return (
            f"no worker has joined: start `primerl-node join` with the ticket{_turned_away(desk)}"
        )
    newest = max(desk.version, 0)
    states = {node: _state(desk, node, one, newest, now) for node, one in workers.items()}
    refused = [_why_refused(desk, node) for node, state in states.items() if state == REFUSED]
    if len(refused) == len(workers):
        return (
            f"every worker is refused work ({_commonest(refused)}): mend or replace them, {EXPLAIN}"
        )
    silent = [desk.silence(node) for node, state in states.items() if state == SILENT]
    if len(silent) == len(workers):
        return f"none of {len(workers)} workers is here, the last was heard {min(silent):.0f} s ago"
    counted = Counter(states.values())
    if REFUSED in counted:
        counted[f"{REFUSED} ({_commonest(refused)})"] = counted.pop(REFUSED)
    return f"workers: {', '.join(f'{count} {state}' for state, count in counted.most_common())}"


def _state(desk: LeaseScheduler, node: bytes, worker: WorkerState, newest: int, now: float) -> str:
    if desk.refusal(node):
        return REFUSED
    if worker.left:
        return f"failed ({worker.failure})" if worker.failure else "left"
    if desk.silence(node) >= SILENT_S:
        return SILENT
    if worker.stats.version < 0:
        return f"loading a first policy, version {newest}"
    rest = desk.book.record(node).rest_until - now
    if rest > 0:
        return f"resting {rest:.0f} s as leases did not come back"
    if worker.stats.version < newest:
        return f"fetching version {newest}"
    return "asking for work"


def _why_refused(desk: LeaseScheduler, node: bytes) -> str:
    known = desk.reputations.get(node)
    if known is None:
        return "not known"
    return f"{'banned' if known.banned else 'too much was rejected'}: {known.top_reason()}"


def _commonest(sentences: list[str]) -> str:
    return Counter(sentences).most_common(1)[0][0]


def _turned_away(desk: LeaseScheduler) -> str:
    if not desk.turned_away:
        return ""
    reason, count = Counter(desk.turned_away).most_common(1)[0]
    return f" ({count} that tried were refused: {reason})"


logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.5
PATIENCE = 1 / 12
"""Share of a lease's time that a full buffer waits for other workers' groups."""


def _nobody(version: int) -> None:
    """Nobody has to hear of a version."""


class TrainerRole:
    """One trainer's loops."""

    def __init__(
        self,
        *,
        config: RunConfig,
        ledger: Ledger,
        heads: HeadStore,
        desk: LeaseScheduler,
        inbox: SubmissionQueue,
        buffer: RolloutBuffer,
        progress: Progress,
        backend: TrainBackend,
        publisher: Publisher,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        clock: PhaseClock,
        gossip: Callable[[bytes], Awaitable[None]],
        published: Callable[[int], None] = _nobody,
    ) -> None:
        """`published` is told of every version that a step made, once others know it; it returns at once."""
        self._config = config
        self._ledger = ledger
        self._heads = heads
        self._desk = desk
        self.inbox = inbox
        self._buffer = buffer
        self._backend = backend
        self._publisher = publisher
        self.checkpoints = checkpoints
        self._metrics = metrics
        self._clock = clock
        self._gossip = gossip
        self._published = published
        self._full_since = math.inf
        """Monotonic seconds since when the buffer has held enough groups for the next batch."""
        self.training = False
        self.progress = progress
        self._covered: deque[int] = deque(maxlen=config.checkpoint.keep_last)
        """Arrival numbers up to which the newest checkpoints contain everything."""
        self._saving_s = 0.0
        """Seconds that the current step was held up by checkpoints."""
        self._line: dict[str, float | None] = {}
        """The newest step's metrics, but for what comes of keeping and telling it."""

    def waiting_groups(self) -> int:
        """Groups that have come back and wait: in the buffer, in verification, in the inbox."""
        return len(self._buffer) + self._unjudged().total()

    def waits_for(self) -> str:
        """What the next batch waits for, in words; empty while one is trained."""
        if self.training:
            return ""
        unjudged = self.inbox.waiting()
        return next_batch(
            self._config, self.progress, self._buffer, unjudged, self._desk, time.time()
        )

    def _unjudged(self) -> Counter[bytes]:
        """Groups that are not judged yet, by worker, at most; while proven workers are here, those of newcomers
        take nothing of what is leased: they may come to nothing."""
        staffed = self._desk.book.staffed(time.time())
        waiting = self._ledger.waiting_by_node(self.inbox.verified_up_to)
        counted = Counter[bytes]()
        for node, submissions in waiting.items():
            if not staffed or self._desk.proven(node):
                counted[node] = submissions * self._config.rollouts.groups_per_lease
        return counted

    def capacity(self, node: bytes | None) -> int:
        """Groups that may be leased to `node` now; None for all newcomers together."""
        remaining = self._config.max_steps - self.progress.step - (1 if self.training else 0)
        if remaining <= 0:
            return 0
        book = self._desk.book
        waiting = self.waiting_groups()
        needed = remaining * self._config.rollouts.groups_per_batch
        last = needed - waiting - book.outstanding_groups()
        if node is None:
            free = book.newcomer_capacity(
                waiting_groups=waiting, training=self.training, now=time.time()
            )
            return max(0, min(last, free))
        free = min(last, book.capacity(waiting_groups=waiting, training=self.training))
        if free < 1:
            return 0
        rollouts = self._config.rollouts
        there = self._buffer.by_node() + self._coming()
        return min(free, peer_room(rollouts.groups_per_batch, rollouts.max_peer_share, node, there))

    def _coming(self) -> Counter[bytes]:
        """Groups that are on lease or in verification, by worker; nobody waits for those of newcomers while
        proven workers are here."""
        book = self._desk.book
        return book.leased(newcomers=not book.staffed(time.time())) + self._unjudged()

    async def restore(self, step: int, parts: dict[str, bytes]) -> None:
        """Take in the checkpoint of `step`: buffer, cursor; then re-verify what arrived after it."""
        cursor = msgspec.json.decode(parts["cursor"], type=TrainerState)
        await asyncio.to_thread(self._metrics.go_back, step, cursor.line)
        self._buffer.restore(msgspec.msgpack.decode(parts["buffer"], type=BufferSnapshot))
        self.inbox.verified_up_to = cursor.verified_up_to
        self._desk.reputations.update(cursor.restore_reputations(self._ledger))
        arrived = self._ledger.arrived_after(cursor.verified_up_to)
        cursor.restore_tasks(self._desk.book, (self.inbox.open(one)[1] for one in arrived))
        progress = self.progress
        progress.history = list(cursor.history)
        progress.staleness_history = list(cursor.staleness_history)
        progress.staleness_max = cursor.staleness_max
        progress.accepted, progress.received = cursor.accepted, cursor.received
        progress.rejected = Counter(cursor.rejected)
        self._publisher.delta_bytes, self._publisher.full_bytes = (
            cursor.delta_bytes,
            cursor.full_bytes,
        )

    async def run(self, step: int) -> None:
        """Train from after `step` to the last step; publishes every version.

        Raises:
            RunFailed: ten batches in a row without anything to learn from.
        """
        self.progress.step = step
        self._buffer.advance(step)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self.inbox.run()),
                tasks.create_task(self._expire_loop()),
            ]
            await self._desk.work_changed()
            try:
                while self.progress.step < self._config.max_steps:
                    await self._turn()
                await self.settle()
            finally:
                await self.checkpoints.close()
            for helper in helpers:
                helper.cancel()

    async def _turn(self) -> None:
        """One batch: wait, learn, checkpoint, publish."""
        start = time.monotonic()
        self.progress.begin_batch()
        groups = await self._next_batch()
        waited = time.monotonic() - start
        self._clock.add("wait_for_batch", waited)
        batch = credit(groups, self._config.training) if groups else None
        if groups is None or batch is None or not batch.samples:
            self._count_empty(groups)
            return
        self.progress.late = self.progress.zero_advantage = 0
        self.training = True
        try:
            await self._learn(groups, batch, waited)
        finally:
            self.training = False
        await self._desk.work_changed()

    async def _learn(self, groups: list[RolloutGroup], batch: CreditedBatch, waited: float) -> None:
        step = self.progress.step + 1
        staleness = self._buffer.staleness(groups)
        with self._clock.phase("train"):
            figures = await self._backend.step(TrainBatch(step, batch.samples))
            snapshot = await self._backend.snapshot()
        self._note(step, groups, staleness.mean, staleness.max, figures.values)
        self._count_swept(self._buffer.advance(step))
        self._line = self._figures(batch, staleness.max, waited, figures.values)
        interval = self._config.checkpoint.interval
        if step % interval == 0 or step == self._config.max_steps:
            with self._clock.phase("checkpoint"):
                await self.begin_checkpoint(step)
        began = time.monotonic()
        with self._clock.phase("publish"):
            # written while the version is encoded; with a longer interval, while later steps are trained
            durable = self.settle if interval == 1 else None
            await self._publisher.publish(step, snapshot, before_telling=durable)
            head = self._heads.latest()
            assert head is not None
            await self._gossip(head.sealed)
        self._published(step)
        await self._keep_weights(step)
        self._write_metrics(step, time.monotonic() - began)

    async def _keep_weights(self, step: int) -> None:
        """Write weights/step_N where they are wanted; those of the last step come with the summary."""
        interval = self._config.checkpoint.weights_interval
        if interval and step % interval == 0 and step < self._config.max_steps:
            with self._clock.phase("export"):
                await self._backend.export(weights_dir(self._config.run_dir, step))

    def _note(
        self,
        step: int,
        groups: list[RolloutGroup],
        staleness: float,
        staleness_max: int,
        figures: dict[str, float],
    ) -> None:
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        progress = self.progress
        progress.step = step
        progress.reward = sum(rewards) / len(rewards)
        progress.staleness = staleness
        progress.staleness_max = max(progress.staleness_max, staleness_max)
        progress.history.append((step, progress.reward))
        progress.staleness_history.append((step, staleness))
        progress.mismatch_kl.append(figures.get("mismatch_kl/all/mean", 0.0))

    def _figures(
        self,
        batch: CreditedBatch,
        staleness_max: int,
        waited: float,
        figures: dict[str, float],
    ) -> dict[str, float | None]:
        """What is known of a step before it is kept or told."""
        progress = self.progress
        return {
            "time": round(time.time(), 3),
            "reward/mean": progress.reward,
            "off_policy/mean": progress.staleness,
            "off_policy/max": staleness_max,
            **figures,
            "batch/samples": len(batch.samples),
            "batch/groups": batch.groups,
            "batch/pruned": batch.pruned,
            "batch/flat": batch.flat,
            "time/wait_for_batch": round(waited, 4),
            "rollouts/accepted": progress.accepted,
            "rollouts/rejected": sum(progress.rejected.values()),
            "leases/expired": self._desk.book.expired,
        }

    def _write_metrics(self, step: int, broadcasting_s: float) -> None:
        line, progress = self._line, self.progress
        told = {
            "time": round(time.time(), 3),
            "time/save_ckpt": round(self._saving_s, 4),
            "time/broadcast_weights": round(broadcasting_s, 4),
            "weights/delta_bytes": self._publisher.last_delta_bytes,
        }
        self._saving_s = 0.0
        self._metrics.write(step, line | told)
        logger.info(
            "step %d | reward %.3f | staleness %.2f | mismatch KL %.2g | %.0f tokens/s | waited %.2fs",
            step,
            progress.reward or 0.0,
            progress.staleness or 0.0,
            line.get("mismatch_kl/all/mean") or 0.0,
            line.get("perf/throughput") or 0.0,
            line["time/wait_for_batch"],
        )

    async def _next_batch(self) -> list[RolloutGroup] | None:
        """The next full batch, or None when none came within batch_timeout_s."""
        self._full_since = math.inf
        try:
            async with asyncio.timeout(self._config.rollouts.batch_timeout_s), self.inbox.grown:
                while (groups := self._cut(time.monotonic())) is None:
                    await self.inbox.grown.wait()
        except TimeoutError:
            return None
        return groups

    def _cut(self, now: float) -> list[RolloutGroup] | None:
        """A batch in which no worker has more than its share; `now` in monotonic seconds.

        Once there have been enough groups for some time, slow companions are waited for no longer: else one
        worker that dawdles over its leases would hold up everybody.
        """
        rollouts = self._config.rollouts
        wanted = rollouts.groups_per_batch
        if len(self._buffer) < wanted:
            return None
        self._full_since = min(self._full_since, now)
        if now - self._full_since > PATIENCE * rollouts.lease_timeout_s:
            return self._buffer.cut(wanted)
        cap = peer_cap(wanted, rollouts.max_peer_share, self._buffer.by_node(), self._coming())
        return self._buffer.cut(wanted, per_node=cap)

    def _count_empty(self, groups: list[RolloutGroup] | None) -> None:
        progress, limit = self.progress, self._config.rollouts.max_empty_batches
        if groups is None:
            progress.late += 1
        else:
            rewards = [rollout.reward for group in groups for rollout in group.rollouts]
            progress.zero_advantage += 1
            progress.equal_rewards = min(rewards), max(rewards)
        logger.warning("empty batch %d of %d", progress.empty, limit)
        if progress.empty < limit:
            return
        if groups is None:
            raise RunFailed(
                f"no batch came in {limit} x {self._config.rollouts.batch_timeout_s:.0f} s: "
                "check `primerl-node peers`, start workers, or raise rollouts.batch_timeout_s"
            )
        raise RunFailed(
            f"{limit} batches in a row had no signal (every group's rewards are equal): "
            "use easier or harder tasks, a larger rollouts.group_size, or a longer warm-up"
        )

    async def checkpoint(self, step: int) -> None:
        """Write everything that `train --resume` needs to go on after `step`."""
        await self.begin_checkpoint(step)
        await self.settle()

    async def settle(self) -> None:
        """Wait until the checkpoint that was begun is durable. Raises StorageError."""
        began = time.monotonic()
        await self.checkpoints.finish()
        self._saving_s += time.monotonic() - began
        # What the oldest of the newest ones contains is not needed by any that could be gone on from.
        if len(self._covered) == self._covered.maxlen:
            self._ledger.forget_bodies(self._covered[0])

    async def begin_checkpoint(self, step: int) -> None:
        """As checkpoint(), but return as soon as weights and buffer may change again; settle() waits."""
        await self.settle()
        book = self._desk.book
        progress = self.progress
        # Leases that are out when we die will be asked for again: their tasks come first then.
        out = [task.index for held in book.held.values() for task in held.lease.tasks]
        cursor = TrainerState(
            next_task=book.next_task,
            requeued=[*book.requeued, *out],
            verified_up_to=self.inbox.verified_up_to,
            history=progress.history,
            staleness_history=progress.staleness_history,
            staleness_max=progress.staleness_max,
            accepted=progress.accepted,
            rejected=dict(progress.rejected),
            received=progress.received,
            delta_bytes=self._publisher.delta_bytes,
            full_bytes=self._publisher.full_bytes,
            line=self._line,
            ledger=self._ledger.ledger_id(),
            arrivals=self._ledger.last_arrival(),
            boots=self._ledger.boots(),
            reputations=snapshots(self._desk.reputations),
        )
        parts = {
            "cursor": msgspec.json.encode(cursor),
            "buffer": msgspec.msgpack.encode(self._buffer.snapshot()),
        }
        began = time.monotonic()
        if self._config.checkpoint.async_save:
            await self.checkpoints.begin(step, parts, self._backend)
        else:
            await self.checkpoints.write(step, parts, self._backend)
        self._saving_s += time.monotonic() - began
        self._covered.append(cursor.verified_up_to)

    async def _expire_loop(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            late = self._desk.take_back(time.time())
            for held in late:
                logger.info("lease %d of %s is taken back", held.lease.lease_id, short(held.node))
            if late:
                await self._desk.work_changed()
            # Who may be waited for has changed, or has been waited for long enough.
            async with self.inbox.grown:
                self.inbox.grown.notify_all()

    def _count_swept(self, groups: list[RolloutGroup]) -> None:
        count = sum(len(group.rollouts) for group in groups)
        self.progress.accepted -= count
        if count:
            self.progress.rejected[Reason.STALE.value] += count
