"""The table and the goals of swarm.py. A goal whose runs were not made is not judged."""

import os
from collections.abc import Sequence
from typing import Any

from goals import show_goals

JUDGED = 16
"""Workers."""
SLOWDOWN = 1.6
COPIES = 2.0
FASTER_ANCHOR = 4.0
FASTER_DELTA = 50.0
EXTRA = 1.0
LATE = 0.0

Row = dict[str, Any]
Goal = dict[str, Any]


def judge(rows: Sequence[Row]) -> list[Goal]:
    """Every goal that the rows can tell about."""
    goals: list[Goal] = []
    failed = sum("failed" in row for row in rows)
    if failed:
        goals.append(at_most("runs that failed", failed, 0, "runs"))
    alone, many = find(rows, "primerl", "anchor", 1), find(rows, "primerl", "anchor", JUDGED)
    delta = find(rows, "primerl", "delta", JUDGED)
    if alone and many:
        ratio = many["last_s"] / alone["last_s"]
        goals.append(at_most(f"last of {JUDGED} workers to a single one", ratio, SLOWDOWN, "x"))
    if many:
        goals.append(at_most(f"trainer egress at {JUDGED}", many["egress"], COPIES, "copies"))
    for theirs in shardcasts(rows):
        name = theirs["system"]
        if many:
            ratio = theirs["last_s"] / many["last_s"]
            goals.append(at_least(f"{name} to us, anchor", ratio, FASTER_ANCHOR, "x"))
        if delta:
            ratio = theirs["last_s"] / delta["last_s"]
            goals.append(at_least(f"{name} to our 1 % delta", ratio, FASTER_DELTA, "x"))
    for row in rows:
        if "extra" in row:
            goals.append(at_most("wrong chunks that a fetcher took", row["extra"], EXTRA, "chunks"))
            goals.append(at_most("... in the version after", row["late"], LATE, "chunks"))
    return goals


def find(rows: Sequence[Row], system: str, file: str, workers: int) -> Row | None:
    """The row of one run."""
    wanted = (system, file, workers)
    return next((r for r in rows if (r["system"], r["file"], r["workers"]) == wanted), None)


def shardcasts(rows: Sequence[Row]) -> list[Row]:
    """Each of its ways at the judged number of workers."""
    return [
        row
        for row in rows
        if row["system"].startswith("shardcast")
        and row["workers"] == JUDGED
        and "failed" not in row
    ]


def at_most(name: str, value: float, wanted: float, unit: str) -> Goal:
    """A goal from above."""
    return {"name": name, "value": value, "goal": wanted, "unit": unit, "ok": value <= wanted}


def at_least(name: str, value: float, wanted: float, unit: str) -> Goal:
    """A goal from below."""
    return {"name": name, "value": value, "goal": wanted, "unit": unit, "ok": value >= wanted}


def show(rows: Sequence[Row], goals: Sequence[Goal]) -> None:
    """All of it for people."""
    titles = ("file", "n", "first s", "last s", "egress", "given", "got", "wasted", "cpu", "busy")
    print(f"{'':44}" + "".join(f"{title:>9}" for title in titles))
    for row in rows:
        if "failed" in row:
            print(f"{row['system']:44} failed")
            continue
        print(f"{row['system']:44}" + "".join(f"{cell:>9}" for cell in cells(row)))
    print("egress, got: copies of the file on the wire that the trainer sent and a worker received")
    print(
        "given: copies of the file in the chunks that the trainer sent, without what is said about them"
    )
    print("wasted: copies that came twice or wrong, of all workers together")
    print("cpu: share of all cores that the nodes used; busy: that the whole machine did")
    show_goals(goals)


def cells(row: Row) -> list[str]:
    """A row of the table."""
    late = f">{row['last_s']:.0f}" if row.get("late") and "extra" not in row else ""
    return [
        row["file"],
        str(row["workers"]),
        f"{row['first_s']:.2f}",
        late or f"{row['last_s']:.2f}",
        f"{row['egress']:.2f}",
        f"{row['given']:.2f}" if "given" in row else "-",
        f"{row['received']:.2f}",
        f"{row['wasted'] / row['bytes']:.3f}" if "wasted" in row else "-",
        f"{cpu_share(row):.0%}" if "cpu_s" in row else "-",
        f"{row['busy']:.0%}",
    ]


def cpu_share(row: Row) -> float:
    """What the nodes used of all cores while the version spread."""
    return row["cpu_s"] / row["last_s"] / (os.cpu_count() or 1)
