"""The trainer's side of a run with learners: rounds of assignments and contributions, and the outer step.

Invariants: a round begins from one version, and from its outer state alone; each sample is assigned once; of
each learner one contribution is merged, for the samples that it was given, after all of it was checked; a
learner that is late, lost or hostile costs its share of the samples, and no more. With nobody there the trainer
trains alone.

LearnerRounds is a TrainBackend: the trainer's loop takes steps as ever, each of which is an outer step.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ...crypto.hashing import NO_DIGEST, digest, short
from ...protocol.contributions import (
    Assignment,
    Contribution,
    OpenedContribution,
    check_answers,
    open_contribution,
)
from ...protocol.envelope import ANYBODY, Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import (
    ChunkRef,
    LearnersContract,
    OuterStep,
    PolicyManifest,
    WeighedContribution,
    encode,
)
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
from ...protocol.version import MAX_NAME
from ..config.run import LearnersConfig
from ..errors import NetworkError, StorageError, printable
from ..p2p.services import NodeServices
from ..storage.chunk_store import Disk
from ..tasks import end_tasks
from ..training.backend import (
    RUINED,
    Example,
    Sample,
    Snapshot,
    StepMetrics,
    TrainBackend,
    TrainBatch,
)
from ..training.checkpoint import StagingBackend
from ..training.outer import (
    ContributionError,
    Floats,
    Gated,
    OuterState,
    SparseChange,
    check_artifact,
    merge,
    weigh,
)
from ..training.rounds import (
    OUTER,
    RESIDUAL,
    Batches,
    InnerLoop,
    LearnerSettings,
    as_state,
    encode_samples,
    read_change,
    read_residual,
    split,
    store_change,
    trained_tokens,
)
from ..training.warmup import SupervisedBackend
from ..weights.artifacts import store_artifact, store_bytes
from ..weights.checkpoint import read_checkpoint, read_metadata, write_checkpoint
from ..weights.codec import encode_full
from ..weights.replica import tensor_table
from ..weights.state import CodecError, State, memory_threads

logger = logging.getLogger(__name__)

KEPT_STEPS = 8
"""Outer steps that a learner can make after the others; one that is further behind fetches the whole state."""
MOST_STEPS = 64
"""As many are kept after a state that is being fetched, or few small rounds would leave it behind."""
EXPECTED_S = 60.0
"""A round waits for a learner that was heard with our outer state, or the one before, within this time."""
MAX_STRIKES = 3
"""Contributions in a row that were no good, after which a learner gets no more samples of this start."""
BUSY_MS, ASIDE_MS = 2_000, 60_000
SEALED_S = 7 * 86400
"""Lifetime of what is sealed here; it is proof for as long as the outer states are kept."""
MAX_UNEVEN = 4.0
"""How many times an equal share a learner's may be, or one in how many."""


@dataclass
class Round:
    """One version's training by several nodes."""

    term: int
    outer: OuterState
    began: float
    assigned: dict[bytes, tuple[bytes, Assignment]] = field(default_factory=dict)
    """Sealed assignment of each learner, and what it says."""
    taking: dict[bytes, asyncio.Task[None]] = field(default_factory=dict)
    """Contributions that are fetched and checked, or were."""
    arrived: dict[bytes, tuple[OpenedContribution, SparseChange]] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    """Chunks of samples and contributions."""

    def missing(self) -> list[bytes]:
        """List learners whose contribution may still come."""
        return [
            node
            for node in self.assigned
            if node not in self.arrived and not (node in self.taking and self.taking[node].done())
        ]


