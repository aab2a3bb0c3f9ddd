"""Shared parts of commands: config arguments and their help, finding the running node, and signals.

Config arguments (`@ file`, `--a.b value`) pass through typer untouched, in their order; node/config/loader.py
alone reads them. Nothing here may import pydantic or a config at the top: `--help` must stay fast.
"""

import ast
import asyncio
import errno
import inspect
import io
import os
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TextIO,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

import typer
import typer.core

from ..node.config.paths import expand_home, home_directory
from ..node.errors import UsageError
from ..node.ops.service_manager import service_manager
from ..node.ops.strict_json import to_json
from ..node.process.heap import freeze_after_start

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from pydantic import BaseModel
    from pydantic_config import BaseConfig

    from ..node.config.evaluation import EvalConfig
    from ..node.config.reload import ConfigSource
    from ..node.config.run import NodeConfig, RunConfig
    from ..node.config.serving import ApiConfig
    from ..node.config.sft import SftConfig
    from ..node.ops.control import RunningEntry

T = TypeVar("T")
Config = TypeVar("Config", bound="BaseConfig")

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved config as TOML, and do nothing.")
]
DryRunJson = Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")]
Tp = Annotated[
    str | None,
    typer.Option("--tp", help="GPUs that share each layer, or auto for all (vLLM, engine.tp)."),
]
Pp = Annotated[
    str | None,
    typer.Option(
        "--pp", help="GPUs in a pipeline, with some of the layers each (vLLM, engine.pp)."
    ),
]
Dp = Annotated[
    str | None,
    typer.Option("--dp", help="Number of engine replicas, not with --pp (vLLM, engine.dp)."),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        "-d",
        envvar="PRIMERL_DATA_DIR",
        help="The node's data directory, or its run's; without it, the node that runs on this machine.",
    ),
]
OwnDataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        "-d",
        envvar="PRIMERL_DATA_DIR",
        help="The node's data directory (~/.primerl).",
    ),
]
"""For commands that need no running node."""
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


# -- config arguments ------------------------------------------------------------------------------


def arguments(ctx: typer.Context, options: Mapping[str, str | None]) -> list[str]:
    """Join the config arguments that typer left over with its own options that set config keys."""
    given = [(f"--{key}", value) for key, value in options.items() if value is not None]
    return [*ctx.args, *(word for pair in given for word in pair)]


def parallel(tp: str | None, pp: str | None, dp: str | None) -> dict[str, str | None]:
    """Name the config keys that --tp, --pp and --dp set."""
    return {"engine.tp": tp, "engine.pp": pp, "engine.dp": dp}


def read_config(cls: type[Config], args: Sequence[str]) -> Config:
    """Resolve a config from `args` and PRIMERL_ variables. Raises UsageError."""
    from ..node.config.loader import load

    return load(cls, args, os.environ)


def config_source(cls: type[Config], args: Sequence[str], config: Config) -> "ConfigSource":
    """Remember where `config` is from, for `primerl-node reload`."""
    from ..node.config.reload import ConfigSource

    return ConfigSource(lambda: cast(Any, read_config(cls, args)), cast(Any, config))


def show_config(config: "BaseConfig", *, as_json: bool, notes: Sequence[str] = ()) -> None:
    """Print a config so that it can be read back, then the lines `notes` as comments.

    Raises UsageError for values that TOML cannot hold.
    """
    from ..node.config import loader

    values = config.model_dump(mode="json")
    try:
        typer.echo(
            to_json(values, indent=2) + "\n" if as_json else loader.to_toml(values), nl=False
        )
    except TypeError as error:
        raise UsageError(f"{error}, such as null in a list: --dry-run --json shows it") from error
    show_notes(notes, as_json=as_json)


def show_notes(notes: Iterable[str], *, as_json: bool) -> None:
    """Print lines after a config, as comments; after JSON on stderr."""
    for line in notes:
        typer.echo(line if as_json else f"# {line}", err=as_json)


def check_engine(config: "NodeConfig | EvalConfig", *, proven: bool = True) -> None:
    """Raise UsageError or EngineError for an engine that cannot be started like that, also before a dry run.

    `proven` is False for a command whose completions are not audited.
    """
    from ..node.app.daemon import check_config
    from ..node.config.run import ModelConfig, RunConfig
    from ..node.config.serving import ServeConfig

    engine, model = config.engine, None
    if isinstance(config, RunConfig):
        engine, model = config.worker_engine, config.model
    elif isinstance(config, ServeConfig) and config.model.name:
        model = ModelConfig(name=config.model.name)
    check_config(engine, model, proven=proven)


