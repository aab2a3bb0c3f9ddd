"""Keys that claim every chunk and keep who asks in line: neither a version, nor a newcomer, waits for them."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest
from support import lying_holders
from support.access_lines import uplinks
from support.exchange_world import KIB, Bare, ExchangeNetwork, copies_sent, node_id, payload
from support.exchange_world import references as refs
from support.memory_network import MemoryNetwork
from support.memory_store import MemoryStore
from support.swarm import Swarm
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.node.p2p.chunk_client import KeptInLine, TcpChunks
from primerl.node.p2p.discovery import StreamCarrier
from primerl.node.p2p.download_state import ChunkDownload
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.transport import Stream
from primerl.protocol.errors import Reason
from primerl.protocol.messages import InLine
from primerl.protocol.session import frame
from primerl.protocol.version import MAX_MESSAGE

Talk = Callable[[Stream], Awaitable[bytes]]
SIZE = 32 * KIB
SOON = 60.0
PLOYS: dict[str, lying_holders.Ploy] = {
    "in line": lying_holders.keep_in_line,
    "silent": lying_holders.stay_silent,
    "busy": lying_holders.be_busy,
    "busy after a line": lying_holders.busy_after(0.5),
    "a trickle": lying_holders.trickle(SIZE, 1.0),
    "in turn": lying_holders.in_turn(
        lying_holders.keep_in_line,
        lying_holders.be_busy,
        lying_holders.stay_silent,
        lying_holders.busy_after(1.0),
    ),
}


@pytest.mark.parametrize("name", PLOYS)
@on_virtual_time
async def test_whoever_lets_versions_wait_again_and_again_is_not_asked_for_the_next(
    name: str,
) -> None:
    """Before, a liar was asked for each version anew, and each one waited for it."""
    asked: Counter[str] = Counter()
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        liars = [
            world.add(
                f"liar{number}",
                handler=lying_holders.claiming(PLOYS[name], asked=lambda _: asked.update(["liar"])),
            )
            for number in range(4)
        ]
        version = 0
        await fetch(worker, version, liars, origin)
        assert asked["liar"] > 0
        # Which of them take part is left to chance.
        while not all(passed_over(worker, liar) for liar in liars):
            version += 1
            assert version < 40
            await fetch(worker, version, liars, origin)
        asked.clear()
        await fetch(worker, version + 1, liars, origin)
        assert asked["liar"] == 0
        assert not any(worker.peers.get(liar.id).blamed for liar in liars)


def passed_over(worker: Bare, peer: Bare) -> bool:
    return worker.fetcher.scores.passed_over(peer.id, time.monotonic())


async def fetch(worker: Bare, version: int, line: list[Bare], origin: Bare) -> None:
    """Fetch a version that the origin has."""
    chunks = payload(12, SIZE, seed=version)
    origin.hold(chunks)
    async with asyncio.timeout(SOON):
        await worker.fetch(refs(chunks), line, origin)
    assert worker.holds(refs(chunks))


@on_virtual_time
async def test_half_of_forty_neighbours_that_do_their_worst_cost_an_honest_swarm_no_chunk() -> None:
    chunks = payload(40, SIZE)
    async with ExchangeNetwork() as world:
        origin, worker = world.add("origin"), world.add("w0")
        origin.hold(chunks)
        store = MemoryStore(max_bytes=1 << 30)
        for chunk in chunks:
            store.put(chunk)
        ploys = [*PLOYS.values(), lying_holders.late(store, 1.0)]
        liars = [
            world.add(f"l{number}", handler=lying_holders.claiming(ploys[number % len(ploys)]))
            for number in range(20)
        ]
        honest = [world.add(f"w{number}") for number in range(1, 21)]
        for holder in honest:
            holder.hold(chunks)
        line = [one for pair in zip(liars, honest, strict=True) for one in pair]
        async with asyncio.timeout(SOON):
            await worker.fetch(refs(chunks), line, origin)
        assert worker.holds(refs(chunks))
        assert sum(worker.fetcher.fetched[one.id] for one in honest) >= 20 * SIZE


@on_virtual_time
async def test_a_holder_whom_many_ask_at_once_is_honest_and_is_not_passed_over() -> None:
    """The control: its line is long, but it moves."""
    chunks = payload(6, SIZE)
    rates = {node_id("holder"): 24.0 * SIZE, node_id("origin"): 6.0 * SIZE}
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin, holder = world.add("origin"), world.add("holder")
        workers = [world.add(f"w{number}") for number in range(16)]
        for one in (origin, holder):
            one.hold(chunks)
        async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(worker.fetch(refs(chunks), [holder], origin))
        for worker in workers:
            assert worker.holds(refs(chunks))
            assert not passed_over(worker, holder)
            assert not worker.peers.get(holder.id).blamed
        # Mostly fifteen copies to one: the origin is asked for what nobody has in time.
        assert copies_sent(holder, refs(chunks)) > copies_sent(origin, refs(chunks))


@on_virtual_time
async def test_a_line_ends_after_a_time_and_to_be_in_it_is_no_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, a line lasted for 240 beats of up to 2 s, and each counted as progress."""
    monkeypatch.setattr("primerl.node.p2p.chunk_client.LINE_S", 0.5)
    (chunk,) = refs(payload(1, SIZE))
    async with ExchangeNetwork() as world:
        worker = world.add("w0")
        liar = world.add("liar", handler=lying_holders.claiming(lying_holders.keep_in_line))
        worker.peers.hint(liar.id, liar.transport.addresses())
        download = ChunkDownload(liar.id, 0.0, 0.0, chunk=chunk)
        async with asyncio.timeout(SOON):
            with pytest.raises(KeptInLine):
                await worker.fetcher.client.one(chunk, download, start=lambda: True)
        assert download.touched == 0.0


