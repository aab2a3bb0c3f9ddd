"""Send metrics to Weights & Biases, beside metrics.jsonl.

- The library is called in one thread of its own: what fails or hangs there costs its lines alone, and at the
  end it is left after CLOSE_S seconds.
- It is given metrics and the public part of the config: it knows no key, ticket, passphrase or address.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..config.monitors import MonitorsConfig, WandbConfig
from ..config.run import OwnRunConfig
from ..errors import StorageError, UsageError
from ..process.background import BackgroundThread
from ..storage.run_files import write

logger = logging.getLogger(__name__)

LINES_WAITING = 256
"""Lines that may wait for W&B; if it is slower further ones are left out."""
CLOSE_S = 10.0
"""Longest wait when a run ends."""
LOGIN_S = 60.0
"""Longest wait for W&B to be imported and to say whether there is a login."""
RUN_ID = "monitors.id"
"""File of a run's directory: its id in W&B, the same after --resume."""
VARIABLES = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
"""Environment variables of W&B, unless they are set: no crash reports, and nothing on the terminal."""
PUBLIC: dict[str, Any] = {
    **dict.fromkeys(
        ("name", "seed", "max_steps", "max_epochs", "batch_size", "batch_tokens"), True
    ),
    **dict.fromkeys(
        ("model", "environment", "environments", "sampling", "rollouts", "training", "warmup"), True
    ),
    "evaluation": {"prompts", "interval", "samples"},
}
"""Keys of a config that W&B gets: what every node of the run knows anyway, and how it learns."""

PUBLIC_JUDGE = ("model", "temperature", "max_tokens")
"""The same for an environment's judge."""


def check_monitors(
    config: MonitorsConfig, find: Callable[[str], object | None] = find_spec
) -> None:
    """Raise UsageError if W&B is configured and cannot work: not installed, or online without a login.

    `find` says whether a module is installed.
    """
    if config.wandb is None:
        return
    if find("wandb") is None:
        raise UsageError(
            "monitors.wandb needs a package that is not installed: `pip install 'primerl-node[wandb]'`, or "
            "leave [monitors.wandb] out"
        )
    if not config.wandb.offline and os.environ.get("WANDB_MODE", "online") == "online":
        _check_login()


def _check_login() -> None:
    """Raise UsageError if W&B has no API key: it would ask for one."""
    program = "import wandb; exit(not wandb.login(prompt=False, verify=False))"
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=VARIABLES | os.environ,
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
    """A node's part in a run, as W&B gets it beside the metrics."""

    name: str
    id: str
    """Id in W&B; the same after a restart."""
    role: str
    """trainer, sft, inference or validator."""
    group: str | None
    """Group of the run's nodes, where monitors.wandb names none."""
    directory: str
    """Directory of W&B's files."""
    config: Mapping[str, Any]


def group_of(name: str, run_id: bytes) -> str:
    """Name the group of a run's nodes, the same on each of them."""
    return f"{name}-{run_id.hex()[:8]}"


class WandbMonitor:
    """A run of W&B; `step` is the axis of all curves, so that a run may go back."""

    def __init__(self, section: WandbConfig, run: MonitoredRun) -> None:
        """Begin the run of W&B in a thread."""
        self._section = section
        self._about = run
        self._run: Any = None
        self._lost = False
        self._thread = BackgroundThread("monitor wandb", LINES_WAITING)
        self._call(self._open)

    @classmethod
    def of_run(
        cls, config: OwnRunConfig, role: str = "trainer", group: str | None = None
    ) -> "WandbMonitor | None":
        """Begin the monitor of a trainer or of sft; None if there is none. Raises StorageError."""
        section = config.monitors.wandb
        if section is None:
            return None
        directory = config.run_dir.absolute()
        public = config.model_dump(mode="json", include=PUBLIC)
        public["training"]["fsdp"].pop("rendezvous")  # an address
        for environment in [public.get("environment"), *public.get("environments", ())]:
            if environment and (judge := environment["judge"]):
                environment["judge"] = {name: judge[name] for name in PUBLIC_JUDGE}
        for losses in [public["training"], *public.get("environments", ())]:
            if (loss := losses.get("loss")) and loss["endpoint"]:
                loss["endpoint"] = {"model": loss["endpoint"]["model"]}
        run_id = _run_id(directory)
        return cls(section, MonitoredRun(config.name, run_id, role, group, str(directory), public))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass on the numbers of a line; never waits."""
        row = {"step": step, **_numbers(values)}
        self._call(lambda: self._run.log(row))

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Send the rest and end the run, within `deadline_s` seconds; else leave W&B as it is."""
        self._call(lambda: self._run.finish())
        if not self._thread.close(deadline_s):
            logger.warning("W&B did not end in time: `wandb sync` sends what is missing")
            self._lost = True
            _abandon()

    def _call(self, function: Callable[[], None]) -> None:
        self._thread.put(lambda: self._guard(function))

    def _guard(self, function: Callable[[], None]) -> None:
        """Call W&B until it has failed once. Its errors, SystemExit too, end nothing else."""
        if self._lost:
            return
        try:
            function()
        except BaseException as error:  # whatever W&B raises ends its own lines alone
            if not self._lost:
                self._lost = True
                what = f"{type(error).__name__}: {error}"
                logger.warning("monitor wandb failed, metrics.jsonl has everything: %s", what)

    def _open(self) -> None:
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        section, run = self._section, self._about
        mode: Any = os.environ.get("WANDB_MODE") or ("offline" if section.offline else "online")
        # neither the command line, its output, the host, the code nor its packages are sent
        settings = wandb.Settings(
            mode=mode,
            reinit="create_new",
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
            project=section.project,
            entity=section.entity,
            name=section.name or run.name,
            group=section.group or run.group,
            job_type=run.role,
            tags=section.tags,
            id=run.id,
            resume="allow",
            dir=run.directory,
            config=dict(run.config),
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")


def _abandon() -> None:
    """Kill W&B's service process: at the exit of this one its library would wait for it.

    There is no public way. With another release it may wait a minute, and a warning remains.
    """
    module: Any = sys.modules.get("wandb")  # an import might hang, as W&B did
    try:
        connection: Any = vars(module.setup())["_connection"]
        connection._cleanup()
        connection._proc._process.kill()
    except Exception as error:  # other names in another release: it is left to run
        logger.debug("W&B's service goes on: %s", error)


def _run_id(directory: Path) -> str:
    """Find or make the run's id. Raises StorageError."""
    path = directory / RUN_ID
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        run_id = token_hex(8)
        write(path, run_id)
        return run_id
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Leave out what no curve shows: missing values, texts, the time of the line."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and name != "time"
    }
