"""The ranks that save and load together: they all succeed, or all of them raise the same StorageError.

Collective: every rank calls the same methods in the same order. Imports torch: import lazily.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ...ops.errors import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MESSAGE = 1000
"""Bytes of an error that other ranks are told."""

FAILURES = (OSError, SafetensorError, ValueError, KeyError, RuntimeError)
"""What reading, writing and planning a checkpoint throws; each becomes a StorageError of all ranks."""


@dataclass(frozen=True)
class Ranks:
    """One rank among `size`; `group` is a gloo group on which nobody else talks at the same time."""

    rank: int = 0
    size: int = 1
    group: "dist.ProcessGroup | None" = None

    @classmethod
    def join(cls, timeout_s: float) -> "Ranks":
        """All ranks of the default process group, on a group of their own; without one, ALONE. Collective.

        A rank that is not heard of for `timeout_s` seconds is an error (RuntimeError of torch).
        """
        if not dist.is_initialized():
            return ALONE
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), dist.get_world_size(), cast(dist.ProcessGroup, group))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which makes and names directories."""
        return self.rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's result. Raises StorageError on all or none."""
        result, problem = _attempt(work)
        self.agree(problem)
        return cast(T, result)

    def first(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0 alone while the others wait. Raises StorageError on all or none."""
        self.agree(_attempt(work)[1] if self.is_first else None)

    def agree(self, problem: str | None) -> None:
        """Raise StorageError if any rank has a problem."""
        for rank, found in enumerate(self._gather((problem or "").encode()[:MESSAGE])):
            if found:
                text = found.decode(errors="replace")
                raise StorageError(text if rank == self.rank else f"rank {rank}: {text}")

    def _gather(self, message: bytes) -> list[bytes]:
        """What every rank says, by rank; at most MESSAGE bytes."""
        if self.size == 1:
            return [message]
        mine = torch.zeros(2 + MESSAGE, dtype=torch.uint8)
        framed = len(message).to_bytes(2, "big") + message
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        said = [row.numpy().tobytes() for row in rows]
        return [row[2 : 2 + int.from_bytes(row[:2], "big")] for row in said]


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or what went wrong, in words."""
    try:
        return work(), None
    except StorageError as error:
        return None, str(error)
    except FAILURES as error:
        logger.debug("checkpoint", exc_info=True)
        return None, f"{type(error).__name__}: {error}"


ALONE = Ranks()
"""One process without a process group."""
