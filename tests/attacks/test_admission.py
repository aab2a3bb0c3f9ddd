"""Admission: only a node that shows a live ticket of this run, under its own key."""

import secrets
import time

import msgspec
import pytest
from support.hostile import Rogue, reason_of, soon
from support.swarm import Swarm

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.rpc import Refused
from primerl.protocol import messages, tickets
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PeerRecord, Ticket
from primerl.protocol.version import WIRE_VERSION

pytestmark = pytest.mark.asyncio(loop_scope="session")

STRANGER = SecretKey.from_seed(b"s" * 32)


def ticket_of(swarm: Swarm, key: SecretKey, **changes: object) -> bytes:
    """A ticket like that of the run but for `changes`, signed by `key`."""
    ticket = msgspec.structs.replace(swarm.read_ticket(), **changes)
    return tickets.sealed_bytes(tickets.issue(key, ticket))


def past() -> dict[str, object]:
    return {"issued": 1, "expires": int(time.time()) - 3600}


async def test_wrong_tickets_are_refused_each_by_its_reason(siege: Swarm) -> None:
    trainer = siege.trainer.key
    good = tickets.sealed_bytes(siege.ticket)
    run = siege.read_ticket().run
    another = Ticket(b"o" * 32, trainer.node_id, (), (), 1, soon())
    other_trainer = Ticket(run, STRANGER.node_id, (), (), 1, soon())
    wrong = {
        "nothing": (b"", Reason.MALFORMED),
        "noise": (b"\x93" * 100, Reason.MALFORMED),
        "damaged": (good[:-1] + bytes([good[-1] ^ 1]), Reason.BAD_SIGNATURE),
        "expired": (ticket_of(siege, trainer, **past()), Reason.EXPIRED),
        "forged": (ticket_of(siege, STRANGER), Reason.WRONG_SIGNER),
        "another run": (tickets.sealed_bytes(tickets.issue(trainer, another)), Reason.WRONG_RUN),
        "another trainer": (
            tickets.sealed_bytes(tickets.issue(STRANGER, other_trainer)),
            Reason.WRONG_RUN,
        ),
        "for another purpose": (
            seal(trainer, Purpose.PEER, run, another, expires=soon()),
            Reason.WRONG_PURPOSE,
        ),
    }
    async with Rogue(siege, "ticketless") as rogue:
        found = {
            name: await reason_of(rogue.hello(ticket=ticket)) for name, (ticket, _) in wrong.items()
        }
        assert await reason_of(rogue.poll(1)) == Reason.NOT_ADMITTED
    assert found == {name: reason for name, (_, reason) in wrong.items()}


async def test_a_record_must_be_its_own_senders_and_of_this_run(siege: Swarm) -> None:
    run = siege.read_ticket().run
    async with Rogue(siege, "impostor") as rogue:
        stolen = PeerRecord(STRANGER.node_id, "inference", "x", (), (), True)
        wrong = {
            rogue.record(key=STRANGER): Reason.WRONG_SIGNER,
            seal(rogue.key, Purpose.PEER, run, stolen, expires=soon()): Reason.WRONG_SIGNER,
            rogue.record(run=b"o" * 32): Reason.WRONG_RUN,
            seal(rogue.key, Purpose.PEER, run, stolen, expires=1): Reason.EXPIRED,
            rogue.record()[:-1]: Reason.MALFORMED,
        }
        for record, reason in wrong.items():
            assert await reason_of(rogue.hello(record=record)) == reason


async def test_another_wire_version_is_refused_before_anything_is_read(siege: Swarm) -> None:
    async with Rogue(siege, "from the future") as rogue:
        hello = rogue.hello(wire_version=WIRE_VERSION + 1, ticket=b"", record=b"")
        assert await reason_of(hello) == Reason.WRONG_VERSION


async def test_a_node_that_did_not_say_hello_gets_nothing(siege: Swarm) -> None:
    requests: list[tuple[messages.Message, type[object]]] = [
        (messages.LeaseRequest(1, messages.WorkerStats(0)), messages.LeaseReply),
        (messages.SubmitOffer(bytes(32), 10, 1 << 32), messages.SubmitFrom),
        (messages.SyncRecords(()), messages.SyncRecords),
        (messages.Goodbye(), messages.Accepted),
    ]
    async with Rogue(siege, "uninvited") as rogue:
        for request, kind in requests:
            assert await reason_of(rogue.ask(request, kind)) == Reason.NOT_ADMITTED


async def test_a_goodbye_gives_back_only_ones_own_leases(siege: Swarm) -> None:
    async with Rogue(siege, "worker of old") as victim, Rogue(siege, "leaver") as rogue:
        await victim.hello()
        await rogue.hello()
        lease, sealed = await victim.lease()
        await rogue.goodbye()
        bundle = victim.bundle(sealed, await victim.play(lease))
        assert (await victim.submit(bundle, lease.lease_id)).lease_id == lease.lease_id


def fresh(swarm: Swarm, **changes: object) -> bytes:
    """A ticket of the run's trainer for another day."""
    return ticket_of(swarm, swarm.trainer.key, id=secrets.token_bytes(16), **changes)


async def test_a_ticket_admits_no_more_nodes_than_it_is_for_and_those_again_and_again(
    siege: Swarm,
) -> None:
    ticket = fresh(siege, uses=2)
    for name in ("first of two", "second of two", "first of two"):
        async with Rogue(siege, name) as rogue:
            await rogue.hello(ticket=ticket)
    async with Rogue(siege, "third of two") as rogue:
        with pytest.raises(Refused, match=r"has admitted the 2 node\(s\) that it is for") as caught:
            await rogue.hello(ticket=ticket)
        assert caught.value.reason == Reason.NOT_ADMITTED
        assert await reason_of(rogue.poll(1)) == Reason.NOT_ADMITTED


async def test_an_admitted_node_comes_back_with_an_expired_ticket_and_with_none(
    siege: Swarm,
) -> None:
    async with Rogue(siege, "veteran") as rogue:
        await rogue.hello()
    for ticket in (ticket_of(siege, siege.trainer.key, **past()), b""):
        async with Rogue(siege, "veteran") as rogue:
            await rogue.hello(ticket=ticket)
