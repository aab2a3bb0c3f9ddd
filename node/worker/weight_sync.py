"""Keeping a node's weights at the newest policy version: plan, fetch, prove, load; then serve them on.

The engine only ever gets a state whose digest equals the one in the trainer's signed head, or the share of
such a state that it computes with.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import Artifact, ChunkRef, PolicyManifest
from ...protocol.messages import GetHeads, Heads, SyncRecords
from ...protocol.trust import AdmittedHead
from ...protocol.version import ALPN_CONTROL
from ..config.run import WeightsConfig
from ..inference.engine import Engine
from ..ops.errors import NetworkError, StorageError
from ..p2p.connections import ConnectionPool
from ..p2p.download import BlobFetcher
from ..p2p.gossip import read_record
from ..p2p.heads import FAR_BEHIND, INLINE_MANIFEST, HeadStore
from ..p2p.peers import PeerTable, Tier
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError
from ..storage.chunk_store import Store, read_chunk
from ..storage.ledger import Ledger
from ..weights.chain import NOTHING, Needs, NoPath, Step, VersionChain, whole
from ..weights.payload import NeededChunks, TensorShare, everything
from ..weights.replica import Policy, WeightReplica
from ..weights.state import PendingChanges, WeightsError

logger = logging.getLogger(__name__)

RECORDS_TIMEOUT_S = 20.0
SYNC_S = 10.0
"""Between two questions about who else has chunks."""


class Upstreams:
    """The peers to fetch from, first those admitted before us, the nearest first, then others."""

    def __init__(self, run_id: bytes, peers: PeerTable, fetcher: BlobFetcher) -> None:
        self._run_id = run_id
        self._peers = peers
        self._fetcher = fetcher
        self.nodes: list[bytes] = []

    def learn(self, records: Sequence[bytes], later: Sequence[bytes] = ()) -> None:
        """Take in the sealed records of peers that the trainer names as sources: before us, and after us."""
        before = learn_records(self._peers, self._run_id, records)
        self._fetcher.place = len(before)
        self.nodes = before + learn_records(self._peers, self._run_id, later)

    async def keep_asking(
        self, links: ConnectionPool, trainer: bytes, record: Callable[[], bytes]
    ) -> None:
        """Keep knowing who else has chunks, for a node that asks for no leases; `record` makes our own
        sealed peer record."""
        while True:
            try:
                reply = await links.request(
                    trainer,
                    ALPN_CONTROL,
                    SyncRecords((record(),)),
                    SyncRecords,
                    deadline=RECORDS_TIMEOUT_S,
                )
                self.learn(reply.records)
            except (TransportError, Refused, RemoteProtocolError) as error:
                logger.debug("no peer records: %s", error)
            await asyncio.sleep(SYNC_S)


def learn_records(peers: PeerTable, run_id: bytes, records: Sequence[bytes]) -> list[bytes]:
    """Take in sealed peer records that the trainer sent; the nodes that they are of, without the bad ones."""
    nodes: list[bytes] = []
    for sealed in records:
        try:
            record = read_record(sealed, run_id, int(time.time()))
        except RemoteProtocolError as error:
            logger.info("bad peer record from the trainer: %s", error)
            continue
        peers.learn(record, sealed)
        peers.admit(record.node, Tier.MEMBER)
        nodes.append(record.node)
    return nodes


ASK_TIMEOUT_S = 10.0


class UpdatePlanner:
    """Plans over the chain, and learns what the chain lacks."""

    def __init__(
        self,
        *,
        book: HeadStore,
        links: ConnectionPool,
        fetcher: BlobFetcher,
        store: Store,
        trainer: bytes,
        upstreams: Callable[[], Sequence[bytes]],
        peers: PeerTable,
        on_fraud: Callable[[RemoteProtocolError], None],
        needs: Needs = whole,
        newest: Callable[[], AdmittedHead | None] | None = None,
    ) -> None:
        """`needs`: which chunks of an artifact we fetch; `newest`: the head to go for, else the book's."""
        self._needs = needs
        self._newest = newest or book.latest
        self._book = book
        self._links = links
        self._fetcher = fetcher
        self._store = store
        self._trainer = trainer
        self._upstreams = upstreams
        self._peers = peers
        self._on_fraud = on_fraud
        self._term = 0
        self.chain = VersionChain()
        """The versions of the current term whose manifests we know."""

    def forget(self) -> None:
        """What is known leads nowhere: learn it anew."""
        self.chain = VersionChain()

    async def plan(self, head: AdmittedHead, held: Policy) -> tuple[AdmittedHead, list[Step]]:
        """The cheapest way to `head` or, if it moves on meanwhile, to a newer one.

        While what is at hand leads nowhere, asks one source after the other. Raises NoPath, NetworkError.
        """
        if head.head.term != self._term:
            self._term = head.head.term
            self.forget()
        sources = [*self._upstreams(), self._trainer]
        afters = dict.fromkeys((held.version, NOTHING))
        questions = iter([(source, after) for after in afters for source in sources])
        bridges = iter(dict.fromkeys((sources[0], self._trainer)))
        while True:
            await self._learn_manifests(head)
            try:
                steps = await self._cheapest(head, held)
                gap = await self._gap(steps, held)
                source = None if gap is None else next(bridges, None)
                if gap is None or source is None:
                    return head, steps
                question = (source, gap)
            except NoPath:
                question = next(questions, None)
                if question is None:
                    raise
            await self._ask_heads(*question)
            # Sources tell of their newest anchor: by now that may be newer than the head we started for.
            newest = self._newest()
            head = newest if newest and newest.head.term == head.head.term else head

    async def _cheapest(self, head: AdmittedHead, held: Policy) -> list[Step]:
        stored = await asyncio.to_thread(self._store.names)
        return self.chain.plan(
            held.version, held.digest, head.head.version, stored=stored, needs=self._needs
        )

    async def _gap(self, steps: Sequence[Step], held: Policy) -> int | None:
        """After which version to ask for manifests that may spare us an anchor; None if there are none."""
        if not steps or steps[0][1].kind != "anchor":
            return None
        version = steps[0][0]
        needed = self.needed(steps[:1])
        gap = self.chain.gap(held.version, version)
        if gap is None or version - gap > FAR_BEHIND:
            return None
        complete = await asyncio.to_thread(
            lambda: all(self._store.has(chunk.digest) for chunk in needed)
        )
        return None if complete else gap

    def needed(self, steps: Sequence[Step]) -> list[ChunkRef]:
        """The chunks of `steps` that we need, in order; also of artifacts that are in no manifest.

        Raises CodecError.
        """
        chunks: list[ChunkRef] = []
        for version, artifact in steps:
            manifest = self.chain.get(version)
            assert manifest is not None  # or there was no step to it
            chunks += self._needs(manifest, artifact)
        return chunks

    async def meet(self, order: tuple[int, int]) -> AdmittedHead | None:
        """The head of (term, version) `order`, asked for where the book does not know it; None: nobody told."""
        for source in [*self._upstreams(), self._trainer]:
            if order in self._book.trusted.heads:
                break
            await self._heed(source, self._hear(source, order[1] - 1))
        return self._book.trusted.heads.get(order)

    async def look_again(self) -> None:
        """The way we know may lead over chunks that nobody keeps any more: ask the trainer what it keeps."""
        try:
            _, versions = await self._hear(self._trainer, NOTHING)
        except (TransportError, Refused, RemoteProtocolError) as error:
            logger.debug("the trainer does not say what it keeps: %s", error)
            return
        if versions:
            self._book.forget(min(versions))
            self.forget()

    async def _ask_heads(self, source: bytes, after: int) -> None:
        """Learn the heads after a version from one node, as far as it tells them."""
        await self._heed(source, self._ask_heads_of(source, after))

    async def _heed(self, source: bytes, telling: Awaitable[object]) -> None:
        """Wait for what one node tells; whatever is wrong with it, there are others."""
        try:
            await telling
        except (TransportError, Refused) as error:
            logger.debug("no heads from %s: %s", short(source), error)
        except RemoteProtocolError as error:
            if error.reason == Reason.EQUIVOCATION:
                self._on_fraud(error)
            logger.warning("bad heads from %s: %s", short(source), error)
            self._peers.blame(source, error.reason)

    async def _ask_heads_of(self, source: bytes, after: int) -> None:
        newest = self._book.order()[1]
        while after < newest:
            told, versions = await self._hear(source, after)
            if not told:
                return
            after = max(after + 1, max(versions, default=-1))

    async def _hear(self, source: bytes, after: int) -> tuple[int, list[int]]:
        """Ask `source` once for heads after a version; how many came, and the versions now held of them."""
        heads = await self._links.request(
            source, ALPN_CONTROL, GetHeads(after), Heads, deadline=ASK_TIMEOUT_S
        )
        for notice in heads.notices:
            await self._book.admit(notice)
        sealed = {notice.head for notice in heads.notices}
        held = [head.head.version for head in self._book.held() if head.sealed in sealed]
        return len(heads.notices), held

    async def _learn_manifests(self, target: AdmittedHead) -> None:
        """Bring the chain up to what the book knows.

        A manifest that did not come with its head is fetched for the target, and where it is too large to come
        so; the others come with GetHeads, many at a time, if the way needs them.
        """
        for head in self._book.held():
            if self.chain.get(head.head.version) is not None:
                continue
            manifest = self._book.manifest(head)
            large = head.head.manifest_size > INLINE_MANIFEST
            if manifest is None and (large or head.order == target.order):
                manifest = await self._fetch_manifest(head)
            if manifest is not None:
                self.chain.add(manifest)

    async def _fetch_manifest(self, head: AdmittedHead) -> PolicyManifest:
        reference = ChunkRef(head.head.manifest, head.head.manifest_size)
        await self._fetcher.fetch([reference], (), self._trainer)
        document = await asyncio.to_thread(self._store.get, head.head.manifest)
        return self._book.attach(head, document or b"")