class BeatingStream:
    """A stream on which another node says for ever that we are in line."""

    def __init__(self) -> None:
        self._beat = frame(InLine(), MAX_MESSAGE)
        self._at = 0

    async def read_exact(self, size: int) -> bytes:
        if not self._at:
            await asyncio.sleep(0.05)
        part = self._beat[self._at : self._at + size]
        self._at = (self._at + size) % len(self._beat)
        return part

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take a request."""

    async def finish(self) -> None:
        """Nothing follows."""

    async def abort(self) -> None:
        """Nothing to reset."""


@on_virtual_time
async def test_over_tcp_too_a_line_ends_after_a_time_and_counts_as_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("primerl.node.p2p.chunk_client.LINE_S", 0.3)
    (chunk,) = refs(payload(1, SIZE))

    class Carrier:
        async def converse(self, peer: bytes, addresses: object, talk: Talk) -> bytes:
            return await talk(BeatingStream())

    chunks = TcpChunks(cast(StreamCarrier, Carrier()), PeerTable())
    with pytest.raises(Refused) as refusal:
        await chunks.get(bytes(32), chunk, deadline=SOON / 6)
    assert refusal.value.reason == Reason.BUSY


@on_virtual_time
async def test_over_tcp_no_line_at_others_keeps_us_from_the_trainer() -> None:
    """Before, the trainer and all others shared four slots."""
    data = payload(1, SIZE)[0]
    (chunk,) = refs([data])
    liar, trainer = bytes(32), b"t" * 32

    class Carrier:
        async def converse(self, peer: bytes, addresses: object, talk: Talk) -> bytes:
            return data if peer == trainer else await talk(BeatingStream())

    chunks = TcpChunks(cast(StreamCarrier, Carrier()), PeerTable(), trainer=trainer)
    waiting = [asyncio.create_task(chunks.get(liar, chunk, deadline=SOON)) for _ in range(8)]
    try:
        await asyncio.sleep(0.1)
        assert await chunks.get(trainer, chunk, deadline=SOON / 6) == data
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_a_run_goes_on_and_newcomers_join_it_beside_keys_that_only_keep_others_in_line(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, three such keys stopped a run for as long as they stayed, and newcomers had no first version."""
    monkeypatch.setattr("primerl.node.p2p.download.IN_LINE_S", 0.5)
    monkeypatch.setattr("primerl.node.p2p.peers.PATIENCE_S", 0.5)
    async with (
        Swarm(tmp_path, model_dir, max_steps=100_000) as swarm,
        AsyncExitStack() as stack,
    ):
        await swarm.start_trainer()
        liars = [
            await stack.enter_async_context(lying_holders.LineHolder(swarm, f"liar{number}"))
            for number in range(3)
        ]
        for name in ("w1", "w2"):
            swarm.add_worker(name)
        await until(lambda: sum(liar.requests for liar in liars) >= 3, timeout=SOON)
        swarm.add_worker("newcomer")
        # More versions than workers may lag behind.
        await swarm.wait_step(int((await swarm.trainer.status())["version"]) + 3, SOON)
        await until(lambda: bool(swarm.fakes.loads("newcomer")), timeout=SOON)
