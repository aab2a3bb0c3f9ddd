"""Measure the rate of honest workers alone, and beside admitted contributors that break the rules.

    python scripts/bench/contributors.py [--seconds 15] [--quick] [--json FILE]

A real trainer and three honest workers in one process; engines wait for a fixed time per token and compute
nothing. For each attack: the honest workers' accepted rollouts per second alone, beside it (two windows), and
after it (of `cheap` the run's, as its attackers do work). Attackers are nodes of the tests, with keys that a
ticket admitted:

    in line      claims every chunk of the weights, keeps whoever asks in line, and gives none
    validator    a validator that the owner named; right for eight calls, then it calls honest work fraud
    hold         takes leases, answers them with failures just before their deadlines
    burn         takes leases, answers each at once with failures
    look         takes leases, and hands them back after a look
    cheap        plays the cheap one of two environments alone (honest workers play both)
    copy         the first honest worker's key, used on a second machine
    tickets      twenty keys of one ticket that answer with nothing at once; a newcomer waits for its turn

`--attack NAME` measures one of them alone.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.audits import AuditedSwarm, BentAuditor, Found
from support.lease_attacks import Contributor
from support.lying_holders import LineHolder
from support.swarm import Running, Swarm, make_model
from support.witness import Fakes

from primerl.node.errors import NodeError
from primerl.node.verification.auditor import Unreadable
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

GOAL = 0.85
"""Share of the honest workers' rate alone."""
TOKEN_S = 0.15
HONEST = 3
ATTACKERS = 3
EARNED = 4
"""Groups that an attacker works for before it attacks."""
ROLLOUTS = {"groups_per_batch": 8, "groups_per_lease": 2, "lease_timeout_s": 8.0}
MIXTURE = [{"id": "reverse-text", "name": "cheap"}, {"id": "arithmetic", "name": "dear"}]
RIGHT_CALLS = 8
TICKET_KEYS = 20


@dataclass
class Row:
    """One attack."""

    name: str
    alone: float
    """Accepted rollouts per second of the honest workers."""
    beside: list[float] = field(default_factory=list[float])
    after: float = 0.0
    banned: int = 0
    """Honest workers that were banned."""
    ratio: float = 0.0
    """Accepted rollouts of the first environment for one of the second, during the attack."""
    newcomer_s: float = 0.0
    """Time until a newcomer's first work was accepted during the attack."""


Attack = Callable[[AuditedSwarm, AsyncExitStack], Any]


async def in_line(swarm: AuditedSwarm, stack: AsyncExitStack) -> None:
    """Let contributors hold up chunks."""
    for number in range(ATTACKERS):
        await stack.enter_async_context(LineHolder(swarm, f"line {number}"))


async def leases(swarm: AuditedSwarm, stack: AsyncExitStack, how: str) -> None:
    """Let contributors earn their places and abuse leases."""
    rogues = [Contributor(swarm, f"{how} {number}") for number in range(ATTACKERS)]
    for rogue in rogues:
        await stack.enter_async_context(rogue)
    await asyncio.gather(*(rogue.earn_groups(EARNED) for rogue in rogues))
    for rogue in rogues:
        stack.push_async_callback(end, asyncio.create_task(getattr(rogue, how)()))


async def cheap(swarm: AuditedSwarm, stack: AsyncExitStack) -> None:
    """Let contributors work at the first environment alone."""
    for number in range(ATTACKERS):
        rogue = Contributor(swarm, f"cheap {number}", environments=(0,))
        await stack.enter_async_context(rogue)
        await rogue.hello()
        stack.push_async_callback(end, asyncio.create_task(rogue.work_at_pace_of("honest 0")))


async def copy(swarm: AuditedSwarm, stack: AsyncExitStack) -> None:
    """Start a second machine with the first worker's key, again and again."""

    async def again() -> None:
        while True:
            second = swarm.add_worker("copy", copy_of="honest 0")
            with suppress(NodeError, TimeoutError):  # it is refused
                await second.ended(5.0)
            await asyncio.sleep(0.5)

    stack.push_async_callback(end, asyncio.create_task(again()))


async def tickets(swarm: AuditedSwarm, stack: AsyncExitStack) -> None:
    """Let twenty keys of the ticket answer with nothing."""
    for number in range(TICKET_KEYS):
        rogue = Contributor(swarm, f"free {number}", wanted=1)
        await stack.enter_async_context(rogue)
        await rogue.hello()
        stack.push_async_callback(end, asyncio.create_task(rogue.burn()))


