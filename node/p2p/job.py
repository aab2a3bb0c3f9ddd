"""What one fetch is made of: its board, its news, and how any single download ends.

The loops that use it are in neighbours.py and origin.py. Wrong bytes never get past keep().
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ...crypto.hashing import digest, short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ..ops.errors import NetworkError, StorageError
from ..storage.chunk_store import Store
from .arrivals import Arrivals
from .board import Board, Pull
from .chunk_source import ChunkSource, PeerPaths
from .downloads import Downloads
from .peers import PeerTable
from .standing import Standing
from .waiting import Signal

MAX_SENDING = 16
"""Chunks whose bytes are coming: what bounds the memory of a fetch."""
DEPTH, DEPTH_MAX = 2, 4
"""Requests in flight at one source, and at most where there are few sources."""
TICK_S = 0.25
"""Without news, how often to look for what is late."""

OTHER_WAY_S = 10.0
MIN_RATE = 64 * 1024
"""Bytes per second below which a seed, or a peer over another path, is given up."""


@dataclass(frozen=True)
class Tools:
    """What all fetches of a node share."""

    downloads: Downloads
    peers: PeerTable
    store: Store
    arrivals: Arrivals
    standing: Standing
    seeds: Sequence[ChunkSource]
    paths: PeerPaths | None
    fetched: Counter[bytes]
    wasted: Counter[bytes]


@dataclass
class Job:
    """One fetch."""

    tools: Tools
    board: Board
    origin: bytes
    neighbours: set[bytes]
    """Those from whom something may still be hoped."""
    error: Exception | None = None
    progressed: float = field(default_factory=time.monotonic)
    """When a chunk arrived, or somebody got one that we miss."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    news: Signal = field(default_factory=Signal)

    def fail(self, error: Exception) -> None:
        """End the fetch with an error; the first one counts."""
        self.error = self.error or error
        self.over.set()

    def told(self) -> None:
        """Something changed: everybody looks again."""
        self.news.fire()

    def progress(self) -> None:
        """Things go on: nobody has to become impatient."""
        self.progressed = time.monotonic()
        self.news.fire()

    async def wait_news(self, timeout: float = TICK_S) -> None:
        """Until something changes, or the timeout."""
        try:
            async with asyncio.timeout(timeout):
                await self.news.wait()
        except TimeoutError:
            pass  # whoever waits looks for itself

    def depth(self) -> int:
        """Requests in flight at one source: more where few sources have to fill the line."""
        return max(DEPTH, min(DEPTH_MAX, 8 // (len(self.neighbours) + 1)))

    def full(self) -> bool:
        """Whether no further download may begin."""
        return self.board.sending >= MAX_SENDING

    def pull(self, source: bytes, chunk: ChunkRef | None, *, sending: bool = False) -> Pull:
        """A download that begins now; without a chunk until the source has chosen one.

        `sending`: the source has no line to stand in.
        """
        now = time.monotonic()
        pull = Pull(source, now, now, sending=sending)
        if chunk is not None:
            self.board.begin(chunk, pull)
        return pull

    async def attempt(self, pull: Pull, get: Callable[[], Awaitable[bytes | None]]) -> bool:
        """Run one download to its end; whether its chunk arrived by it.

        Raises what `get` raises, and RemoteProtocolError(WRONG_DIGEST).
        """
        won = False
        try:
            async with asyncio.timeout(None) as pull.leash:
                data = await get()
            pull.leash = None
            if data is not None and pull.chunk is not None:
                won = await self._keep(pull, pull.chunk, data)
        except TimeoutError:
            if pull.leash is None or not pull.leash.expired():
                raise
        finally:
            pull.leash = None
            self.board.end(pull)
            if not won:
                self.tools.wasted[pull.source] += pull.received
            self.told()
        return won

    async def _keep(self, pull: Pull, chunk: ChunkRef, data: bytes) -> bool:
        pull.received = len(data)
        try:
            await asyncio.to_thread(_store_verified, self.tools.store, chunk, data)
        except StorageError as error:
            self.fail(error)
            return False
        return self._arrived(pull, chunk)

    def _arrived(self, pull: Pull, chunk: ChunkRef) -> bool:
        seconds = time.monotonic() - pull.begun
        losers = self.board.arrived(chunk, seconds)
        if losers is None:
            return False
        for loser in losers:
            if loser is not pull:
                loser.stop()
        self.tools.arrivals.arrived(chunk.digest)
        self.tools.fetched[pull.source] += chunk.size
        self.progress()
        if not self.board.missing:
            self.over.set()
        return True


def _store_verified(store: Store, chunk: ChunkRef, data: bytes) -> None:
    if len(data) != chunk.size or digest(data) != chunk.digest:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, f"chunk {short(chunk.digest)}")
    store.put(data)


def other_way_s(chunk: ChunkRef) -> float:
    """Seconds that a chunk may take from a seed, or over another path."""
    return OTHER_WAY_S + chunk.size / MIN_RATE


def gone_from_origin(chunks: Sequence[ChunkRef]) -> NetworkError:
    """What its origin does not keep will not come back: plan anew, for a newer version."""
    names = ", ".join(short(chunk.digest) for chunk in chunks[:3])
    return NetworkError(f"no longer kept by anybody: {len(chunks)} chunk(s), {names}")
