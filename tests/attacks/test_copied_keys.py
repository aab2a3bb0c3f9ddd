"""One key on two machines, as a copy of a directory or a thief makes it: the session that lives keeps it."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from support.hostile import Rogue, reason_of
from support.protocol_cases import OFFER
from support.swarm import Swarm, key_of

from primerl.crypto.hashing import short
from primerl.crypto.keys import SecretKey
from primerl.node.app.retirement import tell
from primerl.node.errors import BusyError, TicketError
from primerl.node.ops import control
from primerl.node.p2p.connections import CONNECTIONS_PER_PEER
from primerl.node.p2p.rpc import ask
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.workers import MAX_SUCCESSIONS
from primerl.protocol import messages
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.retirement import Retirement, Succession, read_retirement, retire
from primerl.protocol.version import ALPN_BLOBS

BURST = 60
"""Requests of one key at a time: fewer than in a run, as those of newcomers are taken one by one."""
HOME, ELSEWHERE = "5.9.16.7", "9.9.9.9"
LONG = 100_000
"""Steps of a run that no test sees the end of."""


async def leased_to(swarm: Swarm, name: str) -> int:
    """Return how many leases the trainer says that a worker holds."""
    rows = {row["id"]: row for row in await swarm.trainer.peers()}
    return rows[key_of(name).node_id.hex()]["leases"]


async def further(swarm: Swarm, steps: int = 3) -> None:
    """Wait until the run has gone on for some steps."""
    await swarm.wait_step((await swarm.trainer.status())["version"] + steps, 30.0)


async def test_a_copy_of_a_working_directory_is_refused_and_the_first_machine_goes_on(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        first = swarm.add_worker("first", public=HOME)
        await swarm.wait_step(2)
        for _ in range(2):
            copy = swarm.add_worker("copy", copy_of="first", public=ELSEWHERE)
            with pytest.raises(BusyError, match=rf"in use from {HOME} since 2\d\d\d-") as refusal:
                await copy.ended(20.0)
            assert refusal.value.exit_code == 4
            assert "key of its own" in str(refusal.value)
        await further(swarm)
        assert first.task is not None
        assert not first.task.done()
        warnings = (await swarm.trainer.status())["warnings"]
        assert [ELSEWHERE in one for one in warnings] == [True]
        row = await swarm.until_row(first, lambda row: row["second"], 5.0)
        assert ELSEWHERE in row["second"]
        assert not row["refused"]
        lines = [one for one in caplog.messages if "in use on a second machine" in one]
        assert len(lines) == 1
        assert HOME in lines[0]


async def test_a_worker_that_was_killed_gets_leases_again_under_its_old_key(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("worker")
        await swarm.wait_step(1)
        await swarm.kill_worker("worker")
        worker = swarm.add_worker("worker")
        await further(swarm)
        assert worker.task is not None
        assert not worker.task.done()
        assert (await swarm.trainer.status())["warnings"] == []


async def test_a_worker_whose_connections_broke_goes_on_as_the_same_session(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("worker")
        await swarm.wait_step(1)
        for _ in range(3):
            swarm.network.partition(worker.node_id, swarm.trainer.node_id)
            swarm.network.heal(worker.node_id, swarm.trainer.node_id)
            await further(swarm, 2)
        assert worker.task is not None
        assert not worker.task.done()
        assert (await swarm.trainer.status())["warnings"] == []


def requests_of(thief: Rogue) -> list[messages.Message]:
    """Return every request that a thief of a worker's, a validator's or a stage's key could send."""
    stats = messages.WorkerStats(0)
    return [
        messages.Goodbye(),
        messages.LeaseRequest(1, stats, ()),
        messages.LeaseRequest(0, stats, ()),
        messages.SubmitOffer(bytes(32), 100, 1),
        messages.GetVerdicts(0),
        messages.GetBounds(),
        messages.AuditRequest(0, (0,), stats),
        messages.AuditDone(b"report"),
        messages.OfferStage(OFFER),
        messages.SyncRecords((thief.record(),)),
        messages.WatchHeads(0, -1),
        messages.GetHeads(-1),
    ]


