"""Tables and figures for people: draw what commands and views pass in, at the width that there is."""

import difflib
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TextIO, TypeVar, cast

import rich.table
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..node.errors import UsageError
from ..node.ops.control import ask
from ..node.ops.figures import (
    BanRow,
    BoundsRow,
    EngineRow,
    EnvironmentRow,
    GroupRow,
    LimitsRow,
    MachineRow,
    PeerRow,
    StageRow,
    Status,
)
from ..node.ops.strict_json import to_json
from ..protocol.numerics import ENVELOPE

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

PIPE_WIDTH = 200
UNBOUNDED = 2000
"""Columns of a console on which a terminal may break lines, but nothing is left out."""
REFRESH_S = 1.0
CLEAR = "\x1b[2J\x1b[H"
"""Empties a terminal."""
SCHEMA = 1
"""Version of the JSON of `status` and `peers`; a higher number where the meaning of keys changed."""
NONE = "-"
MAX_STATE = 48
"""Characters of the reason that a table shows."""
SUSPICIOUS = 0.5
WITHOUT_WORK = ("trainer", "server", "standby", "learner")
"""Roles of nodes that send in nothing to be judged."""
GONE_S = 300.0
"""A peer that has been away for longer comes last in `peers`, and leaves live views."""
UNITS = ("B", "kB", "MB", "GB", "TB")
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class _Trimmed:
    """Standard output in a pipe: without the blanks that fill a table up at the right."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Write text of whole lines."""
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        """Flush."""
        sys.stdout.flush()


def console(*, wide: bool = False) -> Console:
    """Open standard output: a terminal at its width, a pipe at COLUMNS or a width that cuts nothing off."""
    width = UNBOUNDED if wide else None if _has_width() else PIPE_WIDTH
    file = None if sys.stdout.isatty() else cast(TextIO, _Trimmed())
    return Console(file=file, width=width, highlight=False)


def _has_width() -> bool:
    """Say whether standard output is so many columns wide: a terminal, or a pipe where COLUMNS is set."""
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()


def write(renderable: Any) -> None:
    """Print once."""
    console().print(renderable)


def _print(renderable: Any, *, wide: bool) -> None:
    """Print an answer; the lines of a listing as they are: rich takes 0.1 ms for each."""
    if isinstance(renderable, Text) and not sys.stdout.isatty():
        print(renderable.plain)
    elif isinstance(renderable, Text):
        console(wide=wide).print(renderable, crop=False, no_wrap=True, overflow="ignore")
    else:
        console(wide=wide).print(renderable, crop=False)


def plain_table(*names: str, right: Iterable[str] = (), fold: str = "") -> Table:
    """Make a table without a frame; columns in `right` are aligned to the right, `fold` takes several lines."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=name != fold)
    return table


def label_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Make a table of labels and values; values are folded, and hold no markup."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


BAR = 20
COUNTS = 9
"""Columns of a bar, and of counts like 1000/2000, which keep their place beside long figures."""


class ProgressView:
    """Show progress as a bar in a terminal, as a line now and then in a pipe."""

    def __init__(self, title: str, every_s: float, stream: TextIO) -> None:
        self._title = title
        self._every_s = every_s
        self._stream = stream
        self._printed = 0.0
        self._stack = ExitStack()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            title, figures = (
                TextColumn(text, markup=False)
                for text in ("{task.description}", "{task.fields[figures]}")
            )
            whole = rich.table.Column(no_wrap=True, min_width=COUNTS)
            counts = MofNCompleteColumn(table_column=whole)
            columns = (title, BarColumn(BAR), counts, figures, TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.add_task(self._title, total=None, figures="starting")
            self._stack.enter_context(self._bar)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def update(self, title: str, done: int, total: int, figures: str) -> None:
        """Show `done` of `total`; a pipe gets a line every `every_s` seconds, and the last one."""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, description=title, completed=done, total=total, figures=figures)
            return
        now = time.monotonic()
        if done == total or now - self._printed > self._every_s:
            self._printed = now
            print(f"{title} {done}/{total} | {figures}", file=self._stream, flush=True)


# -- listings that adapt to the width --------------------------------------------------------------


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a listing that adapts to the width."""

    name: str
    cell: Callable[[T], str]
    importance: int
    """Columns are given room from the highest down; a lower one is shown if it still fits."""
    key: Callable[[T], Any] | None = None
    """Sort key for `--sort`, the smallest first; None sorts by the cell's text."""
    right: bool = False
    elastic: bool = False
    """Whether its text may be cut off, down to ELASTIC characters, before a column is left out."""


