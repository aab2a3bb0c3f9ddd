"""Exact checkpoints of a trainer: `step_N/` with the backend's files, named parts, and a record.

A checkpoint exists once its COMPLETE record is written, last; the record names every file with its digest,
so a torn or altered checkpoint is noticed before anything is resumed from it.
"""

import asyncio
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ...crypto.hashing import digest_parts
from ..errors import StorageError
from .backend import TrainBackend
from .durable import PARTIAL, REPLACED, whole_directory

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
BACKEND = "backend"
PARTS = "parts"
RECORD_FORMAT = 1
PIECE_BYTES = 1 << 22
_NAME = re.compile(r"step_(\d+)")
_PART = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


class CheckpointRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of COMPLETE, as JSON: relative path -> hex digest of every other file."""

    format: int
    step: int
    files: dict[str, str]


class Checkpoints:
    """The checkpoints of one run in `directory`; the newest `keep_last` complete ones are kept."""

    def __init__(self, directory: Path, *, keep_last: int, fsync: bool = True) -> None:
        self.directory = directory
        self.fsync = fsync
        self.keep_last = keep_last

    async def write(self, step: int, parts: Mapping[str, bytes], backend: TrainBackend) -> None:
        """Write step `step`: the backend saves itself, `parts` are bytes of the caller's choice.

        Replaces an older checkpoint of the same step, then drops what exceeds keep_last.
        Raises StorageError; then no checkpoint of this step has come to be.
        """
        for name in parts:
            if not _PART.fullmatch(name):
                raise ValueError(f"{name!r} is no part name: use a-z, 0-9, '_', '.', '-'")
        with whole_directory(self.path(step), fsync=self.fsync) as partial:
            await backend.save(partial / BACKEND)
            await asyncio.to_thread(_write_parts, partial, step, parts)
        await asyncio.to_thread(self._retain)

    async def read(self, step: int) -> dict[str, bytes]:
        """The parts of a checkpoint, after every file of it was checked against the record.

        Hand backend_directory(step) to the backend's load(). Raises StorageError.
        """
        return await asyncio.to_thread(self._read, step)

    def backend_directory(self, step: int) -> Path:
        """Where the backend saved itself."""
        return self.path(step) / BACKEND

    def path(self, step: int) -> Path:
        """Directory of one checkpoint."""
        return self.directory / f"step_{step}"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending; what is incomplete is passed over."""
        if not self.directory.is_dir():
            return []
        self._heal()
        return sorted(
            int(match.group(1))
            for entry in self.directory.iterdir()
            if (match := _NAME.fullmatch(entry.name)) and (entry / COMPLETE).is_file()
        )

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def _read(self, step: int) -> dict[str, bytes]:
        directory = self.path(step)
        advice = f"remove {directory} to resume from the one before"
        try:
            record = msgspec.json.decode((directory / COMPLETE).read_bytes(), type=CheckpointRecord)
            if record.format != RECORD_FORMAT or record.step != step:
                raise StorageError(f"checkpoint {step} has a record of another kind: {advice}")
            if record.files != _digests(directory):
                raise StorageError(f"checkpoint {step} was altered after it was written: {advice}")
            return {entry.name: entry.read_bytes() for entry in (directory / PARTS).iterdir()}
        except (OSError, msgspec.DecodeError) as error:
            raise StorageError(f"checkpoint {step} cannot be read ({error}): {advice}") from error

    def _retain(self) -> None:
        """Drop all but the newest keep_last, and what a crash left half-written."""
        for step in self.steps()[: -self.keep_last]:
            # the record goes first: a half-removed checkpoint must not look complete
            (self.path(step) / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(self.path(step), ignore_errors=True)
        for leftover in self.directory.glob(f"step_*{PARTIAL}"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _heal(self) -> None:
        """Undo the first half of a replacement that a crash cut in two."""
        for old in self.directory.glob(f"step_*{REPLACED}"):
            target = old.with_name(old.name.removesuffix(REPLACED))
            if not target.exists():
                logger.warning("checkpoint %s was being replaced: the older one is back", target)
                old.rename(target)


def _write_parts(partial: Path, step: int, parts: Mapping[str, bytes]) -> None:
    """Parts, then the record of everything; the directory gets its name only once all of it is written."""
    (partial / PARTS).mkdir()
    for name, data in parts.items():
        (partial / PARTS / name).write_bytes(data)
    record = CheckpointRecord(RECORD_FORMAT, step, _digests(partial))
    (partial / COMPLETE).write_bytes(msgspec.json.encode(record))


def _digests(directory: Path) -> dict[str, str]:
    """Relative path -> hex digest of every file but COMPLETE."""
    return {
        path.relative_to(directory).as_posix(): digest_parts(_pieces(path)).hex()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != COMPLETE
    }


def _pieces(path: Path) -> Iterator[bytes]:
    """A file piece by piece: model files do not fit into memory twice."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
