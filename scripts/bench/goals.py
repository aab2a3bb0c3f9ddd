"""Goals beside figures: what a benchmark prints last, and writes by --json."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def judge_goals(
    found: Mapping[str, float], goals: Iterable[tuple[str, float, bool]]
) -> list[dict[str, Any]]:
    """The goals (name, value, whether it is the least) of what was `found`, by name; others are left out."""
    return [
        {
            "name": name,
            "value": found[name],
            "goal": goal,
            "unit": "",
            "ok": found[name] >= goal if at_least else found[name] <= goal,
        }
        for name, goal, at_least in goals
        if name in found
    ]


def show_goals(goals: Sequence[Mapping[str, Any]]) -> None:
    """A line each."""
    for goal in goals:
        mark, unit = "ok  " if goal["ok"] else "MISS", goal.get("unit", "")
        print(f"{mark} {goal['name']}: {goal['value']:,.4g} {unit} (goal {goal['goal']:,g})")


def conclude(goals: Sequence[Mapping[str, Any]], path: Path | None, **found: Any) -> int:
    """Show the goals, and write them after what was `found`; returns the exit code."""
    show_goals(goals)
    if path:
        path.write_text(json.dumps({**found, "goals": goals}, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1
