"""`explain` of a submission that several stages made: who can have done it, and who vouches."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.protocol_cases import PLAN, STRANGER, WORKER
from support.verdict_cases import CLEAN, VERDICT, fill, signed

from primerl.protocol.rollouts import Blamed, PipelineVerdict

from .conftest import Ran

Cli = Callable[..., Ran]
SAID = PipelineVerdict(
    PLAN.group,
    PLAN.generation,
    (WORKER.node_id, STRANGER.node_id),
    (Blamed(0, 0, (0.012,), (1,)), Blamed(1, 1, (0.07,), (0, 1)), Blamed(1, 2, (), ())),
)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The data directory of a first stage."""
    path = tmp_path / "node" / "runs" / "ab" / "ledger.db"
    fill(path, signed(msgspec.structs.replace(VERDICT, pipeline=SAID)), signed(CLEAN)).close()
    return tmp_path / "node"


def test_the_stages_that_it_can_be_of_are_counted(cli: Cli, node: Path) -> None:
    ran = cli("explain", "-d", str(node))
    assert ran.code == 0, ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    assert f"made by 2 stages of pipeline {PLAN.group.hex()[:10]}:2" in ran.out
    assert ["0", WORKER.node_id.hex()[:10], "1", "0"] in lines
    assert ["1", STRANGER.node_id.hex()[:10], "2", "1"] in lines
    words = " ".join(ran.out.split())
    assert "0/0: distances behind stages 0.. are 0.012: 1" in words
    assert "1/1: distances behind stages 0.. are 0.07: 0 or 1" in words
    assert "1/2: no boundaries are stated: it cannot be told whose it is" in words
    assert "above 0.1, odd above 0.05" in words


def test_what_one_node_made_has_no_stages(cli: Cli, node: Path) -> None:
    found = json.loads(cli("explain", str(CLEAN.lease_id), "-d", str(node), "--json").out)
    assert found["stages"] is None
    found = json.loads(cli("explain", "-d", str(node), "--json").out)
    assert found["stages"]["blamed"][1]["stages"] == [0, 1]