async def test_no_request_of_a_thief_reaches_the_node_that_works_with_the_key(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        owner = Rogue(swarm, key=key_of("owner"))
        await owner.hello()
        leases = [(await owner.lease())[0].lease_id]
        async with Rogue(swarm, key=owner.key) as thief:
            for _ in range(3):
                assert await reason_of(thief.hello()) == Reason.KEY_IN_USE
                for request in requests_of(thief):
                    connection = await thief.connect()
                    reason = await reason_of(
                        ask(connection, request, messages.Accepted, deadline=10.0)
                    )
                    assert reason == Reason.KEY_IN_USE, request
        assert await leased_to(swarm, "owner") == len(leases)
        assert (await owner.poll(0, holding=tuple(leases))).leases == ()
        assert await leased_to(swarm, "owner") == len(leases)
        rows = {row["id"]: row for row in await swarm.trainer.peers()}
        assert rows[owner.key.node_id.hex()]["reliability"] == 1.0
        assert not rows[owner.key.node_id.hex()]["left"]


async def test_a_thief_cannot_use_up_the_connections_and_requests_of_a_key(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl.node.p2p.connections.REQUEST_BURST", BURST)
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        owner = Rogue(swarm, key=key_of("owner"))
        await owner.hello()
        async with Rogue(swarm, key=owner.key) as thief:
            taken = [await thief.connect(ALPN_BLOBS) for _ in range(CONNECTIONS_PER_PEER - 2)]
            refused = await thief.connect()
            for _ in range(BURST // 30 + 2):
                asked = (
                    reason_of(ask(refused, messages.GetHeads(-1), messages.Accepted, deadline=10.0))
                    for _ in range(30)
                )
                reasons = set(await asyncio.gather(*asked))
                assert reasons <= {Reason.KEY_IN_USE, Reason.RATE_LIMITED}
            await owner.poll(0)
            taken += [await thief.connect(ALPN_BLOBS) for _ in range(3)]
            await (await owner.control()).close()
            await owner.hello()
            await owner.poll(0)
        del taken


async def test_a_session_that_is_gone_leaves_its_key_to_the_next(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        owner = Rogue(swarm, key=key_of("owner"))
        await owner.hello()
        async with Rogue(swarm, key=owner.key) as second:
            assert await reason_of(second.hello()) == Reason.KEY_IN_USE
            await (await owner.control()).close()
            await second.hello()
            assert await reason_of(owner.hello()) == Reason.KEY_IN_USE


async def test_a_node_that_finds_its_key_taken_while_it_works_ends_and_says_why(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("worker", public=HOME)
        await swarm.wait_step(1)
        async with Rogue(swarm, key=worker.key) as other:
            assert worker.transport is not None
            worker.transport.vanish()  # its line is gone for longer than the trainer waits for an answer
            await other.hello()
            with pytest.raises(BusyError, match="this key is in use from"):
                await worker.ended(20.0)


async def test_a_validators_key_is_one_sessions_too(tmp_path: Path, model_dir: Path) -> None:
    key = key_of("validator")
    named = {"validators": [key.node_id.hex()]}
    async with Swarm(tmp_path, model_dir, verification=named, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        validator = Rogue(swarm, key=key)
        await validator.hello()
        async with Rogue(swarm, key=key) as thief:
            asked = thief.ask(
                messages.AuditRequest(0, (0,), messages.WorkerStats(0)), messages.Accepted
            )
            assert await reason_of(asked) == Reason.KEY_IN_USE


# -- retired keys --------------------------------------------------------------------------------


async def hand_in(swarm: Swarm, sealed: bytes) -> str:
    """Give a retirement to the trainer as `primerl-node retire` does; return why it was not taken."""

    async def transport(network: object, key: SecretKey, port: int) -> object:
        return swarm.network.transport(key.node_id)

    (fault,) = (await tell([swarm.ticket], sealed, transport)).values()  # type: ignore[arg-type]
    return fault


async def test_a_key_that_its_owner_retired_is_refused_for_ever_and_its_work_stays(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        stolen, other = swarm.add_worker("stolen"), swarm.add_worker("other")
        await swarm.until_row(stolen, lambda row: row["accepted"] >= 8, 30.0)
        assert not await hand_in(swarm, retire(stolen.key, int(time.time())))
        with pytest.raises(TicketError, match="retired by its owner"):
            await stolen.ended(20.0)
        row = await swarm.until_row(stolen, lambda row: row["refused"] and not row["leases"], 10.0)
        assert row["accepted"] >= 8
        await further(swarm)
        again = swarm.add_worker("stolen")
        with pytest.raises(TicketError, match="retired by its owner"):
            await again.ended(20.0)
        await swarm.stop_trainer()
        await swarm.start_trainer(resume=True)
        again = swarm.add_worker("stolen")
        with pytest.raises(TicketError, match="retired by its owner"):
            await again.ended(20.0)
        await further(swarm)
        assert other.task is not None
        assert not other.task.done()
        await swarm.stop_trainer()
    assert unjudged(swarm, stolen.node_id) == 0


def unjudged(swarm: Swarm, node: bytes) -> int:
    """Count the submissions of a node that were receipted and have no verdict."""
    ledger = Ledger(swarm.trainer.data_dir / "ledger.db")
    try:
        arrivals = [one for one in ledger.arrived_after(ledger.judged_up_to()) if one.node == node]
        return len(arrivals)
    finally:
        ledger.close()


async def test_what_a_key_handed_in_before_it_was_retired_is_judged(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, key=key_of("owner")) as owner:
            await owner.hello()
            lease, sealed = await owner.lease()
            bundle = owner.bundle(sealed, await owner.play(lease))
            late = owner.bundle(sealed, await owner.play(lease), engine="later")
            await owner.submit(bundle, lease.lease_id)
            assert not await hand_in(swarm, retire(owner.key, int(time.time())))
            reason = await reason_of(owner.submit(late, lease.lease_id))
            assert reason == Reason.KEY_RETIRED
            await swarm.until_row_of(owner.key.node_id, lambda row: row["accepted"], 20.0)


async def test_nobody_but_its_holder_retires_a_key(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        victim = swarm.add_worker("victim")
        await swarm.wait_step(1)
        attacker, now = SecretKey.generate(), int(time.time())
        body = Retirement(victim.node_id, now)
        forged = seal(attacker, Purpose.RETIREMENT, bytes(32), body, expires=2**53)
        other_purpose = seal(victim.key, Purpose.PEER, bytes(32), body, expires=2**53)
        damaged = bytearray(retire(victim.key, now))
        damaged[-1] ^= 1
        wrong = {
            Reason.WRONG_SIGNER: forged,
            Reason.WRONG_PURPOSE: other_purpose,
            Reason.BAD_SIGNATURE: bytes(damaged),
            Reason.NOT_FOUND: retire(SecretKey.generate(), now),
        }
        async with Rogue(swarm, key=attacker) as rogue:
            for reason, sealed in wrong.items():
                asked = rogue.ask(messages.RetireKey(sealed), messages.Accepted)
                assert await reason_of(asked) == reason
        await further(swarm)
        assert victim.task is not None
        assert not victim.task.done()


# -- keys that take the place of others -----------------------------------------------------------


async def test_a_new_key_has_the_place_of_the_old_one_with_its_work_and_admission(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        swarm.ticket = (await issue(swarm, uses=1))["ticket"]
        swarm.add_worker("old")
        old, new = key_of("old"), key_of("new")
        row = await swarm.until_row_of(old.node_id, lambda row: row["accepted"] >= 8, 30.0)
        await swarm.stop_worker("old")
        sealed = retire(old, int(time.time()), new)
        assert not await hand_in(swarm, sealed)
        assert not await hand_in(swarm, sealed), "the same statement again changes nothing"
        swarm.add_worker("new")
        later = await swarm.until_row_of(new.node_id, lambda row: row["leases"] > 0, 60.0)
        assert later["accepted"] >= row["accepted"]
        assert later["ticket"] == row["ticket"] != "", "its only seat is the old one's"
        with pytest.raises(TicketError, match=f"{short(new.node_id)} has its place"):
            await swarm.add_worker("old").ended(20.0)
        await swarm.stop_trainer()
        await swarm.start_trainer(resume=True)
        again = await swarm.until_row_of(new.node_id, lambda row: row["leases"] > 0, 60.0)
        assert again["accepted"] >= row["accepted"], "also when the trainer starts again"
        with pytest.raises(TicketError, match="has its place"):
            await swarm.add_worker("old").ended(20.0)


async def issue(swarm: Swarm, **options: Any) -> dict[str, str]:
    """Issue a ticket as the trainer's operator does."""
    return await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "ticket", **options)


async def test_a_new_key_does_not_shed_a_ban(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("old")
        old, new = key_of("old"), key_of("new")
        await swarm.until_row_of(old.node_id, lambda row: row["accepted"] >= 4, 30.0)
        name = old.node_id.hex()
        await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "ban", name=name, why="a test")
        assert not await hand_in(swarm, retire(old, int(time.time()), new))
        async with Rogue(swarm, key=new) as banned:
            await banned.hello()
            asked = banned.ask(
                messages.LeaseRequest(1, messages.WorkerStats(0)), messages.LeaseReply
            )
            assert await reason_of(asked) == Reason.BANNED
        bans = await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "bans")
        assert [(row["id"], row["why"]) for row in bans] == [
            (new.node_id.hex(), "by the operator (a test)")
        ]


async def test_work_that_is_judged_after_a_rotation_counts_for_the_new_key(
    tmp_path: Path, model_dir: Path
) -> None:
    """Else a cheat would hand in forgeries and change its key before they are looked at."""
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        old, new = key_of("old"), key_of("new")
        async with Rogue(swarm, key=old) as rogue:
            await rogue.hello()
            lease, sealed = await rogue.lease()
            bundle = rogue.bundle(sealed, await rogue.play(lease))
            await rogue.submit(bundle, lease.lease_id)
            assert not await hand_in(swarm, retire(old, int(time.time()), new))
        async with Rogue(swarm, key=new) as heir:
            await heir.hello()
            await swarm.until_row_of(new.node_id, lambda row: row["accepted"], 20.0)


async def test_nobody_takes_the_place_of_a_key_without_it_or_gives_one_twice(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        for name in ("victim", "other"):
            swarm.add_worker(name)
        victim, other = key_of("victim"), key_of("other")
        for key in (victim, other):
            await swarm.until_row_of(key.node_id, lambda row: row["accepted"] >= 4, 30.0)
        attacker, spare, now = SecretKey.generate(), SecretKey.generate(), int(time.time())
        consent = read_retirement(retire(victim, now, spare)).succession
        forged = Retirement(victim.node_id, now, consent)
        of_another = Retirement(attacker.node_id, now, consent)
        damaged = Retirement(attacker.node_id, now, consent[:-1] + bytes([consent[-1] ^ 1]))
        itself = retire(victim, now, victim)

        def signed(key: SecretKey, body: Retirement) -> bytes:
            return seal(key, Purpose.RETIREMENT, bytes(32), body, expires=2**53)

        wrong = [
            (Reason.WRONG_SIGNER, signed(attacker, forged)),
            (Reason.WRONG_SIGNER, signed(attacker, of_another)),
            (Reason.BAD_SIGNATURE, signed(attacker, damaged)),
            (Reason.MALFORMED, itself),
            (Reason.KEY_IN_USE, retire(victim, now, other)),
            (Reason.KEY_IN_USE, retire(victim, now, swarm.trainer.key)),
            (Reason.NOT_FOUND, retire(attacker, now, spare)),
            (Reason.NOT_FOUND, retire(swarm.trainer.key, now, spare)),
        ]
        async with Rogue(swarm, key=attacker) as rogue:
            for reason, sealed in wrong:
                asked = rogue.ask(messages.RetireKey(sealed), messages.Accepted)
                assert await reason_of(asked) == reason
            assert not await hand_in(swarm, retire(victim, now, spare))
            afterwards = [
                retire(victim, now + 1, attacker),
                retire(spare, now, victim),
                retire(other, now, victim),
            ]
            for sealed in afterwards:
                asked = rogue.ask(messages.RetireKey(sealed), messages.Accepted)
                assert await reason_of(asked) == Reason.KEY_RETIRED
        await further(swarm)


async def test_a_place_is_given_on_so_often_and_no_more(tmp_path: Path, model_dir: Path) -> None:
    """Each retired key is remembered for ever."""
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        key, now = key_of("first"), int(time.time())
        async with Rogue(swarm, key=key) as rogue:
            await rogue.hello()
        for _ in range(MAX_SUCCESSIONS):
            key, before = SecretKey.generate(), key
            assert not await hand_in(swarm, retire(before, now, key))
        assert "rate_limited" in await hand_in(swarm, retire(key, now, SecretKey.generate()))


def test_a_consent_holds_for_the_key_and_the_time_that_it_names() -> None:
    old, new = SecretKey.generate(), SecretKey.generate()
    consent = seal(
        new, Purpose.SUCCESSION, bytes(32), Succession(old.node_id, 1_800_000_000), expires=2**53
    )
    later = Retirement(old.node_id, 1_900_000_000, consent)
    with pytest.raises(RemoteProtocolError, match="agreed to something else"):
        read_retirement(seal(old, Purpose.RETIREMENT, bytes(32), later, expires=2**53))
