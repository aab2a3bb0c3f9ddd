"""How the ranks hear what rank 0 was asked, and agree on what came of it. Imports torch: import lazily.

Every method is collective and has a deadline. Bytes are broadcast as they are: nothing is unpickled. The group
is used for nothing else, so whoever falls out of a training step cannot be taken for an answer here.
"""

import os
import re
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...ops.errors import one_line
from .calls import MAX_FRAME

CONFIG_KEY = "primerl/config"
CONFIG_TIMEOUT_S = 120.0
_RANKS = re.compile(r"Ranks? ([\d, ]+) failed to pass")


class Missing(Exception):
    """Some ranks did not come; rank 0 knows which."""

    def __init__(self, ranks: list[int], detail: str) -> None:
        super().__init__(detail)
        self.ranks = ranks


@dataclass(frozen=True)
class Wire:
    """A gloo group of all ranks; `timeout_s` is how long one is waited for."""

    group: "dist.ProcessGroup | None"
    """None: there is one rank, which has nobody to talk to."""
    rank: int
    size: int
    timeout_s: float

    @classmethod
    def open(cls, timeout_s: float) -> "Wire":
        """A new group beside the default one; without that one, a rank alone."""
        if not dist.is_initialized():
            return cls(None, 0, 1, timeout_s)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        return cls(group, dist.get_rank(), dist.get_world_size(), timeout_s)

    def share(self, data: bytes | None) -> bytes:
        """What rank 0 has, on every rank; the others pass None. Raises RuntimeError of torch."""
        if self.group is None:
            assert data is not None  # there are no others
            return data
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, 0, group=self.group)
        count = int(length)
        if not 0 < count <= MAX_FRAME:
            raise ValueError(f"{count} bytes were shared, at most {MAX_FRAME} can be")
        body = torch.empty(count, dtype=torch.uint8)
        if data is not None:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(body, 0, group=self.group)
        return body.numpy().tobytes()

    def gather(self, number: int) -> list[int]:
        """One number of every rank, in order."""
        if self.group is None:
            return [number]
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([number]), group=self.group)
        return [int(one) for one in found]

    def meet(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks are here. Raises Missing."""
        if self.group is None:
            return
        limit = timedelta(seconds=timeout_s or self.timeout_s)
        try:
            dist.monitored_barrier(self.group, timeout=limit, wait_all_ranks=True)
        except RuntimeError as error:
            raise Missing(_named(str(error)), one_line(error)) from error


def hand_out_config(config: str | None, size: int, rank: int) -> str:
    """The configuration that rank 0 was given, on every rank, before there is a process group.

    Through the store that torchrun runs; the others pass None. Raises RuntimeError of torch.
    """
    if size == 1 and config is not None:
        return config
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=CONFIG_TIMEOUT_S)
    store = TCPStore(address, port, size, is_master=False, timeout=timeout, multi_tenant=True)
    if config is not None:
        store.set(CONFIG_KEY, config)
        return config
    return store.get(CONFIG_KEY).decode()


def lost_the_others(error: BaseException) -> bool:
    """Whether a rank failed because another one did not answer, as far as one can tell."""
    known = (Missing, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or "gloo/" in str(error)


def _named(text: str) -> list[int]:
    found = _RANKS.search(text)
    return [int(one) for one in found[1].split(",")] if found else []