GAP = 2
ELASTIC = 20
BLANKS = dict.fromkeys(map(ord, "\t\r\n"), " ")
SPARE = 45
"""Columns of less importance come after the whole text of elastic ones."""


def listing(
    columns: Sequence[Column[T]], rows: Sequence[T], width: int | None = None, *, dim: int = 0
) -> Text:
    """Make lines of the most important columns that fit into `width`; of all of them for None.

    The last `dim` lines are dim. A Table of rich's takes 1 to 3 ms a row, which a thousand peers have.
    """
    cells = {column.name: [column.cell(row) for row in rows] for column in columns}
    whole = {
        name: max(_cells(text) for text in [*name.splitlines(), *texts])
        for name, texts in cells.items()
    }
    room = whole if width is None else _fitting(columns, whole, width)
    shown = [column for column in columns if column.name in room]

    def lines(texts: Iterable[Sequence[str]]) -> str:
        return "".join(
            (" " * GAP)
            .join(
                _padded(text, room[column.name], right=column.right)
                for column, text in zip(shown, line, strict=True)
            )
            .rstrip()
            + "\n"
            for line in texts
        )

    heads = itertools.zip_longest(*(column.name.split("\n") for column in shown), fillvalue="")
    body = list(zip(*(cells[column.name] for column in shown), strict=True))
    bright = len(body) - dim
    text = Text.assemble(
        (lines(heads), "bold"),
        lines(body[:bright]),
        (lines(body[bright:]), "dim"),
        no_wrap=True,
        overflow="crop",
    )
    text.right_crop(1)
    return text


def _padded(text: str, size: int, *, right: bool) -> str:
    """Cut a text to `size` cells, or fill it up with blanks."""
    if not text.isprintable():
        text = text.translate(BLANKS)
    cells = _cells(text)
    if cells > size:
        text, cells = set_cell_size(text, size - 1) + "\u2026", size
    blanks = " " * (size - cells)
    return blanks + text if right else text + blanks


def _cells(text: str) -> int:
    """Return the width of a text in a terminal."""
    return len(text) if text.isascii() and text.isprintable() else cell_len(text)


def fitted(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[str] = (),
    elastic: Iterable[str] = (),
    drop: Sequence[str] = (),
    dim: int = 0,
) -> Text:
    """Make a table at the width of standard output: where that is small, without the first columns of `drop`.

    Texts of `elastic` columns are cut off before a column is left out. The last `dim` rows are dim.
    """
    columns = [
        Column[Sequence[str]](
            name,
            itemgetter(at),
            drop.index(name) if name in drop else 100 - at,
            right=name in right,
            elastic=name in elastic,
        )
        for at, name in enumerate(names)
    ]
    return listing(columns, rows, console().width, dim=dim)


def fitting(
    columns: Sequence[Column[T]], rows: Sequence[T], width: int
) -> list[tuple[Column[T], int]]:
    """Choose the most important columns that fit into `width`, and the width of each."""
    whole = {
        column.name: max(cell_len(text) for text in [column.name, *map(column.cell, rows)])
        for column in columns
    }
    room = _fitting(columns, whole, width)
    return [(column, room[column.name]) for column in columns if column.name in room]


def _fitting(columns: Sequence[Column[T]], whole: Mapping[str, int], width: int) -> dict[str, int]:
    """Choose the columns that fit, and the width of each."""
    room: dict[str, int] = {}

    def stretch() -> None:
        for other in columns:
            if other.elastic and other.name in room:
                left = width - sum(room.values()) - GAP * (len(room) - 1)
                room[other.name] = min(whole[other.name], room[other.name] + left)

    for column in sorted(columns, key=lambda column: -column.importance):
        if column.importance < SPARE:
            stretch()
        least = min(whole[column.name], ELASTIC) if column.elastic else whole[column.name]
        if not room or sum(room.values()) + GAP * len(room) + least <= width:
            room[column.name] = least
    stretch()
    return room


