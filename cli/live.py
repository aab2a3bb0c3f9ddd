"""The view of a run: a live screen in a terminal, plain lines in a pipe, and the summary at the end.

Draws the states that it is given and asks no node; a node that has not answered yet gets a line that says so.
"""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel

from ..node.ops.control import NodeState, View
from ..node.ops.figures import PeerRow, Status
from ..node.reports.report import points, smooth, terminal_curve
from ..node.storage.run_files import resume_hint
from .tables import (
    NONE,
    PEER_COLUMNS,
    console,
    duration,
    gone,
    label_table,
    listing,
    number,
    outcomes,
    passes,
    policy,
    rejected,
    seconds,
    size,
    sources,
    stage,
    status_lines,
    traffic,
    version,
)

LIVE_EVERY_S = 1.0
SAME_LIVE_S = 5.0
"""Pause before a screen on which only the time is new: to draw one takes 10 ms."""
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

    def __init__(
        self,
        title: str,
        screen: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._console = screen or console()
        self._clock = clock
        self._started = clock()
        self._nodes: Mapping[str, NodeState] = {}
        self._drawn: tuple[object, float] = (None, 0.0)
        """The state on the screen, and since when."""
        self._live = Live(
            console=self._console, get_renderable=self._draw, auto_refresh=False, transient=True
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
        """Draw these, unless the screen shows the same and is not old."""
        self._nodes, now = nodes, self._clock()
        state = [(name, _still(node.status), node.peers, node.note) for name, node in nodes.items()]
        if state != self._drawn[0] or now - self._drawn[1] >= SAME_LIVE_S:
            self._drawn = state, now
            self._live.refresh()

    def say(self, text: str) -> None:
        """Print a line above the screen, whole however long: a ticket must survive copying."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _draw(self) -> Any:
        elapsed = self._clock() - self._started
        width, height = self._console.size
        return screen_of(self._title, self._nodes, elapsed, width - ECHO, height)


def _still(status: Status | None) -> Status | None:
    """Leave out what changes while nothing happens."""
    if status is None:
        return None
    return msgspec.structs.replace(status, uptime_s=0.0, machine=None)


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
    versions = [f"version {version(status.version)}"]
    for node in nodes.values():
        if node is not trainer:
            running = node.status is not None and node.note == "running"
            where = f"at {version(node.status.version)}" if node.status and running else node.note
            versions.append(f"{node.name} {where}")
    return _joined(*parts, outcomes(status), ", ".join(versions), *_ending(status))


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

OWN_LINES = {"node", "data", "peers", "loop lag", "machine", "page"}
"""Lines of `status` that the screen leaves out."""
LEAST_ROWS = 3
OTHER_LINES = 5
"""Lines of the screen besides those of `status` and the rows of peers."""
FRAME = 4
"""Columns."""
ECHO = 2
"""Columns that are left free for the terminal's ^C, which would move the screen down by a line."""


def screen_of(
    title: str, nodes: Mapping[str, NodeState], elapsed_s: float, width: int, height: int = 40
) -> Panel:
    """Draw the live screen of a run, or of one node that joined a run: its `status`, and the `peers`."""
    trainer = nodes.get(TRAINER)
    if trainer is None:
        parts: list[Any] = [label_table(_lines(node)) for node in nodes.values()]
        parts = parts or [label_table([("phase", "starting")])]
    else:
        lines = _lines(trainer)
        lines += [(node.name, _in_short(node)) for node in nodes.values() if node is not trainer]
        parts = [label_table(lines)]
        room = max(LEAST_ROWS, height - len(lines) - OTHER_LINES)
        rows = sorted(filter(_is_shown, trainer.peers), key=lambda row: (row.role, row.short))
        if rows:
            parts += ["", listing(PEER_COLUMNS, rows[:room], width - FRAME)]
        if len(rows) > room:
            parts.append(f"and {len(rows) - room} more: `primerl-node peers`")
    head = f"[bold]{escape(title)}[/]  {duration(elapsed_s)}"
    return Panel(Group(*parts), title=head, title_align="left", border_style="blue", width=width)


def _lines(node: NodeState) -> list[tuple[str, str]]:
    """List what `status` says; run, phase and waiting keep their places when they are empty."""
    if node.status is None:
        return [("phase", node.note)]
    lines = [pair for pair in status_lines(node.status) if pair[0] not in OWN_LINES]
    first = {name: NONE for name in ("run", "phase", "waiting")} | dict(lines)
    head = [(name, first[name]) for name in ("run", "phase", "waiting")]
    return head + [(name, value) for name, value in lines if (name, value) not in head]


def _in_short(node: NodeState) -> str:
    """Describe another node of this machine; the table of peers has its figures."""
    status = node.status
    if status is None:
        return node.note
    phase = status.phase if node.note == "running" else node.note
    return f"{status.short}  {phase}, version {version(status.version)}"


def _is_shown(row: PeerRow) -> bool:
    """Return whether a peer belongs to the run and is not gone."""
    return not gone(row) and (row.role != "?" or row.version >= 0 or row.accepted > 0)


# -- the summary -----------------------------------------------------------------------------------

CURVE_HEIGHT = 14


def print_summary(run_dir: Path) -> None:
    """Print the summary.json of a run; if there is none the run was stopped: print how to resume it."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        print(resume_hint(run_dir))
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
    """List labels and values of a summary; a missing key costs its line."""
    if run := str(summary.get("run") or ""):
        run_id, steps = str(summary.get("run_id") or "")[:10], summary.get("steps", "?")
        yield "run", f"{run}  {run_id}  seed {summary.get('seed', '?')}, {steps} steps"
    evaluated = summary.get("eval_prompts") != 0
    for label, name in (("exact match", "exact_match"), ("reward", "reward")):
        if evaluated and (change := _change(summary, name)):
            yield label, f"{change} (held-out prompts)"
    environments = summary.get("environments") or {}
    for name, results in environments.items() if len(environments) > 1 else ():
        change = _change(results, "reward") if evaluated else ""
        yield (
            f"  {name}",
            f"{f'reward {change}, ' * bool(change)}{results.get('accepted', 0)} accepted",
        )
    for name, versions in (summary.get("evaluations") or {}).items():
        for evaluation in (versions[0], *versions[1:][-1:]):
            yield f"eval {name}", f"version {evaluation['version']}: {passes(evaluation)}"
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
        if counts:  # a worker that left before the trainer was restarted has none
            yield f"  {short}", f"chunks from {sources(counts)}"
    if "seconds" in summary:
        yield "time", seconds(summary["seconds"])
    for key in ("weights", "picture"):
        if summary.get(key):
            yield key, str(summary[key])
    if weights := summary.get("weights"):  # RUN_DIR/weights/step_N
        run_dir = shlex.quote(str(Path(str(weights)).parents[1]))
        yield "compare", f"primerl-node chat {run_dir}    (base and new weights side by side)"
