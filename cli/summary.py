"""What a person reads at the end of a run, out of summary.json.

The file is the truth; a key that is missing there is a line that is missing here.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..node.ops.report import points, smooth, terminal_curve
from .screen import console
from .tables import passes, rejected, seconds, size, sources

CURVE_HEIGHT = 14
Summary = Mapping[str, Any]


def print_summary(path: Path) -> bool:
    """Print the summary at `path`; whether there is one."""
    try:
        summary: Summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    screen = console()
    curve = terminal_curve(
        smooth(points(summary.get("reward_curve"))), min(screen.width, 100), CURVE_HEIGHT
    )
    if curve:
        screen.print("\n[bold]Mean reward of a batch, smoothed[/]\n")
        screen.print(curve, markup=False)
    screen.print()
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_lines(summary):
        table.add_row(name, escape(value))
    screen.print(table)
    return True


def summary_lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Label and value of everything that the summary tells."""
    yield from _results(summary)
    yield from _bytes(summary)
    if "seconds" in summary:
        yield "time", seconds(summary["seconds"])
    for label, key in (("weights", "weights"), ("picture", "picture")):
        if summary.get(key):
            yield label, str(summary[key])


def _results(summary: Summary) -> Iterator[tuple[str, str]]:
    run = str(summary.get("run") or "")
    if run:
        run_id, steps = str(summary.get("run_id") or "")[:10], summary.get("steps", "?")
        yield "run", f"{run}  {run_id}  seed {summary.get('seed', '?')}, {steps} steps"
    for label, name in (("exact match", "exact_match"), ("reward", "reward")):
        before, after = summary.get(f"{name}_before"), summary.get(f"{name}_after")
        if before is not None and after is not None:
            yield label, f"{before:.3f} before, {after:.3f} after (held-out prompts)"
    for name, versions in (summary.get("evaluations") or {}).items():
        for one in (versions[0], *versions[1:][-1:]):
            yield f"eval {name}", f"version {one['version']}: {passes(one)}"
    if "accepted" in summary:
        refused = rejected(summary.get("rejected") or {})
        yield "rollouts", f"{summary['accepted']} accepted, {refused}"
    for short, counts in (summary.get("workers") or {}).items():
        yield (
            f"  {short}",
            f"{counts.get('accepted', 0)} accepted, {counts.get('rejected', 0)} rejected",
        )
    if summary.get("stale_fraction") is not None:
        yield "stale", f"{summary['stale_fraction']:.1%} of rollouts"
    if summary.get("mismatch_kl") is not None:
        yield "mismatch KL", f"{summary['mismatch_kl']:.2e} (sampler against trainer, per token)"


def _bytes(summary: Summary) -> Iterator[tuple[str, str]]:
    delta, full = summary.get("delta_bytes"), summary.get("full_bytes")
    if delta and full:
        share = f"{delta / full:.0%} of the {size(full)} that full checkpoints would be"
        yield "deltas", f"{size(delta)}, {share}"
    for short, counts in (summary.get("chunk_bytes_by_source") or {}).items():
        if counts:  # empty of a worker that was gone before the trainer was restarted
            yield f"  {short}", f"chunks from {sources(counts)}"
