"""`primerl-node join`: work for a run."""

import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .configured import (
    AsJson,
    Dp,
    DryRun,
    Pp,
    Tp,
    arguments,
    check_engine,
    check_engine_present,
    environment,
    options,
    parallel,
    show_config,
)
from .target import default_data_dir

if TYPE_CHECKING:
    from ..node.config.run import JoinConfig
    from ..node.environments.allowed import EnvironmentNotAllowed
    from .live import OpenView

JOINED_EVERY_S = 60.0
"""Between two lines in a log or a pipe."""
MAX_TICKET_FILE = 16384
"""Bytes; a ticket has at most 8192 characters."""


def run(
    ctx: typer.Context,
    ticket: Annotated[
        str | None,
        typer.Option(
            "--ticket", "-t", help="The join ticket, a file that holds it, or - for standard input."
        ),
    ] = None,
    role: Annotated[
        str | None, typer.Option("--role", help="What to be: inference or validator.")
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir", "-d", help="Where this node keeps its key and weights (~/.primerl)."
        ),
    ] = None,
    allow_environment: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-environment",
            metavar="NAME",
            help="Play this environment if the run wants it; may be given again. Bundled ones need none.",
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait for a trainer that was stopped, for ever; without it a worker leaves then.",
        ),
    ] = False,
    tp: Tp = None,
    pp: Pp = None,
    dp: Dp = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Join a run with a ticket: fetch the policy, generate rollouts, send them in.

    Come and go as you like; needs no open port. The ticket is checked before anything is sent. A validator
    measures instead what other nodes sent in; the trainer's verification.validators has to name it.
    A data directory that was admitted once needs no ticket any more.

    A run names its environment, and a worker imports that package: beside the bundled ones only those that you
    allow. Without --allow-environment a terminal is asked, and `always` is kept in the data directory.

    A machine that cannot hold the model offers its memory, and holds some layers of it together with others
    (--pp.mode on does so anyway, off never).

    \b
    Examples:
      primerl-node join --ticket primerl1-... --data-dir worker
      ssh trainer primerl-node ticket | primerl-node join --ticket -
      primerl-node join --ticket run.ticket --engine.type vllm --tp auto
      primerl-node join --data-dir worker      again, for the run that admitted it
      primerl-node join --ticket run.ticket --engine.type vllm --pp.rank 0 --pp.world-size 2
      primerl-node join --ticket run.ticket --role validator --data-dir validator
    """
    from ..node.config.loader import load
    from ..node.config.run import JoinConfig

    waits = {"wait": "true", "wait_for_trainer_s": "inf"} if wait else {}
    given = options(ticket=ticket, role=role, data_dir=data_dir, **waits) + parallel(
        tp=tp, pp=pp, dp=dp
    )
    config = with_allowed(load(JoinConfig, arguments(ctx, given), environment()), allow_environment)
    check_engine(config)
    if dry_run:
        if config.ticket not in ("", "-"):
            ticket_text(config.ticket)
        show_config(config, as_json=as_json)
        return
    check_engine_present(config)
    config = with_checked_ticket(config)
    from ..node.environments.allowed import EnvironmentNotAllowed

    while True:
        try:
            work(config)
            return
        except EnvironmentNotAllowed as refused:
            # the node has left, and its live view is no more on the screen
            config = asked(config, refused)


def work(config: "JoinConfig") -> None:
    """Be a node until the run ends."""
    from .live import open_view
    from .signals import run as run_to_end

    with open_view(f"primerl-node join  as {config.role}", JOINED_EVERY_S) as view:
        run_to_end(join_and_show(config, view))


async def join_and_show(config: "JoinConfig", view: "OpenView") -> None:
    """Join, with our own node in the view, and what its work came to at the end."""
    from ..node.app.daemon import join
    from ..node.ops.control import NodeState, watched
    from .live import plain_line

    data_dir = config.data_dir or default_data_dir()
    nodes = {config.role: NodeState(config.role, data_dir, note="starting")}
    try:
        farewell = await watched(nodes, view, join(config), pace_s=view.pace_s)
    finally:
        status = nodes[config.role].status
        if status is not None:
            status.phase, status.detail, status.waiting_for = "ended", "", ""
            view.say(plain_line(nodes))
    if farewell:
        view.say(farewell)


def with_allowed(config: "JoinConfig", names: Sequence[str] | None) -> "JoinConfig":
    """The config with further environments that may be played."""
    from ..node.config.run import AllowedConfig

    allowed = AllowedConfig(allow=[*config.environments.allow, *(names or ())])
    return config.model_copy(update={"environments": allowed})


def asked(config: "JoinConfig", refused: "EnvironmentNotAllowed") -> "JoinConfig":
    """The config with what the person at the terminal allows. Raises `refused` where nobody can or does."""
    from ..node.environments.allowed import remember

    if not sys.stdin.isatty():
        raise refused
    package = refused.package
    question = (
        f"This run wants to run the environment {package.environment!r} ({package}) on this machine. "
        "Allow? [y/N/always]"
    )
    answer = typer.prompt(question, default="N", show_default=False, err=True).strip().lower()
    if answer == "always":
        remember(package, config.data_dir or default_data_dir())
    elif answer not in ("y", "yes"):
        raise refused
    return with_allowed(config, [package.environment])


def with_checked_ticket(config: "JoinConfig") -> "JoinConfig":
    """The config with the ticket's text in it. Raises TicketError; needs no network."""
    directory = config.data_dir or default_data_dir()
    return config.model_copy(update={"ticket": checked_ticket(config.ticket, directory)})


def checked_ticket(given: str, data_dir: Path) -> str:
    """The text of the ticket to join with: `given`, a file that holds it, or the one that a directory was
    admitted with. Raises TicketError, StorageError; needs no network."""
    from ..node.app.tickets import usable_ticket

    return usable_ticket(ticket_text(given) if given else "", data_dir, int(time.time()))


def ticket_text(given: str) -> str:
    """The ticket itself, where a file or - was given. Raises TicketError."""
    from ..node.ops.errors import TicketError
    from ..protocol.tickets import PREFIX

    if given == "-":
        return sys.stdin.read(MAX_TICKET_FILE).strip()
    if given.strip().startswith(PREFIX):
        return given.strip()
    try:
        path = Path(given).expanduser()
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):  # a pipe: --ticket <(ssh ...)
            raise TicketError(f"{given[:80]} is no file: give the ticket, or a file that holds it")
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TICKET_FILE + 1)
        if len(text) > MAX_TICKET_FILE:
            raise TicketError(f"{given[:80]} is too large for a ticket: give a file that holds one")
        return text.strip()
    except FileNotFoundError as error:
        raise TicketError(
            f"{given[:40]} is neither a ticket (they start with {PREFIX}) nor a file"
        ) from error
    except (OSError, ValueError) as error:
        raise TicketError(f"cannot read a ticket from {given[:80]}: {error}") from error
