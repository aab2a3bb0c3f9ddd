"""Measure a trainer's network while its learner computes in the daemon or in a process.

    python scripts/bench/beside_learner.py [--shape tiny|50m|0.6b] [--tokens N] [--seconds N] [--compile]
        [--ways idle local process] [--quick] [--json FILE]

A node serves pieces of 1 MiB over iroh, as a trainer does, to a process that computes nothing: each of four
streams requests the next piece as soon as it has one, and every two seconds a new connection is made. The
learner is loaded and takes one step after the other from the first second on; it compiles its layers with
--compile, or on a GPU. Each way is measured in separate processes; figures are those of whole seconds.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import make_backend
from primerl.node.config.run import RunConfig
from primerl.node.models.model_files import vocab_size
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.transport import Connection, Stream, TransportError
from primerl.node.process.threads import share_python
from primerl.node.training.backend import TrainBatch
from primerl.scripts.bench.models import SHAPES, fake_batch, make_model
from primerl.scripts.bench.report import conclude, make_parser

ALPN = b"bench/1"
PIECE = bytes(1 << 20)
STREAMS = 4
CONNECT_EVERY_S = 2.0
DEADLINE_S = 10.0
"""Time after which a node considers another one unreachable."""


async def serve(transport: IrohTransport) -> None:
    """Send a piece for every received byte, on every stream of every connection."""
    async with asyncio.TaskGroup() as tasks:

        async def give(stream: Stream) -> None:
            with suppress(TransportError):
                while await stream.read_exact(1):
                    await stream.write(PIECE)

        async def listen(connection: Connection) -> None:
            with suppress(TransportError):
                while True:
                    tasks.create_task(give(await connection.accept_stream()))

        while True:
            tasks.create_task(listen(await transport.accept()))


async def learn(options: argparse.Namespace, model: Path, way: str) -> int:
    """Make steps until cancelled; return their number."""
    training: dict[str, Any] = {"seq_len": options.tokens, "backend": "local"}
    if way == "process":
        training |= {"backend": "fsdp", "fsdp": {"ranks": 1}}
    if options.compile:
        training["compile"] = True
    backend = make_backend(RunConfig.model_validate({"training": training}))
    samples = fake_batch([options.tokens], vocab_size(model), seed=0)
    done = 0
    try:
        await backend.start(model)
        while True:
            await backend.step(TrainBatch(done + 1, samples))
            await backend.snapshot()
            done += 1
    except asyncio.CancelledError:
        return done
    finally:
        await backend.close()


async def node(options: argparse.Namespace, model: Path, way: str) -> dict[str, Any]:
    """Measure one way: the other process's received data per second, and the learner's steps."""
    share_python()
    transport = IrohTransport(SecretKey.generate(), host="127.0.0.1", port=0, alpns=(ALPN,))
    await transport.start()
    serving = asyncio.create_task(serve(transport))
    arguments = ["--peer", transport.node_id.hex(), transport.addresses()[0]]
    fetcher = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, *arguments, "--seconds", str(options.seconds)),
        stdout=subprocess.PIPE,
    )
    learning = asyncio.create_task(learn(options, model, way)) if way != "idle" else None
    out, _ = await fetcher.communicate()
    steps = 0
    if learning is not None:
        learning.cancel()
        steps = await learning
    serving.cancel()
    await asyncio.wait([serving])
    await transport.close()
    return {"way": way, "steps": steps, **json.loads(out)}


async def fetch(peer: bytes, address: str, seconds: float) -> dict[str, Any]:
    """Receive pieces in the process at the other end."""
    transport = IrohTransport(SecretKey.generate(), host="127.0.0.1", port=0, alpns=(ALPN,))
    await transport.start()
    began = time.monotonic()
    received = [0] * int(seconds)
    waits: list[float] = []

    async def pull(stream: Stream) -> None:
        while (passed := time.monotonic() - began) < seconds:
            await stream.write(b"?")
            await stream.read_exact(len(PIECE))
            passed = time.monotonic() - began
            if passed < seconds:
                received[int(passed)] += 1

    async def call() -> None:
        while time.monotonic() - began < seconds:
            asked = time.monotonic()
            try:
                found = await transport.connect(peer, [address], ALPN, deadline=DEADLINE_S)
                await found.close()
                waits.append(time.monotonic() - asked)
            except TransportError:
                waits.append(DEADLINE_S)
            await asyncio.sleep(CONNECT_EVERY_S)

    connection = await transport.connect(peer, [address], ALPN, deadline=DEADLINE_S)
    streams = [await connection.open_stream() for _ in range(STREAMS)]
    work = asyncio.gather(call(), *(pull(stream) for stream in streams))
    with suppress(TransportError, TimeoutError):
        async with asyncio.timeout(seconds + 2 * DEADLINE_S):
            await work
    return {"mib": received, "connect_s": waits}


def line(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    mib, waits = found["mib"], found["connect_s"]
    silent = sum(not one for one in mib)
    return (
        f"| {found['way']} | {statistics.mean(mib):.0f} | {statistics.median(mib):.0f} | {min(mib)} | {silent} "
        f"| {max(waits, default=DEADLINE_S):.2f} | {found['steps']} |"
    )


def main() -> int:
    """Print the table, or run one of its processes."""
    parser = make_parser(__doc__, "a tiny model, a few seconds")
    parser.add_argument("--shape", default="50m", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ways", nargs="+", default=["idle", "local", "process"])
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.shape, options.seconds = "tiny", 8
    if options.peer:
        node_id, address = options.peer
        print(json.dumps(asyncio.run(fetch(bytes.fromhex(node_id), address, options.seconds))))
        return 0
    if options.model:
        print(json.dumps(asyncio.run(node(options, options.model, options.ways[0]))))
        return 0
    return conclude(compare(options), [], options.json)


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every way in a separate process, which has compiled nothing yet."""
    rows: list[dict[str, Any]] = []
    print("| learner | MiB/s | median s | worst s | silent s | slowest connection, s | steps |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), options.shape)
        for way in options.ways:
            asked = ["--model", place, "--ways", way, "--tokens", str(options.tokens)]
            asked += ["--seconds", str(options.seconds), *(["--compile"] * options.compile)]
            done = subprocess.run(
                [sys.executable, __file__, *asked], stdout=subprocess.PIPE, check=True
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(line(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
