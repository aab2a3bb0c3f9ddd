"""Files of whole policies, read in an engine's process: tensors, or adapters on a base.

Adapters are merged on the engine's device, tensor by tensor, so neither the base nor the merged weights are
held twice. The merged weights have the bits of weights/adapters.merge().
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..ops.gpus import machine_memory
from ..weights.adapters import PREFIX, WEIGHT, A, B
from .handover import ADAPTERS

BLOCK = 1 << 24
"""Elements merged at once, 12 bytes each beside the result: most matrices at once, because on a GPU that others
use each operation waits for its turn."""
PINNED_SHARE = 0.5
"""Share of this machine's free memory for a base that every version is merged into."""


class PolicyFile:
    """Reader of one policy file; every method opens the files anew."""

    def __init__(self, path: str, kept: "KeptBase | None" = None) -> None:
        """Open a file that handover.py wrote. `kept`: base tensors that are already in memory."""
        self.path, self._kept = path, kept
        with safe_open(path, framework="pt") as reader:
            told = (reader.metadata() or {}).get(ADAPTERS)
        self._files, self._scale = [path], 0.0
        self.adapted = told is not None
        """Whether the file has adapters on a base."""
        if told is not None:
            base = json.loads(told)
            self._scale = float(base["scale"])
            self._files = sorted(map(str, Path(base["directory"]).glob("*.safetensors")))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the policy, by name."""
        return {name: tuple(reader.get_slice(name).get_shape()) for name, reader in self._readers()}

    def unmerged(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors without adapters: enough to see where each belongs."""
        return ((name, reader.get_tensor(name)) for name, reader in self._readers())

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors of the policy; those with adapters are on `device`.

        The others are on the CPU.
        """
        return self._merged(device) if self.adapted else self.unmerged()

    def changing(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors with adapters, on `device`.

        Two policies on one base can differ only in these.
        """
        return self._merged(device, others=False)

    def _readers(self) -> Iterator[tuple[str, Any]]:
        """Iterate over the names of all tensors, each with the open file that has it."""
        for path in self._files:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():
                    yield name, reader

    def _merged(self, device: torch.device, *, others: bool = True) -> Iterator[tuple[str, Tensor]]:
        kept, adapters = self._kept or KeptBase(), self._adapters(device)
        for name, reader in self._readers():
            module = name.removesuffix(WEIGHT)
            if module in adapters:
                weight = kept.get(name, reader).to(device, non_blocking=True)
                pair = adapters[module]
                yield name, add_product(weight, *pair, self._scale) if pair else weight
            elif others:
                yield name, reader.get_tensor(name)

    def _adapters(self, device: torch.device) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Return A and B on `device` by module; None where no bit of B is set.

        All are copied at once and without queries to the device: each separate copy or query would wait until
        other users of the device have had their turn.
        """
        with safe_open(self.path, framework="pt") as reader:
            tensors: dict[str, Tensor] = {name: reader.get_tensor(name) for name in reader.keys()}
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        if device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        copies = {
            name: part.view(tensor.shape)
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }
        modules = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        return {
            module.removeprefix(PREFIX): (copies[module + A], copies[module + B])
            if bool(tensors[module + B].view(torch.int16).any())
            else None
            for module in modules
        }


class KeptBase:
    """Weights of one base in pinned memory, which a GPU reads several times as fast as a file."""

    def __init__(self, room: int = 0) -> None:
        """`room`: bytes that may be kept; other tensors are read from their file every time."""
        self._room = room
        self._tensors: dict[str, Tensor] = {}

    @classmethod
    def for_device(cls, device: torch.device) -> "KeptBase":
        """Make one with as much room as this machine can spare; none without a GPU."""
        spare = machine_memory().available if device.type == "cuda" else 0
        return cls(int(PINNED_SHARE * spare))

    def get(self, name: str, reader: Any) -> Tensor:
        """Return a tensor of the base, which `reader` has open."""
        if name in self._tensors:
            return self._tensors[name]
        tensor = reader.get_tensor(name)
        if tensor.nbytes > self._room:
            return tensor
        self._room -= tensor.nbytes
        self._tensors[name] = tensor.pin_memory()
        return self._tensors[name]


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute weights/adapters.add_product() with torch, to the same bits, for a nonzero B.

    All are bf16: W [out, in], A [rank, in], B [out, rank].
    """
    rows, columns = weight.shape
    merged, left, right = torch.empty_like(weight), b.double(), a.double()
    step = max(1, BLOCK // max(1, columns))
    for row in range(0, rows, step):
        part = slice(row, row + step)
        product = left[part] @ right
        scaled = torch.empty(product.shape, dtype=torch.float32, device=product.device)
        torch.mul(product, scale, out=scaled)  # computed in float64, then rounded
        torch.add(scaled, weight[part], out=merged[part])  # computed in float32, then rounded
    return merged