def show_answer(
    node: Path,
    command: str,
    draw: Callable[[Any, int | None], Any],
    *,
    as_json: bool,
    watch: bool,
    wide: bool = False,
) -> None:
    """Print a node's answer to a command, once or (`watch`) until ctrl-C or the node's end.

    `draw` makes a renderable of the answer, for a number of columns or without a limit (None). As JSON it is
    one object with the run and the Unix time: in several lines or, when watched, in one line each time.
    """
    terminal = sys.stdout.isatty()
    wide = wide or not _has_width()

    def render() -> Any:
        return draw(ask(node, command), None if wide else console().width)

    if watch and terminal and not wide and not as_json:
        from rich.live import Live

        with Live(render(), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_S)
                live.update(render(), refresh=True)
    while True:
        if as_json:
            answer = ask(node, command)
            run = (answer if command == "status" else ask(node, "status"))["run"]
            report = {"schema": SCHEMA, "run": run, "time": round(time.time(), 3), command: answer}
            print(to_json(report, indent=None if watch else 2), flush=True)
        else:
            table = render()
            if watch:
                print(CLEAR if terminal else f"{datetime.now():%Y-%m-%d %H:%M:%S}")
            _print(table, wide=wide)
            sys.stdout.flush()
        if not watch:
            return
        time.sleep(REFRESH_S)


# -- peers -----------------------------------------------------------------------------------------


def peers_table(rows: Sequence[PeerRow], *, width: int | None = None, sort: str = "") -> Text | str:
    """Draw `primerl-node peers`, sorted by a column if named; peers that are gone come last.

    Raises UsageError for an unknown column.
    """
    column = _named(sort) if sort else None
    rows = [row for row in rows if not _passed_by(row)]
    if not rows:
        return "no peers yet"
    ordered = sorted(rows, key=lambda row: (row.role != "trainer", row.role, row.short))
    if column is not None:
        ordered.sort(key=column.key or column.cell)
    return listing(PEER_COLUMNS, sorted(ordered, key=gone), width)


def _named(name: str) -> Column[PeerRow]:
    known = {column.name.lower(): column for column in PEER_COLUMNS}
    if (column := known.get(name.lower())) is not None:
        return column
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"columns are {', '.join(known)}"
    raise UsageError(f"--sort: no column is called {name[:40]}: {hint}")


def gone(row: PeerRow) -> bool:
    """Return whether a peer has been away for so long that it is not waited for."""
    return row.path == NONE and _known(row.last_seen_s) > GONE_S


def _passed_by(row: PeerRow) -> bool:
    """Return whether a node only asked something and is gone, as `doctor --ticket` and `retire` do."""
    known = row.role != "?" or row.ticket or row.refused or row.second or row.accepted
    return row.path == NONE and not known


def state_of(row: PeerRow) -> str:
    """Describe a peer's state that an operator should notice; `explain` has the rest."""
    if row.refused:
        why = row.refused
        return why if len(why) <= MAX_STATE else f"{why[: MAX_STATE - 3]}..."
    if row.second:
        return row.second
    if row.left or row.silent_s:
        return f"{'left' if row.left else 'silent'} {duration(row.silent_s)}"
    if row.paused:
        return f"paused: {row.paused}"
    if row.suspicion >= SUSPICIOUS:
        return f"suspicious, {row.suspicion:.0%} of the way to a ban"
    if row.stage:
        return f"stage {row.stage}"
    if row.starting:
        return "starting its engine, or fetching its first policy"
    return f"{row.audits} audits made" if row.audits else ""


def _known(value: float | None) -> float:
    """Return a sort key that puts unknown values last."""
    return math.inf if value is None else value


def _figure(
    name: str, field: str, importance: int, text: Callable[[Any], str] = str, *, least: bool = False
) -> Column[PeerRow]:
    """Make a numeric column; sorted by it the largest comes first, or with `least` the smallest."""

    def cell(row: PeerRow) -> str:
        value = getattr(row, field)
        return NONE if value is None else text(value)

    def key(row: PeerRow) -> float:
        return _known(getattr(row, field)) if least else -getattr(row, field)

    return Column(name, cell, importance, key, right=True)


