"""The view of a run: a live screen in a terminal, plain lines in a pipe, and the summary at the end.

Draws the states that it is given and asks no node; a node that has not answered yet is a line that says so.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..node.ops.control import NodeState, PeerRow, Status, View
from ..node.reports.report import points, smooth, terminal_curve
from .tables import (
    NONE,
    Column,
    bounds_in_one,
    console,
    duration,
    environment,
    gone,
    label_table,
    lag,
    listing,
    number,
    outcomes,
    passes,
    policy,
    rejected,
    seconds,
    size,
    sources,
    sparkline,
    stage,
    state_of,
    status_lines,
    traffic,
    trust,
    version,
)

LIVE_EVERY_S = 0.5
PLAIN_EVERY_S = 2.0
SAME_EVERY_S = 60.0
"""Pause before a plain line that repeats the one before."""
TRAINER = "trainer"


class OpenView(View, AbstractContextManager["OpenView"], Protocol):
    """A view while it is on the screen: LiveView, PlainView."""

    @property
    def pace_s(self) -> float:
        """Seconds between two calls of show(); infinite for none."""
        ...


def open_view(title: str, every_s: float = PLAIN_EVERY_S) -> OpenView:
    """Open the view that suits standard output: a screen, or a line every `every_s` seconds.

    Under a launcher, which has a view of its own, only say() prints.
    """
    if sys.stdout.isatty():
        return LiveView(title)
    return PlainView(every_s=math.inf if "PRIMERL_PARENT_PID" in os.environ else every_s)


class PlainView:
    """Lines for logs and pipes."""

    def __init__(
        self, every_s: float = PLAIN_EVERY_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._last = ("", -math.inf)

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def pace_s(self) -> float:
        """Seconds between two calls of show(); infinite for none."""
        return self._every_s if math.isinf(self._every_s) else PLAIN_EVERY_S

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """Print a line if one is due: sooner if it is new than if it repeats the last."""
        line, now = plain_line(nodes), self._clock()
        last, when = self._last
        if now - when > (max(self._every_s, SAME_EVERY_S) if line == last else self._every_s):
            self._last = (line, now)
            self.say(line)

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)


class LiveView:
    """A screen that redraws itself below the lines of say()."""

    def __init__(self, title: str, screen: Console | None = None) -> None:
        self._title = title
        self._console = screen or console()
        self._started = time.monotonic()
        self._nodes: Mapping[str, NodeState] = {}
        self._live = Live(
            console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    @property
    def pace_s(self) -> float:
        """Seconds between two calls of show()."""
        return LIVE_EVERY_S

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """Draw these from now on."""
        self._nodes = nodes

    def say(self, text: str) -> None:
        """Print a line above the screen, whole however long: a ticket must survive copying."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _draw(self) -> Any:
        elapsed = time.monotonic() - self._started
        width, height = self._console.size
        return screen_of(self._title, self._nodes, elapsed, width - ECHO, height)


# -- plain lines -----------------------------------------------------------------------------------


def plain_line(nodes: Mapping[str, NodeState]) -> str:
    """Describe a run, or a node that joined one, in one line."""
    trainer = nodes.get(TRAINER)
    if trainer is None and nodes:
        return "; ".join(map(_own_line, nodes.values()))
    if trainer is None or trainer.status is None:
        return f"trainer: {trainer.note if trainer else 'starting'}"
    status = trainer.status
    parts = [_phase(status), f"environment: {status.environment}" if status.environment else ""]
    if status.history:
        parts.append(f"step {status.step}/{status.max_steps}")
        parts.append(f"reward {number(status.reward)}, staleness {number(status.staleness)}")
    held = [f"version {version(status.version)}"]
    for node in nodes.values():
        if node is not trainer:
            running = node.status is not None and node.note == "running"
            where = f"at {version(node.status.version)}" if node.status and running else node.note
            held.append(f"{node.name} {where}")
    return _joined(*parts, outcomes(status), ", ".join(held), *_ending(status))


def _own_line(node: NodeState) -> str:
    status = node.status
    if status is None:
        return f"{node.name}: {node.note}"
    busy = f"{status.engine.tokens_per_s:.0f} tokens/s, " if status.engine else ""
    parts = [
        f"{busy}{status.leases} leases" if busy else "",
        f"stage {stage(status.stage)}" if status.stage else "",
    ]
    own = (_phase(status), f"policy {policy(status)}", outcomes(status))
    return _joined(*own, *parts, *_ending(status))


def _ending(status: Status) -> tuple[str, str]:
    waiting = f"waiting: {status.waiting_for}" if status.waiting_for else ""
    return traffic(status), waiting


def _joined(*parts: str) -> str:
    return " | ".join(filter(None, parts))


