"""The local control socket: one JSON line asks, one JSON line answers. Both ends, and the running nodes.

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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from ..config.paths import home_directory
from ..errors import BAD_FILE, BusyError, NetworkError, NodeError
from ..process.unix_sockets import answers, connected, remove_socket, start_server
from ..storage.run_files import socket_path
from ..tasks import end_tasks
from .figures import NodeFigures, PeerRow, Status

MAX_LINE = 4 * 1024 * 1024
ASK_TIMEOUT_S = 10.0

Command = Callable[..., Awaitable[Any]]
"""Called with the arguments of the question, if it has any."""


class ControlServer:
    """Answer commands of the local user."""

    def __init__(self, data_dir: Path, commands: Mapping[str, Command]) -> None:
        self._path = socket_path(data_dir)
        self._commands = commands
        self._server: asyncio.AbstractServer | None = None
        self._callers: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._closing = False

    async def start(self) -> None:
        """Listen. Raises BusyError if a node already answers there."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._path.exists():
            if answers(self._path):
                raise BusyError(
                    f"a node already runs in {self._path.parent}: stop it, or choose another --data-dir"
                )
            remove_socket(self._path)
        self._server = await start_server(self._serve, self._path, limit=MAX_LINE)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Stop listening, hang up on callers, and remove the socket."""
        if self._server is not None:
            self._closing = True
            self._server.close()
            remove_socket(self._path)
            self._server = None
            await asyncio.sleep(0)  # a connection that was just accepted becomes a caller
            for task, caller in self._callers.items():
                caller.transport.abort()
                task.cancel()
            if self._callers:
                await asyncio.wait(list(self._callers), timeout=ASK_TIMEOUT_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._callers[task] = writer
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reply = await self._answer(await reader.readline())
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # a local caller that hung up, stalled or sent an endless line
        except asyncio.CancelledError:
            if not self._closing:  # else asyncio logs it as an error of the connection (3.11)
                raise
        finally:
            del self._callers[task]
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


def ask(data_dir: Path, command: str, *, timeout_s: float = ASK_TIMEOUT_S, **arguments: Any) -> Any:
    """Ask the node that runs in `data_dir`; returns decoded JSON.

    Raises:
        NetworkError: no node runs there, or it does not answer.
    """
    path = socket_path(data_dir)
    try:
        with connected(path, timeout_s) as connection:
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
    if not reply.endswith(b"\n"):
        raise NetworkError(f"the node in {data_dir} ended before it had answered")
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
    """Ask one node for its figures; silence changes nothing."""
    try:
        answer = await asyncio.to_thread(ask, node.data_dir, "figures")
        # in this thread: types of msgspec 0.22 are not safe to be prepared by several at once
        figures = msgspec.convert(answer, NodeFigures)
    except (NodeError, ValueError):
        return  # not up yet, gone, too busy to answer, or cut off in the middle of its answer
    node.status, node.peers = figures.status, figures.peers


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
            with suppress(OSError):
                path.unlink(missing_ok=True)
        else:
            entries.append(entry)
    return sorted(entries, key=lambda entry: -entry.started)


def _read_entry(path: Path) -> RunningEntry | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningEntry)
    except BAD_FILE:
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
