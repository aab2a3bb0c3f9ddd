"""Keep a node's weights at the newest policy version: plan, fetch, prove, load.

Invariant: the engine only gets a state whose digest equals that in the trainer's signed head, or its share of
such a state.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from ...crypto.hashing import short
from ...protocol.envelope import read_envelope
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import Artifact, ChunkRef, PolicyManifest
from ...protocol.messages import GetHeads, Heads, SyncRecords
from ...protocol.trust import AdmittedHead
from ...protocol.version import ALPN_CONTROL
from ..errors import NetworkError, StorageError
from ..inference.engine import Engine
from ..p2p.gossip import read_record
from ..p2p.heads import FAR_BEHIND, INLINE_MANIFEST
from ..p2p.peers import PeerTable, Tier
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices
from ..p2p.transport import TransportError
from ..storage.chunk_store import read_chunk
from ..storage.ledger import Ledger
from ..tasks import end_tasks
from ..weights.chain import NOTHING, Needs, NoPath, Step, VersionChain, all_chunks
from ..weights.payload import NeededChunks, TensorShare, everything
from ..weights.replica import Policy, WeightReplica
from ..weights.state import Changed, PendingChanges, WeightsError, memory_threads

logger = logging.getLogger(__name__)

RECORDS_TIMEOUT_S = 20.0
SUCCESSORS = "successors"
"""Ledger key of the sealed peer records of nodes that may lead the run after its trainer."""
SYNC_S = 10.0
"""Interval between requests for peers that have chunks."""


class Upstreams:
    """Peers to fetch from: those admitted before us, the nearest first, then later ones."""

    def __init__(self, services: NodeServices) -> None:
        self._services = services
        self.nodes: list[bytes] = []
        self.successors: list[bytes] = []
        """Nodes that may lead the run after the trainer, and how to reach them is known."""
        self._version = -1
        self._loaded = asyncio.Event()

    def learn(self, records: Sequence[bytes], later: Sequence[bytes] = ()) -> None:
        """Add sealed peer records from the trainer: sources admitted before us, and after us.

        A node that does not share its address has none: it fetches from the trainer alone, and from seeds.
        """
        services = self._services
        before, after = (
            [
                node
                for node in learn_records(services.peers, services.run_id, sealed)
                if services.links.may_dial(node)
            ]
            for sealed in (records, later)
        )
        services.fetcher.place = len(before)
        self.nodes = before + after

    def learn_successors(self, records: Sequence[bytes]) -> None:
        """Take the sealed peer records of nodes that may lead after the trainer; others are left out."""
        services = self._services
        nodes = [
            node
            for node in learn_records(services.peers, services.run_id, records)
            if node in services.leaders
        ]
        if nodes and nodes != self.successors:
            self.successors = nodes
            services.ledger.set(SUCCESSORS, msgspec.msgpack.encode(list(records)))

    def loaded(self, version: int) -> None:
        """Note the policy version that this node has loaded; keep_asking() tells the trainer at once."""
        self._version = version
        self._loaded.set()

    async def ask(self) -> None:
        """Send the trainer our own record and version, and learn which peers have chunks."""
        services = self._services
        try:
            own = SyncRecords((services.record(),), self._version)
            reply = await services.ask_trainer(own, SyncRecords, deadline=RECORDS_TIMEOUT_S)
        except (TransportError, Refused, RemoteProtocolError) as error:
            logger.info("no peer records from the trainer: %s", error)
        else:
            self.learn(reply.records)
            self.learn_successors(reply.successors)

    async def keep_asking(self) -> None:
        """Ask repeatedly, for a node that asks for no leases."""
        while True:
            self._loaded.clear()
            await self.ask()
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._loaded.wait()


def known_successors(ledger: Ledger) -> list[bytes]:
    """Return the sealed peer records of successors of the last start; none if they cannot be read."""
    try:
        return msgspec.msgpack.decode(ledger.get(SUCCESSORS) or b"\x90", type=list[bytes])
    except ValueError:
        return []


def learn_records(
    peers: PeerTable, run_id: bytes, records: Sequence[bytes], now: int | None = None
) -> list[bytes]:
    """Admit the nodes of sealed peer records from the trainer; return their ids.

    Bad records are left out. One that is here already, byte for byte, is not verified again: each reply of the
    trainer brings most of those of the last one. `now` in Unix seconds; with 0 they may have expired.
    """
    now = int(time.time()) if now is None else now
    nodes: list[bytes] = []
    for sealed in records:
        try:
            envelope = read_envelope(sealed)
            node = envelope.signer
            if not peers.has_record(node, sealed, time.time()):
                peers.learn(read_record(envelope, run_id, now), sealed)
        except RemoteProtocolError as error:
            logger.info("bad peer record from the trainer: %s", error)
            continue
        peers.admit(node, Tier.MEMBER)
        nodes.append(node)
    return nodes


ASK_TIMEOUT_S = 10.0
"""Seconds for the trainer to answer."""
NEIGHBOUR_S = 2.0
"""Seconds to reach a neighbour, and again for its answer: the trainer knows all that it could say."""
NEIGHBOURS_S = 4.0
"""Seconds for all neighbours together before the trainer is asked: they may be silent on purpose."""


class UpdatePlanner:
    """Planner of the cheapest steps to a version, which fetches missing heads and manifests."""

    def __init__(
        self,
        services: NodeServices,
        upstreams: Upstreams,
        needs: Needs = all_chunks,
        newest: Callable[[], AdmittedHead | None] | None = None,
    ) -> None:
        """`needs`: chunks of an artifact that we fetch; `newest`: target head, if not the newest."""
        self._services = services
        self._book = services.heads
        self._upstreams = upstreams
        self._needs = needs
        self._newest = newest or services.heads.latest
        self._epoch = 0
        self.chain = VersionChain()
        """Versions of the current epoch whose manifests are known."""

    def forget(self) -> None:
        """Drop the chain, because no path was found in it; it is learned again."""
        self.chain = VersionChain()

    async def plan(self, head: AdmittedHead, policy: Policy) -> tuple[AdmittedHead, list[Step]]:
        """Find the cheapest steps to `head` or, if it moves on meanwhile, to a newer one.

        Asks one source after the other while no path is known, see _sources(). Raises NoPath, NetworkError.
        """
        if head.head.term != self._epoch:
            self._epoch = head.head.term
            self.forget()
        failed: set[bytes] = set()
        afters = dict.fromkeys((policy.version, NOTHING))
        questions = (
            (source, after, until) for after in afters for source, until in self._sources(failed)
        )
        first = [*self._upstreams.nodes, self._services.trainer][0]
        bridges = (
            source
            for source in dict.fromkeys((first, self._services.trainer))
            if source not in failed
        )
        while True:
            await self._learn_manifests(head)
            try:
                steps = await self._cheapest(head, policy)
                gap = await self._gap(steps, policy)
                source = None if gap is None else next(bridges, None)
                if gap is None or source is None:
                    return head, steps
                question = (source, gap, math.inf)
            except NoPath:
                question = next(questions, None)
                if question is None:
                    raise
            peer, after, until = question
            await self._await_heads(peer, self._fetch_all_heads(peer, after, until), failed)
            # Sources name their newest snapshot, which may be newer by now than the head we started for.
            newest = self._newest()
            head = newest if newest and newest.head.term == head.head.term else head

    async def _cheapest(self, head: AdmittedHead, policy: Policy) -> list[Step]:
        stored = await asyncio.to_thread(self._services.store.names)
        return self.chain.plan(
            policy.version, policy.digest, head.head.version, stored=stored, needs=self._needs
        )

    async def _gap(self, steps: Sequence[Step], policy: Policy) -> int | None:
        """Find the version after which missing manifests may save a snapshot; None without one."""
        if not steps or steps[0][1].kind != "anchor":
            return None
        version = steps[0][0]
        needed = self.needed(steps[:1])
        gap = self.chain.gap(policy.version, version)
        if gap is None or version - gap > FAR_BEHIND:
            return None
        complete = await asyncio.to_thread(
            lambda: all(self._services.store.has(chunk.digest) for chunk in needed)
        )
        return None if complete else gap

    def needed(self, steps: Sequence[Step]) -> list[ChunkRef]:
        """List the chunks of `steps` that we need, in order. Raises CodecError."""
        chunks: list[ChunkRef] = []
        for version, artifact in steps:
            manifest = self.chain.get(version)
            assert manifest is not None  # otherwise there would be no step to it
            chunks += self._needs(manifest, artifact)
        return chunks

    async def fetch_head(self, order: tuple[int, int]) -> None:
        """Fetch the head of (epoch, version) `order` into the book, from the first source that has it."""
        failed: set[bytes] = set()
        for source, _ in self._sources(failed):
            await self._await_heads(source, self._fetch_heads(source, order[1] - 1), failed)
            if order in self._book.trusted.heads:
                return

    def _sources(self, failed: Collection[bytes]) -> Iterator[tuple[bytes, float]]:
        """Yield each source to ask for heads, and the time.monotonic() until which to read its replies.

        `failed` holds those that did not answer; the caller adds them. The neighbours come first. The trainer
        comes after NEIGHBOURS_S; after that neighbours are asked only if it failed.
        """
        trainer, scores = self._services.trainer, self._services.fetcher.scores
        until = time.monotonic() + NEIGHBOURS_S
        for node in self._upstreams.nodes:
            now = time.monotonic()
            if now >= until:
                break
            if not scores.resting(node, now):
                yield node, until
        if trainer not in failed:
            yield trainer, math.inf
        if trainer in failed:
            yield from ((node, math.inf) for node in self._upstreams.nodes if node not in failed)

    async def look_again(self) -> None:
        """Ask the trainer which versions it keeps: the known path may need chunks that no longer exist."""
        try:
            _, versions = await self._fetch_heads(self._services.trainer, NOTHING)
        except (TransportError, Refused, RemoteProtocolError) as error:
            logger.debug("the trainer does not list its kept versions: %s", error)
            return
        if versions:
            self._book.forget(min(versions))
            self.forget()

    async def _await_heads(
        self, source: bytes, heads: Awaitable[object], failed: set[bytes]
    ) -> None:
        """Await the heads of `source`; only log a failure, as there are other sources.

        One that does not answer is added to `failed`, and asked after the trainer for a while.
        """
        try:
            await heads
        except Refused as refusal:
            logger.debug("no heads from %s: %s", short(source), refusal)
        except TransportError as error:
            logger.debug("no heads from %s: %s", short(source), error)
            failed.add(source)
            self._services.fetcher.scores.rest(source, time.monotonic())
        except RemoteProtocolError as error:
            if error.reason == Reason.EQUIVOCATION:
                self._services.report_fraud(error)
            logger.warning("bad heads from %s: %s", short(source), error)
            self._services.peers.blame(source, error.reason)

    async def _fetch_all_heads(self, source: bytes, after: int, until: float) -> None:
        """Fetch the heads of `source` after a version, reply by reply, up to the newest known one.

        No reply is asked for after `until` (time.monotonic()).
        """
        newest = self._book.order()[1]
        while after < newest and time.monotonic() < until:
            count, versions = await self._fetch_heads(source, after)
            if not count:
                return
            after = max(after + 1, max(versions, default=-1))

    async def _fetch_heads(self, source: bytes, after: int) -> tuple[int, list[int]]:
        """Fetch one reply of heads after a version from `source`.

        Returns the number of heads, and the versions of those that were taken.
        """
        limit = ASK_TIMEOUT_S if source == self._services.trainer else NEIGHBOUR_S
        heads = await self._services.links.request(
            source, ALPN_CONTROL, GetHeads(after), Heads, deadline=limit, patience=limit
        )
        for notice in heads.notices:
            await self._book.admit(notice)
        sealed = {notice.head for notice in heads.notices}
        admitted = [head.head.version for head in self._book.held() if head.sealed in sealed]
        return len(heads.notices), admitted

    async def _learn_manifests(self, target: AdmittedHead) -> None:
        """Add the manifests of all known heads to the chain.

        A manifest that did not come with its head is fetched for the target, or if it is too large to be sent
        inline; the others come with GetHeads, many at a time, if the path needs them.
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
        await self._services.fetcher.fetch([reference], (), self._services.trainer)
        document = await asyncio.to_thread(self._services.store.get, head.head.manifest)
        return self._book.attach(head, document or b"")