def check_model(config: "RunConfig | SftConfig") -> list[str]:
    """Raise UsageError for a model that the trainer cannot compute exactly, also before a dry run.

    Also refuses monitors that cannot work and groups of one rollout, and checks the loss's reference model.
    Returns lines for a dry run to show.
    """
    from ..node.config.run import ModelConfig, RunConfig
    from ..node.ops.monitors import check_monitors
    from ..node.reports.doctor import check_trainable

    check_monitors(config.monitors)
    for environment in config.mixture if isinstance(config, RunConfig) else ():
        if environment.group_size < 2:
            raise UsageError(
                f"rollouts.group_size of {environment.name} is 1: a rollout alone is compared with "
                "nothing, and nothing is learned from it: set it to 2 or more"
            )
    notes = check_trainable(config.model, config.training.seq_len)
    teacher = config.training.loss.reference
    if teacher is None:
        return notes
    if not teacher.is_dir():
        raise UsageError(
            f"training.loss.reference: {teacher} is not a directory: give the directory of a model"
        )
    check_trainable(ModelConfig(name=str(teacher)), config.training.seq_len)
    return notes


def check_found(config: "RunConfig | SftConfig") -> None:
    """Raise NodeError if the run lacks a GPU or a vLLM that it needs, its model, an environment or a free port.

    Called before `--clean` removes an earlier run; if there is one, the environments are tried first.
    """
    from ..node.app.daemon import check_auditor
    from ..node.config.run import RunConfig
    from ..node.environments.allowed import find_package
    from ..node.gpus import check_device
    from ..node.models.architectures import read_config as read_model

    check_device("training.device", config.training.device)
    if config.model.create is None and "name" not in config.model.model_fields_set:
        raise UsageError("no model: set model.name to a directory or a hub id")
    read_model(config.model)
    if not isinstance(config, RunConfig):
        return
    check_device("engine.device", config.engine.device)
    check_auditor(config)
    for environment in config.mixture:
        find_package(environment.id)
    check_free(config)
    if config.clean and not config.goes_on and config.run_dir.exists():
        from ..node.app.factories import try_environments
        from ..node.storage.run_files import held

        with held(config.run_dir):  # before seconds are spent on what cannot run
            asyncio.run(try_environments(config))


def check_free(config: "NodeConfig", api: "ApiConfig | None" = None) -> None:
    """Raise BusyError if a port of a node, or of its API, is taken, and UsageError if it cannot be bound."""
    from ..node.errors import BusyError
    from ..node.reports.doctor import check_api_port, check_ports

    in_use = os.strerror(errno.EADDRINUSE)
    for port in [*check_ports(config), *([check_api_port(api)] if api is not None else [])]:
        if port.state == "problem":
            kind = BusyError if port.found.endswith(in_use) else UsageError
            raise kind(f"{port.name} {port.found}: {port.advice}")


def show_environments(config: "NodeConfig | EvalConfig", *, as_json: bool = False) -> None:
    """Print, as comments after a dry run, which of a run's environments are not installed here, and how their
    code is confined."""
    from ..node.config.evaluation import EvalConfig
    from ..node.reports.doctor import check_environments, check_sandbox

    environments = [] if isinstance(config, EvalConfig) else check_environments(config)
    lines = [f"{check.name}: {check.advice}" for check in environments if check.state != "ok"]
    for check in check_sandbox(config):
        lines.append(f"{check.name}: {check.advice if check.state == 'problem' else check.found}")
    show_notes(lines, as_json=as_json)


def show_template(config: "RunConfig | SftConfig | EvalConfig", *, as_json: bool = False) -> None:
    """Print, as comments after a dry run, which parts of a conversation the chat template leaves out.

    Raises UsageError for a template that cannot be used.
    """
    from ..node.config.evaluation import EvalConfig
    from ..node.config.run import RunConfig
    from ..node.reports.doctor import check_template

    models = config.models if isinstance(config, EvalConfig) else [config.model.name]
    environments = config.mixture if isinstance(config, RunConfig) else ()
    variables = [environment.chat_template_kwargs for environment in environments] or [{}]
    for check in (check for model in models for check in check_template(model, variables)):
        if check.state == "problem":
            raise UsageError(check.advice)
        typer.echo(f"{'' if as_json else '# '}{check.name}: {check.found}", err=as_json)


