"""What a run of `sft` keeps beside the learner: where the data stand, and what was measured so far.

The cursor of a checkpoint is that of its step: what was read ahead is not in it.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import StorageError, UsageError
from ..own_run_config import ResumeConfig
from ..run_files import CHECKPOINTS
from ..training.saving.checkpoints import Checkpoints
from .order import Cursor

logger = logging.getLogger(__name__)

CURSOR = "cursor"


class Saved(msgspec.Struct, frozen=True):
    """The cursor part of a checkpoint."""

    cursor: Cursor
    identity: str
    """Of the data that the cursor walks."""
    validation: list[tuple[int, float]]
    """(step, loss) so far."""
    losses: list[float]
    """Of the last steps."""
    line: dict[str, float | None] = {}
    """Of the step's metrics: whoever goes on from it may find that it was not written."""

    @classmethod
    def new(cls, identity: str) -> "Saved":
        """Before the first step."""
        return cls(Cursor(), identity, [], [])


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was found whole; a backend loads `directory`."""

    step: int
    saved: Saved
    directory: Path


async def restore(resume: ResumeConfig, own: Checkpoints, identity: str) -> Restored | None:
    """The checkpoint that `resume` asks for; None if this run has none yet. Later ones are set aside.

    Raises UsageError for a step or a run that has none, and for other data; StorageError.
    """
    source = own
    if resume.dir is not None:
        source = Checkpoints(resume.dir / CHECKPOINTS, keep_last=own.keep_last, fsync=own.fsync)
    found = await _find(resume, source)
    if found is None:
        return None
    step, parts = found
    try:
        saved = msgspec.json.decode(parts[CURSOR], type=Saved)
    except (KeyError, msgspec.DecodeError) as error:
        raise StorageError(
            f"checkpoint {step} is none of `sft`: resume it with the command that wrote it"
        ) from error
    if saved.identity != identity:
        if resume.dir is None:
            raise UsageError(
                "the data are not those that the run began with: give the same, or --resume.dir and "
                "another --name"
            )
        logger.warning("the data are others than those of %s: read from the start", resume.dir)
        saved = Saved.new(identity)
    if source is own:
        own.set_aside(step)
    else:
        saved = msgspec.structs.replace(saved, line={})
    return Restored(step, saved, source.backend_directory(step))


async def _find(resume: ResumeConfig, source: Checkpoints) -> tuple[int, dict[str, bytes]] | None:
    known = source.steps()
    if resume.step is not None:
        if resume.step not in known:
            steps = ", ".join(map(str, known)) or "none"
            raise UsageError(
                f"no checkpoint of step {resume.step} in {source.directory} (there are: {steps})"
            )
        return resume.step, await source.read(resume.step)
    found = await source.read_newest()
    if found is None and resume.dir is not None:
        raise UsageError(f"no checkpoint in {source.directory}: correct resume.dir")
    return found
