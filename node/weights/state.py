"""Model state as named tensors of bits, and their digests.

A tensor's data is its storage bits as unsigned integers, so -0.0, NaN and every bf16 pattern survive.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import digest_parts

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


def numel(shape: Iterable[int]) -> int:
    """Number of elements of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def tensor_digest(tensor: Tensor) -> bytes:
    """BLAKE3 over dtype, shape and the little-endian bits."""
    header = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return digest_parts(
        [
            len(header).to_bytes(4, "little"),
            header,
            np.ascontiguousarray(tensor.data).data.cast("B"),
        ]
    )


def state_digest(tensors: Mapping[str, bytes]) -> bytes:
    """BLAKE3 over the sorted (name, tensor digest) pairs; `tensors` maps name to tensor digest."""
    parts: list[bytes] = []
    for name in sorted(tensors):
        encoded = name.encode()
        parts += [len(encoded).to_bytes(4, "little"), encoded, tensors[name]]
    return digest_parts(parts)


def digests(state: State) -> dict[str, bytes]:
    """Digest of every tensor of `state`."""
    return {name: tensor_digest(tensor) for name, tensor in state.items()}


def state_bytes(state: State) -> int:
    """Bytes of all elements of `state`."""
    return sum(tensor.data.nbytes for tensor in state.values())
