"""The spool: on disk before anybody is told, uploaded a few at a time, kept until the receipt is here."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.bare_node import bare_services
from support.lease_cases import granted, policy
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.errors import StorageError
from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.transport import TransportError
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.lease_book import LeaseBook
from primerl.node.worker import upload
from primerl.node.worker.upload import UPLOADS, UploadQueue
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.leaders import LeaderList, certify
from primerl.protocol.leases import Lease
from primerl.protocol.rollouts import Receipt, Submission
from primerl.protocol.trust import TrustedRun

NEXT = SecretKey.from_seed(bytes(31) + b"n")
WORKER, TRAINER = SecretKey.from_seed(bytes(31) + b"w"), SecretKey.from_seed(bytes(31) + b"t")
RUN = bytes(32)


class FakeTrainer:
    """The trainer's end: what came, and what it answers."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.failures: list[Exception] = []
        self.wrong = 0
        self.now = 0
        self.most = 0
        self.came: list[int] = []

    async def take(self, sealed: bytes, lease_id: int) -> bytes:
        self.came.append(lease_id)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.open.wait()
        finally:
            self.now -= 1
        if self.failures:
            raise self.failures.pop(0)
        name = digest(b"another") if self.wrong else digest(sealed)
        self.wrong = max(0, self.wrong - 1)
        receipt = Receipt(name, lease_id, int(time.time()))
        soon = int(time.time()) + 60
        return seal(TRAINER, Purpose.RECEIPT, RUN, receipt, sequence=lease_id, expires=soon)


