"""Measure the throughput of honest workers alone, and during floods by a thousand keys.

    python scripts/bench/floods.py [--keys 1000] [--seconds 20] [--quick] [--json FILE]

A real trainer and two honest workers in one process, over iroh on loopback; their engines wait for a fixed time
per token and compute nothing. Each attack comes from another process, with all its keys at once, each with a
separate QUIC endpoint:

    sybils  one ticket; each key says hello, takes a lease, never answers, and goes on asking
    idle    no ticket; each key opens a connection, says nothing, and opens the next one when it is closed

Two more, for tests/net (--attack NAME --ticket T): `requests`, a ticket and as many requests as are answered;
`drip`, one byte a second of requests, uploads and of every chunk that others ask for.

On loopback nothing is limited by address, and attackers compute on the same machine (at low priority): both
make the test harder.
"""

import argparse
import asyncio
import logging
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.lying_holders import claiming, trickle
from support.swarm import Running, Swarm, make_model
from support.witness import Fakes

from primerl.crypto.keys import SecretKey
from primerl.node.config.run import NetworkConfig
from primerl.node.p2p.connections import Router
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import Refused, ask
from primerl.node.p2p.transport import (
    Connection,
    ConnectionLost,
    Stream,
    Transport,
    TransportError,
)
from primerl.protocol import tickets
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.manifests import PeerRecord, PolicyManifest, Ticket
from primerl.protocol.messages import (
    GetChunk,
    GetHeads,
    Heads,
    Hello,
    LeaseReply,
    LeaseRequest,
    SubmitOffer,
    Welcome,
    WorkerStats,
)
from primerl.protocol.session import decode, frame
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, ALPN_PIPELINE, WIRE_VERSION
from primerl.scripts.bench.report import Goal, at_least, conclude, make_parser

LOOPBACK = "127.0.0.1"
REQUESTS = 16
"""Requests of a key at the same time."""
GOAL = 0.9
"""Share of the throughput without attack."""
TOKEN_S = 0.25
"""An engine's time for a token; a rollout has four at most, so it takes a second: engines bound the run."""
PAUSE_S = 1.0
"""Mean pause between two requests of an attacker, and before it reconnects after being disconnected."""
ROLLOUTS = {"groups_per_batch": 8, "groups_per_lease": 2, "lease_timeout_s": 60.0}
DEADLINE_S = 20.0


# -- attackers, in a separate process ------------------------------------------------------------------


