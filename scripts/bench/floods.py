"""Floods: the throughput of honest workers alone, and beside a thousand free keys that answer nothing.

    python scripts/bench/floods.py [--keys 1000] [--seconds 20] [--quick] [--json FILE]

One run in one process, over the memory transport: a real trainer, two honest workers whose engines take their
time for each token, and then each attack, with all its keys at once:

    sybils  one ticket; each key says hello, takes a lease, never answers, and goes on asking
    idle    no ticket; each key opens a connection, says nothing, and opens the next one when it is closed

The attackers compute in the same process, so what they cost themselves counts against us, too.
"""

import argparse
import asyncio
import json
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from rogue import Rogue
from swarm import Swarm, make_model
from witness import Fakes

from primerl.node.network.rpc import Refused
from primerl.node.network.transport import TransportError

GOAL = 0.9
"""Of the throughput alone."""
TOKEN_S = 0.05
"""An engine's time for a token; a rollout has four at most."""
PAUSE_S = 0.5
"""An attacker that was thrown out comes again after this."""
ROLLOUTS = {"groups_per_batch": 8, "groups_per_lease": 2, "lease_timeout_s": 60.0}


@dataclass
class Row:
    """One measurement."""

    name: str
    keys: int
    steps_per_s: float
    accepted_per_s: float
    """Rollouts."""
    leases: int
    """That the keys were granted meanwhile."""
    connected: int
    """Peers of the trainer at the end."""
    cpu: float
    """Share of one core that this process took."""


class Attack:
    """Keys that want to stop a run."""

    def __init__(self, swarm: Swarm, keys: int, act: Callable[["Attack", Rogue], Awaitable[None]]):
        self.swarm = swarm
        self.leases = 0
        self._rogues = [Rogue(swarm, f"{act.__name__} {number}") for number in range(keys)]
        self._tasks = [asyncio.create_task(self._repeat(act, one)) for one in self._rogues]

    async def _repeat(self, act: Callable[["Attack", Rogue], Awaitable[None]], one: Rogue) -> None:
        while True:
            with suppress(TransportError, Refused, TimeoutError):
                await act(self, one)
            await asyncio.sleep(PAUSE_S)

    async def stop(self) -> None:
        """Leave without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._rogues:
            await one.transport.close()


async def sybils(attack: Attack, one: Rogue) -> None:
    """Say hello, take leases, answer nothing, ask again."""
    await one.hello()
    while True:
        reply = await one.poll(4)
        attack.leases += len(reply.leases)
        await asyncio.sleep(PAUSE_S)


async def idle(attack: Attack, one: Rogue) -> None:
    """Hold a connection for as long as it is not closed."""
    await (await one.connect()).accept_stream()


async def measure(swarm: Swarm, name: str, seconds: float, attack: Attack | None, keys: int) -> Row:
    """Count what the run does in `seconds`."""
    leases = attack.leases if attack else 0
    before, began, used = await swarm.trainer.status(), time.monotonic(), cpu_s()
    await asyncio.sleep(seconds)
    after, took = await swarm.trainer.status(), time.monotonic() - began
    return Row(
        name,
        keys,
        (after["version"] - before["version"]) / took,
        (after["accepted"] - before["accepted"]) / took,
        (attack.leases if attack else 0) - leases,
        after["peers"],
        (cpu_s() - used) / took,
    )


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def run(directory: Path, options: argparse.Namespace) -> list[Row]:
    """All rows; the honest are measured alone before and after each attack."""

    async def pause() -> None:
        await asyncio.sleep(TOKEN_S)

    rows: list[Row] = []
    model = make_model(directory / "model")
    swarm = Swarm(
        directory, model, fakes=Fakes(pause=pause), max_steps=1_000_000, rollouts=ROLLOUTS
    )
    async with swarm:
        await swarm.start_trainer()
        for name in ("one", "two"):
            swarm.add_worker(name)
        await swarm.wait_step(10)
        rows.append(await measure(swarm, "alone", options.seconds, None, 0))
        for act in (sybils, idle):
            attack = Attack(swarm, options.keys, act)
            await asyncio.sleep(options.seconds / 4)  # until all have come
            rows.append(await measure(swarm, act.__name__, options.seconds, attack, options.keys))
            await attack.stop()
            await asyncio.sleep(1.0)
            rows.append(await measure(swarm, "alone", options.seconds, None, 0))
    return rows


def judge(rows: list[Row]) -> list[dict[str, Any]]:
    """Each attack against what the honest did alone just before and after."""
    goals: list[dict[str, Any]] = []
    for before, under, after in zip(rows[::2], rows[1::2], rows[2::2], strict=False):
        for field in ("steps_per_s", "accepted_per_s"):
            alone = (getattr(before, field) + getattr(after, field)) / 2
            share = getattr(under, field) / alone
            name = f"{under.name}, {under.keys} keys: {field} of alone"
            goals.append({"name": name, "value": share, "goal": GOAL, "ok": share >= GOAL})
    return goals


def show(rows: list[Row], goals: list[dict[str, Any]]) -> None:
    """The table, then each goal beside its figure."""
    head = ("what", "keys", "steps/s", "rollouts/s", "leases", "peers", "cores")
    print("".join(f"{one:>12}" for one in head))
    for row in rows:
        print(
            f"{row.name:>12}{row.keys:>12}{row.steps_per_s:>12.2f}{row.accepted_per_s:>12.1f}"
            f"{row.leases:>12}{row.connected:>12}{row.cpu:>12.2f}"
        )
    for goal in goals:
        print(
            f"{'ok  ' if goal['ok'] else 'MISS'} {goal['name']}: {goal['value']:.2f} (goal {GOAL:g})"
        )


def main() -> int:
    """Measure, print, and say by the exit code whether every goal was met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="100 keys, 5 seconds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.keys, options.seconds = 100, 5.0
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # not among the user's own nodes
        rows = asyncio.run(run(Path(directory), options))
    goals = judge(rows)
    show(rows, goals)
    if options.json:
        document = {"rows": [asdict(row) for row in rows], "goals": goals}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
