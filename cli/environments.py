"""`primerl-node env`: test and trust environments. None is imported into this process."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..node.config.paths import expand_home
from ..node.ops.strict_json import to_json
from .command import AsJson, OwnDataDir, default_data_dir, run_to_end

if TYPE_CHECKING:
    from ..node.config.chat_api import JudgeConfig
    from ..node.config.sandbox import WorkerSandboxConfig
    from ..node.environments.trial import EnvironmentTrial

Id = Annotated[str, typer.Argument(metavar="ID", help="Its id, such as my-env.")]

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="""Test and trust environments.

\b
Examples:
  primerl-node env test my-env
  primerl-node env trust my-env
  primerl-node rl @ my-env/rl.toml
""",
)


# -- removed ---------------------------------------------------------------------------------------

REMOVED = {
    "init": "`vf-init NAME` writes a package, and docs/examples/ has four that work",
    "install": "`pip install ./NAME` into the Python of this program",
    "list": "`pip list` shows what is installed, `primerl-node env test NAME` its digest",
}
"""Removed commands and what to use now."""


def _removed(name: str) -> Callable[[], None]:
    def refuse() -> None:
        from ..node.errors import UsageError

        raise UsageError(f"`env {name}` was removed: {REMOVED[name]}")

    return refuse


for _name in REMOVED:
    app.command(
        _name,
        hidden=True,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_removed(_name))


# -- trust ---------------------------------------------------------------------------------------


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
            start_timeout_s=limit_s / 3,  # its error names a line of code, unlike that of limit_s
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
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is no JSON ({error}): {shown}") from error
    if not isinstance(options, dict):
        raise UsageError(f"{flag} is a JSON object, {shown}")
    return options


def _judge(text: str) -> "JudgeConfig":
    from pydantic import ValidationError

    from ..node.config.chat_api import JudgeConfig
    from ..node.errors import UsageError

    example = {"url": "http://127.0.0.1:8000/v1", "model": "grader"}
    try:
        judge = JudgeConfig.model_validate(_options("--judge", text, example))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"--judge: {where}: {first['msg'].removeprefix('Value error, ')}"
        ) from error
    if not judge.url:
        raise UsageError(f"--judge has no url: for example '{to_json(example)}'")
    return judge


def _report(tried: "EnvironmentTrial", *, show: bool, as_json: bool) -> None:
    """Print the findings. Raises NodeError if a check failed."""
    from ..node.errors import NodeError
    from .rollouts import visible
    from .tables import plain_table, write

    failed = [check for check in tried.checks if check.problem]
    if as_json:
        rollouts = [asdict(rollout) for rollout in tried.rollouts] if show else []
        findings = {"passed": not failed, "checks": [asdict(check) for check in tried.checks]}
        typer.echo(to_json(findings | {"rollouts": rollouts} if show else findings, indent=2))
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
