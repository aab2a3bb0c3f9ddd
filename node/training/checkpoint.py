"""Exact checkpoints of a trainer: `step_N/` with backend files, named parts and a record.

A checkpoint exists once its COMPLETE record is written, last; the record names every file with its digest, so a
torn or altered checkpoint is noticed before anything is resumed from it. Only one is written at a time.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from ...crypto.hashing import digest_parts
from ..config.run import ResumeConfig
from ..errors import BAD_FILE, StorageError, UsageError
from ..removal import remove_made, remove_tree
from ..storage.partial import PARTIAL, REPLACED, sync, sync_tree, whole_directory
from ..storage.run_files import written_to_checkpoint
from ..tasks import BackgroundWrite
from .backend import TrainBackend

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
ASIDE = "void_"
"""Prefix of folders for the checkpoints that a run discarded by going back to an earlier step."""
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


class _NewerFormat(StorageError):
    """A checkpoint is of a format that only a later release reads: none before it takes its place."""


class _Beginning(msgspec.Struct, frozen=True):
    """Fields of the record in every format."""

    format: int


@runtime_checkable
class StagingBackend(Protocol):
    """A backend that can save while it trains; other backends save at once."""

    async def stage(self) -> None:
        """Copy the content of a checkpoint into host memory; afterwards the weights may change."""
        ...

    async def write_staged(self, directory: Path) -> None:
        """Write the staged copy as save() would; step() and other calls may run meanwhile."""
        ...


class Checkpoints:
    """The checkpoints of one run in `directory`; the owner calls close().

    The newest `keep_last` complete ones are kept, and those whose step is a multiple of `keep_interval`; with
    `keep_first` the oldest, too.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int,
        keep_interval: int = 0,
        keep_first: bool = False,
        fsync: bool = True,
    ) -> None:
        self.directory = directory
        self.fsync = fsync
        self.keep_last = keep_last
        self.keep_interval = keep_interval
        self.keep_first = keep_first
        self._write_beside = BackgroundWrite("checkpoint")
        self._protected: int | None = None

    def protect(self, step: int | None) -> None:
        """Keep the newest checkpoint up to `step`, too, until this is called with None."""
        self._protected = step

    async def write(self, step: int, parts: Mapping[str, bytes], backend: TrainBackend) -> None:
        """Write checkpoint `step`: the backend's files, and `parts` of the caller's choice.

        Replaces an older checkpoint of the same step, then drops those that need not be kept. Raises
        StorageError; then there is no new checkpoint of this step.
        """
        _check_names(parts)
        await self.finish()
        await self._write(step, parts, backend.save)

    async def begin(self, step: int, parts: Mapping[str, bytes], backend: TrainBackend) -> None:
        """Write a checkpoint as write(), but return as soon as the backend may train on.

        finish() waits for the rest. A backend that cannot stage is saved at once. Waits for the previous
        checkpoint first, and raises its error.
        """
        if not isinstance(backend, StagingBackend):
            await self.write(step, parts, backend)
            return
        _check_names(parts)
        await self.finish()
        await backend.stage()
        work = self._write(step, dict(parts), backend.write_staged)
        self._write_beside.begin(work, f"checkpoint {step}")

    async def finish(self) -> None:
        """Return when the checkpoint that was begun is durable. Raises the errors of write()."""
        await self._write_beside.finish()

    async def close(self) -> None:
        """Wait for the checkpoint that was begun; its error is only logged."""
        await self._write_beside.close()

    def check(self, resume: ResumeConfig) -> None:
        """Raise UsageError if the checkpoint that `resume` names does not exist here."""
        known = self.steps()
        if resume.step is not None and resume.step not in known:
            there = f"there are {', '.join(map(str, known))}" if known else "there is none"
            raise UsageError(f"{self.directory} has no checkpoint of step {resume.step}: {there}")
        if resume.dir is not None and not known:
            raise UsageError(
                f"{self.directory} has no checkpoint to begin from: name a run's own directory"
            )

    async def read_selected(self, resume: ResumeConfig) -> tuple[int, dict[str, bytes]] | None:
        """Return step and parts of the checkpoint that `resume` names: the newest, if it names no step.

        None if `resume` names none and the run has none. Raises UsageError, StorageError.
        """
        await asyncio.to_thread(self.check, resume)
        if resume.step is None:
            return await self.read_newest()
        return resume.step, await self.read(resume.step)

    async def read_newest(self) -> tuple[int, dict[str, bytes]] | None:
        """Return step and parts of the newest intact checkpoint; None if there is no checkpoint.

        Damaged ones are skipped with a warning. Raises StorageError if all are damaged, or if a newer release
        wrote one.
        """
        steps = await asyncio.to_thread(self.steps)
        for torn in self._incomplete():
            if torn > max(steps, default=-1):
                logger.warning("checkpoint %d was never completed: passed over", torn)
        damage: StorageError | None = None
        for step in reversed(steps):
            try:
                return step, await self.read(step)
            except _NewerFormat:
                raise
            except StorageError as error:
                logger.warning("passed over: %s", error)
                damage = damage or error
        if damage is not None:
            raise damage
        return None

    def set_aside(self, after: int) -> Path | None:
        """Move the checkpoints of later steps into a separate folder and return it.

        Returns None if there are none. Only the operator deletes them. Raises StorageError.
        """
        later = sorted(
            (step for step in {*self.steps(), *self._incomplete()} if step > after), reverse=True
        )
        if not later:
            return None
        numbers = (number for number in range(1, 1 << 20))
        aside = next(
            path for number in numbers if not (path := self.directory / f"{ASIDE}{number}").exists()
        )
        try:
            aside.mkdir()
            for step in later:
                self.path(step).rename(aside / self.path(step).name)
            if self.fsync:
                sync(aside)
                sync(self.directory)
        except OSError as error:
            raise StorageError(f"cannot move checkpoints to {aside}: {error}") from error
        logger.warning("checkpoints after step %d are void now: moved to %s", after, aside)
        return aside

    async def read(self, step: int) -> dict[str, bytes]:
        """Return the parts of a checkpoint, after checking every file of it against the record.

        Hand backend_directory(step) to the backend's load(). Raises StorageError.
        """
        return await asyncio.to_thread(self._read, step)

    def glance(self, step: int, part: str) -> bytes:
        """Return a part of a checkpoint, unchecked. Raises OSError."""
        return (self.path(step) / PARTS / part).read_bytes()

    def is_intact(self, step: int) -> bool:
        """Return whether every file of a checkpoint is as its record says."""
        try:
            self._read(step)
        except StorageError:
            return False
        return True

    def backend_directory(self, step: int) -> Path:
        """Return the directory of the backend's files."""
        return self.path(step) / BACKEND

    def path(self, step: int) -> Path:
        """Return the directory of one checkpoint."""
        return self.directory / f"step_{step}"

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        self._heal()
        return sorted(
            int(match.group(1))
            for entry in self.directory.iterdir()
            if (match := _NAME.fullmatch(entry.name)) and (entry / COMPLETE).is_file()
        )

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    async def _write(
        self, step: int, parts: Mapping[str, bytes], save: Callable[[Path], Awaitable[None]]
    ) -> None:
        with whole_directory(self.path(step), written_to_checkpoint, fsync=self.fsync) as partial:
            await save(partial / BACKEND)
            await asyncio.to_thread(_write_parts, partial, step, parts)
            if self.fsync:  # in a thread, so that the event loop does not wait for the disk
                await asyncio.to_thread(sync_tree, partial)
        await asyncio.to_thread(self._retain)

    def _incomplete(self) -> list[int]:
        """Return the steps of directories named like checkpoints but without a record."""
        if not self.directory.is_dir():
            return []
        return [
            int(match.group(1))
            for entry in self.directory.iterdir()
            if (match := _NAME.fullmatch(entry.name)) and not (entry / COMPLETE).is_file()
        ]

    def _read(self, step: int) -> dict[str, bytes]:
        directory = self.path(step)
        advice = f"remove {directory} to resume from the one before"
        try:
            data = (directory / COMPLETE).read_bytes()
            if (newer := msgspec.json.decode(data, type=_Beginning).format) > RECORD_FORMAT:
                raise _NewerFormat(
                    f"checkpoint {step} is of a newer release of primerl-node (format {newer}, this one reads "
                    f"{RECORD_FORMAT}): go on with that release (UPGRADING.md)"
                )
            record = msgspec.json.decode(data, type=CheckpointRecord)
            if record.format != RECORD_FORMAT or record.step != step:
                raise StorageError(f"checkpoint {step} has a record of another kind: {advice}")
            if record.files != _digests(directory):
                raise StorageError(f"checkpoint {step} was altered after it was written: {advice}")
            return {entry.name: entry.read_bytes() for entry in (directory / PARTS).iterdir()}
        except BAD_FILE as error:
            raise StorageError(f"checkpoint {step} cannot be read ({error}): {advice}") from error

    def _retain(self) -> None:
        """Drop checkpoints that need not be kept, and leftovers of a crash."""
        steps = self.steps()
        good = [step for step in steps if self._protected is not None and step <= self._protected]
        for step in steps[: -self.keep_last]:
            if step in good[-1:]:
                continue
            if self.keep_interval and step and step % self.keep_interval == 0:
                continue
            if self.keep_first and step == steps[0]:
                continue
            with suppress(OSError):
                # the record goes first: a half-removed checkpoint must not look complete
                (self.path(step) / COMPLETE).unlink(missing_ok=True)
                remove_tree(self.path(step), written_to_checkpoint)
        for leftover in self.directory.glob(f"step_*{PARTIAL}"):
            with suppress(OSError):
                remove_made(leftover, written_to_checkpoint)

    def _heal(self) -> None:
        """Undo the first half of a replacement that a crash interrupted."""
        for old in self.directory.glob(f"step_*{REPLACED}"):
            target = old.with_name(old.name.removesuffix(REPLACED))
            if not target.exists():
                logger.warning("checkpoint %s was being replaced: the older one is back", target)
                old.rename(target)


def _check_names(parts: Mapping[str, bytes]) -> None:
    for name in parts:
        if not _PART.fullmatch(name):
            raise ValueError(f"{name!r} is no part name: use a-z, 0-9, '_', '.', '-'")


def _write_parts(partial: Path, step: int, parts: Mapping[str, bytes]) -> None:
    """Write the parts, then the record of all files; the caller renames the directory."""
    (partial / PARTS).mkdir()
    for name, data in parts.items():
        (partial / PARTS / name).write_bytes(data)
    record = CheckpointRecord(RECORD_FORMAT, step, _digests(partial))
    (partial / COMPLETE).write_bytes(msgspec.json.encode(record))


def _digests(directory: Path) -> dict[str, str]:
    """Map the relative path of every file but COMPLETE to its hex digest."""
    return {
        path.relative_to(directory).as_posix(): digest_parts(_pieces(path)).hex()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != COMPLETE
    }


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield a file piece by piece: model files do not fit into memory twice."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
