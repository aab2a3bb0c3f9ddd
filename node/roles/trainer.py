"""The trainer role: lease out, verify, learn, publish; one loop, one policy version per turn.

A version is told to nobody before a checkpoint can reproduce it (with `checkpoint.interval = 1`; else a
resume begins a new term). What is trained is never older than the staleness bound: the buffer sees to it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease
from ...protocol.rollouts import Submission, Verdict
from ..config import RunConfig
from ..errors import RunFailed
from ..ledger import Arrived, Ledger
from ..metrics import MetricsLog, PhaseClock
from ..network.heads import HeadBook
from ..proofs.verifier import Verified, Verifier, refuse_all
from ..training.advantages import CreditedBatch, credit
from ..training.backend import Batch, TrainBackend
from ..training.buffer import BufferSnapshot, Group, RolloutBuffer
from ..training.checkpoints import Checkpoints
from .cursor import Cursor
from .desk import LeaseDesk, open_lease
from .publisher import Publisher
from .terms import Term

logger = logging.getLogger(__name__)

VERDICT_TTL_S = 7 * 86400
EXPIRY_INTERVAL_S = 0.5
FULL_AUDIT_BELOW = 64.0
"""A worker with less evidence than this is audited fully; one with more, by sample."""


@dataclass
class Progress:
    """What has happened so far; `status` and the summary read it."""

    step: int = 0
    reward: float | None = None
    staleness: float | None = None
    history: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    mismatch_kl: list[float] = field(default_factory=list[float])
    staleness_max: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    received: int = 0
    """Rollouts that arrived."""


class TrainerRole:
    """One trainer's loops."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run_id: bytes,
        config: RunConfig,
        ledger: Ledger,
        heads: HeadBook,
        desk: LeaseDesk,
        arrivals: "asyncio.Queue[Arrived]",
        buffer: RolloutBuffer,
        verifier: Verifier,
        backend: TrainBackend,
        publisher: Publisher,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        clock: PhaseClock,
        gossip: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._key = key
        self._run_id = run_id
        self._config = config
        self._ledger = ledger
        self._heads = heads
        self._desk = desk
        self._arrivals = arrivals
        self._buffer = buffer
        self._verifier = verifier
        self._backend = backend
        self._publisher = publisher
        self.checkpoints = checkpoints
        self._metrics = metrics
        self._clock = clock
        self._gossip = gossip
        self._grown = asyncio.Condition()
        self._verifying = 0
        self._verified_up_to = 0
        self._empty = 0
        self.term = Term()
        self.training = False
        self.progress = Progress()

    def waiting_groups(self) -> int:
        """Groups that have come back and wait: in the buffer, in verification, in the inbox."""
        per_lease = self._config.rollouts.groups_per_lease
        return len(self._buffer) + (self._verifying + self._arrivals.qsize()) * per_lease

    def capacity(self) -> int:
        """Groups that may be leased out now."""
        remaining = self._config.max_steps - self.progress.step - (1 if self.training else 0)
        if remaining <= 0:
            return 0
        book = self._desk.book
        waiting = self.waiting_groups()
        needed = remaining * self._config.rollouts.groups_per_batch
        last = needed - waiting - book.outstanding_groups()
        return min(last, book.capacity(waiting_groups=waiting, training=self.training))

    async def restore(self, parts: dict[str, bytes]) -> None:
        """Take in a checkpoint's parts: buffer, cursor; then re-verify what arrived after it."""
        cursor = msgspec.json.decode(parts["cursor"], type=Cursor)
        self._buffer.restore(msgspec.msgpack.decode(parts["buffer"], type=BufferSnapshot))
        self._verified_up_to = cursor.verified_up_to
        inbox = self._ledger.arrived_after(cursor.verified_up_to)
        cursor.restore_tasks(self._desk.book, (self._open(one)[1] for one in inbox))
        progress = self.progress
        progress.history = list(cursor.history)
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
                tasks.create_task(self._verify_loop()),
                tasks.create_task(self._expire_loop()),
            ]
            await self._desk.work_changed()
            while self.progress.step < self._config.max_steps:
                await self._turn()
            for helper in helpers:
                helper.cancel()

    async def _turn(self) -> None:
        """One batch: wait, learn, checkpoint, publish."""
        start = time.monotonic()
        groups = await self._next_batch()
        waited = time.monotonic() - start
        self._clock.add("wait_for_batch", waited)
        batch = credit(groups, self._config.training.advantage) if groups else None
        if groups is None or batch is None or not batch.samples:
            self._count_empty(groups)
            return
        self._empty = 0
        self.training = True
        try:
            await self._learn(groups, batch, waited)
        finally:
            self.training = False
        await self._desk.work_changed()

    async def _learn(self, groups: list[Group], batch: CreditedBatch, waited: float) -> None:
        step = self.progress.step + 1
        staleness = self._buffer.staleness(groups)
        with self._clock.phase("train"):
            figures = await self._backend.step(Batch(step, batch.samples))
            state = await self._backend.state()
        self._note(step, groups, staleness.mean, staleness.max, figures.values)
        self._count_swept(self._buffer.advance(step))
        if step % self._config.checkpoint.interval == 0 or step == self._config.max_steps:
            with self._clock.phase("checkpoint"):
                await self.checkpoint(step)
        with self._clock.phase("publish"):
            await self._publisher.publish(step, state)
            head = self._heads.latest()
            assert head is not None
            await self._gossip(head.sealed)
        self._write_metrics(step, batch, staleness.max, waited, figures.values)

    def _note(
        self,
        step: int,
        groups: list[Group],
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
        progress.mismatch_kl.append(figures.get("mismatch_kl/all/mean", 0.0))

    def _write_metrics(
        self,
        step: int,
        batch: CreditedBatch,
        staleness_max: int,
        waited: float,
        figures: dict[str, float],
    ) -> None:
        progress = self.progress
        values = {
            "reward/mean": progress.reward,
            "off_policy/mean": progress.staleness,
            "off_policy/max": staleness_max,
            **figures,
            "batch/samples": len(batch.samples),
            "batch/groups": batch.groups,
            "batch/pruned": batch.pruned,
            "time/wait_for_batch": round(waited, 4),
            "weights/delta_bytes": self._publisher.last_delta_bytes,
            "rollouts/accepted": progress.accepted,
            "rollouts/rejected": sum(progress.rejected.values()),
            "leases/expired": self._desk.book.expired,
        }
        self._metrics.write(step, values)
        logger.info(
            "step %d | reward %.3f | staleness %.2f | mismatch KL %.2g | waited %.2fs",
            step,
            progress.reward or 0.0,
            progress.staleness or 0.0,
            figures.get("mismatch_kl/all/mean", 0.0),
            waited,
        )

    async def _next_batch(self) -> list[Group] | None:
        """The next full batch, or None when none came within batch_timeout_s."""
        wanted = self._config.rollouts.groups_per_batch
        try:
            async with asyncio.timeout(self._config.rollouts.batch_timeout_s), self._grown:
                while (groups := self._buffer.cut(wanted)) is None:
                    await self._grown.wait()
        except TimeoutError:
            return None
        return groups

    def _count_empty(self, groups: list[Group] | None) -> None:
        self._empty += 1
        limit = self._config.rollouts.max_empty_batches
        logger.warning("empty batch %d of %d", self._empty, limit)
        if self._empty < limit:
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
        book = self._desk.book
        progress = self.progress
        # Leases that are out when we die will be asked for again: their tasks come first then.
        out = [task.index for held in book.held.values() for task in held.lease.tasks]
        cursor = Cursor(
            next_task=book.next_task,
            requeued=[*book.requeued, *out],
            verified_up_to=self._verified_up_to,
            history=progress.history,
            accepted=progress.accepted,
            rejected=dict(progress.rejected),
            received=progress.received,
            delta_bytes=self._publisher.delta_bytes,
            full_bytes=self._publisher.full_bytes,
        )
        parts = {
            "cursor": msgspec.json.encode(cursor),
            "buffer": msgspec.msgpack.encode(self._buffer.snapshot()),
        }
        await self.checkpoints.write(step, parts, self._backend)
        self._ledger.forget_bodies(cursor.verified_up_to)

    async def _expire_loop(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            late = self._desk.book.expire(time.time())
            for held in late:
                logger.info("lease %d of %s ran out", held.lease.lease_id, short(held.node))
            if late:
                await self._desk.work_changed()

    async def _verify_loop(self) -> None:
        for arrived in self._ledger.arrived_after(self._verified_up_to):
            await self._take_in(arrived)
        while True:
            await self._take_in(await self._arrivals.get())

    async def _take_in(self, arrived: Arrived) -> None:
        """Verify one submission and wake whoever waits for its groups or for the room that it leaves."""
        self._verifying = 1
        try:
            await self._judge(arrived)
        finally:
            self._verifying = 0
        async with self._grown:
            self._grown.notify_all()
        await self._desk.work_changed()

    async def _judge(self, arrived: Arrived) -> None:
        """Verify one submission, count it, and put what holds into the buffer."""
        if arrived.arrival <= self._verified_up_to:
            return
        verified = await self._verify(arrived)
        self._verified_up_to = arrived.arrival
        reasons = verified.reasons()
        self._desk.reputation(arrived.node).record(verified.verdict.accepted, reasons, time.time())
        progress = self.progress
        progress.received += verified.verdict.accepted + sum(reasons.values())
        progress.accepted += verified.verdict.accepted
        progress.rejected.update({reason.value: count for reason, count in reasons.items()})
        for group in verified.groups:
            refusal = self._buffer.add(group, self.progress.step)
            if refusal is not None:
                progress.accepted -= len(group.rollouts)
                progress.rejected[refusal] += len(group.rollouts)
        self._deliver(arrived.node, verified.verdict)

    async def _verify(self, arrived: Arrived) -> Verified:
        submission, lease = self._open(arrived)
        if self.term.voids(submission, lease):
            error = RemoteProtocolError(Reason.STALE, "made by a policy that the trainer lost")
            return refuse_all(arrived.digest, lease, error)
        reputation = self._desk.reputation(arrived.node)
        seasoned = reputation.good >= FULL_AUDIT_BELOW and reputation.trust > 0.9
        fraction = self._config.verification.logprob_fraction if seasoned else 1.0
        try:
            return await self._verifier.verify(
                submission,
                lease,
                digest=arrived.digest,
                node=arrived.node,
                version=self._publisher.version,
                audit_fraction=fraction,
            )
        except RemoteProtocolError as error:
            logger.warning("submission of %s refused: %s", short(arrived.node), error)
            return refuse_all(arrived.digest, lease, error)

    def _open(self, arrived: Arrived) -> tuple[Submission, Lease]:
        submission = unseal(
            arrived.sealed, Purpose.SUBMISSION, Submission, now=0, run=self._run_id
        ).body
        return submission, open_lease(
            submission.lease, self._run_id, self._key.node_id, arrived.node
        )

    def _deliver(self, node: bytes, verdict: Verdict) -> None:
        sealed = seal(
            self._key,
            Purpose.VERDICT,
            self._run_id,
            verdict,
            recipient=node,
            expires=int(time.time()) + VERDICT_TTL_S,
        )
        self._ledger.add_verdict(node, sealed)
        if node in self._desk.workers:
            self._desk.workers[node].verdicts.append(sealed)

    def _count_swept(self, groups: list[Group]) -> None:
        count = sum(len(group.rollouts) for group in groups)
        self.progress.accepted -= count
        if count:
            self.progress.rejected[Reason.STALE.value] += count
