"""The view of a run while it goes: a live screen in a terminal, one plain line every two seconds in a pipe.

Draws what it is given and asks nobody; a node that has not answered yet is a line that says so.
"""

import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..node.control import PeerRow, Status
from ..node.watch import NodeState, View
from .screen import console
from .tables import (
    duration,
    number,
    rejected,
    rewards,
    size,
    sparkline,
    version,
)

PLAIN_EVERY_S = 2.0
TRAINER = "trainer"


class OpenView(View, AbstractContextManager["OpenView"], Protocol):
    """A view while it is on the screen."""


def open_view(title: str) -> OpenView:
    """The view that suits standard output; under a launcher, which has its own, only what is said."""
    if sys.stdout.isatty():
        return LiveView(title)
    return PlainView(every_s=math.inf if "PRIMERL_PARENT_PID" in os.environ else PLAIN_EVERY_S)


class PlainView:
    """Lines, for logs and pipes."""

    def __init__(self, every_s: float = PLAIN_EVERY_S) -> None:
        self._every_s = every_s
        self._last = ("", -math.inf)

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """One line, if it is time and something is new."""
        line, now = plain_line(nodes), time.monotonic()
        said, when = self._last
        if line != said and now - when > self._every_s:
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

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """Draw these from now on."""
        self._nodes = nodes

    def say(self, text: str) -> None:
        """A line above the screen, whole however long: a ticket must survive copying."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _draw(self) -> Any:
        elapsed = time.monotonic() - self._started
        return screen_of(self._title, self._nodes, elapsed, self._console.width)


def plain_line(nodes: Mapping[str, NodeState]) -> str:
    """The state of a run in one line."""
    trainer = nodes.get(TRAINER)
    if trainer is None or trainer.status is None:
        return f"trainer: {trainer.note if trainer else 'not started'}"
    status = trainer.status
    parts = [f"{status.phase}{': ' + status.detail if status.detail else ''}"]
    if status.history:
        parts.append(f"step {status.step}/{status.max_steps}")
        parts.append(f"reward {number(status.reward)}, staleness {number(status.staleness)}")
    parts.append(f"{status.accepted} accepted, {rejected(status.rejected)}")
    others = [f"{state.name} {_held(state)}" for state in nodes.values() if state is not trainer]
    parts.append(f"version {version(status.version)}" + "".join(f", {other}" for other in others))
    parts.append(f"{size(status.bytes_sent)} sent, {size(status.bytes_received)} received")
    return " | ".join(parts)


def _held(state: NodeState) -> str:
    if state.status is None or state.note != "running":
        return state.note
    return f"at {version(state.status.version)}"


def screen_of(title: str, nodes: Mapping[str, NodeState], elapsed_s: float, width: int) -> Any:
    """The live screen."""
    trainer = nodes.get(TRAINER)
    status = trainer.status if trainer else None
    parts: list[Any] = [_progress(status, width), ""]
    parts.append(_nodes_table(nodes, status, width))
    outsiders = _outsiders(nodes, trainer.peers if trainer else [])
    if outsiders:
        parts.extend(["", f"joined from elsewhere: {', '.join(outsiders)}"])
    head = f"[bold]{escape(title)}[/] {duration(elapsed_s)}"
    return Panel(Group(*parts), title=head, title_align="left", border_style="blue")


def _progress(status: Status | None, width: int) -> Any:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    if status is None:
        grid.add_row("phase", "starting")
        return grid
    room = max(20, min(80, width - 40))
    grid.add_row("phase", escape(f"{status.phase}  {status.detail}".rstrip()))
    steps = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=max(1, status.max_steps), completed=status.step, width=room)
    steps.add_row(bar, f"step {status.step} of {status.max_steps}")
    grid.add_row("progress", steps)
    curve = sparkline(rewards(status), room)
    grid.add_row("reward", f"[green]{curve}[/]  [bold]{number(status.reward)}[/]")
    grid.add_row("staleness", f"{number(status.staleness)} versions, {status.leases} leases out")
    grid.add_row("rollouts", escape(f"{status.accepted} accepted, {rejected(status.rejected)}"))
    return grid


COLUMNS = ("NODE", "ID", "PHASE", "PATH", "VER", "LAG", "OK/REJ", "SENT", "RECV", "CHUNKS")
WIDE_ONLY = ("ID", "PATH", "SENT", "RECV")
"""Left out where a terminal has less than WIDE columns."""
WIDE = 100


def _nodes_table(nodes: Mapping[str, NodeState], trainer: Status | None, width: int) -> Table:
    shown = [name for name in COLUMNS if width >= WIDE or name not in WIDE_ONLY]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in shown:
        table.add_column(name, no_wrap=True)
    newest = trainer.version if trainer else -1
    rows = {row.short: row for row in nodes[TRAINER].peers} if TRAINER in nodes else {}
    for state in nodes.values():
        cells = _node_cells(state, newest, rows)
        table.add_row(*(escape(cells.get(name, "-")) for name in shown))
    return table


def _node_cells(state: NodeState, newest: int, rows: Mapping[str, PeerRow]) -> dict[str, str]:
    status = state.status
    if status is None:
        return {"NODE": state.name, "PHASE": state.note}
    cells = {
        "NODE": state.name,
        "ID": status.short,
        "PHASE": status.phase if state.note == "running" else state.note,
        "VER": version(status.version),
        "LAG": str(max(0, newest - status.version)) if status.version >= 0 else "-",
        "SENT": size(status.bytes_sent),
        "RECV": size(status.bytes_received),
        "CHUNKS": _chunks(status),
    }
    row = rows.get(status.short)
    if row is not None:
        cells |= {"PATH": row.path, "OK/REJ": f"{row.accepted}/{row.rejected}"}
    return cells


def _chunks(status: Status) -> str:
    """How much weight data came, and which part of it from other workers."""
    total = sum(status.chunk_bytes_by_source.values())
    if not total:
        return "-"
    own = status.chunk_bytes_by_source.get(TRAINER, 0)
    return f"{size(total)}, {1 - own / total:.0%} from peers"


def _outsiders(nodes: Mapping[str, NodeState], peers: list[PeerRow]) -> list[str]:
    ours = {state.status.short for state in nodes.values() if state.status}
    started = len(ours) == len(nodes)  # else one of ours may not have told its name yet
    return [f"{row.short} ({row.role})" for row in peers if started and row.short not in ours]
