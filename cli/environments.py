"""`primerl-node env`: write, install, list, test and trust environments. None is imported into this process."""

import json
import keyword
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..node.config.paths import expand_home
from ..node.ops.strict_json import to_json
from .command import AsJson, OwnDataDir, default_data_dir, run_to_end

if TYPE_CHECKING:
    from ..node.config.chat_api import JudgeConfig
    from ..node.config.sandbox import WorkerSandboxConfig
    from ..node.environments.allowed import Package
    from ..node.environments.trial import EnvironmentTrial

INSTALL_S = 3600.0
TEMPLATE = Path(__file__).parent / "template"
"""Files of a new environment; NAME, MODULE and Title stand for its own names."""

Id = Annotated[str, typer.Argument(metavar="ID", help="Its id, such as my-env.")]

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="""Write, install, list, test and trust environments.

\b
Examples:
  primerl-node env init my-env
  primerl-node env install ./my-env
  primerl-node env test my-env
  primerl-node env trust my-env
  primerl-node rl @ my-env/rl.toml
""",
)


# -- init ------------------------------------------------------------------------------------------


@app.command("init", short_help="Write a package to begin with.")
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its id, such as my-env.")],
    path: Annotated[Path, typer.Option("--path", "-p", help="Parent of its directory.")] = Path(),
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", help="Write one with several turns.")
    ] = False,
    tools: Annotated[
        bool, typer.Option("--tools", help="Write one with a tool that the model calls.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Write one with tools that search pages of yours.")
    ] = False,
) -> None:
    """Write an environment's package into the directory NAME: it installs and passes `env test` as it is."""
    from ..node.environments.allowed import NAME, module_of, name_taken, root_of
    from ..node.errors import UsageError, file_error

    kinds = {"multi_turn": multi_turn, "tools": tools, "search": search}
    chosen = [one for one, given in kinds.items() if given] or ["single_turn"]
    if len(chosen) > 1:
        flags = " and ".join(f"--{one.replace('_', '-')}" for one in chosen)
        raise UsageError(f"{flags} are templates of their own: choose one")
    module = module_of(name)
    if not NAME.fullmatch(name) or not module.isidentifier() or keyword.iskeyword(module):
        raise UsageError(f"{name[:80]!r} is no name of a package: use letters, digits and -")
    if taken := name_taken(name):
        raise UsageError(f"{name!r} cannot be used: {taken}; choose another name")
    if root_of(module) is not None:
        raise UsageError(f"a module {module!r} is installed here already: choose another name")
    directory = expand_home(path) / name
    if directory.exists():
        raise UsageError(f"{directory} exists already: choose another name or another --path")
    title = "".join(word.capitalize() for word in module.split("_"))
    (kind,) = chosen
    files = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{module}/__init__.py": f"{kind}.py.txt",
        f"tests/test_{module}.py": f"{kind}_test.py.txt",
    }
    if not multi_turn:
        files["rl.toml"] = "rl.toml" if kind == "single_turn" else f"{kind}_rl.toml"
    if search:
        files |= {f"{module}/{one}.jsonl": f"search_{one}.jsonl" for one in ("pages", "questions")}
    for file, template in files.items():
        text = (TEMPLATE / template).read_text(encoding="utf-8")
        text = text.replace("NAME", name).replace("MODULE", module).replace("Title", title)
        try:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise file_error(error, directory / file) from error
        typer.echo(directory / file)
    place = (
        directory if directory.is_absolute() else f"./{directory}"
    )  # no name that an index knows
    typer.echo(f"next: primerl-node env install {place}; primerl-node env test {name}")


# -- list, trust -----------------------------------------------------------------------------------


Trust = Literal["not needed", "trusted", "not trusted", "other release trusted", "missing"]


@dataclass(frozen=True)
class InstalledEnvironment:
    """An environment that this node could play."""

    id: str
    source: str
    """"bundled" and this version, or the distribution and its version."""
    digest: str
    """Hexadecimal; empty where a run compares none."""
    trust: Trust
    note: str = ""


@app.command("list", short_help="The environments that this node could play.")
def show_list(data_dir: OwnDataDir = None, as_json: AsJson = False) -> None:
    """List bundled and installed environments, without importing any.

    Installed ones are found by their distribution, which requires verifiers and has a module with a Taskset.
    """
    from ..node.environments.allowed import BUNDLED, installed
    from .tables import NONE, fitted, write

    directory = _data_dir(data_dir)
    rows = [_bundled(name, directory) for name in BUNDLED]
    rows += [_row(package, directory) for package in installed()]
    if as_json:
        typer.echo(to_json({"environments": [asdict(row) for row in rows]}, indent=2))
        return
    write(
        fitted(
            ("ID", "SOURCE", "DIGEST", "TRUST", "NOTE"),
            [(row.id, row.source, row.digest[:12] or NONE, row.trust, row.note) for row in rows],
            elastic=("SOURCE", "NOTE"),
            drop=("DIGEST",),
        )
    )


