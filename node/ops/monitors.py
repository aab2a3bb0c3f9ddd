"""Send metrics to W&B, TensorBoard and trackio, beside metrics.jsonl.

- Each monitor is a process of its own: what fails, hangs or prints there costs that monitor alone, and at the
  end it is killed after CLOSE_S seconds.
- It is given metrics and the public part of the config: it knows no key, ticket, passphrase or address.
"""

import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from pydantic_config import BaseConfig

from ..config.monitors import MonitorsConfig
from ..config.run import OwnRunConfig
from ..errors import StorageError, UsageError, file_error
from ..process.background import BackgroundThread
from ..storage.run_files import LOGS, write

logger = logging.getLogger(__name__)

LINES_WAITING = 256
"""Lines that may wait for a monitor; with a slower one further ones are left out."""
CLOSE_S = 10.0
"""Longest wait, for all monitors together, when a run ends."""
LOGIN_S = 60.0
"""Longest wait for W&B to be imported and to say whether there is a login."""
RUN_ID = "monitors.id"
"""File of a run's directory: its id in W&B, the same after --resume."""
LIBRARIES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}
"""Module of each monitor; the extras of the package have the names of the monitors."""
PUBLIC: dict[str, Any] = {
    **dict.fromkeys(
        ("name", "seed", "max_steps", "max_epochs", "batch_size", "batch_tokens"), True
    ),
    **dict.fromkeys(
        ("model", "environment", "environments", "sampling", "rollouts", "training", "warmup"), True
    ),
    "evaluation": {"prompts", "interval", "samples"},
}
"""Keys of a config that monitors get: what every node of the run knows anyway, and how it learns."""

PUBLIC_JUDGE = ("model", "temperature", "max_tokens")
"""The same of the judge of an environment."""


def configured(config: MonitorsConfig) -> list[str]:
    """Name the monitors that are switched on."""
    return [name for name in LIBRARIES if getattr(config, name) is not None]


def check_monitors(
    config: MonitorsConfig, find: Callable[[str], object | None] = find_spec
) -> None:
    """Raise UsageError for a monitor that cannot work: not installed, or W&B online without a login.

    `find` says whether a module is installed.
    """
    for name in configured(config):
        if find(LIBRARIES[name]) is None:
            raise UsageError(
                f"monitors.{name} needs a package that is not installed: "
                f"`pip install 'primerl-node[{name}]'`, or leave [monitors.{name}] out"
            )
    wandb = config.wandb
    if wandb and not wandb.offline and os.environ.get("WANDB_MODE", "online") == "online":
        _check_login()


def _check_login() -> None:
    """Raise UsageError where W&B knows no key: it would ask for one, in a process that has no terminal."""
    program = "import wandb; exit(not wandb.login(prompt=False, verify=False))"
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOGIN_S,
        )
        if not done.returncode:
            return
    raise UsageError(
        "monitors.wandb has no login: run `wandb login`, set WANDB_API_KEY, or "
        "--monitors.wandb.offline true"
    )


@dataclass(frozen=True)
class MonitoredRun:
    """A node's part in a run, as monitors are told beside its metrics."""

    name: str
    id: str
    """Id in W&B; the same after a restart."""
    role: str
    """trainer, sft, inference or validator."""
    group: str | None
    """Group of the run's nodes, where the section of the monitor names none."""
    directory: str
    """Directory of the monitors' files and logs."""
    config: Mapping[str, Any]
    resumed: bool


def group_of(name: str, run_id: bytes) -> str:
    """Name the group of a run's nodes, the same on each of them."""
    return f"{name}-{run_id.hex()[:8]}"


class Monitors:
    """The monitors of a node; without any it costs nothing."""

    def __init__(self, config: MonitorsConfig, run: MonitoredRun) -> None:
        """Start a process for each monitor that is switched on. Raises StorageError."""
        self._processes: list[_MonitorProcess] = []
        for name in configured(config):
            section: BaseConfig = getattr(config, name)
            hello = {
                "monitor": name,
                "section": section.model_dump(mode="json"),
                "run": asdict(run),
            }
            self._processes.append(_MonitorProcess(name, hello, Path(run.directory) / LOGS))

    @classmethod
    def of_run(
        cls, config: OwnRunConfig, role: str = "trainer", group: str | None = None
    ) -> "Monitors":
        """Start the monitors of a trainer or of sft. Raises StorageError."""
        directory = config.run_dir.absolute()
        public = config.model_dump(mode="json", include=PUBLIC)
        public["training"]["fsdp"].pop("rendezvous")  # an address
        for one in [public.get("environment"), *public.get("environments", ())]:
            if one and one["judge"]:
                one["judge"] = {name: one["judge"][name] for name in PUBLIC_JUDGE}
        for one in [public["training"], *public.get("environments", ())]:
            if (loss := one.get("loss")) and loss["endpoint"]:
                loss["endpoint"] = {"model": loss["endpoint"]["model"]}
        run = MonitoredRun(
            config.name,
            _run_id(directory) if configured(config.monitors) else "",
            role,
            group,
            str(directory),
            public,
            config.goes_on,
        )
        return cls(config.monitors, run)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass on the numbers of a line; never waits."""
        line = {"step": step, "values": _numbers(values)}
        for one in self._processes:
            one.send(line)

    def go_back(self, step: int) -> None:
        """Have steps after `step` count as new; never waits."""
        for one in self._processes:
            one.send({"go_back": step})

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Let all monitors finish, within `deadline_s` seconds; kill the others."""
        until = time.monotonic() + deadline_s
        for one in self._processes:
            one.finish()
        for one in self._processes:
            one.close(until)


