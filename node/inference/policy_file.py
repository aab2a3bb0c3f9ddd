"""Files of whole policies, read in an engine's process: tensors, or adapters on a base.

Adapters are merged on the engine's device, tensor by tensor, so neither the base nor the merged weights are
held twice. The merged weights have the bits of weights/adapters.merge().
"""

import json
import logging
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..gpus import machine_memory
from ..models.tensors import from_torch, to_torch, torch_dtype
from ..weights.adapters import PREFIX, WEIGHT, A, B, add_product
from ..weights.checkpoint import read_flat
from ..weights.state import memory_threads
from .handover import ADAPTERS

logger = logging.getLogger(__name__)

ALIGN = 256
"""Bytes to which the tensors of a kept base are aligned."""
PINNED_SHARE = 0.5
"""Share of this machine's free memory for a base that every version is merged into, of all ranks together."""


class PolicyFile:
    """Reader of one policy file; every method opens the files anew."""

    def __init__(self, path: str, base_tensors: "KeptBase | None" = None) -> None:
        """Open a file that handover.py wrote. `base_tensors`: those that are already in memory."""
        self.path, self._kept = path, base_tensors
        with safe_open(path, framework="pt") as reader:
            adapters = (reader.metadata() or {}).get(ADAPTERS)
        self._files, self._scale = [path], 0.0
        self.adapted = adapters is not None
        """Whether the file has adapters on a base."""
        if adapters is not None:
            base = json.loads(adapters)
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
        adapters = self._adapters(device)
        names = [module + WEIGHT for module in adapters]
        bases = {} if self._kept is None else self._kept.read(self._files, names)
        scale = torch.full((1,), self._scale, dtype=torch.float64, device=device)
        for name, reader in self._readers():
            module = name.removesuffix(WEIGHT)
            if module in adapters:
                weight, pair = bases.get(name), adapters[module]
                if weight is None or pair is None:
                    weight = (reader.get_tensor(name) if weight is None else weight).to(device)
                yield name, weight if pair is None else _add_product(weight, *pair, scale)
            elif others:
                yield name, reader.get_tensor(name)

    def _adapters(self, device: torch.device) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Return A and B on `device` by module; None where no bit of B is set.

        All are read and copied at once and without queries to the device: each separate copy or query would
        wait until other users of the device have had their turn.
        """
        path = Path(self.path)
        flat = torch.empty(path.stat().st_size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        tensors = read_flat(path, flat.numpy())
        copy = flat.to(device, non_blocking=True)

        def tensor(name: str) -> Tensor:
            dtype, shape, part = tensors[name]
            return copy[part].view(torch_dtype(dtype)).view(shape)

        modules = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        return {
            module.removeprefix(PREFIX): (tensor(module + A), tensor(module + B))
            if _has_bits(flat[tensors[module + B][2]])
            else None
            for module in modules
        }


def _has_bits(values: Tensor) -> bool:
    """Return whether any bit of `values`, uint8, is set; most often that of one of the first."""
    return bool(values[:16].any()) or bool(values.any())


class KeptBase:
    """Weights of one base in pinned memory, which a GPU reads several times as fast as a file."""

    def __init__(self, room: int) -> None:
        """`room`: bytes that may be kept."""
        self._room = room
        self._tensors: dict[str, Tensor] | None = None

    @classmethod
    def for_device(cls, device: torch.device, ranks: int) -> "KeptBase | None":
        """Make one with as much room as this machine can spare for each of `ranks`; None without a GPU."""
        if device.type != "cuda":
            return None
        return cls(int(PINNED_SHARE * machine_memory().available) // ranks)

    def read(self, files: Sequence[str], names: Collection[str]) -> Mapping[str, Tensor]:
        """Return the tensors of these names, which are read once; none where there is no room for all."""
        if self._tensors is None:
            self._tensors = self._read(files, frozenset(names))
        return self._tensors

    def _read(self, files: Sequence[str], names: frozenset[str]) -> dict[str, Tensor]:
        with ExitStack() as opened:
            readers = [opened.enter_context(safe_open(path, framework="pt")) for path in files]
            mapped: dict[str, Tensor] = {  # not read yet
                name: reader.get_tensor(name)
                for reader in readers
                for name in reader.keys()
                if name in names
            }
            sizes = [-(-tensor.nbytes // ALIGN) * ALIGN for tensor in mapped.values()]
            if not 0 < sum(sizes) <= self._room:
                return {}
            memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            starts = accumulate(sizes[:-1], initial=0)
            mapped_to = {
                name: flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for start, (name, tensor) in zip(starts, mapped.items(), strict=True)
            }
            with ThreadPoolExecutor(memory_threads()) as pool:  # pages are made as they are written
                list(pool.map(Tensor.copy_, mapped_to.values(), mapped.values()))
        return mapped_to if pin(flat) else {}


def pin(flat: Tensor) -> bool:
    """Lock memory that torch did not allocate, and let GPUs read it, as long as this process runs.

    Returns whether that was possible.
    """
    runtime: Any = torch.cuda.cudart()
    try:
        torch.cuda.check_error(int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)))
    except RuntimeError as error:
        logger.warning("the base of adapters is read from its files each time: %s", error)
        with suppress(RuntimeError):  # CUDA tells its error once more to whoever calls it next
            torch.zeros(1, device="cuda").add_(1)
        return False
    return True


def _add_product(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    if a.is_cuda:
        from .kernels import add_product_on_gpu

        return add_product_on_gpu(weight, a, b, scale)
    return to_torch(add_product(from_torch(weight), from_torch(a), from_torch(b), scale.item()))
