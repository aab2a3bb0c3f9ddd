"""`primerl-node eval`: how good models are, on environments, with intervals."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .configured import (
    Dp,
    DryRun,
    Pp,
    Tp,
    arguments,
    check_engine,
    environment,
    options,
    parallel,
    show_config,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..node.evaluation.eval_suite import Cell, Progress
    from ..node.evaluation.statistics import Estimate

PLAIN_EVERY_S = 5.0
MOST_TRIES = 4
"""pass@j that the table has room for: the first ones and the last."""

WeightsDir = Annotated[
    Path | None, typer.Option("--weights-dir", help="Step weights of a run: outputs/RUN/weights.")
]
Steps = Annotated[
    str | None, typer.Option("--steps", help="Of --weights-dir, as 5,10; else all of them.")
]
Again = Annotated[bool, typer.Option("--again", help="Also measure again what is finished.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results (or a dry run) as JSON.")]


def run(
    ctx: typer.Context,
    weights_dir: WeightsDir = None,
    steps: Steps = None,
    again: Again = False,
    tp: Tp = None,
    pp: Pp = None,
    dp: Dp = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure models on the held-out tasks of environments: avg@k and pass@j with 95 % intervals.

    Models are directories or hub ids that are generated with here (--engine hf or vllm), the step weights of a
    run, adapters included, and models behind OpenAI-compatible APIs. Results, every rollout among them, go to
    outputs/NAME; run the same command again and only what is missing is measured.

    \b
    Examples:
      primerl-node eval --weights-dir outputs/demo/weights
      primerl-node eval --weights-dir outputs/demo/weights --steps 5,10 --no-eval-base
      primerl-node eval --models Qwen/Qwen3-0.6B --environments '[{"id": "reverse-text", "samples": 8}]'
      primerl-node eval @ eval_api            endpoints: a base URL, and the variable that holds the key
    """
    from ..node.config.evaluation import EvalConfig
    from ..node.config.loader import load

    where = None if weights_dir is None else str(weights_dir)
    flags = options(**{"weights-dir": where, "steps": steps})
    flags.extend([*parallel(tp=tp, pp=pp, dp=dp), *(["--again"] if again else [])])
    config = load(EvalConfig, arguments(ctx, flags), environment())
    if config.models or config.weights_dir:
        check_engine(config, proven=False)
    if dry_run:
        show_config(config, as_json=as_json)
        return
    from ..node.app.eval import evaluate
    from .signals import run as run_to_end

    with EvalView() as view:
        cells = run_to_end(evaluate(config, watch=view.show))
    _print(cells, config.directory, as_json=as_json)


class EvalView:
    """A progress bar in a terminal, a line now and then in a pipe; on stderr, for results are on stdout."""

    def __init__(self) -> None:
        self._said = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "EvalView":
        if sys.stderr.isatty():
            self._bar = _progress_bar()
            self._task = self._bar.add_task("starting", total=None, figures="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: "Progress") -> None:
        """A rollout has ended, or a cell begins."""
        title = f"{progress.cell}/{progress.cells} {progress.model} on {progress.environment}"
        if self._bar is not None:
            done, of = progress.done, progress.of
            told = {"description": title, "figures": progress_line(progress)}
            self._bar.update(self._task, completed=done, total=of, **told)
            return
        now, last = time.monotonic(), progress.done == progress.of
        if last or now - self._said > PLAIN_EVERY_S:
            self._said = now
            count = f"{progress.done}/{progress.of}"
            print(f"{title} | {count} | {progress_line(progress)}", file=sys.stderr, flush=True)


def progress_line(progress: "Progress") -> str:
    """How a cell does so far."""
    parts = [f"reward {progress.reward:.3f}"]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    if progress.found:
        parts.append("measured before")
    return " | ".join(parts)


def _progress_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = ("{task.description}", "{task.fields[figures]}")
    title, shown = (TextColumn(column, markup=False) for column in columns)
    shape = (title, BarColumn(), MofNCompleteColumn(), shown, Remaining())
    return Progress(*shape, console=Console(stderr=True))


# -- results --------------------------------------------------------------------------------------


def _print(cells: Sequence["Cell"], directory: Path, *, as_json: bool) -> None:
    import msgspec

    from ..node.ops.errors import NodeError
    from .screen import write

    if as_json:
        typer.echo(json.dumps({"cells": msgspec.to_builtins(cells)}, indent=2))
    else:
        write(results_table(cells))
        for line in remarks(cells):
            typer.echo(line)
        typer.echo(f"results: {directory / 'results.json'}, rollouts beside it")
    dead = [cell for cell in cells if not cell.counts]
    if dead:
        why = next(iter(dead[0].figures.reasons), "no reason was given")
        raise NodeError(
            f"all rollouts of {dead[0].model} on {dead[0].environment} failed: {why}"
            + (f" (and {len(dead) - 1} more like it)" if len(dead) > 1 else "")
        )


def results_table(cells: Sequence["Cell"]) -> "Table":
    """One row for each environment and model: means, and below them their 95 % intervals."""
    from rich.markup import escape
    from rich.table import Table

    tries = _tries(cells)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("ENVIRONMENT", "MODEL"):
        table.add_column(name, no_wrap=True)
    for name in ("PROMPTS", "avg@k", *(f"pass@{one}" for one in tries), "CUT", "FAILED", "TOKENS"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in sorted(cells, key=lambda cell: cell.environment):
        told = cell.figures
        passes = [told.passes.get(one) for one in tries]
        table.add_row(
            escape(cell.environment),
            escape(cell.model),
            f"{told.prompts} x {told.samples}",
            estimate(told.avg),
            *(estimate(one) if one else "-" for one in passes),
            f"{told.truncated:.1%}",
            f"{told.failed:.1%}",
            f"{told.completion_mean:.1f}",
        )
    return table


def _tries(cells: Sequence["Cell"]) -> list[str]:
    """The j of pass@j that are shown, ascending: the first ones, and the largest."""
    known = sorted({int(tries) for cell in cells for tries in cell.figures.passes})
    shown = known if len(known) <= MOST_TRIES else [*known[: MOST_TRIES - 1], known[-1]]
    return [str(one) for one in shown]


def estimate(one: "Estimate") -> str:
    """A mean and its interval."""
    if one.low is None or one.high is None:
        return f"{one.value:.3f}"
    return f"{one.value:.3f} ({one.low:.3f}-{one.high:.3f})"


def remarks(cells: Sequence["Cell"]) -> list[str]:
    """What a reader of the table has to know."""
    methods = {
        one.method for cell in cells for one in (cell.figures.avg, *cell.figures.passes.values())
    }
    means = {
        "exact": "Clopper-Pearson where every prompt has 0 or 1",
        "bootstrap": "bootstrap over prompts",
    }
    used = " and ".join(text for name, text in means.items() if name in methods)
    lines = [f"in brackets: 95 % intervals, by {used}; failed rollouts count as unsolved"]
    for cell in cells:
        for reason, count in cell.figures.reasons.items():
            lines.append(f"failed: {count} of {cell.model} on {cell.environment}: {reason}")
    return lines