def _phase(status: Status) -> str:
    return f"{status.phase}{': ' + status.detail if status.detail else ''}"


# -- the screen ------------------------------------------------------------------------------------

OWN_LINES = {"node", "data", "peers", "loop lag"}
"""Lines of `status` that the screen of a worker leaves out."""
LEAST_ROWS = 3
OTHER_LINES = 14
"""Lines of the screen that are no rows of nodes."""
FRAME = 4
"""Columns."""
ECHO = 2
"""Columns that are left free for the terminal's ^C, which would move the screen down by a line."""
Cells = Mapping[str, str]


def _column(name: str, importance: int) -> Column[Cells]:
    return Column(
        name, lambda cells: cells.get(name, NONE), importance, elastic=name in ("PHASE", "TRUST")
    )


IMPORTANCE = {
    "NODE": 100,
    "ID": 98,
    "PHASE": 95,
    "PATH": 40,
    "VER": 90,
    "LAG": 80,
    "OK/REJ": 85,
    "TRUST": 70,
    "SENT": 20,
    "RECV": 20,
    "CHUNKS": 50,
}
COLUMNS = [_column(name, importance) for name, importance in IMPORTANCE.items()]


def screen_of(
    title: str, nodes: Mapping[str, NodeState], elapsed_s: float, width: int, height: int = 40
) -> Panel:
    """Draw the live screen of a run, or of one node that joined a run."""
    trainer = nodes.get(TRAINER)
    if trainer is not None:
        rows = _rows(trainer, nodes)
        room = max(LEAST_ROWS, height - OTHER_LINES)
        parts = [_progress(trainer.status, width), ""]
        parts.append(listing(COLUMNS, rows[:room], width - FRAME))
        if len(rows) > room:
            parts.append(f"and {len(rows) - room} more: `primerl-node peers`")
    else:
        parts = [label_table(_own(node)) for node in nodes.values()]
        parts = parts or [_progress(None, width)]
    head = f"[bold]{escape(title)}[/]  {duration(elapsed_s)}"
    return Panel(Group(*parts), title=head, title_align="left", border_style="blue", width=width)


def _progress(status: Status | None, width: int) -> Table:
    if status is None:
        return label_table([("phase", "starting")])
    room = max(20, min(80, width - 40))
    grid = label_table([("phase", _phase(status))])
    if status.environment:
        grid.add_row("environment", escape(status.environment))
    steps = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=max(1, status.max_steps), completed=status.step, width=room)
    steps.add_row(bar, f"step {status.step} of {status.max_steps}")
    grid.add_row("progress", steps)
    curve = sparkline([reward for _, reward in status.history], room)
    grid.add_row("reward", f"[green]{curve}[/]  [bold]{number(status.reward)}[/]")
    if len(status.environments) > 1:
        for row in status.environments:
            grid.add_row(f"  {escape(row.name)}", escape(environment(row)))
    grid.add_row("staleness", f"{number(status.staleness)} versions, {status.leases} leases out")
    grid.add_row("rollouts", escape(outcomes(status)))
    if status.bounds:
        grid.add_row("bounds", escape(bounds_in_one(status.bounds)))
    grid.add_row("waiting", escape(status.waiting_for or NONE))
    for one in status.warnings:
        grid.add_row("warning", escape(one))
    return grid


def _own(node: NodeState) -> list[tuple[str, str]]:
    """List the figures for a volunteer; run, phase and waiting keep their places when they are empty."""
    if node.status is None:
        return [("phase", node.note)]
    lines = {name: value for name, value in status_lines(node.status) if name not in OWN_LINES}
    names = dict.fromkeys(("run", "phase", "waiting", *lines))
    return [(name, lines.get(name, NONE)) for name in names]


def _rows(trainer: NodeState, nodes: Mapping[str, NodeState]) -> list[Cells]:
    """List the nodes that were started here, then others that joined and have not been gone for long."""
    known = {row.short: row for row in trainer.peers}
    ours = {node.status.short for node in nodes.values() if node.status}
    newest = trainer.status.version if trainer.status else -1
    rows = [_node_cells(node, newest, known) for node in nodes.values()]
    if len(ours) < len(nodes):
        return rows  # the id of a node of ours is unknown yet: its row would look like a stranger's
    joined = (row for row in trainer.peers if row.short not in ours and not gone(row))
    joined = (row for row in joined if row.role != "?" or row.version >= 0 or row.accepted)
    return rows + [
        _peer_cells(row) for row in sorted(joined, key=lambda row: (row.role, row.short))
    ]


