"""`primerl-node sft`: learn from demonstrations, on this machine alone."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .command import (
    DryRun,
    DryRunJson,
    check_found,
    check_model,
    read_config,
    run_to_end,
    show_config,
    show_template,
)

if TYPE_CHECKING:
    from ..node.sft.loop import SftProgress

LINE_EVERY_S = 2.0


def run(ctx: typer.Context, dry_run: DryRun = False, as_json: DryRunJson = False) -> None:
    """Supervised fine-tuning: teach a model to answer as demonstrations do.

    Rows are `messages` (chat, tools, reasoning), or `prompt` and `completion`, from JSON lines or parquet,
    a data set of the hub, or a taskset that has answers. The weights that come out are a Hugging Face
    directory, outputs/<name>/weights/step_<n>, and a run can begin with them.

    \b
    Examples:
      primerl-node sft @ sft_demo
      primerl-node sft --model.name Qwen/Qwen3-0.6B --data.files chats.jsonl
      primerl-node sft @ sft_demo --resume        go on where it was interrupted
      primerl-node train @ demo --no-warmup \\
        --model.name outputs/sft-demo/weights/step_100
    """
    from ..node.config.sft import SftConfig

    config = read_config(SftConfig, ctx.args)
    notes = check_model(config)
    if dry_run:
        show_config(config, as_json=as_json, notes=notes)
        show_template(config, as_json=as_json)
        return
    from ..node.app.sft import sft
    from ..node.sft.data import find_files
    from .tables import ProgressView, label_table, write

    find_files([*config.data.files, *config.validation.files])
    check_found(config)
    with ProgressView(f"primerl-node sft {config.name}", LINE_EVERY_S, sys.stdout) as view:

        def show(progress: "SftProgress") -> None:
            view.update("step", progress.step, progress.max_steps, figures(progress))

        directory = run_to_end(sft(config, watch=show), config.run_dir)
    write(label_table(summary_lines(read_summary(directory))))


def figures(progress: "SftProgress") -> str:
    """Describe a step in one line."""
    parts = [f"loss {progress.loss:.4f}"]
    if progress.validation_loss is not None:
        parts.append(f"validation {progress.validation_loss:.4f}")
    parts.extend([f"epoch {progress.epoch:.2f}", f"{progress.tokens_per_s:,.0f} tokens/s"])
    return " | ".join(parts)


def read_summary(directory: Path) -> Mapping[str, Any]:
    """Read the summary.json of a finished run."""
    return json.loads((directory / "summary.json").read_text(encoding="utf-8"))


def summary_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List labels and values of a summary."""
    yield "run", f"{summary['run']}  seed {summary['seed']}, {summary['steps']} steps"
    if summary["loss"] is not None:
        yield "loss", f"{summary['loss']:.4f}"
    before, after = summary["validation_loss_before"], summary["validation_loss_after"]
    if before is not None:
        yield "validation", f"{before:.4f} before, {after:.4f} after"
    yield "data", f"{summary['samples']} samples, {summary['tokens']} tokens"
    skipped = [f"{count} {reason}" for reason, count in summary["skipped_rows"].items()]
    if skipped:
        yield "left out", f"{', '.join(skipped)} (rows)"
    yield "weights", summary["weights"]
