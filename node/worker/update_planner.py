"""Finding the way to a policy version: which manifests lead there, and whom to ask for those that are missing.

A source that answers with nothing, or with lies, must not keep us from asking the next.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef, PolicyManifest
from ...protocol.messages import GetHeads, Heads
from ...protocol.trust import AdmittedHead
from ...protocol.version import ALPN_CONTROL
from ..p2p.exchange import BlobFetcher
from ..p2p.heads import FAR_BEHIND, INLINE_MANIFEST, HeadBook
from ..p2p.links import Links
from ..p2p.peers import PeerTable
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError
from ..storage.chunk_store import Store
from ..weights.chain import NOTHING, Chain, Needs, NoPath, Step, whole
from ..weights.replica import Policy

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0


class Wayfinder:
    """Plans over the chain, and learns what the chain lacks."""

    def __init__(
        self,
        *,
        book: HeadBook,
        links: Links,
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
        self.chain = Chain()
        """The versions of the current term whose manifests we know."""

    def forget(self) -> None:
        """What is known leads nowhere: learn it anew."""
        self.chain = Chain()

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
