"""What the rows of the worker's table are, and what they have to reach."""

from statistics import median
from typing import Any

BARE = "bare"
MODES = {BARE: "plain", "bare, logprobs": "logprobs"}
"""Rows of bare vLLM: what is asked for beside tokens."""
FULL = "full worker"
ON_GPU = 0.95
ON_CPU = 0.4
"""Of CPU time, all processes of a worker against all of bare vLLM: on a shared machine the clock says nothing,
and of a tiny model everything around it is a large part."""
ACCEPTED = 0.98
"""Of what was handed in and judged."""


def rates(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kind and number of sequences: the median of its rounds, tokens/s."""
    rows: list[dict[str, Any]] = []
    for row, sequences in dict.fromkeys((one["row"], one["sequences"]) for one in rounds):
        found = [one for one in rounds if (one["row"], one["sequences"]) == (row, sequences)]
        rows.append(
            {
                "row": row,
                "sequences": sequences,
                "tokens_per_s": median(one["tokens_per_s"] for one in found),
                "lowest": min(one["tokens_per_s"] for one in found),
                "highest": max(one["tokens_per_s"] for one in found),
                "completions_per_s": median(one["completions_per_s"] for one in found),
                "cpu_ms_per_token": median(one["cpu_ms_per_token"] for one in found),
                "rounds": len(found),
            }
        )
    return rows


def judge(
    rows: list[dict[str, Any]], ends: list[dict[str, Any]], *, cuda: bool
) -> list[dict[str, Any]]:
    """The goals that these rows can say something of."""
    by = {(one["row"], one["sequences"]): one for one in rows if "skipped" not in one}
    goals: list[dict[str, Any]] = []

    def goal(name: str, value: float, bound: float, unit: str) -> None:
        goals.append(
            {"name": name, "value": value, "goal": bound, "unit": unit, "ok": value >= bound}
        )

    for row, sequences in by:
        bare, full = by.get((BARE, sequences)), by[row, sequences]
        if row == FULL and bare and cuda:
            ratio = full["tokens_per_s"] / bare["tokens_per_s"]
            goal(f"full worker / {BARE}, {sequences}", ratio, ON_GPU, "x")
        elif row == FULL and bare:
            ratio = bare["cpu_ms_per_token"] / full["cpu_ms_per_token"]
            goal(f"full worker / {BARE}, {sequences}, by CPU time", ratio, ON_CPU, "x")
    for end in ends:
        goal(f"accepted of what was judged, {end['sequences']}", end["accepted"], ACCEPTED, "")
    return goals
