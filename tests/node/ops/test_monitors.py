"""W&B: what the real library holds after a run, what never reaches it, and what it cannot hold up."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.swarm import Swarm, model_dir, quiet_registry

from primerl.node.config.run import RunConfig
from primerl.node.config.sft import SftConfig
from primerl.node.errors import UsageError
from primerl.node.ops.metrics import MetricsLog
from primerl.node.ops.monitors import LINES_WAITING, WandbMonitor, check_monitors

__all__ = ["model_dir", "quiet_registry"]

PATIENCE_S = 120.0
"""Of a test that waits for a whole library on a busy machine."""
LINES = 4 * LINES_WAITING
"""More than wait for a library that takes none."""


real = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


def config(directory: Path, **sections: Any) -> RunConfig:
    made = RunConfig.model_validate({"name": "r", "output_dir": directory, **sections})
    made.run_dir.mkdir(parents=True, exist_ok=True)
    return made


def started(made: RunConfig) -> WandbMonitor:
    monitor = WandbMonitor.of_run(made)
    assert monitor is not None
    return monitor


def three_steps(made: RunConfig) -> None:
    """Log steps 1 to 3, go back to 2, log 3 again; the file has the same."""
    monitor = started(made)
    metrics = MetricsLog(made.run_dir / "metrics.jsonl", monitor)
    for step in (1, 2, 3):
        metrics.write(step, {"loss/mean": 1.0 / step, "reward/mean": None, "time": 5.0})
    metrics.go_back(2, {})
    metrics.write(3, {"loss/mean": 0.125, "optim/grad_norm": float("nan")})
    monitor.close(PATIENCE_S)
    metrics.close()


def bytes_below(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


# -- the real libraries ----------------------------------------------------------------------------


@real
def test_wandb_offline_holds_the_steps_and_the_public_config(tmp_path: Path) -> None:
    three_steps(
        made := config(
            tmp_path,
            monitors={"wandb": {"offline": True, "project": "p", "tags": ["t"], "group": "g"}},
            training={"lr": 0.03125},
        )
    )
    history, run = wandb_records(made.run_dir, count=4)
    assert [(row["step"], row["loss/mean"]) for row in history] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (3, 0.125),
    ]  # fmt: skip
    assert all("reward/mean" not in row and "time" not in row for row in history)
    assert (run.project, run.display_name, run.run_group, list(run.tags)) == ("p", "r", "g", ["t"])
    assert run.run_id == (made.run_dir / "monitors.id").read_text()
    told = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert told["training"]["lr"] == 0.03125
    assert "network" not in told


@real
async def test_trainer_and_workers_are_one_group_of_wandb(tmp_path: Path, model_dir: Path) -> None:
    offline = {"wandb": {"offline": True, "project": "p"}}
    async with Swarm(tmp_path, model_dir, monitors=offline) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", monitors=offline)
        await swarm.finished()
        await worker.ended()
    steps, trainer = wandb_records(swarm.run_dir)
    rows, run = wandb_records(worker.data_dir)
    assert steps[-1]["step"] == rows[-1]["step"] == 3
    assert rows[-1]["rollouts/accepted"] >= sum(row["batch/samples"] for row in steps)
    assert rows[-1]["inference/cap"] >= 1
    assert (trainer.run_group, trainer.job_type) == (run.run_group, "trainer")
    assert (run.project, run.job_type, run.run_group[:2]) == ("p", "inference", "r-")
    assert run.run_id != trainer.run_id


def log_records(data: bytes) -> Iterator[bytes]:
    """Read W&B's file: a head of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 2**15) < 7 and left:
            at += left
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # it is being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_records(run_dir: Path, count: int = 1) -> tuple[list[dict[str, Any]], Any]:
    """The rows of the history, `count` at least and to step 3, and the record of the one offline run.

    W&B's service writes the last ones when the run has ended, at the latest as the process ends.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        rows, run = written_records(run_dir)
        whole = run and len(rows) >= count and rows[-1]["step"] == 3
        if whole or time.monotonic() > until:
            return rows, run
        time.sleep(0.2)


def written_records(run_dir: Path) -> tuple[list[dict[str, Any]], Any]:
    from wandb.proto.wandb_internal_pb2 import (  # pyright: ignore[reportMissingImports]
        Record,
    )

    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = []
    run: Any = None
    for data in log_records(path.read_bytes()):
        record: Any = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
            rows.append(row)
        if record.HasField("run"):
            run = record.run
    return rows, run


@real
def test_no_secret_of_the_node_reaches_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither passwords of seeds, nor the passphrase, the command line, or an address."""
    secret = "correct-horse-battery"
    monkeypatch.setenv("PRIMERL_PASSPHRASE", secret)
    monkeypatch.setattr(sys, "argv", ["primerl-node", "--network.seeds", secret])
    made = config(
        tmp_path / "out",
        network={"seeds": [f"https://me:{secret}@host/c"], "advertise": [f"{secret}:1"]},
        verification={"references": [secret]},
        training={"fsdp": {"rendezvous": f"{secret}:9"}},
        monitors={"wandb": {"offline": True}},
    )
    three_steps(made)
    wandb_records(made.run_dir, count=4)
    found = bytes_below(tmp_path / "out")
    assert b"loss/mean" in found
    assert secret.encode() not in found