async def end(task: "asyncio.Task[Any]") -> None:
    """End a task."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def invented(found: Found) -> Found:
    """Say that no rollout has a proof."""
    return [Unreadable("zeros", proof=True) for _ in found]


def lying() -> Callable[[Found], Found]:
    """Measure right in the first calls."""
    calls = 0

    def bend(found: Found) -> Found:
        nonlocal calls
        calls += 1
        return invented(found) if calls > RIGHT_CALLS else found

    return bend


async def validator(swarm: AuditedSwarm, stack: AsyncExitStack) -> None:
    """Start the validator that lies."""
    swarm.add_validator(BentAuditor(swarm.fakes, lying()))
    await swarm.seated()


ATTACKS: dict[str, Attack] = {
    "in line": in_line,
    "validator": validator,
    "hold": partial(leases, how="hold"),
    "burn": partial(leases, how="burn"),
    "look": partial(leases, how="look"),
    "cheap": cheap,
    "copy": copy,
    "tickets": tickets,
}


async def accepted(swarm: Swarm, workers: list[Running]) -> int:
    """Count the accepted rollouts of some workers; without any, those of the run."""
    if not workers:
        return (await swarm.trainer.status())["accepted"]
    ids = {worker.node_id.hex() for worker in workers}
    return sum(row["accepted"] for row in await swarm.trainer.peers() if row["id"] in ids)


async def rate(swarm: Swarm, workers: list[Running], seconds: float) -> float:
    """Measure accepted rollouts per second."""
    before, began = await accepted(swarm, workers), time.monotonic()
    await asyncio.sleep(seconds)
    return (await accepted(swarm, workers) - before) / (time.monotonic() - began)


async def environments(swarm: Swarm) -> dict[str, int]:
    """Return the accepted rollouts by environment."""
    return {row["name"]: row["accepted"] for row in (await swarm.trainer.status())["environments"]}


async def newcomer(swarm: Swarm) -> float:
    """Measure the seconds until a newcomer's first work is accepted."""
    began = time.monotonic()
    late = swarm.add_worker("newcomer")
    with suppress(TimeoutError):
        await swarm.until_row(late, lambda row: row["accepted"] > 0, 60.0)
    took = time.monotonic() - began
    await swarm.stop_worker("newcomer")
    return took


async def token() -> None:
    """Take the time of a token."""
    await asyncio.sleep(TOKEN_S)


@asynccontextmanager
async def honest(directory: Path, name: str) -> AsyncGenerator[tuple[AuditedSwarm, list[Running]]]:
    """Start a run without an end and its honest workers."""
    settings: dict[str, Any] = {"rollouts": ROLLOUTS}
    if name == "cheap":
        settings["environments"] = MIXTURE
    model = make_model(directory / "model")
    fakes = Fakes(pause=token)
    async with AuditedSwarm(directory, model, fakes=fakes, max_steps=10**6, **settings) as swarm:
        await swarm.start_trainer()
        workers = [swarm.add_worker(f"honest {number}") for number in range(HONEST)]
        await swarm.wait_step(10)
        yield swarm, workers


async def measure(directory: Path, name: str, seconds: float) -> Row:
    """Measure one attack."""
    async with honest(directory, name) as (swarm, workers):
        # who plays the cheap environment works: the run's rate counts
        measured = [] if name == "cheap" else workers
        row = Row(name, await rate(swarm, measured, seconds))
        async with AsyncExitStack() as stack:
            await ATTACKS[name](swarm, stack)
            before = await environments(swarm)
            row.beside = [await rate(swarm, measured, seconds) for _ in range(2)]
            counts = [count - before[name] for name, count in (await environments(swarm)).items()]
            row.ratio = counts[0] / max(1, counts[1]) if len(counts) > 1 else 0.0
            if name in ("in line", "tickets"):
                row.newcomer_s = await newcomer(swarm)
            rows = {one["id"]: one for one in await swarm.trainer.peers()}
            row.banned = sum("banned" in rows[one.node_id.hex()]["refused"] for one in workers)
        row.after = await rate(swarm, measured, seconds)
    return row


def judge(rows: list[Row]) -> list[Goal]:
    """Compare each attack with the honest rate before and after."""
    goals: list[Goal] = []
    for row in rows:
        share = sum(row.beside) / len(row.beside) / max((row.alone + row.after) / 2, 1e-9)
        goals.append(at_least(f"{row.name}: honest rate of alone", share, GOAL))
        goals.append(at_most(f"{row.name}: honest workers banned", row.banned, 0))
        if row.name == "cheap":
            goals.append(at_most("cheap: the mixture of 1:1", row.ratio, 1.5, ": 1"))
    return goals


def show(rows: list[Row]) -> None:
    """Print the table."""
    head = ("attack", "alone/s", "beside/s", "", "after/s", "banned", "mixture", "newcomer s")
    print("".join(f"{title:>12}" for title in head))
    for row in rows:
        figures = (row.alone, *row.beside, row.after)
        print(
            f"{row.name:>12}"
            + "".join(f"{figure:>12.1f}" for figure in figures)
            + f"{row.banned:>12}{row.ratio:>12.2f}{row.newcomer_s:>12.1f}",
            flush=True,
        )


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "windows of 6 seconds")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each window")
    parser.add_argument("--attack", choices=ATTACKS, help="measure this one alone")
    options: argparse.Namespace = parser.parse_args()
    logging.disable(logging.ERROR)
    seconds = 6.0 if options.quick else options.seconds
    rows: list[Row] = []
    for name in [options.attack] if options.attack else ATTACKS:
        with tempfile.TemporaryDirectory() as directory:
            os.environ["XDG_RUNTIME_DIR"] = directory  # not in the user's list of running nodes
            rows.append(asyncio.run(measure(Path(directory), name, seconds)))
        print(f"{name}: done", file=sys.stderr, flush=True)
    show(rows)
    return conclude([asdict(row) for row in rows], judge(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
