"""The copy of a run on a standby's disk: a run's directory, replaced as a whole by each newer backup.

Invariants: the directory is always one whole backup; every byte of it was compared with a digest that the
trainer stated; paths are those that a run writes, and never a key. What did not change is linked, not fetched.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ...crypto.hashing import NO_DIGEST, digest
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import Backup, BackupFile
from ...protocol.version import MAX_MESSAGE, MIB
from ..errors import BAD_FILE
from ..storage.chunk_store import FilePart, FileStore, chunk_path, read_chunk
from ..storage.partial import whole_directory, whole_file
from ..storage.run_files import COPY_MARK, backed_up

logger = logging.getLogger(__name__)

WINDOW = 256 * MIB
"""Bytes that are fetched before they are written to their places."""
RECORD = "backup.msgpack"
"""File beside the copy: the backup that it is."""
STORE = Path("trainer/chunks")
Fetch = Callable[[Sequence[ChunkRef]], Awaitable[None]]
"""Brings chunks into the store. Raises NetworkError, StorageError."""


class Mirror:
    """The newest backup of a run, at `directory`."""

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        self.directory = directory
        self._record = directory.with_name(RECORD)
        self._fsync = fsync
        self._backup = self._read()
        self._known = _name(self._backup)
        self.fetched = 0
        """Bytes that were fetched since the start."""

    @property
    def step(self) -> int:
        """Step after which a trainer would go on, or a later one; -1 without a backup."""
        return -1 if self._backup is None else self._backup.step

    @property
    def known(self) -> bytes:
        """Digest of the backup; zeros without one."""
        return self._known

    @property
    def size(self) -> int:
        """Bytes of the copy."""
        if self._backup is None:
            return 0
        return sum(ref.size for file in _all_files(self._backup) for ref in file.chunks)

    async def bring(self, backup: Backup, store: FileStore, fetch: Fetch) -> None:
        """Replace the copy by `backup`, whose missing chunks are fetched into `store` and removed from there.

        Raises RemoteProtocolError (MALFORMED) for files that no backup has; StorageError, errors of `fetch`.
        The copy is then as it was.
        """
        files = check_files(backup)
        old = (
            {} if self._backup is None else {file.path: file for file in check_files(self._backup)}
        )
        with whole_directory(self.directory, backed_up, fsync=self._fsync) as partial:
            missing = await asyncio.to_thread(self._take_over, partial, files, old)
            for window in _windows(missing):
                await fetch(list({chunk.digest: chunk for chunk, _ in window}.values()))
                await asyncio.to_thread(_write_window, window, store)
                self.fetched += sum(chunk.size for chunk, _ in window)
            (partial / COPY_MARK).touch()
        self._backup, self._known = backup, _name(backup)
        with whole_file(self._record, fsync=self._fsync) as path:
            path.write_bytes(msgspec.msgpack.encode(backup))

    def _take_over(
        self, partial: Path, files: Sequence[BackupFile], old: Mapping[str, BackupFile]
    ) -> list[tuple[ChunkRef, FilePart]]:
        """Link files that are unchanged, copy chunks that are; return the chunks to fetch and their places."""
        parts = {
            chunk.digest: part
            for file in old.values()
            for chunk, part in _parts(self.directory / file.path, file)
        }
        missing: list[tuple[ChunkRef, FilePart]] = []
        for file in files:
            target = partial / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if old.get(file.path) == file and _link(self.directory / file.path, target):
                continue
            with target.open("wb") as out:
                out.truncate(file.size)
                for chunk, place in _parts(target, file):
                    part = parts.get(chunk.digest)
                    data = None if part is None else part.read(chunk.digest)
                    if data is None:
                        missing.append((chunk, place))
                    else:
                        out.seek(place.offset)
                        out.write(data)
        return missing

    def _read(self) -> Backup | None:
        """Read which backup the copy is; None where there is none, or where that is not known."""
        try:
            data = self._record.read_bytes()
            backup = msgspec.msgpack.decode(data[: MAX_MESSAGE + 1], type=Backup)
            check_files(backup)
        except FileNotFoundError:
            return None
        except (*BAD_FILE, RemoteProtocolError) as error:
            logger.warning("%s cannot be read (%s): all is fetched anew", self._record, error)
            return None
        return backup if self.directory.is_dir() else None


def _name(backup: Backup | None) -> bytes:
    """Return the digest by which a trainer tells whether its newest backup is another one."""
    return NO_DIGEST if backup is None else digest(msgspec.msgpack.encode(backup))


def check_files(backup: Backup) -> list[BackupFile]:
    """Return the files of a backup, each chunk of the store as one. Raises RemoteProtocolError(MALFORMED)."""
    files = _all_files(backup)
    paths = {file.path for file in files}
    foreign = [file.path for file in files if not backed_up(file.path)]
    if foreign or len(paths) < len(files):
        raise RemoteProtocolError(
            Reason.MALFORMED,
            f"a backup with {foreign[0]!r}" if foreign else "a file is there twice",
        )
    return files


def _all_files(backup: Backup) -> list[BackupFile]:
    stored = [
        BackupFile(chunk_path(STORE, chunk.digest).as_posix(), (chunk,)) for chunk in backup.chunks
    ]
    return [*backup.files, *stored]


def _parts(path: Path, file: BackupFile) -> Iterator[tuple[ChunkRef, FilePart]]:
    offset = 0
    for chunk in file.chunks:
        yield chunk, FilePart(path, offset, chunk.size)
        offset += chunk.size


def _link(source: Path, target: Path) -> bool:
    """Give a file of the last copy its place in the next one."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _windows(
    missing: Sequence[tuple[ChunkRef, FilePart]],
) -> Iterator[list[tuple[ChunkRef, FilePart]]]:
    window: list[tuple[ChunkRef, FilePart]] = []
    size = 0
    for chunk, place in missing:
        window.append((chunk, place))
        size += chunk.size
        if size >= WINDOW:
            yield window
            window, size = [], 0
    if window:
        yield window


def _write_window(window: Sequence[tuple[ChunkRef, FilePart]], store: FileStore) -> None:
    """Write fetched chunks to their places, and remove them from the store. Raises StorageError."""
    for chunk, place in window:
        data = read_chunk(store, chunk.digest)
        with place.path.open("r+b") as file:
            file.seek(place.offset)
            file.write(data)
    for chunk, _ in window:
        store.delete(chunk.digest)
