"""What SQLite does not notice in its own files: a damaged log, and a changed byte within a row.

Invariants: nothing here changes a row; a file that is not known to be damaged passes. Without these checks the
commits behind a damaged byte of the log would be dropped in silence.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from ...crypto.hashing import digest_parts

LOG = "-wal"
"""Suffix of the write-ahead log beside a database."""
_LOG_HEADER = struct.Struct(">8I")
_FRAME_HEADER = struct.Struct(">6I")
_LOG_MAGIC = 0x377F0682
"""The lowest bit says in which byte order checksums are computed."""
_PIECE = 1 << 20
_STAMP = 60
"""Offset of the user version in a database's header, which SQLite leaves to programs: here a checksum."""
_MARK = 68
"""Offset of the application id, which SQLite leaves to programs as well: here a number of the caller's."""


def log_damage(path: Path) -> str:
    """Return what is wrong with the log of the database `path`; "" if nothing is.

    SQLite reads a log up to the first frame whose checksum is wrong. At the end of a log that is a transaction
    that was never committed, and right; where later transactions follow, they would be lost. A changed mark of
    the last but one's end is not told from a cut: then two are lost.
    """
    log = path.with_name(path.name + LOG)
    try:
        data = log.read_bytes()
    except FileNotFoundError:
        return ""
    if len(data) <= _LOG_HEADER.size:
        return ""
    magic, _, page, _, salt_1, salt_2, *sums = _LOG_HEADER.unpack_from(data)
    order = ">" if magic & 1 else "<"
    if magic & ~1 != _LOG_MAGIC or _checksum(data[:24], order, (0, 0)) != tuple(sums):
        return f"the header of {log.name}"
    frames = _frames(data, page)
    while frames and frames[-1][1] != (salt_1, salt_2):
        frames.pop()  # an older log left it
    state, whole = (sums[0], sums[1]), 0
    for start, salts, _ in frames:
        if salts != (salt_1, salt_2):
            break
        body = start + _FRAME_HEADER.size
        state = _checksum(data[start : start + 8], order, state)
        state = _checksum(data[body : body + page], order, state)
        if state != _FRAME_HEADER.unpack_from(data, start)[4:]:
            break
        whole += 1
    lost = sum(commits for _, _, commits in frames[whole:])
    return f"{log.name}, in front of {lost - 1} committed transactions" if lost > 1 else ""


def _frames(data: bytes, page: int) -> list[tuple[int, tuple[int, int], bool]]:
    """Return the offset and the salts of each frame, and whether it commits."""
    size = _FRAME_HEADER.size + page
    frames: list[tuple[int, tuple[int, int], bool]] = []
    for start in range(_LOG_HEADER.size, len(data) - size + 1, size):
        _, commits, salt_1, salt_2, *_ = _FRAME_HEADER.unpack_from(data, start)
        frames.append((start, (salt_1, salt_2), commits > 0))
    return frames


def _checksum(data: bytes, order: str, state: tuple[int, int]) -> tuple[int, int]:
    """Compute the checksum of SQLite's logs over `data`, going on from `state`."""
    one, two = state
    for first, second in struct.iter_unpack(f"{order}2I", data):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


def stamp(path: Path, mark: int, *, fsync: bool) -> None:
    """Write a checksum of the closed database `path` into its header, with `mark`, below 2**31.

    Nothing happens while it has a log. Raises OSError.
    """
    if path.with_name(path.name + LOG).exists():
        return
    with path.open("r+b") as file:
        file.seek(_MARK)
        file.write(struct.pack(">I", mark))
        file.seek(_STAMP)
        file.write(struct.pack(">I", 0))
        file.flush()
        checksum = _file_checksum(path)
        file.seek(_STAMP)
        file.write(struct.pack(">I", checksum))
        file.flush()
        if fsync:
            os.fsync(file.fileno())


def is_changed(path: Path) -> bool:
    """Return whether the database `path` has other bytes than it was stamped with. Raises OSError."""
    with path.open("rb") as file:
        file.seek(_STAMP)
        return struct.unpack(">I", file.read(4))[0] != _file_checksum(path)


def _file_checksum(path: Path) -> int:
    """Compute a checksum, never 0, of a database without its stamp."""
    return int.from_bytes(digest_parts(_pieces(path))[:4], "big") or 1


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(_STAMP)
        file.seek(_STAMP + 4)
        while piece := file.read(_PIECE):
            yield piece