@app.command("trust", short_help="Let workers with this data directory play an environment.")
def trust(
    environment: Id,
    remove: Annotated[bool, typer.Option("--remove", help="Stop trusting it.")] = False,
    data_dir: OwnDataDir = None,
) -> None:
    """Let `join` with this data directory play the installed release of an environment, without asking.

    Its digest is kept: another release needs trust of its own. Trust what you have read: it may read and write
    your files.
    """
    from ..node.environments.allowed import REMEMBERED, find_package, forget, remember
    from ..node.errors import UsageError

    directory = _data_dir(data_dir)
    if remove:
        if not forget(environment, directory):
            raise UsageError(f"{environment[:80]!r} is not trusted in {directory}: nothing changed")
        typer.echo(f"no longer trusted: {environment}")
        return
    package = find_package(environment)
    if package is None or package.bundled:
        typer.echo(f"{environment} is bundled: it needs no trust")
        return
    remember(package, directory)
    typer.echo(f"trusted: {environment} ({package}), in {directory / REMEMBERED}")


def _data_dir(given: Path | None) -> Path:
    return expand_home(given) if given is not None else default_data_dir()


def _bundled(name: str, data_dir: Path) -> InstalledEnvironment:
    """Describe a bundled environment, which may need another package or read a data set."""
    from .. import __version__
    from ..node.environments.allowed import find_package
    from ..node.errors import UsageError

    source = f"bundled {__version__}"
    try:
        package = find_package(name)
    except UsageError as error:
        return InstalledEnvironment(name, source, "", "missing", str(error).partition(": ")[2])
    if package is None:
        return InstalledEnvironment(name, source, "", "not needed")
    row = _row(package, data_dir)
    note = "" if package.bundled else "reads a data set that the run names"
    return InstalledEnvironment(name, f"{source}, {row.source}", row.digest, row.trust, note)


def _row(package: "Package", data_dir: Path) -> InstalledEnvironment:
    from ..node.environments.allowed import is_remembered, remembered

    trust: Trust = "not trusted"
    if package.bundled:
        trust = "not needed"
    elif is_remembered(package, data_dir):
        trust = "trusted"
    elif package.environment in remembered(data_dir):
        trust = "other release trusted"
    return InstalledEnvironment(package.environment, package.label, package.digest.hex(), trust)


# -- install ---------------------------------------------------------------------------------------


@app.command("install", short_help="Install an environment's package beside this program.")
def install(
    target: Annotated[
        str,
        typer.Argument(metavar="WHEEL|PATH|NAME", help="A wheel, a source directory, or a name."),
    ],
    trusted: Annotated[
        bool, typer.Option("--trust", help="Trust the installed package, as `env trust` does.")
    ] = False,
    data_dir: OwnDataDir = None,
    as_json: AsJson = False,
) -> None:
    """Install an environment with pip, or with uv where there is no pip, into the Python of this program.

    It is unpacked elsewhere first and refused if a run could never play it. No package that is installed here
    changes its version for it. Building a source directory runs its code.
    """
    import importlib
    import tempfile
    from importlib import metadata

    from ..node.environments.allowed import find_package, remember
    from ..node.errors import UsageError

    what = _installable(target)
    with tempfile.TemporaryDirectory(prefix="primerl-env-") as directory:
        stage = Path(directory) / "stage"
        _pip(["--no-deps", "--target", str(stage), what], target)
        name, environments = _staged(stage)
        pins = Path(directory) / "constraints.txt"
        held = {_plain(it.name): it.version for it in reversed(list(metadata.distributions()))}
        held.pop(_plain(name), None)
        pins.write_text("".join(f"{one}=={version}\n" for one, version in held.items()))
        _pip(["--constraint", str(pins), "--upgrade", what], target)
    importlib.invalidate_caches()
    found = [find_package(one) for one in environments]
    packages = [package for package in found if package is not None]
    if not packages:
        raise UsageError(f"{name} was installed where this Python does not look for packages")
    for package in packages:
        if trusted:
            remember(package, _data_dir(data_dir))
    rows = [_row(package, _data_dir(data_dir)) for package in packages]
    if as_json:
        typer.echo(to_json({"environments": [asdict(row) for row in rows]}, indent=2))
        return
    for row in rows:
        typer.echo(f"installed: {row.id} ({row.source}), digest {row.digest}")
        if row.trust != "trusted":
            typer.echo(
                f"{row.trust}: `join` asks before it plays it; "
                f"primerl-node env trust {row.id} --data-dir WORKER allows it for good"
            )


