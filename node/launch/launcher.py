"""`primerl-node rl`: one trainer and its workers as separate processes, each with a key of its own.

Every process that is started here is gone when launch() returns or raises; should this process be killed,
its children notice (PRIMERL_PARENT_PID) and leave too.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..app.daemon import load_key
from ..config import loader
from ..config.paths import expand_home
from ..config.run import MAX_SEEDS, RunConfig
from ..environments.allowed import BUNDLED, READS_DATA
from ..errors import EngineError, NodeError, TicketError, UsageError
from ..gpus import VARIABLE, shown, usable
from ..ops.control import NodeState, View, watched
from ..ops.logs import LogLimits
from ..ops.service_manager import service_manager
from ..process.exit_reason import CROWDED
from ..process.spawn import LoggedProcess
from ..storage.chunk_store import CHUNKS
from ..storage.run_files import (
    LOGS,
    SETTINGS,
    TICKET,
    check_free,
    check_kinds,
    claim,
    clean,
    held,
    make_directory,
    write,
)
from ..tasks import end_tasks
from ..verification.bounds import measures_bounds
from .mps import mps_daemon
from .placement import GpuPlacement, Names, place

TRAINER = "trainer"
PROGRAM = (sys.executable, "-m", "primerl.cli.main")
OF_THE_TRAINER = {"wandb": {"name"}}
"""Keys of [monitors] that its workers do not share."""


class NodeCommands:
    """The command lines of the processes: this program itself, as `train` and `join`."""

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        """Build the `train` command from the arguments of `rl`; without cleaning, because the launcher's logs
        are already there."""
        data_dir = str(config.run_dir / TRAINER)
        return [*PROGRAM, "train", *args, "--data-dir", data_dir, "--no-clean"]

    def worker(self, config: RunConfig, name: str) -> list[str]:
        """Build a `join` command with the network, engine and store settings of the run.

        It reads its ticket from standard input.
        """
        data_dir = config.run_dir / name
        settings = write_worker_config(config, data_dir)
        return [
            *PROGRAM,
            *("join", "--role", "inference", "--ticket", "-", "--data-dir", str(data_dir)),
            *("@", str(settings)),
        ]


def write_worker_config(config: RunConfig, data_dir: Path) -> Path:
    """Write the settings that a worker shares with its run into its data directory; ports are its own."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    dumped = config.model_dump(
        mode="json", include={"network", "limits", "engine", "weights", "log", "sandbox"}
    )
    if "max_model_len" not in config.engine.model_fields_set:
        del dumped["engine"][
            "max_model_len"
        ]  # set in a file it would bound what the run's manifest says
    dumped["environments"] = {
        "allow": [environment.id for environment in config.mixture]
    }  # the author of the run's config allows them
    dumped |= config.model_dump(
        mode="json", include={"monitors"}, exclude={"monitors": OF_THE_TRAINER}
    )
    seeds = dumped["network"]["seeds"]
    if config.launch.share_chunks:
        chunks = (config.run_dir / TRAINER / CHUNKS).absolute()
        seeds = [chunks.as_uri(), *seeds][:MAX_SEEDS]
    dumped["network"] |= {"port": 0, "advertise": [], "seeds": seeds}
    path = data_dir / SETTINGS
    write(path, loader.to_toml(dumped))
    return path


