"""`primerl-node eval`: how good models are, on environments, with intervals."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..node.ops.strict_json import to_json
from .command import (
    Dp,
    DryRun,
    Pp,
    Tp,
    arguments,
    check_engine,
    parallel,
    read_config,
    run_to_end,
    show_config,
    show_environments,
    show_template,
)

if TYPE_CHECKING:
    from rich.text import Text

    from ..node.evaluation.eval_suite import Cell, EvalProgress
    from ..node.evaluation.statistics import Estimate

LINE_EVERY_S = 5.0
MOST_TRIES = 4
"""Columns for pass@j: the first ones and the last."""

WeightsDir = Annotated[
    Path | None, typer.Option("--weights-dir", help="Step weights of a run: outputs/RUN/weights.")
]
Steps = Annotated[
    str | None, typer.Option("--steps", help="Only these steps of --weights-dir, such as 5,10.")
]
Again = Annotated[bool, typer.Option("--again", help="Also measure finished results again.")]
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
    outputs/NAME; run the same command again and only missing results are measured.

    \b
    Examples:
      primerl-node eval --weights-dir outputs/demo/weights
      primerl-node eval --weights-dir outputs/demo/weights --steps 5,10
      primerl-node eval --models Qwen/Qwen3-0.6B --environments '[{"id": "math"}]'
      primerl-node eval @ eval_api        a model behind an OpenAI-compatible API
    """
    from ..node.config.evaluation import EvalConfig

    where = str(weights_dir) if weights_dir else None
    flags = {"weights-dir": where, "steps": steps, **parallel(tp, pp, dp)}
    flags["again"] = "true" if again else None
    config = read_config(EvalConfig, arguments(ctx, flags))
    if config.models or config.weights_dir:
        check_engine(config, proven=False)
    if dry_run:
        show_config(config, as_json=as_json)
        show_environments(config, as_json=as_json)
        show_template(config, as_json=as_json)
        return
    from ..node.app.daemon import check_present
    from ..node.app.eval import evaluate
    from .tables import ProgressView

    if config.models or config.weights_dir:
        check_present(config.engine)
    with ProgressView("eval", LINE_EVERY_S, sys.stderr) as view:  # results are on stdout

        def show(progress: "EvalProgress") -> None:
            view.update(*progress_line(progress))

        cells = run_to_end(evaluate(config, watch=show))
    _print(cells, config.directory, as_json=as_json)


def progress_line(progress: "EvalProgress") -> tuple[str, int, int, str]:
    """Say which cell is measured, how many of its rollouts are done, and how it does so far."""
    title = f"{progress.cell}/{progress.cells} {progress.model} on {progress.environment}"
    figures = [f"reward {progress.reward:.3f}"]
    if progress.failed:
        figures.append(f"{progress.failed} failed")
    if progress.found:
        figures.append("measured before")
    return title, progress.done, progress.of, " | ".join(figures)


# -- results --------------------------------------------------------------------------------------


def _print(cells: Sequence["Cell"], directory: Path, *, as_json: bool) -> None:
    import msgspec

    from ..node.errors import NodeError
    from .tables import write

    if as_json:
        typer.echo(to_json({"cells": msgspec.to_builtins(cells)}, indent=2))
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


def results_table(cells: Sequence["Cell"]) -> "Text":
    """Draw a row for each environment and model: means with 95 % intervals."""
    from .tables import fitted

    tries = _tries(cells)
    passes = [f"pass@{j}" for j in tries]
    names = ("PROMPTS", "avg@k", *passes, "CUT", "FAILED", "TOKENS")
    rows: list[Sequence[str]] = []
    for cell in sorted(cells, key=lambda cell: cell.environment):
        figures = cell.figures
        estimates = [figures.passes.get(j) for j in tries]
        row = (
            cell.environment,
            cell.model,
            f"{figures.prompts} x {figures.samples}",
            estimate(figures.avg),
            *(estimate(mean) if mean else "-" for mean in estimates),
            f"{figures.truncated:.1%}",
            f"{figures.failed:.1%}",
            f"{figures.completion_mean:.1f}",
        )
        rows.append(row)
    drop = ("TOKENS", "PROMPTS", "CUT", *passes[:-1], "FAILED")
    names = ("ENVIRONMENT", "MODEL", *names)
    return fitted(names, rows, right=names[2:], elastic=("MODEL",), drop=drop)


def _tries(cells: Sequence["Cell"]) -> list[str]:
    """Choose the j of pass@j that are shown, ascending."""
    known = sorted({int(tries) for cell in cells for tries in cell.figures.passes})
    shown = known if len(known) <= MOST_TRIES else [*known[: MOST_TRIES - 1], known[-1]]
    return [str(j) for j in shown]


def estimate(mean: "Estimate") -> str:
    """Format a mean and its interval."""
    if mean.low is None or mean.high is None:
        return f"{mean.value:.3f}"
    return f"{mean.value:.3f} ({mean.low:.3f}-{mean.high:.3f})"


def remarks(cells: Sequence["Cell"]) -> list[str]:
    """Explain the intervals, and list the reasons of failed rollouts."""
    methods = {
        mean.method for cell in cells for mean in (cell.figures.avg, *cell.figures.passes.values())
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
