"""Every file that a trainer and a worker keep, damaged in every way, one at a time; then both start again.

Each goes on, or ends with one line: never another error, and nothing that was promised is lost. The table in
docs/operating.md says which.
"""

import asyncio
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.damaged_runs import ROWS, Case, Outcome, captured, cases, outcome, whole_run
from support.damages import WAYS
from support.repository import ROOT

AT_ONCE = 8
Cells = dict[tuple[str, str], set[str]]
"""Outcomes by row and way."""


def documented() -> Cells:
    """The table of docs/operating.md."""
    text = (ROOT / "docs" / "operating.md").read_text()
    lines = text.partition("## What a damaged file costs")[2].partition("\n## ")[0].splitlines()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines if line.startswith("| ")]
    header, *body = rows
    assert tuple(header[1:]) == tuple(WAYS)
    return {
        (row[0], way): set(cell.split(", "))
        for row in body
        for way, cell in zip(WAYS, row[1:], strict=True)
    }


def table(seen: Cells) -> str:
    """What was seen, as a table for the docs."""
    rows = (
        "| ".join(
            [f"| {row} ", *(", ".join(sorted(seen.get((row, way), {"on"}))) + " " for way in WAYS)]
        )
        for row in ROWS
        if any((row, way) in seen for way in WAYS)
    )
    return "\n".join(f"{row}|" for row in rows)


async def outcomes(tmp_path: Path, chosen: Sequence[Case]) -> list[tuple[Case, Outcome]]:
    """What becomes of each case, some at once as they mostly wait."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, case: Case) -> tuple[Case, Outcome]:
        place = tmp_path / f"{number}"
        async with places:
            try:
                return case, await outcome(case, place)
            except BaseException as error:
                error.add_note(f"{case.name}: {case.way}")
                raise
            finally:
                shutil.rmtree(place, ignore_errors=True)

    with captured():
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one(*case)) for case in enumerate(chosen)]
    return [task.result() for task in begun]


async def every_case(tmp_path: Path, model_dir: Path, flips: int) -> list[Case]:
    """All cases of a run that was stopped and of one that was killed."""
    found: list[Case] = []
    for name in ("stopped", "killed"):
        killed = name == "killed"
        run = await whole_run(tmp_path / name, model_dir, 1, killed=killed)
        another = await whole_run(tmp_path / f"other_{name}", model_dir, 2, killed=killed)
        found += cases(run, another, flips)
    return found


def lines_of(found: list[tuple[Case, Outcome]], cell: tuple[str, str]) -> list[str]:
    """What nodes said where a cell's files were damaged."""
    return [line for case, result in found if (case.row, case.way) == cell for line in result.lines]


def check(found: list[tuple[Case, Outcome]]) -> Cells:
    """Check that each case has an outcome that the docs name, and broke no promise; return what was seen."""
    seen: Cells = defaultdict(set)
    allowed = documented()
    for case, result in found:
        assert not result.faults, (case.name, case.way, result)
        seen[case.row, case.way].add(result.word)
    wrong = {
        cell: (words, lines_of(found, cell))
        for cell, words in seen.items()
        # where a node goes on in silence, a busy machine may give it another reason for a line
        if not words <= (told := allowed.get(cell, set())) | ({"line"} if "on" in told else set())
    }
    assert not wrong, f"docs/operating.md says otherwise of {wrong}"
    return seen


async def test_a_damaged_file_of_any_kind_is_mended_or_named_in_one_line(
    tmp_path: Path, model_dir: Path
) -> None:
    found = await every_case(tmp_path, model_dir, flips=1)
    ways = list(WAYS)
    turns = {row: ways[number % len(ways)] for number, row in enumerate(ROWS)}
    chosen = {case.row: case for case in found if case.way == turns[case.row]}
    check(await outcomes(tmp_path, list(chosen.values())))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_damage_of_every_file_costs_what_the_docs_say(
    tmp_path: Path, model_dir: Path
) -> None:
    seen = check(await outcomes(tmp_path, await every_case(tmp_path, model_dir, flips=3)))
    print(f"\n{table(seen)}")
    unseen = {cell for cell, words in documented().items() if not words & seen.get(cell, {"on"})}
    assert not unseen, "the docs name what does not happen"
