"""Measure a trainer's page at a thousand connected peers: its cost, and how soon it and `peers` are there.

    .venv/bin/python scripts/bench/dashboard.py [--peers 1000] [--seconds 20] [--quick] [--json FILE]

A real trainer without work; each peer is a QUIC endpoint of its own in another process, said hello with the
ticket and has a made-up record of accepted and rejected work. Viewers are a third process. Processor time is
that of the trainer's process, less what it takes without viewers. The first paint is that of Debian's
Chromium where that is installed. --quick: 100 peers, 8 s.
"""

import argparse
import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import aiohttp
from support.swarm import make_model

from primerl.node.ops import control
from primerl.node.p2p.rpc import ask
from primerl.node.p2p.transport import Connection
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PeerRecord
from primerl.protocol.messages import Hello, Welcome
from primerl.protocol.reputation import Reputation
from primerl.protocol.version import WIRE_VERSION
from primerl.scripts.bench.floods import DEADLINE_S, Attacker, IrohSwarm, cpu_s
from primerl.scripts.bench.report import Goal, at_most, conclude, make_parser, show_figures

CPU_GOAL_MS, OPEN_GOAL_MS, MEMORY_GOAL_MB = 100.0, 100.0, 40.0
PAINT_GOAL_MS, PEERS_GOAL_S = 1000.0, 0.5
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VIEWERS = 4
CONNECT_S = 300.0


class Member(Attacker):
    """A node that says hello, and holds its connection."""

    async def member(self, connection: Connection) -> None:
        """Join the run, and ask for nothing."""
        node, soon = self._key.node_id, int(time.time()) + 3600
        body = PeerRecord(node, "inference", "bench", self._transport.addresses(), (), True)
        record = seal(self._key, Purpose.PEER, self.ticket.run, body, expires=soon)
        hello = Hello(WIRE_VERSION, "inference", "bench", self._sealed, record)
        await ask(connection, hello, Welcome, deadline=DEADLINE_S)
        await connection.accept_stream()


async def join(count: int, ticket: str) -> None:
    """Be so many members until standard input ends."""
    os.nice(5)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(count):
        member = Member(ticket)
        tasks.append(asyncio.create_task(member.run(Member.member)))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # skips an orderly shutdown of a thousand endpoints


async def watch(count: int, link: str) -> None:
    """View a page so many times until standard input ends; print the bytes that each viewer read."""
    url, _, token = link.partition("#token=")
    read = [0] * count

    async def view(number: int) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.get(f"{url}events", headers=headers) as reply,
        ):
            async for data in reply.content.iter_any():
                read[number] += len(data)

    tasks = [asyncio.create_task(view(number)) for number in range(count)]
    await asyncio.to_thread(sys.stdin.read)
    print(sum(read) / count, flush=True)
    for task in tasks:
        task.cancel()
    os._exit(0)