# -- what may go wrong -----------------------------------------------------------------------------


def test_wandb_that_is_not_installed_is_refused_with_what_to_install(tmp_path: Path) -> None:
    monitors = config(tmp_path, monitors={"wandb": {}}).monitors
    with pytest.raises(UsageError, match=r"primerl-node\[wandb\]"):
        check_monitors(monitors, lambda library: None)
    check_monitors(RunConfig().monitors, lambda library: None)
    assert SftConfig.model_validate({"monitors": {"wandb": {}}}).monitors != RunConfig().monitors


@real
def test_wandb_online_needs_a_login_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    online = config(tmp_path, monitors={"wandb": {}}).monitors
    with pytest.raises(UsageError, match="wandb login"):
        check_monitors(online)
    check_monitors(config(tmp_path, monitors={"wandb": {"offline": True}}).monitors)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    check_monitors(online)


ENDING = """
import sys
from pathlib import Path
from primerl.node.config.run import RunConfig
from primerl.node.ops.monitors import WandbMonitor
run = RunConfig.model_validate({"name": "r", "output_dir": sys.argv[1], "monitors": {"wandb": {}}})
run.run_dir.mkdir(parents=True)
monitor = WandbMonitor.of_run(run)
for step in range(9):
    monitor.log(step, {"loss/mean": 1.0})
monitor.close(8.0)
"""


@real
def test_a_server_that_never_answers_is_left_when_the_run_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_API_KEY": "a" * 40,
            "WANDB_MODE": "online",
        }
        # W&B itself would wait a minute at the exit
        ended = subprocess.run(
            [sys.executable, "-c", ENDING, str(tmp_path)],
            env=os.environ | given,
            capture_output=True,
            text=True,
            timeout=50,
        )
    assert ended.returncode == 0, ended.stderr
    assert "W&B did not end in time" in ended.stderr
    assert "Traceback" not in ended.stderr


FAKE = """
import time
def note(path, *values):
    with open(path, "a") as file:
        print(*values, file=file)
class Settings:
    def __init__(self, **_): pass
class Run:
    def define_metric(self, *_, **__): pass
    def log(self, row): {log}
    def finish(self): {finish}
def init(**given):
    {init}
    return Run()
"""
FAKES = {
    "hangs when it is opened": {"init": "time.sleep(600)"},
    "cannot be opened": {"init": "raise OSError('no such project')"},
    "ends the program": {"init": "raise SystemExit(3)"},
    "fails at each line": {"log": "raise ValueError('no')"},
    "hangs when it is closed": {"finish": "time.sleep(600)"},
}


def witness(path: Path) -> dict[str, str]:
    """Write down all that it is given."""
    return {
        "init": f"note({str(path)!r}, *given.items())",
        "log": f"note({str(path)!r}, 'log', row)",
    }


