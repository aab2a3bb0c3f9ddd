"""Start a run: resume from its own checkpoint or another run's, or warm up; publish a first version."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path

from ..config.run import ResumeConfig, RunConfig, WarmupConfig
from ..environments.environment import Environment, EnvironmentFailed
from ..errors import EngineError, NodeError, UsageError
from ..evaluation.evaluator import EvalResult, EvalSampling, EvalTask, Evaluator
from ..ops.metrics import PhaseClock
from ..reports import summary
from ..storage.ledger import Ledger
from ..storage.run_files import CHECKPOINTS, COPY_MARK, is_copy
from ..tasks import end_tasks
from ..trainer.loop import TrainerRole
from ..trainer.state import current_epoch, fork, state_of
from ..training.backend import TrainBackend
from ..training.checkpoint import Checkpoints
from ..training.warmup import SupervisedBackend, WarmupProgress, warm_up
from ..weights.checkpoint import write_checkpoint
from ..weights.state import State

logger = logging.getLogger(__name__)

WARMUP_TASKS = 1 << 40
"""Warm-up examples come from this index of the training split on: RL never leases them."""
WARMUP_EVAL_TASKS = 1 << 41
MADE_AT_ONCE = 128
"""Examples that are requested together."""
PROMPTS_READ = 8
"""Tasks of each environment whose prompts are measured before a run begins."""
EVALUATION_BEFORE = "evaluation_before"
POLICY = "policy.safetensors"
"""File beside the checkpoints by which a learner takes over a published version."""


class Startup:
    """Brings a trainer to its first version, and evaluates policies."""

    def __init__(
        self,
        config: RunConfig,
        environments: Sequence[Environment],
        backend: TrainBackend,
        evaluator: Evaluator,
        clock: PhaseClock,
        enter: Callable[[str, str], None],
    ) -> None:
        """`environments` are those of the run; `enter` is called with the phase, and how far it is."""
        self._config = config
        self._environments = environments
        self._backend = backend
        self._evaluator = evaluator
        self._clock = clock
        self._enter = enter
        self._begins = False
        """Whether the first version of this start is the first of the run."""

    async def first_version(
        self,
        role: TrainerRole,
        ledger: Ledger,
        boot: int,
        *,
        restarted: bool = False,
    ) -> int:
        """Resume or begin; returns the step done so far.

        `restarted`: go on from the newest checkpoint, if there is one, also without config.resume.
        """
        resume = self._config.resume
        saved = await self._saved(role, ledger, restarted=restarted)
        if saved is not None:
            step, parts = saved
            await asyncio.to_thread(role.resume_points.drop, step)
            await role.restore(step, parts)
            copied = is_copy(self._config.run_dir)
            await role.publisher.resume(step, await self._backend.snapshot(), copied=copied)
            if copied:
                (self._config.run_dir / COPY_MARK).unlink()
            role.submissions.resume(current_epoch(ledger, role.publisher.order, boot), step)
            logger.info("resumed at step %d", step)
            return step
        step, self._begins = 0, True
        if resume is not None and resume.dir is not None:
            step = await self._fork(resume, resume.dir, role)
        elif self._config.warmup is not None:
            self._enter("warm-up", "")
            with self._clock.phase("warm-up"):
                await self._warm_up(self._config.warmup)
            self._clock.reach("warm-up")
        await role.publisher.resume(step, await self._backend.snapshot())
        self._clock.reach("first version")
        await role.begin_checkpoint(step)  # written while workers draw the first batch
        return step

    async def _saved(
        self, role: TrainerRole, ledger: Ledger, *, restarted: bool
    ) -> tuple[int, dict[str, bytes]] | None:
        """Load what this run goes on from; return its step and parts, or None if the run begins here."""
        resume, own = self._config.resume, role.checkpoints
        if restarted:
            checkpoint = await own.read_newest()
        elif resume is not None and self._config.goes_on:
            checkpoint = await own.read_selected(resume)
        else:
            return None
        if checkpoint is not None:
            await self._backend.load(own.backend_directory(checkpoint[0]))
            await asyncio.to_thread(own.set_aside, checkpoint[0])
        if restarted or resume is None or resume.step is None:
            return await self._catch_up(role, ledger, checkpoint)
        return checkpoint

    async def _catch_up(
        self, role: TrainerRole, ledger: Ledger, checkpoint: tuple[int, dict[str, bytes]] | None
    ) -> tuple[int, dict[str, bytes]] | None:
        """Go on from `checkpoint`, which is loaded, to the newest version that was announced.

        Returns step and parts of that version's resume point; the checkpoint, where there is none. Without a
        checkpoint, as the first one takes its time, the optimizer begins anew.
        """
        step = -1 if checkpoint is None else checkpoint[0]
        for point in await asyncio.to_thread(role.resume_points.newest_first, step):
            saved = state_of(point.parts)
            if saved is None or saved.ledger not in ("", ledger.ledger_id()):
                logger.warning("resume point %d is of another run: passed over", point.step)
                continue
            state = await role.publisher.announced(point.step)
            if state is None:
                continue
            file = role.checkpoints.directory / POLICY
            try:
                await asyncio.to_thread(write_checkpoint, file, state)
                await self._backend.adopt(file, point.step)
            except EngineError as error:
                if checkpoint is None:
                    raise
                logger.warning("versions after %d are void: %s", step, error)
                await self._backend.load(role.checkpoints.backend_directory(step))
                break
            finally:
                file.unlink(missing_ok=True)
            logger.info(
                "the weights are those of version %d, the optimizer's moments %s",
                point.step,
                f"those of step {step}" if checkpoint else "begin anew",
            )
            return point.step, point.parts
        return checkpoint

    async def _fork(self, resume: ResumeConfig, directory: Path, role: TrainerRole) -> int:
        """Begin from a checkpoint of another run in `directory`; returns its step."""
        other = Checkpoints(directory / CHECKPOINTS, keep_last=1)
        checkpoint = await other.read_selected(resume)
        assert checkpoint is not None, "read_selected() raises where another run has none"
        step, parts = checkpoint
        await self._backend.load(other.backend_directory(step))
        await role.restore(step, fork(step, parts))
        logger.info("this run begins where %s was after step %d", directory, step)
        return step

    async def evaluate_before(self, ledger: Ledger, step: int, state: State) -> EvalResult:
        """Return the evaluation of the policy that the run began with; make it if that is `state`, of `step`.

        Zeros where it fails, or an earlier start was ended before it was made: training does not depend on it.
        """
        known = ledger.get(EVALUATION_BEFORE)
        if known is not None or not (self._begins or step == 0):
            return summary.read_result(known)
        try:
            result = await self._evaluate(state)
        except (NodeError, EnvironmentFailed) as error:
            logger.error("version %d could not be evaluated: %s", step, error)
            return summary.read_result(None)
        ledger.set(EVALUATION_BEFORE, summary.write_result(result))
        return result

    async def evaluate_after(self, state: State) -> EvalResult:
        """Evaluate the last policy. Raises EngineError, EnvironmentFailed."""
        if self._config.evaluation.prompts:
            self._enter("evaluating", "")
        return await self._evaluate(state)

    async def _evaluate(self, state: State) -> EvalResult:
        """Evaluate a policy on held-out prompts of the run's own environments."""
        prompts = self._config.evaluation.prompts
        if not prompts:
            return EvalResult(0, 0.0, 0.0)
        with self._clock.phase("evaluate"):
            return await self._evaluator.evaluate(
                state,
                own_tasks(self._config, self._environments, prompts),
                split="eval",
                first=0,
                seed=self._config.seed,
            )

    async def _warm_up(self, config: WarmupConfig) -> None:
        if not isinstance(self._backend, SupervisedBackend):
            raise UsageError("this backend cannot warm up: remove the [warmup] section")

        own = own_tasks(self._config, self._environments, config.eval_prompts)
        shown = [task for task in own if await has_demonstrations(task.environment)]
        if not shown:
            names = ", ".join(task.name for task in own)
            raise UsageError(f"{names} has no demonstrations: remove the [warmup] section")

        async def accuracy(state: State) -> float:
            result = await self._evaluator.evaluate(
                state, shown, split="train", first=WARMUP_EVAL_TASKS, seed=self._config.seed
            )
            return result.exact

        def show(progress: WarmupProgress) -> None:
            logger.info(
                "warm-up step %d | loss %.3f | exact %.3f",
                progress.step,
                progress.loss,
                progress.accuracy,
            )
            right = (
                f"{progress.accuracy:.0%} of its answers right, the target is {config.target:.0%}"
            )
            self._enter("warm-up", f"step {progress.step} of {config.max_steps} at most, {right}")

        async with aclosing(demonstrations([task.environment for task in shown])) as examples:
            fitting = within(examples, self._config.training.seq_len, config.batch_size)
            await warm_up(self._backend, fitting, config, evaluate=accuracy, progress=show)
        self._enter("warm-up", "")


