"""The screen of `primerl-node top`: the nodes of this machine, the peers of one of them, and one peer.

It shows the figures of the nodes and changes nothing. Strings of peers hold no markup or control characters.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from ..node.errors import NodeError, printable
from ..node.ops.control import NodeState, ask, refresh
from ..node.ops.figures import PeerRow
from .tables import (
    NONE,
    PEER_COLUMNS,
    Column,
    duration,
    fitting,
    gone,
    label_table,
    plain_table,
    size,
    state_of,
    status_lines,
    version,
)

EVERY_S = 1.0
MAX_ROWS = 200
"""Peers that are drawn: a filter finds the others."""
FRAME = 4
"""Columns of the scroll bar, and of the space at both ends of a row."""
SHOWN = (
    "run",
    "waiting",
    "limits",
    "warning",
    "step",
    "reward",
    "rollouts",
    "environment",
    "engine",
    "machine",
)
"""Lines of `status` above the peers."""
MAX_LINES = 9

List = Callable[[], Sequence[NodeState]]


class PeerScreen(Screen[None]):
    """All that is known of one peer, and the newest verdicts on its work."""

    BINDINGS: ClassVar = [Binding("escape,q,backspace", "app.pop_screen", "back")]

    def __init__(self, node: NodeState, row: PeerRow) -> None:
        super().__init__()
        self._node = node
        self._row = row

    def compose(self) -> ComposeResult:
        """Make its parts."""
        with VerticalScroll():
            yield Static(label_table(peer_lines(self._row)))
            yield Static("verdicts: reading them", id="verdicts")
        yield Footer()

    async def on_mount(self) -> None:
        """Read the verdicts."""
        try:
            lines = await asyncio.to_thread(ask, self._node.data_dir, "verdicts", peer=self._row.id)
        except NodeError as error:
            self.query_one("#verdicts", Static).update(Text(f"no verdicts: {error}"))
            return
        self.query_one("#verdicts", Static).update(_verdicts(lines))


def peer_lines(row: PeerRow) -> list[tuple[str, str]]:
    """List what is known of a peer, as labels and values."""
    reasons = sorted(row.reasons.items(), key=lambda item: -item[1])
    trusts = (f"{name} {value:.2f}" for name, value in row.trusts.items())
    lines = [
        ("id", row.id),
        ("role", row.role),
        ("state", state_of(row)),
        *(
            (column.name.lower(), column.cell(row))
            for column in PEER_COLUMNS
            if column.name not in ("PEER", "ROLE", "TRUST", "STATE")
        ),
        ("rejected for", ", ".join(f"{name} {count}" for name, count in reasons)),
        ("trust", f"{', '.join(trusts) or NONE}, at least {row.trust_low:.2f}"),
        ("numerics", row.numerics),
        ("weights from", ", ".join(f"{n} {size(count)}" for n, count in row.chunk_bytes.items())),
    ]
    return [(name, printable(value, None)) for name, value in lines if value and value != NONE]


def _verdicts(lines: Sequence[dict[str, Any]]) -> Group:
    names = ("LEASE", "ACCEPTED", "REJECTED", "AUDITED", "REASON")
    table = plain_table(*names, right=names[:-1])
    for line in lines:
        figures = (str(line[name.lower()]) for name in names[:-1])
        table.add_row(*figures, Text(str(line["fault"] or line["reason"] or "clean")))
    head = "\nverdicts, newest first" if lines else "\nno verdicts yet"
    return Group(Text(head, style="bold"), table if lines else "")


class TopScreen(App[None]):
    """`primerl-node top`."""

    TITLE = "primerl-node top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; }
    #peers { height: 1fr; }
    #filter { display: none; }
    #filter.open { display: block; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort by the next column"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("n", "next_node", "next node"),
        Binding("escape", "all", "all", show=False),
    ]

    def __init__(self, nodes: List, every_s: float = EVERY_S) -> None:
        """`nodes` lists the nodes to show, each time anew."""
        super().__init__()
        self._list = nodes
        self._every_s = every_s
        self._shown: list[NodeState] = []
        self._place = 0
        self._sort = ""
        """Name of a column; empty: as `peers` does."""
        self._reversed = False
        self._words = ""
        self._looking = False

    def compose(self) -> ComposeResult:
        """Make its parts."""
        yield Static(id="head")
        yield DataTable[Text](id="peers", cursor_type="row")
        yield Input(id="filter", placeholder="name, role, state or reason; escape shows all")
        yield Footer()

    async def on_mount(self) -> None:
        """Begin to look."""
        self.query_one("#peers").focus()
        self.set_interval(self._every_s, self.look)
        await self.look()

    async def look(self) -> None:
        """Ask the nodes and draw their figures; left out while an earlier look still waits."""
        if self._looking:
            return
        self._looking = True
        try:
            known = {node.data_dir: node for node in self._shown}
            listed = await asyncio.to_thread(self._list)
            self._shown = [known.get(node.data_dir, node) for node in listed]
            await asyncio.gather(*map(refresh, self._shown))
        finally:
            self._looking = False
        self.draw()

    @property
    def node(self) -> NodeState | None:
        """The node whose peers are shown."""
        return self._shown[self._place % len(self._shown)] if self._shown else None

    # -- drawing -----------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the figures of the last look."""
        if len(self.screen_stack) > 1:
            return
        self.query_one("#head", Static).update(self._head())
        table = self.query_one("#peers", DataTable)
        columns, rows = self._rows()
        at, top = table.cursor_row, table.scroll_y
        # a mark needs room beside the name
        heads = [
            (head := f"{column.name}{self._mark(column)}", max(width, len(head)))
            for column, width in columns
        ]
        if [(str(column.label), column.width) for column in table.ordered_columns] != heads:
            table.clear(columns=True)
            for name, width in heads:
                table.add_column(name, width=width)
        else:
            table.clear()
        for row in rows:
            cells = (
                Text(
                    printable(column.cell(row), None),
                    justify="right" if column.right else "left",
                    no_wrap=True,
                    overflow="ellipsis",
                )
                for column, _ in columns
            )
            table.add_row(*cells, key=row.id)
        table.move_cursor(row=min(at, max(0, len(rows) - 1)), animate=False, scroll=False)
        table.scroll_to(y=top, animate=False)

    def _mark(self, column: Column[PeerRow]) -> str:
        return (" ^" if self._reversed else " v") if column.name == self._sort else ""

    def _head(self) -> Group:
        table = plain_table(
            "", "NODE", "ROLE", "PHASE", "STEP", "VER", "CORES", "MEMORY", "GPU", "UP", fold="PHASE"
        )
        for node in self._shown:
            status, chosen = node.status, ">" if node is self.node else ""
            if status is None:
                table.add_row(chosen, Text(printable(node.name)), "", node.note)
                continue
            machine = status.machine
            table.add_row(
                chosen,
                status.short,
                status.role,
                Text(printable(status.phase)),
                f"{status.step}/{status.max_steps}" if status.max_steps else NONE,
                version(status.version),
                f"{machine.cpu_cores:.2f}" if machine else NONE,
                size(machine.memory_bytes) if machine else NONE,
                NONE if not machine or machine.gpu_busy is None else f"{machine.gpu_busy:.0%}",
                duration(status.uptime_s),
            )
        parts: list[Any] = [table]
        if self.node is not None and self.node.status is not None:
            lines = [line for line in status_lines(self.node.status) if line[0] in SHOWN]
            parts.append(
                label_table((name, printable(text, None)) for name, text in lines[:MAX_LINES])
            )
        elif not self._shown:
            parts = [Text("no node runs on this machine")]
        shown = f"{len(self._found())} of {len(self.node.peers)} peers" if self.node else ""
        return Group(
            *parts, Text(f"\n{shown}{f' with {self._words!r}' * bool(self._words)}", style="bold")
        )

    def _found(self) -> list[PeerRow]:
        """Return the peers that the filter finds."""
        words = self._words.lower()
        rows = self.node.peers if self.node else []
        return [row for row in rows if words in _text(row)] if words else list(rows)

    def _rows(self) -> tuple[list[tuple[Column[PeerRow], int]], list[PeerRow]]:
        """Return the columns that fit, and the peers in their order."""
        rows = sorted(self._found(), key=lambda row: (gone(row), row.role != "trainer", row.short))
        column = next((column for column in PEER_COLUMNS if column.name == self._sort), None)
        if column is not None:
            rows.sort(key=column.key or column.cell, reverse=self._reversed)
        rows = rows[:MAX_ROWS]
        return fitting(PEER_COLUMNS, rows, self.size.width - FRAME), rows

    # -- keys --------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        """Sort by the next column that is shown, after the last as `peers` does."""
        names = ["", *(column.name for column, _ in self._rows()[0])]
        at = names.index(self._sort) if self._sort in names else 0
        self._sort, self._reversed = names[(at + 1) % len(names)], False
        self.draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._reversed = not self._reversed and bool(self._sort)
        self.draw()

    def action_next_node(self) -> None:
        """Show the peers of the next node of this machine."""
        self._place += 1
        self.draw()

    def action_filter(self) -> None:
        """Open the filter."""
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_all(self) -> None:
        """Close the filter, and show all peers."""
        self.query_one("#filter", Input).value = ""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").remove_class("open")
        self.query_one("#peers").focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._words = event.value
        self.draw()

    def on_input_submitted(self) -> None:
        """Keep the filter, and go back to the peers."""
        self._close_filter()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show one peer."""
        node = self.node
        row = (
            next((row for row in node.peers if row.id == event.row_key.value), None)
            if node
            else None
        )
        if node is not None and row is not None:
            self.push_screen(PeerScreen(node, row))


def _text(row: PeerRow) -> str:
    words = (row.id, row.short, row.role, row.path, state_of(row), row.software, *row.reasons)
    return " ".join(words).lower()
