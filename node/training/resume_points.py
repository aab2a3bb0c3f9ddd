"""Resume points: what a resume needs of the steps between two checkpoints, beside the published weights.

A resume point is a file `step_N.resume`: place in the data, buffer and counts after step N. Its version is
announced only once it is durable, and the weights of an announced version are in the chunk store. So a resume
takes weights and resume point of the newest version, and the optimizer's moments of the newest checkpoint.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from ...crypto.hashing import digest_parts
from ..errors import BAD_FILE, StorageError
from ..storage.partial import sync, whole_file
from ..tasks import BackgroundWrite

logger = logging.getLogger(__name__)

KEPT = 2
"""The newest may be of a step whose version was not announced, or damaged: then the one before counts."""
_NAME = re.compile(r"step_(\d+)\.resume")


class ResumePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file, as MessagePack."""

    step: int
    parts: dict[str, bytes]
    digest: bytes


class ResumePoints:
    """The newest resume points of one run, in `directory`; the owner calls close() at the end."""

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        self._directory = directory
        self._fsync = fsync
        self._write_beside = BackgroundWrite("resume point")

    def begin(self, step: int, parts: Mapping[str, bytes]) -> None:
        """Begin to write the resume point of `step`, after finish(); removes all but the newest KEPT."""
        work = asyncio.to_thread(self._write, step, dict(parts))
        self._write_beside.begin(work, f"resume point {step}")

    async def finish(self) -> None:
        """Return when the resume point that was begun is durable. Raises StorageError."""
        await self._write_beside.finish()

    async def close(self) -> None:
        """Wait for the resume point that was begun; its error is only logged."""
        await self._write_beside.close()

    def newest_first(self, after: int) -> list[ResumePoint]:
        """Return the intact points of steps after `after`; damaged ones are skipped with a warning."""
        points: list[ResumePoint] = []
        for step in sorted(self.steps(), reverse=True):
            if step > after:
                try:
                    points.append(self.read(step))
                except StorageError as error:
                    logger.warning("passed over: %s", error)
        return points

    def read(self, step: int) -> ResumePoint:
        """Return the point of a step. Raises StorageError where it is damaged or not there."""
        path = self._path(step)
        try:
            point = msgspec.msgpack.decode(path.read_bytes(), type=ResumePoint)
        except BAD_FILE as error:
            raise StorageError(f"{path} cannot be read ({error})") from error
        if point.step != step or point.digest != _digest(step, point.parts):
            raise StorageError(f"{path} was altered after it was written")
        return point

    def latest(self) -> int | None:
        """Return the step of the newest point that is there, whole or not."""
        return max(self.steps(), default=None)

    def drop(self, after: int) -> None:
        """Delete the points of steps after `after`. Raises StorageError."""
        try:
            for step in self.steps():
                if step > after:
                    self._path(step).unlink(missing_ok=True)
            if self._fsync and self._directory.is_dir():
                sync(self._directory)
        except OSError as error:
            raise StorageError(f"cannot remove points in {self._directory}: {error}") from error

    def _write(self, step: int, parts: dict[str, bytes]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        point = ResumePoint(step, parts, _digest(step, parts))
        with whole_file(self._path(step), fsync=self._fsync) as partial:
            partial.write_bytes(msgspec.msgpack.encode(point))
        for old in sorted(self.steps())[:-KEPT]:
            with suppress(OSError):
                self._path(old).unlink()

    def steps(self) -> list[int]:
        """Return the steps of all points that are there, whole or not."""
        if not self._directory.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self._directory.iterdir())
        return [int(match.group(1)) for match in matches if match]

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step}.resume"


def _digest(step: int, parts: Mapping[str, bytes]) -> bytes:
    """Compute BLAKE3 over the step and the parts, by name."""
    named = (piece for name in sorted(parts) for piece in (name.encode(), parts[name]))
    framed = (piece for part in named for piece in (len(part).to_bytes(8, "little"), part))
    return digest_parts([step.to_bytes(8, "little"), *framed])
