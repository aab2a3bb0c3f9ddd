"""The ranks that train one model together, and their collectives.

Imports torch: import lazily. Every method is collective: all ranks call it, in the same order. Every collective
has a deadline; a rank that misses it ends, and with it all ranks (rank_group.py).
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.training import TrainingConfig
from ..errors import EngineError, StorageError, one_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

MESSAGE = 1000
"""Bytes of an error message sent to other ranks."""
FAILURES = (OSError, SafetensorError, ValueError, KeyError, RuntimeError)
"""Errors of reading, writing and planning a checkpoint; each becomes a StorageError of all ranks."""
_MISSING = re.compile(r"Ranks? ([\d, ]+) failed to pass")


@dataclass(frozen=True)
class World:
    """One rank's view: its number, its device and the groups that it shares tensors with."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """Mesh over which parameters are sharded: one dimension, or replicas x shards. None: nothing is sharded."""
    context: DeviceMesh | None = None
    """The ranks that share each sequence with this one, itself included; None: sequences are not shared."""

    @classmethod
    def alone(cls, device: torch.device) -> "World":
        """Return a single rank: nothing is sharded or exchanged."""
        return cls(0, 1, device)

    @classmethod
    def join(cls, config: TrainingConfig) -> "World":
        """Return the rank named by the environment, once all ranks are there.

        A single rank is as in alone(). Raises EngineError.
        """
        size = int(os.environ["WORLD_SIZE"])
        copies, sharers = config.fsdp.replicas, config.context_parallel
        if size % copies or size % sharers or (size // copies) % sharers:
            raise EngineError(
                f"{size} ranks are not divisible by fsdp.replicas {copies} and context_parallel "
                f"{sharers}: change one of them"
            )
        device = _own_device(config)
        if size == 1:
            return cls.alone(device)
        deadline = timedelta(seconds=config.fsdp.timeout_s)
        backends = "cpu:gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, timeout=deadline)
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
        """Whether this rank acts for all."""
        return self.rank == 0

    @property
    def context_size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.context.size() if self.context is not None else 1

    @property
    def context_rank(self) -> int:
        """Index of this rank's part of a sequence."""
        return self.context.get_local_rank() if self.context is not None else 0

    @property
    def data_size(self) -> int:
        """Number of shares that a batch is split into."""
        return self.size // self.context_size

    @property
    def data_rank(self) -> int:
        """Index of this rank's share."""
        return self.rank // self.context_size

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the maxima over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def close(self) -> None:
        """End the process group."""
        if self.mesh is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        # on the CPU: gloo sums in the same order on all ranks, without waiting for a device
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, operation)
        return numbers.tolist()


class RanksMissing(Exception):
    """Some ranks did not arrive; only rank 0 knows which."""

    def __init__(self, ranks: list[int], detail: str) -> None:
        super().__init__(detail)
        self.ranks = ranks


@dataclass(frozen=True)
class RankChannel:
    """A gloo group of all ranks for one purpose beside training: calls, or checkpoints.

    Collective. Bytes are sent as they are: nothing is unpickled. Each purpose has its own channel, so that
    messages of different purposes are never confused. The default is a single rank.
    """

    rank: int = 0
    size: int = 1
    group: "dist.ProcessGroup | None" = None
    timeout_s: float = 0.0

    @classmethod
    def open(cls, timeout_s: float) -> "RankChannel":
        """Open a new group beside the default one; without a default group, a channel of one rank.

        Silence of a rank for `timeout_s` seconds is an error (torch's RuntimeError).
        """
        if not dist.is_initialized():
            return cls(timeout_s=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        members = cast(dist.ProcessGroup, group)  # every rank is in it
        return cls(dist.get_rank(), dist.get_world_size(), members, timeout_s)

    def broadcast(self, data: bytes | None, limit: int) -> bytes:
        """Send the bytes of rank 0, `limit` at most, to every rank; the others pass None."""
        if self.group is None:
            assert data is not None  # there are no other ranks
            return data
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, 0, group=self.group)
        count = int(length)
        if not 0 < count <= limit:
            raise ValueError(f"{count} bytes were sent, at most {limit} can be")
        body = torch.empty(count, dtype=torch.uint8)
        if data is not None:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(body, 0, group=self.group)
        return body.numpy().tobytes()

    def gather(self, number: int) -> list[int]:
        """Gather one number from every rank, in order."""
        return [int(row) for row in self._gather(torch.tensor([number]))]

    def meet(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here. Raises RanksMissing."""
        if self.group is None:
            return
        limit = timedelta(seconds=timeout_s or self.timeout_s)
        try:
            dist.monitored_barrier(self.group, timeout=limit, wait_all_ranks=True)
        except RuntimeError as error:
            match = _MISSING.search(str(error))
            ranks = [int(rank) for rank in match[1].split(",")] if match else []
            raise RanksMissing(ranks, one_line(error)) from error

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result.

        Raises StorageError on all ranks or none.
        """
        result, problem = _attempt(work)
        self._agree(problem)
        return cast(T, result)

    def first(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 alone while the others wait.

        Raises StorageError on all ranks or none.
        """
        self._agree(None if self.rank else _attempt(work)[1])

    def _agree(self, problem: str | None) -> None:
        message = (problem or "").encode()[:MESSAGE]
        mine = torch.zeros(2 + MESSAGE, dtype=torch.uint8)
        framed = len(message).to_bytes(2, "big") + message
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        for rank, row in enumerate(self._gather(mine)):
            received = row.numpy().tobytes()
            if text := received[2 : 2 + int.from_bytes(received[:2], "big")].decode(
                errors="replace"
            ):
                raise StorageError(text if rank == self.rank else f"rank {rank}: {text}")

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [mine]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return rows


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result, or the error as text."""
    try:
        return work(), None
    except StorageError as error:
        return None, str(error)
    except FAILURES as error:
        logger.debug("checkpoint", exc_info=True)
        full = "the disk is full: make room, then go on with --resume: "
        cause = f"{type(error).__name__}: {error}"
        return None, full * ("No space left on device" in cause) + cause


def pick_device(name: str) -> str:
    """Return the device type: `auto` is cuda if available, else cpu."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _own_device(config: TrainingConfig) -> torch.device:
    if pick_device(config.device) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "PYTORCH_ALLOC_CONF" not in os.environ:
        # packs of many lengths fragment memory: 3 of 43 GiB at 0.6B, which the auditor lacked. Not as an
        # environment variable: vLLM's processes, which inherit those, cannot sleep with it
        core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
        if hasattr(core, "_accelerator_setAllocatorSettings"):  # torch 2.10
            core._accelerator_setAllocatorSettings("expandable_segments:True")
    if config.gpu_memory_utilization < 1:
        torch.cuda.set_per_process_memory_fraction(config.gpu_memory_utilization, device)
    return device