async def paint(link: str) -> None:
    """Open a page in a browser; print the milliseconds to its first paint, figures, and peers."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        arguments = ["--no-sandbox"] * (os.geteuid() == 0)
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = await browser.new_page()
        await page.goto(link)
        await page.wait_for_selector("#tiles div")
        figures = await page.evaluate("performance.now()")
        painted = await page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        began = time.monotonic()
        await page.click("text=Peers")
        await page.wait_for_selector("#table tbody tr")
        print(painted, figures, 1000 * (time.monotonic() - began), flush=True)
        await browser.close()


async def list_peers(data_dir: Path) -> float:
    """Return the seconds that `primerl-node peers` takes, with its start."""
    began = time.monotonic()
    program = Path(sys.executable).with_name("primerl-node")
    process = await asyncio.create_subprocess_exec(
        program, "peers", "-d", data_dir, stdout=asyncio.subprocess.PIPE
    )
    text, _ = await process.communicate()
    assert process.returncode == 0
    assert text.count(b"inference") > 0
    return time.monotonic() - began


@asynccontextmanager
async def beside(*arguments: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run this program in another process during the block."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, stdin=pipe, stdout=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def busy_ms(seconds: float) -> float:
    """Return the milliseconds of processor time that this process takes in a second."""
    began, used = time.monotonic(), cpu_s()
    await asyncio.sleep(seconds)
    return 1000 * (cpu_s() - used) / (time.monotonic() - began)


def memory_mb() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def run(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures."""
    figures: dict[str, float] = {}
    model = make_model(directory / "model")
    network = {"max_peers": options.peers + 64}
    patient = {"batch_timeout_s": 3600.0}  # nobody works
    async with IrohSwarm(directory, model, max_steps=9, rollouts=patient) as swarm:
        await swarm.start_trainer(network=network)
        role = None
        while role is None:
            await asyncio.sleep(0.1)
            assert swarm.node is not None
            role = swarm.node.trainer_role
        registry = role.scheduler.registry
        async with beside("--join", str(options.peers), "--ticket", swarm.ticket):
            until = time.monotonic() + CONNECT_S
            while len(registry.workers) < options.peers and time.monotonic() < until:
                await asyncio.sleep(0.5)
                print(f"{len(registry.workers)} connected", end="\r", file=sys.stderr, flush=True)
            for number, node in enumerate(registry.workers):
                reputation = registry.reputations[node] = Reputation()
                lost = Counter({Reason.STALE: number % 7, Reason.BAD_REWARD: number % 3})
                reputation.record("reverse-text", 1000 + number, lost, time.time())
            await asyncio.sleep(10.0)
            figures["connected peers"] = (await swarm.trainer.status())["peers"]
            figures["without a viewer, ms/s"] = alone = await busy_ms(options.seconds)
            answer = await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "dashboard")
            figures["peers, s"] = min([await list_peers(swarm.trainer.data_dir) for _ in range(3)])
            before, began = memory_mb(), time.monotonic()
            async with aiohttp.ClientSession() as session, session.get(answer["link"]) as reply:
                await reply.read()
            figures["first request, ms"] = 1000 * (time.monotonic() - began)
            for count in (1, VIEWERS):
                async with beside("--watch", str(count), "--link", answer["link"]) as viewers:
                    await asyncio.sleep(3.0)
                    spent = await busy_ms(options.seconds) - alone
                    said, _ = await viewers.communicate(b"")
                figures[f"{count} viewers, ms/s"] = spent
                figures[f"{count} viewers, kB/s each"] = float(said) / 1e3 / (options.seconds + 3.0)
            figures["memory of a page in use, MB"] = memory_mb() - before
            if CHROMIUM:
                async with beside("--paint", "1", "--link", answer["link"]) as browser:
                    said, _ = await browser.communicate(b"")
                names = ("first paint, ms", "first figures, ms", "peers after a click, ms")
                figures |= dict(zip(names, map(float, said.split()), strict=True))
    return figures


def started_ms() -> float:
    """Return the milliseconds in which a page begins to listen, in a process that has loaded it."""
    program = """if True:
        import asyncio, time
        from primerl.node.ops.dashboard import Dashboard
        async def main():
            began = time.perf_counter()
            page = Dashboard(None, 0)
            page.open()
            print(1000 * (time.perf_counter() - began))
            await page.close()
        asyncio.run(main())"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "100 peers, 8 seconds")
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    for name in ("--join", "--watch", "--paint"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    for name in ("--ticket", "--link"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    if options.join:
        asyncio.run(join(options.join, options.ticket))
    if options.watch:
        asyncio.run(watch(options.watch, options.link))
    if options.paint:
        asyncio.run(paint(options.link))
        return 0
    if options.quick:
        options.peers, options.seconds = 100, 8.0
    figures = {"start of an idle page, ms": started_ms()}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory  # not in the user's list of running nodes
        figures |= asyncio.run(run(Path(directory), options))
    show_figures(figures)
    goals: list[Goal] = [
        at_most("one viewer", figures["1 viewers, ms/s"], CPU_GOAL_MS, "ms/s"),
        at_most("start of an idle page", figures["start of an idle page, ms"], OPEN_GOAL_MS, "ms"),
        at_most("a page in use", figures["memory of a page in use, MB"], MEMORY_GOAL_MB, "MB"),
        at_most("primerl-node peers", figures["peers, s"], PEERS_GOAL_S, "s"),
    ]
    if CHROMIUM:
        goals.append(at_most("first paint", figures["first paint, ms"], PAINT_GOAL_MS, "ms"))
    return conclude(figures, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
