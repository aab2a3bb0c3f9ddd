"""The inference role: lease -> generate -> score -> sign -> spool -> upload -> receipt.

A worker generates only under a policy whose digest it has proved, only what a lease asks for, and keeps what
it made on disk until the trainer's receipt is here.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress

from ...crypto.hashing import digest
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leases import Lease, TaskRef, sample_seed
from ...protocol.manifests import RunManifest
from ...protocol.messages import (
    MAX_HELD,
    Accepted,
    Goodbye,
    LeaseReply,
    LeaseRequest,
    WorkerStats,
)
from ...protocol.rollouts import (
    BranchRecord,
    GroupRecord,
    Receipt,
    RolloutRecord,
    Span,
    Submission,
    pack_f32,
    pack_u32,
)
from ...protocol.version import ALPN_CONTROL
from ..engines.engine import Completion, Engine, GenerateRequest
from ..environments.environment import (
    Branch,
    Environment,
    Episode,
    Task,
)
from ..errors import StorageError
from ..ledger import Ledger
from ..network.exchange import BlobFetcher
from ..network.heads import HeadBook
from ..network.links import Links
from ..network.rpc import Refused
from ..network.transport import TransportError
from ..network.uploads import upload
from .catchup import CatchUp
from .upstreams import Upstreams
from .verdicts import VerdictBox

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 20.0
PAUSE_S = 0.2
PAUSE_MAX_S = 3.0
VERSION_WAIT_S = 30.0
SUBMISSION_TTL_S = 3600
FINAL_REASONS = frozenset(set(Reason) - {Reason.BUSY, Reason.RATE_LIMITED, Reason.DISK_FULL})
"""Refusals after which the same bytes will never be taken."""


class InferenceRole:
    """One worker's loops."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run_id: bytes,
        run: RunManifest,
        links: Links,
        book: HeadBook,
        fetcher: BlobFetcher,
        catchup: CatchUp,
        engine: Engine,
        engine_name: str,
        environment: Environment,
        ledger: Ledger,
        verdicts: VerdictBox,
        upstreams: Upstreams,
        leases: int,
    ) -> None:
        self._key = key
        self._run_id = run_id
        self._run = run
        self._links = links
        self._book = book
        self._fetcher = fetcher
        self._catchup = catchup
        self._engine = engine
        self._engine_name = engine_name
        self._environment = environment
        self._ledger = ledger
        self.verdicts = verdicts
        self._upstreams = upstreams
        self._max_leases = leases
        self._spooled = asyncio.Event()
        self._active: set[int] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._clock = GenerationClock()
        self.on_not_admitted: Callable[[], None] = lambda: None

    @property
    def held(self) -> int:
        """Leases being worked on."""
        return len(self._active)

    async def run(self) -> None:
        """Work until the run ends."""
        self._spooled.set()
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self.verdicts.fetch()),
                tasks.create_task(self._catchup.run()),
                tasks.create_task(self._upload_loop()),
            ]
            await self._lease_loop(tasks)
            # Nobody waits for what is under way now: neither weights nor leases of a run that is over.
            for task in [*loops, *self._working]:
                task.cancel()

    async def leave(self) -> None:
        """Tell the trainer that our leases may go to somebody else."""
        try:
            await self._links.request(
                self._run.trainer, ALPN_CONTROL, Goodbye("leaving"), Accepted, deadline=2.0
            )
        except (TransportError, Refused, RemoteProtocolError) as error:
            logger.debug("goodbye was not heard: %s", error)

    async def _lease_loop(self, tasks: asyncio.TaskGroup) -> None:
        pause = PAUSE_S
        while not self._book.ended:
            if self._catchup.version >= self._run.max_steps:
                await self._book.end("the run has reached its last step")
                break
            wanted = self._max_leases - len(self._active)
            if self._catchup.version < 0 or wanted <= 0:
                await asyncio.sleep(0.02)
                continue
            try:
                reply = await self._ask_leases(wanted)
            except (TransportError, Refused, RemoteProtocolError) as error:
                if isinstance(error, Refused) and error.reason == Reason.BANNED:
                    await self._rest(await self.verdicts.refused(error.detail))
                    continue
                logger.info("no leases: %s", error)
                if isinstance(error, Refused) and error.reason == Reason.NOT_ADMITTED:
                    self.on_not_admitted()
                await asyncio.sleep(pause)
                pause = min(pause * 1.6, PAUSE_MAX_S)
                continue
            pause = PAUSE_S
            self.verdicts.welcome()
            for sealed in reply.leases:
                self._accept(sealed, tasks)
            if not reply.leases:
                await asyncio.sleep(reply.retry_after_ms / 1000)

    async def _rest(self, seconds: float) -> None:
        """Wait, but not beyond the end of the run."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._book.ended:
                    await self._book.wait_news(self._book.order(), seconds)

    async def _ask_leases(self, wanted: int) -> LeaseReply:
        working, generating = self._clock.read(time.monotonic())
        stats = WorkerStats(self._catchup.version, working, generating, self.chunk_sources())
        reply = await self._links.request(
            self._run.trainer,
            ALPN_CONTROL,
            LeaseRequest(wanted, stats, self._holding()),
            LeaseReply,
            deadline=ASK_TIMEOUT_S,
        )
        self._upstreams.learn(reply.upstreams, reply.downstreams)
        for sealed in reply.verdicts:
            self.verdicts.take(sealed)
        return reply

    def _holding(self) -> tuple[int, ...]:
        """Leases that the trainer need not give to others."""
        return tuple(sorted({*self._active, *self._ledger.spooled_leases()})[-MAX_HELD:])

    def chunk_sources(self) -> dict[str, int]:
        """Chunk bytes by source, as shown in tables."""
        return self._fetcher.by_source(self._run.trainer)

    def _accept(self, sealed: bytes, tasks: asyncio.TaskGroup) -> None:
        lease = unseal(
            sealed,
            Purpose.LEASE,
            Lease,
            now=int(time.time()),
            run=self._run_id,
            signer=self._run.trainer,
            recipient=self._key.node_id,
        ).body
        self._active.add(lease.lease_id)
        work = tasks.create_task(self._work(lease, sealed))
        self._working.add(work)
        work.add_done_callback(self._working.discard)

    async def _work(self, lease: Lease, sealed: bytes) -> None:
        """Do one lease; a lease that cannot be done in time is left to expire."""
        try:
            async with asyncio.timeout(max(0.0, lease.deadline - time.time())):
                order = (lease.term, lease.min_version)
                if not await self._catchup.wait_order(order, VERSION_WAIT_S):
                    return
                with self._clock.generating():
                    groups = await asyncio.gather(
                        *(self._group(lease, task) for task in lease.tasks)
                    )
            submission = Submission(sealed, tuple(groups), self._engine_name)
            self._spool(lease, submission)
        except TimeoutError:
            logger.warning("lease %d ran out of time", lease.lease_id)
        except StorageError as error:
            logger.error("lease %d is lost: %s", lease.lease_id, error)
        finally:
            self._active.discard(lease.lease_id)

    def _spool(self, lease: Lease, submission: Submission) -> None:
        bundle = seal(
            self._key,
            Purpose.SUBMISSION,
            self._run_id,
            submission,
            recipient=self._run.trainer,
            sequence=lease.lease_id,
            expires=int(time.time()) + SUBMISSION_TTL_S,
        )
        self._ledger.spool(digest(bundle), lease.lease_id, lease.deadline, bundle)
        self._spooled.set()

    async def _group(self, lease: Lease, reference: TaskRef) -> GroupRecord:
        task = self._environment.task(reference.index)
        if task.digest != reference.digest:
            detail = "this node's environment makes another task of that index"
            failed = RolloutRecord((), 0.0, detail)
            return GroupRecord(reference.index, reference.digest, (failed,) * lease.group_size)
        episodes = await asyncio.gather(
            *(self._rollout(lease, task, index) for index in range(lease.group_size))
        )
        records = tuple(rollout_record(episode) for episode in episodes)
        return GroupRecord(reference.index, reference.digest, records)

    async def _rollout(self, lease: Lease, task: Task, index: int) -> Episode:
        async def policy(prompt: Sequence[int], turn: int) -> Completion:
            seed = sample_seed(self._run_id, lease, self._key.node_id, task.digest, index, turn)
            return await self._engine.generate(
                GenerateRequest(
                    prompt=tuple(prompt),
                    max_tokens=self._run.sampling.max_tokens,
                    temperature=self._run.sampling.temperature,
                    seed=seed,
                    stop_token_ids=self._run.model.stop_token_ids,
                )
            )

        return await self._environment.run(task, policy)

    async def _upload_loop(self) -> None:
        pause = PAUSE_S
        while True:
            await self._spooled.wait()
            self._spooled.clear()
            for name, lease_id, _, sealed in self._ledger.spooled():
                try:
                    await self._upload(name, lease_id, sealed)
                    pause = PAUSE_S
                except (TransportError, Refused, RemoteProtocolError) as error:
                    logger.info("upload of lease %d waits: %s", lease_id, error)
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.6, PAUSE_MAX_S)
                    self._spooled.set()
                    break

    async def _upload(self, name: bytes, lease_id: int, sealed: bytes) -> None:
        try:
            receipt = await upload(
                self._links, self._run.trainer, sealed, lease_id, deadline=ASK_TIMEOUT_S
            )
        except Refused as refusal:
            if refusal.reason not in FINAL_REASONS:
                raise
            logger.warning("lease %d was refused: %s", lease_id, refusal)
            self.verdicts.rejected[refusal.reason.value] += 1
            self._ledger.unspool(name)
            return
        opened = unseal(
            receipt,
            Purpose.RECEIPT,
            Receipt,
            now=int(time.time()),
            run=self._run_id,
            signer=self._run.trainer,
        )
        if opened.body.submission != name:
            raise RemoteProtocolError(Reason.WRONG_DIGEST, "a receipt for something else")
        self._ledger.unspool(name)


class GenerationClock:
    """How long a worker has worked, and how much of that at least one lease was being rolled out."""

    def __init__(self) -> None:
        self._first = 0.0
        self._begun = 0.0
        self._leases = 0
        self._total = 0.0

    @contextmanager
    def generating(self) -> Generator[None, None, None]:
        """Count the time inside; several leases at once count once."""
        now = time.monotonic()
        self._first = self._first or now
        self._begun = self._begun if self._leases else now
        self._leases += 1
        try:
            yield
        finally:
            self._leases -= 1
            if not self._leases:
                self._total += time.monotonic() - self._begun

    def read(self, now: float) -> tuple[float, float]:
        """(seconds since the first lease, seconds of these spent generating)."""
        if not self._first:
            return 0.0, 0.0
        return now - self._first, self._total + (now - self._begun if self._leases else 0.0)


def rollout_record(episode: Episode) -> RolloutRecord:
    """An episode as it travels."""
    branches = tuple(branch_record(branch) for branch in episode.branches)
    return RolloutRecord(branches, episode.score.reward, episode.error[:500])


def branch_record(branch: Branch) -> BranchRecord:
    """A branch as it travels."""
    drawn = [value for value, flag in zip(branch.logprobs, branch.sampled, strict=True) if flag]
    return BranchRecord(
        tokens=pack_u32(branch.token_ids),
        sampled=bytes(branch.sampled),
        logprobs=pack_f32(drawn),
        policy_first=branch.policy_first,
        policy_last=branch.policy_last,
        finish=branch.finish,
        spans=tuple(Span(start, version) for start, version in branch.spans),
        proof=branch.proof,
    )
