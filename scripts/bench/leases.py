"""Measure what a trainer computes to answer lease requests, with few and with hundreds of workers.

    python scripts/bench/leases.py [--workers N]... [--quick] [--json FILE]

The product's scheduler, lease book, registry, demand and ledger, in one process and without a network; workers
are proven, and their peer records have the size of real ones. CPU is the least mean of three rounds:

    request     a request that wants nothing, as a worker that has enough work makes one every five seconds
    nothing     work changed while all wait and nothing can be leased
    full        work changed while there is much to lease, and all that wait hold what they may
"""

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.bare_node import bare_services
from support.counting_environment import CountingEnvironment
from support.protocol_cases import MIXED

from primerl.crypto.hashing import digest
from primerl.node.config.run import RunConfig
from primerl.node.p2p.peers import PeerTable
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.audits import AuditQueue
from primerl.node.trainer.lease_book import LeaseBook
from primerl.node.trainer.scheduler import LeaseDemand, LeaseScheduler, TaskSupply, lease_policy
from primerl.node.trainer.state import Progress
from primerl.node.trainer.workers import WorkerRegistry
from primerl.node.training.buffer import RolloutBuffer
from primerl.protocol.messages import LeaseRequest, WorkerStats
from primerl.scripts.bench.report import Goal, at_most, conclude, make_parser

WORKERS = (16, 500)
GOALS_US = {"request_us": 500.0, "nothing_us": 500.0, "full_us": 2000.0}
"""Most CPU, on a busy machine too; `full` grows with the leases that are out, about two for each worker."""
RECORD = bytes(300)
ROLLOUTS = {
    "group_size": 16,
    "groups_per_batch": 32,
    "groups_per_lease": 8,
    "max_off_policy_steps": 5,
}
ROUNDS = 3
CONTRACT = MIXED.environments[0]


@dataclass(frozen=True)
class Row:
    """CPU of one call with so many workers, in microseconds; see the head of this file."""

    workers: int
    request_us: float
    nothing_us: float
    full_us: float


class Demand(LeaseDemand):
    """The demand of a run whose capacity is `free` groups."""

    free = 0

    def _free(self, waiting: int, now: float, *, newcomers: bool) -> int:
        super()._free(waiting, now, newcomers=newcomers)
        return self.free


async def measure(directory: Path, workers: int, calls: int) -> Row:
    """Measure a trainer of so many workers."""
    config = RunConfig.model_validate(
        {"environment": {"id": "reverse-text"}, "max_steps": 10**6, "rollouts": ROLLOUTS}
    )
    ledger, book = Ledger(directory / "ledger.db", fsync=False), LeaseBook(lease_policy(config))
    nodes = [digest(b"node %d" % number) for number in range(workers)]
    for node in nodes:
        ledger.admit(node, 0)
    registry = WorkerRegistry(
        bare_services(ledger=ledger, peers=PeerTable()),
        b"",
        book,
        AuditQueue(),
        environments=(CONTRACT,),
    )
    for node in nodes:
        known, peer = registry.reputation(node), registry.services.peers.get(node)
        known.record(CONTRACT.name, 3 * CONTRACT.group_size, Counter(), time.time())
        known.audited = 3 * CONTRACT.group_size
        peer.record = cast(Any, SimpleNamespace(share_address=True, role="inference"))
        peer.sealed = RECORD
    buffer = RolloutBuffer(max_off_policy_steps=5, capacity=1000)
    demand = Demand(config, registry, buffer, Progress())
    supply = TaskSupply(CountingEnvironment(name=CONTRACT.name), book)
    scheduler = LeaseScheduler(registry, [supply], cast(Any, SimpleNamespace(order=(0, 7))), demand)

    def ask(node: bytes, wanted: int) -> Awaitable[Any]:
        return scheduler.lease(node, LeaseRequest(wanted, WorkerStats(7)))

    async def waiting() -> list["asyncio.Task[Any]"]:
        """Let every worker wait for more than it may hold."""
        tasks = [asyncio.ensure_future(ask(node, 4)) for node in nodes]
        for _ in range(10):
            await asyncio.sleep(0)
        return tasks

    async def change(number: int) -> None:
        await scheduler.work_changed()

    try:
        request_us = await cpu_us(lambda number: ask(nodes[number % workers], 0), calls)
        asking = await waiting()
        nothing_us = await cpu_us(change, calls)
        await end(asking)
        demand.free = 10**5
        await supply.make_ready(2 * workers)
        for node in nodes:
            await ask(node, 4)
        asking = await waiting()
        await change(0)
        full_us = await cpu_us(change, calls)
        await end(asking)
    finally:
        ledger.close()
    return Row(workers, request_us, nothing_us, full_us)


async def end(asking: list["asyncio.Task[Any]"]) -> None:
    """End requests that wait."""
    for task in asking:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def cpu_us(call: Callable[[int], Awaitable[Any]], calls: int) -> float:
    """Return the CPU of a call, microseconds."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for number in range(calls):
            await call(number)
        rounds.append((time.process_time() - began) / calls)
    return 1e6 * min(rounds)


def judge(rows: list[Row]) -> list[Goal]:
    """Compare with the goals."""
    return [
        at_most(f"{name.removesuffix('_us')}, {row.workers} workers", asdict(row)[name], most, "us")
        for row in rows
        for name, most in GOALS_US.items()
    ]


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "20 calls each")
    parser.add_argument("--workers", type=int, action="append", metavar="N", help="of a trainer")
    options = parser.parse_args()
    rows: list[Row] = []
    print("CPU in us:  workers   request   nothing      full")
    for workers in options.workers or WORKERS:
        with tempfile.TemporaryDirectory() as directory:
            row = asyncio.run(measure(Path(directory), workers, 20 if options.quick else 200))
        rows.append(row)
        print(
            f"{row.workers:19d}{row.request_us:10.0f}{row.nothing_us:10.0f}{row.full_us:10.0f}",
            flush=True,
        )
    return conclude([asdict(row) for row in rows], judge(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