Install = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a library of this behaviour in the place of W&B."""
    real = {name: made for name, made in sys.modules.items() if name.partition(".")[0] == "wandb"}
    for name in real:
        del sys.modules[name]
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(init: str = "pass", log: str = "pass", finish: str = "pass") -> None:
        (site / "wandb.py").write_text(FAKE.format(init=init, log=log, finish=finish))

    yield install
    sys.modules.pop("wandb", None)
    sys.modules.update(real)


def test_a_monitor_gets_the_public_config_only(
    tmp_path: Path, fake: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, told = "correct-horse-battery", tmp_path / "told"
    monkeypatch.setenv("PRIMERL_PASSPHRASE", secret)
    fake(**witness(told))
    teacher = {"url": f"http://{secret}/v1", "model": "teacher-70b", "options": {"user": secret}}
    taught = {"type": "reverse_kl", "endpoint": teacher}
    three_steps(
        config(
            tmp_path,
            network={"seeds": [f"https://me:{secret}@host/c"], "advertise": [f"{secret}:1"]},
            verification={"references": [secret]},
            training={"lr": 0.03125, "fsdp": {"rendezvous": f"{secret}:9"}, "loss": taught},
            environments=[
                {
                    "id": "reverse-text",
                    "judge": {
                        "url": f"http://{secret}/v1",
                        "model": "grader-7b",
                        "options": {"user": secret},
                    },
                }
            ],
            monitors={"wandb": {"offline": True}},
        )
    )
    found = told.read_text()
    assert "0.03125" in found
    assert "grader-7b" in found
    assert "teacher-70b" in found
    assert secret not in found
    rows = [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 0.125)]
    assert [line for line in found.splitlines() if line.startswith("log")][:3] == [
        f"log {{'step': {step}, 'loss/mean': {loss}}}" for step, loss in rows[:3]
    ]


async def test_a_monitor_of_a_worker_gets_its_metrics_and_no_secret(
    tmp_path: Path, model_dir: Path, fake: Install
) -> None:
    secret, told = "correct-horse-battery", tmp_path / "told"
    fake(**witness(told))
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        network = {"seeds": [f"https://me:{secret}@host/c"], "advertise": [f"{secret}:1"]}
        worker = swarm.add_worker("w1", monitors={"wandb": {"offline": True}}, network=network)
        await swarm.finished()
        await worker.ended()
    found = told.read_text()
    accepted = re.findall(r"log {'step': 3, .*'rollouts/accepted': (\d+)", found)
    assert int(accepted[-1]) >= 3 * 4
    assert "'max_batch': 256" in found
    assert secret not in found
    assert swarm.ticket not in found


@pytest.mark.parametrize("fault", FAKES)
def test_a_monitor_that_fails_or_hangs_holds_nothing_up(
    tmp_path: Path, fake: Install, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake(**FAKES[fault])
    made = config(tmp_path, monitors={"wandb": {"offline": True}})
    monitor = started(made)
    metrics = MetricsLog(made.run_dir / "metrics.jsonl", monitor)
    began = time.monotonic()
    for step in range(LINES):
        metrics.write(step, {f"value/{at}": 0.5 for at in range(20)})
    assert time.monotonic() - began < 60, "lines were waited for"
    monitor.close(3.0)
    metrics.close()
    assert time.monotonic() - began < 90, "the end was waited for"
    assert len((made.run_dir / "metrics.jsonl").read_text().splitlines()) == LINES
    assert "monitor wandb" in caplog.text


def test_a_monitor_that_failed_is_named_once_with_its_error(
    tmp_path: Path, fake: Install, caplog: pytest.LogCaptureFixture
) -> None:
    fake(**FAKES["cannot be opened"])
    monitor = started(config(tmp_path, monitors={"wandb": {"offline": True}}))
    monitor.log(1, {"loss/mean": 1.0})
    monitor.close(PATIENCE_S)
    assert caplog.text.count("OSError: no such project") == 1
    assert caplog.text.count("monitor wandb failed") == 1


@pytest.mark.slow
async def test_a_run_reaches_its_end_whatever_its_monitor_does(
    tmp_path: Path, model_dir: Path, fake: Install
) -> None:
    fake(**FAKES["hangs when it is opened"])
    async with Swarm(tmp_path, model_dir, monitors={"wandb": {"offline": True}}) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        assert (await swarm.finished())["steps"] == 3
