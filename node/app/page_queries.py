"""Questions that the page of a node asks beyond its figures: they read the files that the node writes.

Nothing is changed, and every answer is bounded. A question may wait for the disk: each runs in a thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..errors import BAD_FILE, NodeError, UsageError
from ..evaluation.online import EVALUATED
from ..ops.dashboard import Query
from ..reports.explain import AuditLine, VerdictLine, audits, listed
from ..storage.rollouts import BRIEF, RolloutFiles, RolloutFilter
from ..storage.run_files import EVALUATIONS, ROLLOUTS

MAX_VERDICTS = MAX_AUDITS = 50
MAX_STEPS, MAX_ROLLOUTS, MAX_EVALUATIONS = 500, 512, 1000
MAX_TEXT = 1_000_000
"""Characters of a rollout."""


class StepRollouts(msgspec.Struct):
    """The rollouts of a step, and which other steps have some."""

    steps: list[int]
    step: int
    rollouts: list[dict[str, object]]
    more: int


class RolloutText(msgspec.Struct):
    """A rollout to read: its parts, each with whether the model drew it."""

    place: str
    parts: list[tuple[str, bool]]


class EvaluationLine(msgspec.Struct):
    """The figures of a version in one environment."""

    version: int
    environment: str
    reward: float
    """Mean over all rollouts, avg@k."""
    low: float | None
    high: float | None
    """Its 95 % interval, if there is one."""
    figures: dict[str, float]


class PageQueries:
    """Answers from the files of a data directory and, of a trainer, its run's."""

    def __init__(
        self,
        data_dir: Path,
        run_dir: Path | None = None,
        versions: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Take the directories; `versions` maps submissions audited lately to their policy version."""
        self._data_dir = data_dir
        self._run_dir = run_dir
        self._versions = versions

    def all(self) -> dict[str, Query]:
        """Return the questions by name."""
        queries: dict[str, Query] = {"verdicts": self.verdicts, "audits": self.audits}
        if self._run_dir is not None:
            queries |= {
                "rollouts": self.rollouts,
                "rollout": self.rollout,
                "evaluations": self.evaluations,
            }
        return queries

    async def verdicts(self, peer: str = "") -> list[VerdictLine]:
        """List the newest verdicts on work of a peer, or on all work."""
        try:
            return await asyncio.to_thread(listed, self._data_dir, MAX_VERDICTS, peer)
        except NodeError:
            return []  # there is no ledger yet, or none of a run

    async def audits(self) -> list[AuditLine]:
        """List the newest audits."""
        try:
            lines = await asyncio.to_thread(audits, self._data_dir, MAX_AUDITS)
        except NodeError:
            return []  # as above
        versions = self._versions()
        return [
            msgspec.structs.replace(line, version=versions.get(line.submission, -1))
            for line in lines
        ]

    async def rollouts(self, step: str = "") -> StepRollouts:
        """List the kept rollouts of a step; of the newest without one. Raises UsageError, StorageError."""
        return await asyncio.to_thread(self._rollouts, step)

    def _rollouts(self, wanted: str) -> StepRollouts:
        files = self._files
        steps = files.steps()[-MAX_STEPS:]
        if not steps:
            return StepRollouts([], -1, [], 0)
        step = _number(wanted) if wanted else steps[-1]
        rows = files.read(step, BRIEF)
        brief = [
            {name: getattr(row, name) for name in (*BRIEF, "place")} for row in rows[:MAX_ROLLOUTS]
        ]
        return StepRollouts(steps, step, brief, max(0, len(rows) - MAX_ROLLOUTS))

    async def rollout(self, place: str) -> list[RolloutText]:
        """Read a rollout at STEP/GROUP/ROLLOUT, all its branches. Raises UsageError, StorageError."""
        return await asyncio.to_thread(self._rollout, place)

    def _rollout(self, place: str) -> list[RolloutText]:
        numbers = place.split("/")
        if len(numbers) != 3:
            raise UsageError("a rollout is at STEP/GROUP/ROLLOUT")
        step, group, rollout = map(_number, numbers)
        at = RolloutFilter((step, step), group=group, rollout=rollout)
        left, branches = MAX_TEXT, list[RolloutText]()
        for branch in self._files.select(at):
            parts = list[tuple[str, bool]]()
            for text, drawn in branch.parts():
                parts.append((text[:left], drawn))
                left -= len(parts[-1][0])
            branches.append(RolloutText(branch.place, parts))
        return branches

    async def evaluations(self) -> list[EvaluationLine]:
        """Read the newest evaluations, oldest first."""
        return await asyncio.to_thread(self._evaluations)

    def _evaluations(self) -> list[EvaluationLine]:
        assert self._run_dir is not None  # all() leaves it out
        try:
            lines = (self._run_dir / EVALUATIONS).read_bytes().splitlines()[-MAX_EVALUATIONS:]
            evaluated = [EVALUATED.decode(line) for line in lines]
        except BAD_FILE:
            return []  # none yet
        return [
            EvaluationLine(
                version.version,
                name,
                figures.avg.value,
                figures.avg.low,
                figures.avg.high,
                figures.flat(),
            )
            for version in evaluated
            for name, figures in version.environments.items()
        ]

    @property
    def _files(self) -> RolloutFiles:
        assert self._run_dir is not None  # all() leaves out what needs it
        return RolloutFiles(self._run_dir / ROLLOUTS)


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise UsageError("steps, groups and rollouts are numbers")
    return int(text)
