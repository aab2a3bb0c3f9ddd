"""Fetches chunks into the store: from many neighbours at once, and as little as possible from the origin.

Every chunk is verified before it is stored, and only what is stored is used or served on. A fetch that was
killed goes on where it was: what is in the store is never fetched again.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ...protocol.messages import MAX_WATCHED
from ..ops.errors import NetworkError
from ..storage.chunk_store import Store
from .connections import ConnectionPool
from .download_state import (
    DEPTH,
    DEPTH_MAX,
    SILENT_S,
    ChunkDownload,
    ChunkSource,
    Downloads,
    DownloadState,
    Fetch,
    FetchServices,
    PeerPaths,
    PeerScores,
    gone_from_origin,
    other_way_s,
)
from .peers import PeerTable
from .rpc import Refused
from .serve import WATCHES_PER_PEER, ChunkArrivals
from .transport import TransportError

logger = logging.getLogger(__name__)

FAILURES = 2
"""In a row, after which a neighbour is left out of this fetch."""
BUSY_S = 0.25
WATCH_AGAIN_S = 0.25
BLIND_S = 1.0
"""Between two tries at a neighbour that cannot tell us what it holds."""


class NeighbourFetch:
    """One neighbour in one fetch."""

    def __init__(self, job: Fetch, peer: bytes) -> None:
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


PATIENCE_S = 10.0
"""Without any progress for this long the origin is asked to send whatever it sent to others."""
OFFERED = 512
"""Chunks that one question to the origin names: a sample of what is missing, so that questions stay small."""
REST_FIRST_S = 0.1
REST_MAX_S = 1.0
LOOK_S_PER_CHUNK = 1e-5
GIVE_UP_S = 6.0
"""An origin that fails for so long, while nothing comes from others, ends the fetch."""
STUCK_S = 120.0


class OriginFetch:
    """The origin in one fetch; loops number 0 to n - 1 share it."""

    def __init__(self, job: Fetch) -> None:
        self._job = job
        self._tools = job.tools
        self._asked = 0
        """Questions that were not answered yet."""
        self._rest = REST_FIRST_S
        self._resting_until = 0.0
        self._failing_since: float | None = None
        self._absent: dict[str, set[bytes]] = {seed.name: set() for seed in job.tools.seeds}

    async def run(self, number: int) -> None:
        """Ask the origin whenever there is something to ask for."""
        while True:
            now = time.monotonic()
            self._give_up(now)
            if now < self._resting_until:
                await asyncio.sleep(self._resting_until - now)
            elif number >= self._job.depth() or self._job.full():
                await self._job.wait_news()
            elif len(wanted := self._wanted(now)) <= self._asked:
                await self._look_later()
            else:
                await self._ask(wanted)

    async def _look_later(self) -> None:
        """Looking takes time in proportion to what is missing: not at every piece of news."""
        await asyncio.sleep(LOOK_S_PER_CHUNK * len(self._job.board.missing))
        await self._job.wait_news()

    # -- the origin ------------------------------------------------------------------------------

    def _wanted(self, now: float) -> list[ChunkRef]:
        board, origin = self._job.board, self._job.origin
        if self._impatient(now):
            return board.untouched(origin, now)
        unheld = board.unheld(origin, now)
        awake = [one for one in self._tools.seeds if self._awake(one, now)]
        if not awake:
            return unheld
        return [
            chunk
            for chunk in unheld
            if all(chunk.digest in self._absent[seed.name] for seed in awake)
        ]

    def _impatient(self, now: float) -> bool:
        return now - self._job.progressed > PATIENCE_S

    async def _ask(self, wanted: list[ChunkRef]) -> None:
        now = time.monotonic()
        urgent = not self._job.neighbours or self._impatient(now)
        chance = self._job.board.chance
        offered = chance.sample(wanted, OFFERED) if len(wanted) > OFFERED else wanted
        pull = self._job.pull(self._job.origin, None)
        self._asked += 1
        paths, standing = self._tools.paths, self._tools.standing
        around = paths if standing.detoured(pull.source, now) else None
        try:
            won = await self._job.attempt(pull, lambda: self._get(offered, pull, urgent, around))
        except Refused as refusal:
            self._refused(refusal, offered)
        except RemoteProtocolError as error:
            logger.warning("bad chunk from %s: %s", short(pull.source), error)
            self._tools.peers.blame(pull.source, error.reason)
            self._failed()
        except TransportError as error:
            logger.info("no chunk from %s: %s", short(pull.source), error)
            self._tools.peers.failed(pull.source)
            if paths is not None:
                standing.path_failed(pull.source, time.monotonic(), detour=around is not None)
            self._failed()
        else:
            if won and pull.chunk is not None:
                self._served(pull, pull.chunk)
        finally:
            if pull.chunk is None:
                self._asked -= 1

    async def _get(
        self,
        offered: Sequence[ChunkRef],
        pull: ChunkDownload,
        urgent: bool,
        around: PeerPaths | None,
    ) -> bytes | None:
        if around is not None:
            chunk = self._job.board.chance.choice(offered)
            self._take(chunk, pull)
            return await around.get(pull.source, chunk, deadline=other_way_s(chunk))
        return await self._tools.downloads.any(
            offered, pull, urgent=urgent, take=lambda chunk: self._take(chunk, pull)
        )

    def _take(self, chunk: ChunkRef, pull: ChunkDownload) -> bool:
        """The origin chose; whether we still want it."""
        now = time.monotonic()
        wanted = self._job.board.wants(chunk.digest, pull.source, now)
        if wanted:
            pull.begun = now
            self._asked -= 1
            self._job.board.begin(chunk, pull)
            self._job.board.starts(pull, now)
        self._job.told()
        return wanted

    def _served(self, pull: ChunkDownload, chunk: ChunkRef) -> None:
        self._rest = REST_FIRST_S
        self._failing_since = None
        self._tools.peers.served(pull.source, chunk.size, time.monotonic() - pull.begun)

    def _refused(self, refusal: Refused, offered: Sequence[ChunkRef]) -> None:
        if refusal.reason == Reason.NOT_FOUND:
            self._job.fail(gone_from_origin(offered))
        elif refusal.reason in (Reason.NOT_YET, Reason.BUSY, Reason.RATE_LIMITED):
            self._failing_since = None
            self._pause()
        else:
            logger.info("%s refuses: %s", short(self._job.origin), refusal)
            self._failed()

    def _failed(self) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        self._pause()

    def _pause(self) -> None:
        self._resting_until = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, REST_MAX_S)

    def _give_up(self, now: float) -> None:
        quiet = now - self._job.progressed
        failing = self._failing_since is not None and now - self._failing_since > GIVE_UP_S
        stuck = min(quiet, now - self._job.board.touched) > STUCK_S
        if stuck or (failing and quiet > GIVE_UP_S):
            left = len(self._job.board.missing)
            self._job.fail(NetworkError(f"{left} chunk(s) could not be fetched from anybody"))

    # -- seeds -----------------------------------------------------------------------------------

    async def run_seed(self, seed: ChunkSource) -> None:
        """Fetch from a seed what no neighbour holds."""
        while True:
            now = time.monotonic()
            absent = self._absent[seed.name]
            source = seed.name.encode()
            free = [
                chunk for chunk in self._job.board.unheld(source, now) if chunk.digest not in absent
            ]
            if not self._awake(seed, now) or not free or self._job.full():
                await self._job.wait_news()
            else:
                await self._ask_seed(seed, self._job.board.chance.choice(free))

    def _awake(self, seed: ChunkSource, now: float) -> bool:
        name, standing = seed.name.encode(), self._tools.standing
        return not standing.resting(name, now) and not standing.shunned(name, now)

    async def _ask_seed(self, seed: ChunkSource, chunk: ChunkRef) -> None:
        pull = self._job.pull(seed.name.encode(), chunk, sending=True)
        deadline = other_way_s(chunk)
        try:
            await self._job.attempt(pull, lambda: seed.get(chunk, deadline=deadline))
        except Refused:
            self._absent[seed.name].add(chunk.digest)
        except RemoteProtocolError as error:
            logger.warning("bad chunk from %s: %s", seed.name, error)
            self._tools.standing.lied(pull.source, time.monotonic())
        except TransportError as error:
            logger.info("no chunk from %s: %s", seed.name, error)
            self._tools.standing.rest(pull.source, time.monotonic())


MAX_NEIGHBOURS = 8
MAX_HOLDERS = 4
"""Places of these that go to whoever says by gossip that it holds what we fetch: liars never get them all."""
MAX_HEARSAY = 16
"""Of those whom only gossip names, so many at random are looked at, however many there are."""
HEARSAY_S = 0.25
"""How often a fetch looks whether gossip told of more holders."""
FIRST_LOOK_S = 0.5
"""How long the origin is spared until all neighbours have said what they hold."""
STEP_S = 0.04
STEPS_MAX_S = 0.25
"""In a line of workers each lets those before it go first, where there are too few chunks to share out."""
FEW_CHUNKS = 4
MAX_SHOWN = 60
"""Sources told apart in statistics, which have to fit a message."""
AT_ONCE = MAX_WATCHED * WATCHES_PER_PEER // 2
"""Chunks of one job: what a peer lets us watch, with room for a fetch that goes on beside this one."""


Holders = Callable[[], Collection[bytes]]
"""Who holds what is fetched, as far as gossip tells; asked again while a fetch goes on."""


def _nobody() -> Collection[bytes]:
    return ()


class BlobFetcher:
    """The fetching half of the exchange; BlobServer is the other."""

    def __init__(
        self,
        links: ConnectionPool,
        peers: PeerTable,
        store: Store,
        arrivals: ChunkArrivals,
        *,
        seeds: Sequence[ChunkSource] = (),
        paths: PeerPaths | None = None,
    ) -> None:
        """`seeds` are asked before the origin; `paths` lead to peers whom iroh does not reach."""
        self.place = 0
        """How many workers come before us in the line: they get a small artifact first and pass it on."""
        self.fetched: Counter[bytes] = Counter()
        """Good chunk bytes by source: node ids, and names of seeds."""
        self.wasted: Counter[bytes] = Counter()
        """Bytes that were wrong, or came a second time, by source."""
        self._chance = random.Random()
        self._tools = FetchServices(
            downloads=Downloads(links),
            peers=peers,
            store=store,
            arrivals=arrivals,
            standing=PeerScores(),
            seeds=tuple(seeds),
            paths=paths,
            fetched=self.fetched,
            wasted=self.wasted,
        )

    async def fetch(
        self,
        chunks: Sequence[ChunkRef],
        neighbours: Sequence[bytes],
        origin: bytes,
        *,
        holders: Holders = _nobody,
    ) -> None:
        """Bring all `chunks` into the store, from `neighbours` if possible, else from `origin`.

        `holders()` are said to have them by now: such neighbours are preferred, some others watched too.

        Raises:
            NetworkError: some chunk could not be had from anybody, or `origin` keeps it no longer.
            StorageError: the store takes no more.
        """
        for start in range(0, len(chunks), AT_ONCE):
            missing = await asyncio.to_thread(self._missing, chunks[start : start + AT_ONCE])
            if missing:
                with self._tools.arrivals.expecting(missing):
                    await self._run(missing, neighbours, origin, holders)

    def by_source(self, trainer: bytes) -> dict[str, int]:
        """fetched, for people: `trainer`, names of seeds, short ids; the smallest of many are `others`."""
        names = {seed.name.encode(): seed.name for seed in self._tools.seeds} | {trainer: "trainer"}
        shown: Counter[str] = Counter()
        for rank, (source, size) in enumerate(self.fetched.most_common()):
            shown["others" if rank >= MAX_SHOWN else names.get(source, short(source))] += size
        return dict(shown)

    def _missing(self, chunks: Sequence[ChunkRef]) -> dict[bytes, ChunkRef]:
        store = self._tools.store
        return {chunk.digest: chunk for chunk in chunks if not store.has(chunk.digest)}

    async def _run(
        self,
        missing: dict[bytes, ChunkRef],
        neighbours: Sequence[bytes],
        origin: bytes,
        holders: Holders,
    ) -> None:
        line = [peer for peer in neighbours if peer != origin]
        chosen = self._choose(line, holders())
        few = len(missing) <= max(FEW_CHUNKS, len(chosen))
        # What is only heard of keeps nobody waiting, and the origin from nothing, before it has ever served.
        hoped = {peer for peer in chosen if peer in line or self._tools.peers.has_served(peer)}
        job = Fetch(self._tools, DownloadState(missing, self._chance), origin, hoped)
        async with asyncio.TaskGroup() as tasks:
            followed = [NeighbourFetch(job, peer) for peer in chosen]
            working = [tasks.create_task(one.run()) for one in followed]
            awaited = [one for one in followed if one.peer in hoped] or followed
            working.append(tasks.create_task(self._from_origin(job, awaited, few)))
            working.append(tasks.create_task(self._hear_of_more(job, {origin, *chosen}, holders)))
            await job.over.wait()
            for task in working:
                task.cancel()
        if job.error is not None:
            raise job.error

    def _choose(self, line: Sequence[bytes], holders: Collection[bytes]) -> list[bytes]:
        """The first of the line, some holders, then others of the line: at random, so that the slow get probed.

        Who keeps failing is mostly left out, and who lied is for some time.
        """
        now = time.monotonic()
        standing = self._tools.standing
        honest = [peer for peer in dict.fromkeys(line) if not standing.shunned(peer, now)]
        ranked = self._ranked([*honest[1:], *self._hearsay(holders, line)])
        claiming = [peer for peer in ranked if peer in holders][:MAX_HOLDERS]
        others = [peer for peer in ranked if peer in honest and peer not in claiming]
        return [*honest[:1], *claiming, *others][:MAX_NEIGHBOURS]

    def _ranked(self, peers: Sequence[bytes]) -> list[bytes]:
        """In random order weighted by success times bandwidth, mostly without those who keep failing."""
        table = self._tools.peers
        keys = {
            peer: self._chance.random() ** (1.0 / table.weight(peer))
            for peer in peers
            if self._chance.random() < table.reliability(peer) ** 2
        }
        return sorted(keys, key=lambda peer: -keys[peer])

    def _hearsay(self, holders: Collection[bytes], known: Collection[bytes]) -> list[bytes]:
        """A few of the holders whom nobody but gossip names."""
        now = time.monotonic()
        standing = self._tools.standing
        new = [peer for peer in holders if peer not in known and not standing.shunned(peer, now)]
        return self._chance.sample(new, min(len(new), MAX_HEARSAY))

    async def _hear_of_more(self, job: Fetch, known: set[bytes], holders: Holders) -> None:
        """Watch holders of whom gossip tells only now; `known` are those that are in the fetch already."""
        places = min(MAX_HOLDERS, MAX_NEIGHBOURS + 1 - len(known))
        async with asyncio.TaskGroup() as tasks:
            while places > 0:
                await asyncio.sleep(HEARSAY_S)
                for peer in self._ranked(self._hearsay(holders(), known))[:places]:
                    known.add(peer)
                    places -= 1
                    tasks.create_task(NeighbourFetch(job, peer).run())

    async def _from_origin(self, job: Fetch, followed: Sequence[NeighbourFetch], few: bool) -> None:
        await self._first_look(followed)
        if few and followed:
            await asyncio.sleep(min(self.place * STEP_S, STEPS_MAX_S))
        origin = OriginFetch(job)
        async with asyncio.TaskGroup() as tasks:
            for seed in self._tools.seeds:
                for _ in range(DEPTH):
                    tasks.create_task(origin.run_seed(seed))
            for number in range(DEPTH_MAX):
                tasks.create_task(origin.run(number))

    async def _first_look(self, followed: Sequence[NeighbourFetch]) -> None:
        """Hear what the neighbours hold, so that the origin is not asked for it."""
        standing = self._tools.standing
        awaited = [one for one in followed if standing.awaited(one.peer)]
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                for one in awaited:
                    await one.looked.wait()
        except TimeoutError:
            for one in awaited:
                if not one.looked.is_set():
                    standing.silent(one.peer)
                    self._tools.peers.failed(one.peer)
