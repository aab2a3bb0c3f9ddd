"""What scripts/bench/swarm.py makes of its figures; the runs themselves need root and are not tests."""

from typing import Any

from primerl.scripts.bench import swarm


def row(system: str, workers: int, last_s: float, **more: Any) -> dict[str, Any]:
    """One row."""
    base = {"file": "anchor", "bytes": 1000, "first_s": 1.0, "egress": 1.5, "received": 1.0}
    return base | {"system": system, "workers": workers, "last_s": last_s, "busy": 0.5} | more


def judged(*rows: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Name -> value and whether it is reached."""
    return {goal["name"]: (goal["value"], goal["ok"]) for goal in swarm.judge(rows)}


def test_a_swarm_slower_than_allowed_or_sending_too_much_misses() -> None:
    """Both goals of the swarm alone, from the row of 16 workers."""
    goals = judged(row("primerl", 1, 4.0), row("primerl", 16, 6.8, egress=2.01))
    assert goals["last of 16 workers to a single one"] == (1.7, False)
    assert goals["trainer egress at 16"] == (2.01, False)


def test_a_liar_that_is_asked_twice_or_later_again_misses() -> None:
    """One wrong chunk may be taken, in the version that is attacked."""
    goals = judged(row("primerl, one liar", 8, 5.0, extra=2.0, late=0.1))
    assert goals["wrong chunks that a fetcher took"] == (2.0, False)
    assert goals["... in the version after"] == (0.1, False)
    assert all(ok for _, ok in judged(row("primerl, one liar", 8, 5.0, extra=1, late=0)).values())


def test_a_run_that_failed_is_a_missed_goal() -> None:
    """Leaving its row out must not make the others pass."""
    broken = {"system": "primerl, 32 workers", "file": "", "workers": 0, "failed": "why"}
    goals = judged(row("primerl", 1, 4.0), row("primerl", 16, 5.0), broken)
    assert goals["runs that failed"] == (1, False)
