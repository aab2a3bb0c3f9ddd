"""Find task number i of a split, in any taskset.

Three kinds, in order of preference: a taskset that can make task i directly (`task_at`), one that has a `split`
option, and any other, whose tasks are assigned to splits by a hash of their content. Splits share no task. A
taskset without `task_at` is iterated only up to the requested task: it may be endless.
"""

import asyncio
import difflib
import hashlib
import json
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from pydantic import ValidationError

from ...protocol.recent import RecentDict
from ..config.run import EnvironmentConfig
from .allowed import NAME
from .environment import EnvironmentFailed, Split

Finder = Callable[[str], tuple[Callable[[Any], Any], Any]]
"""Id -> (class of the taskset, class of its options); raises the errors of an import."""

_HOST_OPTIONS = frozenset({"id", "system_prompt"})
_HOST_TASK_OPTIONS = frozenset({"judges", "stops", "metrics", "rewards"})
_REFERENCE_JUDGE = frozenset("id name weight answer_field question_field view choices".split())
"""Options of the library's judge `reference` that name nothing on the machine."""


def load_tasksets(config: EnvironmentConfig, seed: int, find: Finder) -> dict[Split, Any]:
    """Load the taskset of each split; only `train` if it has no `split` option.

    A `seed` option that the config does not set gets the run's seed. Raises EnvironmentFailed.
    """
    _refuse_host_options(config)
    taskset, options = _find(config.id, find)
    fields = options.model_fields
    values: dict[str, Any] = {**config.args, "id": config.id}
    if "seed" in fields:
        values.setdefault("seed", seed)
    known = get_args(fields["split"].annotation) if "split" in fields else ()
    splits: tuple[Split, ...] = ("train", "eval")
    own: dict[Split, dict[str, str]] = {split: {"split": split} for split in splits}
    if not set(splits) <= set(known):
        splits, own = ("train",), {"train": {}}
    try:
        tasksets: dict[Split, Any] = {
            split: taskset(options.model_validate({**values, **own[split]})) for split in splits
        }
    except ValidationError as error:
        raise EnvironmentFailed(_misfit(config.id, options, error)) from error
    _refuse_unservable(config.id, tasksets["train"])
    return tasksets


