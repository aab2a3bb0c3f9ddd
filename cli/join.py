"""`primerl-node join`: work for a run."""

import asyncio
import os
import stat
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..node.config.paths import expand_home
from .command import (
    Dp,
    DryRun,
    DryRunJson,
    Pp,
    Tp,
    arguments,
    check_engine,
    check_free,
    config_source,
    default_data_dir,
    parallel,
    read_config,
    run_to_end,
    show_config,
    show_environments,
)

if TYPE_CHECKING:
    from ..node.app.tickets import TicketPlace
    from ..node.config.reload import ConfigSource
    from ..node.config.run import JoinConfig
    from ..node.environments.allowed import EnvironmentNotAllowed
    from .live import OpenView

LINE_EVERY_S = 60.0
"""Pause between two lines in a log or a pipe."""
MAX_TICKET_FILE = 16384
"""Bytes; a ticket has at most 8192 characters."""
LINK_S = 15.0
"""Seconds for all of a ticket behind a link, from the name's look-up on."""


def run(
    ctx: typer.Context,
    ticket: Annotated[
        str | None,
        typer.Option(
            "--ticket",
            "-t",
            help="The join ticket, a file or https link with it, or - for stdin.",
        ),
    ] = None,
    role: Annotated[
        str | None, typer.Option("--role", help="What to be: inference, validator or standby.")
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
            help="Play this environment, which is not bundled; may be given again.",
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait for the trainer without limit, also when it is stopped.",
        ),
    ] = False,
    tp: Tp = None,
    pp: Pp = None,
    dp: Dp = None,
    dry_run: DryRun = False,
    as_json: DryRunJson = False,
) -> None:
    """Join a run with a ticket: fetch the policy, generate rollouts, send them in.

    A node leaves when its trainer is stopped, or is silent for wait_for_trainer_s; with --wait it does not.
    It needs no open port. All that it writes is in the data directory: its key, logs, and weights
    (weights.max_disk_gib at most). Ctrl-C or `primerl-node stop` hands its unfinished work back; join again
    at any time, without a ticket. `primerl-node status` shows what was accepted, `explain` why something
    was not.

    A run names its environment, and a worker imports that package: beside the bundled ones only those that you
    allow. Without --allow-environment a terminal is asked, and `always` is kept in the data directory.

    A machine that cannot hold the model holds some of its layers, together with others (--pp.mode on:
    always, off: never). A validator audits what other nodes sent in; the trainer's verification.validators
    has to name it. A standby keeps a copy of the run on its disk, its key apart, and leads the run if its
    trainer is lost; `primerl-node root certify` has to name it.

    \b
    Examples:
      primerl-node join --ticket primerl2-... --data-dir worker
      primerl-node join --ticket https://example.org/ticket.txt
      ssh trainer primerl-node ticket | primerl-node join --ticket -
      primerl-node join --ticket run.ticket --engine.type vllm --tp auto
      primerl-node join --data-dir worker      again, for the run that admitted it
      primerl-node join --ticket T --engine vllm --pp.rank 0 --pp.world-size 2
      primerl-node join --ticket run.ticket --role validator --data-dir validator
      primerl-node join --ticket run.ticket --role standby --data-dir standby
    """
    from ..node.config.run import JoinConfig
    from ..node.ops.monitors import check_monitors

    given = {"ticket": ticket, "role": role, "data-dir": data_dir, **parallel(tp, pp, dp)}
    if wait:
        given |= {"wait": "true", "wait-for-trainer-s": "inf"}
    args = arguments(ctx, given)
    config = read_config(JoinConfig, args)
    source, config = (
        config_source(JoinConfig, args, config),
        with_allowed(config, allow_environment),
    )
    check_engine(config)
    check_monitors(config.monitors)
    if dry_run:
        if config.ticket not in ("", "-"):
            ticket_text(config.ticket)
        show_config(config, as_json=as_json)
        show_environments(config, as_json=as_json)
        return
    from ..node.app.daemon import check_present
    from ..node.environments.allowed import EnvironmentNotAllowed
    from .live import open_view

    check_present(config.engine)
    place = ticket_place(config.ticket)
    if config.ticket != "-" or not is_pipe(sys.stdin.fileno()):
        config = with_checked_ticket(config)
    check_free(config)
    while True:
        try:
            with open_view(f"primerl-node join as {config.role}", LINE_EVERY_S) as view:
                arguments_of_trainer = run_to_end(_join(config, source, view, place))
        except EnvironmentNotAllowed as refused:
            # the node has left, and its live view is off the screen
            config = asked(config, refused)
            continue
        if arguments_of_trainer:
            # the same process, so that a service manager, and `stop`, go on with it
            program = [
                sys.executable,
                "-P",
                "-m",
                "primerl.cli.main",
                "train",
                *arguments_of_trainer,
            ]
            os.execv(sys.executable, program)
        return


