"""Submissions that are not what they should be: stolen, replayed, late, lying about size or content."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.bare_node import bare_services
from support.hostile import DEADLINE, Rogue, altered, reason_of, soon
from support.memory_network import MemoryNetwork
from support.protocol_cases import LEASE, LISTED, RUN, TRAINER, WORKER
from support.protocol_cases import STRANGER as SUCCESSOR
from support.swarm import Swarm
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.rpc import Refused, receive_reply, send
from primerl.node.p2p.transport import Stream, StreamClosed
from primerl.node.p2p.uploads import PARTIALS_PER_PEER, PIECE_BYTES, UploadReceiver
from primerl.node.storage.ledger import Ledger, QueuedSubmission
from primerl.node.trainer.lease_book import LeaseBook, LeasePolicy, MixtureShare
from primerl.node.trainer.state import LEASES_PER_BOOT
from primerl.node.trainer.submissions import SubmissionReceiver
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.leaders import certify, without
from primerl.protocol.leases import Lease
from primerl.protocol.messages import SubmitFrom, SubmitOffer, Submitted
from primerl.protocol.rollouts import Receipt, Submission
from primerl.protocol.version import ALPN_CONTROL

pytestmark = pytest.mark.asyncio(loop_scope="session")

STRANGER = SecretKey.from_seed(b"s" * 32)
OTHER_RUN = b"o" * 32


async def total(swarm: Swarm) -> int:
    """Rollouts judged so far."""
    status = await swarm.trainer.status()
    return status["accepted"] + sum(status["rejected"].values())


async def test_envelopes_that_are_not_ours_to_send_are_refused(siege: Swarm) -> None:
    async with Rogue(siege, "forger") as rogue:
        await rogue.hello()
        lease, sealed = await rogue.lease()
        groups = await rogue.play(lease)
        good = rogue.bundle(sealed, groups)
        wrong = {
            "another run": (rogue.bundle(sealed, groups, run=OTHER_RUN), Reason.WRONG_RUN),
            "another key": (rogue.bundle(sealed, groups, key=STRANGER), Reason.WRONG_SIGNER),
            "another trainer": (
                rogue.bundle(sealed, groups, recipient=STRANGER.node_id),
                Reason.WRONG_RECIPIENT,
            ),
            "another purpose": (
                rogue.bundle(sealed, groups, purpose=Purpose.PEER),
                Reason.WRONG_PURPOSE,
            ),
            "an old one": (rogue.bundle(sealed, groups, expires=1000), Reason.EXPIRED),
            "a changed byte": (good[:-1] + bytes([good[-1] ^ 1]), Reason.BAD_SIGNATURE),
            "noise": (b"\xc1" * 500, Reason.MALFORMED),
            "no submission": (
                seal(
                    rogue.key,
                    Purpose.SUBMISSION,
                    rogue.run,
                    b"\x93\x01",
                    recipient=rogue.trainer,
                    expires=soon(),
                ),
                Reason.MALFORMED,
            ),
        }
        found = {
            name: await reason_of(rogue.submit(bundle, lease.lease_id))
            for name, (bundle, _) in wrong.items()
        }
        assert found == {name: reason for name, (_, reason) in wrong.items()}
        # None of it cost the lease.
        assert (await rogue.submit(good, lease.lease_id)).lease_id == lease.lease_id
        assert (await rogue.verdict(lease.lease_id)).accepted == 4


async def test_a_lease_that_the_trainer_did_not_give_to_this_node_is_refused(siege: Swarm) -> None:
    async with Rogue(siege, "thief") as thief, Rogue(siege, "owner") as owner:
        await thief.hello()
        await owner.hello()
        lease, sealed = await owner.lease()
        groups = await owner.play(lease)
        stolen = thief.bundle(sealed, groups)
        assert await reason_of(thief.submit(stolen, lease.lease_id)) == Reason.WRONG_RECIPIENT
        wrong: dict[bytes, Reason] = {
            thief_lease(thief, lease, key=thief.key): Reason.WRONG_SIGNER,
            thief_lease(thief, lease, key=siege.trainer.key, run=OTHER_RUN): Reason.WRONG_RUN,
            b"": Reason.MALFORMED,
        }
        for forged, reason in wrong.items():
            bundle = thief.bundle(forged, groups)
            assert await reason_of(thief.submit(bundle, lease.lease_id)) == reason
        assert (await owner.submit(owner.bundle(sealed, groups), lease.lease_id)).lease_id


def thief_lease(thief: Rogue, lease: Lease, key: SecretKey, run: bytes | None = None) -> bytes:
    """The lease sealed once more, by a key that may not or for another run."""
    return seal(
        key,
        Purpose.LEASE,
        run or thief.run,
        lease,
        recipient=thief.key.node_id,
        sequence=lease.lease_id,
        expires=soon(),
    )


async def test_a_lease_that_never_reached_its_worker_is_leased_again(siege: Swarm) -> None:
    async with Rogue(siege, "deaf") as deaf, Rogue(siege, "other") as other:
        await deaf.hello()
        await other.hello()
        await deaf.earn()
        lost, _ = await deaf.lease()
        kept, sealed = await deaf.lease()
        await deaf.poll(0, holding=(kept.lease_id,))
        async with asyncio.timeout(DEADLINE):
            again, grant = await other.lease()
            while again.tasks != lost.tasks:  # what earlier attacks lost comes first
                groups = await other.play(again)
                await other.submit(other.bundle(grant, groups), again.lease_id)
                again, grant = await other.lease()
        bundle = deaf.bundle(sealed, await deaf.play(kept))
        assert (await deaf.submit(bundle, kept.lease_id)).lease_id == kept.lease_id


async def test_the_number_of_another_lease_is_refused(siege: Swarm) -> None:
    async with Rogue(siege, "two leases") as rogue:
        await rogue.hello()
        await rogue.earn()
        first, sealed = await rogue.lease()
        second, _ = await rogue.lease()
        bundle = rogue.bundle(sealed, await rogue.play(first))
        assert await reason_of(rogue.submit(bundle, second.lease_id)) == Reason.UNKNOWN_LEASE
        assert await reason_of(rogue.submit(bundle, 7)) == Reason.UNKNOWN_LEASE
        never = second.lease_id + 1000
        assert await reason_of(rogue.submit(bundle, never)) == Reason.LEASE_EXPIRED


async def test_a_replay_gets_the_same_receipt_and_counts_once(siege: Swarm) -> None:
    async with Rogue(siege, "repeater") as rogue, Rogue(siege, "copycat") as copycat:
        await rogue.hello()
        await copycat.hello()
        lease, sealed = await rogue.lease()
        groups = await rogue.play(lease)
        bundle = rogue.bundle(sealed, groups)
        receipt = await rogue.submit(bundle, lease.lease_id)
        await rogue.verdict(lease.lease_id)
        counted = await total(siege)
        assert await rogue.submit(bundle, lease.lease_id) == receipt
        assert await reason_of(copycat.submit(bundle, lease.lease_id)) == Reason.REPLAYED
        for other in (
            rogue.bundle(sealed, groups, engine="again"),
            rogue.bundle(sealed, [altered(groups[0], 0, reward=0.5)]),
        ):
            assert await reason_of(rogue.submit(other, lease.lease_id)) == Reason.LEASE_DONE
        assert await total(siege) == counted


async def test_a_lease_that_ran_out_is_refused(tmp_path: Path, model_dir: Path) -> None:
    rollouts = {"groups_per_lease": 1, "lease_timeout_s": 0.2}
    async with Swarm(tmp_path, model_dir, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "late") as rogue:
            await rogue.hello()
            lease, sealed = await rogue.lease()
            bundle = rogue.bundle(sealed, await rogue.play(lease))
            async with asyncio.timeout(60.0):
                while True:
                    if not (await swarm.trainer.status())["leases"]:
                        break
                    await asyncio.sleep(0.05)
            assert await reason_of(rogue.submit(bundle, lease.lease_id)) == Reason.LEASE_EXPIRED
        swarm.add_worker("honest")
        await swarm.wait_step(1)


class Uploading:
    """A stream on which all bytes of an upload lie already."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    async def read_exact(self, size: int) -> bytes:
        part, self._left = self._left[:size], self._left[size:]
        return part

    async def write(self, data: bytes) -> None:
        pass

    async def finish(self) -> None:
        pass


