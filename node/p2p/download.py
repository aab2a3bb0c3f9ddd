"""Fetch chunks into the store: from many neighbours at once, and as little as possible from the origin.

Every chunk is verified before it is stored, and only stored chunks are used or served on. A fetch that was
killed continues: chunks in the store are never fetched again.

    BlobFetcher       the fetching half of a node; fetch() runs one Fetch
    Fetch             one artifact: its DownloadState, and the downloads under way
    NeighbourFetch    one neighbour in one fetch: watch which chunks it holds, download them
    OriginFetch       the origin and the seeds in one fetch: for chunks that no neighbour holds
"""

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from ...crypto.hashing import digest, short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import MAX_WATCHED
from ...protocol.recent import RecentCounter
from ..errors import NetworkError, StorageError
from ..storage.chunk_store import Store
from .chunk_client import ChunkClient, ChunkSource, KeptInLine, PeerPaths
from .connections import ConnectionPool
from .download_state import (
    FIRST_RATE,
    IN_LINE_S,
    LATE,
    PLACE_S,
    SILENT_S,
    ChunkDownload,
    DownloadState,
)
from .limits import Pacer
from .peers import MAX_PEERS, PeerScores, PeerTable
from .rpc import Refused
from .serve import WATCHES_PER_PEER, ChunkArrivals
from .transport import TransportError
from .waiting import Notifier

logger = logging.getLogger(__name__)

MAX_SENDING = 16
"""Chunks in transfer at once; this bounds the memory of a fetch."""
DEPTH, DEPTH_MAX = 2, 4
"""Requests in flight at one source, and at most where there are few sources."""
TICK_S = 0.25
"""Seconds between two checks for late chunks, without news."""

LEAST_PATIENCE_S = 0.5
WAITING_SHARE = 3
"""A source may keep a fetch waiting in vain for 1/WAITING_SHARE of its usual time (IN_LINE_S if unknown)."""
LEAST_PLACE_S = 0.01
PLACE_SHARE = 8
PLACE_MOST_S = 0.5
"""A source that sends nothing keeps its place for 1/PLACE_SHARE of that time, at most PLACE_MOST_S: on narrow
lines an honest one has others before us."""
USUAL_GROWTH = 1.05
"""A fetch counts as at most USUAL_GROWTH times the usual time: attackers do not set what is usual."""
OTHER_WAY_S = 10.0
MIN_RATE = 64 * 1024
"""Bytes per second below which a seed, or a peer over another path, is given up."""
LEAST_RATE = 2 * MIN_RATE
"""Bytes per second for each chunk in transfer under a limit: peers give up receivers of half of that."""


