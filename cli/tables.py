"""Tables for people: peers and status. Everything here turns rows into rich renderables and asks nobody."""

import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from ..node.ops.control import EngineRow, GroupRow, PeerRow, StageRow, Status
from ..node.ops.errors import UsageError

T = TypeVar("T")

NONE = "-"
MAX_STATE = 48
"""Characters of the reason that a table shows."""
SUSPICIOUS = 0.5
GONE_S = 300.0
"""A peer that has been away for longer comes last in `peers`, and leaves live views."""
UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a listing that adapts to the width there is."""

    name: str
    cell: Callable[[T], str]
    importance: int
    """Those with the highest have the room that there is; a lower one is shown if it still fits."""
    key: Callable[[T], Any] | None = None
    """What `--sort` orders by, the smallest first; without it by the cell's text."""
    right: bool = False
    elastic: bool = False
    """Its text may be cut off, down to ELASTIC characters, before a column is left out."""


GAP = 2
ELASTIC = 20
SPARE = 45
"""Columns of less importance come after the whole text of elastic ones."""


def listing(columns: Sequence[Column[T]], rows: Sequence[T], width: int | None = None) -> Table:
    """A table of as many columns as fit into `width`, the most important ones; all of them without it."""
    cells = {one.name: [one.cell(row) for row in rows] for one in columns}
    whole = {name: max(cell_len(text) for text in [name, *texts]) for name, texts in cells.items()}
    shown, need = (list(columns), whole) if width is None else _fitting(columns, whole, width)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for one in shown:
        justify = "right" if one.right else "left"
        room = need[one.name]
        table.add_column(one.name, justify=justify, no_wrap=True, min_width=room, max_width=room)
    for number in range(len(rows)):
        table.add_row(*(escape(cells[one.name][number]) for one in shown))
    return table


def _fitting(
    columns: Sequence[Column[T]], whole: Mapping[str, int], width: int
) -> tuple[list[Column[T]], dict[str, int]]:
    """The columns that there is room for, and how wide each is."""
    need: dict[str, int] = {}
    for one in sorted(columns, key=lambda one: -one.importance):
        if one.importance < SPARE:  # what is cut off matters more than these
            for other in columns:
                if other.elastic and other.name in need:
                    room = width - sum(need.values()) - GAP * (len(need) - 1)
                    need[other.name] = min(whole[other.name], need[other.name] + room)
        least = min(whole[one.name], ELASTIC) if one.elastic else whole[one.name]
        if not need or sum(need.values()) + GAP * len(need) + least <= width:
            need[one.name] = least
    return [one for one in columns if one.name in need], need


def named(columns: Sequence[Column[T]], name: str) -> Column[T]:
    """The column of a name, in upper or lower case. Raises UsageError where there is none."""
    known = {one.name.lower(): one for one in columns}
    column = known.get(name.lower())
    if column is None:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"columns are {', '.join(known)}"
        raise UsageError(f"--sort: no column is called {name[:40]}: {hint}")
    return column


def peers_table(
    rows: Sequence[PeerRow], *, width: int | None = None, sort: Column[PeerRow] | None = None
) -> Any:
    """`primerl-node peers`: what fits into `width`; nodes that are gone come last."""
    if not rows:
        return "no peers yet"
    ordered = sorted(rows, key=lambda row: (row.role != "trainer", row.role, row.short))
    if sort is not None:
        ordered.sort(key=sort.key or sort.cell)
    return listing(PEER_COLUMNS, sorted(ordered, key=gone), width)


def gone(row: PeerRow) -> bool:
    """Whether a peer has been away for so long that it is not waited for."""
    return row.path == NONE and _last(row.last_seen_s) > GONE_S


def state_of(row: PeerRow) -> str:
    """What an operator should notice of a peer; `explain` has the rest."""
    if row.refused:
        why = row.refused
        return why if len(why) <= MAX_STATE else f"{why[: MAX_STATE - 3]}..."
    if row.left or row.silent_s:
        return f"{'left' if row.left else 'silent'} {duration(row.silent_s)}"
    if row.suspicion >= SUSPICIOUS:
        return f"suspicious, {row.suspicion:.0%} of the way to a ban"
    if row.stage:
        return f"stage {row.stage}"
    return f"{row.audits} audits made" if row.audits else ""


