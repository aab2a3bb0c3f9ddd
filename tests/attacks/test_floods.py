"""Floods of keys: a key costs nothing, so many that answer nothing must cost honest workers nothing."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from support.hostile import Rogue
from support.swarm import Swarm
from support.waiting import until

from primerl.node.p2p import connections
from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.transport import Connection, TransportError

SOON = 60.0
HOLD_S = 3600.0
"""Leases that are not answered within a test come back to nobody."""


@asynccontextmanager
async def run_of(directory: Path, model: Path, max_peers: int = 256) -> AsyncGenerator[Swarm]:
    """A run without an end, in which one worker has proved itself."""
    rollouts = {"lease_timeout_s": HOLD_S}
    async with Swarm(directory, model, max_steps=100_000, rollouts=rollouts) as swarm:
        await swarm.start_trainer(network={"max_peers": max_peers})
        swarm.add_worker("honest")
        await swarm.wait_step(2)
        yield swarm


async def version(swarm: Swarm) -> int:
    return int((await swarm.trainer.status())["version"])


async def take(swarm: Swarm, name: str, stack: AsyncExitStack) -> int:
    """A fresh key says hello, takes what it is given, and answers nothing; the groups that it holds."""
    rogue = await stack.enter_async_context(Rogue(swarm, name))
    await rogue.hello()
    return len((await rogue.poll(4)).leases)


async def test_keys_that_take_leases_and_answer_nothing_do_not_stop_a_run(
    tmp_path: Path, model_dir: Path
) -> None:
    """Before, as many keys as there is capacity for held all of it for as long as a lease is good."""
    async with run_of(tmp_path, model_dir) as swarm, AsyncExitStack() as stack:
        async with asyncio.timeout(SOON):
            taken = await asyncio.gather(*(take(swarm, f"sybil {n}", stack) for n in range(40)))
        # 40 keys, a pool of 4 groups, of which one ticket gets no more than it leaves free
        assert sum(taken) <= 2
        await swarm.wait_step(await version(swarm) + 3, SOON)


async def test_a_worker_that_takes_over_is_not_stopped_by_leases_of_dead_keys(
    tmp_path: Path, model_dir: Path
) -> None:
    """A worker that proved itself comes back to a run in which others have taken everything."""
    async with run_of(tmp_path, model_dir) as swarm, AsyncExitStack() as stack:
        await swarm.stop_worker("honest")
        taken = [await take(swarm, f"sybil {n}", stack) for n in range(6)]
        assert sum(taken) <= 2, "proven workers were here a moment ago"
        swarm.add_worker("honest")
        await swarm.wait_step(await version(swarm) + 3, SOON)


async def test_a_newcomer_is_proved_in_the_middle_of_a_flood_as_slots_are_passed_on(
    tmp_path: Path, model_dir: Path
) -> None:
    rollouts = {"lease_timeout_s": 0.5}
    async with Swarm(tmp_path, model_dir, max_steps=100_000, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("honest")
        await swarm.wait_step(2)
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(take(swarm, f"sybil {n}", stack) for n in range(12)))
            late = swarm.add_worker("late")
            await swarm.until_row(late, lambda row: row["accepted"] > 16, SOON)


async def test_the_ticket_whose_keys_answer_nothing_is_named_with_what_to_do(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = {"lease_timeout_s": 0.2}
    async with Swarm(tmp_path, model_dir, max_steps=100_000, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("honest")
        await swarm.wait_step(2)
        caplog.clear()
        async with AsyncExitStack() as stack, asyncio.timeout(SOON):
            number = 0
            while "ticket revoke" not in caplog.text:
                await take(swarm, f"sybil {number}", stack)
                number += 1
        told = [one.getMessage() for one in caplog.records if "ticket revoke" in one.getMessage()]
        assert "did not come back" in told[0]
        warnings = (await swarm.trainer.status())["warnings"]
        assert [one for one in warnings if "ticket revoke" in one]


# -- connections -------------------------------------------------------------------------------------


async def idle(swarm: Swarm, count: int, stack: AsyncExitStack) -> list[Connection]:
    """Connections of so many keys that say nothing."""
    made: list[Connection] = []
    for number in range(count):
        rogue = await stack.enter_async_context(Rogue(swarm, f"idle {number}"))
        with suppress(TransportError):
            made.append(await rogue.connect())
    return made


async def test_keys_without_a_ticket_do_not_keep_workers_out(
    tmp_path: Path, model_dir: Path
) -> None:
    """Before, as many keys as `max_peers` held every slot with a connection each, for ever."""
    async with run_of(tmp_path, model_dir, max_peers=16) as swarm, AsyncExitStack() as stack:
        await swarm.stop_worker("honest")
        await idle(swarm, 40, stack)
        swarm.add_worker("honest")  # one that proved itself
        new = swarm.add_worker("new")  # one that has a ticket and nothing else
        await swarm.wait_step(await version(swarm) + 3, SOON)
        await swarm.until_row(new, lambda row: row["accepted"] > 0, SOON)
        assert all(
            row["accepted"] for row in await swarm.trainer.peers() if row["role"] == "inference"
        )


async def test_keys_with_a_ticket_do_not_keep_workers_out_that_proved_themselves(
    tmp_path: Path, model_dir: Path
) -> None:
    async with run_of(tmp_path, model_dir, max_peers=16) as swarm, AsyncExitStack() as stack:
        await swarm.stop_worker("honest")
        for number in range(40):
            rogue = await stack.enter_async_context(Rogue(swarm, f"member {number}"))
            with suppress(TransportError, Refused):
                await rogue.hello()
                await rogue.poll(0)
        swarm.add_worker("honest")
        await swarm.wait_step(await version(swarm) + 3, SOON)


async def test_a_connection_that_asks_for_nothing_is_closed_in_seconds(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connections.STRANGER_S >= 5.0, "a hello over a slow line has time"
    monkeypatch.setattr(connections, "STRANGER_S", 2.0)
    async with run_of(tmp_path, model_dir) as swarm, AsyncExitStack() as stack:
        swarm.fakes.last_step = 0  # this is about connections: nothing more is trained
        began = time.monotonic()
        silent = await idle(swarm, 3, stack)
        refused = await stack.enter_async_context(Rogue(swarm, "refused"))
        with suppress(Refused):
            await refused.hello(ticket=b"")
        admitted = await stack.enter_async_context(Rogue(swarm, "admitted"))
        await admitted.hello()
        strangers = [*silent, await refused.control()]
        await until(lambda: all(one.closed for one in strangers), SOON)
        assert time.monotonic() - began >= 2.0
        assert not (await admitted.control()).closed
