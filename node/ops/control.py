"""The local control socket: one JSON line asks, one JSON line answers. Both ends, and the rows they show.

The socket belongs to its owner alone (0600, in a 0700 directory); it is never a network socket.
"""

import asyncio
import hashlib
import inspect
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from ..config.paths import home_directory
from ..errors import BusyError, NetworkError, NodeError
from ..process.unix_sockets import answers, connected, remove_socket, short
from ..storage.run_files import socket_path
from ..tasks import end_tasks

MAX_LINE = 4 * 1024 * 1024
ASK_TIMEOUT_S = 10.0

Command = Callable[..., Awaitable[Any]]
"""Called with the arguments of the question, if it has any."""


class PeerRow(msgspec.Struct):
    """One line of `primerl-node peers`."""

    id: str
    short: str
    role: str
    path: str
    """direct, relayed, memory, or - when not connected."""
    rtt_ms: float | None
    bytes_sent: int
    bytes_received: int
    version: int
    """Policy version that it reports; -1 before the first."""
    lag: int
    leases: int
    accepted: int
    rejected: int
    top_reason: str
    trust: float
    """The lowest of `trusts`; 0.5 for a node without judged work."""
    reliability: float
    last_seen_s: float | None
    """Seconds ago."""
    software: str
    audited: int = 0
    """Its rollouts that were audited."""
    suspicion: float = 0.0
    """Evidence from audits as a share of what a ban takes: at 1 it is banned."""
    refused: str = ""
    """Why it gets no leases, or none of some environments, or its audits no longer count; empty while all is
    well."""
    audits: int = 0
    """Audits that it made for the trainer, as a validator."""
    stage: str = ""
    """Its stage of a pipeline and that stage's layers; empty for none."""
    numerics: str = ""
    """Numerics class that it reports; empty if none."""
    silent_s: float = 0.0
    """Seconds since its last message, where one was due; 0 while all is well."""
    starting: bool = False
    """Whether it is connected but has not asked for work: its engine or its first policy is loading."""
    left: bool = False
    """Whether it said goodbye before it fell silent."""
    trusts: dict[str, float] = {}
    """Trust by environment, for those that it sent work on."""
    second: str = ""
    """Warning that another program with its key was refused lately, and from where."""
    ticket: str = ""
    """At the trainer: the ticket that admitted it, by label and the beginning of its id."""


class BanRow(msgspec.Struct):
    """One line of `primerl-node bans`."""

    id: str
    short: str
    since: float
    """Unix seconds; 0: not known."""
    why: str
    ticket: str = ""
    """Ticket that admitted it: label and beginning of the id."""
    accepted: int = 0
    rejected: int = 0


class EngineRow(msgspec.Struct):
    """The engine of a worker."""

    type: str
    inflight: int = 0
    """Sequences submitted and not finished."""
    cap: int = 0
    """Present limit of sequences in flight."""
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Share of its cache that is in use, 0 to 1."""
    preemptions: int = 0
    taken_back: int = 0
    """Sequences that were stopped for lack of room, and generated again later."""
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens (speculative decoding): proposed, and accepted."""
    tokens_per_s: float = 0.0
    """Over the last minute."""
    restarts: int = 0
    fault: str = ""
    """Why it does not work at present, and the remedy; empty while it works."""


class EnvironmentRow(msgspec.Struct):
    """An environment that a run trains on."""

    name: str
    id: str
    share: float
    """Share of the leased groups by its ratio, 0 to 1."""
    group_size: int
    reward: float | None = None
    """Mean reward of its rollouts in the last batch that had some; None before the first."""
    accepted: int = 0
    """Rollouts of it so far."""
    rejected: int = 0
    workers: int = 0
    """Workers that are here and can play it."""