def _node_cells(node: NodeState, newest: int, rows: Mapping[str, PeerRow]) -> Cells:
    status = node.status
    if status is None:
        return {"NODE": node.name, "PHASE": node.note}
    row = rows.get(status.short)
    fetched = sum(status.chunk_bytes_by_source.values())
    own = status.chunk_bytes_by_source.get(TRAINER, 0)
    return (_service(row) if row is not None else {}) | {
        "NODE": node.name,
        "ID": status.short,
        "PHASE": status.phase if node.note == "running" else node.note,
        "VER": version(status.version),
        "LAG": str(max(0, newest - status.version)) if status.version >= 0 else NONE,
        "SENT": size(status.bytes_sent),
        "RECV": size(status.bytes_received),
        "CHUNKS": f"{size(fetched)}, {1 - own / fetched:.0%} from peers" if fetched else NONE,
    }


def _peer_cells(row: PeerRow) -> Cells:
    """Describe a node that was started elsewhere, as the trainer knows it; SENT and RECV are the node's."""
    return _service(row) | {
        "NODE": row.role,
        "ID": row.short,
        "PHASE": state_of(row) or ("running" if row.version >= 0 else "joining"),
        "VER": version(row.version),
        "LAG": lag(row),
        "SENT": size(row.bytes_received),
        "RECV": size(row.bytes_sent),
    }


def _service(row: PeerRow) -> dict[str, str]:
    return {
        "PATH": row.path,
        "OK/REJ": f"{row.accepted}/{row.rejected}",
        "TRUST": trust(row.trust, row.trusts),
    }


# -- the summary -----------------------------------------------------------------------------------

CURVE_HEIGHT = 14


def print_summary(run_dir: Path) -> None:
    """Print the summary.json of a run; without one the run was stopped, and the line says how to go on."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        print(f"stopped; go on with --resume: {run_dir}")
        return
    screen = console()
    curve = smooth(points(summary.get("reward_curve")))
    if drawing := terminal_curve(curve, min(screen.width, 100), CURVE_HEIGHT):
        screen.print("\n[bold]Mean reward of a batch, smoothed[/]\n")
        screen.print(drawing, markup=False)
    screen.print()
    screen.print(label_table(summary_lines(summary)))


def _change(figures: Mapping[str, Any], name: str) -> str:
    """Describe a figure before and after training; empty if it was not measured."""
    before, after = figures.get(f"{name}_before"), figures.get(f"{name}_after")
    return "" if before is None or after is None else f"{before:.3f} before, {after:.3f} after"


def summary_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List labels and values of a summary; a key that is missing is a line that is missing."""
    if run := str(summary.get("run") or ""):
        run_id, steps = str(summary.get("run_id") or "")[:10], summary.get("steps", "?")
        yield "run", f"{run}  {run_id}  seed {summary.get('seed', '?')}, {steps} steps"
    evaluated = summary.get("eval_prompts") != 0
    for label, name in (("exact match", "exact_match"), ("reward", "reward")):
        if evaluated and (change := _change(summary, name)):
            yield label, f"{change} (held-out prompts)"
    environments = summary.get("environments") or {}
    for name, one in environments.items() if len(environments) > 1 else ():
        change = _change(one, "reward") if evaluated else ""
        yield f"  {name}", f"{f'reward {change}, ' * bool(change)}{one.get('accepted', 0)} accepted"
    for name, versions in (summary.get("evaluations") or {}).items():
        for one in (versions[0], *versions[1:][-1:]):
            yield f"eval {name}", f"version {one['version']}: {passes(one)}"
    if "accepted" in summary:
        refused = rejected(summary.get("rejected") or {})
        yield "rollouts", f"{summary['accepted']} accepted, {refused}"
    for short, counts in (summary.get("workers") or {}).items():
        accepted, refused = counts.get("accepted", 0), counts.get("rejected", 0)
        yield f"  {short}", f"{accepted} accepted, {refused} rejected"
    if summary.get("stale_fraction") is not None:
        yield "stale", f"{summary['stale_fraction']:.1%} of rollouts"
    if summary.get("mismatch_kl") is not None:
        yield "mismatch KL", f"{summary['mismatch_kl']:.2e} (sampler against trainer, per token)"
    delta, full = summary.get("delta_bytes"), summary.get("full_bytes")
    if delta and full:
        share = f"{delta / full:.0%} of the {size(full)} that full checkpoints would be"
        yield "deltas", f"{size(delta)}, {share}"
    for short, counts in (summary.get("chunk_bytes_by_source") or {}).items():
        if counts:  # a worker that was gone before the trainer was restarted has none
            yield f"  {short}", f"chunks from {sources(counts)}"
    if "seconds" in summary:
        yield "time", seconds(summary["seconds"])
    for key in ("weights", "picture"):
        if summary.get(key):
            yield key, str(summary[key])