class Receiving:
    """A trainer's end without a network: `taken` is what is queued to be verified."""

    def __init__(self, ledger: Ledger, boot: int = 0, key: SecretKey = TRAINER) -> None:
        """`key` leads the run; TRAINER has leased the work."""
        self.ledger = ledger
        self._services = services = bare_services(key, ledger=ledger)
        services.leaders.admit(certify(TRAINER, RUN, LISTED))
        self.taken: list[QueuedSubmission] = []
        policy = LeasePolicy((MixtureShare(2),), 8, 2, 2, 4, timeout_s=60.0, max_bytes=1 << 20)
        scheduler = SimpleNamespace(
            registry=SimpleNamespace(services=services),
            book=LeaseBook(policy),
            work_changed=self._work_changed,
        )
        queue = SimpleNamespace(full=False, put=self.taken.append, progress=None)
        self._receiver = SubmissionReceiver(cast(Any, scheduler), cast(Any, queue), boot)

    async def _work_changed(self) -> None:
        pass

    def revoke(self) -> None:
        """Let TRAINER lead no more."""
        self._services.leaders.admit(certify(TRAINER, RUN, without(LISTED, [TRAINER.node_id])))

    async def submit(self, number: int, over_s: float = -60.0) -> bytes:
        """Hand in empty work for a lease that is over since then; return its digest."""
        lease = msgspec.structs.replace(
            LEASE, lease_id=LEASE.lease_id + number, deadline=time.time() - over_s
        )
        sealed = seal(TRAINER, Purpose.LEASE, RUN, lease, recipient=WORKER.node_id, expires=soon())
        bundle = seal(
            WORKER,
            Purpose.SUBMISSION,
            RUN,
            Submission(sealed, (), "hf"),
            recipient=TRAINER.node_id,
            expires=soon(),
        )
        offer = SubmitOffer(digest(bundle), len(bundle), lease.lease_id)
        await self._receiver.handle(WORKER.node_id, cast(Stream, Uploading(bundle)), offer)
        return offer.digest


