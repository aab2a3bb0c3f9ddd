"""The program `primerl-node`: its commands, and the one place where an error becomes a line and an exit code.

Nothing heavy may be imported at the top of any file in this package: `--help` must stay fast.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import __version__
from ..crypto.keys import KeyFileError
from ..node.environments.confine import protect_node
from ..node.errors import BETWEEN_PROBLEMS, NodeError, StorageError, file_error, is_of_file
from ..protocol.errors import RemoteProtocolError
from . import (
    ban,
    bundle,
    chat,
    dashboard,
    doctor,
    environments,
    evaluate,
    explain,
    identity,
    import_config,
    inference,
    join,
    judge,
    limits,
    models,
    ping,
    reference,
    replay,
    rollouts,
    root,
    service,
    sft,
    status,
    ticket,
    train,
)
from .command import ConfigCommand, Interrupted

PROGRAM = "primerl-node"

HELP = """Train language models together: one trainer learns, inference workers anywhere generate.

\b
Try it on this machine, one command from nothing to a model that got better:
  primerl-node rl @ demo

\b
The same by hand, in three terminals:
  primerl-node train @ demo                        prints a join ticket
  primerl-node join --ticket T --data-dir worker   as often as you like, anywhere
  primerl-node peers --watch                       the nodes of the run, and how they do
"""

EPILOG = """\b
Configuration, for rl, train, join, judge, sft, eval, inference and doctor (later wins):
  defaults < `@ file.toml` (left to right) < PRIMERL_TRAINING__LR=1e-6 < --training.lr 1e-6

\b
Exit codes:
  0 done               4 port, directory, key in use    8 the run itself failed
  1 anything else      5 disk full, unreadable data   130 interrupted (ctrl-C)
  2 wrong usage        6 no peer could be reached      143 terminated, 129 terminal closed
  3 wrong ticket       7 engine or trainer failed     9 another node leads the run now
"""

# Some versions of typer bundle click: this is the ClickException of that copy.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

EXTRA = re.compile(r"unexpected extra argument(?:s|\(s\))? \((\S+)\)")
"""click's message for one argument too many."""

