"""Fetching from a neighbour: watch what it holds, pull the rarest of it, drop it when it lies.

A neighbour that has not proved itself in this fetch has one request in flight, so a liar costs one chunk.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import MAX_WATCHED
from .board import SILENT_S
from .job import DEPTH_MAX, Job, other_way_s
from .rpc import Refused
from .transport import TransportError

logger = logging.getLogger(__name__)

FAILURES = 2
"""In a row, after which a neighbour is left out of this fetch."""
BUSY_S = 0.25
WATCH_AGAIN_S = 0.25
BLIND_S = 1.0
"""Between two tries at a neighbour that cannot tell us what it holds."""


class Neighbour:
    """One neighbour in one fetch."""

    def __init__(self, job: Job, peer: bytes) -> None:
        self.peer = peer
        self.looked = asyncio.Event()
        """Set once it said what it holds, or cannot."""
        self._job = job
        self._tools = job.tools
        self._proven = False
        self._detoured = False
        self._failures = 0
        self._gone = False
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Follow it until it is of no more use."""
        names = tuple(self._job.board.missing)
        windows = [names[at : at + MAX_WATCHED] for at in range(0, len(names), MAX_WATCHED)]
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._tools.paths and self._tools.standing.detoured(self.peer, time.monotonic()):
                    self._detoured = True
                    self.looked.set()
                    self._tasks.append(tasks.create_task(self._pull_blindly()))
                    return
                for window in windows:
                    self._tasks.append(tasks.create_task(self._watch(window)))
                for number in range(DEPTH_MAX):
                    self._tasks.append(tasks.create_task(self._pull(number)))
        finally:
            self._job.board.withdraw(self.peer)
            self._job.neighbours.discard(self.peer)
            self.looked.set()
            self._job.told()

    # -- what it holds ---------------------------------------------------------------------------

    async def _watch(self, names: Sequence[bytes]) -> None:
        failures = 0
        while failures <= FAILURES:
            try:
                await self._listen(names)
                failures = 0
                if all(name not in self._job.board.missing or self._claims(name) for name in names):
                    return
            except Refused as refusal:
                if refusal.reason not in (Reason.BUSY, Reason.RATE_LIMITED):
                    self._tools.peers.failed(self.peer)
                    return self._drop(f"it tells us of no chunks: {refusal}")
                failures += 1
            except RemoteProtocolError as error:
                self._tools.peers.blame(self.peer, error.reason)
                return self._drop(f"bad news: {error}")
            except TransportError as error:
                self._tools.peers.failed(self.peer)
                failures += 1
                logger.debug("no news from %s: %s", short(self.peer), error)
            self._looked()
            await asyncio.sleep(WATCH_AGAIN_S * 2**failures)
        self._path_failed()
        self._drop("no news")

    async def _listen(self, names: Sequence[bytes]) -> None:
        async for held in self._tools.downloads.watch(self.peer, names):
            self._tools.standing.spoke(self.peer)
            if self._job.board.claim(self.peer, held):
                self._job.progress()
            self._looked()

    def _looked(self) -> None:
        self.looked.set()
        self._job.told()

    def _claims(self, name: bytes) -> bool:
        return self._job.board.claims(self.peer, name)

    # -- fetching it -----------------------------------------------------------------------------

    async def _pull(self, number: int) -> None:
        while not self._gone:
            chunk = self._choose(number)
            if chunk is None:
                await self._job.wait_news()
            else:
                await self._fetch(chunk)

    def _choose(self, number: int) -> ChunkRef | None:
        allowed = self._job.depth() if self._proven else 1
        if number >= allowed or self._job.full():
            return None
        board = self._job.board
        return board.next_of(self.peer) or board.late_of(self.peer, time.monotonic())

    async def _fetch(self, chunk: ChunkRef) -> None:
        pull = self._job.pull(self.peer, chunk)

        def start() -> bool:
            pull.begun = time.monotonic()
            return self._job.board.starts(pull, pull.begun)

        try:
            won = await self._job.attempt(
                pull, lambda: self._tools.downloads.one(chunk, pull, start=start)
            )
        except Refused as refusal:
            await self._refused(refusal)
        except RemoteProtocolError as error:
            self._lied(error.reason, f"bad chunk: {error}")
        except TransportError as error:
            await self._failed(error)
        else:
            now = time.monotonic()
            if won:
                self._proven, self._failures = True, 0
                self._tools.peers.served(self.peer, chunk.size, now - pull.begun)
            elif pull.sending and now - pull.touched > SILENT_S:
                self._fell_silent()

    def _fell_silent(self) -> None:
        """It began to send and stopped: others were asked, and gave it."""
        self._tools.peers.failed(self.peer)
        self._failures += 1
        if not self._proven or self._failures >= FAILURES:
            self._drop("it stopped in the middle")

    async def _refused(self, refusal: Refused) -> None:
        if refusal.reason == Reason.NOT_FOUND:
            self._lied(refusal.reason, "it does not have what it said it has")
        elif refusal.reason in (Reason.BUSY, Reason.RATE_LIMITED, Reason.NOT_YET):
            await asyncio.sleep(BUSY_S)
        else:
            self._tools.peers.failed(self.peer)
            self._drop(str(refusal))

    async def _failed(self, error: TransportError) -> None:
        logger.info("no chunk from %s: %s", short(self.peer), error)
        self._tools.peers.failed(self.peer)
        self._failures += 1
        if self._failures >= FAILURES:
            self._path_failed()
            self._drop("too many failures")
        await asyncio.sleep(BUSY_S)

    def _path_failed(self) -> None:
        """From the next fetch on, for a while, it is asked another way."""
        if self._tools.paths is not None:
            now = time.monotonic()
            self._tools.standing.path_failed(self.peer, now, detour=self._detoured)

    def _lied(self, reason: Reason, why: str) -> None:
        logger.warning("%s is left out: %s", short(self.peer), why)
        self._tools.peers.blame(self.peer, reason)
        self._tools.standing.lied(self.peer, time.monotonic())
        self._drop(why)

    def _drop(self, why: str) -> None:
        """No more of this neighbour in this fetch."""
        if self._gone:
            return
        logger.debug("done with %s: %s", short(self.peer), why)
        self._gone = True
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    # -- by another way --------------------------------------------------------------------------

    async def _pull_blindly(self) -> None:
        """Over another path, which carries chunks but no news: ask for what nobody else has."""
        while not self._gone:
            free = self._job.board.unheld(self.peer, time.monotonic())
            if not free or self._job.full():
                await self._job.wait_news()
                continue
            await self._fetch_by_path(self._job.board.chance.choice(free))

    async def _fetch_by_path(self, chunk: ChunkRef) -> None:
        paths = self._tools.paths
        assert paths is not None
        pull = self._job.pull(self.peer, chunk, sending=True)
        deadline = other_way_s(chunk)
        try:
            won = await self._job.attempt(
                pull, lambda: paths.get(self.peer, chunk, deadline=deadline)
            )
        except Refused:
            await asyncio.sleep(BLIND_S)  # it claimed nothing
        except RemoteProtocolError as error:
            self._lied(error.reason, f"bad chunk: {error}")
        except TransportError as error:
            await self._failed(error)
        else:
            if won:
                self._tools.peers.seen(self.peer)
