"""Where in a pipeline a process computes, and where it finds its port: all that it has to be told."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from ...protocol.pipelines import PipelinePlan, PipelineShape, Stage
from .frame import Frame


class StagePlace(msgspec.Struct, frozen=True):
    """One stage of a plan, for the process that computes it."""

    plan: PipelinePlan
    rank: int
    socket: str
    """Path of the Unix socket at which this node's process relays frames; empty for a port in memory."""

    @property
    def stage(self) -> Stage:
        """Its layers."""
        return self.plan.stages[self.rank]

    @property
    def shape(self) -> PipelineShape:
        """What all stages agree on."""
        return self.plan.shape

    @property
    def first(self) -> bool:
        """Whether it reads tokens, and schedules."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether it draws tokens."""
        return self.rank == len(self.plan.stages) - 1


Later = Callable[[], Frame]
"""Waits for a micro-batch that a device computes, in another thread. Raises EngineError."""


class StageCompute(Protocol):
    """What a stage that does not schedule computes with; see stage_loop.py. Called by one thread."""

    def reset(self) -> None:
        """Forget all sequences."""
        ...

    def switch(self, version: int) -> None:
        """Write the weights that were prepared for `version`. Raises EngineError if none were."""
        ...

    def step(self, frame: Frame) -> "Frame | Later":
        """Compute a micro-batch: what the next stage gets, or what was drawn. Raises EngineError.

        A stage on a device may return a function that waits for it: the next micro-batch is begun meanwhile.
        """
        ...
