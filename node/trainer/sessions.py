"""One key, one session: which connection of a node's key is answered, where two programs have the same key.

Invariants: requests of a key are answered on one connection at a time. While that connection answers, a request
on another one is refused and changes nothing; only the transport decides that it no longer does.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from ...crypto.hashing import short
from ...protocol.envelope import utc
from ...protocol.errors import Reason, RemoteProtocolError
from ..p2p.peers import PeerTable
from ..p2p.transport import Connection

logger = logging.getLogger(__name__)

PROBE_S = 3.0
"""Time that a connection has to answer before another one of its key takes its place. A living node answers in
a round trip, and lost packets are sent again meanwhile; a node that was killed comes back after that time."""
TOLD_S = 3600.0
"""Minimum interval of log lines about one key."""
SHOWN_S = 600.0
"""Time for which `status` and `peers` show that a key was refused on a second connection."""
MAX_SESSIONS = 4096
"""Above this number, sessions whose connection is closed are forgotten."""
NETWORK_BITS = {4: 24, 6: 48}
"""Bits of an IP address, by version, that name the network of one customer."""


@dataclass
class KeySession:
    """The connection on which a key's requests are answered."""

    connection: Connection
    since: float
    """Unix seconds of the first request, or of the last hello."""
    probe: "asyncio.Task[bool] | None" = None
    """Asks the connection for an answer, for all who wait for one."""


@dataclass
class SecondSession:
    """The last request of a key that was refused because another program with that key is at work."""

    where: str
    at: float
    """Monotonic seconds."""
    told: float = -math.inf
    """Monotonic seconds of the last log line."""


class Sessions:
    """Decides for each request which program of a key sent it, and lets the one that came first go on."""

    def __init__(self, peers: PeerTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._clock = clock
        self._sessions: dict[bytes, KeySession] = {}
        self._seconds: dict[bytes, SecondSession] = {}

    def __len__(self) -> int:
        """Count the keys with a remembered session or refusal."""
        return len(self._sessions.keys() | self._seconds.keys())

    async def check(self, connection: Connection) -> None:
        """Take a request on `connection`; it belongs to the session of its key, or begins a new one.

        Raises RemoteProtocolError (KEY_IN_USE) while another connection of the key answers.
        """
        node = connection.peer
        while (session := self._sessions.get(node)) is not None:
            if session.connection is connection:
                return
            if await self._answers(session):
                raise self._refusal(session, connection)
            if self._sessions.get(node) is session:
                self._sessions[node] = KeySession(connection, session.since)
                await session.connection.close("another session of this key has begun")
        self._make_room()
        self._sessions[node] = KeySession(connection, time.time())

    def began(self, node: bytes) -> None:
        """Note that the program of a key's session has started: it said hello."""
        if (session := self._sessions.get(node)) is not None:
            session.since = time.time()

    async def end(self, node: bytes) -> None:
        """Close the connection of a key's session."""
        if (session := self._sessions.pop(node, None)) is not None:
            await session.connection.close("this key is not answered any more")

    def sweep(self) -> None:
        """Forget sessions whose connection is closed: each holds some 95 KB while it is remembered."""
        for node in [node for node, session in self._sessions.items() if session.connection.closed]:
            del self._sessions[node]

    def second(self, node: bytes) -> str:
        """Say from where a second program with a node's key was refused lately; "" if none was."""
        second = self._seconds.get(node)
        if second is None or self._clock() - second.at > SHOWN_S:
            return ""
        return f"its key is in use on a second machine, refused from {second.where}"

    def warnings(self) -> list[str]:
        """Return a warning for each key that was refused on a second connection lately, with the remedy."""
        return [_warning(node, words) for node in self._seconds if (words := self.second(node))]

    async def _answers(self, session: KeySession) -> bool:
        """Return whether a session's program is alive now: a request of a moment ago does not prove it."""
        if session.connection.closed:
            return False
        if session.probe is None or session.probe.done():
            session.probe = asyncio.create_task(session.connection.answers(PROBE_S))
        return await asyncio.shield(session.probe)

    def _refusal(self, session: KeySession, connection: Connection) -> RemoteProtocolError:
        """Note a second program with a session's key, in the log once; return the refusal for it."""
        node, now = connection.peer, self._clock()
        known = self._seconds.pop(node, None)  # the newest is the last
        while len(self._seconds) >= MAX_SESSIONS:
            del self._seconds[next(iter(self._seconds))]
        second = SecondSession(_remote(connection), now, known.told if known else -math.inf)
        self._seconds[node] = second
        if now - second.told >= TOLD_S:
            second.told = now
            logger.warning(
                "%s; the first, from %s, goes on",
                _warning(node, self.second(node)),
                _remote(session.connection),
            )
        detail = (
            f"this key is in use from {self._shown(session.connection)} since {utc(int(session.since))}: stop "
            "the node there, or give this one a key of its own"
        )
        return RemoteProtocolError(Reason.KEY_IN_USE, detail)

    def _shown(self, connection: Connection) -> str:
        """Return the address of a session as another holder of its key may know it.

        Only its network where the node does not share its address: a thief of the key may be asking.
        """
        record = self._peers.get(connection.peer).record
        remote = _remote(connection)
        try:
            address = ip_address(remote.partition("%")[0])
        except ValueError:
            return remote
        if address.is_private or (record is not None and record.share_address):
            return remote
        return f"{ip_network((address, NETWORK_BITS[address.version]), strict=False)}"

    def _make_room(self) -> None:
        if len(self._sessions) >= MAX_SESSIONS:
            self.sweep()


def _remote(connection: Connection) -> str:
    path = connection.path()
    return path.remote or ("a relay" if path.kind == "relayed" else "an unknown address")


def _warning(node: bytes, words: str) -> str:
    return (
        f"node {short(node)}: {words}. Its owner copied a data directory, or the key was stolen: then "
        "`primerl-node retire` with that key ends it"
    )
