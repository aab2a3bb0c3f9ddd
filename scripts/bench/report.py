"""Parts shared by all benchmarks: two options, a table of figures, and goals.

A benchmark exits with 0 if all of its goals are met. The file of --json has its rows and its goals.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class Goal(TypedDict):
    """A figure and its goal."""

    name: str
    value: float
    goal: float
    unit: str
    ok: bool


def at_least(name: str, value: float, goal: float, unit: str = "") -> Goal:
    """Make a goal with a lower bound."""
    return Goal(name=name, value=value, goal=goal, unit=unit, ok=value >= goal)


def at_most(name: str, value: float, goal: float, unit: str = "") -> Goal:
    """Make a goal with an upper bound."""
    return Goal(name=name, value=value, goal=goal, unit=unit, ok=value <= goal)


def make_parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Make a parser with --quick, with help `quick`, and --json.

    Its description is the first paragraph of `doc`.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write rows and goals there")
    return parser


def show_figures(found: Mapping[str, float]) -> None:
    """Print one line per figure."""
    for name, value in found.items():
        print(f"{name:52} {value:14.6g}")


def conclude(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, float],
    goals: Sequence[Goal],
    path: Path | None,
    **more: Any,
) -> int:
    """Print the goals, and write them with the rows, or figures by name; return the exit code."""
    for goal in goals:
        mark, value = "ok  " if goal["ok"] else "MISS", f"{goal['value']:,.4g} {goal['unit']}"
        print(f"{mark} {goal['name']}: {value.strip()} (goal {goal['goal']:,g})", flush=True)
    if path:
        if isinstance(rows, Mapping):
            rows = [{"name": name, "value": value} for name, value in rows.items()]
        path.write_text(json.dumps({"rows": rows, "goals": goals, **more}, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1
