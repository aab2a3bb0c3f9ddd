"""The alert rules, the board and the Prometheus config that docs/monitoring has, in Prometheus' own tool."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.figures import PEER, TRAINER, WORKER
from support.repository import ROOT

from primerl.node.ops.figures import NodeFigures
from primerl.node.ops.prometheus import exposition

FOLDER = ROOT / "docs" / "monitoring"
ALERTS = FOLDER / "alerts.yml"
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus' promtool is not installed"
)
NAME = re.compile(r"\bprimerl_[a-z_]+\b")
SOUND = """
primerl_step 0+1x600
primerl_phase{phase="running"} 1x600
primerl_workers{state="working"} 3x600
primerl_workers{state="silent"} 0x600
primerl_reward 0.1+0.001x600
primerl_mismatch_kl 0.001x600
primerl_rollouts_accepted_total 0+100x600
primerl_rollouts_rejected_total{reason="stale"} 0+2x600
primerl_engine_up 1x600
primerl_disk_free_bytes 50000000000-1000x600
primerl_ticket_expires_timestamp_seconds 600000x600
up 1x600
"""
"""Series of a run without faults, a value a minute for ten hours."""
FAULTS = {
    "PrimerlNodeGone": "up 1x300 0x300",
    "PrimerlRunStalled": "primerl_step 0+1x300 300x300",
    "PrimerlNoWorkers": 'primerl_workers{state="working"} 3x300 0x300',
    "PrimerlWorkersSilent": 'primerl_workers{state="silent"} 0x300 2x300',
    "PrimerlRewardCollapse": "primerl_reward 0.1+0.002x400 0.05x200",
    "PrimerlMismatchKL": "primerl_mismatch_kl 0.001x300 0.3x300",
    "PrimerlRejectedShare": 'primerl_rollouts_rejected_total{reason="stale"} 0+2x300 600+90x300',
    "PrimerlEngineDown": "primerl_engine_up 1x300 0x300",
    "PrimerlDiskFull": "primerl_disk_free_bytes 50000000000-50000000x600",
    "PrimerlTicketExpires": "primerl_ticket_expires_timestamp_seconds 100000x600",
}


def exposed() -> set[str]:
    """Names of the metrics of a trainer and a worker."""
    texts = [exposition(NodeFigures(0.0, status, [PEER])).decode() for status in (TRAINER, WORKER)]
    return set(
        NAME.findall(
            "\n".join(line for text in texts for line in text.splitlines() if line[0] != "#")
        )
    )


def board() -> dict[str, Any]:
    return json.loads((FOLDER / "grafana.json").read_text())


def queries() -> list[str]:
    """Queries of the board."""
    return [target["expr"] for panel in board()["panels"] for target in panel["targets"]]


def check(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_board_and_alerts_ask_for_metrics_that_there_are() -> None:
    asked = set(NAME.findall(ALERTS.read_text() + "\n".join(queries())))
    assert asked <= exposed()
    places = [panel["gridPos"] for panel in board()["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({(place["x"], place["y"]) for place in places}) == len(places)


@promtool
def test_the_config_loads_with_its_rules_and_every_query_of_the_board_is_one(
    tmp_path: Path,
) -> None:
    check("check", "config", "prometheus.yml", cwd=FOLDER)
    check("check", "rules", "--lint-fatal", "alerts.yml", cwd=FOLDER)
    rules = [{"record": f"board:query_{at}", "expr": query} for at, query in enumerate(queries())]
    (tmp_path / "board.yml").write_text(json.dumps({"groups": [{"name": "b", "rules": rules}]}))
    check("check", "rules", "board.yml", cwd=tmp_path)


def series(lines: str, fault: str = "") -> list[dict[str, str]]:
    """Series of the sound run, one of them replaced by that of a fault."""
    rows = dict(line.split(" ", 1) for line in lines.strip().splitlines())
    if fault:
        name, values = fault.split(" ", 1)
        assert name in rows
        rows[name] = values
    labels = 'instance="n",job="primerl"'
    return [
        {
            "series": name.replace("}", f",{labels}}}") if "{" in name else f"{name}{{{labels}}}",
            "values": values,
        }
        for name, values in rows.items()
    ]


@promtool
def test_each_alert_is_raised_by_its_fault_and_none_by_a_sound_run(tmp_path: Path) -> None:
    assert set(FAULTS) == set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
    rules = str(ALERTS)
    tests: list[dict[str, Any]] = []
    for fault, line in {"": "", **FAULTS}.items():
        raised = [
            {"eval_time": "9h", "expr": f'sum(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
             "exp_samples": [{"labels": "{}", "value": float(name == fault)}]}
            for name in FAULTS
        ]  # fmt: skip
        tests.append(
            {"interval": "1m", "input_series": series(SOUND, line), "promql_expr_test": raised}
        )
    text = {"rule_files": [rules], "evaluation_interval": "5m", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(text))
    check("test", "rules", "test.yml", cwd=tmp_path)
