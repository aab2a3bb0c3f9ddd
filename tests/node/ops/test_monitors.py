"""Monitors: what the real libraries hold after a run, what never reaches them, and what they cannot hold up."""

import json
import os
import re
import socket
import struct
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
from primerl.node.ops.monitors import LIBRARIES, LINES_WAITING, Monitors, check_monitors

__all__ = ["model_dir", "quiet_registry"]

PATIENCE_S = 120.0
"""Of a test that waits for a whole library on a busy machine."""
LINES = 4 * LINES_WAITING
"""Of a monitor that reads none: more than wait for it, and than a pipe holds."""


def real(monitor: str) -> pytest.MarkDecorator:
    library = LIBRARIES[monitor]
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


def config(directory: Path, **sections: Any) -> RunConfig:
    made = RunConfig.model_validate({"name": "r", "output_dir": directory, **sections})
    made.run_dir.mkdir(parents=True, exist_ok=True)
    return made


def three_steps(made: RunConfig) -> None:
    """Log steps 1 to 3, go back to 2, log 3 again; the file has the same."""
    metrics = MetricsLog(made.run_dir / "metrics.jsonl", monitors := Monitors.of_run(made))
    for step in (1, 2, 3):
        metrics.write(step, {"loss/mean": 1.0 / step, "reward/mean": None, "time": 5.0})
    metrics.go_back(2, {})
    metrics.write(3, {"loss/mean": 0.125, "optim/grad_norm": float("nan")})
    monitors.close(PATIENCE_S)
    metrics.close()


def bytes_below(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


# -- the real libraries ----------------------------------------------------------------------------


@real("wandb")
def test_wandb_offline_holds_the_steps_and_the_public_config(tmp_path: Path) -> None:
    three_steps(
        made := config(
            tmp_path,
            monitors={"wandb": {"offline": True, "project": "p", "tags": ["t"], "group": "g"}},
            training={"lr": 0.03125},
        )
    )
    history, run = wandb_records(made.run_dir)
    assert [(row["step"], row["loss/mean"]) for row in history] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (3, 0.125),
    ]  # fmt: skip
    assert all("reward/mean" not in row and "time" not in row for row in history)
    assert (run.project, run.display_name, run.run_group, list(run.tags)) == ("p", "r", "g", ["t"])
    assert run.run_id == (made.run_dir / "monitors.id").read_text()
    told = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert told["training"]["lr"] == 0.03125
    assert "network" not in told


@real("wandb")
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
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_records(run_dir: Path) -> tuple[list[dict[str, Any]], Any]:
    """The rows of the history, and the record of the run, of the one offline run."""
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


@real("tensorboard")
def test_tensorboard_files_hold_the_steps_and_where_the_run_went_back(tmp_path: Path) -> None:
    three_steps(made := config(tmp_path, monitors={"tensorboard": {}}))
    events = tensorboard_events(made.run_dir / "tensorboard")
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value if e.step]
    assert scalars == [
        (1, "loss/mean", 1.0),
        (2, "loss/mean", 0.5),
        (3, "loss/mean", pytest.approx(1 / 3)),
        (3, "loss/mean", 0.125),
    ]
    assert [e.step for e in events if e.HasField("session_log")] == [3], "purged from there on"


def tensorboard_events(directory: Path) -> list[Any]:
    """Read event files: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import (  # pyright: ignore[reportMissingImports]
        Event,
    )

    found: list[Any] = []
    for path in sorted(directory.iterdir(), key=lambda path: path.suffix):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event: Any = Event()
            event.ParseFromString(data[12 : 12 + length])
            found.append(event)
            data = data[16 + length :]
    return found


@real("trackio")
def test_trackio_holds_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    three_steps(config(tmp_path, monitors={"trackio": {"project": "p"}}))
    found = bytes_below(tmp_path / "trackio")
    assert b"loss/mean" in found
    assert b"0.125" in found
    log = (tmp_path / "r" / "logs" / "monitor_trackio.log").read_text()
    assert "Created new run: r" in log


@pytest.mark.parametrize("monitor", [pytest.param(one, marks=real(one)) for one in LIBRARIES])
def test_no_secret_of_the_node_reaches_a_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monitor: str
) -> None:
    """Neither passwords of seeds, nor the passphrase, the command line, or an address."""
    secret = "correct-horse-battery"
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "out" / "trackio"))
    monkeypatch.setenv("PRIMERL_PASSPHRASE", secret)
    monkeypatch.setattr(sys, "argv", ["primerl-node", "--network.seeds", secret])
    made = config(
        tmp_path / "out",
        network={"seeds": [f"https://me:{secret}@host/c"], "advertise": [f"{secret}:1"]},
        verification={"references": [secret]},
        training={"fsdp": {"rendezvous": f"{secret}:9"}},
        monitors={monitor: {"offline": True} if monitor == "wandb" else {}},
    )
    three_steps(made)
    found = bytes_below(tmp_path / "out")
    assert b"loss/mean" in found
    assert secret.encode() not in found


# -- what may go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("monitor", LIBRARIES)
def test_a_monitor_that_is_not_installed_is_refused_with_what_to_install(
    tmp_path: Path, monitor: str
) -> None:
    monitors = config(tmp_path, monitors={monitor: {}}).monitors
    with pytest.raises(UsageError, match=rf"primerl-node\[{monitor}\]"):
        check_monitors(monitors, lambda library: None)
    check_monitors(RunConfig().monitors, lambda library: None)
    assert SftConfig.model_validate({"monitors": {monitor: {}}}).monitors != RunConfig().monitors


@real("wandb")
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


@real("wandb")
def test_a_server_that_never_answers_is_left_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        monitors = Monitors.of_run(config(tmp_path, monitors={"wandb": {}}))
        for step in range(9):
            monitors.log(step, {"loss/mean": 1.0})
        monitors.close(5.0)
    assert "is killed" in caplog.text


FAKES = {
    "hangs when it is opened": "import time\ndef SummaryWriter(*_, **__): time.sleep(600)",
    "cannot be opened": "def SummaryWriter(*_, **__): raise OSError('no such project')",
    "ends": "import os\ndef SummaryWriter(*_, **__): os._exit(3)",
    "hangs when it is closed": """
