"""Honest workers keep their rate beside others, whatever these do with their leases; in virtual time."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.lease_simulation import MARGIN_S, SimulatedWorker, Simulation

from primerl.protocol.leases import Lease

Rule = Callable[[SimulatedWorker, Lease, float], tuple[float, float] | None]
SHARE = 0.85
SECONDS = 40.0


def hold(worker: SimulatedWorker, lease: Lease, now: float) -> tuple[float, float]:
    """Keep a lease almost to its deadline, then report failures."""
    return lease.deadline - MARGIN_S, 0.0


def burn(worker: SimulatedWorker, lease: Lease, now: float) -> tuple[float, float]:
    """Report failures at once."""
    return now + 0.02, 0.0


def never(worker: SimulatedWorker, lease: Lease, now: float) -> None:
    """Let every lease run out; or hang."""


def late(worker: SimulatedWorker, lease: Lease, now: float) -> tuple[float, float]:
    """Do the work, and keep it almost to the deadline."""
    return lease.deadline - MARGIN_S, 1.0


def slow(worker: SimulatedWorker, lease: Lease, now: float) -> tuple[float, float]:
    """Do all of the work sixteen times as slowly."""
    worker.group_s = 4.0
    return worker.work(lease, now), 1.0


def every(count: int) -> Rule:
    """Work, but hold one lease of `count`."""

    def rule(worker: SimulatedWorker, lease: Lease, now: float) -> tuple[float, float]:
        if lease.lease_id % count:
            return worker.work(lease, now), 1.0
        return hold(worker, lease, now)

    return rule


RULES: dict[str, Rule] = {
    "hold": hold,
    "burn": burn,
    "never": never,
    "late": late,
    "slow": slow,
    "hold every other": every(2),
    "hold one of five": every(5),
}
RUNS: dict[str, dict[str, Any]] = {
    "generation is the limit": {},
    "the trainer is the limit": {"train_s": 2.0},
    "short leases, little staleness": {"timeout_s": 8.0, "train_s": 0.1, "staleness": 2},
}


def honest() -> list[SimulatedWorker]:
    return [SimulatedWorker(f"honest {number}") for number in range(3)]


@cache
def steps_alone(run: str) -> int:
    """Return the steps of the honest workers alone."""
    alone = Simulation(honest(), **RUNS[run])
    alone.run(30.0)
    return alone.run(SECONDS)


PAIRS = [
    pytest.param(rule, run, marks=pytest.mark.slow if number and rule != "hold" else ())
    for rule in RULES
    for number, run in enumerate(RUNS)
]
"""Each rule in the first run and the worst one in every run; the others in CI."""


@pytest.mark.parametrize(("rule", "run"), PAIRS)
def test_honest_workers_keep_their_rate_beside_as_many_that_do_not_work(
    rule: str, run: str
) -> None:
    others = [SimulatedWorker(f"other {n}", rule=RULES[rule], joins_s=15.0) for n in range(3)]
    beside = Simulation([*honest(), *others], **RUNS[run])
    beside.run(30.0)
    assert beside.run(SECONDS) >= SHARE * steps_alone(run)


def test_in_a_synchronous_run_a_batch_does_not_wait_for_those_that_hold_its_leases() -> None:
    alone = Simulation(honest(), staleness=0)
    alone.run(30.0)
    others = [SimulatedWorker(f"other {n}", rule=hold, joins_s=30.0) for n in range(3)]
    beside = Simulation([*honest(), *others], staleness=0)
    beside.run(60.0)  # the first leases of each are lost
    assert beside.run(SECONDS) >= SHARE * alone.run(SECONDS)


def test_a_worker_whose_engine_hangs_costs_its_own_share_only() -> None:
    def hang(worker: SimulatedWorker, lease: Lease, now: float) -> tuple[float, float] | None:
        return (worker.work(lease, now), 1.0) if beside.now < hangs_at else None

    hangs_at = 1e12
    pair = Simulation(honest()[:2])
    pair.run(60.0)
    third = SimulatedWorker("hung", rule=hang)
    beside = Simulation([*honest()[:2], third])
    beside.run(60.0)
    hangs_at = beside.now
    assert beside.run(60.0) >= SHARE * pair.run(60.0)


def test_a_slow_honest_worker_goes_on_to_contribute() -> None:
    run = Simulation([*honest(), SimulatedWorker("slow", group_s=1.0)])
    run.run(SECONDS)
    assert run.trained["slow"] > 0.5 * SECONDS
    assert run.stale < 0.02 * sum(run.trained.values())
