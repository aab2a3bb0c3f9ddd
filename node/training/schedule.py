"""Learning rates as pure functions of the step number, so that resume needs no scheduler state."""

from ..config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 1).

    Rises linearly to `lr` over `warmup_steps`; then `constant` stays there and `linear` falls to
    lr * min_lr_ratio at `max_steps`, where it stays.
    """
    if step < 1:
        raise ValueError("steps count from 1")
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.scheduler == "constant":
        return config.lr
    span = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.lr * (1 - (1 - config.min_lr_ratio) * progress)
