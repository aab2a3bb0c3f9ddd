"""Backups of a running run, for standbys on other machines: what `--resume` reads, without the trainer's key.

Invariants: a backup is what a kill at one moment could have left: the ledger is copied after checkpoint and
resume points were linked, never before. Nodes that may not lead the run learn of no backup, and
names of its chunks cannot be guessed. What a standby may still be fetching stays on the disk: the last backup
and the one before it.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ...crypto.hashing import NO_DIGEST, digest
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import Backup, BackupFile, BackupWait, GetBackup
from ...protocol.version import MAX_CHUNK, MAX_MESSAGE, MIB
from ..errors import StorageError
from ..removal import remove_made
from ..storage.chunk_store import FilePart, FileStore
from ..storage.ledger import Ledger
from ..storage.run_files import CHECKPOINTS, CONFIG, EVALUATIONS, MARK, METRICS, backed_up
from ..training.checkpoint import Checkpoints
from ..training.resume_points import ResumePoints
from .succession import HandOver

logger = logging.getLogger(__name__)

LEAST_AGE_S = 5.0
"""Least age of a backup when the next one is made."""
RETRY_MS = 2_000
"""When a standby that has the newest backup asks again."""
SMALL_CHUNK, LARGE_CHUNK = MIB // 4, MAX_CHUNK
"""Bytes of the chunks of the ledger, of which little changes, and of other files."""
STAGED = "backup"
"""Folder in the trainer's data directory with the files of the last two backups: links, where possible."""
ATTEMPTS = 3
"""Tries to link a checkpoint, while older ones are removed."""