LATER_BOOT = (LEASE.lease_id >> LEASES_PER_BOOT) + 1


async def test_work_from_before_a_restart_is_taken_only_until_its_lease_is_over(
    tmp_path: Path,
) -> None:
    """What a trainer leased before its start is in no book: the deadline that it signed is what counts."""
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    trainer = Receiving(ledger, LATER_BOOT)
    try:
        assert ledger.received(await trainer.submit(1)) is not None
        with pytest.raises(RemoteProtocolError, match="is over") as late:
            await trainer.submit(2, over_s=60.0)
        assert late.value.reason == Reason.LEASE_EXPIRED
        assert ledger.last_arrival() == 1
    finally:
        ledger.close()


async def test_work_that_the_leader_before_leased_is_taken_though_its_lease_is_over(
    tmp_path: Path,
) -> None:
    """Its worker had nobody to send it to. What was leased by, and meant for, a revoked key does not count."""
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    try:
        successor = Receiving(ledger, LATER_BOOT, SUCCESSOR)
        assert ledger.received(await successor.submit(1, over_s=60.0)) is not None
        successor.revoke()
        with pytest.raises(RemoteProtocolError, match="another node"):
            await successor.submit(2)
    finally:
        ledger.close()


class HeldLedger(Ledger):
    """A ledger whose disk takes its time for a submission."""

    def __init__(self, path: Path) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        super().__init__(path, fsync=False)

    def receive(
        self, digest: bytes, lease_id: int, node: bytes, sealed: bytes, received: int
    ) -> int:
        self.begun.set()
        assert self.goes_on.wait(60.0)
        return super().receive(digest, lease_id, node, sealed, received)


async def test_the_loop_goes_on_while_a_submission_is_written_and_what_is_durable_is_queued_in_order(
    tmp_path: Path,
) -> None:
    """Before, 72 MB stopped all nodes' requests for a second. A sender that leaves meanwhile loses nothing."""
    ledger = HeldLedger(tmp_path / "ledger.db")
    trainer = Receiving(ledger, LATER_BOOT)
    try:
        leaving = asyncio.create_task(trainer.submit(1))
        await until(ledger.begun.is_set)
        others = [asyncio.create_task(trainer.submit(number)) for number in (2, 3)]
        again = asyncio.create_task(trainer.submit(1))
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in (leaving, *others, again)), "no receipt before"
        assert (trainer.taken, ledger.last_arrival()) == ([], 0)
        leaving.cancel()
        ledger.goes_on.set()
        names = await asyncio.gather(*others, again, leaving, return_exceptions=True)
        assert isinstance(names.pop(), asyncio.CancelledError)
        assert [one.arrival for one in trainer.taken] == [1, 2, 3]
        assert {one.digest for one in trainer.taken} >= set(names[:2])
        assert all(ledger.received(one.digest) for one in trainer.taken)
    finally:
        ledger.goes_on.set()
        ledger.close()