def _installable(target: str) -> str:
    """Check what to install. Raises UsageError."""
    from ..node.errors import UsageError

    path = expand_home(target)
    if path.exists():
        if path.is_dir() and not any(
            (path / it).is_file() for it in ("pyproject.toml", "setup.py")
        ):
            raise UsageError(f"{path} has no pyproject.toml: name the directory of a package")
        return str(path.absolute())
    if "/" in target or target.endswith((".whl", ".tar.gz", ".zip")):
        raise UsageError(f"{target[:200]} does not exist: name a wheel, a directory, or a package")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?([=<>!~]=?[\w.,*=<>!~]+)?", target):
        raise UsageError(f"{target[:80]!r} is no wheel, no directory and no name of a package")
    return target


def _plain(name: str) -> str:
    """Spell a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(arguments: list[str], target: str) -> None:
    """Run pip or uv, whose output is shown if it fails. Raises UsageError, NodeError."""
    import shutil
    import subprocess
    from importlib.metadata import distributions

    from ..node.errors import NodeError, UsageError

    # The metadata, not find_spec("pip"): that makes setuptools leave distutils to Python, and vLLM then fails.
    if any(distributions(name="pip")):
        program = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        program.append("--no-input")
    elif (uv := shutil.which("uv")) is not None:
        program = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise UsageError(f"neither pip nor uv is here: {sys.executable} -m ensurepip brings pip")
    try:
        ended = subprocess.run(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"{target} was not installed within {INSTALL_S:g} s: try again") from error
    if ended.returncode:
        typer.echo(ended.stdout.decode(errors="replace"), err=True)
        raise NodeError(
            f"{target} cannot be installed, and nothing was changed: the installer's output is above"
        )


def _staged(stage: Path) -> tuple[str, list[str]]:
    """Find the distribution's name and the ids of its environments. Raises UsageError where it has none, or one
    that would never be played or would overwrite another package."""
    from importlib import metadata

    from ..node.environments.allowed import (
        TASKSET,
        distributions_by_module,
        installed,
        name_taken,
        source_has,
    )
    from ..node.errors import UsageError

    (one,) = metadata.distributions(path=[str(stage)])
    here = {_plain(it.name) for it in metadata.distributions()}
    environments = {_plain(it.label.rpartition(" ")[0]) for it in installed()}
    if _plain(one.name) in here - environments:
        raise UsageError(
            f"{one.name} is not installed: it would replace the installed package of that name, which is no "
            "environment; rename it"
        )
    theirs = distributions_by_module()
    found: list[str] = []
    older = False
    for root in sorted(stage.iterdir()):
        module = root.stem
        if not (root.is_dir() or root.suffix == ".py") or not module.isidentifier():
            continue
        if module != module.lower() or not source_has(root, TASKSET):
            older |= source_has(root, b"def load_environment")
            continue
        taken = name_taken(module)
        if others := set(theirs.get(module, ())) - {one.name}:
            taken = f"the installed package {sorted(others)[0]} has a module of this name"
        if taken:
            raise UsageError(
                f"{one.name} is not installed: its module {module!r} would not be played, as {taken}; "
                "rename the module"
            )
        found.append(module.replace("_", "-"))
    if not found:
        why = "has a load_environment() of verifiers before 0.4" if older else "exports no Taskset"
        raise UsageError(
            f"{one.name} is not installed: it {why}; an environment exports a verifiers.v1 Taskset by __all__ "
            "of a top-level module in lower case"
        )
    return one.name, found


# -- test ------------------------------------------------------------------------------------------


@app.command("test", short_help="Play an environment as a worker would, and check it.")
def run_test(
    environment: Id,
    args: Annotated[
        str, typer.Option("--args", metavar="JSON", help="Its options: environment.args of a run.")
    ] = "{}",
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Tasks that are played.")] = 8,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Directory of a model, whose tokens are counted."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the run.")] = 0,
    max_turns: Annotated[
        int, typer.Option("--max-turns", min=1, help="environment.max_turns of a run.")
    ] = 8,
    reply: Annotated[
        list[str] | None,
        typer.Option(
            "--reply", help="Reply this, not as described above; repeat it for the next turn."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print one rollout in full.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="environment.timeout_s of a run.")
    ] = 10.0,
    limit_s: Annotated[
        float, typer.Option("--limit-s", min=1.0, help="Longest that all of it may take.")
    ] = 300.0,
    network: Annotated[
        bool, typer.Option("--network", help="Allow sockets (sandbox.network of a worker).")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", min=0, help="Allow processes (sandbox.processes).")
    ] = 0,
    memory_gib: Annotated[
        float, typer.Option("--memory-gib", min=0.1, help="Its memory (sandbox.memory_gib).")
    ] = 4.0,
    sandbox: Annotated[
        str,
        typer.Option(
            "--sandbox", help="auto, bubblewrap, landlock or limits (sandbox.type of a worker)."
        ),
    ] = "auto",
    readable: Annotated[
        list[Path] | None,
        typer.Option("--readable", help="Show it this file or directory (sandbox.readable)."),
    ] = None,
    sampled_rewards: Annotated[
        bool,
        typer.Option(
            "--sampled-rewards", help="For a run with environment.deterministic_rewards = false."
        ),
    ] = False,
    judge: Annotated[
        str, typer.Option("--judge", metavar="JSON", help="environment.judge of a run.")
    ] = "",
    sampled_tools: Annotated[
        bool,
        typer.Option(
            "--sampled-tools", help="For a run with environment.deterministic_tools = false."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also what the environment prints.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Play an environment with scripted replies, in the process and the sandbox of a worker, twice.

    Each task gets its right answer where one is known, an empty reply, noise, noise that a limit cut off, and
    calls of its tools, if it has any. Tasks and rewards have to be the same in both processes. No model is
    needed. Its code runs: under `--sandbox limits` it may read and write your files.

    \b
    Examples:
      primerl-node env test my-env --args '{"digits": 6}' --tasks 50
      primerl-node env test my-env --model outputs/demo/weights/step_160
      primerl-node env test word-game --reply '[crane]' --reply '[about]' --show
      primerl-node env test my-env --judge '{"url": "http://127.0.0.1:8000/v1", "model": "grader"}'
    """
    from ..node.config.run import EnvironmentConfig
    from ..node.environments.trial import EnvironmentTrial, TrialOptions

    options = TrialOptions(
        environment=EnvironmentConfig(
            id=environment,
            args=_options("--args", args, {"digits": 6}),
            max_turns=max_turns,
            timeout_s=timeout_s,
            start_timeout_s=limit_s / 3,  # the limit of all names no line of code
            deterministic_rewards=not sampled_rewards,
            deterministic_tools=not sampled_tools,
            judge=_judge(judge) if judge else None,
        ),
        sandbox=_sandbox(sandbox, readable or [], network, processes, memory_gib),
        tasks=tasks,
        model=expand_home(model) if model is not None else None,
        seed=seed,
        limit_s=limit_s,
        replies=tuple(reply or ()),
    )
    if verbose:
        import logging

        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    tried = EnvironmentTrial(options)
    run_to_end(tried.run())
    _report(tried, show=show, as_json=as_json)


