"""Commands that take a config: `@ file` and `--a.b value` beside typer's own options.

Config arguments pass through typer untouched, in their order, and are read by node/config/loader.py alone.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

if TYPE_CHECKING:
    from pydantic_config import BaseConfig

    from ..node.config.evaluation import EvalConfig
    from ..node.config.run import NodeConfig, RunConfig
    from ..node.config.sft import SftConfig

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved config as TOML, and do nothing.")
]
Tp = Annotated[
    str | None,
    typer.Option(
        "--tp", help="GPUs that share each layer of the model, or auto for all (vLLM, engine.tp)."
    ),
]
Pp = Annotated[
    str | None,
    typer.Option("--pp", help="GPUs in a row that hold some layers each (vLLM, engine.pp)."),
]
Dp = Annotated[
    str | None, typer.Option("--dp", help="Engines side by side, not with --pp (vLLM, engine.dp).")
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
        from ..node.config.evaluation import EvalConfig
        from ..node.config.run import JoinConfig, RunConfig
        from ..node.config.serving import ServeConfig
        from ..node.config.sft import SftConfig
        from .keys import keys_help

        others = {
            "join": JoinConfig,
            "sft": SftConfig,
            "eval": EvalConfig,
            "inference": ServeConfig,
        }
        cls = others.get(self.name or "", RunConfig)
        return f"{super().get_help(ctx).rstrip()}\n\n{KEYS}\n{keys_help(cls)}"


def show_config(config: "BaseConfig", *, as_json: bool) -> None:
    """Print a config so that it can be read back. Raises UsageError for what TOML cannot hold."""
    from ..node.config import toml
    from ..node.ops.errors import UsageError

    values = config.model_dump(mode="json")
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    try:
        typer.echo(toml.dumps(values), nl=False)
    except TypeError as error:
        raise UsageError(f"{error}, such as null in a list: --dry-run --json shows it") from error


def parallel(*, tp: str | None, pp: str | None, dp: str | None) -> list[str]:
    """--tp, --pp and --dp as flags for load()."""
    return options(**{"engine.tp": tp, "engine.pp": pp, "engine.dp": dp})


def check_engine(config: "NodeConfig | EvalConfig", *, proven: bool = True) -> None:
    """Raise UsageError for an engine that cannot be started like that, also before a dry run.

    `proven` is False for a command whose completions nobody audits.
    """
    from ..node.app.daemon import check_config
    from ..node.config.run import RunConfig

    model = config.model if isinstance(config, RunConfig) else None
    check_config(config.engine, model, proven=proven)


def check_engine_present(config: "NodeConfig") -> None:
    """Raise EngineError if the engine of a node that is about to start is not installed here."""
    from ..node.app.daemon import check_present

    check_present(config.engine)


def check_model(config: "RunConfig | SftConfig") -> None:
    """Raise UsageError for a model that the trainer cannot compute exactly, also before a dry run."""
    from ..node.models.architectures import check_trainable

    check_trainable(config.model, config.training.seq_len)


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
