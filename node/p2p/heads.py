"""Keep and serve policy heads, and follow those of neighbours, so that a version is known within moments.

Every head goes through TrustedRun.admit; where it came from does not matter.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from contextlib import suppress

import msgspec

from ...crypto.hashing import digest, short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import PolicyManifest
from ...protocol.messages import (
    MAX_HEADS,
    GetHeads,
    HeadNotice,
    Heads,
    Outcome,
    RunEnded,
    WatchHeads,
)
from ...protocol.trust import AdmittedHead, TrustedRun, read_documents
from ...protocol.version import ALPN_CONTROL, MAX_MESSAGE, MAX_NAME
from ..storage.chunk_store import Store
from ..storage.ledger import LEADERS, MANIFEST, Ledger
from .connections import ConnectionPool
from .rpc import Refused, receive_reply, send
from .transport import Stream, TransportError

logger = logging.getLogger(__name__)

KEEPALIVE_S = 2.0
"""A watch sends something at least this often, so that a silent one is known to be dead."""
END_READ_S = 5.0
"""Longest wait for a watcher to read the end of the run."""
INLINE_MANIFEST = 200 * 1024
FAR_BEHIND = 32
"""A peer more versions behind than this is told the newest snapshot, not all versions between."""
FAREWELL_S = 30.0
"""Seconds without a trainer after which a node that has the manifest's last version leaves."""
RECONNECT_S = 0.3
RECONNECT_MAX_S = 3.0


