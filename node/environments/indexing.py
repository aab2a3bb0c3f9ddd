"""Task number i of a split, for any taskset.

Three kinds, in order of preference: a taskset that can make task i directly (`task_at`), one that has a
`split` option, and any other, whose tasks are dealt to the splits by their content. Splits share no task.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .environment import EnvironmentFailed, Split

HELD_OUT_BELOW = 26
"""Of 256 values of a task's first content-hash byte: about a tenth of a taskset is held out."""
MAX_WALK = 5_000_000
"""Tasks that a walk looks at; beyond this a taskset needs `task_at`."""


class TaskIndex:
    """Random access to the tasks of one or two tasksets.

    `tasksets` holds one per split where the taskset itself knows splits; under one key only otherwise.
    """

    def __init__(self, tasksets: Mapping[Split, Iterable[Any]], *, dealt: bool) -> None:
        self._tasksets = tasksets
        self._walks: dict[Split, _Walk] = {}
        if dealt:
            walk = _Walk(tasksets["train"], dealt=True)
            self._walks = {"train": walk, "eval": walk}

    def get(self, index: int, split: Split) -> Any:
        """Task number `index` (from 0) of `split`; a finite taskset starts over at its end.
        Raises EnvironmentFailed if the split is empty or too far away."""
        if index < 0:
            raise EnvironmentFailed(f"task index {index} is negative: count from 0")
        taskset = self._tasksets.get(split, self._tasksets["train"])
        direct = getattr(taskset, "task_at", None)
        if split not in self._walks and direct is not None:
            task = direct(index)
            prompt = getattr(taskset, "system_prompt", None)
            return task if prompt is None else task.with_system_prompt(prompt)
        if split not in self._walks:
            self._walks[split] = _Walk(taskset, dealt=False)
        return self._walks[split].get(index, split)


class _Walk:
    """One pass over a taskset that remembers what it has seen."""

    def __init__(self, tasks: Iterable[Any], *, dealt: bool) -> None:
        self._rest: Iterator[Any] = iter(tasks)
        self._dealt = dealt
        self._seen: dict[Split, list[Any]] = {"train": [], "eval": []}
        self._steps = 0
        self._ended = False

    def get(self, index: int, split: Split) -> Any:
        held = self._seen[split]
        while len(held) <= index and not self._ended:
            self._step(split)
        if not held:
            raise EnvironmentFailed(
                f"the taskset has no task for split {split!r}: use a larger one"
            )
        return held[index % len(held)]

    def _step(self, split: Split) -> None:
        self._steps += 1
        if self._steps > MAX_WALK:
            raise EnvironmentFailed(
                f"task not found among the first {MAX_WALK}: give the taskset a task_at(index) method"
            )
        try:
            task = next(self._rest)
        except StopIteration:
            self._ended = True
            return
        self._seen[_dealt_to(task) if self._dealt else split].append(task)


def _dealt_to(task: Any) -> Split:
    """By content without its position, so that a repeated question stays on one side."""
    content = task.data.model_dump(mode="json", exclude={"idx"}, exclude_none=True)
    text = json.dumps(content, sort_keys=True).encode()
    return "eval" if hashlib.sha256(text).digest()[0] < HELD_OUT_BELOW else "train"
