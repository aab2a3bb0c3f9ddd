"""`primerl-node model import`: convert models from elsewhere into directories that all commands take."""

from pathlib import Path
from typing import Annotated

import typer

from ..node.config.paths import expand_home

app = typer.Typer(rich_markup_mode=None, add_completion=False, help="Convert models.")


@app.callback()
def _models() -> None:  # pyright: ignore[reportUnusedFunction] - typer calls it
    """Convert models from elsewhere."""


@app.command("import", short_help="Convert a GGUF file or a model directory.")
def import_model(
    source: Annotated[Path, typer.Argument(help="FILE.gguf, or a model directory.")],
    target: Annotated[Path, typer.Argument(help="New directory.")],
) -> None:
    """Convert a GGUF file or a model directory, and say what was left out.

    The result is a Hugging Face directory with weights, tokenizer, chat template and generation
    config, which runs, evaluations and servers take as --model.name. A GGUF file is
    dequantized to bfloat16.

    \b
    Examples:
      primerl-node model import SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
      primerl-node model import ~/downloads/some-model models/some-model
    """
    from ..node.models.conversion import convert

    for line in convert(expand_home(source), expand_home(target)):
        typer.echo(line)
