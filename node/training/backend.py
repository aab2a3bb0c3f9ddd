"""The trainer backend seam: a batch in, one optimizer step, a bf16 policy out.

All computation is off the event loop. Implementations: local_backend.py (one process), fsdp_backend.py (ranks),
tests/support/counting_backend.py (fake). Suite: tests/conformance/test_backend.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..config.training import TrainingConfig
from ..ops.gpus import is_on_gpu
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
    """The environment's tokens that LossConfig.echo_alpha is for; none of them is in `mask`."""
    hint: list[int] = field(default_factory=list[int])
    """Tokens that a teacher alone reads before the others (LossConfig.hint)."""
    given: bool = False
    """Whether it is a demonstration (training.sft), whose tokens with `mask` were not sampled."""
    environment: str = ""
    """Its name: SampleTerms are those of an environment."""
    routes: bytes = b""
    """One route for each token with `mask`, in order, as they travel (protocol/rollouts.py: BranchRecord): that
    of the token before it. Empty: the trainer's own routers choose."""


class SampleTerms(msgspec.Struct, frozen=True):
    """How the samples of one environment were drawn, and what they are learned by."""

    temperature: float
    loss: str
    """LossConfig as JSON."""


Example = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, completion token ids with the stop token)."""

Objective = Literal["policy", "ce"]
"""`policy`: the configured loss; `ce`: plain cross entropy of the trained tokens."""


@dataclass(frozen=True)
class TrainBatch:
    """What one optimizer step learns from; `step` counts from 1 and trains policy `step - 1`."""

    step: int
    samples: list[Sample]
    objective: Objective = "policy"


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one step, by prime-rl's names: `loss/mean`, `mismatch_kl/all/mean`, `optim/grad_norm`,
    `optim/lr`, `entropy/all/mean`, `time/forward_backward`, `tokens`."""

    values: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Snapshot:
    """A policy, and where it may differ from the snapshot that was taken before it."""

    state: State
    base: State | None = None
    """The state of the snapshot before; None: there is none, `changed` says nothing."""
    changed: Changed = field(default_factory=dict[str, NDArray[np.int64] | None])

    def changed_since(self, base: State) -> Changed | None:
        """What to tell encode_delta() about a delta on `base`; None if `base` is another object.

        A snapshot that was never published is the base of the next one: by its equal looks no
        state can be told from it, so only the very object counts.
        """
        return self.changed if base is self.base else None


class TrainBackend(Protocol):
    """Owns model, optimizer and schedule."""

    async def start(self, model_dir: Path) -> None:
        """Build model and optimizer; `model_dir` holds a Hugging Face model (config and weights)."""
        ...

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """One optimizer step; an empty batch only advances the schedule. Raises EngineError."""
        ...

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Cross entropy per trained token, nothing learned: `loss/mean` and `tokens`. Raises EngineError."""
        ...

    async def state(self) -> State:
        """The bf16 policy as it would be published now."""
        ...

    async def snapshot(self) -> Snapshot:
        """state(), with what changed since the last snapshot(), found where the weights are."""
        ...

    async def save(self, directory: Path) -> None:
        """Write everything that resume needs (model, optimizer, scheduler, RNG) into `directory`.

        The caller makes it durable (fsync).
        """
        ...

    async def load(self, directory: Path) -> None:
        """Continue exactly from what save() wrote."""
        ...

    async def export(self, directory: Path) -> None:
        """Write the bf16 policy in Hugging Face format, tokenizer and config included."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


logger = logging.getLogger(__name__)

ALONE = {"ranks": 1, "nodes": 1, "replicas": 1, "rendezvous": ""}
"""The ranks of a learner that has one GPU for itself: nothing is sharded (world.py)."""


def resolve_backend(config: TrainingConfig, visible: Callable[[], Sequence[str]]) -> TrainingConfig:
    """`config` with a backend that is "local" or "fsdp": "auto" is one rank where there is a GPU, else local.

    `visible` names the GPUs that a process may use; it is asked only where that matters.
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