def _outcomes(row: PeerRow) -> str:
    return f"{row.accepted}/{row.rejected}" + (f" ({row.top_reason})" if row.top_reason else "")


def _last(value: float | None) -> float:
    """For sorting: what is not known comes last."""
    return math.inf if value is None else value


PEER_COLUMNS: Sequence[Column[PeerRow]] = (
    Column("PEER", lambda row: row.short, 100),
    Column("ROLE", lambda row: row.role or NONE, 90),
    Column("PATH", lambda row: row.path, 30),
    Column(
        "RTT",
        lambda row: NONE if row.rtt_ms is None else f"{row.rtt_ms:.1f} ms",
        25,
        lambda row: _last(row.rtt_ms),
        right=True,
    ),
    Column("SENT", lambda row: size(row.bytes_sent), 15, lambda row: -row.bytes_sent, right=True),
    Column(
        "RECV",
        lambda row: size(row.bytes_received),
        15,
        lambda row: -row.bytes_received,
        right=True,
    ),
    Column("VER", lambda row: version(row.version), 85, lambda row: -row.version, right=True),
    Column(
        "LAG",
        lambda row: str(row.lag) if row.version >= 0 else NONE,
        60,
        lambda row: -row.lag,
        right=True,
    ),
    Column("LEASES", lambda row: str(row.leases), 40, lambda row: -row.leases, right=True),
    Column("OK/REJECTED", _outcomes, 80, lambda row: -row.accepted),
    Column("AUDITED", lambda row: str(row.audited), 20, lambda row: -row.audited, right=True),
    Column("TRUST", lambda row: f"{row.trust:.2f}", 65, lambda row: row.trust, right=True),
    Column(
        "REL", lambda row: f"{row.reliability:.2f}", 10, lambda row: row.reliability, right=True
    ),
    Column(
        "SEEN",
        lambda row: NONE if row.last_seen_s is None else f"{duration(row.last_seen_s)} ago",
        50,
        lambda row: _last(row.last_seen_s),
        right=True,
    ),
    Column("SOFTWARE", lambda row: row.software or NONE, 5),
    Column("STATE", state_of, 70, lambda row: (not state_of(row), state_of(row)), elastic=True),
)


def status_table(status: Status) -> Any:
    """`primerl-node status`."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in status_lines(status):
        table.add_row(name, escape(value))
    return table


def status_lines(status: Status) -> list[tuple[str, str]]:
    """What there is to say of a node, label and value."""
    node = f"{status.short}  {status.role}, version {status.software}, pid {status.pid}"
    lines = [
        ("node", f"{node}, up {duration(status.uptime_s)}"),
        ("data", status.data_dir),
        ("run", f"{status.run_name or NONE}  {status.run[:10]}".rstrip()),
        ("phase", f"{status.phase}  {status.detail}".rstrip()),
    ]
    if status.waiting_for:
        lines.append(("waiting", status.waiting_for))
    lines.extend(("warning", one) for one in status.warnings)
    if status.role == "trainer":
        lines.append(("step", f"{status.step} of {status.max_steps}"))
        lines.append(("reward", f"{number(status.reward)}  {sparkline(rewards(status), 40)}"))
        lines.append(("staleness", number(status.staleness)))
        lines.extend(("eval", line) for line in _evaluations(status))
        lines.extend(("pipeline", group(row)) for row in status.pipelines)
    lines.append(("policy", policy(status)))
    if status.role == "trainer":
        lines.append(("leases", f"{status.leases} out, {status.waiting_groups} groups waiting"))
    elif status.engine is not None:
        lines.append(("leases", f"{status.leases} held"))
    if status.environment:
        lines.append(("environment", status.environment))
    if status.engine is not None:
        lines.append(("engine", engine(status.engine)))
    if status.stage is not None:
        lines.append(("stage", stage(status.stage)))
    lines.append(("rollouts", outcomes(status)))
    lines.append(
        ("bytes", f"{size(status.bytes_sent)} sent, {size(status.bytes_received)} received")
    )
    if status.chunk_bytes_by_source:
        lines.append(("chunks", sources(status.chunk_bytes_by_source)))
    lines.append(("peers", f"{status.peers}, {status.neighbours} libp2p neighbours"))
    if status.event_loop_lag:
        lines.append(("loop lag", _lag(status.event_loop_lag)))
    if status.seconds:
        lines.append(("time", seconds(status.seconds)))
    return lines


def outcomes(status: Status) -> str:
    """What became of a node's rollouts; of a worker, what that says of it."""
    trust = "" if status.trust is None else f", trust {status.trust:.2f}"
    return f"{status.accepted} accepted, {rejected(status.rejected)}{trust}"


