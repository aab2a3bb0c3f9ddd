"""How a run opens: resume from a checkpoint of its own or of another run, or warm up; then a first version.

What a checkpoint is gone back to is decided here, before any worker hears of a version.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import count
from pathlib import Path

import msgspec

from ..config.run import RunConfig, WarmupConfig
from ..environments.environment import Environment
from ..evaluation.evaluator import EvalResult, Evaluator
from ..ops import summary
from ..ops.errors import StorageError, UsageError
from ..ops.metrics import PhaseClock
from ..storage.ledger import Ledger
from ..storage.run_files import CHECKPOINTS
from ..trainer.loop import TrainerRole
from ..trainer.publisher import Publisher
from ..trainer.state import TrainerState, current_term
from ..training.backend import TrainBackend
from ..training.buffer import BufferSnapshot
from ..training.checkpoint import Checkpoints
from ..training.warmup import SupervisedBackend, WarmupProgress, warm_up
from ..weights.state import State


def fork(step: int, parts: dict[str, bytes]) -> dict[str, bytes]:
    """The parts with which a new run goes on after `step`. Raises StorageError if they are of no RL run.

    Tasks that were on lease come first, as after a crash; those of rollouts that waited are passed over.
    Reputations are kept: who was caught once is still who it is.
    """
    try:
        theirs = msgspec.json.decode(parts["cursor"], type=TrainerState)
        msgspec.msgpack.decode(parts["buffer"], type=BufferSnapshot)
    except (KeyError, msgspec.DecodeError) as error:
        raise StorageError(
            "this is no checkpoint of `primerl-node train`: begin from its weights instead, --model.name "
            "DIRECTORY/weights/step_N"
        ) from error
    ours = TrainerState(
        next_task=theirs.next_task,
        requeued=theirs.requeued,
        verified_up_to=0,
        history=theirs.history,
        accepted=0,
        rejected={},
        received=0,
        delta_bytes=0,
        full_bytes=0,
        staleness_history=theirs.staleness_history,
        staleness_max=theirs.staleness_max,
        reputations=theirs.reputations,
    )
    return {
        "cursor": msgspec.json.encode(ours),
        "buffer": msgspec.msgpack.encode(BufferSnapshot(step, [])),
    }


logger = logging.getLogger(__name__)

WARMUP_TASKS = 1 << 40
"""Warm-up examples come from this index of the training split on: RL never leases them."""
WARMUP_EVAL_TASKS = 1 << 41
MADE_AT_ONCE = 128
"""Examples that are asked for together."""
EVALUATION_BEFORE = "evaluation_before"


class Startup:
    """Brings a trainer to the version that it goes on from, and says how good a policy is."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        backend: TrainBackend,
        evaluator: Evaluator,
        clock: PhaseClock,
        enter: Callable[[str], None],
    ) -> None:
        """`enter` is told the phase that begins."""
        self._config = config
        self._environment = environment
        self._backend = backend
        self._evaluator = evaluator
        self._clock = clock
        self._enter = enter

    async def first_version(
        self,
        role: TrainerRole,
        publisher: Publisher,
        ledger: Ledger,
        boot: int,
        *,
        restarted: bool = False,
    ) -> tuple[int, EvalResult]:
        """Resume or begin; returns the step done so far, and the evaluation from before the first.

        `restarted`: go on from the newest checkpoint, if there is one, whatever the config says.
        """
        resume, own = self._config.resume, role.checkpoints
        found = None
        if restarted:
            found = await own.read_newest()
        elif resume is not None and self._config.goes_on:
            found = await _found(own, resume.step)
        if found is not None:
            step, parts = found
            await self._backend.load(own.backend_directory(step))
            await asyncio.to_thread(own.set_aside, step)
            await role.restore(step, parts)
            await publisher.resume(step, await self._backend.snapshot())
            role.inbox.term = current_term(ledger, publisher.order, boot)
            logger.info("resumed at step %d", step)
            return step, summary.read_result(ledger.get(EVALUATION_BEFORE))
        step = 0
        if resume is not None and resume.dir is not None:
            step = await self._fork(resume.dir, resume.step, role)
        elif self._config.warmup is not None:
            self._enter("warm-up")
            with self._clock.phase("warm-up"):
                await self._warm_up(self._config.warmup)
        before = await self.evaluate()
        ledger.set(EVALUATION_BEFORE, summary.write_result(before))
        await role.checkpoint(step)
        await publisher.resume(step, await self._backend.snapshot())
        return step, before

    async def _fork(self, directory: Path, wanted: int | None, role: TrainerRole) -> int:
        """Begin where a checkpoint of another run is; returns its step."""
        theirs = Checkpoints(directory / CHECKPOINTS, keep_last=1)
        found = await _found(theirs, wanted)
        if found is None:
            raise UsageError(f"{directory} has no checkpoint to begin from")
        step, parts = found
        await self._backend.load(theirs.backend_directory(step))
        await role.restore(step, fork(step, parts))
        logger.info("this run begins where %s was after step %d", directory, step)
        return step

    async def evaluate(self) -> EvalResult:
        """The policy of now on held-out prompts."""
        prompts = self._config.evaluation.prompts
        if not prompts:
            return EvalResult(0, 0.0, 0.0)
        self._enter("evaluating")
        with self._clock.phase("evaluate"):
            return await self._evaluator.evaluate(
                await self._backend.state(),
                split="eval",
                first=0,
                prompts=prompts,
                seed=self._config.seed,
            )

    async def _warm_up(self, config: WarmupConfig) -> None:
        if not isinstance(self._backend, SupervisedBackend):
            raise UsageError("this backend cannot warm up: remove the [warmup] section")

        async def accuracy(state: State) -> float:
            result = await self._evaluator.evaluate(
                state,
                split="train",
                first=WARMUP_EVAL_TASKS,
                prompts=config.eval_prompts,
                seed=self._config.seed,
            )
            return result.exact

        async with aclosing(demonstrations(self._environment)) as examples:
            await warm_up(
                self._backend, examples, config, evaluate=accuracy, progress=show_progress
            )


async def _found(checkpoints: Checkpoints, step: int | None) -> tuple[int, dict[str, bytes]] | None:
    """The checkpoint of `step`, or the newest that is whole. Raises StorageError."""
    if step is None:
        return await checkpoints.read_newest()
    return step, await checkpoints.read(step)


def show_progress(progress: WarmupProgress) -> None:
    """One line per evaluation."""
    logger.info(
        "warm-up step %d | loss %.3f | exact %.3f", progress.step, progress.loss, progress.accuracy
    )


async def demonstrations(environment: Environment) -> AsyncGenerator[tuple[list[int], list[int]]]:
    """(prompt, reply) token ids of training tasks that RL will never lease. Raises UsageError."""

    async def make(index: int) -> tuple[list[int], list[int]]:
        task = await environment.task(index)
        reply = await environment.demonstration(task)
        if reply is None:
            raise UsageError(
                f"{environment.name} has no demonstrations: remove the [warmup] section"
            )
        return await environment.prompt(task), reply

    async def make_some(first: int) -> list[tuple[list[int], list[int]]]:
        return await asyncio.gather(*map(make, range(first, first + MADE_AT_ONCE)))

    ahead = asyncio.create_task(make_some(WARMUP_TASKS))
    try:
        for first in count(WARMUP_TASKS + MADE_AT_ONCE, MADE_AT_ONCE):
            made = await ahead
            ahead = asyncio.create_task(make_some(first))  # while these are learned
            for one in made:
                yield one
    finally:
        ahead.cancel()
        await asyncio.wait([ahead])