class Attacker:
    """An attacker with one key."""

    def __init__(self, text: str, host: str = LOOPBACK) -> None:
        self.ticket: Ticket = tickets.read(text, now=int(time.time()))
        self._sealed = tickets.sealed_bytes(text)
        self._key = SecretKey.generate()
        self._transport = transport_of(self._key, host)
        self.leases = 0

    async def run(self, act: Callable[["Attacker", Connection], Awaitable[None]]) -> None:
        """Repeat the attack until cancelled."""
        await self._transport.start()
        while True:
            with suppress(TransportError, Refused, TimeoutError):
                connection = await self._transport.connect(
                    self.ticket.trainer, self.ticket.addresses, ALPN_CONTROL, deadline=DEADLINE_S
                )
                try:
                    await act(self, connection)
                finally:
                    await connection.close()
            await pause()

    async def hello(self, connection: Connection) -> None:
        """Ask to be admitted."""
        node, soon = self._key.node_id, int(time.time()) + 3600
        body = PeerRecord(node, "inference", "flood", self._transport.addresses(), (), True)
        record = seal(self._key, Purpose.PEER, self.ticket.run, body, expires=soon)
        hello = Hello(WIRE_VERSION, "inference", "flood", self._sealed, record)
        await ask(connection, hello, Welcome, deadline=DEADLINE_S)

    async def poll(self, connection: Connection, wanted: int) -> None:
        """Ask for leases."""
        request = LeaseRequest(wanted, WorkerStats(0))
        reply = await ask(connection, request, LeaseReply, deadline=DEADLINE_S)
        self.leases += len(reply.leases)

    async def sybil(self, connection: Connection) -> None:
        """Say hello, take leases, answer nothing, ask again."""
        await self.hello(connection)
        while True:
            await self.poll(connection, 4)
            await pause()

    async def idle(self, connection: Connection) -> None:
        """Hold the connection for as long as it is not closed."""
        await connection.accept_stream()

    async def requests(self, connection: Connection) -> None:
        """Ask for heads as fast as they come, many times at once."""
        await self.hello(connection)

        async def again() -> None:
            while not connection.closed:
                with suppress(Refused):
                    await ask(connection, GetHeads(-1), Heads, deadline=DEADLINE_S)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(REQUESTS):
                tasks.create_task(again())

    async def drip(self, connection: Connection) -> None:
        """Claim to have every chunk and send a byte a second; ask and upload at that rate."""
        await self.hello(connection)
        sizes: dict[bytes, int] = {}

        async def answer(stream: Stream, request: GetChunk) -> None:
            await trickle(sizes.get(request.digest, 1 << 20), 1.0)(stream, request)

        handlers = {ALPN_BLOBS: claiming(answer)}
        router = Router(
            self._transport, PeerTable(), handlers, max_streams_per_peer=32, max_peers=32
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.run())
            for _ in range(REQUESTS):
                tasks.create_task(self._slow_request(connection))
            while not connection.closed:
                await self.poll(connection, 0)  # so that others are told of this source
                sizes.update(await chunk_sizes(connection))
                await pause()
            raise ConnectionLost("the trainer has closed the connection")

    async def _slow_request(self, connection: Connection) -> None:
        offer = frame(SubmitOffer(bytes(32), 1, 1 << 20))
        while not connection.closed:
            with suppress(TransportError):
                stream = await connection.open_stream()
                for byte in offer + bytes(1 << 20):
                    await stream.write(bytes([byte]))
                    await asyncio.sleep(1.0)
            await pause()


async def chunk_sizes(connection: Connection) -> dict[bytes, int]:
    """Ask for the sizes of the chunks of the newest versions."""
    reply = await ask(connection, GetHeads(-1), Heads, deadline=DEADLINE_S)
    manifests = [decode(notice.manifest, PolicyManifest) for notice in reply.notices]
    artifacts = [artifact for manifest in manifests for artifact in manifest.artifacts]
    return {chunk.digest: chunk.size for artifact in artifacts for chunk in artifact.chunks}


MEASURED = {"sybils": Attacker.sybil, "idle": Attacker.idle}
ATTACKS = {**MEASURED, "requests": Attacker.requests, "drip": Attacker.drip}


async def pause() -> None:
    """Sleep for PAUSE_S +- 50 %, so that attackers do not act in lockstep."""
    await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))


async def attack(name: str, keys: int, ticket: str, host: str) -> None:
    """Attack until standard input ends; print the number of leases taken."""
    os.nice(19)
    attackers = [Attacker(ticket, host) for _ in range(keys)]
    tasks = [asyncio.create_task(one.run(ATTACKS[name])) for one in attackers]
    await asyncio.to_thread(sys.stdin.read)
    print(sum(one.leases for one in attackers), flush=True)
    for task in tasks:
        task.cancel()
    os._exit(0)  # skips an orderly shutdown of a thousand endpoints


# -- the run -------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One measurement."""

    name: str
    keys: int
    steps_per_s: float
    accepted_per_s: float
    """Accepted rollouts per second."""
    connected: int
    """Peers of the trainer at the end."""
    cpu: float
    """Cores used by trainer and honest workers."""
    leases: int = 0
    """Leases taken by the attackers."""


