"""Copies of a model's weights on its own device: a switch between a few versions copies within its memory.

Invariants: a copy has the bits that the model had when it was made; copies take no more of the device than the
memory plan says, and leave ROOM of it free; once the model's tensors have moved, no copy is used.
"""

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from ..gpus import machine_memory
from ..memory_plan.memory import auditor_copies

ROOM = 2**30
"""Device memory that copies and updates leave free, bytes."""


class WeightCopies:
    """Copies by the caller's keys. The one used longest ago makes room for a new one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: OrderedDict[int, list[Tensor]] = OrderedDict()
        """Key -> bytes of each of the model's storages."""
        self._addresses: list[int] = []
        """Addresses of the storages that were copied."""

    def keep(self, key: int, parameters: Iterable[Tensor]) -> list[int]:
        """Copy a model's parameters; return the keys of all copies, without `key` if there is no room."""
        storages = self._storages(parameters)
        size = sum(map(len, storages))
        most = auditor_copies(size)
        room = self._copies.pop(key, None)
        while self._copies and len(self._copies) >= most:
            _, room = self._copies.popitem(last=False)
        if most and room is None and self._free() > size + ROOM:
            room = [torch.empty_like(storage) for storage in storages]
        if most and room is not None:
            _copy(storages, room)
            self._copies[key] = room
        return list(self._copies)

    def recall(self, key: int, parameters: Iterable[Tensor]) -> None:
        """Write a copy into the model's parameters. Raises LookupError if it is not kept."""
        storages = self._storages(parameters)
        copy = self._copies.get(key)
        if copy is None:
            raise LookupError(f"copy {key} of the weights is not kept")
        self._copies.move_to_end(key)
        _copy(copy, storages)

    def clear(self) -> None:
        """Give the memory of all copies back to the device."""
        self._copies.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _storages(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the bytes of each storage once [bytes] uint8; forget all copies if one has moved."""
        unique = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in parameters}
        if list(unique) != self._addresses:
            self._copies.clear()
            self._addresses = list(unique)
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        return [nothing.new_empty(0).set_(storage) for storage in unique.values()]

    def _free(self) -> int:
        """Return the bytes of the device that are free."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return machine_memory().available


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)  # pyright: ignore