PEER_COLUMNS: Sequence[Column[PeerRow]] = (
    Column("PEER", lambda row: f"{row.short} {row.name}".rstrip(), 100),
    Column("ROLE", lambda row: row.role or NONE, 90),
    Column("PATH", lambda row: row.path, 30),
    _figure("RTT", "rtt_ms", 25, lambda ms: f"{ms:.1f} ms", least=True),
    _figure("SENT", "bytes_sent", 15, lambda count: size(count)),
    _figure("RECV", "bytes_received", 15, lambda count: size(count)),
    _figure("VER", "version", 85, lambda value: version(value)),
    Column("LAG", lambda row: lag(row), 60, lambda row: -row.lag, right=True),
    _figure("LEASES", "leases", 40),
    Column(
        "OK/REJECTED",
        lambda row: (
            NONE
            if row.role in WITHOUT_WORK
            else f"{row.accepted}/{row.rejected}" + f" ({row.top_reason})" * bool(row.top_reason)
        ),
        80,
        lambda row: -row.accepted,
    ),
    _figure("AUDITED", "audited", 20),
    Column(
        "TRUST",
        lambda row: NONE if row.role in WITHOUT_WORK else trust(row.trust, row.trusts),
        65,
        lambda row: row.trust,
        right=True,
        elastic=True,
    ),
    _figure("REL", "reliability", 10, lambda share: f"{share:.2f}", least=True),
    _figure("SEEN", "last_seen_s", 50, lambda ago: f"{duration(ago)} ago", least=True),
    Column("TICKET", lambda row: row.ticket or NONE, 8),
    Column("SOFTWARE", lambda row: row.software or NONE, 5),
    Column("STATE", state_of, 70, lambda row: (not state_of(row), state_of(row)), elastic=True),
)


def bans_table(rows: Sequence[BanRow]) -> Table | str:
    """Draw `primerl-node bans`."""
    if not rows:
        return "nobody is banned"
    table = plain_table(*"NODE SINCE UNTIL TICKET OK/REJECTED WHY".split(), fold="WHY")
    for row in rows:
        since = local_time(row.since) if row.since else NONE
        until = local_time(row.until) if row.until else "pardoned"
        work = f"{row.accepted}/{row.rejected}"
        table.add_row(row.short, since, until, escape(row.ticket) or NONE, work, escape(row.why))
    return table


# -- status ----------------------------------------------------------------------------------------


def status_lines(status: Status) -> list[tuple[str, str]]:
    """List what `primerl-node status` says about a node, as labels and values."""
    node = f"{status.short}  {status.role}, version {status.software}, pid {status.pid}"
    lines = [
        ("node", f"{node}, up {duration(status.uptime_s)}"),
        ("data", status.data_dir),
        ("run", f"{status.run_name or NONE}  {status.run[:10]}".rstrip()),
        ("phase", f"{status.phase}  {status.detail}".rstrip()),
        ("waiting", status.waiting_for),
        *(("warning", warning) for warning in status.warnings),
    ]
    if status.role == "trainer":
        curve = sparkline([reward for _, reward in status.history], 40)
        left = "" if status.eta_s is None else f", {duration(status.eta_s)} left"
        lines.append(("step", f"{status.step} of {status.max_steps}{left}"))
        lines.append(("reward", f"{number(status.reward)}  {curve}"))
        lines.append(("staleness", f"{number(status.staleness)} versions, mean of the batch"))
        lines += [(f"  {row.name}", environment(row)) for row in status.environments]
        for name, figures in status.evaluations.items():
            shown = f"{name}, version {figures.get('version', 0):.0f}: {passes(figures)}"
            lines.append(("eval", shown))
        lines.append(("eval", f"of version {status.evaluating} runs" * (status.evaluating >= 0)))
        lines += [("pipeline", group(row)) for row in status.pipelines]
    lines += [("bounds", bounds(row)) for row in status.bounds]
    lines.append(("policy", policy(status)))
    if status.role in ("trainer", "judge"):
        what = "groups" if status.role == "trainer" else "prompts"
        lines.append(("leases", f"{status.leases} out, {status.waiting_groups} {what} waiting"))
    elif status.engine is not None:
        lines.append(("leases", f"{status.leases} held"))
    late = (f"{name} {1000 * late:.1f} ms" for name, late in status.event_loop_lag.items())
    lines += [
        ("environment", status.environment),
        ("engine", engine(status.engine) if status.engine else ""),
        ("stage", stage(status.stage) if status.stage else ""),
        ("rollouts", outcomes(status)),
        ("bytes", traffic(status)),
        ("limits", limits(status.limits) if status.limits else ""),
        ("chunks", sources(status.chunk_bytes_by_source)),
        ("peers", f"{status.peers}, {status.neighbours} libp2p neighbours"),
        ("machine", machine(status.machine) if status.machine else ""),
        ("page", f"{status.page}, see `primerl-node dashboard`" * bool(status.page)),
        ("loop lag", ", ".join(late)),
        ("time", seconds(status.seconds)),
    ]
    return [(name, value) for name, value in lines if value]


