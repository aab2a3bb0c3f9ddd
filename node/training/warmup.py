"""Supervised warm-up: teach the answers' form until reinforcement learning finds rewards.

It stops at the target accuracy, not at convergence: the run itself learns the rest.
"""

import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..config.run import WarmupConfig
from ..errors import RunFailed
from ..weights.state import State
from .backend import Example
from .skipped_steps import MAX_SKIPPED

logger = logging.getLogger(__name__)

LR_WARMUP_STEPS = 20


@runtime_checkable
class SupervisedBackend(Protocol):
    """The part of a trainer backend that a warm-up needs; LocalBackend has it."""

    async def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """Make one cross-entropy step; return the loss per token, NaN if it was skipped."""
        ...

    async def end_supervised(self) -> None:
        """Reset the optimizer."""
        ...

    async def state(self) -> State:
        """Return the bf16 policy as it would be published now."""
        ...


@dataclass(frozen=True)
class WarmupProgress:
    """Result of one evaluation during the warm-up."""

    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class WarmupResult:
    """Result of a warm-up.

    `accuracy` below the target means that `max_steps` or the examples ran out.
    """

    steps: int
    accuracy: float
    seconds: float


async def warm_up(
    backend: SupervisedBackend,
    examples: AsyncIterator[Example],
    config: WarmupConfig,
    *,
    evaluate: Callable[[State], Awaitable[float]],
    progress: Callable[[WarmupProgress], None],
    clock: Callable[[], float] = time.monotonic,
) -> WarmupResult:
    """Train on (prompt, completion) pairs until `evaluate` reaches `config.target`.

    The loss is cross entropy. `evaluate` returns the share of correct sampled completions, on
    `config.eval_prompts` prompts: with 256 its standard error at 0.28 is 0.028. It is called every
    `eval_interval` steps and at the end. The optimizer is reset afterwards, also after an error. Raises
    RunFailed after MAX_SKIPPED steps in a row without a finite gradient.
    """
    started = clock()
    step, skipped, accuracy = 0, 0, 0.0
    try:
        while step < config.max_steps and accuracy < config.target:
            batch = await _next_batch(examples, config.batch_size)
            if not batch:
                break
            step += 1
            rate = config.lr * min(1.0, step / LR_WARMUP_STEPS)
            loss = await backend.supervised_step(batch, rate)
            skipped = 0 if math.isfinite(loss) else skipped + 1
            if skipped == 1:
                logger.warning(
                    "warm-up step %d was skipped: its gradient is not finite; lower warmup.lr if the next ones "
                    "are skipped, too",
                    step,
                )
            if skipped >= MAX_SKIPPED:
                raise RunFailed(
                    f"{skipped} steps of the warm-up in a row had no finite gradient: lower warmup.lr, and "
                    "begin again with --clean"
                )
            if step % config.eval_interval == 0 or step == config.max_steps:
                accuracy = await evaluate(await backend.state())
                progress(WarmupProgress(step, loss, accuracy, clock() - started))
        if step and step % config.eval_interval and step != config.max_steps:
            accuracy = await evaluate(await backend.state())
    finally:
        await backend.end_supervised()
    result = WarmupResult(step, accuracy, clock() - started)
    logger.info("warm-up: %d steps, accuracy %.3f, %.1fs", step, accuracy, result.seconds)
    return result


async def _next_batch(examples: AsyncIterator[Example], size: int) -> list[Example]:
    """Return the next `size` examples; fewer, or none, at the end."""
    batch: list[Example] = []
    while len(batch) < size:
        try:
            batch.append(await anext(examples))
        except StopAsyncIteration:
            break
    return batch