class GroupRow(msgspec.Struct):
    """A pipeline that the trainer has planned."""

    group: str
    generation: int
    stages: list[str]
    """Short ids of its nodes, in order."""
    layers: list[str]
    """Layers of each stage: first-last."""
    spares: int
    round_trip_ms: float | None
    """Round trip of the whole ring, as its stages measured it; None while one of them is silent."""
    kv_tokens: int
    """Tokens that it has room for at a time."""
    state: str
    """planned, or waiting: for a node in place of one that is lost."""


class StageRow(msgspec.Struct):
    """A worker's stage of a pipeline."""

    group: str
    generation: int
    rank: int
    stages: int
    layers: str
    """Its first and last layers: 0-13."""
    state: str
    """`healthy`, `starting`, or the fault."""
    epoch: int = -1
    """Epoch of the ring; higher after every break."""
    breaks: int = 0
    bytes_out: int = 0
    """Bytes to the next stage, since this ring began."""
    bytes_in: int = 0
    """Bytes from the stage before."""
    rtt_ms: float | None = None
    """Round trip to the next stage."""
    round_ms: float | None = None
    """Time of a trip around the ring (stage 0)."""
    stall_share: float | None = None
    """Share of its time that this stage waits for the others; at stage 0 of the slowest stage."""
    lanes: int = 0
    """Micro-batches that the sequences are cut into (stage 0)."""
    in_flight: int = 0
    """Micro-batches in flight around the ring (stage 0)."""


class BoundsRow(msgspec.Struct):
    """The bounds of noise of one numerics class, in a run that measures them."""

    numerics: str
    number: int
    """0 while they are provisional; rises each time that they are made anew."""
    rollouts: int
    """Rollouts of reference workers behind the bounds."""
    tokens: int
    first_version: int
    last_version: int
    """Policy versions that drew these rollouts."""
    rejected_at_most: float
    """Share of honest rollouts that is rejected by noise, 95 % upper bound; 1 where nothing was measured."""
    gathered: int = 0
    """Rollouts of references so far (trainer)."""
    workers: int = 0
    """Workers that claim the class (trainer)."""


class Status(msgspec.Struct, kw_only=True):
    """`primerl-node status`."""

    id: str
    short: str
    role: str
    software: str
    pid: int
    uptime_s: float
    data_dir: str
    run: str = ""
    run_name: str = ""
    phase: str = "starting"
    """starting, joining, catching up, warm-up, evaluating, running, finishing, ended."""
    step: int = 0
    max_steps: int = 0
    version: int = -1
    """Policy version that this node holds."""
    newest_version: int = -1
    """Newest version that it has heard of."""
    reward: float | None = None
    """Mean reward of the last batch (trainer)."""
    staleness: float | None = None
    """Mean staleness of the last batch, versions (trainer)."""
    leases: int = 0
    """Leases held (worker) or out (trainer)."""
    waiting_groups: int = 0
    accepted: int = 0
    rejected: dict[str, int] = {}
    trust: float | None = None
    """The lowest of `trusts` (worker); None before the first verdict."""
    trusts: dict[str, float] = {}
    """Trust by environment, by the verdicts on leases since its start, as the trainer counts it (worker)."""
    bytes_sent: int = 0
    bytes_received: int = 0
    chunk_bytes_by_source: dict[str, int] = {}
    """Chunk bytes fetched, by short id of the source (`trainer` for the trainer)."""
    peers: int = 0
    neighbours: int = 0
    """libp2p connections."""
    detail: str = ""
    warnings: list[str] = []
    """Conditions that the operator should act on, a sentence each (trainer)."""
    bounds: list[BoundsRow] = []
    """Bounds of each class (trainer), or of this node's own (worker), in a run that measures bounds of
    noise."""
    waiting_for: str = ""
    """Reason for which the run (trainer) or this node (worker, validator) waits; empty while it works."""
    engine: EngineRow | None = None
    """The engine of a worker."""
    environment: str = ""
    """The environments' present work, or their last fault; empty while all is well."""
    environments: list[EnvironmentRow] = []
    """Environments of the run (trainer)."""
    stage: StageRow | None = None
    """Pipeline stage of a worker that holds the model together with others."""
    event_loop_lag: dict[str, float] = {}
    """Event-loop lag, seconds: mean, p90 and max over the last ten seconds (worker)."""
    pipelines: list[GroupRow] = []
    """Pipelines: groups of nodes that hold the model together (trainer)."""
    evaluating: int = -1
    """Version that is being evaluated beside training; -1 while none is (trainer)."""
    evaluations: dict[str, dict[str, float]] = {}
    """Environment -> figures of the version that was evaluated last, and its number (trainer)."""
    history: list[tuple[int, float]] = []
    """(step, mean reward) so far (trainer)."""
    seconds: dict[str, float] = {}
    """Seconds by phase."""