def own_tasks(
    config: RunConfig, environments: Sequence[Environment], prompts: int
) -> list[EvalTask]:
    """Make evaluations of the run's own environments, `prompts` tasks of each."""
    samples, tasks = config.evaluation.samples, list[EvalTask]()
    for own, environment in zip(config.mixture, environments, strict=True):
        own_sampling = config.sampling_of(own)
        sampling = EvalSampling(
            own_sampling.max_tokens,
            own_sampling.temperature,
            top_p=own_sampling.top_p,
            top_k=own_sampling.top_k,
        )
        tasks.append(EvalTask(own.name, environment, prompts, samples, sampling=sampling))
    return tasks


async def check_prompts(
    names: Sequence[str], environments: Sequence[Environment], longest: int, replies: Sequence[int]
) -> None:
    """Raise UsageError for an environment whose prompts leave no room for a reply within `longest` tokens.

    Logs those that leave less room than a reply takes: `replies` tokens, by environment, where one less than
    `longest` asks for whatever is left.
    """

    async def tokens(environment: Environment, index: int) -> int:
        return len(await environment.prompt(await environment.task(index)))

    for name, environment, reply in zip(names, environments, replies, strict=True):
        lengths = await asyncio.gather(
            *(tokens(environment, index) for index in range(PROMPTS_READ))
        )
        if min(lengths) >= longest:
            raise UsageError(
                f"the prompts of {name} have {min(lengths)} tokens and more, and a sequence of this run has "
                f"{longest} at most, reply included: raise training.seq_len (the model's positions and "
                "engine.max_model_len count, too)"
            )
        if max(lengths) + reply > longest and reply < longest - 1:
            logger.warning(
                "a prompt of %s has %d tokens, and with sampling.max_tokens (%d) more than the %d of a "
                "sequence: replies end after %d; raise training.seq_len (the model's positions and "
                "engine.max_model_len count, too), or lower sampling.max_tokens",
                name,
                max(lengths),
                reply,
                longest,
                longest - max(lengths),
            )


