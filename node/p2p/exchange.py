"""Fetches chunks into the store: from many neighbours at once, and as little as possible from the origin.

Every chunk is verified before it is stored, and only what is stored is used or served on. A fetch that was
killed goes on where it was: what is in the store is never fetched again.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from ...crypto.hashing import short
from ...protocol.manifests import ChunkRef
from ...protocol.messages import MAX_WATCHED
from ..storage.chunk_store import Store
from .arrivals import Arrivals
from .blobs import WATCHES_PER_PEER
from .board import Board
from .chunk_source import ChunkSource, PeerPaths
from .downloads import Downloads
from .job import DEPTH, DEPTH_MAX, Job, Tools
from .links import Links
from .neighbours import Neighbour
from .origin import Origin
from .peers import PeerTable
from .standing import Standing

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
        links: Links,
        peers: PeerTable,
        store: Store,
        arrivals: Arrivals,
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
        self._tools = Tools(
            downloads=Downloads(links),
            peers=peers,
            store=store,
            arrivals=arrivals,
            standing=Standing(),
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
        job = Job(self._tools, Board(missing, self._chance), origin, hoped)
        async with asyncio.TaskGroup() as tasks:
            followed = [Neighbour(job, peer) for peer in chosen]
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

    async def _hear_of_more(self, job: Job, known: set[bytes], holders: Holders) -> None:
        """Watch holders of whom gossip tells only now; `known` are those that are in the fetch already."""
        places = min(MAX_HOLDERS, MAX_NEIGHBOURS + 1 - len(known))
        async with asyncio.TaskGroup() as tasks:
            while places > 0:
                await asyncio.sleep(HEARSAY_S)
                for peer in self._ranked(self._hearsay(holders(), known))[:places]:
                    known.add(peer)
                    places -= 1
                    tasks.create_task(Neighbour(job, peer).run())

    async def _from_origin(self, job: Job, followed: Sequence[Neighbour], few: bool) -> None:
        await self._first_look(followed)
        if few and followed:
            await asyncio.sleep(min(self.place * STEP_S, STEPS_MAX_S))
        origin = Origin(job)
        async with asyncio.TaskGroup() as tasks:
            for seed in self._tools.seeds:
                for _ in range(DEPTH):
                    tasks.create_task(origin.run_seed(seed))
            for number in range(DEPTH_MAX):
                tasks.create_task(origin.run(number))

    async def _first_look(self, followed: Sequence[Neighbour]) -> None:
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
