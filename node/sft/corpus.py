"""Rows of many large files by number, memory-mapped: nothing but the offsets of rows is kept in memory.

A row's number is fixed by the order of the files and the lines in them: resume depends on that.
"""

import mmap
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import digest_parts
from ..errors import StorageError, UsageError
from .rows import BadRow

BLOCK = 1 << 26
NEWLINE, RETURN = 10, 13


class RowFile:
    """The lines of one file of JSON lines that are not empty."""

    def __init__(self, path: Path, label: str) -> None:
        """`label` is the file that the user knows. Raises StorageError."""
        self.label = label
        self.name = Path(label).name
        self._data: mmap.mmap | bytes = b""
        try:
            with path.open("rb") as file:
                if path.stat().st_size:
                    self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StorageError(f"cannot read {label} ({error}): correct data.files") from error
        self.size = len(self._data)
        self._starts, self._ends = _lines(self._data)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int, limit: int) -> bytes:
        """One line. Raises BadRow if it has more than `limit` bytes."""
        start, end = int(self._starts[index]), int(self._ends[index])
        if end - start > limit:
            raise BadRow("too_big", f"the row has {end - start} bytes: raise data.max_row_mib")
        return self._data[start:end]

    def where(self, index: int) -> str:
        """file:line, counted from 1 as editors do."""
        before = int(self._starts[index])
        lines = 1
        for start in range(0, before, BLOCK):
            lines += self._data[start : min(before, start + BLOCK)].count(b"\n")
        return f"{self.label}:{lines}"

    def close(self) -> None:
        """Unmap the file."""
        if isinstance(self._data, mmap.mmap):
            self._data.close()


class Corpus:
    """All rows of several files, numbered through."""

    def __init__(self, files: Sequence[RowFile], *, max_row_bytes: int) -> None:
        """Raises UsageError if there is no row at all."""
        self._files = [file for file in files if len(file)]
        self._limit = max_row_bytes
        self._firsts = [0, *accumulate(len(file) for file in self._files)]
        if not self._files:
            names = ", ".join(file.label for file in files) or "nothing"
            raise UsageError(f"no rows in the data ({names[:200]}): correct data.files")

    def __len__(self) -> int:
        return self._firsts[-1]

    def read(self, index: int) -> bytes:
        """Row number `index`. Raises BadRow."""
        file, inside = self._find(index)
        return file.read(inside, self._limit)

    def where(self, index: int) -> str:
        """file:line of a row."""
        file, inside = self._find(index)
        return file.where(inside)

    def identity(self) -> str:
        """Which files, of how many rows and bytes: on other data rows would be learned twice or never."""
        names = [f"{file.name} {len(file)} {file.size}\n".encode() for file in self._files]
        return digest_parts(names).hex()

    def close(self) -> None:
        """Unmap all files."""
        for file in self._files:
            file.close()

    def _find(self, index: int) -> tuple[RowFile, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = bisect_right(self._firsts, index) - 1
        return self._files[place], index - self._firsts[place]


def _lines(data: mmap.mmap | bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First byte of every line that is not empty, and the byte after its last; int64 [lines] each."""
    size = len(data)
    breaks = [np.empty(0, dtype=np.int64)]
    for start in range(0, size, BLOCK):
        block = np.frombuffer(data[start : min(size, start + BLOCK)], dtype=np.uint8)
        breaks.append(np.flatnonzero(block == NEWLINE).astype(np.int64) + start)
    ends = np.concatenate([*breaks, np.array([size], dtype=np.int64)])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
    length = ends - starts
    kept = length > 0
    for place in np.flatnonzero(length == 1):
        kept[place] = data[int(starts[place])] != RETURN
    return starts[kept], ends[kept]
