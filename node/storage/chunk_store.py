"""The chunk store: blobs named by the hash of their bytes.

What get() returns has just been hashed; what put() acknowledged survives SIGKILL and power loss.
File names are made from digests alone, never from names that peers give.
"""

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

from ...crypto.hashing import DIGEST_BYTES, digest, short
from ..errors import ADVICE, StorageError, file_error
from .partial import sync

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
CHUNKS = "chunks"
"""The folder of a node's chunks in its data directory."""


class QuotaExceeded(StorageError):
    """The store would grow beyond its limit."""


class Store(Protocol):
    """Content-addressed bytes. Safe to call from several threads; every call may block on a disk."""

    def put(self, data: bytes) -> bytes:
        """Keep `data`; returns its digest. Raises QuotaExceeded, StorageError."""
        ...

    def get(self, name: bytes) -> bytes | None:
        """Return the bytes of digest `name`, or None. Corrupt bytes are deleted and count as absent."""
        ...

    def has(self, name: bytes) -> bool:
        """Return whether `name` is kept, without reading it."""
        ...

    def size(self, name: bytes) -> int | None:
        """Return the size of `name`, or None, without reading it."""
        ...

    def delete(self, name: bytes) -> None:
        """Drop `name`; nothing happens if it is absent."""
        ...

    def names(self) -> set[bytes]:
        """Return all digests that are kept."""
        ...

    def total_bytes(self) -> int:
        """Return the total size of all that is kept."""
        ...

    def collect(self, keep: AbstractSet[bytes]) -> int:
        """Delete everything but `keep`; returns the bytes that this freed."""
        ...


class LostChunk(StorageError):
    """A chunk that was kept is gone, or was damaged on the disk and is dropped: fetch it again."""


def read_chunk(store: Store, name: bytes) -> bytes:
    """Return the bytes of digest `name`. Raises LostChunk, StorageError."""
    data = store.get(name)
    if data is None:
        raise LostChunk(f"chunk {short(name)} was lost from the store: start again")
    return data


def chunk_path(directory: Path, name: bytes) -> Path:
    """Return the path of the bytes of digest `name` in a FileStore of `directory`."""
    text = name.hex()
    return directory / text[:2] / text[2:4] / text


class Disk:
    """The few calls through which files become durable; tests stop the power between any two."""

    def __init__(self, *, fsync: bool = True) -> None:
        self._fsync = fsync

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        """Create `path`, which must not exist, owner-only, and bring its bytes to the disk."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            if self._fsync:
                os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` by `source` at once."""
        source.replace(target)

    def sync(self, directory: Path) -> None:
        """Bring the names in `directory` to the disk."""
        if self._fsync:
            sync(directory)


def write_atomic(path: Path, parts: Iterable[bytes | memoryview], disk: Disk | None = None) -> None:
    """Make `path` hold `parts`, durably: a crash leaves the old file or the new one, whole.

    Raises StorageError. A crash may leave a file whose name begins with TEMPORARY beside it.
    """
    disk = disk or Disk()
    temporary = path.with_name(TEMPORARY + secrets.token_hex(8))
    try:
        disk.write(temporary, parts)
        disk.rename(temporary, path)
        disk.sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _storage_error(path, error) from error