def _evaluations(status: Status) -> list[str]:
    found = [
        f"{name}, version {figures.get('version', 0):.0f}: {passes(figures)}"
        for name, figures in status.evaluations.items()
    ]
    return [*found, f"of version {status.evaluating} runs"] if status.evaluating >= 0 else found


def passes(figures: Mapping[str, float]) -> str:
    """avg@k and pass@j of an evaluation."""
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if "@" in name)


def policy(status: Status) -> str:
    """The version that a node holds, and how far that is behind."""
    if status.newest_version < 0:
        return "none yet"
    behind = status.newest_version - status.version
    lag = "the newest" if behind <= 0 else f"{behind} behind version {status.newest_version}"
    return f"version {version(status.version)}, {lag}"


def _lag(lag: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1000 * late:.1f} ms" for name, late in lag.items())


def engine(row: EngineRow) -> str:
    """How busy an engine is, and what happened to it."""
    said = f"{row.type}: {row.inflight} of {row.cap} in flight, {row.running} running"
    said += f", {row.waiting} waiting" if row.waiting else ""
    said += f", {row.tokens_per_s:.0f} tokens/s" if row.tokens_per_s else ""
    said += f", cache {row.kv_use:.0%}" if row.kv_use else ""
    said += f", restarted {row.restarts} times" if row.restarts else ""
    return f"{said}. Down: {row.fault}" if row.fault else said


def group(row: GroupRow) -> str:
    """A pipeline: its stages with their layers, and what it has room for."""
    stages = ", ".join(
        f"{node} {layers}" for node, layers in zip(row.stages, row.layers, strict=True)
    )
    around = "" if row.round_trip_ms is None else f", {row.round_trip_ms:.0f} ms round"
    said = f"{row.group} {row.state}, generation {row.generation}: {stages}{around}"
    return f"{said}, room for {row.kv_tokens} tokens, {row.spares} spares"


def stage(row: StageRow) -> str:
    """Our own stage: where it is, and how the ring does."""
    said = f"{row.rank} of {row.stages}, layers {row.layers}, {row.state}"
    said += f", {row.in_flight} of {row.lanes} micro-batches under way" if row.lanes else ""
    said += f", {row.rtt_ms:.0f} ms to the next" if row.rtt_ms is not None else ""
    said += f", {row.round_ms:.0f} ms round" if row.round_ms is not None else ""
    said += f", stalled {row.stall_share:.0%}" if row.stall_share is not None else ""
    said += f", broke {row.breaks} times" if row.breaks else ""
    return f"{said}, {size(row.bytes_out)} out, {size(row.bytes_in)} in"


def rewards(status: Status) -> list[float]:
    """Mean rewards so far, oldest first."""
    return [reward for _, reward in status.history]


def size(count: float) -> str:
    """Bytes in decimal units."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def duration(total: float) -> str:
    """Seconds as a person would say them."""
    if total < 60:
        return f"{total:.0f} s"
    minutes, rest = divmod(int(total), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def version(held: int) -> str:
    """A policy version; before the first there is none."""
    return str(held) if held >= 0 else NONE


def number(value: float | None) -> str:
    """Two decimals, or nothing."""
    return NONE if value is None else f"{value:.2f}"


def rejected(reasons: Mapping[str, int]) -> str:
    """Rejected rollouts with their reasons, commonest first."""
    total = sum(reasons.values())
    if not total:
        return "none rejected"
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return f"{total} rejected ({', '.join(f'{name} {count}' for name, count in ordered)})"


def sources(counts: Mapping[str, int]) -> str:
    """Chunk bytes by source with shares, largest first."""
    total = sum(counts.values()) or 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size(count)} ({count / total:.0%})" for name, count in ordered)


def seconds(phases: Mapping[str, float]) -> str:
    """Seconds by phase, longest first."""
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {spent:.1f} s" for name, spent in ordered)


BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as one line of blocks, averaged into at most `width` cells, lowest to highest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    cells = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(cells), max(cells)
    span = high - low or 1.0
    return "".join(BLOCKS[round((cell - low) / span * (len(BLOCKS) - 1))] for cell in cells)
