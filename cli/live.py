"""The view of a run while it goes: a live screen in a terminal, one plain line every two seconds in a pipe.

Draws what it is given and asks nobody; a node that has not answered yet is a line that says so.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..node.ops.control import NodeState, PeerRow, Status, View
from .screen import console
from .tables import (
    NONE,
    Column,
    duration,
    gone,
    listing,
    number,
    outcomes,
    policy,
    rewards,
    size,
    sparkline,
    stage,
    state_of,
    status_lines,
    version,
)

LIVE_EVERY_S = 0.5
PLAIN_EVERY_S = 2.0
SAME_EVERY_S = 60.0
"""A line that says nothing new comes so often: the node lives."""
TRAINER = "trainer"


class OpenView(View, AbstractContextManager["OpenView"], Protocol):
    """A view while it is on the screen."""

    @property
    def pace_s(self) -> float:
        """How often it wants news, seconds; infinite for never."""
        ...


def open_view(title: str, every_s: float = PLAIN_EVERY_S) -> OpenView:
    """The view that suits standard output: a screen, or lines, `every_s` seconds one.

    Under a launcher, which has its own, only what is said.
    """
    if sys.stdout.isatty():
        return LiveView(title)
    return PlainView(every_s=math.inf if "PRIMERL_PARENT_PID" in os.environ else every_s)


class PlainView:
    """Lines, for logs and pipes."""

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
        """See OpenView."""
        return self._every_s if math.isinf(self._every_s) else PLAIN_EVERY_S

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """One line, if it is time, and something is new or nothing was for long."""
        line, now = plain_line(nodes), self._clock()
        said, when = self._last
        if now - when > (max(self._every_s, SAME_EVERY_S) if line == said else self._every_s):
            self._last = (line, now)
            self.say(line)

    def say(self, text: str) -> None:
        """One line."""
        print(text, flush=True)


class LiveView:
    """A screen that redraws itself below what was said."""

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
        """See OpenView."""
        return LIVE_EVERY_S

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """Draw these from now on."""
        self._nodes = nodes

    def say(self, text: str) -> None:
        """A line above the screen, whole however long: a ticket must survive copying."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _draw(self) -> Any:
        elapsed = time.monotonic() - self._started
        width, height = self._console.size
        return screen_of(self._title, self._nodes, elapsed, width, height)


def plain_line(nodes: Mapping[str, NodeState]) -> str:
    """The state of a run, or of a node that joined one, in one line."""
    trainer = nodes.get(TRAINER)
    if trainer is None or trainer.status is None:
        own = "; ".join(_own_line(state) for state in nodes.values() if state is not trainer)
        return own if trainer is None and own else f"trainer: {trainer.note if trainer else '-'}"
    status = trainer.status
    parts = [_phase(status)]
    if status.environment:
        parts.append(f"environment: {status.environment}")
    if status.history:
        parts.append(f"step {status.step}/{status.max_steps}")
        parts.append(f"reward {number(status.reward)}, staleness {number(status.staleness)}")
    parts.append(outcomes(status))
    others = [f"{state.name} {_held(state)}" for state in nodes.values() if state is not trainer]
    parts.append(f"version {version(status.version)}" + "".join(f", {other}" for other in others))
    return " | ".join([*parts, _traffic(status), *_waiting(status)])


def _own_line(state: NodeState) -> str:
    status = state.status
    if status is None:
        return f"{state.name}: {state.note}"
    parts = [_phase(status), f"policy {policy(status)}", outcomes(status)]
    if status.engine is not None:
        parts.append(f"{status.engine.tokens_per_s:.0f} tokens/s, {status.leases} leases")
    if status.stage is not None:
        parts.append(f"stage {stage(status.stage)}")
    return " | ".join([*parts, _traffic(status), *_waiting(status)])


def _phase(status: Status) -> str:
    return f"{status.phase}{': ' + status.detail if status.detail else ''}"


def _traffic(status: Status) -> str:
    return f"{size(status.bytes_sent)} sent, {size(status.bytes_received)} received"


def _waiting(status: Status) -> list[str]:
    return [f"waiting: {status.waiting_for}"] if status.waiting_for else []


def _held(state: NodeState) -> str:
    if state.status is None or state.note != "running":
        return state.note
    return f"at {version(state.status.version)}"


def screen_of(
    title: str, nodes: Mapping[str, NodeState], elapsed_s: float, width: int, height: int = 40
) -> Any:
    """The live screen: of a run, or of one node that joined a run."""
    trainer = nodes.get(TRAINER)
    status = trainer.status if trainer else None
    if trainer is None:
        parts = [_own(state) for state in nodes.values()] or [_progress(None, width)]
    else:
        rows = _rows(nodes)
        room = max(LEAST_ROWS, height - OTHER_LINES)
        parts = [_progress(status, width), "", listing(COLUMNS, rows[:room], width - FRAME)]
        if len(rows) > room:
            parts.append(f"and {len(rows) - room} more: `primerl-node peers`")
    head = f"[bold]{escape(title)}[/] {duration(elapsed_s)}"
    return Panel(Group(*parts), title=head, title_align="left", border_style="blue")


