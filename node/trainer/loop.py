"""The trainer's loop: cut a batch, train, checkpoint, publish; one version per step.

Invariants: no version is announced before a resume can go on from it, by its checkpoint or by its resume point.
No batch holds a rollout beyond the staleness bound: the buffer removes
it first. A version is published while the next batch is trained if the staleness bound leaves room for it, but
never two at a time.

Parts, in the order of a step (TrainerRole._step):
- LeaseScheduler leases tasks to workers, which upload rollouts;
- SubmissionQueue verifies these and fills the RolloutBuffer, of which BatchCutter cuts a batch;
- credit() makes training samples of the batch, Demonstrations add theirs, TrainBackend trains on them;
- SkippedSteps ends the run whose weights are ruined, Checkpoints and ResumePoints make the step durable;
- Publisher signs and spreads the new version, OnlineEvaluation measures it;
- RunMetrics writes what the step did; next_batch() tells the operator what the next one waits for.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from typing import NamedTuple, TypeVar

import msgspec

from ...crypto.hashing import short
from ...protocol.errors import Reason
from ..config.run import RunConfig
from ..errors import NodeError, RunFailed
from ..evaluation.online import OnlineEvaluation
from ..ops.metrics import MetricsLog, StepCurves
from ..storage.run_files import CHECKPOINTS, weights_dir
from ..tasks import end_tasks
from ..training.advantages import CreditedBatch, credit
from ..training.backend import Snapshot, TrainBackend, TrainBatch
from ..training.buffer import BufferSnapshot, RolloutGroup
from ..training.checkpoint import Checkpoints
from ..training.resume_points import ResumePoints
from ..training.skipped_steps import SkippedSteps
from .demonstrations import Demonstrations
from .kept_rollouts import ZERO_ADVANTAGE, TrainedStep
from .metrics import RunMetrics
from .next_batch import next_batch
from .publisher import Publisher
from .scheduler import BatchCutter, LeaseScheduler
from .state import TrainerState, positions, snapshots
from .submissions import SubmissionQueue

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXPIRY_INTERVAL_S = 0.5
NO_SIGNAL = "use easier or harder tasks, a larger rollouts.group_size, or a longer warm-up"
STOP_S = 10.0
"""Time that a stopped trainer gives a step to end, so that its checkpoint can be written."""
MIN_STEPS_TO_OVERLAP = 4
"""Smallest max_off_policy_steps at which a version is published while the next is trained: leases made during
that time are one version older (LeadTime.depth)."""


class SavedState(NamedTuple):
    """State that a resume needs beside learner and ledger."""

    parts: dict[str, bytes]
    verified_up_to: int
    """Arrival number up to which the parts contain all submissions."""


class TrainerRole:
    """Cuts batches, trains, publishes and checkpoints until the last step."""

    def __init__(
        self,
        config: RunConfig,
        scheduler: LeaseScheduler,
        submissions: SubmissionQueue,
        backend: TrainBackend,
        publisher: Publisher,
        metrics: MetricsLog,
        evaluation: OnlineEvaluation,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        """`evaluation` runs beside training, on versions that are due.

        `demonstrations` are added to the rollouts of each step.
        """
        self._services = scheduler.registry.services
        self._ledger = self._services.ledger
        self._config = config
        self._environments = [environment.name for environment in config.mixture]
        self._training_on = config.training_on()
        self.scheduler = scheduler
        self.submissions = submissions
        self._buffer = submissions.buffer
        self.progress = submissions.progress
        self._kept = submissions.kept
        self._curricula = submissions.curricula
        self._clock = submissions.progress.clock
        self._backend = backend
        self.publisher = publisher
        self.checkpoints = open_checkpoints(config)
        self.resume_points = open_resume_points(config)
        self._skips = SkippedSteps(self.checkpoints)
        self._evaluation = evaluation
        self._demonstrations = demonstrations or Demonstrations()
        self._metrics = RunMetrics(
            config, scheduler, submissions, publisher, self._demonstrations, metrics
        )
        self._baselines: dict[str, dict[str, float]] = {}
        """Baselines of rae, by environment and agent."""
        self._batches = BatchCutter(config.rollouts, self._buffer, scheduler.demand)
        self._covered: deque[int] = deque(maxlen=config.checkpoint.keep_last)
        """Arrival numbers up to which the newest checkpoints contain all submissions."""
        self._line: dict[str, float | None] = {}
        """Metrics of the newest step, without those of saving and publishing it."""
        self._compiling = False
        self.stop_s = STOP_S
        self._learning: asyncio.Task[asyncio.Future[Snapshot]] | None = None
        """The newest batch that was trained, or is."""
        self._publishing: asyncio.Task[None] | None = None
        """Publication of the newest version, while it is in progress."""

    @property
    def curves(self) -> StepCurves:
        """The figures of the steps so far."""
        return self._metrics.log.curves

    async def run(self, step: int) -> None:
        """Train from after `step` to the last step; publish every version.

        Raises:
            RunFailed: too many batches in a row without a learning signal, or steps without a finite gradient.
        """
        self.progress.step = step
        self._buffer.advance(step)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self.submissions.run()),
                tasks.create_task(self._expire_loop()),
            ]
            await self.scheduler.work_changed()
            try:
                await self._compile()
                while self.progress.step < self._config.max_steps:
                    await self._step(tasks)
                await self._published()
                await self.settle()
                self._skips.at_end()
            except asyncio.CancelledError:
                await self._save_at_stop()
                raise
            finally:
                if self.progress.step < self._config.max_steps:
                    self._kept.end(self.progress.step)
                await self.resume_points.close()
                await self.checkpoints.close()
                await self.publisher.close()
            for helper in helpers:
                helper.cancel()

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        """Run one step: wait for a batch, train, checkpoint, publish."""
        start = time.monotonic()
        self.progress.begin_batch()
        groups = await self._next_batch()
        waited = time.monotonic() - start
        self._clock.add("wait_for_batch", waited)
        before = self._baselines
        batch = credit(groups or [], self._config.training, self._training_on, before)
        self._baselines = batch.baselines
        if groups is None or not batch.samples:
            self._count_empty(groups)
            return
        self._clock.reach("first batch")
        self.progress.late = self.progress.zero_advantage = 0
        self.progress.training = True
        await self.scheduler.work_changed()  # one batch less is waiting
        try:
            self._learning = asyncio.create_task(self._learn(groups, batch, waited))
            snapshot = await _or_end(self._learning, self.stop_s)
            trained = self._kept.trained(self.progress.step, groups, batch.samples, before)
            self._publishing = tasks.create_task(self._publish(trained, snapshot, self._line))
            if self._config.rollouts.max_off_policy_steps < MIN_STEPS_TO_OVERLAP:
                await self._published()
        finally:
            self.progress.training = False
        self.scheduler.book.trained(time.monotonic() - start - waited, waited)
        await self.scheduler.work_changed()

    async def _next_batch(self) -> list[RolloutGroup] | None:
        """Wait for a full batch; None if there is none within batch_timeout_s. Raises RunFailed."""
        self._batches.begin()
        try:
            async with (
                asyncio.timeout(self._config.rollouts.batch_timeout_s),
                self.submissions.grown,
            ):
                while (groups := self._batches.cut(time.time())) is None:
                    self._check_curriculum()
                    await self.submissions.grown.wait()
        except TimeoutError:
            return None
        return groups

    async def _learn(
        self, groups: list[RolloutGroup], batch: CreditedBatch, waited: float
    ) -> asyncio.Future[Snapshot]:
        """Train a batch and begin its checkpoint; return the snapshot of the new policy, in progress.

        Raises RunFailed where the weights are ruined: nothing of them is kept then.
        """
        step = self.progress.step + 1
        staleness = self._buffer.staleness(groups)
        samples = await self._demonstrations.added_to(batch.samples, groups)
        leases = {int.from_bytes(group.lease[:8], "big") for group in groups}
        with self._clock.phase("train"), self._services.tracing.batch("batch", leases, step=step):
            figures = await self._backend.step(TrainBatch(step, samples))
        failure = self._skips.after(step, figures.values)
        self.progress.skipped, self.progress.skipping = self._skips.total, self._skips.note()
        if failure is not None:
            await self._published()
            self._metrics.log.write(step, figures.values)
            raise failure
        snapshot = self._backend.snapshot()
        snapshot.add_done_callback(  # if nobody waits
            lambda future: future.cancelled() or future.exception()
        )
        await self._published()
        self._metrics.note(step, groups, staleness, figures.values)
        self._count_swept(self._buffer.advance(step))
        self._line = self._metrics.line(batch, groups, staleness.max, waited, figures.values)
        await self._save(step)
        await self._keep_weights(step)
        return snapshot

    def _count_swept(self, groups: list[RolloutGroup]) -> None:
        self._kept.lost(groups, Reason.STALE.value)
        count = sum(len(group.rollouts) for group in groups)
        self.progress.accepted -= count
        for group in groups:
            self.progress.accepted_of[group.environment] -= len(group.rollouts)
            self.progress.rejected_of[group.environment] += len(group.rollouts)
        if count:
            self.progress.rejected[Reason.STALE.value] += count

    async def _published(self) -> None:
        """Wait until the version in progress is published."""
        if self._publishing is not None:
            with self._clock.phase("publish"):
                await self._publishing
            self._publishing = None

    async def _publish(
        self,
        trained: TrainedStep,
        snapshot: asyncio.Future[Snapshot],
        line: dict[str, float | None],
    ) -> None:
        """Publish a version, gossip it, begin its evaluation, write its metrics and rollouts."""
        begin = time.monotonic()
        policy, step = await snapshot, trained.step
        began = time.monotonic()
        # written while the version is encoded; with a longer interval checkpoints take more time than that
        durable = (
            self.settle if self._config.checkpoint.interval == 1 else self._settle_resume_point
        )
        await self.publisher.publish(step, policy, before_announcing=durable)
        await self._gossip()
        self._evaluation.begin(step, self.publisher.states[step])
        self._metrics.write(step, line, began - begin, time.monotonic() - began)
        head = self._services.heads.latest()
        self._kept.write(trained, head.sealed if head else b"")

    async def _gossip(self) -> None:
        """Gossip the newest head, if discovery is on."""
        head, discovery = self._services.heads.latest(), self._services.discovery
        if head is not None and discovery is not None:
            await discovery.publish(head.sealed)

    async def _keep_weights(self, step: int) -> None:
        """Export weights/step_N if due, and not in doubt; those of the last step come with the summary."""
        interval = self._config.checkpoint.weights_interval
        due = interval and step % interval == 0 and step < self._config.max_steps
        if due and not self._skips.in_a_row:
            with self._clock.phase("export"):
                await self._backend.export(weights_dir(self._config.run_dir, step))

    # -- beside the steps --------------------------------------------------------------------------

    async def _compile(self) -> None:
        """Compile the training step, while workers draw the first batch. Raises EngineError."""
        self._compiling = True
        try:
            with self._clock.phase("compile"):
                await self._backend.compile_step()
        finally:
            self._compiling = False

    async def _expire_loop(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            late = self.scheduler.take_back(time.time())
            for grant in late:
                logger.info("lease %d of %s is taken back", grant.lease.lease_id, short(grant.node))
            if late:
                await self.scheduler.work_changed()
            # Groups of other workers may be due now, or may have been waited for long enough.
            async with self.submissions.grown:
                self.submissions.grown.notify_all()

    # -- batches that do not come, or have no signal -----------------------------------------------

    def _check_curriculum(self) -> None:
        """Raise RunFailed if no more groups are to be expected that the curriculum admits."""
        rollouts, curricula = self._config.rollouts, self._curricula.values()
        limit = rollouts.max_empty_batches * rollouts.groups_per_batch
        if min(curriculum.rejected_in_a_row for curriculum in curricula) >= limit:
            raise RunFailed(
                f"{limit} groups in a row had no signal (training.curriculum.gates admitted none): {NO_SIGNAL}"
            )
        book = self.scheduler.book
        queued = any(queue.requeued or queue.drawn for queue in book.tasks)
        coming = book.held or queued or self.submissions.waiting()
        if all(curriculum.exhausted for curriculum in curricula) and not coming:
            raise RunFailed(
                "every task is in a pool of weight 0: raise a weight of training.curriculum.sampler.pools, or "
                "sampler.num_tasks"
            )

    def _count_empty(self, groups: list[RolloutGroup] | None) -> None:
        if groups is None and self.submissions.verifier.judge_fault:
            return  # a judge is waited for indefinitely: more workers would not yield more batches
        progress, limit = self.progress, self._config.rollouts.max_empty_batches
        if groups is None:
            progress.late += 1
        else:
            rewards = [rollout.reward for group in groups for rollout in group.rollouts]
            progress.zero_advantage += 1
            progress.equal_rewards = min(rewards), max(rewards)
            self._kept.lost(groups, ZERO_ADVANTAGE)
            if failure := self._skips.empty():
                raise failure
        logger.warning("empty batch %d of %d", progress.empty, limit)
        if progress.empty < limit:
            return
        if groups is None:
            raise RunFailed(
                f"no batch came in {limit} x {self._config.rollouts.batch_timeout_s:.0f} s: "
                "check `primerl-node peers`, start workers, or raise rollouts.batch_timeout_s"
            )
        raise RunFailed(
            f"{limit} batches in a row had no signal (every group's rewards are equal): {NO_SIGNAL}"
        )

    # -- checkpoints -------------------------------------------------------------------------------

    async def checkpoint(self, step: int) -> None:
        """Write a checkpoint for `train --resume` after `step`."""
        await self.begin_checkpoint(step)
        await self.settle()

    async def _save(self, step: int) -> None:
        """Begin the checkpoint of `step`, if it is due; with longer intervals its resume point in any case."""
        interval = self._config.checkpoint.interval
        with self._clock.phase("checkpoint"):
            saved = self._saved_state()
            if interval > 1:
                await self._settle_resume_point()
                self.resume_points.begin(step, saved.parts)
            if step % interval == 0 or step == self._config.max_steps:
                await self.begin_checkpoint(step, saved)

    async def _settle_resume_point(self) -> None:
        """Wait until the resume point that was begun is durable. Raises StorageError."""
        began = time.monotonic()
        await self.resume_points.finish()
        self._metrics.saving_s += time.monotonic() - began

    async def _save_at_stop(self) -> None:
        """Write a checkpoint of the newest step, unless there is one: what is stopped resumes exactly."""
        step, learning = self.progress.step, self._learning
        if learning is not None and (learning.cancelled() or learning.exception()):
            return  # the learner may be at another step
        publishing = self._publishing
        if publishing is not None and publishing.done() and not publishing.cancelled():
            if publishing.exception() is not None:
                return  # the learner may be gone
        try:
            await self.settle()
            if (await asyncio.to_thread(self.checkpoints.latest) or 0) < step:
                await self.checkpoint(step)
        except NodeError as error:
            logger.warning("no checkpoint of step %d was written: %s", step, error)

    async def settle(self) -> None:
        """Wait until the checkpoint that was begun is durable. Raises StorageError."""
        began = time.monotonic()
        await self.checkpoints.finish()
        self._metrics.saving_s += time.monotonic() - began
        # No kept checkpoint needs the submissions that the oldest of them contains.
        if len(self._covered) == self._covered.maxlen:
            self._ledger.forget_covered(self._covered[0])

    async def begin_checkpoint(self, step: int, saved: SavedState | None = None) -> None:
        """Begin a checkpoint; return as soon as weights and buffer may change. settle() waits for the rest.

        `saved` is the state that it is of, by default the present one.
        """
        await self.settle()
        saved = saved or self._saved_state()
        began = time.monotonic()
        await self.checkpoints.begin(step, saved.parts, self._backend)
        self._metrics.saving_s += time.monotonic() - began
        self._covered.append(saved.verified_up_to)

    def _saved_state(self) -> SavedState:
        """Return what a resume needs beside learner and ledger."""
        book = self.scheduler.book
        progress = self.progress
        state = TrainerState(
            tasks=positions(book, self._environments),
            verified_up_to=progress.verified_up_to,
            used=sorted(progress.used),
            history=progress.history,
            staleness_history=progress.staleness_history,
            staleness_max=progress.staleness_max,
            accepted=progress.accepted,
            rejected=dict(progress.rejected),
            accepted_of=dict(progress.accepted_of),
            rejected_of=dict(progress.rejected_of),
            received=progress.received,
            delta_bytes=self.publisher.delta_bytes,
            full_bytes=self.publisher.full_bytes,
            line=self._line,
            ledger=self._ledger.ledger_id(),
            arrivals=self._ledger.last_arrival(),
            boots=self._ledger.boots(),
            head=self._ledger.newest_head(),
            reputations=snapshots(self.scheduler.registry.reputations),
            curriculum={
                name: dict(curriculum.rewards) for name, curriculum in self._curricula.items()
            },
            baselines=self._baselines,
            skipped=self._skips.total,
            skipped_in_a_row=self._skips.in_a_row,
            sft=self._demonstrations.cursor,
            sft_identity=self._demonstrations.identity,
        )
        parts = {
            "cursor": msgspec.json.encode(state),
            "buffer": msgspec.msgpack.encode(self._buffer.snapshot()),
        }
        return SavedState(parts, state.verified_up_to)

    async def restore(self, step: int, parts: dict[str, bytes]) -> None:
        """Restore buffer, tasks and counts from the checkpoint of `step`."""
        state = msgspec.json.decode(parts["cursor"], type=TrainerState)
        await asyncio.to_thread(self._metrics.log.go_back, step, state.line)
        await asyncio.to_thread(self._kept.go_back, step)
        self._buffer.restore(msgspec.msgpack.decode(parts["buffer"], type=BufferSnapshot))
        self.scheduler.registry.restore(state.restore_reputations(self._ledger))
        arrived = self._ledger.arrived_after(state.verified_up_to)
        for name, curriculum in self._curricula.items():
            curriculum.restore(state.curriculum.get(name, {}))
        # what was used is in the checkpoint's tasks: those of its groups that were lost wait there
        unused = (submission for submission in arrived if submission.arrival not in state.used)
        answered = (self.submissions.open(submission)[1] for submission in unused)
        state.restore_tasks(self.scheduler.book, self._environments, answered)
        self._demonstrations.restore(state)
        self._baselines = state.baselines
        progress = self.progress
        progress.verified_up_to = state.verified_up_to
        used = frozenset(state.used)
        progress.used = {
            submission.arrival: submission.node
            for submission in arrived
            if submission.arrival in used
        }
        progress.history = list(state.history)
        progress.staleness_history = list(state.staleness_history)
        progress.staleness_max = state.staleness_max
        progress.accepted, progress.received = state.accepted, state.received
        self._skips.restore(step, state.skipped, state.skipped_in_a_row)
        progress.skipped, progress.skipping = self._skips.total, self._skips.note()
        progress.rejected = Counter(state.rejected)
        progress.accepted_of = Counter(state.accepted_of)
        progress.rejected_of = Counter(state.rejected_of)
        self.publisher.delta_bytes, self.publisher.full_bytes = (
            state.delta_bytes,
            state.full_bytes,
        )

    def waits_for(self) -> str:
        """Describe what the next batch waits for; empty during training."""
        if self.progress.training:
            return ""
        if self.progress.step >= self._config.max_steps:
            return "the last version and checkpoint are being written"
        if self._compiling and len(self._buffer) >= self._config.rollouts.groups_per_batch:
            return "the training step is being compiled"
        return next_batch(self._config, self.scheduler, self.submissions, time.time())


async def _or_end(task: asyncio.Task[T], seconds: float) -> T:
    """Await `task`; if cancelled, give it some seconds to end by itself."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=seconds)
        await end_tasks(task)
        raise


def open_resume_points(config: RunConfig) -> ResumePoints:
    """Open the resume points of a run."""
    return ResumePoints(config.run_dir / CHECKPOINTS, fsync=config.fsync)


def newest_step(config: RunConfig) -> int | None:
    """Return the newest step of which a run has a checkpoint or a resume point."""
    saved = (open_checkpoints(config).latest(), open_resume_points(config).latest())
    return max((step for step in saved if step is not None), default=None)


def open_checkpoints(config: RunConfig) -> Checkpoints:
    """Open the checkpoints of a run."""
    return Checkpoints(
        config.run_dir / CHECKPOINTS,
        keep_last=config.checkpoint.keep_last,
        keep_interval=config.checkpoint.keep_interval,
        keep_first=config.checkpoint.keep_first,
        fsync=config.fsync,
    )
