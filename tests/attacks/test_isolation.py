"""What the processes of engines and audits may reach, seen from inside, as docs/security.md says."""

import asyncio
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.repository import ROOT
from support.waiting import until

from primerl.node.config.engine import EngineConfig
from primerl.node.environments.confine import MACHINES, protect_node
from primerl.node.inference.engine_replica import PROGRAM, EngineChild, EngineTimeouts
from primerl.node.inference.hosted import environments_of
from primerl.node.verification.hf_auditor import AuditChild

PROBING = Path(__file__).parents[1] / "support" / "probing"
DEADLINE_S = 60.0
HEADING = "## What a node's own processes may reach"
COLUMNS = {"engine": 1, "audit": 2}
"""Of the table."""


def said_in_docs(column: int) -> dict[str, bool]:
    """Read the table: what the processes of a column may do, here."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = text.partition(HEADING)[2].partition("\n## ")[0].splitlines()
    cells = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in rows if row[:2] == "| "
    ]
    meanings = {"yes": True, "no": False, "only as root": os.geteuid() == 0}
    return {row[0]: meanings[row[column]] for row in cells[1:]}


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let all Python processes that start probe what they reach; return where the results come."""
    into, node = tmp_path / "results", tmp_path / "node"
    into.mkdir()
    node.mkdir(mode=0o700)
    files = {
        "the node's key": node / "key.pem",
        "the node's data directory": node / "ledger.db",
        "other files of the user": tmp_path / "notes",
        "files of other users": tmp_path / "theirs",
    }
    for path in files.values():
        path.write_text("nothing of importance")
        path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(files["files of other users"], 65534, 65534)
    else:
        files["files of other users"] = Path("/etc/shadow")
    protect_node()
    monkeypatch.setenv("PYTHONPATH", str(PROBING))
    monkeypatch.setenv("PROBED_INTO", str(into))
    monkeypatch.setenv("PROBED_NODE", str(os.getpid()))
    monkeypatch.setenv("PROBED_FILES", json.dumps({name: str(it) for name, it in files.items()}))
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "planted")
    return into


def result(into: Path, module: str) -> Mapping[str, bool] | None:
    """Return what the process of a module found; None before it has."""
    for path in into.glob("*.json"):
        found = json.loads(path.read_text())
        if module in " ".join(found["program"]):
            assert "PRIMERL_PASSPHRASE" not in found["variables"]
            return found["may"]
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines processes")
async def test_an_engine_reaches_what_its_user_reaches(probed: Path) -> None:
    environment = environments_of(EngineConfig(type="vllm"), os.environ)[0]
    child = EngineChild("engine", "vLLM", environment, PROGRAM, EngineTimeouts())
    start = asyncio.create_task(child.begin())
    try:
        await until(lambda: result(probed, PROGRAM[-1]) is not None, DEADLINE_S)
        assert result(probed, PROGRAM[-1]) == said_in_docs(COLUMNS["engine"])
    finally:
        await child.kill()
        await asyncio.gather(start, return_exceptions=True)


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="calls are filtered on these alone")
async def test_a_process_that_audits_on_a_cpu_reaches_no_network_and_no_other_process(
    probed: Path,
) -> None:
    child = AuditChild()
    await child.spawn()
    try:
        await until(lambda: result(probed, "audit_process") is not None, DEADLINE_S)
        assert result(probed, "audit_process") == said_in_docs(COLUMNS["audit"])
    finally:
        await child.kill()