# -- the node to ask -------------------------------------------------------------------------------


def default_data_dir() -> Path:
    """Return the default data directory of a node."""
    return home_directory() / ".primerl"


def find_node(data_dir: Path | None) -> Path:
    """Find the data directory of the node to ask: the trainer's, if several run. Raises NetworkError when none
    runs."""
    if data_dir is not None:
        return given_node(data_dir)
    entries = nodes_here()
    trainers = [entry for entry in entries if entry.role == "trainer"]
    chosen = (trainers or entries)[0]
    if len(entries) > 1:
        print(
            f"asking the {chosen.role} in {_shortened(Path(chosen.data_dir))} "
            f"({len(entries)} nodes run here: --data-dir)",
            file=sys.stderr,
        )
    return Path(chosen.data_dir)


def given_node(data_dir: Path) -> Path:
    """Return the data directory of the node in `data_dir`: of a run's directory, that of its trainer."""
    from ..node.storage.run_files import socket_path

    given = expand_home(data_dir)
    trainer = given / "trainer"
    return trainer if socket_path(trainer).exists() and not socket_path(given).exists() else given


def nodes_here() -> "list[RunningEntry]":
    """List this user's running nodes on this machine. Raises NetworkError if there are none."""
    from ..node.errors import NetworkError
    from ..node.ops.control import RunningEntry, running
    from ..node.storage.run_files import socket_path

    entries = running()
    own = default_data_dir()
    if not entries and socket_path(own).exists():
        entries = [RunningEntry(0, str(own), "node", "", 0.0)]
    if not entries:
        raise NetworkError(
            "no node of yours runs on this machine: start one (`primerl-node train @ demo`), or name its "
            "--data-dir"
        )
    return entries


def choose_node(
    data_dir: Path | None, *, ask: bool, verb: str = "stop", roles: Sequence[str] = ()
) -> Path:
    """Find the data directory of the node to `verb`: the one that runs here, else the one that the user
    chooses.

    The nodes that `rl` started for a run are one choice, their trainer: they end with it. With `roles` any node
    of these may be chosen. Raises NetworkError, and UsageError where several run and there is nobody to ask.
    """
    if data_dir is not None:
        return given_node(data_dir)
    entries = nodes_here()
    choices = [entry for entry in entries if entry.role in roles] if roles else _runs(entries)
    if not choices:
        raise UsageError(
            f"no node that runs here can {verb}: it is for {' and '.join(roles)} nodes"
        )
    if len(choices) == 1:
        return Path(choices[0].data_dir)
    if not (ask and sys.stdin.isatty() and sys.stdout.isatty()):
        named = " or ".join(f"--data-dir {shlex.quote(entry.data_dir)}" for entry in choices)
        raise UsageError(f"{len(choices)} nodes run here, say which one to {verb}: {named}")
    for number, entry in enumerate(choices, 1):
        typer.echo(f"{number}  {entry.role:<10} {_shortened(Path(entry.data_dir))}  {entry.run}")
    answer = typer.prompt(
        f"which one to {verb}, 1 to {len(choices)} (nothing: none)", default="", show_default=False
    )
    if answer.strip() not in map(str, range(1, len(choices) + 1)):
        raise UsageError("no node was chosen: nothing was done")
    return Path(choices[int(answer) - 1].data_dir)


def _runs(entries: "list[RunningEntry]") -> "list[RunningEntry]":
    """Leave out the workers that `rl` runs beside one of these trainers: `rl` ends them itself."""
    from ..node.storage.run_files import SETTINGS, WORKER

    trainers = {Path(entry.data_dir).parent for entry in entries if entry.role == "trainer"}

    def is_of_rl(entry: "RunningEntry") -> bool:
        data_dir = Path(entry.data_dir)
        named = WORKER.fullmatch(data_dir.name) and data_dir.parent in trainers
        return bool(named) and (data_dir / SETTINGS).is_file()

    return [entry for entry in entries if not is_of_rl(entry)]