def _progress(status: Status | None, width: int) -> Any:
    grid = _grid()
    if status is None:
        grid.add_row("phase", "starting")
        return grid
    grid.add_row("phase", escape(_phase(status)))
    room = max(20, min(80, width - 40))
    if status.environment:
        grid.add_row("environment", escape(status.environment))
    steps = Table.grid(padding=(0, 2, 0, 0))
    total = max(1, status.max_steps)
    bar = ProgressBar(total=total, completed=status.step, width=room)
    steps.add_row(bar, f"step {status.step} of {status.max_steps}")
    grid.add_row("progress", steps)
    curve = sparkline(rewards(status), room)
    grid.add_row("reward", f"[green]{curve}[/]  [bold]{number(status.reward)}[/]")
    grid.add_row("staleness", f"{number(status.staleness)} versions, {status.leases} leases out")
    grid.add_row("rollouts", escape(outcomes(status)))
    grid.add_row("waiting", escape(status.waiting_for or NONE))
    for one in status.warnings:
        grid.add_row("warning", escape(one))
    return grid


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    return grid


OWN_LINES = {"node", "data", "peers", "loop lag"}
"""Of `status`: not what a volunteer looks at all day."""


def _own(state: NodeState) -> Any:
    """What a node's work comes to, and what it waits for."""
    grid = _grid()
    if state.status is None:
        grid.add_row("phase", escape(state.note))
        return grid
    lines = {name: value for name, value in status_lines(state.status) if name not in OWN_LINES}
    first = ("run", "phase", "waiting")  # in their places whether or not there is something to say
    for name in dict.fromkeys((*first, *lines)):
        grid.add_row(name, escape(lines.get(name, NONE)))
    return grid


LEAST_ROWS = 3
OTHER_LINES = 14
"""Of the screen: all but rows of nodes."""
FRAME = 4
"""Columns."""
Cells = Mapping[str, str]


def _column(name: str, importance: int) -> Column[Cells]:
    return Column(name, lambda cells: cells.get(name, NONE), importance, elastic=name == "PHASE")


COLUMNS = (
    _column("NODE", 100),
    _column("ID", 98),
    _column("PHASE", 95),
    _column("PATH", 40),
    _column("VER", 90),
    _column("LAG", 80),
    _column("OK/REJ", 85),
    _column("TRUST", 70),
    _column("SENT", 20),
    _column("RECV", 20),
    _column("CHUNKS", 50),
)


def _rows(nodes: Mapping[str, NodeState]) -> list[Cells]:
    """The nodes that were started here, then others that joined, unless they have been gone for long."""
    trainer = nodes.get(TRAINER)
    status, peers = (trainer.status, trainer.peers) if trainer else (None, [])
    newest = status.version if status else -1
    known = {row.short: row for row in peers}
    ours = {state.status.short for state in nodes.values() if state.status}
    rows = [_node_cells(state, newest, known) for state in nodes.values()]
    if len(ours) < len(nodes):
        return rows  # one of ours has not told its id yet: it would be taken for a stranger
    joined = [
        row for row in peers if row.short not in ours and not gone(row) and not _stranger(row)
    ]
    return rows + [
        _peer_cells(row) for row in sorted(joined, key=lambda row: (row.role, row.short))
    ]


def _stranger(row: PeerRow) -> bool:
    """Whether a node is only connected: nobody admitted it."""
    return row.role == "?" and row.version < 0 and not row.accepted


def _node_cells(state: NodeState, newest: int, rows: Mapping[str, PeerRow]) -> Cells:
    status = state.status
    if status is None:
        return {"NODE": state.name, "PHASE": state.note}
    row = rows.get(status.short)
    return (_service(row) if row is not None else {}) | {
        "NODE": state.name,
        "ID": status.short,
        "PHASE": status.phase if state.note == "running" else state.note,
        "VER": version(status.version),
        "LAG": str(max(0, newest - status.version)) if status.version >= 0 else NONE,
        "SENT": size(status.bytes_sent),
        "RECV": size(status.bytes_received),
        "CHUNKS": _chunks(status),
    }


def _peer_cells(row: PeerRow) -> Cells:
    """Of a node that was started elsewhere, as the trainer knows it: SENT and RECV are as of that node."""
    return _service(row) | {
        "NODE": row.role,
        "ID": row.short,
        "PHASE": state_of(row) or ("running" if row.version >= 0 else "joining"),
        "VER": version(row.version),
        "LAG": str(row.lag) if row.version >= 0 else NONE,
        "SENT": size(row.bytes_received),
        "RECV": size(row.bytes_sent),
    }


def _service(row: PeerRow) -> dict[str, str]:
    return {
        "PATH": row.path,
        "OK/REJ": f"{row.accepted}/{row.rejected}",
        "TRUST": f"{row.trust:.2f}",
    }


def _chunks(status: Status) -> str:
    """How much weight data came, and which part of it from other workers."""
    total = sum(status.chunk_bytes_by_source.values())
    if not total:
        return NONE
    own = status.chunk_bytes_by_source.get(TRAINER, 0)
    return f"{size(total)}, {1 - own / total:.0%} from peers"
