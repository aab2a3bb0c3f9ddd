"""The interface of trainer backends: a batch in, one optimizer step, a bf16 policy out.

All computation is off the event loop. Implementations: local_backend.py (one process), fsdp_backend.py (ranks),
tests/support/counting_backend.py (fake). Suite: tests/conformance/test_backend.py.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..config.training import TrainingConfig
from ..gpus import is_on_gpu
from ..weights.state import Changed, State


@dataclass(frozen=True)
class Sample:
    """One training sequence of T tokens. All lists have length T; position 0 is never trained.

    `logprobs` are the sampler's (behaviour policy); `advantage` applies to every token with `mask`.
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantage: float
    echo: list[bool] | None = None
    """Mask of the environment's tokens trained with weight LossConfig.echo_alpha; disjoint from `mask`."""
    hint: list[int] = field(default_factory=list[int])
    """Tokens that only a teacher reads, before the others (LossConfig.hint)."""
    reference: list[float] = field(default_factory=list[float])
    """Logprobs of the tokens by a teacher behind an endpoint (LossConfig.endpoint); empty: none."""
    given: bool = False
    """Whether the sample is a demonstration (training.sft); its tokens with `mask` were not sampled."""
    environment: str = ""
    """Name of the environment; selects its SampleTerms."""
    routes: bytes = b""
    """One route for each token with `mask`, in order, in the wire format (protocol/rollouts.py: BranchRecord):
    the route of the token before it. Empty: the trainer's own routers choose."""
    support: bytes = b""
    """Supports of the tokens with `mask`, in the wire format: the sampler's and the trainer's logprobs are over
    these. Empty: over all tokens."""


class SampleTerms(msgspec.Struct, frozen=True):
    """Sampling temperature and loss of the samples of one environment."""

    temperature: float
    loss: str
    """LossConfig as JSON."""


Example = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, completion token ids with the stop token)."""

Objective = Literal["policy", "ce"]
"""`policy`: the configured loss; `ce`: plain cross entropy of the trained tokens."""


@dataclass(frozen=True)
class TrainBatch:
    """Samples of one optimizer step; `step` counts from 1 and trains policy `step - 1`."""

    step: int
    samples: list[Sample]
    objective: Objective = "policy"


SKIPPED, RUINED = "optim/skipped", "optim/ruined"
"""Metrics of a step: 1 if its gradient was not finite, so that no weight was changed; 1 if it made weights that
are not finite, else absent."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, by prime-rl's names.

    `loss/mean`, `mismatch_kl/all/mean`, `optim/grad_norm`, `optim/lr`, `entropy/all/mean`,
    `time/forward_backward`, `tokens`.
    """

    values: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Snapshot:
    """A policy, and the positions where it may differ from the previous snapshot."""

    state: State
    base: State | None = None
    """State of the previous snapshot; None: there is none, and `changed` is meaningless."""
    changed: Changed = field(default_factory=dict[str, NDArray[np.int64] | None])

    def changed_since(self, base: State) -> Changed | None:
        """Return the changes for encode_delta() on `base`; None if `base` is another object.

        A snapshot that was never published is still the base of the next one, and a state that compares equal
        proves nothing: only object identity counts.
        """
        return self.changed if base is self.base else None


class TrainBackend(Protocol):
    """Owner of the model, optimizer and schedule."""

    async def start(self, model_dir: Path) -> None:
        """Build model and optimizer; `model_dir` holds a Hugging Face model (config and weights)."""
        ...

    async def compile_step(self) -> None:
        """Compile what a step computes, where it is compiled; changes nothing. Raises EngineError."""
        ...

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Make one optimizer step; an empty batch only advances the schedule. Raises EngineError."""
        ...

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Measure cross entropy per trained token without learning: `loss/mean` and `tokens`.

        Raises EngineError.
        """
        ...

    async def state(self) -> State:
        """Return the bf16 policy as it would be published now."""
        ...

    def snapshot(self) -> "asyncio.Future[Snapshot]":
        """Begin to read state() and its changes since the last snapshot(), found on the weights' device.

        It is the policy at this call: a step asked for afterwards waits until it may change the weights. Raises
        EngineError, here or in the future.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write everything needed to resume (model, optimizer, scheduler, RNG) into `directory`.

        The caller makes it durable (fsync).
        """
        ...

    async def load(self, directory: Path) -> None:
        """Continue exactly from the files that save() wrote."""
        ...

    async def adopt(self, file: Path, step: int) -> None:
        """Go on after `step` with the published policy in `file` (safetensors), moments and RNG unchanged.

        Weights that are the same in bf16 keep their exact values. Raises EngineError for another model's file.
        """
        ...

    async def write_masters(self, file: Path) -> None:
        """Write the fp32 masters of all trained parameters, by name and whole, to a safetensors file.

        Raises EngineError.
        """
        ...

    async def read_masters(self, file: Path, step: int) -> None:
        """Go on after `step` with the masters in such a file, bit by bit; moments and RNG stay.

        Raises EngineError.
        """
        ...

    async def export(self, directory: Path) -> None:
        """Write the bf16 policy in Hugging Face format, tokenizer and config included."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


logger = logging.getLogger(__name__)

ALONE = {"ranks": 1, "nodes": 1, "replicas": 1, "rendezvous": ""}
"""Settings of a learner with one GPU of its own: nothing is sharded (world.py)."""


def resolve_backend(config: TrainingConfig, visible: Callable[[], Sequence[str]]) -> TrainingConfig:
    """Return `config` with backend "auto" resolved to one fsdp rank on a GPU, else to "local".

    `visible` lists the GPUs that a process may use; it is called only where the answer matters.
    """
    if config.backend == "fsdp":
        return config
    gpu = is_on_gpu(config.device, visible)
    if config.backend == "auto" and gpu:
        fsdp = config.fsdp.model_copy(update=ALONE)
        return config.model_copy(update={"backend": "fsdp", "fsdp": fsdp})
    if gpu:
        logger.warning(
            'training.backend = "local" computes in the daemon: on a GPU its network stands still for seconds '
            "at a time; leave it out, and the learner has a process of its own"
        )
    return config.model_copy(update={"backend": "local"})
