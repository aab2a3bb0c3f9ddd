"""`primerl-node sft`: learn from demonstrations, on this machine alone."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .configured import AsJson, DryRun, arguments, check_model, environment, show_config

if TYPE_CHECKING:
    from ..node.sft.loop import SftProgress

PLAIN_EVERY_S = 2.0


def run(ctx: typer.Context, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Supervised fine-tuning: teach a model to answer as demonstrations do.

    Rows are `messages` (chat, tools, reasoning), or `prompt` and `completion`, from JSON lines or parquet,
    a data set of the hub, or a taskset that has answers. The weights that come out are a Hugging Face
    directory, outputs/<name>/weights/step_<n>, and a run can begin with them.

    \b
    Examples:
      primerl-node sft @ sft_demo
      primerl-node sft --model.name Qwen/Qwen3-0.6B --data.files chats.jsonl --validation.fraction 0.02
      primerl-node sft @ sft_demo --resume        go on where it was interrupted
      primerl-node train @ demo --no-warmup --model.name outputs/sft-demo/weights/step_100
    """
    from ..node.config.loader import load
    from ..node.config.sft import SftConfig

    config = load(SftConfig, arguments(ctx), environment())
    check_model(config)
    if dry_run:
        show_config(config, as_json=as_json)
        return
    from ..node.app.sft import sft
    from .signals import run as run_to_end

    with SftView(f"primerl-node sft  {config.name}") as view:
        directory = run_to_end(sft(config, watch=view.show))
    print_summary(directory / "summary.json")


class SftView:
    """A progress bar in a terminal, one line every two seconds in a pipe."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._said = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "SftView":
        if sys.stdout.isatty():
            self._bar = _progress_bar()
            self._task = self._bar.add_task(self._title, total=None, figures="starting")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: "SftProgress") -> None:
        """A step was made."""
        if self._bar is not None:
            step, steps = progress.step, progress.max_steps
            self._bar.update(self._task, completed=step, total=steps, figures=figures(progress))
            return
        now, last = time.monotonic(), progress.step == progress.max_steps
        if last or now - self._said > PLAIN_EVERY_S:
            self._said = now
            print(f"step {progress.step}/{progress.max_steps} | {figures(progress)}", flush=True)


def figures(progress: "SftProgress") -> str:
    """The figures of a step in one line."""
    parts = [f"loss {progress.loss:.4f}"]
    if progress.validation_loss is not None:
        parts.append(f"validation {progress.validation_loss:.4f}")
    parts.extend([f"epoch {progress.epoch:.2f}", f"{progress.tokens_per_s:,.0f} tokens/s"])
    return " | ".join(parts)


def _progress_bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = ("{task.description}", "{task.fields[figures]}")
    title, shown = (TextColumn(column, markup=False) for column in columns)
    return Progress(title, BarColumn(), MofNCompleteColumn(), shown, Remaining())


def print_summary(path: Path) -> None:
    """What came out, from summary.json."""
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in summary_lines(summary):
        typer.echo(f"{name:<12} {value}")


def summary_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and value of what a person wants to know."""
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
