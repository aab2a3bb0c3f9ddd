"""A whole policy as an engine's process reads it: a file of its tensors, or one of adapters on a base's files.

Adapters are merged on the engine's device, tensor by tensor, so neither the base nor the merged weights are
held a second time. The bits are those of weights/adapters.merge().
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..weights.adapters import PREFIX, WEIGHT, A, B
from .handover import ADAPTERS

BLOCK = 1 << 22
"""Elements merged at once, 20 bytes each."""


class PolicyFile:
    """Reads one; every method opens the files anew."""

    def __init__(self, path: str) -> None:
        """Of a file that handover.py wrote."""
        self._path = path
        with safe_open(path, framework="pt") as reader:
            told = (reader.metadata() or {}).get(ADAPTERS)
        self._files, self._scale = [path], 0.0
        self.adapted = told is not None
        """Whether it has adapters on a base."""
        if told is not None:
            base = json.loads(told)
            self._scale = float(base["scale"])
            self._files = sorted(map(str, Path(base["directory"]).glob("*.safetensors")))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the policy."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self._files:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():
                    found[name] = tuple(reader.get_slice(name).get_shape())
        return found

    def unmerged(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, without adapters: enough to see where each belongs."""
        for path in self._files:
            with safe_open(path, framework="pt") as reader:
                for name in reader.keys():
                    yield name, reader.get_tensor(name)

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the policy by name; those with adapters on `device`, others on the CPU."""
        return self._merged(device) if self.adapted else self.unmerged()

    def changing(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """On `device`, the tensors that have adapters: all in which two policies on one base can differ."""
        return self._merged(device, others=False)

    def _merged(self, device: torch.device, *, others: bool = True) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self._path, framework="pt") as adapters:
            have = set(adapters.keys())
            for path in self._files:
                with safe_open(path, framework="pt") as reader:
                    for name in reader.keys():
                        module = PREFIX + name.removesuffix(WEIGHT)
                        if module + A in have:
                            a, b = (adapters.get_tensor(module + part) for part in (A, B))
                            weight = reader.get_tensor(name).to(device)
                            yield (
                                name,
                                add_product(weight, a.to(device), b.to(device), self._scale),
                            )
                        elif others:
                            yield name, reader.get_tensor(name)


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The bits of weights/adapters.add_product(), by torch: bf16 W [out, in], A [rank, in], B [out, rank]."""
    if not bool((b != 0).any()):
        return weight
    rows, columns = weight.shape
    merged, left, right = torch.empty_like(weight), b.double(), a.double()
    step = max(1, BLOCK // max(1, columns))
    for row in range(0, rows, step):
        part = slice(row, row + step)
        product = (left[part] @ right).mul_(scale).float()
        merged[part] = product.add_(weight[part])
    return merged
