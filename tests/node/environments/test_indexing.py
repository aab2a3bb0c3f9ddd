"""Tasks by number, of tasksets that are walked: endless ones, finite ones, and those that go wrong."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from primerl.node.environments.environment import EnvironmentFailed
from primerl.node.environments.taskset import FAR, REGION, TaskIndex, WalkLimits


@dataclass(frozen=True)
class Data:
    """As far as an index looks at a task's data."""

    text: str

    def model_dump(self, **_: object) -> dict[str, str]:
        return {"text": self.text}


@dataclass(frozen=True)
class Row:
    data: Data


@dataclass
class Rows:
    """A taskset of so many tasks, or without end; counts what was read of it."""

    count: int | None = None
    read: int = 0
    passes: int = 0
    prefix: str = ""
    fails_at: list[int] = field(default_factory=list[int])
    drifts: bool = False

    def __iter__(self) -> Iterator[Row]:
        self.passes += 1
        for number in itertools.count() if self.count is None else range(self.count):
            self.read += 1
            if number in self.fails_at:
                self.fails_at.remove(number)
                raise KeyError("no such row")
            drift = self.passes if self.drifts else 0
            yield Row(Data(f"{self.prefix}{number + drift}"))


def split_of(train: Rows, evaluation: Rows, **limits: Any) -> TaskIndex:
    return TaskIndex({"train": train, "eval": evaluation}, limits=WalkLimits(**limits))


async def text(index: TaskIndex, number: int, split: Any = "train") -> str:
    return (await index.get(number, split)).data.text


async def test_an_endless_taskset_is_walked_no_farther_than_to_the_task() -> None:
    rows = Rows()
    index = split_of(rows, Rows())
    assert [await text(index, number) for number in (3, 0, 2)] == ["3", "0", "2"]
    assert (rows.read, rows.passes) == (4, 1)


async def test_tasks_dealt_to_the_splits_are_found_lazily_and_differ() -> None:
    rows = Rows()
    index = TaskIndex({"train": rows})
    held_out = {await text(index, number, "eval") for number in range(30)}
    trained = {await text(index, number) for number in range(300)}
    assert (len(held_out), len(trained)) == (30, 300)
    assert not held_out & trained
    assert rows.read < 1500


async def test_nothing_is_held_out_of_a_taskset_that_is_only_evaluated() -> None:
    index = TaskIndex({"train": Rows(30)})
    assert [await text(index, number, "all") for number in range(30)] == list(map(str, range(30)))
    assert [index.place(number, "all") for number in (29, 30)] == [29, 30], "the end is not known"
    assert await text(index, 30, "all") == "0"
    assert [index.place(number, "all") for number in (29, 30, 31)] == [29, 0, 1]
    own = split_of(Rows(prefix="train"), Rows(2, prefix="eval"))
    assert [await text(own, number, "all") for number in range(3)] == ["eval0", "eval1", "eval0"]
    assert own.place(2, "all") == 0


async def test_the_tasks_of_a_warm_up_are_others_and_near_enough_to_walk_to() -> None:
    """Warm-up counts from 2**40 on: once every task of an endless taskset up to there was made."""
    rows = Rows()
    index = split_of(rows, Rows())
    assert await text(index, FAR + 5) == str(REGION + 5)
    assert await text(index, 2 * FAR + 5) == str(2 * REGION + 5)
    assert await text(index, 5) == "5"
    assert rows.passes == 1


async def test_a_finite_taskset_starts_over_at_its_end() -> None:
    rows = Rows(7)
    index = split_of(rows, Rows(7))
    assert [await text(index, number) for number in (6, 7, 15, FAR)] == ["6", "0", "1", "2"]
    assert REGION % 7 == 2
    assert rows.passes == 1
    long = Rows(20)
    index = split_of(long, Rows(), kept=8)
    assert [await text(index, number) for number in (19, 21, 39, 3)] == ["19", "1", "19", "3"]


async def test_what_was_seen_of_an_endless_taskset_is_not_all_kept() -> None:
    rows = Rows()
    index = split_of(rows, Rows(), kept=10)
    assert await text(index, 99) == "99"
    assert await text(index, 90) == "90"
    assert rows.passes == 1
    assert await text(index, 89) == "89"  # walked to again
    assert rows.passes == 2


async def test_a_task_too_far_away_is_an_error_that_names_the_bound() -> None:
    index = split_of(Rows(), Rows(), most=1000)
    assert await text(index, 999) == "999"
    with pytest.raises(EnvironmentFailed, match=r"not among the first 1,000 tasks.*task_at"):
        await index.get(1000, "train")
    assert await text(index, 999) == "999"


async def test_a_taskset_without_anything_to_hold_out_is_an_error_that_says_so() -> None:
    same = TaskIndex({"train": itertools.repeat(Row(Data("0")))}, limits=WalkLimits(misses=500))
    assert await text(same, 3) == "0"
    with pytest.raises(EnvironmentFailed, match="none of 500 tasks in a row is one of 'eval'"):
        await same.get(0, "eval")
    with pytest.raises(EnvironmentFailed, match="no task for split 'train'"):
        await split_of(Rows(0), Rows()).get(0, "train")


async def test_a_taskset_that_changes_from_one_pass_to_the_next_is_refused() -> None:
    index = split_of(Rows(drifts=True), Rows(), kept=10)
    await index.get(50, "train")
    with pytest.raises(EnvironmentFailed, match="gives other tasks when it is read again"):
        await index.get(0, "train")


async def test_a_taskset_that_raises_once_has_not_ended() -> None:
    rows = Rows(fails_at=[5])
    index = split_of(rows, Rows())
    with pytest.raises(KeyError):
        await index.get(9, "train")
    assert [await text(index, number) for number in (9, 3)] == ["9", "3"]


async def test_a_walk_says_how_far_it_has_come_and_lets_others_go_on() -> None:
    import asyncio

    index = split_of(Rows(), Rows(), turn_s=0.0)
    walking = asyncio.ensure_future(index.get(1000, "train"))
    seen: set[str] = set()
    while not walking.done():
        await asyncio.sleep(0)
        seen.add(index.progress)
    assert "walks to task 1,000 of train: 500 tasks read" in seen
    assert index.progress == ""