# -- lies about bytes ----------------------------------------------------------------------------------


async def test_offers_that_lie_about_size_or_digest_are_refused(siege: Swarm) -> None:
    async with Rogue(siege, "fibber") as rogue:
        await rogue.hello()
        lease, sealed = await rogue.lease()
        bundle = rogue.bundle(sealed, await rogue.play(lease))
        number = lease.lease_id
        assert await reason_of(rogue.submit(bundle, number, size=200 << 20)) == Reason.TOO_LARGE
        assert await reason_of(rogue.submit(bundle, number, size=1 << 40)) == Reason.MALFORMED
        lie = digest(b"something else")
        assert await reason_of(rogue.submit(bundle, number, digest=lie)) == Reason.WRONG_DIGEST
        short = rogue.submit(bundle, number, size=len(bundle) - 1)
        assert await reason_of(short) == Reason.WRONG_DIGEST
        assert (await rogue.submit(bundle, number)).lease_id == number


async def once_free(submit: Callable[[], Awaitable[Receipt]]) -> Receipt:
    """Submit once the trainer knows that the upload before this one has ended."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                return await submit()
            except Refused as refusal:
                if refusal.reason is not Reason.BUSY:
                    raise
            await asyncio.sleep(0.05)


async def test_an_upload_that_broke_off_goes_on_where_it_stopped(siege: Swarm) -> None:
    async with Rogue(siege, "flaky") as rogue:
        await rogue.hello()
        lease, sealed = await rogue.lease()
        bundle = rogue.bundle(sealed, await rogue.play(lease))
        offer = SubmitOffer(digest(bundle), len(bundle), lease.lease_id)
        stream = await (await rogue.control()).open_stream()
        await send(stream, offer)
        assert await receive_reply(stream, SubmitFrom) == SubmitFrom(0)
        await stream.write(bundle[:100])
        await stream.finish()
        receipt = await once_free(lambda: rogue.submit(bundle, lease.lease_id))
        assert receipt.submission == digest(bundle)


async def test_unfinished_uploads_are_few_per_peer(siege: Swarm) -> None:
    async with Rogue(siege, "hoarder") as rogue:
        await rogue.hello()
        lease, _ = await rogue.lease()
        connection = await rogue.control()
        streams = [await connection.open_stream() for _ in range(PARTIALS_PER_PEER)]
        for number, stream in enumerate(streams):
            await send(stream, SubmitOffer(bytes([number]) * 32, 1000, lease.lease_id))
            assert await receive_reply(stream, SubmitFrom) == SubmitFrom(0)
        more = rogue.ask(SubmitOffer(b"m" * 32, 1000, lease.lease_id), SubmitFrom)
        assert await reason_of(more) == Reason.RATE_LIMITED
        for stream in streams:
            await stream.abort()


async def test_uploads_that_broke_off_keep_no_peer_from_sending_others() -> None:
    network = MemoryNetwork()
    near, far = network.transport(b"n" * 32), network.transport(b"f" * 32)
    connection = await near.connect(far.node_id, far.addresses(), ALPN_CONTROL, deadline=60.0)
    accepted = await far.accept()
    receiver = UploadReceiver()
    kept: list[bytes] = []
    streams: list[Stream] = []

    async def keep(data: bytes) -> bytes:
        kept.append(data)
        return b"receipt"

    async def begin(data: bytes, sent: bytes) -> tuple["asyncio.Task[None]", int]:
        """Offer `data`, send a part and end; return the receiving task, and from where it goes on."""
        stream = await connection.open_stream()
        streams.append(stream)
        await stream.write(b"\x00")
        theirs = await accepted.accept_stream()
        await theirs.read_exact(1)
        offer = SubmitOffer(digest(data), len(data), 1)
        taking = asyncio.create_task(
            receiver.receive(near.node_id, theirs, offer, limit=1 << 20, accept=keep)
        )
        reply = await receive_reply(stream, SubmitFrom)
        await stream.write(sent)
        await stream.finish()
        return taking, reply.offset

    cut = [bytes([number]) * (PIECE_BYTES + 9) for number in range(2 * PARTIALS_PER_PEER)]
    for data in cut:
        taking, _ = await begin(data, data[: PIECE_BYTES + 4])
        with pytest.raises(StreamClosed):
            await taking
    taking, _ = await begin(b"another", b"another")
    await taking
    assert kept == [b"another"]
    taking, offset = await begin(cut[-1], cut[-1][PIECE_BYTES:])
    await taking
    assert offset == PIECE_BYTES, "the newest goes on where it broke off"
    taking, offset = await begin(cut[0], cut[0])
    await taking
    assert offset == 0, "what is kept of a peer is bounded"
    assert kept == [b"another", cut[-1], cut[0]]


async def test_an_upload_goes_on_over_a_new_stream_while_the_old_one_is_dead_unnoticed() -> None:
    network = MemoryNetwork()
    near, far = network.transport(b"n" * 32), network.transport(b"f" * 32)
    connection = await near.connect(far.node_id, far.addresses(), ALPN_CONTROL, deadline=60.0)
    accepted = await far.accept()
    receiver = UploadReceiver()

    async def keep(data: bytes) -> bytes:
        return data

    async def stream_pair() -> tuple[Stream, Stream]:
        stream = await connection.open_stream()
        await stream.write(b"\x00")
        theirs = await accepted.accept_stream()
        await theirs.read_exact(1)
        return stream, theirs

    offer = SubmitOffer(digest(b"whole"), 5, 1)
    takers: list[asyncio.Task[None]] = []
    streams: list[Stream] = []
    for _ in range(2):
        stream, theirs = await stream_pair()
        streams.append(stream)
        takers.append(
            asyncio.create_task(
                receiver.receive(near.node_id, theirs, offer, limit=1000, accept=keep)
            )
        )
        assert await receive_reply(stream, SubmitFrom) == SubmitFrom(0)
    await streams[1].write(b"whole")
    await takers[1]
    assert (await receive_reply(streams[1], Submitted)).receipt == b"whole"
    with pytest.raises((RemoteProtocolError, StreamClosed)):
        await takers[0]


async def test_an_upload_that_drips_is_cut_off_and_an_honest_one_is_not() -> None:
    network = MemoryNetwork()
    near, far = network.transport(b"n" * 32), network.transport(b"f" * 32)
    connection = await near.connect(far.node_id, far.addresses(), ALPN_CONTROL, deadline=60.0)
    accepted = await far.accept()
    receiver = UploadReceiver(grace_s=1.0)
    kept: list[bytes] = []

    async def keep(data: bytes) -> bytes:
        kept.append(data)
        return b"receipt"

    async def offered(data: bytes, pause: float) -> None:
        stream = await connection.open_stream()
        await stream.write(b"\x00")
        theirs = await accepted.accept_stream()
        await theirs.read_exact(1)
        offer = SubmitOffer(digest(data), len(data), 1)
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(
                receiver.receive(near.node_id, theirs, offer, limit=1000, accept=keep)
            )
            for byte in data:
                await stream.write(bytes([byte]))
                await asyncio.sleep(pause)
                if taking.done():
                    break

    await offered(b"quick", 0.0)
    with pytest.raises(ExceptionGroup) as caught:
        await offered(b"slow, as slow as can be", 0.3)
    assert caught.group_contains(TimeoutError)
    assert kept == [b"quick"]
    with pytest.raises(RemoteProtocolError, match="at most 10"):
        await receiver.receive(
            near.node_id,
            await connection.open_stream(),
            SubmitOffer(bytes(32), 11, 1),
            limit=10,
            accept=keep,
        )


async def test_a_lease_cannot_be_answered_for_a_policy_before_it(siege: Swarm) -> None:
    async with Rogue(siege, "time traveller") as rogue:
        await rogue.hello()
        lease, sealed = await rogue.lease()
        older = msgspec.structs.replace(await rogue.head(), version=lease.min_version - 1)
        group = rogue.group(lease, lease.tasks[0], older)
        await rogue.submit(rogue.bundle(sealed, [group]), lease.lease_id)
        verdict = await rogue.verdict(lease.lease_id)
    assert {one.reason for one in verdict.rejections} == {Reason.STALE}
    assert verdict.accepted == 0