class ControlServer:
    """Answer commands of the local user."""

    def __init__(self, data_dir: Path, commands: Mapping[str, Command]) -> None:
        self._path = socket_path(data_dir)
        self._commands = commands
        self._server: asyncio.AbstractServer | None = None
        self._callers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen. Raises BusyError if a node already answers there."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._path.exists():
            if answers(self._path):
                raise BusyError(
                    f"a node already runs in {self._path.parent}: stop it, or choose another --data-dir"
                )
            remove_socket(self._path)
        with short(self._path) as name:
            self._server = await asyncio.start_unix_server(self._serve, name, limit=MAX_LINE)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Stop listening, hang up on callers, and remove the socket."""
        if self._server is not None:
            self._server.close()
            remove_socket(self._path)
            self._server = None
            await asyncio.sleep(0)  # a connection that was just accepted becomes a caller
            for caller in self._callers:
                caller.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers.add(writer)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reply = await self._answer(await reader.readline())
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # a local caller that hung up, stalled or sent an endless line
        finally:
            self._callers.discard(writer)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            name = str(request["command"])
            arguments = request.get("arguments", {})
        except (ValueError, KeyError, TypeError):
            return {"error": "a request is a JSON object with a command"}
        command = self._commands.get(name)
        if command is None:
            known = ", ".join(sorted(self._commands))
            return {
                "error": f"this node does not answer {name[:40]!r}, only {known}: ask its trainer"
            }
        try:
            inspect.signature(command).bind(**arguments)
        except TypeError as error:
            return {"error": f"{name}: {error}"}
        try:
            return {"data": await command(**arguments)}
        except NodeError as error:
            return {"error": str(error)}


def ask(data_dir: Path, command: str, **arguments: Any) -> Any:
    """Ask the node that runs in `data_dir`; returns decoded JSON.

    Raises:
        NetworkError: no node runs there, or it does not answer.
    """
    path = socket_path(data_dir)
    try:
        with connected(path, ASK_TIMEOUT_S) as connection:
            request = (
                {"command": command, "arguments": arguments} if arguments else {"command": command}
            )
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = _read_line(connection)
    except (FileNotFoundError, ConnectionError) as error:
        raise NetworkError(
            f"no node runs in {data_dir}: start one, or name its --data-dir"
        ) from error
    except (TimeoutError, OSError) as error:
        raise NetworkError(f"the node in {data_dir} does not answer: {error}") from error
    answer = json.loads(reply)
    if "error" in answer:
        raise NodeError(str(answer["error"]))
    return answer["data"]


def _read_line(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


Row = TypeVar("Row")
T = TypeVar("T")


@dataclass
class NodeState:
    """A node as its last answers describe it."""

    name: str
    data_dir: Path
    note: str = "starting"
    """The state of its process, as its starter knows it."""
    status: Status | None = None
    """Last reply."""
    peers: list[PeerRow] = field(default_factory=list[PeerRow])


class View(Protocol):
    """A display of nodes."""

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """Draw these states; called about once a second."""
        ...

    def say(self, text: str) -> None:
        """Print a line that stays."""
        ...


async def watched(
    nodes: Mapping[str, NodeState], view: View, work: Coroutine[Any, Any, T], *, pace_s: float
) -> T:
    """Await `work`, with these nodes in the view meanwhile."""
    watching = asyncio.create_task(follow(nodes, view, pace_s=pace_s), name="live view")
    try:
        return await work
    finally:
        await end_tasks(watching)


async def follow(nodes: Mapping[str, NodeState], view: View, *, pace_s: float) -> None:
    """Ask every node and show the answers, until cancelled. `nodes` may grow meanwhile.

    With an infinite pace no node is asked.
    """
    while not math.isinf(pace_s):
        await asyncio.gather(*(refresh(node) for node in list(nodes.values())))
        view.show(nodes)
        await asyncio.sleep(pace_s)


async def refresh(node: NodeState) -> None:
    """Ask one node for its status and peers; silence changes nothing."""
    status = await asyncio.to_thread(_ask, node.data_dir, "status", Status)
    if status is None:
        return
    node.status = status
    peers = await asyncio.to_thread(_ask, node.data_dir, "peers", list[PeerRow])
    node.peers = node.peers if peers is None else peers


def _ask(data_dir: Path, command: str, kind: type[Row]) -> Row | None:
    try:
        answer: Any = ask(data_dir, command)
        return msgspec.convert(answer, kind)
    except (NodeError, ValueError):
        return None  # not up yet, gone, too busy to answer, or cut off in the middle of its answer


logger = logging.getLogger(__name__)


_ENTRY = re.compile(r"\d+-[0-9a-f]{8}\.json")
"""Names of entries; other files of the directory are not ours."""


@dataclass(frozen=True)
class RunningEntry:
    """One running node."""

    pid: int
    data_dir: str
    """Absolute."""
    role: str
    run: str
    started: float
    """Unix time."""
    birth: str = ""
    """Start time of the process, from the kernel; tells a recycled pid from the same process."""


def registry_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of entries: below the user's runtime directory if there is one, else the home."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "primerl"
    return home_directory() / ".primerl" / "running"


def register(data_dir: Path, role: str, run: str, *, where: Path | None = None) -> Path:
    """Write the entry of this process; returns the path to hand to unregister().

    A registry that cannot be written is logged and costs only the convenience.
    """
    where = where or registry_directory()
    data_dir = data_dir.resolve()
    pid = os.getpid()
    entry = RunningEntry(pid, str(data_dir), role, run, time.time(), _birth(pid))
    mark = hashlib.sha256(str(data_dir).encode()).hexdigest()[:8]
    path = where / f"{pid}-{mark}.json"
    temporary = path.with_suffix(".tmp")
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_text(json.dumps(asdict(entry)) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("this node will not be found without --data-dir: %s", error)
    return path


def unregister(path: Path) -> None:
    """Remove an entry; a missing one is fine."""
    path.unlink(missing_ok=True)


def running(*, where: Path | None = None) -> list[RunningEntry]:
    """List running nodes, the latest started first. Entries of dead processes are removed."""
    entries: list[RunningEntry] = []
    for path in sorted((where or registry_directory()).glob("*.json")):
        if not _ENTRY.fullmatch(path.name):
            continue
        entry = _read_entry(path)
        if entry is None or not _alive(entry):
            path.unlink(missing_ok=True)
        else:
            entries.append(entry)
    return sorted(entries, key=lambda entry: -entry.started)


def _read_entry(path: Path) -> RunningEntry | None:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return RunningEntry(**fields)
    except (OSError, ValueError, TypeError):
        return None  # not ours, half gone, or of a version that wrote other fields


def _alive(entry: RunningEntry) -> bool:
    try:
        os.kill(entry.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process: it exists
    return entry.birth == _birth(entry.pid)


def _birth(pid: int) -> str:
    """Read the start time of a process in clock ticks since boot; "" where /proc lacks it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
