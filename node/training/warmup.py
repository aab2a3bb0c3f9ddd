"""Supervised warm-up: teach the form of an answer until reinforcement learning has something to reward.

It stops at the target, not at convergence: the rest is learned by the run itself.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..config.run import WarmupConfig
from ..weights.state import State
from .backend import Example

logger = logging.getLogger(__name__)

LR_WARMUP_STEPS = 20


@runtime_checkable
class SupervisedBackend(Protocol):
    """What a warm-up needs of a trainer backend; LocalBackend has it."""

    async def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """One cross-entropy step; returns the loss per token."""
        ...

    async def end_supervised(self) -> None:
        """Reset the optimizer."""
        ...

    async def state(self) -> State:
        """The bf16 policy as it would be published now."""
        ...


@dataclass(frozen=True)
class WarmupProgress:
    """One evaluation on the way."""

    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class WarmupResult:
    """Where the warm-up ended; `accuracy` below the target means that `max_steps` or the examples ran out."""

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
    """Cross entropy on (prompt, completion) pairs until `evaluate` reaches `config.target`.

    `evaluate` gives the share of sampled completions that are right, on as many prompts as
    `config.eval_prompts` says: with 256 its standard error at 0.28 is 0.028. It is asked every
    `eval_interval` steps and at the end. The optimizer is reset afterwards, also after an error.
    """
    started = clock()
    step, accuracy = 0, 0.0
    try:
        while step < config.max_steps and accuracy < config.target:
            batch = await _next_batch(examples, config.batch_size)
            if not batch:
                break
            step += 1
            rate = config.lr * min(1.0, step / LR_WARMUP_STEPS)
            loss = await backend.supervised_step(batch, rate)
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
    """The next `size` examples; fewer, or none, where they end."""
    batch: list[Example] = []
    while len(batch) < size:
        try:
            batch.append(await anext(examples))
        except StopAsyncIteration:
            break
    return batch