class UploadBench:
    """A spool over a ledger and a fake trainer."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.trainer = FakeTrainer()
        self.refused: list[Reason] = []
        self.version = 0
        trusted = TrustedRun(RUN, TRAINER.node_id)
        heads = SimpleNamespace(trusted=trusted, order=lambda: (0, self.version))
        services = bare_services(WORKER, run_id=RUN, heads=heads, ledger=ledger)
        self.leaders = trusted.leaders
        self.spool = UploadQueue(services, self.trainer.take, self.refused.append, keep_versions=2)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Uploads go on inside."""
        task = asyncio.create_task(self.spool.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def empty(self) -> bool:
        return not self.spool.leases() and not self.ledger.queued_uploads()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    yield ledger
    ledger.close()


def leases(count: int) -> list[Lease]:
    """Leases, each more urgent than the one before."""
    book = LeaseBook(policy(leases_per_worker=count, groups_per_lease=1))
    return [granted(book, now=2e9 - number) for number in range(count)]


def work(lease: Lease) -> Submission:
    return Submission(b"lease %d" % lease.lease_id, (), "scripted")


async def test_what_was_put_is_on_the_disk_and_held_until_the_receipt_is_here(
    ledger: Ledger,
) -> None:
    world = UploadBench(ledger)
    world.trainer.open.clear()
    async with world.running():
        (lease,) = leases(1)
        await world.spool.put(lease, work(lease))
        assert [row[1] for row in ledger.queued_uploads()] == [lease.lease_id]
        await until(lambda: world.trainer.now == 1)
        assert world.spool.leases() == {lease.lease_id}
        world.trainer.open.set()
        await until(world.empty)
    assert world.trainer.came == [lease.lease_id]


async def test_what_has_a_receipt_is_kept_for_the_next_leader_until_it_is_too_old(
    ledger: Ledger,
) -> None:
    world = UploadBench(ledger)
    world.leaders.admit(certify(TRAINER, RUN, LeaderList(1, (TRAINER.node_id, NEXT.node_id), 60)))
    first, second, last = leases(3)
    async with world.running():
        for lease in (first, second):
            await world.spool.put(lease, work(lease))
        await until(lambda: not world.spool.leases())
        assert len(ledger.queued_uploads()) == 2
        world.version = 2
        await world.spool.resend()  # another node leads
        await until(lambda: not world.spool.leases())
        assert sorted(world.trainer.came) == [0, 0, 1, 1]
        world.version = 5
        await world.spool.put(last, work(last))
        await until(lambda: not world.spool.leases())
        await until(lambda: [row[1] for row in ledger.queued_uploads()] == [last.lease_id])


async def test_a_node_that_was_killed_uploads_what_it_finds(ledger: Ledger) -> None:
    first = UploadBench(ledger)
    for lease in leases(3):
        await first.spool.put(lease, work(lease))
    again = UploadBench(ledger)
    again.spool.open()
    assert again.spool.leases() == {0, 1, 2}
    async with again.running():
        await until(again.empty)
    assert sorted(again.trainer.came) == [0, 1, 2]


async def test_a_few_at_a_time_and_the_most_urgent_first(ledger: Ledger) -> None:
    world = UploadBench(ledger)
    for lease in leases(8):
        await world.spool.put(lease, work(lease))
    world.trainer.open.clear()
    async with world.running():
        await until(lambda: world.trainer.now == UPLOADS)
        assert world.trainer.came == [7, 6, 5]
        world.trainer.open.set()
        await until(world.empty)
    assert world.trainer.came == [7, 6, 5, 4, 3, 2, 1, 0]
    assert world.trainer.most == UPLOADS


@pytest.mark.parametrize(
    "error",
    [
        TransportError("no way"),
        Refused(Reason.BUSY, "later"),
        Refused(Reason.DISK_FULL, "full"),
        Refused(Reason.KEY_IN_USE, "elsewhere"),
    ],
    ids=str,
)
async def test_what_failed_is_kept_and_tried_again(
    ledger: Ledger, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PAUSE_S", 0.01)
    world = UploadBench(ledger)
    world.trainer.failures = [error, error]
    async with world.running():
        for lease in leases(2):
            await world.spool.put(lease, work(lease))
        await until(world.empty)
    assert len(world.trainer.came) == 4
    assert world.refused == []


async def test_what_is_refused_for_good_is_forgotten_and_counted(ledger: Ledger) -> None:
    world = UploadBench(ledger)
    world.trainer.failures = [Refused(Reason.LEASE_EXPIRED, "too late")]
    async with world.running():
        (lease,) = leases(1)
        await world.spool.put(lease, work(lease))
        await until(world.empty)
    assert world.refused == [Reason.LEASE_EXPIRED]
    assert world.trainer.came == [lease.lease_id]


async def test_a_receipt_for_something_else_is_none(ledger: Ledger) -> None:
    world = UploadBench(ledger)
    world.trainer.wrong = 1
    async with world.running():
        (lease,) = leases(1)
        await world.spool.put(lease, work(lease))
        await until(world.empty)
    assert len(world.trainer.came) == 2


class SlowDisk(Ledger):
    """A ledger whose disk is busy until it is told otherwise."""

    ready: threading.Event
    begun: threading.Event

    def queue_upload(self, digest: bytes, lease_id: int, deadline: float, sealed: bytes) -> None:
        self.begun.set()
        if not self.ready.wait(60.0):
            raise StorageError("nobody let the disk go: the event loop waits for it")
        super().queue_upload(digest, lease_id, deadline, sealed)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowDisk]:
    slow = SlowDisk(tmp_path / "ledger.db", fsync=False)
    slow.ready, slow.begun = threading.Event(), threading.Event()
    yield slow
    slow.close()


async def test_nobody_waits_for_the_disk_but_the_lease_itself(slow: SlowDisk) -> None:
    world = UploadBench(slow)
    async with world.running():
        (lease,) = leases(1)
        putting = asyncio.create_task(world.spool.put(lease, work(lease)))
        await until(slow.begun.is_set)
        assert not putting.done()
        slow.ready.set()
        await putting
        await until(world.empty)


async def test_closing_waits_for_what_is_being_written(slow: SlowDisk, tmp_path: Path) -> None:
    world = UploadBench(slow)
    async with world.running():
        (lease,) = leases(1)
        putting = asyncio.create_task(world.spool.put(lease, work(lease)))
        await until(slow.begun.is_set)
        putting.cancel()
        threading.Timer(0.05, slow.ready.set).start()
    slow.close()
    again = Ledger(tmp_path / "ledger.db", fsync=False)
    assert [row[1] for row in again.queued_uploads()] == [lease.lease_id]
    again.close()