IDLE_S = 30.0
RETRY_S = 0.5
LOOK_S = 1.0
"""So long we wait for a head that we were told of before we ask for it."""
AHEAD_S = 600.0
"""After this long, what is fetched ahead is planned anew."""
COLLECT_EVERY = 16
COMMITTED = "committed"


def stand() -> AdmittedHead | None:
    """The goal of who goes only where reach() says."""
    return None


class WeightSync:
    """Follows the head book, or a goal, with a mirror of the weights, or a share of it, and an engine."""

    def __init__(
        self,
        *,
        book: HeadStore,
        links: ConnectionPool,
        fetcher: BlobFetcher,
        store: Store,
        ledger: Ledger,
        engine: Engine,
        config: WeightsConfig,
        trainer: bytes,
        upstreams: Callable[[], Sequence[bytes]],
        keep_chunks: set[bytes],
        peers: PeerTable,
        announce: Callable[[int, int, bool], None],
        on_fraud: Callable[[RemoteProtocolError], None],
        on_policy: Callable[[Policy], None] = lambda policy: None,
        share: TensorShare = everything,
        goal: Callable[[], AdmittedHead | None] | None = None,
    ) -> None:
        """`announce` tells others (term, version, complete): what we hold, or else begin to fetch;
        `on_policy` is told of every proved policy, also of those on the way.

        Of policies only the tensors of `share` are fetched, proved and given to the engine. `goal` says to
        which head to go, unless reach() asks for a newer one; without one to the book's newest.
        """
        self._goal = goal or book.latest
        self._asked = (0, NOTHING)
        """The newest (term, version) that reach() was asked for."""
        self.stored = (0, NOTHING)
        """The newest (term, version) of which the chunks are here."""
        self._share = share
        self._book = book
        self._fetcher = fetcher
        self._store = store
        self._ledger = ledger
        self._engine = engine
        self._config = config
        self._trainer = trainer
        self._upstreams = upstreams
        self._keep_chunks = keep_chunks
        self._peers = peers
        self._announce = announce
        self._on_policy = on_policy
        self._way = self._make_way(links, on_fraud)
        self._mirror = WeightReplica(threads=_threads(), share=share)
        self._unwritten = PendingChanges()
        self._order = (0, NOTHING)
        self._writing = (0, NOTHING)
        self._loaded = asyncio.Condition()
        self._trouble = ""
        """Why the last try came to nothing; empty after one that did not."""
        self.versions_loaded = 0

    def _make_way(
        self, links: ConnectionPool, on_fraud: Callable[[RemoteProtocolError], None]
    ) -> UpdatePlanner:
        return UpdatePlanner(
            book=self._book,
            links=links,
            fetcher=self._fetcher,
            store=self._store,
            trainer=self._trainer,
            upstreams=self._upstreams,
            peers=self._peers,
            on_fraud=on_fraud,
            needs=NeededChunks(self._share),
            newest=self._target,
        )

    @property
    def version(self) -> int:
        """The version that the engine holds; -1 before the first."""
        return self._order[1]

    @property
    def order(self) -> tuple[int, int]:
        """The (term, version) that the engine was given last; (0, -1) before the first."""
        return self._order

    @property
    def writing(self) -> tuple[int, int]:
        """The (term, version) that the engine is given just now, else was given last."""
        return self._writing

    @property
    def state_digest(self) -> bytes:
        """Digest of the loaded state, as proved; of a whole one also where we hold a share."""
        return self._mirror.policy.digest

    @property
    def waits_for(self) -> str:
        """Which version is on its way to the engine, and what is in the way, in words; empty if none is."""
        head = self._target()
        if head is None:
            return "" if self._order[1] >= 0 else "the run has no policy version yet"
        if head.order <= self._order:
            return ""
        trouble = f": {self._trouble}" if self._trouble else ""
        return f"fetching version {head.head.version}{trouble}"

    async def run(self) -> None:
        """Follow until the run ends."""
        while not self._book.ended:
            head = self._target()
            if head is not None and head.order > self._order:
                await self._try(head)
            elif self._asked > self._order:
                await self._look_for(self._asked)
            else:
                await self._stand_by()

    async def reach(self, order: tuple[int, int], timeout: float) -> bool:
        """Bring the engine to exactly the (term, version) `order`, while run() runs.

        False: not in time (it is still tried, unless nobody knows that version), or something newer was held
        already, and there is no way back.
        """
        if order < self._book.trusted.committed:
            return False
        self._asked = max(self._asked, order)
        await self._book.wake()
        await self.wait_order(order, timeout)
        if self._asked not in self._book.trusted.heads:
            self._asked = (
                self._order
            )  # whoever asks for what nobody signed must not hold us up for ever
        return self._order == order

    async def reach_last(self) -> None:
        """After the end of the run: try to load its last version until that is here."""
        head = self._goal()
        while head is not None and head.order > self._order:
            await self._try(head)
            head = self._goal()

    def _target(self) -> AdmittedHead | None:
        """Where to go: what reach() asked for, if that is newer than the goal."""
        goal = self._goal()
        if goal is None or goal.order < self._asked:
            return self._book.trusted.heads.get(self._asked, goal)
        return goal

    def _has_goal(self) -> bool:
        head = self._target()
        return self._asked > self._order or (head is not None and head.order > self._order)

    def _has_news(self) -> bool:
        return self._has_goal() or self._book.order() > max(self._order, self.stored)

    async def _stand_by(self) -> None:
        """Until there is where to go: get what the newest version takes, as it may be asked for next."""
        head = self._book.latest()
        if head is None or not self._has_news():
            await self._book.wait(self._has_news, IDLE_S)
            return
        async with asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(self._fetch_ahead(head))
            waiting = tasks.create_task(self._book.wait(self._has_goal, AHEAD_S))
            await asyncio.wait((fetching, waiting), return_when=asyncio.FIRST_COMPLETED)
            fetching.cancel()
            waiting.cancel()

    async def _fetch_ahead(self, head: AdmittedHead) -> None:
        """Fetch the chunks that lead to `head` into the store, and apply none."""
        try:
            head, steps = await self._way.plan(head, self._mirror.policy)
            await self._fetch(steps, head.order)
            self.stored = head.order
        except (NetworkError, TransportError, Refused, WeightsError, RemoteProtocolError) as error:
            logger.info("version %d is not fetched ahead: %s", head.head.version, error)
            await asyncio.sleep(RETRY_S)
        except StorageError as error:
            logger.error("version %d cannot be kept: %s", head.head.version, error)
            await self._drop_old()
            await asyncio.sleep(RETRY_S)

    async def _look_for(self, order: tuple[int, int]) -> None:
        """Ask for a head that we were told of and do not have; mostly it is under way."""
        if not await self._book.wait(lambda: order in self._book.trusted.heads, LOOK_S):
            await self._way.meet(order)

    async def _try(self, head: AdmittedHead) -> tuple[int, int] | None:
        """The (term, version) that was loaded; None, after a pause, if that could not be done now."""
        try:
            reached = await self._reach(head)
            self._trouble = ""
            return reached
        except (NetworkError, TransportError, Refused, NoPath) as error:
            self._trouble = str(error)
            logger.info("version %d is not here yet: %s", head.head.version, error)
            await self._way.look_again()
            await asyncio.sleep(RETRY_S)
        except (WeightsError, RemoteProtocolError) as error:
            self._trouble = str(error)
            logger.warning("version %d is refused: %s", head.head.version, error)
            await self._start_over()
        except StorageError as error:
            self._trouble = str(error)
            logger.error("version %d cannot be kept: %s", head.head.version, error)
            await self._drop_old()
            await asyncio.sleep(RETRY_S)
        return None

    async def wait_order(self, order: tuple[int, int], timeout: float) -> bool:
        """Wait until the engine holds the (term, version) `order` or a newer one."""
        try:
            async with asyncio.timeout(timeout), self._loaded:
                await self._loaded.wait_for(lambda: self._order >= order)
        except TimeoutError:
            return False
        return True

    async def _reach(self, head: AdmittedHead) -> tuple[int, int]:
        """Bring weights and engine to `head` or a newer one; returns its (term, version)."""
        start = time.monotonic()
        head, steps = await self._way.plan(head, self._mirror.policy)
        # All chunks first, so that no step waits for the one before it.
        await self._fetch(steps, head.order)
        for version, artifact in steps:
            await self._apply(version, artifact)
        self._announce(*head.order, self._share is everything)
        policy = self._mirror.policy
        self._writing = head.order
        await self._write(policy)
        self._order = head.order
        self._book.trusted.commit(head)
        term, version = head.order
        self._ledger.set(COMMITTED, term.to_bytes(8, "big") + version.to_bytes(8, "big"))
        self.versions_loaded += 1
        logger.info(
            "policy %d loaded in %.2fs: %s, %d step(s)",
            policy.version,
            time.monotonic() - start,
            short(policy.digest),
            len(steps),
        )
        async with self._loaded:
            self._loaded.notify_all()
        await self._collect()
        return head.order

    async def _fetch(self, steps: Sequence[Step], order: tuple[int, int]) -> None:
        """Fetch the chunks of `steps` that are missing; they lead to the head of (term, version) `order`."""
        chunks = self._way.needed(steps)
        if chunks:
            self._announce(*order, False)
            await self._fetcher.fetch(
                chunks,
                self._upstreams(),
                self._trainer,
                holders=lambda: self._peers.holders(*order, time.time()),
            )

    async def _write(self, policy: Policy) -> None:
        """Give the engine the proved policy, in place where we know what changed."""
        changed = self._unwritten.changed
        self._unwritten.all()
        if changed is None:
            await self._engine.load(policy.version, policy.state)
        else:
            await self._engine.update(policy.version, policy.state, changed)
        self._unwritten.none()

    async def _apply(self, version: int, artifact: Artifact) -> None:
        manifest = self._way.chain.get(version)
        assert manifest is not None
        prepared = await asyncio.to_thread(
            self._mirror.prepare, manifest, artifact, self._payload(version, artifact)
        )
        self._on_policy(self._mirror.commit(prepared))
        self._unwritten.add(prepared.changed)

    def _payload(self, version: int, artifact: Artifact) -> Iterator[bytes]:
        for chunk in self._way.needed([(version, artifact)]):
            yield read_chunk(self._store, chunk.digest)

    async def _start_over(self) -> None:
        """What we hold leads nowhere: take the way from an anchor."""
        self._mirror = WeightReplica(threads=_threads(), share=self._share)
        self._unwritten.all()
        self._way.forget()
        await asyncio.sleep(RETRY_S)

    async def _collect(self) -> None:
        if self.versions_loaded % COLLECT_EVERY == 0:
            await self._drop_old()

    async def _drop_old(self) -> None:
        """Forget what no version that we keep needs; also when there is no room for the next."""
        if self._way.chain.newest == NOTHING:
            return
        keep = self._config.keep_versions
        live = self._way.chain.live_chunks(keep) | self._keep_chunks
        await self._book.retain(self._store, self._way.chain.forget(keep), live)


def _threads() -> int:
    """Threads that decode; with more of them they only wait for each other."""
    return min(4, os.cpu_count() or 1)


def read_committed(ledger: Ledger) -> tuple[int, int]:
    """The (term, version) that this node had loaded when it was last alive."""
    data = ledger.get(COMMITTED)
    if data is None:
        return (0, -1)
    return int.from_bytes(data[:8], "big"), int.from_bytes(data[8:], "big")