def _shortened(path: Path) -> Path:
    """Write a path relative to the working directory or the home, if it is below one of them."""
    for base, prefix in ((Path.cwd(), Path()), (home_directory(), Path("~"))):
        if path.is_relative_to(base):
            return prefix / path.relative_to(base)
    return path


# -- signals ---------------------------------------------------------------------------------------


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP stopped the program in order."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_to_end(main: Coroutine[Any, Any, T], run_dir: Path | None = None) -> T:
    """Run `main` as the whole program; the first signal cancels it, the second one kills the process.

    Raises Interrupted when SIGINT, SIGTERM or SIGHUP ended it; a line says how to go on with a run that is left
    in `run_dir`. Raises UsageError for a user without a home directory.

    SIGHUP means that the terminal was closed, and may come more than once: it never kills. Where it was ignored
    at the start, as under nohup, it has no effect, and output to the closed terminal is dropped.
    """
    received: list[int] = []
    terminals = [number for number in (1, 2) if os.isatty(number)]
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    else:
        for name in ("stdout", "stderr"):
            setattr(sys, name, _outliving(getattr(sys, name)))

    manager = service_manager()

    async def supervised() -> T:
        from ..node.process.unix_sockets import explain_lack

        loop = asyncio.get_running_loop()
        loop.set_exception_handler(explain_lack)
        beside = [
            loop.create_task(manager.keep_alive(), name="watchdog"),
            loop.create_task(freeze_after_start(), name="freeze"),
        ]
        task = asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if number == signal.SIGHUP:
                _write_nowhere(terminals)
                if received:
                    return
            if received:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            received.append(number)
            manager.tell("STOPPING=1")
            print("stopping; once more to stop at once", file=sys.stderr, flush=True)
            task.cancel()

        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        try:
            return await main
        finally:
            for background in beside:
                background.cancel()

    try:
        home_directory()  # environments are kept from it, and a node is entered there
    except UsageError:
        main.close()
        raise
    try:
        result = asyncio.run(supervised())
    except asyncio.CancelledError:
        if not received:
            raise
        from ..node.storage.run_files import holds_run, resume_hint

        if run_dir is not None and holds_run(run_dir):
            print(resume_hint(run_dir), file=sys.stderr)
        raise Interrupted(received[0]) from None
    if received:
        raise Interrupted(received[0])
    return result


class _Terminal(io.FileIO):
    """A terminal that becomes /dev/null once it is closed, for programs that ignore SIGHUP."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _write_nowhere([self.fileno()])
            return memoryview(data).nbytes


def _outliving(stream: TextIO) -> TextIO:
    """Return a stream that survives the closing of its terminal; `stream` itself if it is no terminal."""
    if not stream.isatty():
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)


def _write_nowhere(terminals: Sequence[int]) -> None:
    """Redirect these files to /dev/null: an error of a closed terminal would cut the shutdown short."""
    for number in terminals:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


# -- help of config keys ---------------------------------------------------------------------------

KEYS = """Config keys, with defaults in brackets. Each is a flag
(--network.host 127.0.0.1), a variable (PRIMERL_NETWORK__HOST=127.0.0.1) and a
line of a TOML file (`@ file.toml`, as many as you like). Values of a list that is
given more than once are joined:
"""
WIDEST = 100
INDENT = " " * 8
KINDS = {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}

Docs = dict[tuple[str, str], str]
"""(class, field) -> the docstring below the field."""


FREQUENT = {
    "rl": "name max_steps seed model.name environment.id training.lr launch.workers engine.type resume clean",
    "train": "name max_steps seed model.name environment.id training.lr rollouts.group_size network.port "
    "resume clean",
    "join": "engine.type engine.device limits.hours limits.when limits.upload weights.max_disk_gib",
    "judge": "name model.name engine.type engine.dtype max_tokens api.port network.port",
    "sft": "name model.name data.files training.lr training.seq_len max_steps resume clean",
    "eval": "name models environments engine.type",
    "inference": "model.name engine.type api.host api.port api.key_variable",
    "doctor": "model.name environment.id training.seq_len engine.type network.port",
}
"""Keys that a command's short help shows."""
REST = (
    "All {count} keys, and more of what this command does: `{command} --help-all`. A key is also a variable "
    "(PRIMERL_NETWORK__HOST=127.0.0.1) and a line of a TOML file."
)


