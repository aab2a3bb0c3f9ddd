"""Real processes over real sockets: joining at any time, and SIGKILL at any time."""

import sqlite3
from pathlib import Path

import pytest
from scenarios.processes import Nodes, nodes

pytestmark = [pytest.mark.net, pytest.mark.timeout(1200)]


ENDLESS = ("--max-steps", "100000")
"""Of a run that ends when a test has seen what it waits for, however slow the machine is."""


def heads(run: Nodes) -> list[tuple[int, int]]:
    """(term, version) of every head that the trainer has signed and kept."""
    database = sqlite3.connect(run.run_dir / "trainer" / "ledger.db")
    try:
        return list(database.execute("SELECT term, version FROM heads ORDER BY term, version"))
    finally:
        database.close()


def accepted(run: Nodes, worker: str) -> int:
    return int(run.status(worker).get("accepted", 0))


@pytest.mark.slow
def test_workers_contribute_whenever_they_join_and_a_killed_one_costs_only_its_leases(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path) as run:
        run.trainer(*ENDLESS)
        run.until("ticket", run.has_ticket)
        run.programs[0].kill()
        before = run.worker("before")
        run.until("waiting worker", lambda: "waiting for trainer" in before.output())
        trainer = run.trainer("--resume", *ENDLESS)
        run.until("steps", lambda: run.status().get("step", 0) >= 3)
        middle = run.worker("middle")
        run.until(
            "both working", lambda: accepted(run, "before") > 0 and accepted(run, "middle") > 0
        )
        before.kill()
        killed_at = heads(run)[-1][1]
        run.until("steps without it", lambda: run.status().get("step", 0) >= killed_at + 10)
        trainer.kill()
        steps = heads(run)[-1][1] + 2
        assert run.trainer("--resume", "--max-steps", str(steps)).wait() == 0, run.logs()
        assert middle.wait() == 0, run.logs()
        summary = run.summary()
        assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1))
        assert all(worker["accepted"] > 0 for worker in summary["workers"].values())
        assert set(summary["rejected"]) <= {"stale", "lease_expired"}, summary["rejected"]
        assert summary["staleness_max"] <= 2


@pytest.mark.slow
def test_a_killed_trainer_resumes_the_same_chain_and_the_workers_come_back(tmp_path: Path) -> None:
    with nodes(tmp_path) as run:
        first = run.trainer("--max-steps", "40")
        run.until("ticket", run.has_ticket)
        worker = run.worker("worker")
        run.until("steps", lambda: run.status().get("step", 0) >= 8)
        first.kill()
        signed = heads(run)
        second = run.trainer("--resume", "--max-steps", "40")
        assert second.wait() == 0, run.logs()
        assert worker.wait() == 0, run.logs()
        again = heads(run)
        assert {epoch for epoch, _ in again} == {0}, "the chain went on without a new epoch"
        assert again[-1] == (0, 40)
        # Nothing that was signed was signed again: the retained part of the chain is unbroken.
        assert set(signed) & set(again) or signed[-1][1] < again[0][1]
        steps = [line["step"] for line in run.metrics()]
        assert steps[-1] == 40
        assert steps == sorted(set(steps)), "no step was trained twice"
        assert "equivocation" not in run.logs()
