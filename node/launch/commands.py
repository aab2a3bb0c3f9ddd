"""What `primerl-node rl` starts: command lines of a trainer and its workers, their settings and environment.

A child gets what concerns it and nothing else: its GPUs, its ports, its file of settings.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..config import toml
from ..config.run import RunConfig
from ..environments.allowed import BUNDLED
from ..ops.gpus import VARIABLE, shown
from ..storage.run_files import TICKET, write

TRAINER = "trainer"
PROGRAM = (sys.executable, "-m", "primerl.cli.main")


class Commands(Protocol):
    """Which programs to start."""

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        """The trainer's command line."""
        ...

    def worker(self, config: RunConfig, name: str) -> list[str]:
        """A worker's command line."""
        ...


class NodeCommands:
    """This program itself, as `train` and `join`."""

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        """`train` with the arguments of `rl`; cleaning is the launcher's, whose logs are already there."""
        data_dir = str(config.run_dir / TRAINER)
        return [*PROGRAM, "train", *args, "--data-dir", data_dir, "--no-clean"]

    def worker(self, config: RunConfig, name: str) -> list[str]:
        """`join` with the network, engine and store settings of the run."""
        data_dir = config.run_dir / name
        settings = write_worker_config(config, data_dir)
        ticket = str(config.run_dir / TICKET)
        return [
            *PROGRAM,
            *("join", "--role", "inference", "--ticket", ticket, "--data-dir", str(data_dir)),
            *("@", str(settings)),
        ]


def write_worker_config(config: RunConfig, data_dir: Path) -> Path:
    """What a worker shares with its run, as a file in its data directory; ports are its own."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    dumped = config.model_dump(mode="json", include={"network", "engine", "weights", "log"})
    if "max_model_len" not in config.engine.model_fields_set:
        del dumped["engine"][
            "max_model_len"
        ]  # set in a file it would bound what the run's manifest says
    dumped["environments"] = {"allow": [config.environment.id]}  # by whoever wrote the run's config
    dumped["network"] |= {"port": 0, "libp2p_port": 0, "advertise": []}
    path = data_dir / "join.toml"
    write(path, toml.dumps(dumped))
    return path


def trainer_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: quiet libraries, and no more threads than help."""
    result = dict(environ)
    result["PRIMERL_PARENT_PID"] = str(os.getpid())
    result["PYTHONUNBUFFERED"] = "1"
    result.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.training.threads == 1 or (os.cpu_count() or 1) <= 2:
        result.setdefault("OMP_NUM_THREADS", "1")
    local = config.model.create is not None or Path(config.model.name).is_dir()
    if local and config.environment.id in BUNDLED:  # they need no hub
        result.setdefault("HF_HUB_OFFLINE", "1")
    return result


def worker_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """As the trainer's, without our settings: a worker's are in its file."""
    ours = {"PRIMERL_PARENT_PID", "PRIMERL_PASSPHRASE"}
    return {
        name: value
        for name, value in trainer_environment(config, environ).items()
        if not name.startswith("PRIMERL_") or name in ours
    }


def with_gpus(environment: Mapping[str, str], names: Sequence[str] | None) -> dict[str, str]:
    """The environment of a child that sees these GPUs; None leaves it what its parent sees."""
    return dict(environment) if names is None else {**environment, VARIABLE: shown(names)}