app = typer.Typer(
    name=PROGRAM,
    help=HELP,
    epilog=EPILOG,
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _program(  # pyright: ignore[reportUnusedFunction] - typer calls it
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version


FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Config flags are read by load(), not by typer."""

CONFIGURED: dict[str, tuple[Callable[..., Any], str]] = {
    "rl": (train.rl, "Run everything on this machine: a trainer and its workers."),
    "train": (train.train, "Start a run, or resume one: prints a join ticket, learns."),
    "join": (join.run, "Work for a run, with its ticket."),
    "judge": (judge.run, "Serve a frozen model whose replies workers generate and prove."),
    "sft": (sft.run, "Learn from demonstrations: weights that a run can begin with."),
    "eval": (evaluate.run, "Measure models on environments: pass@k, with intervals."),
    "inference": (inference.run, "Serve a policy to OpenAI clients."),
    "doctor": (doctor.run, "Check this machine, and whether a run fits into its memory."),
}
"""Commands that take a config, and their lines in the help."""
PLAIN: dict[str, tuple[Callable[..., Any], str]] = {
    "status": (status.status, "Show how the running node is doing."),
    "peers": (status.peers, "Show the peers of the running node, and how they do."),
    "ping": (ping.run, "Measure the round trip to a peer of the running node."),
    "top": (status.top, "Show the nodes of this machine and their peers, live."),
    "dashboard": (dashboard.run, "Print the link of the running node's page in the browser."),
    "ban": (ban.ban, "Give a worker no more work."),
    "pardon": (ban.pardon, "Forget what is held against a worker."),
    "bans": (ban.bans, "List who is banned, since when and why."),
    "bundle": (bundle.bundle, "Collect what helps to find a node's fault, without secrets."),
    "chat": (chat.run, "Ask a model before and after its run, or several, the same."),
    "explain": (explain.run, "Show why work was accepted or rejected, with the evidence."),
    "rollouts": (rollouts.run, "Read the rollouts that a run kept."),
    "replay": (
        replay.run,
        "Compute a finished run again, and compare it with its published versions.",
    ),
    "import": (import_config.run, "Convert a config of prime-rl."),
    "stop": (status.stop, "Stop the running node in order."),
    "pause": (limits.pause, "Pause a worker: it computes and transfers nothing."),
    "resume": (limits.resume, "End a worker's pause."),
    "reload": (limits.reload, "Read a node's config again: limits and log level."),
    "handover": (root.handover, "Hand the run over to its standby."),
    "init": (identity.init, "Make this node's key."),
    "id": (identity.show, "Show this node's id."),
    "man": (reference.man, "Print the manual page: primerl-node man | man -l -"),
    "retire": (identity.retire, "End this node's key: it was stolen, or is of no use."),
}
for _name, (_command, _help) in CONFIGURED.items():
    app.command(_name, short_help=_help, cls=ConfigCommand, context_settings=FREE)(_command)
for _name, (_command, _help) in PLAIN.items():
    app.command(_name, short_help=_help)(_command)
_tickets = "Print, issue, list and revoke join tickets of the running trainer."
_environments = "Test and trust environments."
app.add_typer(environments.app, name="env", short_help=_environments)
app.add_typer(identity.app, name="key", short_help="Copy, restore and change this node's key.")
app.add_typer(root.app, name="root", short_help="Certify who may lead a run after its trainer.")
app.add_typer(models.app, name="model", short_help="Convert models from elsewhere.")
app.add_typer(service.app, name="service", short_help="Run a node at boot, by systemd or launchd.")
app.add_typer(ticket.app, name="ticket", short_help=_tickets)


def main() -> None:
    """Entry point: run the command line, exit with the documented code."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    protect_node()
    os.environ.setdefault(
        "PYDANTIC_DISABLE_PLUGINS", "__all__"
    )  # to look for some reads all packages
    if "PRIMERL_PARENT_PID" in os.environ:
        from ..node.process.spawn import leave_with_parent

        leave_with_parent(os.environ)
    sys.exit(execute(sys.argv[1:]))


def open_closed_streams() -> None:
    """Replace standard streams that a service or `>&-` closed by /dev/null.

    Python has None for them, and the next file that is opened would receive the output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: the closed stream's
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def execute(args: list[str]) -> int:
    """Run one command line; returns its exit code. A user's mistakes are lines on stderr, one each."""
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    elif args == ["version"]:
        args = ["--version"]
    try:
        code = app(args, prog_name=PROGRAM, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except NodeError as error:
        return _fail(str(error), error.exit_code)
    except KeyFileError as error:
        return _fail(str(error), StorageError.exit_code)
    except RemoteProtocolError as error:
        return _fail(f"refused by the other side: {error}", NodeError.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except Interrupted as stopped:
        return 128 + stopped.number
    except BrokenPipeError:  # `primerl-node peers | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NodeError.exit_code
    except OSError as error:
        if not is_of_file(error):
            raise
        return _fail(str(file_error(error)), StorageError.exit_code)
    except CommandLineError as error:
        return _command_line(error)


def _command_line(error: Exception) -> int:
    code = int(getattr(error, "exit_code", 2))
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", error.__str__)())
    if message.startswith("Usage: "):
        typer.echo(message)  # no arguments at all: the help itself and, as with git, no success
        return code
    place = getattr(context, "command_path", PROGRAM)
    parts: list[Any] = getattr(getattr(context, "command", None), "params", [])
    options = {flag for part in parts for flag in part.opts}
    if (extra := EXTRA.search(message)) and "--data-dir" in options:
        message = f"{extra[1]!r} is not understood here: did you mean `--data-dir {extra[1]}`?"
        return _fail(message, code)
    return _fail(f"{message.rstrip('.')} (see `{place} --help`)", code)


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    lines = [" ".join(line.split()) for line in message.split(BETWEEN_PROBLEMS)]
    print(f"{PROGRAM}: error: {BETWEEN_PROBLEMS.join(lines)}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