class HeadStore:
    """The heads and manifests that this node knows, durable through the ledger."""

    def __init__(self, trusted: TrustedRun, ledger: Ledger) -> None:
        self._trusted = trusted
        self._ledger = ledger
        self._manifests: dict[tuple[int, int], bytes] = {}
        self._news = asyncio.Condition()
        self.ended = ""
        """Why the run ended; empty while it goes on."""
        self.outcome: Outcome = "finished"
        """How the run ended; `stopped` only at a trainer, which tells its watchers."""
        self.unwatched_since = time.monotonic()
        """Since when the trainer has been silent; infinite while it is heard."""
        self.stopped = ""
        """Message of a trainer that was stopped and may be resumed; empty once it is heard again."""
        self.news_at = time.monotonic()
        """When the newest head came, from anybody."""
        if documents := ledger.get(MANIFEST):
            self._restore_leaders(documents)
        for sealed, manifest in ledger.heads():
            self._restore(sealed, manifest)

    @property
    def trusted(self) -> TrustedRun:
        """The chain that may be believed."""
        return self._trusted

    def latest(self) -> AdmittedHead | None:
        """Return the newest head."""
        return self._trusted.latest()

    def order(self) -> tuple[int, int]:
        """Return (epoch, version) of the newest head; (0, -1) without any."""
        head = self.latest()
        return head.order if head else (0, -1)

    async def admit(self, notice: HeadNotice) -> bool:
        """Add a head from anybody; return whether it was news. Raises RemoteProtocolError, Equivocation."""
        if notice.leaders:
            await self.admit_leaders(notice.leaders)
        head, news = self._trusted.admit(notice.head, now=int(time.time()))
        if notice.manifest and head.order not in self._manifests:
            self._trusted.check_manifest(head, notice.manifest)
            self._manifests[head.order] = notice.manifest
            news = True
        if news:
            document = self._manifests.get(head.order, b"")
            self._ledger.add_head(*head.order, head.sealed, document)
            self.news_at = time.monotonic()
            await self.wake()
        return news

    async def admit_leaders(self, sealed: bytes) -> bool:
        """Take a newer list of leaders from anybody; return whether it was. Raises RemoteProtocolError."""
        news = self._trusted.admit_leaders(sealed)
        if news:
            self._ledger.set(LEADERS, sealed)
            await self.wake()
        return news

    def manifest(self, head: AdmittedHead) -> PolicyManifest | None:
        """Return the manifest of a head; None if we do not hold it."""
        document = self._manifests.get(head.order)
        return None if document is None else self._trusted.check_manifest(head, document)

    def attach(self, head: AdmittedHead, document: bytes) -> PolicyManifest:
        """Add a manifest that had to be fetched. Raises RemoteProtocolError."""
        manifest = self._trusted.check_manifest(head, document)
        self._manifests[head.order] = document
        return manifest

    def held(self) -> list[AdmittedHead]:
        """List the heads of the newest epoch, oldest first."""
        epoch = self.order()[0]
        heads = self._trusted.heads
        return [heads[order] for order in sorted(heads) if order[0] == epoch]

    def notice(self, head: AdmittedHead, *, known: bytes = b"") -> HeadNotice:
        """Make the message that announces a head to a node that has the list of leaders `known`."""
        leaders = self._trusted.leaders.sealed
        document = self._manifests.get(head.order, b"")
        return HeadNotice(
            head.sealed,
            document if len(document) <= INLINE_MANIFEST else b"",
            leaders if leaders != known else msgspec.UNSET,
        )

    def forget(self, below: int) -> None:
        """Drop versions of the newest epoch below one, and all of earlier epochs."""
        epoch = self.order()[0]
        for order in [key for key in self._trusted.heads if key[0] < epoch or key[1] < below]:
            del self._trusted.heads[order]
            self._manifests.pop(order, None)
        self._ledger.drop_heads(epoch, below)

    async def retain(self, store: Store, oldest: int, chunks: AbstractSet[bytes]) -> None:
        """Forget versions below `oldest`, and collect all of `store` but `chunks` and the kept manifests."""
        self.forget(oldest)
        documents = {head.head.manifest for head in self.held()}
        await asyncio.to_thread(store.collect, chunks | documents)

    async def end(self, detail: str, outcome: Outcome = "finished") -> None:
        """Note that there will be no more heads; tell all watchers."""
        self.ended, self.outcome = detail or "the run has ended", outcome
        await self.wake()

    async def end_without_trainer(self, version: int, last: int) -> None:
        """End the run if `version` is the `last` of its manifest and the trainer is gone.

        Only the trainer knows whether the run goes on: it may have been resumed with more steps.
        """
        if version == last and time.monotonic() - self.unwatched_since >= FAREWELL_S:
            await self.end("the run has reached its last step")

    async def wait_news(self, known: tuple[int, int], timeout: float) -> bool:
        """Wait for a head newer than `known` or the end of the run; False at the timeout."""
        return await self.wait(lambda: self.order() > known, timeout)

    async def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until `ready()`, called at news and by wake(), or the end of the run; False at the timeout."""
        try:
            async with asyncio.timeout(timeout), self._news:
                await self._news.wait_for(lambda: ready() or bool(self.ended))
        except TimeoutError:
            return False
        return True

    async def wake(self) -> None:
        """Let all waiters check again."""
        async with self._news:
            self._news.notify_all()

    def _restore_leaders(self, manifest: bytes) -> None:
        try:
            documents = read_documents(manifest, self._trusted.run, now=0)
            self._trusted.trust(documents, self._ledger.get(LEADERS) or b"")
        except RemoteProtocolError as error:
            logger.error("the leaders of the run in %s are left out: %s", self._ledger.path, error)

    def _restore(self, sealed: bytes, manifest: bytes) -> None:
        try:
            head, _ = self._trusted.admit(sealed, now=0)
        except RemoteProtocolError as error:
            if error.reason == Reason.WRONG_SIGNER:
                return  # of a leader that was revoked
            logger.error(
                "a head in %s was damaged on the disk and is left out: %s", self._ledger.path, error
            )
            return
        if manifest and digest(manifest) == head.head.manifest:
            self._manifests[head.order] = manifest
        elif manifest:
            logger.error(
                "%s: the manifest of version %d was damaged on the disk and is left out",
                self._ledger.path,
                head.head.version,
            )


MAX_CUT_OFF = 1024
"""Most nodes remembered as cut off: keys are free."""


class HeadServer:
    """Answer WatchHeads and GetHeads."""

    def __init__(self, book: HeadStore) -> None:
        self._book = book
        self._watchers = 0
        self._cut_off = set[bytes]()
        """Nodes whose watch ended before they were told the end, as in a restart; they will reconnect."""
        self._told = set[bytes]()
        """Nodes that were told the end."""
        self._changed = asyncio.Condition()

    def check_going_on(self) -> None:
        """Raise RemoteProtocolError(RUN_ENDED) once there is nothing more to join; BUSY in a stop."""
        if self._book.ended:
            stopped = self._book.outcome == "stopped"
            raise RemoteProtocolError(
                Reason.BUSY if stopped else Reason.RUN_ENDED, self._book.ended[:MAX_NAME]
            )

    async def wait_told(
        self, members: Collection[bytes], departed: AbstractSet[bytes], timeout: float
    ) -> None:
        """Wait until each watcher and each of `members` was told the end, for at most `timeout` seconds.

        Members are nodes that take part and may be on their way back, or that are joining: a trainer that was
        killed a moment before its last step has not heard of them yet. Those `departed` do not come back.
        """

        def all_told() -> bool:
            waiting = self._watchers or self._cut_off - departed
            return not waiting and self._told.issuperset(members)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(all_told)

    async def watch(self, peer: bytes, stream: Stream, request: WatchHeads) -> None:
        """Push the newest head whenever it changes; skips versions that a slow watcher missed."""
        self._watchers += 1
        self._cut_off.discard(peer)
        try:
            await self._push(stream, request)
            self._told.add(peer)
        except asyncio.CancelledError:
            if len(self._cut_off) < MAX_CUT_OFF:
                self._cut_off.add(peer)
            raise
        finally:
            self._watchers -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _push(self, stream: Stream, request: WatchHeads) -> None:
        known, leaders = (request.term, request.after), b""
        while True:
            if self._book.order() > known:
                head = self._book.latest()
                assert head is not None
                known = head.order
                notice = self._book.notice(head, known=leaders)
                await send(stream, notice)
                leaders = notice.leaders or leaders
            elif self._book.ended:
                await send(stream, RunEnded(self._book.ended[:MAX_NAME], self._book.outcome))
                await stream.finish()
                # Closing the connection loses unread bytes; the watcher ends the stream when it has read them.
                with suppress(TransportError, TimeoutError):
                    async with asyncio.timeout(END_READ_S):
                        await stream.read_exact(1)
                return
            elif not await self._book.wait_news(known, KEEPALIVE_S):
                await send(stream, Heads(()))

    async def get(self, stream: Stream, request: GetHeads) -> None:
        """Return the held heads on the way from `after` to the newest that fit into one message.

        A peer that holds nothing, or is far behind, gets the newest snapshot and the heads after it.
        """
        first = request.after + 1
        if request.after < 0 or self._book.order()[1] - request.after > FAR_BEHIND:
            first = max(first, self._newest_snapshot())
        notices: list[HeadNotice] = []
        size, leaders = 0, b""
        for head in self._book.held():
            if head.head.version < first:
                continue
            notice = self._book.notice(head, known=leaders)
            leaders = notice.leaders or leaders
            size += len(notice.head) + len(notice.manifest) + 32
            if len(notices) == MAX_HEADS or size > MAX_MESSAGE // 2:
                break
            notices.append(notice)
        await send(stream, Heads(tuple(notices)))
        await stream.finish()

    def _newest_snapshot(self) -> int:
        """Return the newest version that can be reached from nothing; 0 if we know of none."""
        heads = self._book.held()
        versions = {head.head.version for head in heads}
        for head in reversed(heads):
            manifest = self._book.manifest(head)
            for artifact in manifest.artifacts if manifest else ():
                reached = artifact.reaches(head.head.version)
                if artifact.kind == "anchor" and reached in versions:
                    return reached
        return 0


class HeadFollower:
    """Keep a watch on one neighbour; reconnect for ever."""

    def __init__(
        self,
        book: HeadStore,
        links: ConnectionPool,
        peer: bytes,
        *,
        authority: bool,
        on_fraud: Callable[[RemoteProtocolError], None],
        on_refusal: Callable[[Refused], None] = lambda refusal: None,
    ) -> None:
        self._book = book
        self._links = links
        self.peer = peer
        self._authority = authority
        self._on_fraud = on_fraud
        self._on_refusal = on_refusal
        self.connected = False
        self.heard = asyncio.Event()
        """Set at every message; a waiter for the next one clears it."""
        self.came_back = asyncio.Event()
        """Set by the first message of every watch."""
        self.tried = asyncio.Event()
        """Set once this neighbour has answered, or has not."""

    async def run(self) -> None:
        """Follow until the run ends."""
        pause = RECONNECT_S
        while not self._book.ended:
            try:
                await self._follow()
            except Refused as refusal:
                self._on_refusal(refusal)
                logger.info("%s gives us no heads: %s", short(self.peer), refusal)
            except RemoteProtocolError as error:
                if error.reason == Reason.EQUIVOCATION:
                    self._on_fraud(error)
                    return
                logger.warning("bad head from %s: %s", short(self.peer), error)
                if error.reason == Reason.WRONG_VERSION and not self._authority:
                    return  # it will not speak another one before it is started anew
            except (TransportError, TimeoutError) as error:
                logger.debug("watch of %s broke: %s", short(self.peer), error)
            self.tried.set()
            pause = RECONNECT_S if self.connected else min(pause * 1.5, RECONNECT_MAX_S)
            self.connected = False
            if self._authority and self._book.unwatched_since == math.inf:
                self._book.unwatched_since = time.monotonic()
            await asyncio.sleep(pause)

    async def _follow(self) -> None:
        connection = await self._links.get(self.peer, ALPN_CONTROL)
        stream = await connection.open_stream()
        try:
            epoch, version = self._book.order()
            await send(stream, WatchHeads(epoch, version))
            while not self._book.ended:
                async with asyncio.timeout(3 * KEEPALIVE_S):
                    news = await receive_reply(stream, HeadNotice | Heads | RunEnded)  # type: ignore[arg-type]
                if isinstance(news, RunEnded):
                    await self._take_end(news)
                    return  # a trainer that was stopped is asked again after a pause
                if not self.connected:
                    self.came_back.set()
                if self._authority:
                    self._book.unwatched_since, self._book.stopped = math.inf, ""
                self.connected = True
                self.heard.set()
                if isinstance(news, HeadNotice):
                    await self._book.admit(news)
                self.tried.set()
        except (TransportError, TimeoutError):
            await self._links.drop(self.peer, ALPN_CONTROL)
            raise
        finally:
            await stream.abort()

    async def _take_end(self, news: RunEnded) -> None:
        """Handle the end of a neighbour's heads: only the trainer's counts; another node only knows no more."""
        if not self._authority:
            return
        if news.outcome == "stopped":
            self._book.stopped = news.detail or "the trainer was stopped"
        else:
            await self._book.end(news.detail, news.outcome)
