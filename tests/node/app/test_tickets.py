"""Tickets: issued by a running trainer, renewed, revoked; and not needed where a key was admitted."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.protocol_cases import LEADERS, NOW, STRANGER, TICKET, TRAINER
from support.swarm import Swarm
from support.waiting import until

from primerl.node.app.tickets import TicketPlace, read_again
from primerl.node.errors import NodeError, TicketError
from primerl.node.ops import control
from primerl.protocol import tickets


async def asked(swarm: Swarm, command: str, **arguments: Any) -> Any:
    """What the trainer's control socket answers."""
    return await asyncio.to_thread(control.ask, swarm.trainer.data_dir, command, **arguments)


async def test_a_running_trainer_issues_lists_and_revokes_tickets(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        own = await asked(swarm, "ticket")
        assert own["ticket"] == swarm.ticket == (await asked(swarm, "ticket"))["ticket"]
        made = await asked(swarm, "ticket", label="anna", uses=1, expires_s=3600)
        ticket = tickets.read(made["ticket"], now=int(time.time()))
        assert (ticket.label, ticket.uses, ticket.id.hex()) == ("anna", 1, made["id"])
        assert ticket.expires - ticket.issued == 3600
        swarm.ticket = made["ticket"]
        first = swarm.add_worker("w1")
        await swarm.wait_step(1)
        with pytest.raises(TicketError, match=r"has admitted the 1 node\(s\)"):
            await swarm.add_worker("w2").ended(20.0)
        rows = {row["label"]: row for row in await asked(swarm, "tickets")}
        assert rows["anna"]["admitted"] == rows["anna"]["uses"] == 1
        assert rows["default"]["admitted"] == 0
        await asked(swarm, "revoke", name="default")
        swarm.ticket = own["ticket"]
        with pytest.raises(TicketError, match="this ticket was revoked"):
            await swarm.add_worker("w3").ended(20.0)
        await asked(swarm, "revoke", name=made["id"][:8])
        assert (await first.status())["phase"] == "running"  # a node that was admitted stays
        await swarm.stop_worker("w1")
        swarm.ticket = made["ticket"]
        swarm.add_worker("w1")  # and comes back
        version = (await swarm.trainer.status())["version"]
        await swarm.wait_step(version + 1)
        fresh = (await asked(swarm, "ticket"))["ticket"]
        assert fresh not in (own["ticket"], made["ticket"])
        for wrong in ("nobody", "anna"):
            with pytest.raises(NodeError, match="can be revoked"):
                await asked(swarm, "revoke", name=wrong)
        with pytest.raises(NodeError, match="revoke: "):
            await asked(swarm, "revoke", nme="anna")


async def test_a_revoked_ticket_stays_revoked_after_a_restart(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        made = await asked(swarm, "ticket", label="anna")
        await asked(swarm, "revoke", name="anna")
        await swarm.stop_trainer()
        await swarm.start_trainer(resume=True)
        swarm.ticket = made["ticket"]
        with pytest.raises(TicketError, match="this ticket was revoked"):
            await swarm.add_worker("w1").ended(20.0)


async def test_the_ticket_file_is_renewed_before_it_expires_and_private(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        swarm.timeouts = replace(swarm.timeouts, ticket_s=4.0)
        await swarm.start_trainer()
        file, first = swarm.run_dir / "ticket.txt", swarm.ticket
        await until(lambda: file.read_text().strip() != first)
        old, new = (
            tickets.read(text, now=0) for text in (first, (await asked(swarm, "ticket"))["ticket"])
        )
        assert old.expires < new.expires
        assert time.time() < old.expires + 60  # nodes still took the old one when it was renewed
        assert file.stat().st_mode & 0o777 == 0o600
        assert (swarm.run_dir / "config.json").stat().st_mode & 0o777 == 0o600


async def test_a_ticket_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        swarm.timeouts = replace(swarm.timeouts, ticket_s=4.0)
        await swarm.start_trainer()
        file = swarm.run_dir / "ticket.txt"
        file.unlink()
        file.mkdir()
        await until(lambda: "the ticket cannot be renewed" in caplog.text)
        assert (await swarm.trainer.status())["phase"] == "running"
        file.rmdir()
        await until(file.is_file)
        before = file.read_text().strip()
        told = (await asked(swarm, "ticket"))["ticket"]
        assert told in (before, file.read_text().strip())  # it may be renewed just now


async def test_an_admitted_data_directory_joins_with_an_expired_ticket_and_with_none(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        ticket = tickets.read(swarm.ticket, now=0)
        swarm.add_worker("w1")
        await swarm.wait_step(1)
        await swarm.stop_worker("w1")
        past = int(time.time()) - 86400
        gone = tickets.issue(
            swarm.trainer.key,
            type(ticket)(ticket.run, ticket.trainer, ticket.addresses, (), past, past + 60),
        )
        for text in (gone, ""):
            swarm.ticket = text
            swarm.add_worker("w1")
            version = (await swarm.trainer.status())["version"]
            await swarm.wait_step(version + 1)
            await swarm.stop_worker("w1")
        swarm.ticket = gone
        with pytest.raises(TicketError, match=r"expired 863[0-9]{2} s ago"):
            await swarm.add_worker("w2").ended(20.0)
        swarm.ticket = ""
        with pytest.raises(TicketError, match="was never admitted to a run"):
            await swarm.add_worker("w3").ended(20.0)


def test_a_ticket_that_is_read_again_counts_if_a_leader_of_the_same_run_signed_it() -> None:
    def at(text: str) -> TicketPlace:
        return TicketPlace("the page", lambda: text)

    moved = msgspec.structs.replace(TICKET, addresses=("192.0.2.99:4433",))
    text = tickets.issue(TRAINER, moved)
    assert read_again(at(text), LEADERS, NOW) == (text, moved)
    other_run = msgspec.structs.replace(moved, run=bytes(32))
    stranger = msgspec.structs.replace(moved, trainer=STRANGER.node_id)
    for wrong, why in (
        (tickets.issue(TRAINER, other_run), r"^it is of another run \("),
        (tickets.issue(STRANGER, stranger), r"^it names another trainer \("),
        (text[:-6], "^it is no valid ticket: "),
        ("<html>" + "x" * 9000, "^it is no valid ticket: "),
    ):
        with pytest.raises(TicketError, match=why) as refused:
            read_again(at(wrong), LEADERS, NOW)
        assert "\n" not in str(refused.value)
    with pytest.raises(TicketError, match="expired"):
        read_again(at(text), LEADERS, TICKET.expires + 3600)
