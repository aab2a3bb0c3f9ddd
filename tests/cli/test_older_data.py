"""Data that the release before wrote is read; tests/scenarios/test_programs.py resumes it."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from support.older_data import STEPS, unpack

from primerl.node.storage.ledger import FORMAT, UPGRADED, Ledger, LedgerView
from primerl.node.training.checkpoint import Checkpoints
from primerl.protocol import tickets

from .conftest import Cli


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The run of the release before."""
    return unpack(tmp_path / "out")


def test_ledgers_are_upgraded_with_all_that_they_hold(run_dir: Path) -> None:
    for path in (run_dir / "trainer", *run_dir.glob("worker_1/runs/*")):
        with closing(LedgerView(path / "ledger.db")) as view:
            assert len(view.heads()) == STEPS + 1
        ledger = Ledger(path / "ledger.db", fsync=False)
        try:
            assert (UPGRADED, ledger.get("format")) == (3, FORMAT.to_bytes(2, "big"))
            assert ledger.newest_head() == (0, STEPS)
        finally:
            ledger.close()


async def test_its_checkpoint_is_read(run_dir: Path) -> None:
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=1)
    newest = await checkpoints.read_newest()
    assert newest is not None
    assert newest[0] == STEPS
    assert newest[1]


def test_its_ticket_is_read(run_dir: Path) -> None:
    text = (run_dir / "ticket.txt").read_text()
    assert text.startswith(tickets.WHOLE)
    ticket = tickets.read(text, now=0)
    assert tickets.read(text, now=ticket.issued) == ticket


def test_kept_rollouts_and_verdicts_are_shown(cli: Cli, run_dir: Path) -> None:
    shown = cli("rollouts", str(run_dir), "--last", "999", "--json")
    assert shown.code == 0, shown.err
    assert {row["step"] for row in json.loads(shown.out)["rollouts"]} == {1, 2, 3}
    listed = cli("explain", "--data-dir", str(run_dir / "worker_1"), "--list", "--json")
    assert listed.code == 0, listed.err
    assert json.loads(listed.out)


def test_settings_of_its_worker_are_those_of_a_join(cli: Cli, run_dir: Path) -> None:
    shown = cli("join", "@", str(run_dir / "worker_1" / "join.toml"), "--dry-run", "--json")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["environments"]["allow"] == ["reverse-text"]
