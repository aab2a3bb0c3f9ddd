"""What to change where a learner does not fit: the cheapest change first."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..training_config import TrainingConfig
from .shape import ModelShape
from .trainer import LearnerPlan, plan_learner

LESS: tuple[dict[str, Any], ...] = (
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective", "head_chunk": 1024},
    {"activation_checkpointing": "full", "head_chunk": 1024},
    {"activation_checkpointing": "full", "head_chunk": 1024, "optimizer_offload": True},
)
"""Changes on one GPU; each costs more time than the one before."""
RANKS = (2, 4, 8, 16)


@dataclass(frozen=True)
class LearnerWay:
    """A change of the config, as flags, and what it leads to."""

    flags: str
    plan: LearnerPlan
    gpus: int = 1


def learner_ways(
    config: TrainingConfig, shape: ModelShape, room: int, *, gpu: bool = True
) -> Iterator[LearnerWay]:
    """The first change that fits `room` bytes on one device, and the fewest GPUs that do."""
    for changes in LESS:
        if not gpu and "optimizer_offload" in changes:
            continue
        if all(getattr(config, name) == value for name, value in changes.items()):
            continue
        plan = plan_learner(config.model_copy(update=changes), shape, gpu=gpu)
        if plan.total <= room:
            yield LearnerWay(_flags(changes), plan)
            break
    if not gpu:
        return
    for ranks in RANKS:
        for changes in ({}, LESS[0]):
            changed = config.model_copy(update=changes)
            plan = plan_learner(changed, shape, gpu=True, ranks=ranks)
            if plan.total <= room:
                fsdp = f"--training.backend fsdp --training.fsdp.ranks {ranks}"
                yield LearnerWay(f"{fsdp} {_flags(changes)}".strip(), plan, ranks)
                return


def _flags(changes: dict[str, Any]) -> str:
    words = (
        f"--training.{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in changes.items()
    )
    return " ".join(words)
