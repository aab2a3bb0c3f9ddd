"""/metrics of a node: what Prometheus reads, checked by Prometheus' own tool where that is installed."""

import shutil
import subprocess
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from support.figures import PEER, STATUS, TRAINER, WORKER

from primerl.node.ops.figures import NodeFigures, PeerRow, Status
from primerl.node.ops.prometheus import exposition

Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(status: Status, peers: Sequence[PeerRow] = ()) -> dict[Sample, float]:
    """Read /metrics back: value by name and labels."""
    text = exposition(NodeFigures(0.0, status, list(peers))).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_trainer_tells_of_its_run_and_counts_its_workers_by_state() -> None:
    peers = [
        PEER,
        replace(PEER, id="01" * 32, silent_s=61.0, lag=40),
        replace(PEER, id="02" * 32, refused="banned: it lied"),
        replace(PEER, id="03" * 32, left=True, silent_s=9.0),
        replace(PEER, id="04" * 32, role="validator"),
    ]
    read = samples(TRAINER, peers)
    for name, value in {
        "primerl_step": 3.0,
        "primerl_reward": 0.5,
        "primerl_mismatch_kl": 0.002,
        "primerl_remaining_seconds": 14.0,
        "primerl_disk_free_bytes": 5e9,
        "primerl_ticket_expires_timestamp_seconds": 2e9,
        "primerl_rollouts_accepted_total": 9.0,
        "primerl_worker_lag_versions": 1.0,
    }.items():
        assert read[name, ()] == value
    assert read["primerl_rollouts_rejected_total", (("reason", "stale"),)] == 2.0
    assert read["primerl_environment_reward", (("environment", "math"),)] == 0.25
    states = {"working": 1, "starting": 0, "silent": 1, "left": 1, "refused": 1}
    for state, count in states.items():
        assert read["primerl_workers", (("state", state),)] == count


def test_a_worker_tells_of_its_engine_and_its_work_and_of_no_other_node() -> None:
    read = samples(WORKER, [PEER])
    assert read["primerl_engine_up", ()] == 1.0
    assert read["primerl_gpu_busy_ratio", ()] == 0.75
    assert read["primerl_gpu_memory_bytes", ()] == 9e9
    assert read["primerl_generated_tokens_total", ()] == 1234.0
    assert read["primerl_trust", (("environment", "math"),)] == 0.9
    assert not [name for name, _ in read if "workers" in name or "step" in name]


def test_strangers_cannot_make_up_time_series() -> None:
    names = {name for name, _ in samples(TRAINER, [PEER])}
    odd = [
        replace(PEER, id=f"{at:064x}", software=f"{at}\n", numerics=f'"{at}', reasons={f"r{at}": 1})
        for at in range(100)
    ]
    read = samples(replace(TRAINER, phase="of its own"), odd)
    assert {name for name, _ in read} == names
    assert len(read) < 80
    assert read["primerl_phase", (("phase", "other"),)] == 1.0
    hostile = {'a"} 1\nprimerl_step 99\n': 0.5, "b\u202e" * 40000: 0.1}
    read = samples(replace(WORKER, trusts=hostile, run_name='x"\n' * 999))
    assert ("primerl_step", ()) not in read
    assert max(len(value) for _, labels in read for _, value in labels) <= 64


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="Prometheus' promtool is not installed"
)
@pytest.mark.parametrize("status", [TRAINER, WORKER, STATUS], ids=["trainer", "worker", "new"])
def test_prometheus_own_tool_has_nothing_to_say(status: Status) -> None:
    text = exposition(NodeFigures(0.0, status, [PEER]))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
