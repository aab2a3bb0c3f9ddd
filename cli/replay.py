"""`primerl-node replay`: compute a finished run again, from its kept files."""

from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..node.config.paths import expand_home
from .command import AsJson, run_to_end

if TYPE_CHECKING:
    from ..node.app.replay import KeptRun, ReplayedStep

SHORT = 12
"""Digits of a digest that are shown."""
HEADINGS = ("STEP", "SAMPLES", "STATE", "WEIGHTS", "RESULT")
ROW = "{:>11}  {:>7}  {:<12}  {:<7}  {}"


def run(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run, outputs/NAME.")
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            help="How far weights may differ, as a share of the change by training. Default: 0, or 0.1 if "
            "the run was on a GPU or this is.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a finished run again and compare each step with the version that was published.

    Every step is trained once more: the state before it, the kept rollouts of its batch, advantages from
    their rewards, the optimizer. The digest of the state that comes out has to be the one in the signed
    head, and published weights that are still held have to be those that were signed. For all steps a run
    needs rollouts.keep.steps = 0 and checkpoint.keep_first = true, from its start on. Exit code 0: some
    steps could be checked, and all of them follow. Nothing in the directory is changed.

    \b
    Examples:
      primerl-node rl @ demo --checkpoint.keep-first --rollouts.keep.steps 0
      primerl-node replay outputs/demo
    """
    from ..node.app.replay import KeptRun, follows

    kept_run = KeptRun.open(expand_home(run_dir))
    table = None if as_json else StepTable()
    steps = run_to_end(_replay(kept_run, tolerance, table))
    if as_json:
        import msgspec

        report = {"steps": steps, "follows": follows(steps)}
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        outcomes = Counter(step.outcome for step in steps)
        typer.echo(
            f"{outcomes['equal']} equal, {outcomes['close']} close, {outcomes['departs']} depart, "
            f"{outcomes['unchecked']} not checked"
        )
    if not follows(steps):
        raise typer.Exit(1)


async def _replay(
    kept_run: "KeptRun", tolerance: float | None, table: "StepTable | None"
) -> "list[ReplayedStep]":
    from ..node.app.replay import RunReplay

    results: list[ReplayedStep] = []
    async with (
        RunReplay(kept_run, tolerance=tolerance) as replay,
        aclosing(replay.steps()) as steps,
    ):
        async for step in steps:
            results.append(step)
            if table is not None:
                table.add(step)
    if table is not None:
        table.flush()
    return results


class StepTable:
    """Prints steps as they come; those in a row that could not be checked for one reason share a line."""

    def __init__(self) -> None:
        self._waiting: list[ReplayedStep] = []
        typer.echo(ROW.format(*HEADINGS))

    def add(self, step: "ReplayedStep") -> None:
        """Print a step, unless it may be one of several."""
        if self._waiting and (step.outcome, step.note) != ("unchecked", self._waiting[0].note):
            self.flush()
        self._waiting.append(step)
        if step.outcome != "unchecked":
            self.flush()

    def flush(self) -> None:
        """Print the pending lines."""
        if not self._waiting:
            return
        first, last = self._waiting[0], self._waiting[-1]
        self._waiting = []
        place = f"{first.step}-{last.step}" if last is not first else str(first.step)
        samples = str(first.samples) if first.computed and last is first else ""
        weights = "held" if first.weights else "-"
        state = first.published[:SHORT] or "-"
        typer.echo(ROW.format(place, samples, state, weights, _result(first)))


def _result(step: "ReplayedStep") -> str:
    words = {"unchecked": "not checked"}.get(step.outcome, step.outcome)
    if step.largest is not None and step.drift is not None:
        words += f" (largest difference {step.largest:.3g}, {step.drift:.2%} of the way)"
    return f"{words}: {step.note}" if step.note else words