class FilePart(NamedTuple):
    """Bytes of a file that may be served as a chunk."""

    path: Path
    offset: int
    size: int

    def read(self, name: bytes) -> bytes | None:
        """Return the bytes, if their digest is `name`; None if they are gone or others."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            logger.debug("part of %s is gone: %s", self.path, error)
            return None
        return data if digest(data) == name else None


class FileStore:
    """A Store of one file a blob, `ab/cd/abcd...`; one process at a time owns `directory`.

    The first use learns the sizes of all files, and removes the remains of a crash.
    """

    def __init__(
        self, directory: Path, *, max_bytes: int, fsync: bool = True, disk: Disk | None = None
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._disk = disk or Disk(fsync=fsync)
        self._lock = Lock()
        self._sizes: dict[bytes, int] | None = None
        self._reserved = 0
        self._made: set[Path] = set()
        self._lent: Mapping[bytes, FilePart] = {}

    def lend(self, parts: Mapping[bytes, FilePart]) -> None:
        """Serve parts of other files by their digests, too, until the next call; they do not count as kept."""
        self._lent = parts

    def put(self, data: bytes) -> bytes:
        """Keep `data`; on the disk when this returns."""
        name = digest(data)
        if self._own(name) is not None:  # one that is damaged on the disk is written again
            return name
        with self._lock:
            used = sum(self._index().values()) + self._reserved
            if used + len(data) > self._max_bytes:
                raise QuotaExceeded(
                    f"{len(data)} bytes more would exceed the store's limit of {self._max_bytes} "
                    f"({used} in use): raise weights.max_disk_gib or lower weights.keep_versions"
                )
            self._reserved += len(data)
        try:
            self._write(name, data)
            with self._lock:
                self._index()[name] = len(data)
        finally:
            with self._lock:
                self._reserved -= len(data)
        return name

    def get(self, name: bytes) -> bytes | None:
        """Return the bytes of `name`, hashed just now."""
        data = self._own(name)
        if data is None and (lent := self._lent.get(name)) is not None:
            return lent.read(name)
        return data

    def _own(self, name: bytes) -> bytes | None:
        """Return the bytes of `name`, if they are kept here."""
        with self._lock:
            if name not in self._index():
                return None
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = None
        except OSError as error:
            raise _storage_error(path, error) from error
        if data is not None and digest(data) == name:
            return data
        logger.warning("chunk %s is missing or corrupt on disk: dropped", short(name))
        self.delete(name)
        return None

    def has(self, name: bytes) -> bool:
        """Return whether `name` is kept."""
        return self.size(name) is not None

    def size(self, name: bytes) -> int | None:
        """Return the size of `name`."""
        with self._lock:
            size = self._index().get(name)
        lent = self._lent.get(name)
        return lent.size if size is None and lent is not None else size

    def delete(self, name: bytes) -> None:
        """Drop `name`."""
        with self._lock:
            if self._index().pop(name, None) is None:
                return
            path = self._path(name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _storage_error(path, error) from error

    def names(self) -> set[bytes]:
        """Return all digests."""
        with self._lock:
            return set(self._index())

    def total_bytes(self) -> int:
        """Return the total size."""
        with self._lock:
            return sum(self._index().values())

    def collect(self, keep: AbstractSet[bytes]) -> int:
        """Delete everything but `keep`."""
        before = self.total_bytes()
        for name in self.names() - keep:
            self.delete(name)
        return before - self.total_bytes()

    def _path(self, name: bytes) -> Path:
        return chunk_path(self._directory, name)

    def _write(self, name: bytes, data: bytes) -> None:
        path = self._path(name)
        try:
            self._make(path.parent)
        except OSError as error:
            raise _storage_error(path, error) from error
        write_atomic(path, [data], self._disk)

    def _make(self, directory: Path) -> None:
        """Create `directory` so that it survives a crash: its name is synced in its parent."""
        if directory in self._made:
            return
        if directory != self._directory:
            self._make(directory.parent)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Also when it exists: its maker may have been killed before this line.
        self._disk.sync(directory.parent)
        self._made.add(directory)

    def _index(self) -> dict[bytes, int]:
        """Return the sizes by digest, scanned once. The caller holds the lock."""
        if self._sizes is None:
            try:
                self._sizes = self._scan()
            except OSError as error:
                raise _storage_error(self._directory, error) from error
        return self._sizes

    def _scan(self) -> dict[bytes, int]:
        sizes: dict[bytes, int] = {}
        for folder, _, files in os.walk(self._directory):
            for file in files:
                path = Path(folder, file)
                if file.startswith(TEMPORARY):
                    logger.info("removing %s, left by a crash", path)
                    path.unlink(missing_ok=True)
                elif (name := _name(file)) and path == self._path(name) and not path.is_symlink():
                    sizes[name] = path.stat().st_size
        return sizes


def _name(file: str) -> bytes | None:
    """Return the digest that a file name spells, or None."""
    try:
        name = bytes.fromhex(file)
    except ValueError:
        return None
    return name if len(name) == DIGEST_BYTES and name.hex() == file else None


def _storage_error(path: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"the disk of {path} is full: free space, then start again")
    if error.errno in ADVICE:
        return file_error(error, path)
    return StorageError(f"{path}: {error.strerror or error}: check the disk and its permissions")