IDLE_S = 30.0
RETRY_S = 0.5
LOOK_S = 1.0
"""Time to wait for an expected head before asking for it."""
AHEAD_S = 600.0
"""Time after which prefetching is planned anew."""
COLLECT_EVERY = 16
COMMITTED = "committed"


def no_goal() -> AdmittedHead | None:
    """Return no goal, for a node that follows only reach()."""
    return None


OnPolicy = Callable[[Policy, Changed | None], None]
"""Receiver of a policy, and of where it may differ from the one before; None: anywhere."""


class WeightSync:
    """Loops that keep an engine, and a replica of its weights, at the newest head or a goal."""

    def __init__(
        self,
        services: NodeServices,
        engine: Engine,
        upstreams: Upstreams,
        *,
        share: TensorShare = everything,
        goal: Callable[[], AdmittedHead | None] | None = None,
        on_policy: OnPolicy = lambda policy, changed: None,
        ready: asyncio.Event | None = None,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fetch, prove and load only the tensors of `share`, and nothing new while `held` says so.

        `ready` is set, and the book woken, once the engine has started; None: it has. `goal` returns the head
        to go to, unless reach() asked for a newer one; by default the newest head. `on_policy` is called in a
        thread with every proved policy, also the intermediate ones.
        """
        self._services = services
        self._book = services.heads
        self._engine = engine
        self.upstreams = upstreams
        self._share = share
        self._goal = goal or services.heads.latest
        self._on_policy = on_policy
        self._ready = ready
        self._held = held
        self._asked = (0, NOTHING)
        """Newest (epoch, version) that reach() was asked for."""
        self.stored = (0, NOTHING)
        """Newest (epoch, version) whose chunks are in the store."""
        self._planner = UpdatePlanner(services, upstreams, NeededChunks(share), self._target)
        self._replica = WeightReplica(threads=memory_threads(), share=share)
        self._unwritten = PendingChanges()
        self._order = (0, NOTHING)
        self._writing = (0, NOTHING)
        self._loaded = asyncio.Condition()
        self._trouble = ""
        """Reason why the last attempt failed; empty after one that succeeded."""
        self._unkept = (0, NOTHING)
        """The last (epoch, version) for which there was no room."""
        self.versions_loaded = 0

    @property
    def version(self) -> int:
        """Version that the engine holds; -1 before the first."""
        return self._order[1]

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, version) that the engine holds; (0, -1) before the first."""
        return self._order

    @property
    def writing(self) -> tuple[int, int]:
        """(epoch, version) that is being written into the engine, else that was written last."""
        return self._writing

    @property
    def state_digest(self) -> bytes:
        """Proved digest of the whole state that is loaded, also if only a share of it is held."""
        return self._replica.policy.digest

    @property
    def waits_for(self) -> str:
        """Version that is being fetched, and the last failure; empty if the engine is up to date."""
        head = self._target()
        if head is None:
            return "" if self._order[1] >= 0 else "the run has no policy version yet"
        if head.order <= self._order:
            return ""
        trouble = f": {self._trouble}" if self._trouble else ""
        return f"fetching version {head.head.version}{trouble}"

    async def run(self) -> None:
        """Follow the target head until the run ends."""
        while not self._book.ended:
            if self._held():
                await self._book.wait(lambda: not self._held(), LOOK_S)
                continue
            head = self._target()
            if head is not None and head.order > self._order:
                await self._try(head)
            elif self._asked > self._order:
                await self._look_for(self._asked)
            else:
                await self._stand_by()

    async def reach(self, order: tuple[int, int], timeout: float) -> bool:
        """Bring the engine to exactly the (epoch, version) `order`, while run() runs.

        Returns False on a timeout (the load is still tried, if that version is known), or if a newer version
        was loaded already.
        """
        if order < self._book.trusted.committed:
            return False
        self._asked = max(self._asked, order)
        await self._book.wake()
        await self.wait_order(order, timeout)
        if self._asked not in self._book.trusted.heads:
            self._asked = self._order  # an unsigned version must not block us for ever
        return self._order == order

    async def reach_last(self) -> None:
        """Load the last version of a run that has ended; return once it is loaded."""
        head = self._goal()
        while head is not None and head.order > self._order:
            await self._try(head)
            head = self._goal()

    def _target(self) -> AdmittedHead | None:
        """Return the head to go to: that of reach(), if it is newer than the goal."""
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
        """Fetch the chunks of the newest version ahead, until there is a goal."""
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
        """Fetch the chunks that lead to `head` into the store, without applying them."""
        try:
            head, steps = await self._planner.plan(head, self._replica.policy)
            await self._fetch(steps, head.order)
            self.stored = head.order
        except (NetworkError, TransportError, Refused, WeightsError, RemoteProtocolError) as error:
            logger.info("version %d is not fetched ahead: %s", head.head.version, error)
            await asyncio.sleep(RETRY_S)
        except StorageError as error:
            await self._make_room(head, error)

    async def _make_room(self, head: AdmittedHead, error: StorageError) -> None:
        """Drop what is old and pause, because a version cannot be kept; log that once for each version."""
        if self._unkept != head.order:
            logger.error("version %d cannot be kept: %s", head.head.version, error)
        self._unkept = head.order
        await self._drop_old()
        await asyncio.sleep(RETRY_S)

    async def _look_for(self, order: tuple[int, int]) -> None:
        """Ask for a head that we do not have and that does not arrive by itself."""
        if not await self._book.wait(lambda: order in self._book.trusted.heads, LOOK_S):
            await self._planner.fetch_head(order)

    async def _try(self, head: AdmittedHead) -> None:
        """Load `head`; pause after a failure."""
        try:
            await self._reach(head)
            self._trouble = ""
        except (NetworkError, TransportError, Refused, NoPath) as error:
            self._trouble = str(error)
            logger.info("version %d is not here yet: %s", head.head.version, error)
            await self._planner.look_again()
            await asyncio.sleep(RETRY_S)
        except (WeightsError, RemoteProtocolError) as error:
            self._trouble = str(error)
            logger.warning("version %d is refused: %s", head.head.version, error)
            await self._start_over()
        except StorageError as error:
            self._trouble = str(error)
            await self._make_room(head, error)

    async def wait_order(self, order: tuple[int, int], timeout: float) -> bool:
        """Wait until the engine holds the (epoch, version) `order` or a newer one."""
        try:
            async with asyncio.timeout(timeout), self._loaded:
                await self._loaded.wait_for(lambda: self._order >= order)
        except TimeoutError:
            return False
        return True

    async def _reach(self, head: AdmittedHead) -> None:
        """Plan, fetch, prove and load `head` or a newer one."""
        start = time.monotonic()
        head, steps = await self._planner.plan(head, self._replica.policy)
        # Fetch all chunks first, so that no step waits for the one before it.
        await self._fetch(steps, head.order)
        fetched = time.monotonic()
        for version, artifact in steps:
            await self._apply(version, artifact)
        self._services.holdings.tell(*head.order, self._share is everything)
        policy = self._replica.policy
        proved = time.monotonic()
        if not self._can_write():  # newer versions are proved meanwhile
            await self._book.wait(lambda: self._can_write() or self._is_old(head), IDLE_S)
            if not self._can_write():
                return
            proved = start = fetched = time.monotonic()
        self._writing = head.order
        await self._write(policy)
        self._order = head.order
        self.upstreams.loaded(head.head.version)
        self._book.trusted.commit(head)
        epoch, version = head.order
        self._services.ledger.set(COMMITTED, epoch.to_bytes(8, "big") + version.to_bytes(8, "big"))
        self.versions_loaded += 1
        now = time.monotonic()
        logger.info(
            "policy %d loaded in %.2fs (fetched in %.2f, proved in %.2f, written in %.2f): %s, %d step(s)",
            policy.version,
            now - start,
            fetched - start,
            proved - fetched,
            now - proved,
            short(policy.digest),
            len(steps),
        )
        async with self._loaded:
            self._loaded.notify_all()
        if self.versions_loaded % COLLECT_EVERY == 0:
            await self._drop_old()

    def _can_write(self) -> bool:
        return self._ready is None or self._ready.is_set()

    def _is_old(self, head: AdmittedHead) -> bool:
        target = self._target()
        return target is not None and target.order > head.order

    async def _fetch(self, steps: Sequence[Step], order: tuple[int, int]) -> None:
        """Fetch the missing chunks of `steps`, which lead to (epoch, version) `order`."""
        chunks = self._planner.needed(steps)
        if chunks:
            self._services.holdings.tell(*order, False)
            fetching = self._services.fetcher.fetch(
                chunks,
                self.upstreams.nodes,
                self._services.trainer,
                holders=lambda: self._services.peers.holders(*order, time.time()),
            )
            await self._unless_held(fetching)

    async def _unless_held(self, fetching: Coroutine[Any, Any, None]) -> None:
        """Await `fetching`, or end it once this node is held. Raises NetworkError then, and its errors."""
        task = asyncio.create_task(fetching, name="fetch")
        try:
            while not (await asyncio.wait((task,), timeout=LOOK_S))[0]:
                if self._held():
                    raise NetworkError("this node was paused")
            task.result()
        finally:
            await end_tasks(task)

    async def _write(self, policy: Policy) -> None:
        """Give the engine the proved policy: only the changes, if they are known."""
        changed = self._unwritten.changed
        self._unwritten.all()
        if changed is None:
            await self._engine.load(policy.version, policy.state)
        else:
            await self._engine.update(policy.version, policy.state, changed)
        self._unwritten.none()

    async def _apply(self, version: int, artifact: Artifact) -> None:
        manifest = self._planner.chain.get(version)
        assert manifest is not None
        prepared = await asyncio.to_thread(
            self._replica.prepare, manifest, artifact, self._payload(version, artifact)
        )
        policy = self._replica.commit(prepared)
        self._unwritten.add(prepared.changed)
        await asyncio.to_thread(self._on_policy, policy, prepared.changed)

    def _payload(self, version: int, artifact: Artifact) -> Iterator[bytes]:
        for chunk in self._planner.needed([(version, artifact)]):
            yield read_chunk(self._services.store, chunk.digest)

    async def _start_over(self) -> None:
        """Drop the replica and start again from a snapshot."""
        self._replica = WeightReplica(threads=memory_threads(), share=self._share)
        self._unwritten.all()
        self._planner.forget()
        await asyncio.sleep(RETRY_S)

    async def _drop_old(self) -> None:
        """Delete the chunks that no kept version needs."""
        if self._planner.chain.newest == NOTHING:
            return
        keep = self._services.config.weights.keep_versions
        chain = self._planner.chain
        live = chain.live_chunks(keep) | self._services.keep_chunks
        await self._book.retain(self._services.store, chain.forget(keep), live)


def read_committed(ledger: Ledger) -> tuple[int, int]:
    """Read the (epoch, version) that this node had loaded before its last restart."""
    data = ledger.get(COMMITTED)
    if data is None:
        return (0, -1)
    return int.from_bytes(data[:8], "big"), int.from_bytes(data[8:], "big")