class IrohSwarm(Swarm):
    """A swarm over real QUIC."""

    async def _transport(
        self, running: Running, network: NetworkConfig, key: SecretKey, port: int
    ) -> Transport:
        transport = transport_of(key)
        await transport.start()
        return transport


def transport_of(key: SecretKey, host: str = LOOPBACK) -> IrohTransport:
    """Make an endpoint."""
    alpns = (ALPN_CONTROL, ALPN_BLOBS, ALPN_PIPELINE)
    return IrohTransport(key, host=host, port=0, alpns=alpns)


async def measure(swarm: Swarm, name: str, seconds: float, keys: int = 0) -> Row:
    """Measure the run's progress over `seconds`."""
    before, began, used = await swarm.trainer.status(), time.monotonic(), cpu_s()
    await asyncio.sleep(seconds)
    after, took = await swarm.trainer.status(), time.monotonic() - began
    return Row(
        name,
        keys,
        (after["version"] - before["version"]) / took,
        (after["accepted"] - before["accepted"]) / took,
        after["peers"],
        (cpu_s() - used) / took,
    )


async def under(swarm: Swarm, name: str, options: argparse.Namespace) -> Row:
    """Measure as measure(), during an attack."""
    command = (__file__, "--attack", name, "--keys", str(options.keys), "--ticket", swarm.ticket)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=pipe, stdout=pipe
    )
    await asyncio.sleep(5.0 + options.keys / 25)  # until all have connected
    row = await measure(swarm, name, options.seconds, options.keys)
    said, _ = await process.communicate(b"")
    row.leases = int(said)
    return row


def cpu_s() -> float:
    """Return the CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def run(directory: Path, options: argparse.Namespace) -> list[Row]:
    """Return all rows; honest workers are measured alone before and after each attack."""

    async def token() -> None:
        await asyncio.sleep(TOKEN_S)

    fakes = Fakes(pause=token)
    model = make_model(directory / "model")
    swarm = IrohSwarm(directory, model, fakes=fakes, max_steps=1_000_000, rollouts=ROLLOUTS)
    async with swarm:
        await swarm.start_trainer()
        for name in ("one", "two"):
            swarm.add_worker(name)
        await swarm.wait_step(10)
        rows = [await measure(swarm, "alone", options.seconds)]
        for name in MEASURED:
            rows.append(await under(swarm, name, options))
            await asyncio.sleep(2.0)
            rows.append(await measure(swarm, "alone", options.seconds))
    return rows


def judge(rows: list[Row]) -> list[Goal]:
    """Compare each attack with the honest throughput just before and after."""
    goals: list[Goal] = []
    for before, row, after in zip(rows[::2], rows[1::2], rows[2::2], strict=False):
        for field in ("steps_per_s", "accepted_per_s"):
            alone = (getattr(before, field) + getattr(after, field)) / 2
            share = getattr(row, field) / alone
            name = f"{row.name}, {row.keys} keys: {field} of alone"
            goals.append(at_least(name, share, GOAL))
    return goals


def show(rows: list[Row]) -> None:
    """Print the table."""
    head = ("what", "keys", "steps/s", "rollouts/s", "leases", "peers", "cores")
    print("".join(f"{one:>12}" for one in head))
    for row in rows:
        print(
            f"{row.name:>12}{row.keys:>12}{row.steps_per_s:>12.2f}{row.accepted_per_s:>12.1f}"
            f"{row.leases:>12}{row.connected:>12}{row.cpu:>12.2f}"
        )


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "100 keys, 8 seconds")
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--ticket", help=argparse.SUPPRESS)
    parser.add_argument("--host", default=LOOPBACK, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    if options.attack:
        asyncio.run(attack(options.attack, options.keys, options.ticket, options.host))
    if options.quick:
        options.keys, options.seconds = 100, 8.0
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # not in the user's list of running nodes
        rows = asyncio.run(run(Path(directory), options))
    show(rows)
    return conclude([asdict(row) for row in rows], judge(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