class _MonitorProcess:
    """A child that reads lines of JSON; its output goes to RUN_DIR/logs/monitor_NAME.log."""

    def __init__(self, name: str, hello: Mapping[str, Any], logs: Path) -> None:
        """Raises StorageError."""
        self._name = name
        self._log = logs / f"monitor_{name}.log"
        self._lost = False
        try:
            logs.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=_environment(),
                    start_new_session=True,  # a ctrl-C is for the trainer, which closes it
                )
        except OSError as error:
            raise file_error(error, self._log) from error
        self._thread = BackgroundThread(f"monitor {name}", LINES_WAITING)
        self.send(hello)

    def send(self, line: Mapping[str, Any]) -> None:
        """Send a line, in the monitor's own thread."""
        self._thread.put(lambda: self._write(json.dumps(line).encode() + b"\n"))

    def finish(self) -> None:
        """Tell it, after everything that waits, that no more will come."""
        self._thread.put(self._end)

    def close(self, until: float) -> None:
        """Wait for its end until a monotonic time, then kill it."""
        if self._thread.close(max(0.0, until - time.monotonic())):
            self._end()
        try:
            failed = self._process.wait(max(0.0, until - time.monotonic())) != 0
        except subprocess.TimeoutExpired:
            failed = False
            logger.warning(
                "monitor %s did not end in time and is killed: its last lines may be missing "
                "(metrics.jsonl has them)",
                self._name,
            )
            self._process.kill()
            self._process.wait()
            self._end()
        if failed and not self._lost:
            self._report()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        if self._lost:
            return
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            self._report()

    def _end(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it ended before
            self._process.stdin.close()

    def _report(self) -> None:
        self._lost = True
        logger.warning(
            "monitor %s failed, metrics.jsonl has everything: %s", self._name, self._last_words()
        )

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        found = [line.strip() for line in lines if line.strip()]
        return found[-1][:500] if found else f"exit code {self._process.poll()}"


def _environment() -> dict[str, str]:
    """Make the variables of a monitor: ours may hold a passphrase; W&B's own crash reports are off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRIMERL_")}
    return {"WANDB_ERROR_REPORTING": "false", "PYTHONUNBUFFERED": "1", **kept}


def _run_id(directory: Path) -> str:
    """Find or make the run's id. Raises StorageError."""
    path = directory / RUN_ID
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        made = token_hex(8)
        write(path, made)
        return made
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Leave out what no curve shows: missing values, texts, the time of the line."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and name != "time"
    }


# -- in the process of a monitor -------------------------------------------------------------------


class Monitor(Protocol):
    """A destination for metrics, such as W&B."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step."""
        ...

    def go_back(self, step: int) -> None:
        """Forget what came after `step`, where that can be."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class WandbMonitor:
    """A run of W&B; `step` is the axis of all curves, so that a run may go back."""

    def __init__(self, section: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        # neither the command line, its output, the host, the code nor its packages are sent
        settings = wandb.Settings(
            mode=os.environ.get("WANDB_MODE") or ("offline" if section["offline"] else "online"),
            console="off",
            silent=True,
            host="",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=section["project"],
            entity=section["entity"],
            name=section["name"] or run["name"],
            group=section["group"] or run["group"],
            job_type=run["role"],
            tags=section["tags"],
            id=run["id"],
            resume="allow",
            dir=run["directory"],
            config=run["config"],
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the history."""
        self._run.log({"step": step, **values})

    def go_back(self, step: int) -> None:
        """Do nothing: W&B keeps its steps, and repeated ones are drawn over them."""

    def close(self) -> None:
        """Send the rest and end the run."""
        self._run.finish()


class TensorboardMonitor:
    """Event files of TensorBoard."""

    def __init__(self, section: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        self._directory = section["directory"] or str(Path(run["directory"], "tensorboard"))
        self._opened = 0
        self._writer = self._open(None)
        self._writer.add_text("config", f"```json\n{json.dumps(run['config'], indent=2)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each value."""
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def go_back(self, step: int) -> None:
        """Have TensorBoard drop its data of later steps."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """Write the rest and close."""
        self._writer.close()

    def _open(self, purge_step: int | None) -> Any:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports] - an extra

        self._opened += 1  # files are named by the second: the next one must not replace the last
        return SummaryWriter(
            self._directory, purge_step=purge_step, filename_suffix=f".{self._opened}"
        )


class TrackioMonitor:
    """A run of trackio."""

    def __init__(self, section: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports] - an extra

        self._run = trackio.init(
            project=section["project"],
            name=section["name"] or run["name"],
            group=section["group"] or run["group"],
            space_id=section["space_id"],
            config=run["config"],
            resume="allow" if run["resumed"] else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        self._run.log(dict(values), step=step)

    def go_back(self, step: int) -> None:
        """Do nothing: trackio keeps its steps."""

    def close(self) -> None:
        """Send the rest and end the run."""
        self._run.finish()


MONITORS = {"wandb": WandbMonitor, "tensorboard": TensorboardMonitor, "trackio": TrackioMonitor}


def serve(lines: Iterator[str]) -> None:
    """Open the monitor that the first line names, pass the others on to it until they end."""
    hello = json.loads(next(lines))
    monitor: Monitor = MONITORS[hello["monitor"]](hello["section"], hello["run"])
    try:
        for line in lines:
            told = json.loads(line)
            if "go_back" in told:
                monitor.go_back(told["go_back"])
            else:
                monitor.log(told["step"], told["values"])
    finally:
        monitor.close()


if __name__ == "__main__":
    serve(sys.stdin)
