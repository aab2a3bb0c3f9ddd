"""Commands that take a config: `@ file` and `--a.b value` beside typer's own options.

Config arguments pass through typer untouched, in their order, and are read by node/load.py alone.
"""

import io
import json
import os
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.core

if TYPE_CHECKING:
    from pydantic_config import BaseConfig

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved config as TOML, and do nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")]

KEYS = """Config keys, each a flag (--training.lr 1e-5), a variable (PRIMERL_TRAINING__LR=1e-5) and a line of
a TOML file (`@ file.toml`, as many as you like; `@ demo` is bundled):
"""


class ConfigCommand(typer.core.TyperCommand):
    """A command whose --help goes on with the fields of its config."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS] [@ FILE]... [--KEY VALUE]..."""
        return [*super().collect_usage_pieces(ctx), "[@ FILE]...", "[--KEY VALUE]..."]

    def get_help(self, ctx: Any) -> str:
        """typer's help, then the keys."""
        from ..node.config import JoinConfig, RunConfig

        cls = JoinConfig if self.name == "join" else RunConfig
        return f"{super().get_help(ctx).rstrip()}\n\n{KEYS}\n{config_help(cls)}"


def config_help(cls: "type[BaseConfig]") -> str:
    """The fields of a config with types, defaults and meaning."""
    from pydantic_config import cli

    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        cast(Any, cli)(cls, args=["--help"], prog="primerl-node")  # its overloads lack `prog`
    # Its own usage line and -h repeat what typer has printed.
    lines = text.getvalue().splitlines()
    return "\n".join(line for line in lines[2:] if "-h, --help" not in line)


def show_config(config: "BaseConfig", *, as_json: bool) -> None:
    """Print a config so that it can be read back."""
    from ..node import toml

    values = config.model_dump(mode="json")
    typer.echo(json.dumps(values, indent=2) if as_json else toml.dumps(values), nl=as_json)


def environment() -> dict[str, str]:
    """The variables that load() reads."""
    return dict(os.environ)


def options(**values: str | None) -> list[str]:
    """typer options that are config keys too, as flags for load()."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None:
            flags.extend([f"--{name.replace('_', '-')}", value])
    return flags


def arguments(ctx: typer.Context, extra: Sequence[str] = ()) -> list[str]:
    """What typer left over, and `extra` over it."""
    return [*ctx.args, *extra]
