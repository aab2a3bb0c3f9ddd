"""The ranks that train one model together, and what they tell each other. Imports torch: import lazily.

Every method is collective: all ranks call it, in the same order. Every collective has a deadline; a rank that
misses it ends, and with it all of them (fsdp.py sees to that).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.training import TrainingConfig
from ..ops.errors import EngineError


@dataclass(frozen=True)
class World:
    """One rank's view: who it is, and with whom it shares what."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """What parameters are sharded over: one dimension, or replicas x shards. None: nothing is sharded."""
    context: DeviceMesh | None = None
    """The ranks that share each sequence with this one, itself included; None: it has them for itself."""

    @classmethod
    def alone(cls, device: torch.device) -> "World":
        """A rank without others: nothing is sharded, and there is nobody to talk to."""
        return cls(0, 1, device)

    @classmethod
    def join(cls, config: TrainingConfig) -> "World":
        """The rank that the environment names, once all are there; as alone(), where it is the only one.

        Raises EngineError.
        """
        size = int(os.environ["WORLD_SIZE"])
        copies, sharers = config.fsdp.replicas, config.context_parallel
        if size % copies or size % sharers or (size // copies) % sharers:
            raise EngineError(
                f"{size} ranks are not divisible by fsdp.replicas {copies} and context_parallel "
                f"{sharers}: change one of them"
            )
        if size == 1:
            return cls.alone(torch.device(pick_device(config.device)))
        device = _own_device(config)
        deadline = timedelta(seconds=config.fsdp.timeout_s)
        dist.init_process_group(_backends(device), timeout=deadline)
        rank = dist.get_rank()
        shape, names = ((size,), ("shard",))
        if copies > 1:
            shape, names = (copies, size // copies), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        context = None
        if sharers > 1:
            both = init_device_mesh(
                device.type, (size // sharers, sharers), mesh_dim_names=("data", "context")
            )
            context = both["context"]
        return cls(rank, size, device, mesh, context)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    @property
    def context_size(self) -> int:
        """Ranks that share a sequence."""
        return self.context.size() if self.context is not None else 1

    @property
    def context_rank(self) -> int:
        """Which part of a sequence is this rank's."""
        return self.context.get_local_rank() if self.context is not None else 0

    @property
    def data_size(self) -> int:
        """Shares that a batch is cut into."""
        return self.size // self.context_size

    @property
    def data_rank(self) -> int:
        """Which share is this rank's."""
        return self.rank // self.context_size

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Maxima over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def close(self) -> None:
        """End the process group."""
        if self.mesh is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        # on the CPU: gloo sums in the same order on all ranks, and nobody waits for a device
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, operation)
        return numbers.tolist()


def pick_device(name: str) -> str:
    """`auto` is cuda where there is one, else cpu."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _own_device(config: TrainingConfig) -> torch.device:
    if pick_device(config.device) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _backends(device: torch.device) -> str:
    return "cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