def _misfit(name: str, options: Any, error: ValidationError) -> str:
    """Say which options do not fit, one after the other, and which were probably meant."""
    known = sorted(set(options.model_fields) - _HOST_OPTIONS)
    faults: list[str] = []
    for fault in error.errors(include_url=False, include_context=False):
        key = ".".join(("environment.args", *map(str, fault["loc"])))
        if fault["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its options are {', '.join(known)}"
            faults.append(f"{key} is no option of {name!r}: {hint}")
        else:
            reason = fault["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
            faults.append(
                f"{key} does not fit {name!r}: {reason}, not {reprlib.repr(fault['input'])}"
            )
    return "; ".join(faults)


def _find(name: str, find: Finder) -> tuple[Callable[[Any], Any], Any]:
    if not NAME.fullmatch(name):
        raise EnvironmentFailed(
            f"no taskset named {name!r}: environment.id is a module name, such as reverse-text"
        )
    try:
        return find(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise EnvironmentFailed(
            f"no taskset named {name!r}: install it, or use a bundled one, such as reverse-text ({error})"
        ) from error


def _refuse_host_options(config: EnvironmentConfig) -> None:
    task = config.args.get("task")
    refused = _HOST_OPTIONS & set(config.args)
    if isinstance(task, dict):
        options = cast(dict[Any, Any], task)
        named = _HOST_TASK_OPTIONS & {str(name) for name in options}
        if config.judge is not None and _are_reference_judges(options.get("judges")):
            named -= {"judges"}
        refused |= named
    if refused:
        raise EnvironmentFailed(
            f"environment.args may not set {', '.join(sorted(refused))}: "
            "it names things on the machine that plays; write it into the taskset"
        )


def _are_reference_judges(value: Any) -> bool:
    """Return whether all entries are of the library's judge `reference`, with allowed options."""
    return isinstance(value, list) and all(
        isinstance(judge, dict)
        and judge.get("id") == "reference"
        and set(judge) <= _REFERENCE_JUDGE
        for judge in cast(list[Any], value)
    )


def _refuse_unservable(name: str, taskset: Any) -> None:
    task = type(taskset).task_type()
    if task.NEEDS_CONTAINER:
        raise EnvironmentFailed(
            f"{name!r} needs a container, which nodes do not start: use another"
        )


HELD_OUT_BELOW = 26
"""Bound of the first byte of a task's content hash: about a tenth of a taskset is held out."""
FAR = 1 << 40
"""Offset between regions of task indices that must share no task (warm-up, its evaluation)."""
REGION = 8192
"""Offset of these regions in an iterated taskset, where 2**40 is out of reach."""


@dataclass(frozen=True)
class WalkLimits:
    """Limits of the iteration over a taskset, and of its cache of tasks."""

    most: int = 5_000_000
    """Tasks read from the beginning to the requested one."""
    misses: int = 100_000
    """Consecutive tasks of the other split."""
    kept: int = 32_768
    """Cached tasks, the latest found; an earlier one restarts the iteration."""
    turn_s: float = 0.02
    """Longest time without yielding to the event loop, seconds."""


class TaskIndex:
    """Random access to the tasks of one or two tasksets.

    `tasksets` holds one taskset per split if it has a `split` option, else one under `train`.
    """

    def __init__(
        self,
        tasksets: Mapping[Split, Iterable[Any]],
        *,
        limits: WalkLimits = WalkLimits(),
    ) -> None:
        self._tasksets = tasksets
        self._dealt = "eval" not in tasksets
        """Whether tasks are assigned to the splits by a hash of their content."""
        self._walks: dict[Split, _Walk] = {
            split: _Walk(tasksets.get(split, tasksets["train"]), split, limits, dealt=self._dealt)
            for split in ("train", "eval")
        }
        # nothing is held out of a taskset that is only evaluated
        self._walks["all"] = (
            _Walk(tasksets["train"], "all", limits, dealt=False)
            if self._dealt
            else self._walks["eval"]
        )

    @property
    def progress(self) -> str:
        """Description of an iteration in progress; empty if there is none."""
        return next((walk.progress for walk in self._walks.values() if walk.progress), "")

    async def get(self, index: int, split: Split) -> Any:
        """Return task number `index` (from 0) of `split`; a finite taskset starts over at its end.

        Raises EnvironmentFailed if the split is empty or the task beyond the limits.
        """
        split = self._own(split)
        if index < 0:
            raise EnvironmentFailed(f"task index {index} is negative: count from 0")
        taskset = self._tasksets.get(split, self._tasksets["train"])
        direct = getattr(taskset, "task_at", None)
        if not self._dealt and direct is not None:
            task = direct(index)
            prompt = getattr(taskset, "system_prompt", None)
            return task if prompt is None else task.with_system_prompt(prompt)
        return await self._walks[split].get(index)

    def place(self, index: int, split: Split) -> int:
        """Return the number in its split of a task that get() returned."""
        split = self._own(split)
        if not self._dealt and hasattr(self._tasksets.get(split), "task_at"):
            return index
        return self._walks[split].place(index)

    def _own(self, split: Split) -> Split:
        """Return the split of the tasksets that holds the tasks of `split`."""
        return "eval" if split == "all" and not self._dealt else split


class _Walk:
    """Iteration over a taskset; caches one split's latest tasks, restarts for earlier ones."""

    def __init__(
        self, tasks: Iterable[Any], split: Split, limits: WalkLimits, *, dealt: bool
    ) -> None:
        self._tasks = tasks
        self._split: Split = split
        self._limits = limits
        self._dealt = dealt
        self._turn = asyncio.Lock()
        self._first = b""
        """Content of the first task of the first pass: every pass must give the same tasks."""
        self._length: int | None = None
        """Number of tasks of this split; None until the end was reached."""
        self._goal: int | None = None
        self._rest: Iterator[Any] = iter(())
        self._begin()

    @property
    def progress(self) -> str:
        """Description of the iteration; empty while none is in progress."""
        if self._goal is None:
            return ""
        return f"walks to task {self._goal:,} of {self._split}: {self._read:,} tasks read"

    def place(self, index: int) -> int:
        """Return the place of task number `index`, as far as the taskset's length is known."""
        region, offset = divmod(index, FAR)
        return self._within(region * REGION + offset)

    async def get(self, index: int) -> Any:
        """Return task number `index`, modulo the length of a finite taskset."""
        region, offset = divmod(index, FAR)
        place = region * REGION + offset
        async with self._turn:
            place = self._within(place)
            if place in self._kept:
                return self._kept[place]
            if place < self._found:
                self._begin()
            self._goal = place
            try:
                await self._walk_to(place)
            finally:
                self._goal = None
            return self._kept[self._within(place)]

    def _within(self, place: int) -> int:
        return place if self._length is None else place % self._length

    def _begin(self) -> None:
        self._rest = iter(())
        self._read = self._found = self._missed = 0
        self._kept = RecentDict[int, Any](self._limits.kept)

    async def _walk_to(self, place: int) -> None:
        began = time.monotonic()
        while self._found <= place:
            if not self._step(place):
                self._end(place)
                place = self._within(place)
                if place not in self._kept:
                    self._begin()
            if time.monotonic() - began > self._limits.turn_s:
                await asyncio.sleep(0)  # lets rollouts go on
                began = time.monotonic()

    def _step(self, place: int) -> bool:
        """Read a task; return False at the end. Raises EnvironmentFailed."""
        if not self._read:
            self._rest = iter(self._tasks)
        if self._read >= self._limits.most:
            raise EnvironmentFailed(
                f"task {place:,} of {self._split} is not among the first {self._limits.most:,} tasks, "
                "and none beyond is looked for: give the taskset a task_at(index) method"
            )
        try:
            task = next(self._rest)
        except StopIteration:
            return False
        except BaseException:
            self._begin()  # a generator that raised is exhausted, the taskset is not
            raise
        content = b"" if self._read and not self._dealt else task_content(task)
        if not self._read:
            self._check_first(content)
        self._read += 1
        held_out = hashlib.sha256(content).digest()[0] < HELD_OUT_BELOW
        if self._dealt and self._split != ("eval" if held_out else "train"):
            self._missed += 1
            if self._missed >= self._limits.misses:
                raise EnvironmentFailed(
                    f"none of {self._missed:,} tasks in a row is one of {self._split!r}: give the taskset "
                    "more that differ, or a `split` option"
                )
            return True
        self._missed = 0
        self._kept[self._found] = task
        self._found += 1
        return True

    def _end(self, place: int) -> None:
        if not self._found:
            raise EnvironmentFailed(
                f"the taskset has no task for split {self._split!r}: use a larger one"
            )
        if self._length not in (None, self._found):
            raise EnvironmentFailed(_OTHER_TASKS)
        self._length = self._found

    def _check_first(self, content: bytes) -> None:
        self._first = self._first or content
        if self._first != content:
            raise EnvironmentFailed(_OTHER_TASKS)


_OTHER_TASKS = (
    "the taskset gives other tasks when it is read again: its load() must begin anew from its seed "
    "each time"
)


def task_content(task: Any) -> bytes:
    """Encode a task's data without its index, so that equal questions are in one split."""
    content = task.data.model_dump(mode="json", exclude={"idx"}, exclude_none=True)
    return json.dumps(content, sort_keys=True).encode()