def trainer_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a child: quiet libraries, and a useful number of threads."""
    result = dict(environ)
    result["PRIMERL_PARENT_PID"] = str(os.getpid())
    result["PYTHONUNBUFFERED"] = "1"
    result.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.training.threads == 1 or (os.cpu_count() or 1) <= 2:
        result.setdefault("OMP_NUM_THREADS", "1")
    local = config.model.create is not None or expand_home(config.model.name).is_dir()
    offline = BUNDLED.keys() - {name for name, module in BUNDLED.items() if module in READS_DATA}
    if local and {environment.id for environment in config.mixture} <= offline:  # they need no hub
        result.setdefault("HF_HUB_OFFLINE", "1")
    return result


def worker_environment(config: RunConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Make the trainer's environment without our settings, as a worker's are in its file, and without keys of
    judges."""
    ours = {"PRIMERL_PARENT_PID", "PRIMERL_PASSPHRASE", "PRIMERL_PASSPHRASE_FILE"}
    keys = {environment.judge.key_variable for environment in config.mixture if environment.judge}
    return {
        name: value
        for name, value in trainer_environment(config, environ).items()
        if (not name.startswith("PRIMERL_") or name in ours) and name not in keys
    }


def with_gpus(environment: Mapping[str, str], names: Sequence[str] | None) -> dict[str, str]:
    """Make the environment of a child that sees these GPUs; None: its parent's GPUs."""
    return dict(environment) if names is None else {**environment, VARIABLE: shown(names)}


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LauncherTimeouts:
    """Pauses and deadlines of the launcher, seconds."""

    poll: float = 0.1
    view: float = 1.0
    back_off: tuple[float, ...] = (1.0, 3.0, 9.0)
    """Pauses before the restarts of one worker; it is given up after the last."""
    ticket: float = 300.0
    """Time for the trainer to write its ticket."""
    well: float = 600.0
    """A worker that ran this long gets all its restarts back."""
    logs: float = 10.0
    """Between two checks of the sizes of the processes' logs."""
    leave: float = 30.0
    """Time for workers to leave by themselves after the run, seconds."""
    grace: float = 20.0
    """Between SIGTERM and SIGKILL."""


async def launch(
    config: RunConfig,
    args: Sequence[str],
    *,
    view: View,
    placement: GpuPlacement | None = None,
    commands: NodeCommands | None = None,
    pace: LauncherTimeouts | None = None,
) -> Path:
    """Run the whole of `config` on this machine; returns the run's directory.

    Without a `placement` the run is placed on the GPUs that this process sees.

    Raises:
        UsageError: the GPUs do not allow it.
        BusyError: another launcher, or a node, works in the run's directory.
        NodeError: the trainer failed (its own error and exit code where it gave one), no ticket came, or
            every worker was given up.
    """
    placement = placement or place(config, usable())
    with held(config.run_dir):
        prepare(config)
        launcher = Launcher(
            config, placement, view, commands or NodeCommands(), pace or LauncherTimeouts()
        )
        if placement.trainer is not None:
            for line in placement.lines():
                view.say(line)
        service_manager().tell("READY=1", f"STATUS=rl in {config.run_dir}")
        run = _run(launcher, args)
        await watched(launcher.nodes, view, run, pace_s=launcher.pace.view)
    return config.run_dir


async def _run(launcher: "Launcher", args: Sequence[str]) -> None:
    """Run until every process has ended."""
    logs = asyncio.create_task(launcher.keep_logs_small(), name="logs")
    try:
        async with launcher.shared_gpus():
            try:
                await launcher.run(args)
            finally:
                await launcher.close()
    finally:
        await end_tasks(logs)


def prepare(config: RunConfig) -> None:
    """Mark the run's directory, make one for logs and remove an earlier run's ticket. Raises BusyError,
    UsageError, StorageError."""
    run_dir = config.run_dir
    if config.clean and not config.goes_on:
        clean(run_dir)
    check_kinds(run_dir)
    claim(run_dir, goes_on=config.goes_on)
    make_directory(run_dir / LOGS)
    check_free(run_dir)
    (run_dir / TICKET).unlink(missing_ok=True)


