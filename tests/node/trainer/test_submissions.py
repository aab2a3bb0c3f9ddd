"""Submissions are verified several at a time, and judged as if it had been one after the other."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.bare_node import bare_services
from support.kept_cases import keeper
from support.lease_cases import policy
from support.protocol_cases import LEASE, MIXED, MIXED_LEASE, PROOFS, RUN
from support.waiting import until

from primerl.crypto.keys import SecretKey
from primerl.node.config.training import TrainingConfig
from primerl.node.errors import StorageError
from primerl.node.storage.ledger import HonestRollout, QueuedSubmission
from primerl.node.trainer.bounds_book import BoundsBook
from primerl.node.trainer.lease_book import MAX_TRIES, LeaseBook, MixtureShare
from primerl.node.trainer.lease_outcomes import WorkRecords, count_lease
from primerl.node.trainer.state import Progress
from primerl.node.trainer.submissions import CONCURRENT_CHECKS, UNJUDGED, SubmissionQueue
from primerl.node.training.buffer import RolloutBuffer
from primerl.node.training.curriculum import Curriculum
from primerl.node.verification.judgement import StageAttribution
from primerl.node.verification.self_calibration import AuditConditions
from primerl.node.verification.verdict import (
    AuditResults,
    ReceivedSubmission,
    Verified,
    make_verdict,
    refuse_all,
)
from primerl.protocol.audits import CHALLENGE_BYTES
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.leases import Lease
from primerl.protocol.reputation import Reputation, ban_test
from primerl.protocol.rollouts import Rejection, Submission, Verdict

WORKER = b"w" * 32
KEY = SecretKey.from_seed(bytes(32))


def arrived(number: int) -> QueuedSubmission:
    return QueuedSubmission(number, number.to_bytes(32, "big"), number, WORKER, b"sealed")


class Auditor:
    """Verifies what it is told to let go, in any order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.challenges: list[bytes] = []
        self.told: list[Verdict] = []
        """Verdicts from before a restart."""
        self.free: dict[int, asyncio.Event] = {}
        self.broken: set[int] = set()
        self.refused: dict[int, Reason] = {}
        self.rates: dict[int, float] = {}

    async def close(self) -> None:
        pass

    async def verify(
        self,
        *_: object,
        version: int,
        rate: float,
        conditions: AuditConditions | None,
        before: Verdict | None,
    ) -> Verified:
        arrival = next(one for one in _ if isinstance(one, ReceivedSubmission))
        self.begun.append(arrival.number)
        self.challenges.append(arrival.challenge)
        self.rates[arrival.number] = rate
        if before is not None:
            self.told.append(before)
        await self.free.setdefault(arrival.number, asyncio.Event()).wait()
        if arrival.number in self.broken:
            raise StorageError("no disk")
        if arrival.number in self.refused:
            error = RemoteProtocolError(self.refused[arrival.number], "another")
            return refuse_all(arrival, LEASE, error)
        verdict = make_verdict(arrival, LEASE, 1, [], AuditResults(), rate)
        return Verified(verdict, [], [])

    def let_go(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.free.setdefault(number, asyncio.Event()).set()


WORDS = range(100, 200)
"""Numbers of submissions of the second environment."""


class Opened(SubmissionQueue):
    """Every submission of it is an empty one; notes whose work was used."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taken: list[int] = []

    def take(self, node: bytes, submission: Submission, lease: Lease, verified: Verified) -> None:
        self.taken.append(int.from_bytes(verified.verdict.submission, "big"))
        super().take(node, submission, lease, verified)

    def open(self, arrived: QueuedSubmission) -> tuple[Submission, Lease]:
        lease = MIXED_LEASE if arrived.arrival in WORDS else LEASE
        return Submission(lease=b"", groups=(), engine="hf"), lease


class GivenBounds(BoundsBook):
    """Gives every submission the conditions that a test says."""

    given: AuditConditions | None = None

    def conditions(self, node: bytes, submission: Submission) -> AuditConditions | None:
        return self.given


class World:
    """A submission queue with a ledger and a scheduler that only remember."""

    def __init__(
        self, before: Iterable[int] = (), told: Iterable[tuple[int, Verdict]] = ()
    ) -> None:
        self.auditor, self.progress = Auditor(), Progress()
        self.judged: list[int] = []
        self.left = [arrived(number) for number in before]
        self.verdicts = {
            number: seal(KEY, Purpose.VERDICT, RUN, verdict, expires=1) for number, verdict in told
        }
        """By arrival."""
        self.reputations: dict[bytes, Reputation] = {}
        ledger = SimpleNamespace(
            arrived_after=self.arrived_after,
            add_verdict=self.add_verdict,
            verdict_on=self.verdicts.get,
            judged_up_to=lambda: max(self.verdicts, default=0),
        )
        services = bare_services(ledger=ledger)
        self.bounds = GivenBounds(services, None, self.reputation)
        registry = SimpleNamespace(
            services=services,
            bounds=self.bounds,
            reputation=self.reputation,
            present_key=bytes,
            pipelines=SimpleNamespace(dissolve=None),
            workers={},
            environments=MIXED.environments,
            work=WorkRecords(),
        )
        self.work = registry.work
        self.book = book = LeaseBook(policy(environments=(MixtureShare(4), MixtureShare(4))))
        scheduler = SimpleNamespace(
            registry=registry, book=book, work_changed=self.nothing, version=0
        )
        self.queue = Opened(
            cast(Any, scheduler),
            cast(Any, self.auditor),
            PROOFS,
            ban_test(PROOFS, 1000),
            RolloutBuffer(max_off_policy_steps=2, capacity=100),
            self.progress,
            keeper(Path()),
            defaultdict(lambda: Curriculum(TrainingConfig(), environment="e", seed=0)),
        )

    def arrived_after(self, arrival: int) -> list[QueuedSubmission]:
        return [one for one in self.left if one.arrival > arrival]

    def add_verdict(
        self,
        node: bytes,
        sealed: bytes,
        arrival: int,
        reputations: dict[bytes, bytes],
        honest: Sequence[HonestRollout],
        bounds: dict[bytes, bytes],
        clean: bool = False,
    ) -> None:
        assert not honest
        assert not bounds
        assert arrival == self.progress.verified_up_to
        assert node in reputations
        self.verdicts[arrival] = sealed
        self.judged.append(arrival)

    def reputation(self, node: bytes) -> Reputation:
        return self.reputations.setdefault(node, Reputation())

    async def nothing(self) -> None:
        pass

    async def judged_are(self, numbers: list[int]) -> None:
        await until(lambda: self.judged == numbers)


@asynccontextmanager
async def running(world: World) -> AsyncGenerator["asyncio.Task[None]"]:
    task = asyncio.create_task(world.queue.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_verified_first_waits_to_be_judged_until_its_turn() -> None:
    world = World()
    for number in (1, 2, 3):
        world.queue.put(arrived(number))
    async with running(world):
        await until(lambda: world.auditor.begun == [1, 2, 3])
        world.auditor.let_go([3, 2])
        await asyncio.sleep(0.02)
        assert (world.judged, world.queue.waiting(), world.progress.verified_up_to) == ([], 1, 0)
        world.auditor.let_go([1])
        await world.judged_are([1, 2, 3])
    assert (world.queue.waiting(), world.progress.accepted) == (0, 3)


async def test_work_that_is_verified_is_used_while_an_earlier_submission_is_audited() -> None:
    world = World()
    for number in (1, 2, 3):
        world.queue.put(arrived(number))
    async with running(world):
        world.auditor.let_go([3, 2])
        await until(lambda: world.progress.accepted == 2)
        assert (world.judged, world.queue.waiting(), world.progress.verified_up_to) == ([], 1, 0)
        assert world.progress.used == dict.fromkeys((2, 3), WORKER)
        assert sorted(world.queue.taken) == [2, 3]
        world.auditor.let_go([1])
        await world.judged_are([1, 2, 3])
    assert world.queue.taken[2:] == [1]
    assert world.progress.used == {}


async def test_work_that_a_checkpoint_contains_is_judged_and_not_used_again() -> None:
    world = World(before=[4, 5, 6])
    world.progress.verified_up_to, world.progress.used = 3, {5: WORKER}
    world.auditor.let_go([4, 5, 6])
    async with running(world):
        await world.judged_are([4, 5, 6])
    assert world.queue.taken == [4, 6]
    assert (world.progress.accepted, world.progress.used) == (2, {})


async def test_no_more_are_begun_ahead_of_the_oldest_than_evidence_may_lag_behind() -> None:
    world = World()
    for number in range(1, UNJUDGED + 10):
        world.queue.put(arrived(number))
    world.auditor.let_go(range(2, UNJUDGED + 10))
    async with running(world):
        await until(lambda: len(world.queue.taken) == UNJUDGED - 1)
        await asyncio.sleep(0.02)
        assert sorted(world.auditor.begun) == list(range(1, UNJUDGED + 1))
        assert world.judged == []
        world.auditor.let_go([1])
        await world.judged_are(list(range(1, UNJUDGED + 10)))


async def test_a_bundle_that_is_refused_counts_for_the_environment_of_its_lease() -> None:
    world = World(before=[1, 2])
    world.auditor.refused = {2: Reason.WRONG_TASK}
    world.auditor.let_go([1, 2])
    async with running(world):
        await world.judged_are([1, 2])
    assert world.progress.accepted_of == {"sums": 1}
    assert world.progress.rejected_of == {"sums": len(LEASE.tasks) * LEASE.group_size}


async def test_a_worker_that_earned_trust_in_one_environment_is_audited_as_a_newcomer_in_another() -> (
    None
):
    """Attack: a thousand good rollouts of `sums`, then invented rewards of `words`."""
    world = World(before=[1, WORDS[0]])
    peer = world.reputation(WORKER)
    peer.record("sums", 1000, Counter(), time.time())
    peer.audited = 1000
    world.auditor.refused = {WORDS[0]: Reason.BAD_REWARD}
    world.auditor.let_go([1, WORDS[0]])
    async with running(world):
        await world.judged_are([1, WORDS[0]])
    assert world.auditor.rates == {1: pytest.approx(PROOFS.audit_rate), WORDS[0]: 1.0}
    assert peer.of("words").quarantined
    assert not peer.of("sums").quarantined
    assert (peer.accepted, peer.banned) == (1001, "")
    assert peer.recent_fault, "for now everything of it is audited"


async def test_a_proven_reference_is_audited_less_until_a_fault() -> None:
    world = World(before=[1, 2])
    world.bounds.given = AuditConditions(PROOFS, by_trainer=True, audit_rate=0.01)
    peer = world.reputation(WORKER)
    peer.record("sums", 100_000, Counter(), time.time())
    peer.audited = 100_000
    world.auditor.refused = {1: Reason.BAD_REWARD}
    world.auditor.let_go([1, 2])
    async with running(world):
        await world.judged_are([1, 2])
        world.queue.put(arrived(3))
        world.auditor.let_go([3])
        await world.judged_are([1, 2, 3])
    assert world.auditor.rates[1] == pytest.approx(0.01)
    assert world.auditor.rates[3] == 1.0


async def test_no_more_are_verified_at_a_time_than_there_is_room_for() -> None:
    world = World()
    for number in range(1, 2 * CONCURRENT_CHECKS + 1):
        world.queue.put(arrived(number))
    async with running(world):
        await until(lambda: len(world.auditor.begun) == CONCURRENT_CHECKS)
        await asyncio.sleep(0.02)
        assert len(world.auditor.begun) == CONCURRENT_CHECKS
        assert world.queue.waiting() == 2 * CONCURRENT_CHECKS
        world.auditor.let_go([1])
        await until(lambda: len(world.auditor.begun) == CONCURRENT_CHECKS + 1)


async def test_what_was_left_from_before_comes_first_and_once() -> None:
    world = World(before=[4, 5])
    world.progress.verified_up_to = 3
    for number in (5, 6):  # 5 came while the ledger was read
        world.queue.put(arrived(number))
    world.auditor.let_go([4, 5, 6])
    async with running(world):
        await world.judged_are([4, 5, 6])
    assert world.auditor.begun == [4, 5, 6]


async def test_what_was_judged_before_a_restart_keeps_its_verdict_and_counts_once() -> None:
    arrival = ReceivedSubmission(4, bytes(32), WORKER, b"sealed", bytes(32))
    verdict = make_verdict(arrival, LEASE, 1, [], AuditResults(), 0.5)
    world = World(before=[4, 5], told=[(4, verdict)])
    world.progress.verified_up_to = 3
    sealed = world.verdicts[4]
    world.auditor.let_go([4, 5])
    async with running(world):
        await world.judged_are([5])
    assert world.auditor.told == [verdict]
    assert world.verdicts[4] == sealed
    assert world.progress.accepted == 2  # both are learned from, as neither is in the checkpoint
    assert world.reputations[WORKER].accepted == 1


async def test_what_is_audited_cannot_be_told_from_the_bundle() -> None:
    challenges: set[bytes] = set()
    for _ in range(3):
        world = World(before=[1])
        world.auditor.let_go([1])
        async with running(world):
            await world.judged_are([1])
        challenges.update(world.auditor.challenges)
    assert len(challenges) == 3  # the same bytes, another draw each time
    assert {len(challenge) for challenge in challenges} == {CHALLENGE_BYTES}


async def test_an_error_in_one_of_many_ends_the_queue_with_that_error() -> None:
    world = World()
    for number in (1, 2, 3):
        world.queue.put(arrived(number))
    world.auditor.broken = {2}
    async with running(world) as queue:
        await until(lambda: world.auditor.begun == [1, 2, 3])
        world.auditor.let_go([2])
        with pytest.raises(StorageError, match="no disk"):
            await queue


OTHER = b"o" * 32


async def test_work_of_a_policy_that_the_trainer_lost_costs_its_worker_nothing() -> None:
    world = World(before=[1])
    arrival = ReceivedSubmission(9, bytes(32), OTHER, b"sealed", bytes(32))
    size = len(LEASE.tasks) * LEASE.group_size
    good = Verified(make_verdict(arrival, LEASE, size, [], AuditResults(), 0.5), [], [])
    world.work.judge(OTHER, Submission(lease=b"", groups=(), engine="hf"), LEASE, good)

    def voids(*_: object) -> bool:
        return True

    world.queue.epoch = cast(Any, SimpleNamespace(voids=voids))
    async with running(world):
        await world.judged_are([1])
    record = world.book.record(WORKER)
    assert (record.lost_groups, record.reliability, record.rest_until) == (0.0, 1.0, 0.0)
    again = [task.index for task in LEASE.tasks]
    for _ in range(MAX_TRIES - 1):
        for index in again:
            world.book.lease_again(0, index)
    assert list(world.book.tasks[0].requeued) == again


@pytest.mark.parametrize(("stages", "lost"), [((1,), 0), ((0, 1), 0), ((0,), 1)])
def test_what_another_stage_may_have_spoilt_is_no_loss_of_the_signer(
    stages: tuple[int, ...], lost: int
) -> None:
    rejections = [Rejection(0, 0, Reason.BAD_PROOF, "")]
    blame = StageAttribution(0, 0, (9.0, 0.0), "rejected", stages)
    arrival = ReceivedSubmission(9, bytes(32), WORKER, b"sealed", bytes(32))
    audited = AuditResults(blames=[blame])
    verified = Verified(
        make_verdict(arrival, LEASE, 0, rejections, audited, 0.5), rejections, [], audited
    )
    counts = count_lease(Submission(lease=b"", groups=(), engine="hf"), LEASE, verified)
    rollouts = len(LEASE.tasks) * LEASE.group_size
    assert (counts.lost, counts.rollouts) == (lost, rollouts - 1 + lost)
