"""The learner role: take samples, train on them, contribute, and make the trainer's outer step again.

Invariants: it trains from an outer state that it computed itself, or fetched whole at its start, and never from
its own local weights of the round before; what it sends is signed, and a step of the trainer that does not
follow from signed contributions ends it with a proof.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ...crypto.hashing import NO_DIGEST, digest, short
from ...protocol.contributions import (
    Assignment,
    Contribution,
    OpenedContribution,
    WrongMerge,
    open_assignment,
    open_contributions,
    open_outer_step,
)
from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef, LearnersContract, OuterStep, PolicyManifest, RunManifest
from ...protocol.messages import (
    ASSIGNMENT_WAIT_S,
    Accepted,
    Assigned,
    AssignmentWait,
    Contribute,
    FetchOuter,
    GetAssignment,
    Stepped,
)
from ..errors import NetworkError, NodeError, StorageError
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices, Obstacle
from ..p2p.transport import TransportError
from ..storage.chunk_store import read_chunk
from ..storage.partial import whole_file
from ..training.outer import (
    SLACK,
    ContributionError,
    OuterState,
    SparseChange,
    check_artifact,
    merge,
)
from ..training.rounds import (
    Batches,
    InnerLoop,
    LearnerSettings,
    decode_samples,
    read_change,
    store_change,
    trained_tokens,
)
from ..weights.replica import WeightReplica
from ..weights.state import CodecError, WeightsError, memory_threads

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = ASSIGNMENT_WAIT_S + 20.0
SEALED_S = 7 * 86400
IDLE_S = 1.0
KEPT = 16
"""Versions whose outer state is compared with what the trainer publishes."""
PROOF = "wrong_merge.msgpack"
NOTHING = -1


class LearnerRole:
    """Trains until the run ends."""

    def __init__(
        self,
        services: NodeServices,
        run: RunManifest,
        start: Callable[[LearnerSettings], Awaitable[InnerLoop]],
        directory: Path,
    ) -> None:
        """`start` makes and starts the backend; a proof against the trainer is left in `directory`."""
        assert run.learners is not None
        self._services = services
        self._heads = services.heads
        self._run = run
        self._contract: LearnersContract = run.learners
        self._start = start
        self._directory = directory
        self._obstacle = Obstacle(services, "samples to train on", "learners.nodes of the trainer")
        self._inner: InnerLoop | None = None
        self._layout: OuterState | None = None
        """An outer state of the layout that this node's model has."""
        self._outer: OuterState | None = None
        self._term = 0
        self._moved = False
        """Whether the backend is not at the masters of the outer state."""
        self._sent: list[bytes] = []
        """Chunks of our last contribution."""
        self._made: dict[tuple[int, int], bytes] = {}
        """Digest of the outer state of each version that we made, by epoch and version."""
        self.rounds = self.merged = self.tokens = 0

    @property
    def version(self) -> int:
        """The version to train from; -1 without one."""
        return NOTHING if self._outer is None else self._outer.version

    @property
    def waits_for(self) -> str:
        """Reason why nothing is trained; empty while something is."""
        return self._obstacle.reason

    async def run(self) -> None:
        """Train until the run ends. Raises EngineError, StorageError; NodeError for a wrong merge."""
        while not self._heads.ended:
            await self._heads.end_without_trainer(self.version, self._run.max_steps)
            if self._heads.ended:
                break
            if why := self._services.paused():
                self._obstacle.reason = f"paused: {why}"
                await self._heads.wait(lambda: not self._services.paused(), IDLE_S)
                continue
            try:
                wait = await self._turn()
            except (NetworkError, TransportError, Refused, RemoteProtocolError) as error:
                wait = self._obstacle.explain(error)
            await self._heads.wait(lambda: False, wait)

    async def _turn(self) -> float:
        """Ask what to do, and do it; return the seconds until the next question."""
        self._compare_with_published()
        outer = self._outer
        reply = await self._services.ask_trainer(
            GetAssignment(self.version, NO_DIGEST if outer is None else outer.digest),
            Assigned | Stepped | FetchOuter | AssignmentWait,  # type: ignore[arg-type]
            deadline=ASK_TIMEOUT_S,
        )
        match reply:
            case AssignmentWait():
                self._obstacle.end(reply.why or "the next samples are awaited")
                return reply.retry_after_ms / 1000
            case FetchOuter():
                self._obstacle.end("fetching the state of the run")
                await self._fetch(reply)
            case Stepped():
                self._obstacle.end()
                await self._step(reply)
            case _:
                self._obstacle.end()
                await self._train(reply)
        return 0.0

    # -- the outer state -----------------------------------------------------------------------------

    async def _fetch(self, reply: FetchOuter) -> None:
        """Fetch the whole outer state."""
        services = self._services
        if self._inner is None or self._layout is None:
            try:
                settings = msgspec.json.decode(reply.settings, type=LearnerSettings)
            except msgspec.DecodeError as error:
                raise RemoteProtocolError(Reason.MALFORMED, f"settings: {error}") from error
            self._inner = await self._start(settings)
            masters = await self._inner.masters()
            self._layout = await asyncio.to_thread(OuterState.begin, 0, masters)
        await self._bring([reply.table])
        try:
            document = read_chunk(services.store, reply.table.digest)
            table = msgspec.msgpack.decode(document, type=PolicyManifest)
            self._layout.check_layout(table.tensors)
        except (msgspec.DecodeError, CodecError) as error:
            raise RemoteProtocolError(Reason.MALFORMED, f"the outer state: {error}") from error
        artifact = table.artifacts[0]
        if table.run != services.run_id or artifact.kind != "anchor":
            raise RemoteProtocolError(Reason.WRONG_RUN, "an outer state of another run")
        if sum(chunk.size for chunk in artifact.chunks) > self._layout.size + SLACK:
            raise RemoteProtocolError(Reason.TOO_LARGE, "an outer state larger than its tensors")
        await self._bring(artifact.chunks)
        payload = (read_chunk(services.store, chunk.digest) for chunk in artifact.chunks)
        replica = WeightReplica(threads=memory_threads())
        try:
            prepared = await asyncio.to_thread(replica.prepare, table, artifact, payload)
        except WeightsError as error:
            raise RemoteProtocolError(Reason.WRONG_DIGEST, f"the outer state: {error}") from error
        self._drop([reply.table.digest, *(chunk.digest for chunk in artifact.chunks)])
        self._outer, self._term, self._moved = OuterState(prepared.policy), reply.term, True
        self._note()
        logger.info("trains from version %d on: state %s", self.version, short(self._outer.digest))

    async def _step(self, reply: Stepped) -> None:
        """Make the outer step that the trainer made. Raises NodeError where it follows from nothing."""
        services, outer = self._services, self._outer
        step = open_outer_step(reply.step, services.run_id, services.leaders)
        if outer is None or step.before != outer.digest or step.version != outer.version + 1:
            raise RemoteProtocolError(Reason.WRONG_BASE, "an outer step from another state")
        if reply.why:
            logger.warning("our contribution is not in version %d: %s", step.version, reply.why)
        try:
            opened = open_contributions(step, services.run_id, self._contract, services.leaders)
            for part in opened:
                check_artifact(part.body.artifact, outer)
            parts = await self._bring_parts(outer, opened)
        except (ContributionError, RemoteProtocolError) as error:
            if isinstance(error, RemoteProtocolError) and error.reason != Reason.WRONG_MERGE:
                raise
            raise self._accuse(WrongMerge(reply.step, b"", str(error))) from error
        except NetworkError:
            self._outer = None  # gone from everywhere: the whole state is fetched
            raise
        weighed = [
            (part, merged.weight) for part, merged in zip(parts, step.contributions, strict=True)
        ]
        made = await asyncio.to_thread(merge, outer, weighed, self._contract)
        if made.digest != step.after:
            why = f"version {step.version} is {short(step.after)}, its contributions make {short(made.digest)}"
            raise self._accuse(WrongMerge(reply.step, made.digest, why))
        self.merged += services.key.node_id in [part.node for part in opened]
        self._outer, self._term, self._moved = made, step.term, True
        self._drop(chunk.digest for part in opened for chunk in part.body.artifact.chunks)
        self._note()

    async def _bring_parts(
        self, outer: OuterState, opened: Sequence[OpenedContribution]
    ) -> list[SparseChange]:
        """Fetch and decode contributions, from those who made them if possible."""
        parts: list[SparseChange] = []
        for part in opened:
            artifact = part.body.artifact
            await self._bring(artifact.chunks, [part.node])
            store = self._services.store
            parts.append(await asyncio.to_thread(read_change, store, outer, artifact))
        return parts

    def _note(self) -> None:
        assert self._outer is not None
        self._made[self._term, self.version] = self._outer.digest
        while len(self._made) > KEPT:
            del self._made[next(iter(self._made))]

    def _compare_with_published(self) -> None:
        """Compare the newest published version with what we made. Raises NodeError."""
        head = self._heads.latest()
        manifest = None if head is None else self._heads.manifest(head)
        if head is None or manifest is None or not isinstance(manifest.outer, OuterStep):
            return
        made = self._made.get(head.order)
        if made is not None and made != manifest.outer.after:
            why = f"published version {manifest.version} is of the outer state {short(manifest.outer.after)}"
            document = msgspec.msgpack.encode(manifest)
            raise self._accuse(WrongMerge(b"", made, why, head.sealed, document))

    def _accuse(self, proof: WrongMerge) -> NodeError:
        """Leave a proof against the trainer; return the error that ends this node."""
        path = self._directory / PROOF
        with suppress(OSError, StorageError), whole_file(path) as partial_path:
            partial_path.write_bytes(msgspec.msgpack.encode(proof))
        return NodeError(
            f"the trainer has merged wrongly: {proof.why}. Nothing is trained for it any more; `primerl-node "
            f"explain {path}` shows the proof"
        )

    # -- rounds --------------------------------------------------------------------------------------

    async def _train(self, reply: Assigned) -> None:
        """Train on the samples of an assignment, and contribute."""
        services, outer, inner = self._services, self._outer, self._inner
        own = services.key.node_id
        assignment = open_assignment(reply.assignment, services.run_id, own, services.leaders)
        stated = (assignment.version, assignment.outer)
        if outer is None or inner is None or stated != outer.name:
            raise RemoteProtocolError(Reason.WRONG_BASE, "samples for another state")
        batches = await self._samples(assignment)
        if self._moved:
            await inner.rebase(outer.masters, assignment.first_step - 1)
        self._term, self._moved = assignment.term, True
        began = time.monotonic()
        await inner.train(assignment.first_step, batches)
        gated = await inner.change(outer)
        for name in self._sent:
            services.keep_chunks.discard(name)
        self._drop(self._sent)
        artifact = await asyncio.to_thread(
            store_change, services.store, outer, gated, services.keep_chunks
        )
        self._sent = [chunk.digest for chunk in artifact.chunks]
        body = Contribution(
            digest(reply.assignment),
            assignment.term,
            outer.version,
            outer.digest,
            min(trained_tokens(batches), assignment.tokens),
            artifact,
        )
        expires = int(time.time()) + SEALED_S
        sealed = services.seal(Purpose.CONTRIBUTION, body, expires=expires)
        await services.ask_trainer(Contribute(sealed), Accepted, deadline=ASK_TIMEOUT_S)
        self.rounds, self.tokens = self.rounds + 1, self.tokens + body.tokens
        logger.info(
            "version %d: %d tokens in %.1f s, %d B contributed",
            outer.version,
            body.tokens,
            time.monotonic() - began,
            artifact.size,
        )

    async def _samples(self, assignment: Assignment) -> Batches:
        await self._bring(assignment.data)
        store = self._services.store
        data = b"".join(read_chunk(store, chunk.digest) for chunk in assignment.data)
        try:
            batches = await asyncio.to_thread(decode_samples, data)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(Reason.MALFORMED, f"samples: {error}") from error
        self._drop(chunk.digest for chunk in assignment.data)
        if len(batches) != assignment.inner_steps:
            raise RemoteProtocolError(Reason.MALFORMED, "samples for another number of steps")
        return batches

    async def _bring(self, chunks: Sequence[ChunkRef], others: Sequence[bytes] = ()) -> None:
        """Fetch chunks, from `others` or the trainer. Raises NetworkError, StorageError."""
        services = self._services
        near = [node for node in others if services.peers.get(node).record is not None]
        await services.fetcher.fetch(list(chunks), near, services.trainer)

    def _drop(self, names: Iterable[bytes]) -> None:
        for name in names:
            if name not in self._services.keep_chunks:
                self._services.store.delete(name)