async def within(
    examples: AsyncIterator[tuple[list[int], list[int]]], seq_len: int, enough: int
) -> AsyncGenerator[tuple[list[int], list[int]]]:
    """Leave out examples of more than `seq_len` tokens: nothing is learned from them.

    Raises UsageError if the first `enough` are too long, all of them.
    """
    fits, shortest, left_out = 0, 0, 0
    try:
        async for prompt, reply in examples:
            length = len(prompt) + len(reply)
            if length <= seq_len:
                fits += 1
                yield prompt, reply
                continue
            left_out += 1
            shortest = min(shortest or length, length)
            if left_out == 1:
                logger.warning(
                    "a demonstration has %d tokens, and training.seq_len is %d: such are left out of the "
                    "warm-up",
                    length,
                    seq_len,
                )
            if left_out >= enough and not fits:
                raise UsageError(
                    f"the warm-up's demonstrations have {shortest} tokens and more, and training.seq_len is "
                    f"{seq_len}: nothing could be learned, raise it"
                )
    finally:
        if fits and left_out:
            logger.warning(
                "the warm-up left out %d of %d demonstrations", left_out, fits + left_out
            )


async def has_demonstrations(environment: Environment) -> bool:
    """Return whether an environment shows right replies."""
    return await environment.demonstration(await environment.task(WARMUP_TASKS)) is not None


async def demonstrations(
    environments: Sequence[Environment],
) -> AsyncGenerator[tuple[list[int], list[int]]]:
    """Yield (prompt, reply) token ids of training tasks that RL never leases, of each environment in turn; one
    pair for each turn of a conversation.

    Raises UsageError.
    """

    async def make(index: int) -> list[tuple[list[int], list[int]]]:
        environment = environments[index % len(environments)]
        shown = await environment.demonstration(await environment.task(index))
        if shown is None:
            raise UsageError(
                f"{environment.name} has no demonstrations: remove the [warmup] section"
            )
        return shown.turns()

    async def make_some(first: int) -> list[tuple[list[int], list[int]]]:
        episodes = await asyncio.gather(*map(make, range(first, first + MADE_AT_ONCE)))
        return [turn for turns in episodes for turn in turns]

    ahead = asyncio.create_task(make_some(WARMUP_TASKS))
    try:
        for first in count(WARMUP_TASKS + MADE_AT_ONCE, MADE_AT_ONCE):
            turns = await ahead
            ahead = asyncio.create_task(make_some(first))  # while these are learned
            for turn in turns:
                yield turn
    finally:
        await end_tasks(ahead)