def environment(row: EnvironmentRow) -> str:
    """Describe how a trained environment is doing, and how many workers can play it."""
    workers = f"{row.workers} worker{'s' if row.workers != 1 else ''}"
    judged = f"{row.accepted} accepted, {row.rejected or 'none'} rejected"
    return f"reward {number(row.reward)}, {judged}, {row.share:.0%} of the groups, {workers}"


def bounds(row: BoundsRow) -> str:
    """Describe the bounds of noise that judge a class of workers."""
    workers = f"; {row.workers} worker{'s' if row.workers != 1 else ''}" * bool(row.workers)
    read = row.numerics == str(ENVELOPE)
    what = "readings in float32" if read else "rollouts of references"
    if not row.number:
        gathered = f", {row.gathered} {what} are in" * bool(row.gathered)
        return f"{row.numerics}: provisional{gathered}{workers}"
    versions = f"of versions {row.first_version} to {row.last_version}"
    at_most = f"at most {row.rejected_at_most:.2%} of honest ones rejected"
    what = what.removesuffix(" of references")
    return f"{row.numerics}: {row.rollouts} {what} {versions}, {at_most}{workers}"


def outcomes(status: Status) -> str:
    """Count accepted and rejected rollouts, with the trust that a worker has for them."""
    judged = f"{status.accepted} accepted, {rejected(status.rejected)}"
    return (
        judged if status.trust is None else f"{judged}, trust {trust(status.trust, status.trusts)}"
    )


def trust(lowest: float, trusts: Mapping[str, float]) -> str:
    """Show one figure, or one for each environment where there are several."""
    if len(trusts) < 2:
        return f"{lowest:.2f}"
    return ", ".join(f"{name} {value:.2f}" for name, value in trusts.items())


def traffic(status: Status) -> str:
    """Say how much a node sent and received."""
    return f"{size(status.bytes_sent)} sent, {size(status.bytes_received)} received"


def limits(row: LimitsRow) -> str:
    """Say what its owner allows a node, and what it used this month."""
    used = row.month_sent + row.month_received
    most = f" of {row.monthly_gb:g} GB" * bool(row.monthly_gb)
    parts = [
        f"works {row.hours}" if row.hours else "",
        "when nobody else computes" * (row.when == "idle"),
        f"{row.upload:g} Mbit/s up" * bool(row.upload),
        f"{row.download:g} Mbit/s down" * bool(row.download),
        f"{size(used)}{most} in {row.month}",
        "serves no chunks" * (not row.serves),
    ]
    return ", ".join(filter(None, parts))


def passes(figures: Mapping[str, float]) -> str:
    """List avg@k and pass@j of an evaluation."""
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items() if "@" in name)


def policy(status: Status) -> str:
    """Say which version a node holds, and how far that is behind."""
    if status.newest_version < 0:
        return "none yet"
    if status.version < 0:
        return f"none yet, the newest is version {status.newest_version}"
    behind = status.newest_version - status.version
    how = "the newest" if behind <= 0 else f"{behind} behind version {status.newest_version}"
    return f"version {version(status.version)}, {how}"


