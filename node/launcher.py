"""`primerl-node rl`: one trainer and its workers as separate processes, each with a key of its own.

Every process that is started here is gone when launch() returns or raises; should this process be killed,
its children notice (PRIMERL_PARENT_PID) and leave too.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import toml
from .config import RunConfig
from .errors import EngineError, NodeError
from .processes import Child
from .run_files import (
    LOGS,
    TICKET,
    check_free,
    clean,
)
from .watch import NodeState, View, follow

logger = logging.getLogger(__name__)

TRAINER = "trainer"
PROGRAM = (sys.executable, "-m", "primerl.cli.main")
BUNDLED_ENVIRONMENTS = ("reverse-text", "arithmetic")
"""They need no hub, so a run of a local model in them can be kept off the network."""


@dataclass(frozen=True)
class Pace:
    """How patient the launcher is, seconds."""

    poll: float = 0.1
    view: float = 0.5
    back_off: tuple[float, ...] = (1.0, 3.0, 9.0)
    """Pauses before the restarts of one worker; it is given up after the last."""
    leave: float = 30.0
    """For workers to leave by themselves after the run."""
    grace: float = 20.0
    """Between SIGTERM and SIGKILL."""


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


async def launch(
    config: RunConfig,
    args: Sequence[str],
    *,
    view: View,
    commands: Commands | None = None,
    pace: Pace | None = None,
) -> Path:
    """Run the whole of `config` on this machine; returns the run's directory.

    Raises:
        NodeError: the trainer failed (its own error and exit code where it gave one), no ticket came, or
            every worker was given up.
    """
    prepare(config)
    launcher = Launcher(config, view, commands or NodeCommands(), pace or Pace())
    watching = asyncio.create_task(
        follow(launcher.nodes, view, pace_s=launcher.pace.view), name="live view"
    )
    try:
        await launcher.run(args)
    finally:
        await launcher.close()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return config.run_dir


def prepare(config: RunConfig) -> None:
    """An empty place for logs, and no ticket of an earlier run. Raises BusyError, UsageError."""
    run_dir = config.run_dir
    if config.clean and not config.goes_on:
        clean(run_dir)
    (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
    check_free(run_dir)
    (run_dir / TICKET).unlink(missing_ok=True)


class Launcher:
    """The processes of one run."""

    def __init__(self, config: RunConfig, view: View, commands: Commands, pace: Pace) -> None:
        self.nodes: dict[str, NodeState] = {}
        self.pace = pace
        self._config = config
        self._view = view
        self._commands = commands
        self._children: list[Child] = []

    async def run(self, args: Sequence[str]) -> None:
        """Start everything and wait for the trainer's end, then for the workers'."""
        environment = trainer_environment(self._config, os.environ)
        command = self._commands.trainer(self._config, args)
        trainer = await self._start(TRAINER, command, environment)
        trained = asyncio.create_task(trainer.wait(), name=TRAINER)
        work = asyncio.create_task(self._work(trained), name="workers")
        try:
            await asyncio.wait((trained, work), return_when=asyncio.FIRST_COMPLETED)
            if not trained.done():
                await work  # ended first: it failed, or there are no workers of ours
            code = await trained
            self.nodes[TRAINER].note = "ended"
            if code != 0:
                raise self._trainer_error(trainer, code)
            await self._let_leave(work)
        finally:
            for task in (work, trained):
                task.cancel()
            await asyncio.gather(work, trained, return_exceptions=True)

    async def close(self) -> None:
        """End whatever still runs, politely first."""
        await asyncio.gather(*(child.stop(self.pace.grace) for child in self._children))

    async def _work(self, trained: asyncio.Task[int]) -> None:
        await self._ticket(trained)
        if trained.done():
            return
        names = [f"worker_{index}" for index in range(1, self._config.launch.workers + 1)]
        outcomes = await asyncio.gather(*(self._supervise(name, trained) for name in names))
        if names and not any(outcomes):
            raise EngineError(
                f"every worker failed: see {self._config.run_dir / LOGS}/{names[0]}.log"
            )

    async def _ticket(self, trained: asyncio.Task[int]) -> None:
        path = self._config.run_dir / TICKET
        limit = self._config.launch.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                while True:
                    if trained.done() or _has_text(path):
                        return
                    await asyncio.sleep(self.pace.poll)
        except TimeoutError as error:
            raise EngineError(
                f"the trainer wrote no ticket in {limit:.0f} s: see its log, or raise "
                "--launch.start-timeout-s"
            ) from error

    async def _supervise(self, name: str, trained: asyncio.Task[int]) -> bool:
        """Keep one worker running; whether it left in peace."""
        pauses = iter(self.pace.back_off)
        while True:
            failure = await self._live(name, trained)
            if not failure:
                self.nodes[name].note = "left"
                return True
            pause = next(pauses, None)
            if pause is None:
                self.nodes[name].note = "failed"
                self._view.say(f"{failure}: given up")
                return False
            self.nodes[name].note = "restarting"
            self._view.say(f"{failure}: starting it again in {pause:g} s")
            await asyncio.sleep(pause)

    async def _live(self, name: str, trained: asyncio.Task[int]) -> str:
        """One life of a worker; how it failed, or "" if it did not."""
        environment = worker_environment(self._config, os.environ)
        child = await self._start(name, self._commands.worker(self._config, name), environment)
        code = await child.wait()
        await child.stop(self.pace.grace)  # what it started itself
        if code == 0 or trained.done():
            return ""
        return f"{name} {ending(code)} ({child.log})"

    async def _let_leave(self, work: asyncio.Task[None]) -> None:
        done, _ = await asyncio.wait((work,), timeout=self.pace.leave)
        if not done:
            self._view.say(f"workers still here {self.pace.leave:g} s after the end: stopping them")

    async def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Child:
        run_dir = self._config.run_dir
        child = Child(name, command, run_dir / LOGS / f"{name}.log", environment)
        self._children = [old for old in self._children if not old.ended] + [child]
        self.nodes.setdefault(name, NodeState(name, run_dir / name)).note = "running"
        await child.start()
        logger.info("started %s, pid %s", name, child.pid)
        return child

    def _trainer_error(self, trainer: Child, code: int) -> NodeError:
        lines = trainer.last_lines(20)
        marks = [line for line in lines if line.startswith(ERROR_PREFIX)]
        if marks:
            return error_of(code, marks[-1].removeprefix(ERROR_PREFIX))
        for line in lines:
            self._view.say(f"  {line}")
        return error_of(code, f"the trainer {ending(code)}: see {trainer.log}")


ERROR_PREFIX = "primerl-node: error: "
"""How the CLI prints what ended it."""


def error_of(code: int, message: str) -> NodeError:
    """The error that the CLI of a child turned into an exit code."""
    kinds = {kind.exit_code: kind for kind in NodeError.__subclasses__()}
    return kinds.get(code, NodeError)(message)


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def write_worker_config(config: RunConfig, data_dir: Path) -> Path:
    """What a worker shares with its run, as a file in its data directory; ports are its own."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    dumped = config.model_dump(mode="json", include={"network", "engine", "weights", "log"})
    dumped["network"] |= {"port": 0, "libp2p_port": 0, "advertise": []}
    dumped["leases"] = config.rollouts.leases_per_worker
    path = data_dir / "join.toml"
    path.write_text(toml.dumps(dumped), encoding="utf-8")
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
    if local and config.environment.id in BUNDLED_ENVIRONMENTS:
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


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
