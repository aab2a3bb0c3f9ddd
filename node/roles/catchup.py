"""Keeping a node's weights at the newest policy version: plan, fetch, prove, load; then serve them on.

The engine only ever gets a state whose digest equals the one in the trainer's signed head, or the share of
such a state that it computes with.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence

from ...crypto.hashing import short
from ...protocol.errors import RemoteProtocolError
from ...protocol.manifests import Artifact
from ...protocol.trust import AdmittedHead
from ..config import WeightsConfig
from ..engines.engine import Engine
from ..errors import NetworkError, StorageError
from ..ledger import Ledger
from ..network.exchange import BlobFetcher
from ..network.heads import HeadBook
from ..network.links import Links
from ..network.peers import PeerTable
from ..network.rpc import Refused
from ..network.transport import TransportError
from ..store import Store, read_chunk
from ..weights.chain import NOTHING, NoPath, Step
from ..weights.errors import WeightsError
from ..weights.mirror import Mirror, Policy
from ..weights.payload import NeededChunks, Share, everything
from ..weights.state import Unwritten
from .retention import retain
from .wayfinder import Wayfinder

logger = logging.getLogger(__name__)

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


class CatchUp:
    """Follows the head book, or a goal, with a mirror of the weights, or a share of it, and an engine."""

    def __init__(
        self,
        *,
        book: HeadBook,
        links: Links,
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
        share: Share = everything,
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
        self._mirror = Mirror(threads=_threads(), share=share)
        self._unwritten = Unwritten()
        self._order = (0, NOTHING)
        self._writing = (0, NOTHING)
        self._loaded = asyncio.Condition()
        self._trouble = ""
        """Why the last try came to nothing; empty after one that did not."""
        self.versions_loaded = 0

    def _make_way(self, links: Links, on_fraud: Callable[[RemoteProtocolError], None]) -> Wayfinder:
        return Wayfinder(
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
        self._mirror = Mirror(threads=_threads(), share=self._share)
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
        await retain(self._way.chain, self._book, self._store, keep, self._keep_chunks)


def _threads() -> int:
    """Threads that decode; with more of them they only wait for each other."""
    return min(4, os.cpu_count() or 1)


def read_committed(ledger: Ledger) -> tuple[int, int]:
    """The (term, version) that this node had loaded when it was last alive."""
    data = ledger.get(COMMITTED)
    if data is None:
        return (0, -1)
    return int.from_bytes(data[:8], "big"), int.from_bytes(data[8:], "big")
