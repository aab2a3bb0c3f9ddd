"""A State as a safetensors file: any tool of the trade can read it, and this file needs no torch.

Files are replaced whole or not at all, and read as hostile: every offset is checked before a byte is.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import StorageError
from ..storage.chunk_store import Disk, write_atomic
from .state import BITS, State, Tensor, numel
from .state_history import layout

METADATA = "__metadata__"
MAX_HEADER = 100_000_000
"""Bytes of the header; the safetensors library refuses longer ones, too."""
ALIGN = 8

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _Entry(msgspec.Struct):
    """One tensor in the header of the file; offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_ENTRY = msgspec.json.Decoder(_Entry)
"""Made here, not by the first of several threads: types of msgspec 0.22 are not safe for that."""


def write_checkpoint(
    path: Path,
    state: State,
    *,
    metadata: Mapping[str, str] | None = None,
    disk: Disk | None = None,
) -> None:
    """Write `state` to `path`, atomically and durably. Equal states give equal files.

    `metadata` comes back from read_metadata(). Raises StorageError.
    """
    # Widest elements first, so that every tensor is aligned; the library orders them so, too.
    layouts = layout(state)
    names = sorted(state, key=lambda name: (-BITS[layouts[name].dtype].itemsize, name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name in names:
        tensor = layouts[name]
        end = at + tensor.nbytes
        header[name] = _Entry(tensor.dtype, tensor.shape, (at, end))
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % ALIGN)
    if len(text) > MAX_HEADER or METADATA in state:
        raise StorageError(f"{path}: these tensor names do not fit a safetensors header")
    head = [len(text).to_bytes(8, "little"), text]
    write_atomic(path, chain(head, (_bytes(state[name]) for name in names)), disk)


def read_checkpoint(path: Path) -> State:
    """Read every tensor of a safetensors file, bits as stored. Raises StorageError."""
    with _opened(path) as file:
        _, entries = _header(path, file)
        return {name: _tensor(path, file, name, entry) for name, entry in entries}


def read_flat(path: Path, into: NDArray[np.uint8]) -> dict[str, tuple[str, tuple[int, ...], slice]]:
    """Read the bytes of all tensors at once to the start of `into`, which is at least as long as the file.

    Returns the dtype and the shape of each tensor, and its part of `into`. Raises StorageError.
    """
    with _opened(path) as file:
        _, entries = _header(path, file)
        size = entries[-1][1].data_offsets[1] if entries else 0
        if file.readinto(into[:size].data) != size:
            raise _corrupt(path, "it ends inside a tensor")
    return {name: (entry.dtype, entry.shape, slice(*entry.data_offsets)) for name, entry in entries}


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file, without its tensors. Raises StorageError."""
    with _opened(path) as file:
        return _header(path, file)[0]


@contextmanager
def _opened(path: Path) -> Generator[BufferedReader]:
    """Open a file to read; an OSError is a StorageError."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _bytes(tensor: Tensor) -> memoryview:
    return np.ascontiguousarray(tensor.data).data.cast("B")


def _header(path: Path, file: BinaryIO) -> tuple[dict[str, str], list[tuple[str, _Entry]]]:
    """Read the metadata, and the tensors in the order of their bytes; leaves `file` where these begin."""
    size = path.stat().st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise _corrupt(path, "its header does not fit")
    try:
        fields = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop(METADATA, b"{}"), type=dict[str, str])
        entries = {name: _ENTRY.decode(raw) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(path, f"its header is malformed ({error})") from error
    ordered = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    at = 0
    for name, entry in ordered:
        at = _check(path, name, entry, at)
    if at != size - 8 - length:
        raise _corrupt(path, f"it holds {size - 8 - length} bytes of tensors, not {at}")
    return metadata, ordered


def _check(path: Path, name: str, entry: _Entry, at: int) -> int:
    """Return where the next tensor must begin, if this one begins at `at` and has the stated length."""
    if entry.dtype not in BITS:
        raise _corrupt(path, f"{name} has the unknown dtype {entry.dtype!r}")
    begin, end = entry.data_offsets
    if begin != at or end - begin != numel(entry.shape) * BITS[entry.dtype].itemsize:
        raise _corrupt(path, f"the offsets of {name} are wrong")
    return end


def _tensor(path: Path, file: BinaryIO, name: str, entry: _Entry) -> Tensor:
    count = numel(entry.shape)
    data = np.fromfile(file, BITS[entry.dtype], count)
    if data.size != count:
        raise _corrupt(path, f"it ends inside {name}")
    return Tensor(entry.dtype, entry.shape, data)


def _corrupt(path: Path, why: str) -> StorageError:
    return StorageError(f"{path} is not a sound safetensors file, {why}: fetch or write it again")
