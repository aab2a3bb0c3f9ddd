"""Model state as named tensors of bits, their digests, and where a state changed.

A tensor's data is its storage bits as unsigned integers, so -0.0, NaN and every bf16 pattern survive.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import digest_parts
from ..errors import EngineError

BITS: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
    "I16": np.dtype("<u2"),
    "U16": np.dtype("<u2"),
    "F32": np.dtype("<u4"),
    "I32": np.dtype("<u4"),
    "U32": np.dtype("<u4"),
    "F64": np.dtype("<u8"),
    "I64": np.dtype("<u8"),
    "U64": np.dtype("<u8"),
}
"""safetensors dtype name -> the unsigned integer that holds one element's bits."""
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True)
class Tensor:
    """One tensor: safetensors dtype name, shape, and its elements' bits, flat and contiguous."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]

    def __post_init__(self) -> None:
        if self.data.dtype != BITS[self.dtype] or self.data.size != numel(self.shape):
            raise ValueError(
                f"{self.dtype} {self.shape} does not fit {self.data.dtype} x {self.data.size}"
            )


State = Mapping[str, Tensor]
"""Tensor name (as in the Hugging Face checkpoint) -> tensor. Tied tensors appear once."""

Changed = Mapping[str, NDArray[np.int64] | None]
"""Tensor name -> flat positions that may have changed, or None for all of it; others have not changed."""


def floats(tensor: Tensor) -> NDArray[Any]:
    """Read the numbers of a tensor, flat: those of bf16 as fp32, the bits of other types unchanged."""
    if tensor.dtype == "BF16":
        return (tensor.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    kind = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(tensor.dtype)
    return tensor.data if kind is None else tensor.data.view(kind)


def numel(shape: Iterable[int]) -> int:
    """Count the elements of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def tensor_digest(tensor: Tensor) -> bytes:
    """Compute BLAKE3 over dtype, shape and the little-endian bits."""
    header = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return digest_parts(
        [
            len(header).to_bytes(4, "little"),
            header,
            np.ascontiguousarray(tensor.data).data.cast("B"),
        ]
    )


def state_digest(tensors: Mapping[str, bytes]) -> bytes:
    """Compute BLAKE3 over the sorted (name, tensor digest) pairs; `tensors` maps name to tensor digest."""
    parts: list[bytes] = []
    for name in sorted(tensors):
        encoded = name.encode()
        parts += [len(encoded).to_bytes(4, "little"), encoded, tensors[name]]
    return digest_parts(parts)


def digests(state: State) -> dict[str, bytes]:
    """Digest of every tensor of `state`."""
    return {name: tensor_digest(tensor) for name, tensor in state.items()}


MEMORY_THREADS = 8
"""Threads that copy, hash, compare and merge states; more would wait for memory."""


def memory_threads() -> int:
    """Return MEMORY_THREADS, or the number of this machine's cores if that is smaller."""
    return min(MEMORY_THREADS, os.cpu_count() or 1)


class PendingChanges:
    """Collect, over several steps, where a state may differ from the one that an engine holds.

    Too much is safe (the values are taken from the new state), too little never is: elements not known to be
    unchanged count as changed. Starts with everything.
    """

    def __init__(self) -> None:
        self._changed: Changed | None = None

    def all(self) -> None:
        """Count everything as changed: after a snapshot, or a load that failed."""
        self._changed = None

    def none(self) -> None:
        """Count nothing as changed: the engine holds the newest state."""
        self._changed = {}

    def add(self, changed: Changed | None) -> None:
        """Add the changes of one step; None: unknown."""
        if changed is None or self._changed is None:
            self._changed = None
            return
        self._changed = {
            **self._changed,
            **{name: _union(self._changed, name, changed) for name in changed},
        }

    @property
    def changed(self) -> Changed | None:
        """Return the changes to write; None: everything."""
        return self._changed


def _union(changed: Changed, name: str, more: Changed) -> NDArray[np.int64] | None:
    added = more[name]
    if name not in changed:
        return added
    before = changed[name]
    return None if before is None or added is None else _merge(before, added)


def _merge(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge two sorted runs, each position once, by a stable sort; union1d is 100x slower."""
    both = np.concatenate((first, second))
    both.sort(kind="stable")
    return both[np.concatenate(([True], both[1:] != both[:-1]))] if both.size else both


class WeightsError(Exception):
    """Base of everything that makes a policy version unusable here."""


class CodecError(WeightsError):
    """The payload cannot be encoded or decoded; the message names the tensor and the reason."""


class WrongBase(WeightsError):
    """The delta is for another state; fetch a snapshot or the missing deltas."""


class DigestMismatch(WeightsError):
    """A decoded tensor is not the one in the signed manifest."""


class NoPath(WeightsError):
    """Wait for a snapshot, or ask another peer for older manifests."""


def check_update(state: State, changed: Changed) -> None:
    """Raise EngineError unless `changed` has only positions of tensors of `state`."""
    for name, positions in changed.items():
        if name not in state:
            raise EngineError(f"the update changes {name!r}, which the state lacks: load the state")
        if positions is None:
            continue
        if positions.dtype != np.int64 or positions.ndim != 1:
            raise EngineError(f"the positions of {name!r} are not flat int64: load the state")
        size = state[name].data.size
        if positions.size and not 0 <= positions.min() <= positions.max() < size:
            raise EngineError(
                f"the update changes positions of {name!r} outside 0..{size - 1}: load the state"
            )
