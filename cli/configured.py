"""Commands that take a config: `@ file` and `--a.b value` beside typer's own options.

Config arguments pass through typer untouched, in their order, and are read by node/load.py alone.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

if TYPE_CHECKING:
    from pydantic_config import BaseConfig

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved config as TOML, and do nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")]

KEYS = """Config keys, with defaults in brackets. Each is a flag (--network.host 127.0.0.1), a variable
(PRIMERL_NETWORK__HOST=127.0.0.1) and a line of a TOML file (`@ file.toml`, as many as you like):
"""


class ConfigCommand(typer.core.TyperCommand):
    """A command whose --help goes on with the fields of its config."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS] [@ FILE]... [--KEY VALUE]..."""
        return [*super().collect_usage_pieces(ctx), "[@ FILE]...", "[--KEY VALUE]..."]

    def get_help(self, ctx: Any) -> str:
        """typer's help, then the keys."""
        from ..node.config import JoinConfig, RunConfig
        from ..node.sft_config import SftConfig
        from .keys import keys_help

        others = {"join": JoinConfig, "sft": SftConfig}
        cls = others.get(self.name or "", RunConfig)
        return f"{super().get_help(ctx).rstrip()}\n\n{KEYS}\n{keys_help(cls)}"


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