def _sandbox(
    kind: str, readable: list[Path], network: bool, processes: int, memory_gib: float
) -> "WorkerSandboxConfig":
    from pydantic import ValidationError

    from ..node.config.sandbox import WorkerSandboxConfig
    from ..node.errors import UsageError

    values = {"type": kind, "readable": readable, "network": network}
    values |= {"processes": processes, "memory_gib": memory_gib}
    try:
        return WorkerSandboxConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(
            f"--sandbox, --processes or --memory-gib: {error.errors()[0]['msg']}"
        ) from error


def _options(flag: str, text: str, example: dict[str, Any]) -> dict[str, Any]:
    from ..node.errors import UsageError

    shown = f"for example '{to_json(example)}'"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is no JSON ({error}): {shown}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{flag} is a JSON object, {shown}")
    return found


def _judge(text: str) -> "JudgeConfig":
    from pydantic import ValidationError

    from ..node.config.chat_api import JudgeConfig
    from ..node.errors import UsageError

    example = {"url": "http://127.0.0.1:8000/v1", "model": "grader"}
    try:
        found = JudgeConfig.model_validate(_options("--judge", text, example))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"--judge: {where}: {first['msg'].removeprefix('Value error, ')}"
        ) from error
    if not found.url:
        raise UsageError(f"--judge has no url: for example '{to_json(example)}'")
    return found


def _report(tried: "EnvironmentTrial", *, show: bool, as_json: bool) -> None:
    """Print the findings. Raises NodeError if a check failed."""
    from ..node.errors import NodeError
    from .rollouts import visible
    from .tables import plain_table, write

    failed = [check for check in tried.checks if check.problem]
    if as_json:
        rollouts = [asdict(one) for one in tried.rollouts] if show else []
        found = {"passed": not failed, "checks": [asdict(one) for one in tried.checks]}
        typer.echo(to_json(found | {"rollouts": rollouts} if show else found, indent=2))
    else:
        from rich.markup import escape

        table = plain_table("CHECK", "RESULT", "FOUND", fold="FOUND")
        for check in tried.checks:
            table.add_row(check.name, "FAILED" if check.problem else "ok", escape(check.found))
        write(table)
        for check in failed:
            typer.echo(f"\n{check.name}: {check.problem}")
        if show:
            typer.echo(visible(tried.shown()))
    if failed:
        names = ", ".join(check.name for check in failed)
        raise NodeError(f"{tried.options.environment.id} failed: {names}")
