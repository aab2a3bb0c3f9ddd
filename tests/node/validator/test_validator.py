"""The validator: how it audits a job, which nodes it believes, and what it keeps in its cache."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.audits import CLEAN, VALIDATOR, Told
from support.bare_node import bare_services
from support.protocol_cases import (
    BRANCH,
    LEASE,
    MANIFEST,
    NOW,
    RUN,
    SEALED_LEASE,
    STRANGER,
    SUBMISSION,
    TRAINER,
    WORKER,
    head,
    refuses,
    sealed_head,
)
from support.waiting import until

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.crypto.keys import SecretKey
from primerl.node.errors import EngineError
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.p2p.heads import HeadStore
from primerl.node.p2p.transport import StreamClosed
from primerl.node.storage.ledger import Ledger
from primerl.node.validator import loop
from primerl.node.verification.auditor import Measured, SampledSpan, Unreadable
from primerl.node.weights.replica import Policy
from primerl.protocol.audits import (
    MAX_MEASURE,
    MAX_UNREADABLE_DETAIL,
    AuditReport,
    Place,
    check_rows,
)
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.leaders import Leaders
from primerl.protocol.leases import sample_seed
from primerl.protocol.messages import (
    Accepted,
    AuditDone,
    AuditJob,
    AuditWait,
    Message,
    OtherPolicies,
)
from primerl.protocol.rollouts import BranchRecord, RolloutRecord, Submission
from primerl.protocol.session import decode, frame
from primerl.protocol.trust import TrustedRun
from primerl.protocol.version import MAX_SUBMISSION

TASK = LEASE.tasks[0].digest
LEADERS = Leaders(RUN, TRAINER.node_id)
HIDDEN = np.arange(64, dtype=np.float32).reshape(2, 32)
PROVED = msgspec.structs.replace(BRANCH, proof=Projection().make(HIDDEN))


def with_branches(*branches: BranchRecord) -> Submission:
    """The example with other branches in its first rollout."""
    groups = list(SUBMISSION.groups)
    first = (RolloutRecord(branches, 1.0, ""), *groups[0].rollouts[1:])
    groups[0] = msgspec.structs.replace(groups[0], rollouts=first)
    return msgspec.structs.replace(SUBMISSION, groups=tuple(groups))


WORK = with_branches(PROVED)


def bundle(submission: Submission = WORK, key: SecretKey = WORKER, **where: Any) -> bytes:
    """A sealed submission."""
    options: dict[str, Any] = {"recipient": TRAINER.node_id, "expires": NOW, **where}
    return seal(key, Purpose.SUBMISSION, RUN, submission, **options)


def job(data: bytes, *places: Place, **changes: Any) -> AuditJob:
    """A job on a bundle."""
    made = AuditJob(
        job=1,
        node=WORKER.node_id,
        submission=digest(data),
        size=len(data),
        challenge=digest(b"challenge"),
        chosen=places or (Place(0, 0),),
        versions=(2, 3, 4),
        others=(OtherPolicies(3, (2,)), OtherPolicies(4, (3,))),
        seconds=5.0,
    )
    return msgspec.structs.replace(made, **changes)


# -- jobs ----------------------------------------------------------------------------------------


def with_another_end(sealed: bytes) -> bytes:
    """Other bytes for certain, whatever the last one was."""
    return sealed[:-1] + bytes([sealed[-1] ^ 1])


def test_what_is_audited_follows_from_the_bundle_and_its_lease() -> None:
    data = bundle()
    (item,) = loop.job_items(job(data), data, run=MANIFEST, leaders=LEADERS)
    seed = sample_seed(RUN, LEASE, WORKER.node_id, TASK, 0, 0)
    assert (list(item.token_ids), item.replies) == ([5, 6, 7, 1], [SampledSpan(2, 4, seed)])
    assert (list(item.versions), list(item.logprobs)) == ([3, 4], [-0.5, -0.25])
    assert item.others == [2, 3]
    assert item.proof == PROVED.proof


def leased(key: SecretKey = TRAINER, to: SecretKey = WORKER) -> Submission:
    """The work with a lease of this key to that node."""
    where = {"recipient": to.node_id, "sequence": LEASE.lease_id, "expires": NOW + 180}
    sealed = seal(key, Purpose.LEASE, RUN, LEASE, **where)  # type: ignore[arg-type]
    return msgspec.structs.replace(WORK, lease=sealed)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bundle(key=STRANGER), Reason.WRONG_SIGNER),
        (bundle(recipient=STRANGER.node_id), Reason.WRONG_RECIPIENT),
        (with_another_end(bundle()), Reason.BAD_SIGNATURE),
        (bundle(leased(STRANGER)), Reason.WRONG_SIGNER),
        (bundle(leased(to=STRANGER)), Reason.WRONG_RECIPIENT),
        (bundle(msgspec.structs.replace(WORK, groups=())), Reason.WRONG_TASK),
        (SEALED_LEASE, Reason.WRONG_PURPOSE),
    ],
    ids=[
        "another worker's",
        "to another trainer",
        "changed",
        "a lease of a stranger",
        "a lease to a stranger",
        "of other tasks",
        "no bundle",
    ],
)
def test_a_bundle_that_is_not_what_the_job_says_is_not_audited(data: bytes, reason: Reason) -> None:
    with refuses(reason):
        loop.job_items(job(data), data, run=MANIFEST, leaders=LEADERS)


@pytest.mark.parametrize("place", [Place(0, 1), Place(1, 0), Place(7, 0)], ids=str)
def test_a_job_about_a_rollout_that_is_not_there_or_failed_makes_no_sense(place: Place) -> None:
    data = bundle()
    with refuses(Reason.MALFORMED):
        loop.job_items(job(data, place), data, run=MANIFEST, leaders=LEADERS)


def test_a_job_about_several_branches_or_unknown_versions_makes_no_sense() -> None:
    data = bundle(with_branches(PROVED, PROVED))
    with refuses(Reason.MALFORMED):
        loop.job_items(job(data), data, run=MANIFEST, leaders=LEADERS)
    data = bundle()
    with refuses(Reason.MALFORMED):
        loop.job_items(job(data, versions=(2, 4)), data, run=MANIFEST, leaders=LEADERS)


async def test_the_bytes_behind_a_job_must_be_those_that_it_names() -> None:
    data = bundle()
    assert await loop.read_submission(Told(bytearray(data)), job(data)) == data
    with refuses(Reason.WRONG_DIGEST):
        await loop.read_submission(Told(bytearray(with_another_end(data))), job(data))


async def test_an_oversized_job_is_refused_before_anything_is_read() -> None:
    data = bundle()
    huge = msgspec.msgpack.encode(job(data, size=MAX_SUBMISSION + 1))
    with refuses(Reason.MALFORMED):
        decode(huge, AuditJob | AuditWait)  # type: ignore[arg-type]


class Endless(Told):
    """Notes how much it is asked for at once, and ends early."""

    largest = 0

    async def read_exact(self, size: int) -> bytes:
        """See Stream."""
        self.largest = max(self.largest, size)
        raise StreamClosed("no more")


async def test_what_a_job_promises_takes_no_memory_before_it_comes() -> None:
    stream = Endless()
    with pytest.raises(StreamClosed):
        await loop.read_submission(stream, job(bundle(), size=MAX_SUBMISSION))
    assert stream.largest < 2**20


# -- reports -------------------------------------------------------------------------------------


def test_a_report_holds_numbers_whatever_was_measured() -> None:
    wild = msgspec.structs.replace(
        CLEAN, fingerprint=math.nan, sampling=math.inf, other_policy=-math.inf
    )
    data = bundle()
    asked = job(data, Place(0, 0), Place(1, 1), Place(0, 1))
    made = loop.make_report(asked, [wild, CLEAN, Unreadable("\u20ac" * 500, proof=True)])
    check_rows(made, [(0, 0), (1, 1), (0, 1)])
    assert made.measured[0].fingerprint == MAX_MEASURE  # NaN is guilty, as it is to the trainer
    assert (made.measured[0].sampling, made.measured[0].other_policy) == (MAX_MEASURE, -MAX_MEASURE)
    (row,) = made.unreadable
    assert (row.group, row.rollout, row.proof) == (0, 1, True)
    assert len(row.detail.encode()) == MAX_UNREADABLE_DETAIL


# -- the cache -----------------------------------------------------------------------------------


def policy(version: int, name: bytes = b"state") -> Policy:
    """A policy whose digest is the one that head() of protocol_cases names."""
    return Policy(version, {}, {}, digest(b"%s %d" % (name, version)))


def heads(*orders: tuple[int, int]) -> TrustedRun:
    """The heads of these (term, version)."""
    trusted = TrustedRun(RUN, TRAINER.node_id)
    for term, version in orders:
        before = trusted.heads.get((term, version - 1))
        link = before.digest if before else NO_DIGEST
        trusted.admit(sealed_head(head(version, term=term, previous=link)), now=NOW)
    return trusted


def test_a_cache_keeps_the_newest_policies() -> None:
    cache = loop.StateCache(2)
    for version in (0, 1, 2):
        cache.put(policy(version), None)
    trusted = heads((0, 0), (0, 1), (0, 2))
    assert cache.held(trusted.heads, 0) == (1, 2)
    assert cache.states((0, 1)) is None
    assert cache.states((1, 2)) == {1: {}, 2: {}}


def test_a_cache_offers_nothing_of_an_epoch_that_was_left() -> None:
    """The trainer went back, and its version 2 is another one now: the old one would convict the honest."""
    cache = loop.StateCache(8)
    cache.put(policy(1), None)
    cache.put(policy(2, b"left"), None)
    trusted = heads((0, 1), (1, 2))
    assert cache.held(trusted.heads, 1) == ()
    cache.put(policy(2), None)
    assert cache.held(trusted.heads, 1) == (2,)
    assert cache.held(trusted.heads, 0) == (1,)


async def test_a_cache_is_an_engine_that_generates_nothing() -> None:
    cache = loop.StateCache(2)
    assert cache.policy_version == -1
    await cache.load(3, {})
    assert cache.policy_version == 3
    await cache.update(4, {}, {})
    assert cache.policy_version == 4
    with pytest.raises(EngineError, match="--role inference"):
        await cache.generate(GenerateRequest((1,), 4, 1.0, 0, ()))


# -- the loop ------------------------------------------------------------------------------------


class Trainer:
    """The trainer as a ConnectionPool: the same job at every request, until there were enough reports."""

    def __init__(self, data: bytes, until: int, **changes: Any) -> None:
        self._data = data
        self._job = job(data, **changes)
        self._until = until
        self.reports: list[AuditReport] = []
        self.ended = asyncio.Event()

    async def get(self, peer: bytes, alpn: bytes) -> "Trainer":
        """See ConnectionPool."""
        return self

    async def open_stream(self) -> Told:
        """See Connection."""
        answer = Answering()
        answer.reply = bytearray(frame(self._job) + self._data)
        return answer

    async def drop(self, peer: bytes, alpn: bytes) -> None:
        """See ConnectionPool."""

    async def request(
        self, peer: bytes, alpn: bytes, message: Message, kind: type[Any], *, deadline: float
    ) -> Message:
        """See ConnectionPool."""
        await asyncio.sleep(0)  # as every real one does
        assert isinstance(message, AuditDone)
        opened = unseal(
            message.report,
            Purpose.AUDIT,
            AuditReport,
            now=0,
            run=RUN,
            signer=VALIDATOR.node_id,
            recipient=TRAINER.node_id,
        )
        self.reports.append(opened.body)
        if len(self.reports) >= self._until:
            self.ended.set()
        return Accepted()


class Answering(Told):
    """A stream with a reply; what is written to it is forgotten."""

    reply: bytearray

    async def read_exact(self, size: int) -> bytes:
        """See Stream."""
        taken = bytes(self.reply[:size])
        del self.reply[:size]
        return taken


class Measuring:
    """An Auditor that finds everything clean, or that cannot audit."""

    def __init__(self, dead: bool = False) -> None:
        self._dead = dead

    async def audit(self, items: Sequence[Any], states: Any) -> list[Measured]:
        """See Auditor."""
        if self._dead:
            raise EngineError("no memory left")
        assert sorted(states) == [2, 3, 4]
        assert all(item.others == [2, 3] for item in items)
        return [CLEAN for _ in items]


class Caught:
    """A WeightSync that has version 4."""

    version = 4

    async def wait_order(self, order: tuple[int, int], timeout: float) -> bool:
        """See WeightSync."""
        return True


class Idle:
    """A fetcher that has nothing to do."""

    def by_source(self, trainer: bytes) -> dict[str, int]:
        """See BlobFetcher."""
        return {}


def validator(
    links: Trainer, tmp_path: Path, *, auditor: Measuring | None = None, **parts: Any
) -> tuple[Any, HeadStore, Ledger]:
    """A validator that holds versions 2 to 4, its head book, and the ledger to close."""
    cache = loop.StateCache(5)
    for version in (2, 3, 4):
        cache.put(policy(version), None)
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    book = HeadStore(heads(), ledger)
    services = bare_services(VALIDATOR, links=links, heads=book, fetcher=Idle(), **parts)
    fakes: list[Any] = [Caught(), cache, auditor or Measuring()]
    return loop.ValidatorRole(services, MANIFEST, *fakes), book, ledger


async def reports_of(tmp_path: Path, count: int, data: bytes, **changes: Any) -> list[AuditReport]:
    """What a validator reports of the same job, `count` times."""
    links = Trainer(data, count, **changes)
    role, book, ledger = validator(links, tmp_path)
    running = asyncio.create_task(role.run())
    async with asyncio.timeout(60.0):
        await links.ended.wait()
    await book.end("enough")
    await running
    ledger.close()
    return links.reports


async def test_a_validator_reports_job_after_job(tmp_path: Path) -> None:
    reports = await reports_of(tmp_path, 2, bundle())
    for made in reports[:2]:
        check_rows(made, [(0, 0)])
        assert (made.job, made.submission) == (1, digest(bundle()))
        assert made.measured[0].tokens == CLEAN.tokens


async def test_a_paused_validator_asks_for_no_job_until_it_is_resumed(tmp_path: Path) -> None:
    links, why = Trainer(bundle(), 1), "outside its hours"
    role, book, ledger = validator(links, tmp_path, paused=lambda: why)
    running = asyncio.create_task(role.run())
    await until(lambda: role.waits_for == "paused: outside its hours")
    assert links.reports == []
    why = ""
    await book.wake()
    async with asyncio.timeout(60.0):
        await links.ended.wait()
    await book.end("enough")
    await running
    ledger.close()
    assert links.reports


class Gathering(Measuring):
    """An Auditor whose first audits end once `wanted` are in progress."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.most = self._now = 0
        self._wanted = wanted
        self._enough = asyncio.Event()

    async def audit(self, items: Sequence[Any], states: Any) -> list[Measured]:
        """See Auditor."""
        self._now += 1
        self.most = max(self.most, self._now)
        if self._now >= self._wanted:
            self._enough.set()
        await self._enough.wait()
        await asyncio.sleep(0.01)
        self._now -= 1
        return await super().audit(items, states)


