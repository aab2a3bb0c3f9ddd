"""Weights in a file that another process of this user reads: a whole state, or what changed of it.

A file lives in shared memory where there is room, and never longer than the `async with` that made it.
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..ops.errors import EngineError, StorageError
from ..weights.checkpoint import write_checkpoint
from ..weights.state import BITS, Changed, State, Tensor, state_bytes

WHOLE, POSITIONS, VALUES = "whole:", "positions:", "values:"
"""In a file of changes, before a tensor's name: all of it; before a dtype: where its tensors changed, one
after the other, and what is there now. The metadata say for each dtype which tensors, and how much of
each: a few long arrays travel to a GPU much faster than many short ones."""
WHOLE_FROM = 8
"""A tensor of which more than one element in so many changed is written whole.

Positions and values take three times a value's bytes in the file, and on a GPU five times.
"""


@dataclass(frozen=True)
class Delta:
    """What to put into a file so that a reader who holds the rest gets the new state."""

    tensors: State
    spans: dict[str, str]
    """Metadata: dtype -> JSON of [[name, count], ...]."""


def make_delta(state: State, changed: Changed, whole: Collection[str]) -> Delta:
    """The changes of `state`; positions must have been checked.

    `whole` names tensors of which no single element can be written.
    """
    tensors: dict[str, Tensor] = {}
    sparse: dict[str, dict[str, NDArray[np.int64]]] = {}
    for name, positions in changed.items():
        tensor = state[name]
        if positions is None or name in whole or WHOLE_FROM * len(positions) > tensor.data.size:
            tensors[WHOLE + name] = tensor
        elif len(positions):
            sparse.setdefault(tensor.dtype, {})[name] = positions
    spans: dict[str, str] = {}
    for dtype, group in sparse.items():
        tensors |= _gathered(state, dtype, group)
        spans[dtype] = json.dumps([[name, len(positions)] for name, positions in group.items()])
    return Delta(tensors, spans)


def read_spans(text: str) -> list[tuple[str, int]]:
    """The (name, count) pairs of one dtype."""
    return [(name, count) for name, count in json.loads(text)]


def _gathered(state: State, dtype: str, group: dict[str, NDArray[np.int64]]) -> dict[str, Tensor]:
    count = sum(map(len, group.values()))
    narrow = all(state[name].data.size <= 2**31 for name in group)
    where = np.empty(count, "<u4" if narrow else "<u8")
    values = np.empty(count, BITS[dtype])
    at = 0
    for name, positions in group.items():
        end = at + len(positions)
        where[at:end] = positions
        state[name].data.take(
            positions, out=values[at:end], mode="clip"
        )  # checked: none is clipped
        at = end
    return {
        POSITIONS + dtype: Tensor("I32" if narrow else "I64", (count,), where),
        VALUES + dtype: Tensor(dtype, (count,), values),
    }


@contextlib.asynccontextmanager
async def shared_file(
    state: State, metadata: Mapping[str, str] | None = None
) -> AsyncGenerator[str]:
    """`state` as a safetensors file that only this user can read, gone afterwards. Raises EngineError."""
    with tempfile.TemporaryDirectory(
        prefix="primerl-", dir=_shared_memory(state_bytes(state)), ignore_cleanup_errors=True
    ) as directory:
        path = Path(directory) / "state.safetensors"
        try:
            await asyncio.to_thread(write_checkpoint, path, state, metadata=metadata)
        except StorageError as error:
            raise EngineError(f"the weights cannot be handed to the engine: {error}") from error
        yield str(path)


def _shared_memory(size: int) -> str | None:
    """A directory in memory with ample room for `size` bytes; None if there is none."""
    memory = "/dev/shm"
    # containers often have 64 MiB there, and writing past the end of a tmpfs kills the process
    roomy = os.path.isdir(memory) and shutil.disk_usage(memory).free > 2 * size
    return memory if roomy else None
