"""`primerl-node import`: configs of prime-rl as configs of ours."""

from pathlib import Path
from typing import Annotated

import typer

from ..node.config.paths import expand_home

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        help="rl.toml; or those of trainer, orchestrator and inference; or sft.toml.",
        show_default=False,
    ),
]


def run(
    files: Files = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write it here; without it, to standard output."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing if a key has no counterpart.")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="Print all keys of prime-rl and ours, and nothing else.")
    ] = False,
) -> None:
    """Convert configs of prime-rl, and say which keys have no counterpart, and why.

    Reads the TOML files of any release since 2025, and the JSON files of its dry runs; later
    files are laid over earlier ones.

    \b
    Examples:
      primerl-node import rl.toml --output mine.toml
      primerl-node import train.toml orch.toml infer.toml --output mine.toml
      primerl-node import sft.toml --strict
      primerl-node rl @ mine.toml
    """
    from ..node.config.prime_rl import key_table, read_configs
    from ..node.errors import BETWEEN_PROBLEMS, UsageError

    if keys:
        typer.echo(key_table(), nl=False)
        return
    if not files:
        raise UsageError("name a config of prime-rl: primerl-node import rl.toml")
    output = expand_home(output) if output is not None else None
    if output is not None and output.exists():
        raise UsageError(f"{output} is there already: remove it, or give another --output")
    config = read_configs([expand_home(path) for path in files])
    if strict and config.missing:
        lines = [f"{len(config.missing)} keys have no counterpart:", *map(str, config.missing)]
        raise UsageError(BETWEEN_PROBLEMS.join(lines))
    text = config.toml([path.name for path in files], str(output or "mine.toml"))
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    for line in [f"wrote {output}: primerl-node {config.command} @ {output}", *config.report()]:
        typer.echo(line)