@pytest.mark.parametrize("at_once", [1, 3])
async def test_a_validator_audits_as_many_jobs_at_once_as_it_may(
    tmp_path: Path, at_once: int
) -> None:
    links, auditor = Trainer(bundle(), 3 * at_once), Gathering(at_once)
    role, book, ledger = validator(links, tmp_path, auditor=auditor)
    role.jobs_at_once = at_once
    running = asyncio.create_task(role.run())
    async with asyncio.timeout(60.0):
        await links.ended.wait()
    assert role.waits_for == ""
    await book.end("enough")
    await running
    ledger.close()
    assert auditor.most == at_once
    assert role.audits >= 3 * at_once - 1


async def test_a_validator_says_what_it_cannot_audit_and_goes_on(tmp_path: Path) -> None:
    forged = bundle(key=STRANGER)
    reports = await reports_of(tmp_path, 4, forged)
    assert all(made.failed.startswith("wrong_signer") for made in reports)
    assert all(made.measured == () for made in reports)
    reports = await reports_of(tmp_path, 4, bundle(), versions=(3, 4, 5))
    assert all("not held" in made.failed for made in reports)


async def test_a_validator_whose_auditor_fails_thrice_ends(tmp_path: Path) -> None:
    links = Trainer(bundle(), 99)
    role, _, ledger = validator(links, tmp_path, auditor=Measuring(dead=True))
    with pytest.raises(EngineError, match="start this node again"):
        async with asyncio.timeout(60.0):
            await role.run()
    ledger.close()
    assert [made.failed for made in links.reports] == ["no memory left"] * loop.MAX_FAILURES
