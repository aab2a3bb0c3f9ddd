"""Learning rates as pure functions of the step number, so that resume needs no scheduler state."""

import math

from ..config.training import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 1).

    Rises linearly to `lr` over `warmup_steps`; then `constant` stays there, `linear` and `cosine` (half a
    period) fall to lr * min_lr_ratio at `max_steps`, where they stay.
    """
    if step < 1:
        raise ValueError("steps count from 1")
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.scheduler == "constant":
        return config.lr
    span = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.scheduler == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * progress)