class Launcher:
    """The processes of one run."""

    def __init__(
        self,
        config: RunConfig,
        placement: GpuPlacement,
        view: View,
        commands: NodeCommands,
        pace: LauncherTimeouts,
    ) -> None:
        self.nodes: dict[str, NodeState] = {}
        self.pace = pace
        self._config = placement.applied(config)
        self._placement = placement
        self._view = view
        self._commands = commands
        self._children: list[LoggedProcess] = []
        self._working = 0
        self._last_failure = ""
        self._variables: dict[str, str] = {}
        """Variables of every child's environment, beside those of its role."""

    @contextlib.asynccontextmanager
    async def shared_gpus(self) -> AsyncGenerator[None]:
        """Run NVIDIA MPS for the processes if it is configured. Raises UsageError, EngineError."""
        if not self._config.launch.mps:
            yield
            return
        environment = trainer_environment(self._config, os.environ)
        log = self._config.run_dir / LOGS / "mps.log"
        async with mps_daemon(environment, log) as self._variables:
            yield

    async def run(self, args: Sequence[str]) -> None:
        """Start everything and wait for the trainer's end, then for the workers'."""
        place = self._placement
        environment = with_gpus(trainer_environment(self._config, os.environ), place.trainer)
        references = await asyncio.to_thread(self._references)
        arguments = [*args, *place.trainer_arguments(), *references]
        command = self._commands.trainer(self._config, arguments)
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

    async def keep_logs_small(self) -> None:
        """Rotate the logs of the processes when they are large."""
        log = LogLimits()
        while True:
            await asyncio.sleep(self.pace.logs)
            for child in list(self._children):
                try:
                    await asyncio.to_thread(child.put_log_aside, log.max_bytes, log.keep)
                except OSError as error:
                    logger.warning("%s is not put aside: %s", child.log, error)

    async def close(self) -> None:
        """End all processes: SIGTERM, then SIGKILL."""
        await asyncio.gather(*(child.stop(self.pace.grace) for child in self._children))

    def _names(self) -> dict[str, Names | None]:
        """Name the workers, with the GPUs of each."""
        return {f"worker_{at}": gpus for at, gpus in enumerate(self._placement.workers, start=1)}

    def _references(self) -> list[str]:
        """Make the workers' keys, and vouch for them to the trainer where it measures noise by workers.

        Raises KeyFileError.
        """
        config = self._config
        if not measures_bounds(config):
            return []
        known = list(config.verification.references)
        for name in self._names():
            directory = config.run_dir / name
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            known.append(load_key(directory).node_id.hex())
        return ["--verification.references", json.dumps(known)] if known else []

    async def _work(self, trained: asyncio.Task[int]) -> None:
        workers = self._names()
        self._working = len(workers)
        ticket = asyncio.create_task(self._ticket(trained), name="ticket")
        try:
            *outcomes, _ = await asyncio.gather(
                *(self._supervise(name, gpus, trained, ticket) for name, gpus in workers.items()),
                ticket,
            )
        finally:
            await end_tasks(ticket)
        if workers and not any(outcomes):
            raise EngineError(f"every worker failed; the last: {self._last_failure}")

    async def _ticket(self, trained: asyncio.Task[int]) -> str:
        """Return the ticket that the trainer writes; "" if it ends before. Raises EngineError."""
        path = self._config.run_dir / TICKET
        limit = self.pace.ticket
        try:
            async with asyncio.timeout(limit):
                while True:
                    if trained.done() or _has_text(path):
                        return await asyncio.to_thread(_text, path)
                    await asyncio.sleep(self.pace.poll)
        except TimeoutError as error:
            raise EngineError(
                f"the trainer wrote no ticket in {limit:.0f} s: see its log"
            ) from error

    async def _supervise(
        self, name: str, gpus: Names | None, trained: asyncio.Task[int], ticket: asyncio.Task[str]
    ) -> bool:
        """Keep one worker running; return whether it left without a failure."""
        clock = asyncio.get_running_loop().time
        pauses, crowded = iter(self.pace.back_off), False
        while True:
            born = clock()
            code, failure = await self._live(name, gpus, trained, ticket)
            if not failure:
                self.nodes[name].note = "left"
                return True
            if clock() - born >= self.pace.well:
                pauses = iter(self.pace.back_off)
            # try once more: the memory of a process that has just died may not be free yet
            hopeless = code in HOPELESS or (crowded and CROWDED in failure)
            crowded = CROWDED in failure
            pause = None if hopeless else next(pauses, None)
            if pause is None:
                self.nodes[name].note = "failed"
                self._give_up(failure)
                return False
            self.nodes[name].note = "restarting"
            self._view.say(f"{failure}: starting it again in {pause:g} s")
            await asyncio.sleep(pause)

    def _give_up(self, failure: str) -> None:
        self._working -= 1
        self._last_failure = failure
        count = len(self._placement.workers)
        self._view.say(
            f"{failure}: given up. {self._working} of {count} workers are left"
            + (", and the run goes on with them" if self._working else "")
        )

    async def _live(
        self, name: str, gpus: Names | None, trained: asyncio.Task[int], ticket: asyncio.Task[str]
    ) -> tuple[int, str]:
        """Run a worker once; return its exit code, and its failure or "".

        It loads its libraries while the trainer makes the ticket.
        """
        environment = with_gpus(worker_environment(self._config, os.environ), gpus)
        command = self._commands.worker(self._config, name)
        child = await self._start(name, command, environment, fed=True)
        ended = asyncio.create_task(child.wait(), name=name)
        try:
            await asyncio.wait((ended, ticket), return_when=asyncio.FIRST_COMPLETED)
            if ticket.done():
                text = ticket.result()
                await (child.feed(text) if text else child.stop(self.pace.grace))
            code = await ended
        finally:
            await end_tasks(ended)
        await child.stop(self.pace.grace)  # the processes that it started itself
        if code == 0 or trained.done():
            return code, ""
        error = error_in(child.last_lines(20))
        return code, f"{name} {ending(code)}{': ' if error else ''}{error} ({child.log})"

    async def _let_leave(self, work: asyncio.Task[None]) -> None:
        done, _ = await asyncio.wait((work,), timeout=self.pace.leave)
        if not done:
            self._view.say(f"workers still here {self.pace.leave:g} s after the end: stopping them")

    async def _start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        fed: bool = False,
    ) -> LoggedProcess:
        run_dir = self._config.run_dir
        log = run_dir / LOGS / f"{name}.log"
        child = LoggedProcess(name, command, log, {**environment, **self._variables})
        self._children = [old for old in self._children if not old.ended] + [child]
        self.nodes.setdefault(name, NodeState(name, run_dir / name)).note = "running"
        await child.start(fed=fed)
        logger.info("started %s, pid %s", name, child.pid)
        return child

    def _trainer_error(self, trainer: LoggedProcess, code: int) -> NodeError:
        lines = trainer.last_lines(20)
        if error := error_in(lines):
            return error_of(code, error)
        for line in lines:
            self._view.say(f"  {line}")
        return error_of(code, f"the trainer {ending(code)}: see {trainer.log}; --resume goes on")


ERROR_PREFIX = "primerl-node: error: "
"""How the CLI begins the line with the error that ended it."""
HOPELESS = frozenset({UsageError.exit_code, TicketError.exit_code})
"""Exit codes of a worker for which a restart is useless."""


def error_in(lines: Sequence[str]) -> str:
    """Find the error that ended a program of ours at the end of its log; "" if there is none."""
    marks = [line for line in lines if line.startswith(ERROR_PREFIX)]
    return marks[-1].removeprefix(ERROR_PREFIX) if marks else ""


def error_of(code: int, message: str) -> NodeError:
    """Turn a child's exit code back into the error."""
    kinds = {kind.exit_code: kind for kind in NodeError.__subclasses__()}
    return kinds.get(code, NodeError)(message)


def ending(code: int) -> str:
    """Describe how a process ended."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _text(path: Path) -> str:
    """Read a file; "" if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