async def _join(
    config: "JoinConfig", source: "ConfigSource", view: "OpenView", place: "TicketPlace | None"
) -> list[str]:
    """Work until the run ends, with our own node in the view; the last line sums up its work.

    Returns the arguments of `train` if this node has to lead the run now; else none.
    """
    from ..node.app.daemon import join
    from ..node.environments.allowed import EnvironmentNotAllowed
    from ..node.ops.control import NodeState, watched
    from .live import plain_line

    ticket = partial(piped_text, MAX_TICKET_FILE) if config.ticket == "-" else None
    data_dir = config.data_dir or default_data_dir()
    nodes = {config.role: NodeState(config.role, data_dir, note="starting")}
    try:
        node = await watched(nodes, view, join(config, ticket, source, place), pace_s=view.pace_s)
    except EnvironmentNotAllowed:
        nodes.clear()  # it did nothing: its owner is asked
        raise
    finally:
        status = nodes[config.role].status if nodes else None
        if status is not None:
            status.phase, status.waiting_for = "ended", ""
            if config.role == "inference":
                status.detail = ""
            view.say(plain_line(nodes))
    if node.farewell:
        view.say(node.farewell)
    return node.lead_arguments() if node.leads else []


def with_allowed(config: "JoinConfig", names: Sequence[str] | None) -> "JoinConfig":
    """Allow further environments."""
    from ..node.config.run import AllowedConfig

    allowed = AllowedConfig(allow=[*config.environments.allow, *(names or ())])
    return config.model_copy(update={"environments": allowed})


def asked(config: "JoinConfig", refused: "EnvironmentNotAllowed") -> "JoinConfig":
    """Ask at the terminal whether to allow an environment. Raises `refused` without a terminal or a yes."""
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
    """Replace the ticket by its text. Raises TicketError; needs no network."""
    directory = config.data_dir or default_data_dir()
    return config.model_copy(update={"ticket": checked_ticket(config.ticket, directory)})


def checked_ticket(given: str, data_dir: Path) -> str:
    """Return the text of the ticket to join with: of `given`, or of an earlier admission in `data_dir`.

    Raises TicketError, StorageError; needs no network.
    """
    from ..node.app.tickets import usable_ticket

    return usable_ticket(ticket_text(given) if given else "", data_dir, int(time.time()))


def is_pipe(descriptor: int) -> bool:
    """Return whether a file descriptor is a pipe, or the socket that asyncio gives to a child."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


async def piped_text(most: int) -> str:
    """Read up to `most` bytes of a piped standard input to its end. Raises TicketError if there are none."""
    from ..node.errors import TicketError

    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    try:
        data = b""
        while len(data) < most and (piece := await reader.read(most)):
            data += piece
    finally:
        transport.close()
    if text := data[:most].decode(errors="replace").strip():
        return text
    raise TicketError("standard input holds no ticket")


def ticket_text(given: str) -> str:
    """Read a ticket given as itself, as a file, as an https link or as - (standard input).

    Raises TicketError.
    """
    from ..node.errors import TicketError
    from ..node.p2p.seeds import fetch_text
    from ..protocol.tickets import PACKED, PREFIXES

    if given == "-":
        return sys.stdin.read(MAX_TICKET_FILE).strip()
    if given.strip().startswith(PREFIXES):
        return given.strip()
    if "://" in given:
        where = given.strip()
        text = asyncio.run(fetch_text(where, MAX_TICKET_FILE + 1, deadline_s=LINK_S))
        name = f"the page at {where.partition('?')[0][:80]}"
    else:
        text, name = _file_text(given), given[:80]
    if len(text) > MAX_TICKET_FILE:
        raise TicketError(f"{name} is too large for a ticket: give one that holds a ticket alone")
    if not text.strip().startswith(PREFIXES):
        raise TicketError(f"{name} holds no ticket: they start with {PACKED}")
    return text.strip()


def ticket_place(given: str) -> "TicketPlace | None":
    """Return the file or page that a ticket is given by; None for the ticket itself, and for a pipe."""
    from ..node.app.tickets import TicketPlace
    from ..protocol.tickets import PREFIXES

    if given in ("", "-") or given.strip().startswith(PREFIXES):
        return None
    if "://" in given:  # its query may be a secret
        return TicketPlace(given.partition("?")[0][:80], partial(ticket_text, given))
    try:
        path = expand_home(given).absolute()
        return TicketPlace(str(path), partial(ticket_text, str(path))) if path.is_file() else None
    except (OSError, ValueError):
        return None  # no file: what reads the ticket says so


def _file_text(given: str) -> str:
    """Read a file, or one character more than a ticket's may have. Raises TicketError."""
    from ..node.errors import TicketError
    from ..protocol.tickets import PACKED

    try:
        path = expand_home(given)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):  # a pipe: --ticket <(ssh ...)
            raise TicketError(f"{given[:80]} is no file: give the ticket, or a file that holds it")
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TICKET_FILE + 1)
    except FileNotFoundError as error:
        raise TicketError(
            f"{given[:40]} is neither a ticket (they start with {PACKED}), nor a file or an https link"
        ) from error
    except (OSError, ValueError) as error:
        raise TicketError(f"cannot read a ticket from {given[:80]}: {error}") from error
