"""Fetches chunks into the store: from many neighbours at once, and as little as possible from the origin.

Every chunk is verified before it is stored, and only what is stored is used or served on. A fetch that was
killed goes on where it was: what is in the store is never fetched again.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

from ...crypto.hashing import short
from ...protocol.manifests import ChunkRef
from ...protocol.messages import MAX_WATCHED
from ..store import Store
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
        self, chunks: Sequence[ChunkRef], neighbours: Sequence[bytes], origin: bytes
    ) -> None:
        """Bring all `chunks` into the store, from `neighbours` if possible, else from `origin`.

        Raises:
            NetworkError: some chunk could not be had from anybody, or `origin` keeps it no longer.
            StorageError: the store takes no more.
        """
        for start in range(0, len(chunks), AT_ONCE):
            missing = await asyncio.to_thread(self._missing, chunks[start : start + AT_ONCE])
            if missing:
                with self._tools.arrivals.expecting(missing):
                    await self._run(missing, neighbours, origin)

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
        self, missing: dict[bytes, ChunkRef], neighbours: Sequence[bytes], origin: bytes
    ) -> None:
        chosen = self._choose([peer for peer in neighbours if peer != origin])
        few = len(missing) <= max(FEW_CHUNKS, len(chosen))
        job = Job(self._tools, Board(missing, self._chance), origin, set(chosen))
        async with asyncio.TaskGroup() as tasks:
            followed = [Neighbour(job, peer) for peer in chosen]
            working = [tasks.create_task(one.run()) for one in followed]
            working.append(tasks.create_task(self._from_origin(job, followed, few)))
            await job.over.wait()
            for task in working:
                task.cancel()
        if job.error is not None:
            raise job.error

    def _choose(self, peers: Sequence[bytes]) -> list[bytes]:
        """The first, and others at random weighted by success times bandwidth, so that the slow get probed.

        Who keeps failing is mostly left out, and who lied is for some time.
        """
        now = time.monotonic()
        table, standing = self._tools.peers, self._tools.standing
        honest = [peer for peer in dict.fromkeys(peers) if not standing.shunned(peer, now)]
        keys = {
            peer: self._chance.random() ** (1.0 / table.weight(peer))
            for peer in honest[1:]
            if self._chance.random() < table.reliability(peer) ** 2
        }
        others = sorted(keys, key=lambda peer: -keys[peer])
        return [*honest[:1], *others][:MAX_NEIGHBOURS]

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