@dataclass(frozen=True)
class Completed:
    """A word that the shell may complete, with the fields of click's CompletionItem."""

    value: str
    type: str = "plain"
    help: str | None = None


class ConfigCommand(typer.core.TyperCommand):
    """A command whose --help has its most used config keys, and whose --help-all has them all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, after a look for --help-all."""
        if "--help-all" in args:
            typer.echo(self.get_help(ctx, whole=True))
            ctx.exit()
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete options as typer does, and config keys after `--`, bundled configs after `@`."""
        from ..node.config.loader import bundled, keys

        if ctx.args[-1:] == ["@"]:
            names = bundled()
        elif incomplete.startswith("--"):
            names = [f"--{key.replace('_', '-')}" for key in keys(config_of(self.name or ""))]
        else:
            names = list[str]()
        items = super().shell_complete(ctx, incomplete)
        known = {item.value for item in items}
        wanted = (name for name in names if name.startswith(incomplete) and name not in known)
        return [*items, *map(Completed, wanted)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS] [@ FILE]... [--KEY VALUE]..."""
        return [*super().collect_usage_pieces(ctx), "[@ FILE]...", "[--KEY VALUE]..."]

    def get_help(self, ctx: Any, *, whole: bool = False) -> str:
        """Return typer's help and the keys: the most used ones, or with `whole` all of them."""
        width = min(WIDEST, shutil.get_terminal_size().columns)
        name, cls = self.name or "", config_of(self.name or "")
        if whole:
            return f"{super().get_help(ctx).rstrip()}\n\n{KEYS}\n{keys_help(cls, width)}"
        from ..node.config.loader import keys

        rest = textwrap.fill(
            REST.format(count=len(list(keys(cls))), command=ctx.command_path),
            width,
            break_on_hyphens=False,
        )
        shown = "\n".join(frequent_keys(cls, FREQUENT[name].split(), width))
        text, self.help = self.help, _in_short(self.help or "")
        try:
            short = super().get_help(ctx).rstrip()
        finally:
            self.help = text
        return f"{short}\n\nKeys that are often set, with defaults:\n{shown}\n\n{rest}"


def _in_short(text: str) -> str:
    """Keep the first paragraph of a command's help, and its examples."""
    first, *others = text.split("\n\n")
    return "\n\n".join([first, *others[-1:]])


def config_of(command: str) -> "type[BaseModel]":
    """Return the config class of a command."""
    from ..node.config.evaluation import EvalConfig
    from ..node.config.judge import JudgeRunConfig
    from ..node.config.run import JoinConfig, RunConfig
    from ..node.config.serving import ServeConfig
    from ..node.config.sft import SftConfig

    others = {
        "join": JoinConfig,
        "sft": SftConfig,
        "eval": EvalConfig,
        "inference": ServeConfig,
        "judge": JudgeRunConfig,
    }
    return others.get(command, RunConfig)


def frequent_keys(cls: "type[BaseModel]", names: Sequence[str], width: int) -> Iterator[str]:
    """Describe some keys of `cls`, in a line each that is cut to `width` columns."""
    from ..node.config.loader import model_in

    docs, rows = _docs(cls), list[tuple[str, str]]()
    for name in names:
        *sections, last = name.split(".")
        owner: type[BaseModel] = cls
        for section in sections:
            owner = model_in(owner.model_fields[section].annotation) or owner
        field = owner.model_fields[last]
        meaning = _meaning(owner, last, docs)
        if (inner := model_in(field.annotation)) is None:
            meaning += f" [{_default(field.get_default(call_default_factory=True))}]"
        value = "" if inner else f" {kind(field.annotation)}"
        rows.append((f"--{name.replace('_', '-')}{value}", meaning))
    first = max(len(flag) for flag, _ in rows)
    for flag, meaning in rows:
        line = f"  {flag:<{first}}  {meaning}"
        yield line if len(line) <= width else f"{line[: width - 2].rstrip()}.."


def _meaning(owner: "type[BaseModel]", name: str, docs: Docs) -> str:
    """Return the help of a field of `owner`: the docstring below it, or the first line of its section's."""
    from ..node.config.loader import model_in

    inner = model_in(owner.model_fields[name].annotation)
    about = (inner.__doc__ or "").strip().partition("\n")[0] if inner else ""
    bases = (base.__name__ for base in owner.__mro__)
    return next((docs[base, name] for base in bases if (base, name) in docs), about)