def machine(row: MachineRow) -> str:
    """Say what a node's processes use of their machine."""
    used = f"{row.cpu_cores:.2f} cores, {size(row.memory_bytes)} of memory"
    return f"{used}, {gpu(row)}{size(row.disk_free_bytes)} free on the disk"


def gpu(row: MachineRow) -> str:
    """Say how busy the GPUs of a node are, followed by a comma; empty if it has none."""
    if not row.gpus:
        return ""
    busy = "" if row.gpu_busy is None else f" {row.gpu_busy:.0%} busy"
    memory = f"{size(row.gpu_memory_bytes)} of {size(row.gpu_memory_total_bytes)}"
    return f"{row.gpus} GPU{'s' * (row.gpus > 1)}{busy} with {memory} in use, "


def engine(row: EngineRow) -> str:
    """Say how busy an engine is, and whether it failed."""
    parts = [
        f"{row.type}: {row.inflight} of {row.cap} in flight, {row.running} running",
        f"{row.waiting} waiting" * bool(row.waiting),
        f"{row.tokens_per_s:.0f} tokens/s" * bool(row.tokens_per_s),
        f"cache {row.kv_use:.0%}" * bool(row.kv_use),
        f"restarted {row.restarts} times" * bool(row.restarts),
    ]
    return ", ".join(filter(None, parts)) + (f". Down: {row.fault}" if row.fault else "")


def group(row: GroupRow) -> str:
    """Describe a pipeline: its stages with their layers, and the tokens that it has room for."""
    stages = ", ".join(map(" ".join, zip(row.stages, row.layers, strict=True)))
    around = "" if row.round_trip_ms is None else f", {row.round_trip_ms:.0f} ms round"
    head = f"{row.group} {row.state}, generation {row.generation}: {stages}{around}"
    return f"{head}, room for {row.kv_tokens} tokens, {row.spares} spares"


def stage(row: StageRow) -> str:
    """Describe a worker's own stage, and how its ring is doing."""
    parts = [f"{row.rank} of {row.stages}, layers {row.layers}, {row.state}"]
    if row.lanes:
        parts.append(f"{row.in_flight} of {row.lanes} micro-batches under way")
    if row.rtt_ms is not None:
        parts.append(f"{row.rtt_ms:.0f} ms to the next")
    if row.round_ms is not None:
        parts.append(f"{row.round_ms:.0f} ms round")
    if row.stall_share is not None:
        parts.append(f"stalled {row.stall_share:.0%}")
    if row.breaks:
        parts.append(f"broke {row.breaks} times")
    return ", ".join([*parts, f"{size(row.bytes_out)} out, {size(row.bytes_in)} in"])


# -- figures ---------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Format bytes in decimal units."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def local_time(seconds: float) -> str:
    """Format a time in Unix seconds to the minute."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def duration(total: float) -> str:
    """Format seconds: 59 s, 1 min 01 s, 1 h 01 min, 2 d 7 h."""
    if total < 60:
        return f"{total:.0f} s"
    minutes, rest = divmod(int(total), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def version(value: int) -> str:
    """Format a policy version; -1 is none."""
    return str(value) if value >= 0 else NONE


def lag(row: PeerRow) -> str:
    """Format the versions that a peer is behind."""
    return str(row.lag) if row.version >= 0 else NONE


def number(value: float | None) -> str:
    """Format with two decimals; None as a dash."""
    return NONE if value is None else f"{value:.2f}"


def rejected(reasons: Mapping[str, int]) -> str:
    """Count rejected rollouts by reason, commonest first."""
    if not any(reasons.values()):
        return "none rejected"
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {count}" for name, count in ordered)
    return f"{sum(reasons.values())} rejected ({shown})"


def sources(counts: Mapping[str, int]) -> str:
    """List chunk bytes by source with shares, largest first."""
    total = sum(counts.values()) or 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size(count)} ({count / total:.0%})" for name, count in ordered)


def seconds(phases: Mapping[str, float]) -> str:
    """List seconds by phase, longest first."""
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {spent:.1f} s" for name, spent in ordered)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as one line of blocks, averaged into at most `width` cells, lowest to highest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    cells = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(cells), max(cells) - min(cells) or 1.0
    return "".join(BLOCKS[round((cell - low) / span * (len(BLOCKS) - 1))] for cell in cells)
