"""`primerl-node man`, and the site's pages of commands and config keys: all from the programs' own help.

There is no second list of commands, options or keys.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from .. import __version__

CONFIGS = {
    "train": "train, rl and doctor",
    "join": "join",
    "inference": "inference",
    "sft": "sft",
    "eval": "eval",
    "judge": "judge",
}
"""Commands whose configs differ, and the titles of their pages."""
FILES = """\
outputs/NAME/            a run: config, logs, checkpoints, rollouts, weights, and its key in trainer/
~/.primerl/              a worker: its key (key.pem), ledger, chunks of weights (--data-dir names another)
~/.primerl/compiled/     compiled code of trainers; may be deleted"""


@dataclass(frozen=True)
class CommandHelp:
    """The help of one command."""

    name: str
    """With the names of its groups: `service install`; empty for the program."""
    usage: str
    paragraphs: list[tuple[str, bool]]
    """Text of each, and whether its lines stay as they are."""
    options: list[tuple[str, str]]


def man(ctx: typer.Context) -> None:
    """Print the manual page: `primerl-node man | man -l -`.

    scripts/install.sh puts it where `man primerl-node` finds it while .venv is activated.
    """
    text = man_page(ctx.find_root().command)
    sys.stdout.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    typer.echo(text, nl=False)


def man_page(program: Any) -> str:
    """Write the manual page, in the macros of man(7)."""
    whole, *commands = command_helps(program)
    lines = [
        f'.TH PRIMERL\\-NODE 1 "" "primerl\\-node {__version__}" "User Commands"',
        ".SH NAME",
        "primerl\\-node \\- peer\\-to\\-peer reinforcement learning of language models",
        ".SH SYNOPSIS",
        _roff(f"primerl-node {whole.usage}"),
        ".SH DESCRIPTION",
        *_roff_paragraphs(whole.paragraphs),
        ".SH OPTIONS",
        *_roff_options(whole.options),
        ".SH COMMANDS",
        "Commands that take config keys list them by \\-\\-help\\-all.",
    ]
    for command in commands:
        lines += [f".SS {_roff(command.name)}", _roff(f"primerl-node {command.usage}")]
        lines += [*_roff_paragraphs(command.paragraphs), *_roff_options(command.options)]
    lines += [".SH FILES", ".nf", *map(_roff, FILES.splitlines()), ".fi"]
    return "\n".join(lines) + "\n"


def commands_page(program: Any) -> str:
    """Write the page of all commands, in Markdown."""
    _, *commands = command_helps(program)
    lines = ["# Commands", "", "What `--help` of each says."]
    for command in commands:
        lines += ["", f"## {command.name}", "", f"    primerl-node {command.usage}", ""]
        for text, verbatim in command.paragraphs:
            lines += [_indented(text) if verbatim else _prose(text), ""]
        if command.options:
            lines += ["| option | |", "|---|---|"]
            lines += [f"| `{names}` | {_prose(about)} |" for names, about in command.options]
    return "\n".join(lines) + "\n"


def config_page(command: str) -> str:
    """Write the page of the config keys of a command, in Markdown."""
    from .command import Key, config_of, entries

    lines = [
        f"# Keys of {CONFIGS[command]}",
        "",
        "A key is a line of a TOML file (`@ file.toml`), a variable (`PRIMERL_TRAINING__LR=1e-6`) and a flag",
        "(`--training.lr 1e-6`), the later ones first; unknown keys are errors. `--dry-run` shows what holds.",
    ]
    table = ["", "| key | value | default | |", "|---|---|---|---|"]
    lines += table
    for entry in entries(config_of(command)):
        if isinstance(entry, Key):
            kinds = " or ".join(f"`{kind}`" for kind in entry.kind.split("|"))
            cells = (f"`{entry.path}`", kinds, f"`{entry.default}`", _prose(entry.meaning))
            lines.append(f"| {' | '.join(cells)} |")
        else:
            lines += ["", f"## {entry.name}", "", _prose(entry.about), *table]
    return "\n".join(lines) + "\n"


def command_helps(program: Any) -> Iterator[CommandHelp]:
    """Describe the program (typer's command), then its commands and their subcommands."""
    yield _help_of("", program, program.make_context("primerl-node", [], resilient_parsing=True))
    yield from _below(program, "")


def _below(group: Any, prefix: str) -> Iterator[CommandHelp]:
    for name, command in group.commands.items():
        path = f"{prefix}{name}"
        yield _help_of(path, command, command.make_context(path, [], resilient_parsing=True))
        if hasattr(command, "commands"):
            yield from _below(command, f"{path} ")


def _help_of(name: str, command: Any, context: Any) -> CommandHelp:
    texts = [command.help or "", command.epilog or ""]
    # click marks a paragraph that is not to be filled by a line with this character
    paragraphs = [
        (part.replace("\b", "").strip("\n"), "\b" in part)
        for text in texts
        for part in re.split(r"\n\s*\n", text.replace("\x0c", ""))
        if part.strip()
    ]
    records = (part.get_help_record(context) for part in command.params)
    options = [(names, " ".join(about.split())) for names, about in filter(None, records)]
    usage = " ".join([name, *command.collect_usage_pieces(context)]).strip()
    return CommandHelp(name, usage, paragraphs, options)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line.strip() else "" for line in text.splitlines())


def _prose(text: str) -> str:
    """Escape for Markdown what is not between backticks."""
    parts = text.split("`")
    parts[::2] = [
        part.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*") for part in parts[::2]
    ]
    return "`".join(parts)


def _roff(text: str) -> str:
    """Escape a line."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _roff_paragraphs(paragraphs: list[tuple[str, bool]]) -> Iterator[str]:
    for text, verbatim in paragraphs:
        yield ".PP"
        lines = map(_roff, text.splitlines())
        yield from [".nf", *lines, ".fi"] if verbatim else [" ".join(lines)]


def _roff_options(options: list[tuple[str, str]]) -> Iterator[str]:
    for names, about in options:
        yield from (".TP", f".B {_roff(names)}", _roff(about))