class Backups:
    """Makes a backup when a standby asks and the last one is old; hands it out."""

    def __init__(
        self,
        run_dir: Path,
        *,
        checkpoints: Checkpoints,
        resume_points: ResumePoints,
        ledger: Ledger,
        store: FileStore,
        hand_over: HandOver,
        announced: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The ledger is in the trainer's data directory; `announced` returns the newest version.

        The nodes that may take the run over get backups; the successor of `hand_over` gets the last one.
        """
        self._run_dir = run_dir
        self._staged = ledger.path.parent / STAGED
        self._ledger = ledger
        self._store = store
        self._hand_over = hand_over
        self._last = False
        """Whether the newest backup was made after training had ended."""
        self._announced = announced
        self._clock = clock
        self._checkpoints = checkpoints
        self._resume_points = resume_points
        self._lock = asyncio.Lock()
        self._made_at = float("-inf")
        self._newest: Backup | None = None
        self._name = NO_DIGEST
        """Digest of the newest, as encoded."""
        self._parts: list[dict[bytes, FilePart]] = []
        """Chunks of the last two backups."""
        self._hashed: dict[tuple[int, int, int], tuple[ChunkRef, ...]] = {}
        """Chunks of files that are never changed, by inode, size and time."""
        self._number = 0

    async def answer(self, peer: bytes, request: GetBackup) -> Backup | BackupWait:
        """Return the newest backup, or how long to wait for another one than `request.known`.

        Raises RemoteProtocolError (NOT_ADMITTED), StorageError.
        """
        if peer not in self._hand_over.may_lead():
            raise RemoteProtocolError(
                Reason.NOT_ADMITTED,
                "no standby of this run: ask its operator to certify your id (`primerl-node root certify`)",
            )
        hand_over = self._hand_over
        hand_over.standbys[peer] = self._clock()
        last = hand_over.ready and peer == hand_over.successor
        async with self._lock:
            if self._clock() - self._made_at >= LEAST_AGE_S or (last and not self._last):
                try:
                    made = await asyncio.to_thread(self._make, self._announced())
                finally:
                    self._made_at = self._clock()
                self._last = hand_over.ready
                self._newest = made or self._newest
        if self._newest is None or self._name == request.known:
            if last:
                hand_over.taken.set()
            return BackupWait(RETRY_MS, lead=last)
        return self._newest

    def _make(self, announced: int) -> Backup | None:
        """Make a backup, with `announced` in the ledger; None before the first checkpoint."""
        began = time.monotonic()
        self._number += 1
        directory = self._staged / str(self._number)
        parts: dict[bytes, FilePart] = {}
        try:
            remove_made(directory, backed_up)
            step = self._stage(directory, announced)
            if step is None:
                return None
            files = tuple(self._files(directory, parts))
            backup = Backup(step, files, self._stored())
            name = _name(backup)
        except (OSError, StorageError) as error:
            with suppress(OSError):  # half a backup would keep a full disk full
                remove_made(directory, backed_up)
            raise StorageError(f"no backup can be made: {error}") from error
        self._name = name
        self._parts = [*self._parts[-1:], parts]
        self._store.lend({name: part for parts in self._parts for name, part in parts.items()})
        self._drop_older()
        logger.debug("backup of step %d in %.2f s", step, time.monotonic() - began)
        return backup

    def _stored(self) -> tuple[ChunkRef, ...]:
        """List the chunks of versions."""
        sizes = ((name, self._store.size(name)) for name in sorted(self._store.names()))
        return tuple(ChunkRef(name, size) for name, size in sizes if size)

    def _stage(self, directory: Path, announced: int) -> int | None:
        """Link or copy the files into `directory`; return the step after which they go on."""
        step = self._stage_checkpoint(directory)
        if step is None:
            return None
        folder = directory / CHECKPOINTS
        for later in self._resume_points.steps():
            if later > step:
                with suppress(FileNotFoundError):  # a newer one has taken its place
                    name = f"step_{later}.resume"
                    _link(self._run_dir / CHECKPOINTS / name, folder / name)
                    # a resume goes on after a point only if its version was announced
                    step = max(step, later if later <= announced else 0)
        (directory / "trainer").mkdir()
        self._ledger.copy_to(directory / "trainer/ledger.db")
        for name in (MARK, CONFIG, METRICS, EVALUATIONS):
            with suppress(FileNotFoundError):
                shutil.copyfile(self._run_dir / name, directory / name)
        for path in self._run_dir.glob("model/*"):
            if path.is_file():
                _link(path, directory / "model" / path.name)
        return step

    def _stage_checkpoint(self, directory: Path) -> int | None:
        for attempt in range(ATTEMPTS):
            step = self._checkpoints.latest()
            if step is None:
                return None
            source = self._checkpoints.path(step)
            try:
                for path in sorted(source.rglob("*")):
                    if path.is_file():
                        place = path.relative_to(self._run_dir)
                        _link(path, directory / place)
            except FileNotFoundError:
                if attempt == ATTEMPTS - 1:
                    raise
                remove_made(directory, backed_up)
            else:
                return step
        return None

    def _files(self, directory: Path, parts: dict[bytes, FilePart]) -> Iterator[BackupFile]:
        """Cut the staged files into chunks, which are added to `parts`."""
        hashed = self._hashed
        self._hashed = {}
        for path in sorted(directory.rglob("*")):
            if not path.is_file():
                continue
            name = path.relative_to(directory).as_posix()
            if not backed_up(name):
                continue  # of somebody else
            status = path.stat()
            key = (status.st_ino, status.st_size, status.st_mtime_ns)
            size = SMALL_CHUNK if name.endswith(".db") else LARGE_CHUNK
            chunks = hashed.get(key) if status.st_nlink > 1 else None
            chunks = self._hashed[key] = chunks or tuple(_cut(path, size))
            offset = 0
            for chunk in chunks:
                parts[chunk.digest] = FilePart(path, offset, chunk.size)
                offset += chunk.size
            yield BackupFile(name, chunks)

    def _drop_older(self) -> None:
        kept = {str(self._number), str(self._number - 1)}
        for path in self._staged.iterdir():
            if path.name not in kept and path.is_dir():
                remove_made(path, backed_up)


def _name(backup: Backup) -> bytes:
    """Return the digest of a backup. Raises StorageError where no message holds it."""
    encoded = msgspec.msgpack.encode(backup)
    if len(encoded) > MAX_MESSAGE:
        raise StorageError("the run has too many files: lower weights.max_disk_gib")
    return digest(encoded)


def _link(source: Path, target: Path) -> None:
    """Give a file that is never changed a second name; copy it where the disk has no such links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _cut(path: Path, size: int) -> Iterator[ChunkRef]:
    with path.open("rb") as file:
        while piece := file.read(size):
            yield ChunkRef(digest(piece), len(piece))
