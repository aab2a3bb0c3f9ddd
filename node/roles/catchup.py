"""Keeping a node's weights at the newest policy version: plan, fetch, prove, load; then serve them on.

The engine only ever gets a state whose digest equals the one in the trainer's signed head.
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
from ..store import Store
from ..weights.chain import NOTHING, NoPath, Step
from ..weights.changed import Unwritten
from ..weights.errors import WeightsError
from ..weights.mirror import Mirror, Policy
from .merging import MergeDesk
from .retention import retain
from .shortcuts import Shortcuts
from .wayfinder import Wayfinder

logger = logging.getLogger(__name__)

IDLE_S = 30.0
RETRY_S = 0.5
COLLECT_EVERY = 16
COMMITTED = "committed"


class CatchUp:
    """Follows the head book with a mirror of the weights and an engine."""

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
    ) -> None:
        """`announce` tells others (term, version, complete): what we hold, or else begin to fetch;
        `on_policy` is told of every proved policy, also of those on the way."""
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
        self._way = Wayfinder(
            book=book,
            links=links,
            fetcher=fetcher,
            store=store,
            trainer=trainer,
            upstreams=upstreams,
            peers=peers,
            on_fraud=on_fraud,
        )
        self.merges = MergeDesk(
            store, chain=lambda: self._way.chain, pinned=keep_chunks, config=config
        )
        """Merged deltas for others."""
        self._shortcuts = Shortcuts(
            links=links,
            fetch=fetcher.fetch,
            store=store,
            peers=peers,
            desk=self.merges,
            trainer=trainer,
            upstreams=upstreams,
        )
        self._mirror = Mirror(threads=_threads())
        self._unwritten = Unwritten()
        self._order = (0, NOTHING)
        self._loaded = asyncio.Condition()
        self.versions_loaded = 0

    @property
    def version(self) -> int:
        """The version that the engine holds; -1 before the first."""
        return self._order[1]

    @property
    def state_digest(self) -> bytes:
        """Digest of the loaded state, as proved."""
        return self._mirror.policy.digest

    async def run(self) -> None:
        """Follow until the run ends."""
        loaded: tuple[int, int] = (0, -1)
        while not self._book.ended:
            if not await self._book.wait_news(loaded, IDLE_S):
                continue
            head = self._book.latest()
            if head is None or head.order <= loaded:
                continue
            loaded = await self._try(head) or loaded

    async def reach_last(self) -> None:
        """After the end of the run: try to load its last version until that is here."""
        head = self._book.latest()
        while head is not None and head.order > self._order:
            await self._try(head)
            head = self._book.latest()

    async def _try(self, head: AdmittedHead) -> tuple[int, int] | None:
        """The (term, version) that was loaded; None, after a pause, if that could not be done now."""
        try:
            return await self._reach(head)
        except (NetworkError, TransportError, Refused, NoPath) as error:
            logger.info("version %d is not here yet: %s", head.head.version, error)
            await self._way.look_again()
            await asyncio.sleep(RETRY_S)
        except (WeightsError, RemoteProtocolError) as error:
            logger.warning("version %d is refused: %s", head.head.version, error)
            await self._start_over()
        except StorageError as error:
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
        near = await self._shortcuts.begin(steps)
        await self._walk(steps[:near], head.order)
        far = steps[near:]
        merged = bool(far) and await self._shortcuts.take(far, head.head.state, self._apply)
        if not merged:
            await self._walk(far, head.order)
            self._announce(*head.order, True)
        policy = self._mirror.policy
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

    async def _walk(self, steps: Sequence[Step], order: tuple[int, int]) -> None:
        """Fetch what all steps need, so that no step waits for the one before it, and apply them in order.

        `order`: (term, version) of the head that they lead to.
        """
        chunks = [chunk for _, artifact in steps for chunk in artifact.chunks]
        if chunks:
            self._announce(*order, False)
            await self._fetcher.fetch(
                chunks,
                self._upstreams(),
                self._trainer,
                holders=lambda: self._peers.holders(*order, time.time()),
            )
        for version, artifact in steps:
            await self._apply(version, artifact)

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
            self._mirror.prepare, manifest, artifact, self._payload(artifact)
        )
        self._on_policy(self._mirror.commit(prepared))
        self._unwritten.add(prepared.changed)

    def _payload(self, artifact: Artifact) -> Iterator[bytes]:
        for chunk in artifact.chunks:
            data = self._store.get(chunk.digest)
            if data is None:
                raise StorageError(f"chunk {short(chunk.digest)} was lost from the store")
            yield data

    async def _start_over(self) -> None:
        """What we hold leads nowhere: take the way from an anchor."""
        self._mirror = Mirror(threads=_threads())
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