class Fetch:
    """Fetch one artifact into the store."""

    def __init__(
        self,
        fetcher: "BlobFetcher",
        missing: dict[bytes, ChunkRef],
        origin: bytes,
        neighbours: set[bytes],
        usual_s: float | None = None,
    ) -> None:
        """`neighbours` may still give something; they leave the set when they are dropped. `usual_s`: the
        seconds that a fetch of this size usually takes; None if unknown."""
        self.fetcher = fetcher
        size = sum(chunk.size for chunk in missing.values())
        patience, place = IN_LINE_S, PLACE_S
        if usual_s is not None:
            patience = min(IN_LINE_S, max(LEAST_PATIENCE_S, usual_s / WAITING_SHARE))
            place = min(PLACE_MOST_S, max(LEAST_PLACE_S, usual_s / PLACE_SHARE))
        self.look_s = min(place / 2, TICK_S)
        """Seconds between two checks for sources that give nothing."""
        self._most = fetcher.pacer.sharers(LEAST_RATE, MAX_SENDING)
        """Chunks in transfer at once."""
        first_rate = min(FIRST_RATE, fetcher.pacer.rate / self._most / LATE or FIRST_RATE)
        self.state = DownloadState(missing, fetcher.chance, patience, first_rate, place)
        self.begun = time.monotonic()
        self.due = self.begun + patience + (size / first_rate if usual_s is None else usual_s)
        """Time after which the origin is asked for every chunk that is not under way, even if others claim it.
        """
        self.origin = origin
        self.neighbours = neighbours
        self.error: Exception | None = None
        self.progressed = time.monotonic()
        """Time at which a chunk arrived, or a neighbour received one that we lack."""
        self._heard = self.begun
        self.over = asyncio.Event()
        self.news = Notifier()
        self.sources: dict[NeighbourFetch, None] = {}
        """Neighbours that may be asked for chunks, in order."""
        self._crowded = False
        """Whether a source had to wait as too much was under way."""

    def fail(self, error: Exception) -> None:
        """End the fetch with an error; the first one counts."""
        self.error = self.error or error
        self.over.set()

    def progress(self) -> None:
        """Note that the fetch advances."""
        self.progressed = time.monotonic()

    @property
    def heard(self) -> float:
        """Time at which a source last sent anything, even that we are in its queue."""
        self._heard = max(self._heard, self.state.heard)
        return self._heard

    async def announce(self) -> None:
        """Wake the loops every TICK_S, and when a download becomes late, so that another source joins it."""
        late, announced = 0, self.begun
        while True:
            await asyncio.sleep(self.look_s)
            now = time.monotonic()
            before, late = late, self.state.late(now)
            if late > before or now - announced >= TICK_S:
                announced = now
                self.news.fire()

    async def dispatch(self) -> None:
        """At each piece of news for all, let every neighbour begin the downloads that it may have."""
        while True:
            for source in tuple(self.sources):
                source.begin_downloads()
            await self.news.wait()

    def depth(self) -> int:
        """Return how many requests one source may have in flight: more where there are few sources."""
        return min(self._most, max(DEPTH, min(DEPTH_MAX, 8 // (len(self.neighbours) + 1))))

    def full(self) -> bool:
        """Return whether no further download may begin."""
        if self.fetcher.pacer.rate:  # those in a queue may all begin to send at once
            full = self.state.under_way >= self._most or self.fetcher.pacer.exhausted
        else:
            full = self.state.sending(time.monotonic()) >= self._most
        self._crowded |= full
        return full

    def download(
        self, source: bytes, chunk: ChunkRef | None, *, sending: bool = False
    ) -> ChunkDownload:
        """Begin a download; without a chunk until the source has chosen one.

        `sending`: the source has no queue, so its bytes count as arriving at once.
        """
        now = time.monotonic()
        download = ChunkDownload(source, now, now, asked=now, sending=sending)
        if chunk is not None:
            self.state.begin(chunk, download)
        return download

    async def attempt(
        self, download: ChunkDownload, get: Callable[[], Awaitable[bytes | None]]
    ) -> bool:
        """Run one download to its end; return whether it brought its chunk.

        Raises what `get` raises, and RemoteProtocolError(WRONG_DIGEST).
        """
        won, failed = False, True
        try:
            async with asyncio.timeout(None) as download.leash:
                data = await get()
            download.leash = None
            failed = False
            if data is not None and download.chunk is not None:
                won = await self._keep(download, download.chunk, data)
        except TimeoutError:
            if download.leash is None or not download.leash.expired():
                raise
            failed = False  # another one was faster
        except asyncio.CancelledError:
            failed = False
            raise
        finally:
            download.leash = None
            self._heard = max(self._heard, download.heard)
            self.state.end(download, time.monotonic(), failed=failed)
            if not won:
                self.fetcher.wasted[download.source] += download.received
            if self._crowded or (download.chunk and download.chunk.digest in self.state.missing):
                self._crowded = False
                self.news.fire()
        return won

    async def _keep(self, download: ChunkDownload, chunk: ChunkRef, data: bytes) -> bool:
        """Verify and store a chunk, and end the other downloads of it; False if it was here already."""
        download.received = len(data)
        try:
            await asyncio.to_thread(_store_verified, self.fetcher.store, chunk, data)
        except StorageError as error:
            self.fail(error)
            return False
        losers = self.state.arrived(chunk, download, time.monotonic())
        if losers is None:
            return False
        for loser in losers:
            if loser is not download:
                loser.stop()
        self.fetcher.arrivals.arrived(chunk.digest)
        self.fetcher.fetched[download.source] += chunk.size
        self.progress()
        if not self.state.missing:
            self.over.set()
        return True


def _store_verified(store: Store, chunk: ChunkRef, data: bytes) -> None:
    if len(data) != chunk.size or digest(data) != chunk.digest:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, f"chunk {short(chunk.digest)}")
    store.put(data)


def _other_way_s(chunk: ChunkRef) -> float:
    """Return the seconds that a chunk may take from a seed, or over another path."""
    return OTHER_WAY_S + chunk.size / MIN_RATE


FAILURES = 2
"""Failures in a row after which a neighbour is left out of this fetch."""
BUSY_S = 0.25
WATCH_AGAIN_S = 0.25
BLIND_S = 1.0
"""Seconds between two tries at a neighbour that cannot list its chunks."""


class NeighbourFetch:
    """Watch which chunks a neighbour holds, and download those that are missing."""

    def __init__(self, fetch: Fetch, peer: bytes) -> None:
        self.peer = peer
        self.looked = asyncio.Event()
        """Set once it has listed its chunks, or cannot."""
        self._fetch = fetch
        self._fetcher = fetch.fetcher
        self._proven = False
        self._detoured = False
        self._failures = 0
        self._gone = False
        self._dropped = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        """Of its downloads."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0
        """Downloads from it."""

    async def run(self) -> None:
        """Fetch from it until it is dropped or the fetch is over."""
        names = tuple(self._fetch.state.missing)
        windows = [names[at : at + MAX_WATCHED] for at in range(0, len(names), MAX_WATCHED)]
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._fetcher.paths and self._fetcher.scores.detoured(
                    self.peer, time.monotonic()
                ):
                    self._detoured = True
                    self.looked.set()
                    self._tasks.add(tasks.create_task(self._download_blindly()))
                    return
                for window in windows:
                    self._tasks.add(tasks.create_task(self._watch(window)))
                self._group = tasks
                self._fetch.sources[self] = None
                try:
                    await self._dropped.wait()
                finally:
                    self._gone = True
        finally:
            self._fetch.sources.pop(self, None)
            self._fetch.state.withdraw(self.peer, time.monotonic())
            self._fetch.neighbours.discard(self.peer)
            self.looked.set()
            self._fetch.news.fire()

    # -- which chunks it holds -------------------------------------------------------------------

    async def _watch(self, names: Sequence[bytes]) -> None:
        failures = 0
        while failures <= FAILURES:
            try:
                await self._listen(names)
                failures = 0
                if all(
                    name not in self._fetch.state.missing
                    or self._fetch.state.claims(self.peer, name)
                    for name in names
                ):
                    return
            except Refused as refusal:
                if refusal.reason not in (Reason.BUSY, Reason.RATE_LIMITED):
                    self._fetcher.peers.failed(self.peer)
                    return self._drop(f"it tells us of no chunks: {refusal}")
                failures += 1
            except RemoteProtocolError as error:
                self._fetcher.peers.blame(self.peer, error.reason)
                return self._drop(f"bad news: {error}")
            except TransportError as error:
                self._fetcher.peers.failed(self.peer)
                failures += 1
                logger.debug("no news from %s: %s", short(self.peer), error)
            self.looked.set()
            self._fetch.news.fire()
            await asyncio.sleep(WATCH_AGAIN_S * 2**failures)
        self._path_failed()
        self._drop("no news")

    async def _listen(self, names: Sequence[bytes]) -> None:
        async for claimed in self._fetcher.client.watch(self.peer, names):
            self._fetcher.scores.spoke(self.peer)
            patience = self._fetcher.scores.patience(self.peer)
            news = self._fetch.state.claim(self.peer, claimed, patience=patience)
            if news and not self._fetch.state.doubted(self.peer, time.monotonic()):
                self._fetch.progress()
            self.looked.set()
            self.begin_downloads()

    # -- downloading them ------------------------------------------------------------------------

    def begin_downloads(self) -> None:
        """Keep as many downloads under way as it may have."""
        while self._may_begin() and (chunk := self._choose_chunk()) is not None:
            assert self._group is not None
            self._under_way += 1
            download = self._fetch.download(self.peer, chunk)
            task = self._group.create_task(self._get(chunk, download))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, download))

    def _ended(self, download: ChunkDownload, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._under_way -= 1
        self._fetch.state.end(
            download, time.monotonic()
        )  # its task may have been cancelled unbegun
        self.begin_downloads()

    def _may_begin(self) -> bool:
        if self._gone or self._fetch.over.is_set():
            return False
        allowed = self._fetch.depth() if self._proven else 1
        return (
            self._under_way < allowed
            and self._fetch.state.may_give(self.peer)
            and not self._fetch.full()
        )

    def _choose_chunk(self) -> ChunkRef | None:
        state = self._fetch.state
        return state.next_of(self.peer) or state.late_of(self.peer, time.monotonic())

    async def _get(self, chunk: ChunkRef, download: ChunkDownload) -> None:
        def start() -> bool:
            download.begun = time.monotonic()
            return self._fetch.state.starts(download, download.begun)

        try:
            won = await self._fetch.attempt(
                download, lambda: self._fetcher.client.one(chunk, download, start=start)
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
                self._fetcher.peers.served(self.peer, chunk.size, now - download.begun)
            elif download.sending and now - download.touched > SILENT_S:
                self._fell_silent()

    def _fell_silent(self) -> None:
        """Note that it stopped in the middle of a chunk, which another source gave."""
        self._fetcher.peers.failed(self.peer)
        self._failures += 1
        if not self._proven or self._failures >= FAILURES:
            self._drop("it stopped in the middle")

    async def _refused(self, refusal: Refused) -> None:
        if refusal.reason == Reason.NOT_FOUND:
            self._lied(refusal.reason, "it lacks a chunk that it claimed")
        elif isinstance(refusal, KeptInLine) and not self._proven:
            await self._failed(refusal)
        elif refusal.reason in (Reason.BUSY, Reason.RATE_LIMITED, Reason.NOT_YET):
            await asyncio.sleep(BUSY_S)
        else:
            self._fetcher.peers.failed(self.peer)
            self._drop(str(refusal))

    async def _failed(self, error: TransportError | KeptInLine) -> None:
        logger.info("no chunk from %s: %s", short(self.peer), error)
        self._fetcher.peers.failed(self.peer)
        self._failures += 1
        if self._failures >= FAILURES:
            self._path_failed()
            self._drop("too many failures")
        await asyncio.sleep(BUSY_S)

    def _path_failed(self) -> None:
        """Use the other path to a source for the next fetches, for a while."""
        if self._fetcher.paths is not None:
            now = time.monotonic()
            self._fetcher.scores.path_failed(self.peer, now, detour=self._detoured)

    def _lied(self, reason: Reason, why: str) -> None:
        logger.warning("%s is left out: %s", short(self.peer), why)
        self._fetcher.peers.blame(self.peer, reason)
        self._fetcher.scores.lied(self.peer, time.monotonic())
        self._drop(why)

    def _drop(self, why: str) -> None:
        """Leave this neighbour out of the rest of the fetch."""
        if self._gone:
            return
        logger.debug("done with %s: %s", short(self.peer), why)
        self._gone = True
        self._dropped.set()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    # -- over the other path ---------------------------------------------------------------------

    async def _download_blindly(self) -> None:
        """Ask over the other path, which carries chunks but no news, for chunks that no other source holds."""
        while not self._gone:
            free = self._fetch.state.unheld(self.peer, time.monotonic())
            if not free or self._fetch.full():
                await self._fetch.news.wait()
                continue
            await self._get_by_path(self._fetch.state.chance.choice(free))

    async def _get_by_path(self, chunk: ChunkRef) -> None:
        paths = self._fetcher.paths
        assert paths is not None
        download = self._fetch.download(self.peer, chunk, sending=True)
        deadline = _other_way_s(chunk)
        try:
            won = await self._fetch.attempt(
                download, lambda: paths.get(self.peer, chunk, deadline=deadline)
            )
        except Refused:
            await asyncio.sleep(BLIND_S)  # it claimed nothing
        except RemoteProtocolError as error:
            self._lied(error.reason, f"bad chunk: {error}")
        except TransportError as error:
            await self._failed(error)
        else:
            if won:
                self._fetcher.peers.seen(self.peer)


PATIENCE_S = 10.0
"""Time without progress after which the origin is asked even for chunks that it has sent to others."""
DOUBT_S = 4.0
"""The same if all neighbours are doubted. Not at once: they may be honest, and as busy as the origin."""
OFFERED = 512
"""Chunks that one request to the origin names: a sample of those missing, so that requests stay small."""
REST_FIRST_S = 0.1
REST_MAX_S = 1.0
LOOK_S_PER_CHUNK = 1e-5
GIVE_UP_S = 6.0
"""Seconds after which an origin that fails ends the fetch, if nothing comes from others either."""
STUCK_S = 120.0


class OriginFetch:
    """Ask the origin and the seeds for chunks that no neighbour holds."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._fetcher = fetch.fetcher
        self._under_way = 0
        """Requests to the origin, and its downloads."""
        self._asking: set[ChunkDownload] = set()
        """Requests for which the origin has not chosen a chunk yet."""
        self._heard = fetch.begun
        """Time at which the origin last answered anything but a refusal: until then it is only busy."""
        self._rest = REST_FIRST_S
        self._resting_until = 0.0
        self._failing_since: float | None = None
        self._absent: dict[str, set[bytes]] = {seed.name: set() for seed in fetch.fetcher.seeds}

    async def run(self) -> None:
        """Ask the origin whenever there is something to ask for."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                now = time.monotonic()
                self._give_up(now)
                if now < self._resting_until:
                    await asyncio.sleep(self._resting_until - now)
                elif self._under_way >= self._fetch.depth() or self._fetch.full():
                    await self._fetch.news.wait()
                elif len(wanted := self._wanted(now)) <= len(self._asking):
                    await self._look_later()
                else:
                    self._under_way += 1
                    download = self._fetch.download(self._fetch.origin, None)
                    self._asking.add(download)
                    task = tasks.create_task(self._ask(wanted, download))
                    task.add_done_callback(partial(self._ended, download))
                    await asyncio.sleep(0)  # it takes its chunk at once where it may choose

    def _ended(self, download: ChunkDownload, _: asyncio.Task[None]) -> None:
        self._under_way -= 1
        self._asking.discard(download)
        self._fetch.news.fire()

    async def _look_later(self) -> None:
        """Wait for news; the least wait grows with the missing chunks that the next check goes through."""
        await asyncio.sleep(LOOK_S_PER_CHUNK * len(self._fetch.state.missing))
        await self._fetch.news.wait()

    # -- the origin ------------------------------------------------------------------------------

    def _wanted(self, now: float) -> list[ChunkRef]:
        state, origin = self._fetch.state, self._fetch.origin
        if self._impatient(now) or now > self._fetch.due:
            return state.untouched(origin, now)
        unheld = state.unheld(origin, now)
        awake = [seed for seed in self._fetcher.seeds if self._awake(seed, now)]
        if not awake:
            return unheld
        return [
            chunk
            for chunk in unheld
            if all(chunk.digest in self._absent[seed.name] for seed in awake)
        ]

    def _impatient(self, now: float) -> bool:
        """Return whether to ask even for chunks that the origin has sent to others."""
        quiet = now - self._fetch.progressed
        if quiet <= DOUBT_S:
            return False
        return quiet > PATIENCE_S or all(
            self._fetch.state.doubted(peer, now) for peer in self._fetch.neighbours
        )

    async def _ask(self, wanted: list[ChunkRef], download: ChunkDownload) -> None:
        now = time.monotonic()
        urgent = not self._fetch.neighbours or self._impatient(now)
        chance = self._fetch.state.chance
        offered = chance.sample(wanted, OFFERED) if len(wanted) > OFFERED else wanted
        paths, scores = self._fetcher.paths, self._fetcher.scores
        around = paths if scores.detoured(download.source, now) else None
        try:
            won = await self._fetch.attempt(
                download, lambda: self._get(offered, download, urgent, around)
            )
        except Refused as refusal:
            self._refused(refusal, offered)
        except RemoteProtocolError as error:
            logger.warning("bad chunk from %s: %s", short(download.source), error)
            self._fetcher.peers.blame(download.source, error.reason)
            self._failed()
        except TransportError as error:
            logger.info("no chunk from %s: %s", short(download.source), error)
            self._fetcher.peers.failed(download.source)
            if paths is not None:
                scores.path_failed(download.source, time.monotonic(), detour=around is not None)
            self._failed()
        else:
            if won and download.chunk is not None:
                self._served(download, download.chunk)
        finally:
            self._heard = max(self._heard, download.heard)
            self._asking.discard(download)

    async def _get(
        self,
        offered: Sequence[ChunkRef],
        download: ChunkDownload,
        urgent: bool,
        around: PeerPaths | None,
    ) -> bytes | None:
        if around is not None:
            chunk = self._fetch.state.chance.choice(offered)
            self._take(chunk, download)
            return await around.get(download.source, chunk, deadline=_other_way_s(chunk))
        return await self._fetcher.client.any(
            offered, download, urgent=urgent, take=lambda chunk: self._take(chunk, download)
        )

    def _take(self, chunk: ChunkRef, download: ChunkDownload) -> bool:
        """Begin with the chunk that the origin chose; return whether it is still wanted."""
        now = time.monotonic()
        wanted = self._fetch.state.wants(chunk.digest, download.source, now)
        if wanted:
            download.begun = now
            self._asking.discard(download)
            self._fetch.state.begin(chunk, download)
            self._fetch.state.starts(download, now)
        self._fetch.news.fire()
        return wanted

    def _served(self, download: ChunkDownload, chunk: ChunkRef) -> None:
        self._rest = REST_FIRST_S
        self._failing_since = None
        self._fetcher.peers.served(download.source, chunk.size, time.monotonic() - download.begun)

    def _refused(self, refusal: Refused, offered: Sequence[ChunkRef]) -> None:
        if refusal.reason == Reason.NOT_FOUND:
            # The origin will not get them back: the caller plans again, for a newer version.
            names = ", ".join(short(chunk.digest) for chunk in offered[:3])
            self._fetch.fail(
                NetworkError(f"no longer kept by anybody: {len(offered)} chunk(s), {names}")
            )
        elif refusal.reason in (Reason.NOT_YET, Reason.BUSY, Reason.RATE_LIMITED):
            self._failing_since = None
            self._heard = time.monotonic()
            self._pause()
        else:
            logger.info("%s refuses: %s", short(self._fetch.origin), refusal)
            self._failed()

    def _failed(self) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        self._pause()

    def _pause(self) -> None:
        self._resting_until = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, REST_MAX_S)

    def _give_up(self, now: float) -> None:
        """End the fetch if nobody has anything for us; a long queue is no reason.

        Queues of neighbours count for STUCK_S, in case they lie; those of the origin always.
        """
        fetch = self._fetch
        self._heard = max(self._heard, *(request.heard for request in self._asking), 0.0)
        last = max(self._heard, fetch.progressed)
        since = self._failing_since
        failing = since is not None and now - max(since, last, fetch.heard) > GIVE_UP_S
        if failing or now - max(last, fetch.state.touched) > STUCK_S:
            missing = len(self._fetch.state.missing)
            self._fetch.fail(NetworkError(f"{missing} chunk(s) could not be fetched from anybody"))

    # -- seeds -----------------------------------------------------------------------------------

    async def run_seed(self, seed: ChunkSource) -> None:
        """Fetch chunks that no neighbour holds from a seed."""
        while True:
            now = time.monotonic()
            absent = self._absent[seed.name]
            source = seed.name.encode()
            free = [
                chunk
                for chunk in self._fetch.state.unheld(source, now)
                if chunk.digest not in absent
            ]
            if not self._awake(seed, now) or not free or self._fetch.full():
                await self._fetch.news.wait()
            else:
                await self._ask_seed(seed, self._fetch.state.chance.choice(free))

    def _awake(self, seed: ChunkSource, now: float) -> bool:
        name, scores = seed.name.encode(), self._fetcher.scores
        return not scores.resting(name, now) and not scores.shunned(name, now)

    async def _ask_seed(self, seed: ChunkSource, chunk: ChunkRef) -> None:
        download = self._fetch.download(seed.name.encode(), chunk, sending=True)
        deadline = _other_way_s(chunk)
        try:
            await self._fetch.attempt(download, lambda: seed.get(chunk, deadline=deadline))
        except Refused:
            self._absent[seed.name].add(chunk.digest)
        except RemoteProtocolError as error:
            logger.warning("bad chunk from %s: %s", seed.name, error)
            self._fetcher.scores.lied(download.source, time.monotonic())
        except TransportError as error:
            logger.info("no chunk from %s: %s", seed.name, error)
            self._fetcher.scores.rest(download.source, time.monotonic())


MAX_NEIGHBOURS = 8
"""Peers that take part in a fetch, without those that give nothing when asked."""
MAX_TRIED = 24
"""Peers that take part in a fetch, with those."""
MAX_HOLDERS = 4
"""Places of these for peers that only claim by gossip to hold the version: liars never get all places."""
MAX_HEARSAY = 16
"""Peers, drawn at random, that are considered of those known from gossip only."""
FIRST_LOOK_S = 0.5
"""Seconds after which the origin is asked, unless all neighbours have listed their chunks before."""
STEP_S = 0.04
STEPS_MAX_S = 0.25
"""If there are too few chunks to share out, a worker waits this long for each worker before it."""
FEW_CHUNKS = 4
MAX_SHOWN = 60
"""Most sources listed in statistics, which have to fit into a message."""
AT_ONCE = MAX_WATCHED * WATCHES_PER_PEER // 2
"""Most chunks of one fetch: half of the watches that a peer allows, so that another fetch fits beside it."""


PACES = 16
"""Fetches whose times are remembered."""

Holders = Callable[[], Collection[bytes]]
"""List the peers that hold the version according to gossip; called again during a fetch."""


class BlobFetcher:
    """Fetch chunks for this node; BlobServer serves them."""

    def __init__(
        self,
        links: ConnectionPool,
        peers: PeerTable,
        store: Store,
        arrivals: ChunkArrivals,
        *,
        seeds: Sequence[ChunkSource] = (),
        paths: PeerPaths | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        """`seeds` are asked before the origin; `paths` lead to peers that iroh does not reach."""
        self.place = 0
        """Number of workers before this one: they get a small artifact first and pass it on."""
        self.fetched = RecentCounter[bytes](MAX_PEERS)
        """Good chunk bytes by source: node ids, and names of seeds."""
        self.wasted = RecentCounter[bytes](MAX_PEERS)
        """Bytes that were wrong, or came a second time, by source."""
        self.chance = random.Random()
        self.pacer = pacer or Pacer()
        self.client = ChunkClient(links, self.pacer)
        self.peers = peers
        self.store = store
        self.arrivals = arrivals
        self.scores = PeerScores()
        self._paces: deque[tuple[int, float]] = deque(maxlen=PACES)
        """(bytes, seconds) of the last fetches."""
        self.seeds = tuple(seeds)
        self.paths = paths

    async def fetch(
        self,
        chunks: Sequence[ChunkRef],
        neighbours: Sequence[bytes],
        origin: bytes,
        *,
        holders: Holders = tuple,
    ) -> None:
        """Bring all `chunks` into the store, from `neighbours` if possible, else from `origin`.

        `holders()` lists peers that claim to have them: such neighbours are preferred, and a few other holders
        are watched too. Raises NetworkError if a chunk could not be fetched from anybody, or `origin` no longer
        keeps it; StorageError if the store is full.
        """
        for start in range(0, len(chunks), AT_ONCE):
            missing = await asyncio.to_thread(self._missing, chunks[start : start + AT_ONCE])
            if missing:
                with self.arrivals.expecting(missing):
                    await self._run(missing, neighbours, origin, holders)

    def by_source(self, trainer: bytes) -> dict[str, int]:
        """Return bytes fetched, by `trainer`, seed name or short id; the smallest are joined as `others`."""
        names = {seed.name.encode(): seed.name for seed in self.seeds} | {trainer: "trainer"}
        shown: Counter[str] = Counter()
        for rank, (source, size) in enumerate(self.fetched.most_common()):
            shown["others" if rank >= MAX_SHOWN else names.get(source, short(source))] += size
        return dict(shown)

    def _missing(self, chunks: Sequence[ChunkRef]) -> dict[bytes, ChunkRef]:
        return {chunk.digest: chunk for chunk in chunks if not self.store.has(chunk.digest)}

    async def _run(
        self,
        missing: dict[bytes, ChunkRef],
        neighbours: Sequence[bytes],
        origin: bytes,
        holders: Holders,
    ) -> None:
        line = [peer for peer in neighbours if peer != origin]
        ranked = self._choose_neighbours(line, holders())
        chosen, spare = ranked[:MAX_NEIGHBOURS], ranked[MAX_NEIGHBOURS:]
        few = len(missing) <= max(FEW_CHUNKS, len(chosen))
        # A peer known from gossip alone, that never served, delays nothing and spares the origin nothing.
        # Nor does one that gave nothing in the last fetch.
        hoped = {
            peer
            for peer in chosen
            if (peer in line or self.peers.has_served(peer)) and not self.scores.stalled(peer)
        }
        size = sum(chunk.size for chunk in missing.values())
        usual_s = self._usual_s(size)
        fetch = Fetch(self, missing, origin, hoped, usual_s)
        async with asyncio.TaskGroup() as tasks:
            followed = [NeighbourFetch(fetch, peer) for peer in chosen]
            working = [tasks.create_task(neighbour.run()) for neighbour in followed]
            awaited = [neighbour for neighbour in followed if neighbour.peer in hoped] or followed
            working.append(tasks.create_task(self._from_origin(fetch, awaited, few)))
            working.append(tasks.create_task(self._try_more(fetch, chosen, spare, holders)))
            working.append(tasks.create_task(fetch.dispatch()))
            working.append(tasks.create_task(fetch.announce()))
            await fetch.over.wait()
            self._judge(fetch)
            for task in working:
                task.cancel()
        if fetch.error is not None:
            raise fetch.error
        seconds = time.monotonic() - fetch.begun
        if usual_s is not None:
            seconds = min(seconds, USUAL_GROWTH * usual_s)
        self._paces.append((size, seconds))

    def _usual_s(self, size: int) -> float | None:
        """Return the seconds of the faster of the last fetches of about `size` bytes; None without any."""
        alike = sorted(seconds for other, seconds in self._paces if size / 2 <= other <= size * 2)
        return alike[len(alike) // 4] if alike else None

    def _judge(self, fetch: Fetch) -> None:
        """Record how long each source kept this fetch waiting in vain."""
        now = time.monotonic()
        for source, account in fetch.state.accounts.items():
            doubted = fetch.state.doubted(source, now)
            if doubted and not account.delivered:
                logger.info("%s claimed chunks and gave none in time", short(source))
                self.peers.failed(source)
            self.scores.fetched(
                source,
                now,
                waited=fetch.state.waited(source, now),
                delivered=account.delivered > 0,
                doubted=doubted,
                idle=fetch.state.idle(source, now),
                seconds=now - fetch.begun,
            )

    def _choose_neighbours(self, line: Sequence[bytes], holders: Collection[bytes]) -> list[bytes]:
        """Order the peers to ask: the first in the trainer's order, some holders, then others at random.

        Peers that keep failing are mostly left out, and for some time those that lied or repeatedly kept us
        waiting in vain.
        """
        now = time.monotonic()
        honest = [peer for peer in dict.fromkeys(line) if not self._left_out(peer, now)]
        honest.sort(key=self.scores.stalled)  # stable: those that stalled come last
        ranked = self._ranked([*honest[1:], *self._hearsay(holders, line)])
        claiming = [peer for peer in ranked if peer in holders][:MAX_HOLDERS]
        others = [peer for peer in ranked if peer in honest and peer not in claiming]
        return [*honest[:1], *claiming, *others]

    def _left_out(self, peer: bytes, now: float) -> bool:
        return self.scores.shunned(peer, now) or self.scores.passed_over(peer, now)

    def _ranked(self, peers: Sequence[bytes]) -> list[bytes]:
        """Order at random, weighted by success times bandwidth, mostly without peers that keep failing."""
        keys = {
            peer: self.chance.random() ** (1.0 / self.peers.weight(peer))
            for peer in peers
            if self.chance.random() < self.peers.reliability(peer) ** 2
        }
        return sorted(keys, key=lambda peer: -keys[peer])

    def _hearsay(self, holders: Collection[bytes], known: Collection[bytes]) -> list[bytes]:
        """Draw a few of the holders known from gossip only."""
        now = time.monotonic()
        new = [peer for peer in holders if peer not in known and not self._left_out(peer, now)]
        return self.chance.sample(new, min(len(new), MAX_HEARSAY))

    async def _try_more(
        self, fetch: Fetch, chosen: Sequence[bytes], spare: Sequence[bytes], holders: Holders
    ) -> None:
        """Replace sources that give nothing: first in the trainer's order, then by gossip."""
        waiting = deque(spare)
        known, heard = {fetch.origin, *chosen}, 0
        async with asyncio.TaskGroup() as tasks:
            while len(known) <= MAX_TRIED:
                await asyncio.sleep(fetch.look_s)
                now = time.monotonic()
                giving = sum(fetch.state.gives(peer, now) for peer in known)
                free = max(0, min(MAX_NEIGHBOURS - giving, MAX_TRIED + 1 - len(known)))
                more = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                fetch.neighbours.update(peer for peer in more if not self.scores.stalled(peer))
                free = min(free - len(more), MAX_HOLDERS - heard)
                if free > 0:
                    named = self._ranked(self._hearsay(holders(), [*known, *more, *waiting]))[:free]
                    heard += len(named)
                    more += named
                known.update(more)
                for peer in more:
                    tasks.create_task(NeighbourFetch(fetch, peer).run())

    async def _from_origin(
        self, fetch: Fetch, followed: Sequence[NeighbourFetch], few: bool
    ) -> None:
        await self._first_look(followed, fetch.state.patience)
        if few and followed:
            await asyncio.sleep(min(self.place * STEP_S, STEPS_MAX_S))
        origin = OriginFetch(fetch)
        async with asyncio.TaskGroup() as tasks:
            for seed in self.seeds:
                for _ in range(DEPTH):
                    tasks.create_task(origin.run_seed(seed))
            tasks.create_task(origin.run())

    async def _first_look(self, followed: Sequence[NeighbourFetch], patience: float) -> None:
        """Wait until the neighbours have listed their chunks, so that the origin is not asked for these."""
        awaited = [neighbour for neighbour in followed if self.scores.awaited(neighbour.peer)]
        try:
            async with asyncio.timeout(min(FIRST_LOOK_S, patience)):
                for neighbour in awaited:
                    await neighbour.looked.wait()
        except TimeoutError:
            for neighbour in awaited:
                if not neighbour.looked.is_set():
                    self.scores.silent(neighbour.peer)
                    self.peers.failed(neighbour.peer)