def keys_help(cls: "type[BaseModel]", width: int = WIDEST) -> str:
    """Describe every key of `cls`, section by section, by the docstrings below the fields."""
    lines: list[str] = []
    for entry in entries(cls):
        if isinstance(entry, Key):
            flag = "--" if entry.is_flag else ""
            lines.append(f"  {flag}{entry.path} {entry.kind}")
            lines.append(f"{INDENT}{entry.meaning} [{entry.default}]".rstrip())
        else:
            lines += ["", f"{entry.name}: {entry.about}"]
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=_indent(line), break_on_hyphens=False)
        for line in lines
    )


def _docs(cls: "type[BaseModel]") -> Docs:
    """Read the docstrings below the fields of `cls` and its sections."""
    docs: Docs = {}
    for source in _sources(cls):
        tree = ast.parse(source.read_text())
        for node in (statement for statement in tree.body if isinstance(statement, ast.ClassDef)):
            for field, below in pairwise(node.body):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        docs[node.name, name] = " ".join(text.split())
                    case _:
                        pass
    return docs


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())] or "  "


def _sources(cls: "type[BaseModel]") -> set[Path]:
    """List the files that define `cls`, its sections and their base classes."""
    from ..node.config.loader import model_in

    package = __name__.partition(".")[0] + "."
    files = {
        Path(inspect.getfile(base)) for base in cls.__mro__ if base.__module__.startswith(package)
    }
    for field in cls.model_fields.values():
        if (inner := model_in(field.annotation)) is not None:
            files |= _sources(inner)
    return files


@dataclass(frozen=True)
class Key:
    """A config key."""

    path: str
    """As a flag has it, without the dashes; in a table of a TOML file, the name there."""
    kind: str
    """How a value is written."""
    default: str
    meaning: str
    is_flag: bool


@dataclass(frozen=True)
class Section:
    """A title above the keys of a section."""

    name: str
    about: str


def entries(cls: "type[BaseModel]") -> Iterator[Key | Section]:
    """List every key of `cls`, with its sections, in the order of the help."""
    yield from _entries(cls, "", _docs(cls), is_flag=True)


def _entries(
    cls: "type[BaseModel]", prefix: str, docs: Docs, *, is_flag: bool
) -> Iterator[Key | Section]:
    from ..node.config.loader import model_in

    sections: list[tuple[Section, str, type[BaseModel], bool]] = []
    for name, field in cls.model_fields.items():
        path = f"{prefix}{name.replace('_', '-') if is_flag else name}"
        inner = model_in(field.annotation)
        about = (inner.__doc__ or "").strip().partition("\n")[0] if inner else ""
        many = get_origin(field.annotation) if inner is not None else None
        if inner is not None and many not in (list, dict):
            off = f" Off unless set; --no-{path} switches it off." if field.default is None else ""
            sections.append((Section(path, f"{about}{off}"), f"{path}.", inner, True))
            continue
        if inner is not None:
            table = f"[[{path}]]" if many is list else f"[{path}.NAME]"
            title = Section(table, f"{about} A table of a TOML file for each, with these keys:")
            sections.append((title, "", inner, False))
        value = field.get_default(call_default_factory=True)
        default = _default(", ".join(value) if many is dict else value)
        how = "JSON" if inner else kind(field.annotation)
        yield Key(path, how, default, _meaning(cls, name, docs), is_flag)
    for title, below, inner, flags in sorted(sections, key=lambda section: not section[3]):
        yield title
        yield from _entries(inner, below, docs, is_flag=flags)


def _default(value: Any) -> str:
    from pydantic_core import PydanticUndefined

    if value is PydanticUndefined or value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "empty"


def kind(annotation: Any) -> str:
    """Describe how a value of this type is written."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(arg) for arg in args)
    if origin is list:
        return f"{kind(args[0])}..."
    if origin is tuple:
        return "JSON"
    if origin is dict:
        return "JSON, or --key.NAME VALUE"
    if args:  # Annotated or Optional
        return kind(next(arg for arg in args if arg is not NoneType))
    return KINDS.get(annotation, "VALUE")
