"""What watchers of heads are told: lists of leaders, the end of a run."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from support.bare_node import serving
from support.memory_network import MemoryNetwork
from support.protocol_cases import RUN, TRAINER, head, sealed_head

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.heads import HeadServer, HeadStore
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.transport import Stream
from primerl.node.storage.ledger import Ledger
from primerl.protocol.leaders import LeaderList, certify
from primerl.protocol.manifests import encode
from primerl.protocol.messages import HeadNotice, RunEnded, WatchHeads
from primerl.protocol.trust import TrustedRun
from primerl.protocol.version import ALPN_CONTROL

SERVER, CLIENT = (SecretKey.from_seed(bytes([n]) * 32).node_id for n in (1, 2))
PATIENCE_S = 60.0


@asynccontextmanager
async def watched(directory: Path) -> AsyncGenerator[tuple[HeadStore, HeadServer, Stream]]:
    """The heads of a node, and a stream of another node that watches them."""
    ledger = Ledger(directory / "ledger.db", fsync=False)
    book = HeadStore(TrustedRun(RUN, TRAINER.node_id), ledger)
    heads, asked = HeadServer(book), asyncio.Event()

    async def answer(peer: bytes, stream: Stream) -> None:
        request = await receive(stream, WatchHeads)
        asked.set()
        await heads.watch(peer, stream, request)

    network = MemoryNetwork()
    server, client = network.transport(SERVER), network.transport(CLIENT)
    async with serving(server, {ALPN_CONTROL: answer}):
        connection = await client.connect(
            SERVER, server.addresses(), ALPN_CONTROL, deadline=PATIENCE_S
        )
        stream = await connection.open_stream()
        await send(stream, WatchHeads(0, -1))
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        yield book, heads, stream
    await client.close()
    ledger.close()


async def test_a_watcher_is_told_the_leaders_once_and_again_when_they_change(
    tmp_path: Path,
) -> None:
    now, previous = int(time.time()), NO_DIGEST
    lists = [certify(TRAINER, RUN, LeaderList(n, (TRAINER.node_id,), 60)) for n in (1, 2)]
    async with watched(tmp_path) as (book, _, stream):
        for version, leaders in enumerate((lists[0], lists[0], lists[1], lists[1])):
            await book.admit_leaders(leaders)
            new = msgspec.structs.replace(
                head(version, previous=previous), created=now, expires=now + 3600
            )
            await book.admit(HeadNotice(sealed_head(new, expires=now + 3600)))
            previous = digest(encode(new))
            notice = await receive(stream, HeadNotice)
            assert notice.leaders == (msgspec.UNSET if version % 2 else leaders)


async def test_a_node_that_stops_waits_until_its_watchers_have_read_it(tmp_path: Path) -> None:
    async with watched(tmp_path) as (book, heads, stream):
        await book.end("stopped for now", "stopped")
        telling = asyncio.create_task(heads.wait_told((), set(), PATIENCE_S))
        await asyncio.sleep(0.1)
        assert not telling.done(), "connections would be closed, and what was sent is lost"
        assert await receive(stream, RunEnded) == RunEnded("stopped for now", "stopped")
        await stream.abort()
        await asyncio.wait_for(telling, 2.0)


async def test_a_watcher_that_reads_nothing_delays_a_stop_only_as_long_as_was_asked_for(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as (book, heads, _):
        await book.end("stopped for now", "stopped")
        began = time.monotonic()
        await heads.wait_told((), set(), 0.2)
        assert 0.2 <= time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize(
    ("version", "gone_s", "ends"),
    [(9, 31.0, True), (9, 5.0, False), (9, -math.inf, False), (8, 31.0, False), (10, 31.0, False)],
)
async def test_the_last_version_of_the_manifest_is_the_end_only_without_a_trainer(
    tmp_path: Path, version: int, gone_s: float, *, ends: bool
) -> None:
    """A trainer that was resumed with more steps goes on from there."""
    ledger = Ledger(tmp_path / "ledger.db")
    try:
        book = HeadStore(TrustedRun(RUN, TRAINER.node_id), ledger)
        book.unwatched_since = time.monotonic() - gone_s
        await book.end_without_trainer(version, 9)
        assert bool(book.ended) == ends
    finally:
        ledger.close()
