"""Goals beside figures: what a benchmark prints last, and writes by --json."""

from collections.abc import Iterable, Mapping, Sequence
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
        mark = "ok" if goal["ok"] else "MISSED"
        print(f"{goal['name']:60} {goal['value']:12.5g}   goal {goal['goal']:.4g}  {mark}")
