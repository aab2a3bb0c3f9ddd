"""What pipeline.py has to reach, and its table."""

from typing import Any

from goals import show_goals

Row = dict[str, Any]
Goal = dict[str, Any]

FAR, SYNC = 0.75, 3.0
"""overlap at 100 ms of itself at 0 ms; overlap at 50 ms of `one` at 50 ms."""
LOCAL = 0.8
"""overlap at 0 ms of vLLM's own pipeline."""
OVERHEAD = 1.25
"""Bytes that a hop carries per token that is computed, of those of one hidden state; what is above is schedule
and proofs."""
OFF = 0.01
"""Most that logprobs may be from those of the whole model, in the mean of a way."""


def judge(rows: list[Row], *, hidden: int, cuda: bool) -> list[Goal]:
    """The goals that these rows can say something of."""
    goals: list[Goal] = []

    def goal(name: str, value: float, bound: float, unit: str, *, most: bool = False) -> None:
        ok = value <= bound if most else value >= bound
        goals.append({"name": name, "value": value, "goal": bound, "unit": unit, "ok": ok})

    for stages in sorted({row["stages"] for row in rows if row["way"] == "overlap"}):
        here = {row["rtt_ms"]: row for row in rows if _is(row, "overlap", stages)}
        near, middle, far = here.get(0.0), here.get(50.0), here.get(100.0)
        if near and far:
            ratio = far["tokens_per_s"] / near["tokens_per_s"]
            goal(f"{stages} stages, 100 ms / 0 ms", ratio, FAR, "x")
        one = next((row for row in rows if _is(row, "one", stages) and row["rtt_ms"] == 50.0), None)
        if middle and one:
            ratio = middle["tokens_per_s"] / one["tokens_per_s"]
            goal(f"{stages} stages, 50 ms, overlap / one", ratio, SYNC, "x")
        if near and near.get("bytes_per_token"):
            share = near["bytes_per_token"] / (hidden * (2 if cuda else 4))
            goal(f"{stages} stages, bytes of a hop / a state", share, OVERHEAD, "x", most=True)
        for local in (row for row in rows if _is(row, "local", stages)):
            sequences = local["sequences"]
            best = max(
                (row["tokens_per_s"] for row in rows if _is_near(row, stages, sequences)),
                default=None,
            )
            if best:
                name = f"{stages} stages, 0 ms, {sequences} sequences / vLLM's own"
                goal(name, best / local["tokens_per_s"], LOCAL, "x")
    exact = [row["logprob_off"] for row in rows if row.get("encoding", "raw") == "raw"]
    goal("logprobs from the whole model's, at most", max(exact), OFF, "", most=True)
    if not cuda:  # in bfloat16 near ties turn with the size of a batch
        goal("ways that draw other tokens than the whole model", _others(rows), 0.0, "", most=True)
    return goals


def _is(row: Row, way: str, stages: int) -> bool:
    return row["way"] == way and row["stages"] == stages


def _is_near(row: Row, stages: int, sequences: int) -> bool:
    here = row["way"].startswith("overlap") and row["stages"] == stages
    return here and row["rtt_ms"] == 0.0 and row["sequences"] == sequences


def _others(rows: list[Row]) -> float:
    whole = {row["sequences"]: row["digest"] for row in rows if row["way"] == "whole"}
    exact = [row for row in rows if row.get("encoding", "raw") == "raw"]
    return float(sum(row["digest"] != whole.get(row["sequences"], row["digest"]) for row in exact))


def show(rows: list[Row], goals: list[Goal]) -> None:
    """The table, then each goal beside its figure."""
    whole = {row["sequences"]: row["tokens_per_s"] for row in rows if row["way"] == "whole"}
    print(
        f"{'way':<14}{'stages':>7}{'RTT ms':>8}{'seqs':>7}{'tokens/s':>11}{'of whole':>10}{'lanes':>7}"
        f"{'B/token':>9}{'Mbit/s':>8}{'stall':>7}{'same':>7}{'off':>9}"
    )
    for row in rows:
        share = row["tokens_per_s"] / whole[row["sequences"]]
        lanes = row.get("micro_batches")
        stall = row.get("stall_share")
        print(
            f"{row['way']:<14}{row['stages']:>7}{row['rtt_ms']:>8g}{row['sequences']:>7}"
            f"{row['tokens_per_s']:>11,.0f}{share:>10.2f}{lanes if lanes else '':>7}"
            f"{_number(row.get('bytes_per_token'), '.0f'):>9}{_number(row.get('mbit_s'), '.1f'):>8}"
            f"{_number(stall, '.0%'):>7}{row['same_share']:>7.0%}{row['logprob_off']:>9.1e}"
        )
    show_goals(goals)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