class LearnerDesk:
    """Answers the learners of a run, and brings what they contribute."""

    def __init__(
        self,
        services: NodeServices,
        contract: LearnersContract,
        settings: LearnerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self.contract = contract
        self._settings = msgspec.json.encode(settings)
        self._clock = clock
        self.outer: OuterState | None = None
        self.term = 0
        self._round: Round | None = None
        self._waiting: dict[bytes, asyncio.Future[Assigned | Stepped]] = {}
        self._heard: dict[bytes, float] = {}
        """When a learner was last heard that is with us."""
        self._changed = asyncio.Event()
        self._steps: deque[tuple[tuple[int, bytes], bytes, list[bytes]]] = deque()
        """State before (version and digest), sealed step, and chunks, of the newest outer steps."""
        self._why: dict[bytes, str] = {}
        """Why a learner's newest contribution was not merged."""
        self._strikes = Counter[bytes]()
        self._rates: dict[bytes, float] = {}
        """Trained tokens a second."""
        self._table: tuple[tuple[int, bytes], ChunkRef, list[bytes]] | None = None
        """Outer state that can be fetched: version and digest, its table, and its chunks."""
        self._making: asyncio.Task[None] | None = None

    # -- requests ----------------------------------------------------------------------------------

    async def answer(
        self, peer: bytes, request: GetAssignment
    ) -> Assigned | Stepped | FetchOuter | AssignmentWait:
        """Return what a learner has to do next. Raises RemoteProtocolError (NOT_ADMITTED)."""
        self._check(peer)
        if self._strikes[peer] >= MAX_STRIKES:
            return AssignmentWait(
                ASIDE_MS, printable(f"set aside: {self._why.get(peer, '')}", MAX_NAME)
            )
        if self.outer is None:
            await self._wait_change(ASSIGNMENT_WAIT_S)
            return AssignmentWait(BUSY_MS, "the run has not begun to train")
        if successor := self._successor(peer, (request.version, request.outer)):
            self._heard[peer] = self._clock()
            return successor
        if (request.version, request.outer) != self.outer.name:
            return self._offer()
        self._heard[peer] = self._clock()
        given = self._round.assigned.get(peer) if self._round else None
        if self._round and given and peer not in self._round.taking:
            return Assigned(given[0])  # the first answer was lost
        return await self._in_line(peer)

    async def _in_line(self, peer: bytes) -> Assigned | Stepped | AssignmentWait:
        """Wait for a round, or for the end of the one in progress."""
        future = self._waiting[peer] = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            async with asyncio.timeout(ASSIGNMENT_WAIT_S):
                return await future
        except TimeoutError:
            return AssignmentWait(0)
        finally:
            if self._waiting.get(peer) is future:
                del self._waiting[peer]

    def contribute(self, peer: bytes, request: Contribute) -> Accepted:
        """Take a contribution, which is then fetched and checked. Raises RemoteProtocolError."""
        self._check(peer)
        services, current = self._services, self._round
        opened = open_contribution(
            request.contribution, services.run_id, self.contract, services.leaders
        )
        if opened.node != peer:
            raise RemoteProtocolError(Reason.WRONG_SIGNER, "a contribution of another learner")
        if current is None or peer not in current.assigned:
            raise RemoteProtocolError(
                Reason.STALE, "this version is made without it: it came too late"
            )
        if peer in current.taking:
            raise RemoteProtocolError(Reason.REPLAYED, "a second contribution to one version")
        try:
            check_answers(opened, *current.assigned[peer])
            check_artifact(opened.body.artifact, current.outer)
        except RemoteProtocolError as error:
            self._strike(peer, str(error))
            raise
        except ContributionError as error:
            self._strike(peer, str(error))
            raise RemoteProtocolError(Reason.BAD_CONTRIBUTION, str(error)) from error
        self._heard[peer] = self._clock()
        self._measure(peer, current, opened.body.tokens)
        current.taking[peer] = asyncio.create_task(self._take(current, opened), name="contribution")
        return Accepted()

    def _measure(self, node: bytes, current: Round, tokens: int) -> None:
        """Note how fast a node has trained its share."""
        self._rates[node] = tokens / max(1e-3, self._clock() - current.began)

    def _check(self, peer: bytes) -> None:
        if peer not in self.contract.nodes:
            raise RemoteProtocolError(
                Reason.NOT_ADMITTED,
                "no learner of this run: its trainer names them in learners.nodes when a run begins",
            )

    def _successor(self, peer: bytes, state: tuple[int, bytes]) -> Stepped | None:
        for before, sealed, _ in self._steps:
            if before == state:
                return Stepped(sealed, printable(self._why.get(peer, ""), MAX_NAME))
        return None

    async def _wait_change(self, seconds: float) -> None:
        """Wait until something has changed, for `seconds` at most."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _strike(self, peer: bytes, why: str) -> None:
        self._strikes[peer] += 1
        self._why[peer] = why
        aside = "; it gets no more samples" if self._strikes[peer] >= MAX_STRIKES else ""
        logger.warning(
            "the contribution of learner %s is not merged: %s%s", short(peer), why, aside
        )

    # -- the outer state for those who have none -----------------------------------------------------

    def _offer(self) -> FetchOuter | AssignmentWait:
        """Return where our outer state is; first it has to be cut into chunks."""
        assert self.outer is not None
        if self._table is not None and (self._table[0] == self.outer.name or self._is_fetched()):
            return FetchOuter(self.term, self._table[1], self._settings)
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make_table(self.outer), name="outer state")
        return AssignmentWait(BUSY_MS, "the trainer prepares its state for you")

    async def _make_table(self, outer: OuterState) -> None:
        try:
            table, chunks = await asyncio.to_thread(self._store_outer, outer)
        except StorageError as error:
            logger.warning("no learner can begin: %s", error)
            return
        if self._table is not None:
            self._services.keep_chunks.difference_update(self._table[2])
        self._table = (outer.name, table, chunks)

    def _store_outer(self, outer: OuterState) -> tuple[ChunkRef, list[bytes]]:
        services = self._services
        payload = encode_full(outer.whole.state, threads=memory_threads())
        artifact = store_artifact(services.store, payload, keep=services.keep_chunks)
        table = tensor_table(outer.whole)
        document = encode(
            PolicyManifest(services.run_id, outer.version, outer.digest, table, (artifact,))
        )
        services.keep_chunks.add(name := digest(document))
        services.store.put(document)
        return ChunkRef(name, len(document)), [
            name,
            *(chunk.digest for chunk in artifact.chunks),
        ]

    # -- rounds --------------------------------------------------------------------------------------

    def begin(self, outer: OuterState, term: int) -> None:
        """Let learners train from `outer` on: at the start, and after each change of it."""
        self.outer, self.term = outer, term
        self._changed.set()

    async def ready(self, grace_s: float) -> list[bytes]:
        """Wait for the learners that are expected; return those that are there, in the contract's order."""
        until = self._clock() + grace_s
        while (left := until - self._clock()) > 0:
            absent = [node for node in self._expected() if node not in self._waiting]
            if not absent:
                break
            await self._wait_change(min(left, 1.0))
        return [node for node in self.contract.nodes if node in self._waiting]

    def _expected(self) -> list[bytes]:
        since = self._clock() - EXPECTED_S
        return [
            node
            for node, heard in self._heard.items()
            if heard >= since and self._strikes[node] < MAX_STRIKES
        ]

    def shares(self, nodes: Sequence[bytes]) -> list[float]:
        """Return each node's share of a round's samples, by the speeds of earlier rounds."""
        known = [self._rates[node] for node in nodes if node in self._rates]
        usual = sum(known) / len(known) if known else 1.0
        rates = [self._rates.get(node, usual) for node in nodes]
        bounded = [min(max(rate, usual / MAX_UNEVEN), usual * MAX_UNEVEN) for rate in rates]
        return [rate / sum(bounded) for rate in bounded]

    async def open_round(self, first_step: int, parts: Mapping[bytes, Batches]) -> Round:
        """Give each learner its samples. Raises StorageError."""
        assert self.outer is not None
        current = self._round = Round(self.term, self.outer, self._clock())
        for node, batches in parts.items():
            chunks = await asyncio.to_thread(self._store_samples, batches)
            current.chunks += [chunk.digest for chunk in chunks]
            assignment = Assignment(
                current.term,
                current.outer.version,
                current.outer.digest,
                node,
                first_step,
                len(batches),
                trained_tokens(batches),
                chunks,
            )
            sealed = self._seal(Purpose.ASSIGNMENT, assignment, node)
            current.assigned[node] = (sealed, assignment)
            future = self._waiting.pop(node, None)
            if future is not None and not future.done():
                future.set_result(Assigned(sealed))
        return current

    def _store_samples(self, batches: Batches) -> tuple[ChunkRef, ...]:
        services, data = self._services, encode_samples(batches)
        return store_bytes(services.store, [data], keep=services.keep_chunks)

    def _seal(self, purpose: Purpose, body: msgspec.Struct, recipient: bytes = ANYBODY) -> bytes:
        expires = int(time.time()) + SEALED_S
        return self._services.seal(purpose, body, expires=expires, recipient=recipient)

    async def _take(self, current: Round, opened: OpenedContribution) -> None:
        """Fetch a contribution from its learner, and decode it."""
        services, chunks = self._services, opened.body.artifact.chunks
        names = [chunk.digest for chunk in chunks]
        services.keep_chunks.update(names)
        current.chunks += names
        try:
            await services.fetcher.fetch(chunks, (), opened.node)
            change = await asyncio.to_thread(
                read_change, services.store, current.outer, opened.body.artifact
            )
        except (NetworkError, StorageError) as error:
            self._why[opened.node] = str(error)
            logger.warning("the contribution of %s was not fetched: %s", short(opened.node), error)
        except ContributionError as error:
            self._strike(opened.node, str(error))
        else:
            current.arrived[opened.node] = (opened, change)
        self._changed.set()

    async def add_own(self, current: Round, tokens: int, gated: Gated) -> None:
        """Add this node's own contribution, which others fetch like any other. Raises StorageError."""
        own, outer = self._services.key.node_id, current.outer
        self._measure(own, current, tokens)
        store, keep = self._services.store, self._services.keep_chunks
        artifact = await asyncio.to_thread(store_change, store, outer, gated, keep)
        current.chunks += [chunk.digest for chunk in artifact.chunks]
        body = Contribution(NO_DIGEST, current.term, outer.version, outer.digest, tokens, artifact)
        sealed = self._seal(Purpose.CONTRIBUTION, body)
        change = await asyncio.to_thread(read_change, store, outer, artifact)
        current.arrived[own] = (OpenedContribution(own, sealed, body), change)

    async def collect(self, current: Round, quorum: int, grace_s: float) -> None:
        """Wait for contributions: for all, or for `grace_s` once there are `quorum` of them."""
        until = None
        while current.missing():
            if until is None and len(current.arrived) >= quorum:
                until = self._clock() + grace_s
            left = 1.0 if until is None else min(1.0, until - self._clock())
            if left <= 0:
                names = ", ".join(short(node) for node in current.missing())
                logger.warning("version %d is made without %s", current.outer.version + 1, names)
                break
            await self._wait_change(left)

    async def close_round(self, current: Round) -> tuple[OuterState, OuterStep]:
        """Merge what arrived, and tell the learners. Raises StorageError."""
        own = self._services.key.node_id
        late = [task for task in current.taking.values() if not task.done()]
        await end_tasks(*late)
        changes = {node: change for node, (_, change) in current.arrived.items()}
        tokens = {node: opened.body.tokens for node, (opened, _) in current.arrived.items()}
        weights, refused = await asyncio.to_thread(weigh, changes, tokens, own)
        for node, why in refused.items():
            self._strike(node, why)
        for node in weights:
            self._strikes.pop(node, None)
            self._why.pop(node, None)
        for node in current.missing():
            self._why[node] = "it came too late"
        nodes = sorted(weights)
        outer = await asyncio.to_thread(
            merge, current.outer, [(changes[node], weights[node]) for node in nodes], self.contract
        )
        step = OuterStep(
            current.term,
            outer.version,
            current.outer.digest,
            outer.digest,
            tuple(
                WeighedContribution(current.arrived[node][0].sealed, weights[node])
                for node in nodes
            ),
        )
        self._add_step(current, self._seal(Purpose.OUTER_STEP, step))
        self._round = None
        self.begin(outer, current.term)
        return outer, step

    def _add_step(self, current: Round, sealed: bytes) -> None:
        self._steps.append((current.outer.name, sealed, current.chunks))
        while len(self._steps) > (MOST_STEPS if self._is_fetched() else KEPT_STEPS):
            self._services.keep_chunks.difference_update(self._steps.popleft()[2])
        for node, future in self._waiting.items():
            if not future.done():
                future.set_result(Stepped(sealed, printable(self._why.get(node, ""), MAX_NAME)))
        self._waiting.clear()

    def _is_fetched(self) -> bool:
        """Return whether steps after the state that can be fetched are still here."""
        return self._table is not None and self._successor(b"", self._table[0]) is not None

    async def close(self) -> None:
        """End what is being fetched."""
        tasks = [] if self._round is None else list(self._round.taking.values())
        await end_tasks(*tasks, *([] if self._making is None else [self._making]))


class LearnerRounds:
    """TrainBackend whose step is an outer step of several learners, this node's among them."""

    def __init__(
        self,
        inner: TrainBackend,
        desk: LearnerDesk,
        config: LearnersConfig,
        directory: Path,
        *,
        own: bytes,
        term: Callable[[], int],
    ) -> None:
        """`inner` trains here; `term` returns the epoch of the run; files go to `directory`."""
        self._inner = inner
        self.desk = desk
        self._config = config
        self._own = own
        self._term = term
        self._loop = InnerLoop(inner, directory)
        self._outer: OuterState | None = None
        self._steps: dict[int, OuterStep] = {}
        self._staged: tuple[OuterState, State] | None = None

    def outer_step(self, term: int, version: int) -> OuterStep | msgspec.UnsetType:
        """Return how the outer state of a version was made, for its manifest."""
        step = self._steps.get(version)
        if step is not None and step.term == term:
            return step
        if self._outer is None or self._outer.version != version:
            return msgspec.UNSET
        return OuterStep(term, version, self._outer.digest, self._outer.digest)

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Train `batch` together with the learners that are there, and merge.

        Raises EngineError, StorageError.
        """
        desk, config, steps = self.desk, self._config, self._config.inner_steps
        first = (batch.step - 1) * steps + 1
        outer = await self._opened(batch.step - 1)
        desk.begin(outer, self._term())
        began = time.monotonic()
        learners = await desk.ready(config.grace_s)
        waited = time.monotonic() - began
        nodes = [self._own, *learners]
        parts = dict(zip(nodes, split(batch.samples, desk.shares(nodes), steps), strict=True))
        rollout_tokens = {node: trained_tokens(part, given=False) for node, part in parts.items()}
        own = parts.pop(self._own)
        current = await desk.open_round(first, parts)
        figures = await self._loop.train(first, own)
        if figures.get(RUINED):
            return StepMetrics(figures)
        trained = time.monotonic()
        gated = await self._loop.change(outer)
        await desk.add_own(current, trained_tokens(own), gated)
        await desk.collect(current, config.quorum, config.grace_s)
        collected = time.monotonic()
        self._outer, step = await desk.close_round(current)
        self._steps = {self._outer.version: step}
        await self._loop.rebase(self._outer.masters, batch.step * steps)
        merged = [opened for opened, _ in current.arrived.values()]
        return StepMetrics(
            figures
            | {
                "tokens": float(sum(rollout_tokens[opened.node] for opened in merged)),
                "learners/merged": float(len(step.contributions)),
                "learners/missed": float(1 + len(learners) - len(step.contributions)),
                "learners/mib": sum(opened.body.artifact.size for opened in merged) / 2**20,
                "time/learners/ready": waited,
                "time/learners/collect": collected - trained,
                "time/learners/merge": time.monotonic() - collected,
            }
        )

    async def _opened(self, version: int) -> OuterState:
        """Return the outer state of `version`, which is the present one; that of the masters where none is."""
        if self._outer is None:
            masters = await self._loop.masters()
            self._outer = await asyncio.to_thread(OuterState.begin, version, masters)
        if self._outer.version != version:
            self._outer = OuterState(replace(self._outer.whole, version=version))
        return self._outer

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """See TrainBackend."""
        if self._outer is not None:
            return self._inner.snapshot()
        return asyncio.ensure_future(self._first_snapshot())

    async def _first_snapshot(self) -> Snapshot:
        await self._opened(0)
        return await self._inner.snapshot()

    async def stage(self) -> None:
        """Copy the content of a checkpoint; afterwards the weights may change."""
        assert isinstance(self._inner, StagingBackend)
        await self._inner.stage()
        outer = self._outer or await self._opened(0)
        self._staged = (outer, as_state(self._loop.residual, outer.masters))

    async def write_staged(self, directory: Path) -> None:
        """Write what was staged, the outer state among it. Raises StorageError."""
        assert isinstance(self._inner, StagingBackend)
        assert self._staged is not None
        staged, self._staged = self._staged, None
        await self._inner.write_staged(directory)
        await asyncio.to_thread(_write_outer, directory, *staged)

    async def save(self, directory: Path) -> None:
        """See TrainBackend."""
        await self._inner.save(directory)
        outer = self._outer or await self._opened(0)
        residual = as_state(self._loop.residual, outer.masters)
        await asyncio.to_thread(_write_outer, directory, outer, residual)

    async def load(self, directory: Path) -> None:
        """Continue exactly from the files that save() wrote; of a run without learners, without momentum."""
        await self._inner.load(directory)
        self._outer, self._loop.residual = None, {}
        if (directory / OUTER).exists():
            self._outer, self._loop.residual = await asyncio.to_thread(_read_outer, directory)

    async def adopt(self, file: Path, step: int) -> None:
        """See TrainBackend; the outer state begins anew."""
        await self._inner.adopt(file, step * self._config.inner_steps)
        self._outer, self._loop.residual = None, {}

    async def compile_step(self) -> None:
        """Compile the inner step, and let learners come."""
        await self._inner.compile_step()
        if self._outer is not None:
            self.desk.begin(self._outer, self._term())

    async def close(self) -> None:
        """See TrainBackend."""
        await self._inner.close()

    async def start(self, model_dir: Path) -> None:
        """See TrainBackend."""
        await self._inner.start(model_dir)

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """See TrainBackend."""
        return await self._inner.evaluate(samples)

    async def state(self) -> State:
        """See TrainBackend."""
        return await self._inner.state()

    async def export(self, directory: Path) -> None:
        """See TrainBackend."""
        await self._inner.export(directory)

    async def write_masters(self, file: Path) -> None:
        """See TrainBackend."""
        await self._inner.write_masters(file)

    async def read_masters(self, file: Path, step: int) -> None:
        """See TrainBackend; the outer state begins anew."""
        await self._inner.read_masters(file, step * self._config.inner_steps)
        self._outer, self._loop.residual = None, {}

    async def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """Make a step of the warm-up, which the trainer makes alone."""
        assert isinstance(self._inner, SupervisedBackend)
        return await self._inner.supervised_step(examples, lr)

    async def end_supervised(self) -> None:
        """Reset the optimizer after a warm-up."""
        assert isinstance(self._inner, SupervisedBackend)
        await self._inner.end_supervised()


def _write_outer(directory: Path, outer: OuterState, residual: State) -> None:
    disk = Disk(fsync=False)  # the caller syncs
    metadata = {"version": str(outer.version)}
    write_checkpoint(directory / OUTER, outer.whole.state, metadata=metadata, disk=disk)
    write_checkpoint(directory / RESIDUAL, residual, disk=disk)


def _read_outer(directory: Path) -> tuple[OuterState, Mapping[str, Floats]]:
    """Read what _write_outer() wrote. Raises StorageError."""
    try:
        version = int(read_metadata(directory / OUTER)["version"])
        outer = OuterState.of(version, read_checkpoint(directory / OUTER))
    except (CodecError, KeyError, ValueError) as error:
        raise StorageError(f"{directory / OUTER} is no outer state: {error}") from error
    return outer, read_residual(directory / RESIDUAL)
