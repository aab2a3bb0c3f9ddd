"""`primerl-node pause`, `resume` and `reload`: change what a running node does, without a restart."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, choose_node
from .ticket import seconds

WORKERS = ("inference", "validator", "standby", "learner")
"""Roles that can be paused."""


def pause(
    data_dir: DataDir = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TIME", help="For this time: 30m, 2h, 1d; else until resumed."
        ),
    ] = None,
    now: Annotated[
        bool,
        typer.Option("--now", help="Hand unfinished work back to others instead of finishing it."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pause a worker: it takes no new work, fetches and serves nothing, and keeps its place in the run.

    What it holds is finished first, a minute or so; --now hands it back, which costs a rest after the second
    time. Its engine ends 5 minutes later, and the GPU is free. A restart changes nothing about a pause.
    For fixed hours, or while other programs need the machine, set limits.hours or limits.when.

    \b
    Examples:
      primerl-node pause
      primerl-node pause --for 2h
      primerl-node pause --now -d worker
    """
    span = seconds(for_) if for_ else None
    answer = _ask(data_dir, "pause", as_json, {"seconds": span, "now": now})
    if answer is not None:
        held = answer["held"]
        leases = f"{held} lease{'s' * (held != 1)}"
        work = f"; {leases} handed back" if now else f"; {leases} finished first"
        typer.echo(f"paused {answer['paused']}{work * bool(held)}")


def resume(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """End a pause: the worker fetches the newest policy, and asks for work.

    What limits.hours, limits.when or limits.monthly_gb pause stays paused, and it says so.
    """
    answer = _ask(data_dir, "resume", as_json, {})
    if answer is not None:
        typer.echo(f"still paused: {answer['paused']}" if answer["paused"] else "works again")


def reload(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Read a running node's config again, from the files, variables and flags that it was started with.

    limits.* and log.level are applied at once. Other keys that changed are named: they need a restart. A config
    with an error changes nothing.
    """
    answer = _ask(data_dir, "reload", as_json, {}, roles=())
    if answer is None:
        return
    for line in answer["applied"]:
        typer.echo(f"applied: {line}")
    if answer["restart"]:
        typer.echo(f"needs a restart: {', '.join(answer['restart'])}")
    if not (answer["applied"] or answer["restart"]):
        typer.echo("nothing has changed")


def _ask(
    data_dir: Path | None,
    command: str,
    as_json: bool,
    arguments: dict[str, Any],
    roles: tuple[str, ...] = WORKERS,
) -> Any:
    """Tell the node; return its answer, or None once it was printed as JSON. Raises NodeError."""
    from ..node.ops.control import ask

    node = choose_node(data_dir, ask=not as_json, verb=command, roles=roles)
    answer = ask(node, command, **arguments)
    if not as_json:
        return answer
    typer.echo(to_json({"data_dir": str(node), **answer}))
    return None