import time
class SummaryWriter:
    def __init__(self, *_, **__): pass
    def __getattr__(self, name): return lambda *_, **__: name == "close" and time.sleep(600)
""",
    "prints without end": """
class SummaryWriter:
    def __init__(self, *_, **__): pass
    def __getattr__(self, name): return lambda *_, **__: print("x" * 9999)
""",
}
WITNESS = """
import os
class SummaryWriter:
    def __init__(self, *_, **__): self.note("environ", dict(os.environ))
    def note(self, name, given):
        with open({told!r}, "a") as file: print(name, given, file=file)
    def __getattr__(self, name): return lambda *given: self.note(name, given)
"""
Install = Callable[[str], None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a tensorboardX of this source before the real one."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))

    def install(source: str) -> None:
        (site / "tensorboardX.py").write_text(source)

    return install


def test_a_monitor_gets_the_public_config_only(
    tmp_path: Path, fake: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any of the libraries: a fake writes down all that it is given, and its variables."""
    secret, told = "correct-horse-battery", tmp_path / "told"
    monkeypatch.setenv("PRIMERL_PASSPHRASE", secret)
    fake(WITNESS.format(told=str(told)))
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
            monitors={"tensorboard": {}},
        )
    )
    found = told.read_text()
    assert "0.03125" in found
    assert "grader-7b" in found
    assert "teacher-70b" in found
    assert secret not in found
    assert [line for line in found.splitlines() if line.startswith("add_scalar")] == [
        "add_scalar ('loss/mean', 1.0, 1)",
        "add_scalar ('loss/mean', 0.5, 2)",
        f"add_scalar ('loss/mean', {1 / 3}, 3)",
        "add_scalar ('loss/mean', 0.125, 3)",
    ]


async def test_a_monitor_of_a_worker_gets_its_metrics_and_no_secret(
    tmp_path: Path, model_dir: Path, fake: Install
) -> None:
    secret, told = "correct-horse-battery", tmp_path / "told"
    fake(WITNESS.format(told=str(told)))
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        network = {"seeds": [f"https://me:{secret}@host/c"], "advertise": [f"{secret}:1"]}
        worker = swarm.add_worker("w1", monitors={"tensorboard": {}}, network=network)
        await swarm.finished()
        await worker.ended()
    found = told.read_text()
    (accepted,) = re.findall(r"add_scalar \('rollouts/accepted', (\d+), 3\)", found)
    assert int(accepted) >= 3 * 4
    assert '"max_batch": 256' in found.replace("\\n", "").replace("\\", "")
    assert secret not in found
    assert swarm.ticket not in found


@pytest.mark.parametrize("fault", [fault for fault in FAKES if fault != "cannot be opened"])
def test_a_monitor_that_fails_or_hangs_holds_nothing_up(
    tmp_path: Path, fake: Install, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake(FAKES[fault])
    made = config(tmp_path, monitors={"tensorboard": {}})
    monitors = Monitors.of_run(made)
    metrics = MetricsLog(made.run_dir / "metrics.jsonl", monitors)
    began = time.monotonic()
    for step in range(LINES):
        metrics.write(step, {f"value/{at}": 0.5 for at in range(20)})
    assert time.monotonic() - began < 60, "lines were waited for"
    monitors.close(3.0)
    metrics.close()
    assert len((made.run_dir / "metrics.jsonl").read_text().splitlines()) == LINES
    assert "monitor tensorboard" in caplog.text


def test_a_monitor_that_failed_is_named_with_its_last_words(
    tmp_path: Path, fake: Install, caplog: pytest.LogCaptureFixture
) -> None:
    fake(FAKES["cannot be opened"])
    monitors = Monitors.of_run(config(tmp_path, monitors={"tensorboard": {}}))
    monitors.close(PATIENCE_S)
    assert "OSError: no such project" in caplog.text


@pytest.mark.slow
async def test_a_run_reaches_its_end_whatever_its_monitor_does(
    tmp_path: Path, model_dir: Path, fake: Install
) -> None:
    fake(FAKES["hangs when it is opened"])
    async with Swarm(tmp_path, model_dir, monitors={"tensorboard": {}}) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        assert (await swarm.finished())["steps"] == 3
