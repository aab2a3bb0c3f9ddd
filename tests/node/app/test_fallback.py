"""Whole network halves of nodes between which iroh does not get through: chunks come by TCP, or from a seed."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.memory_network import MemoryNetwork

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import Factories, NodeTimeouts
from primerl.node.app.services import open_services
from primerl.node.config.run import NetworkConfig, NodeConfig
from primerl.node.p2p.discovery import Discovery
from primerl.node.p2p.services import NodeServices
from primerl.node.p2p.transport import Transport
from primerl.node.storage.chunk_store import FileStore
from primerl.node.storage.ledger import Ledger
from primerl.protocol.manifests import ChunkRef, PeerRecord

RUN = b"r" * 32
TRAINER, WORKER = (SecretKey.from_seed(bytes([i]) * 32) for i in (1, 2))
DEADLINE_S = 60.0
NOWHERE = ("127.0.0.1:9",)
CHUNKS = [bytes([i]) * (200_000 + i) for i in range(6)]


def in_memory(world: MemoryNetwork) -> Factories:
    """Nodes of one world, with discovery."""

    async def transport(network: NetworkConfig, key: SecretKey, port: int) -> Transport:
        return world.transport(key.node_id)

    async def discovery(
        network: NetworkConfig, key: SecretKey, run_id: bytes, bootstrap: Sequence[str]
    ) -> Discovery | None:
        if not network.libp2p:
            return None
        made = world.discovery(key.node_id)
        await made.start(bootstrap)
        return made

    return Factories(transport=transport, discovery=discovery)


@asynccontextmanager
async def node_services(
    key: SecretKey,
    folder: Path,
    factories: Factories,
    bootstrap: tuple[str, ...] = (),
    **network: Any,
) -> AsyncGenerator[NodeServices]:
    """The network half of one node."""
    local: dict[str, Any] = {"host": "127.0.0.1"}
    config = NodeConfig(fsync=False, network=NetworkConfig(**(local | network)))
    ledger = Ledger(folder / "ledger.db", fsync=False)
    store = FileStore(folder / "chunks", max_bytes=1 << 30, fsync=False)
    try:
        async with open_services(
            config,
            key,
            ledger,
            store,
            run_id=RUN,
            trainer=TRAINER.node_id,
            role="trainer" if key is TRAINER else "inference",
            bootstrap=bootstrap,
            factories=replace(factories, timeouts=NodeTimeouts(connect_s=0.5)),
        ) as opened:
            yield opened
    finally:
        ledger.close()


def filled(store: FileStore) -> list[ChunkRef]:
    return [ChunkRef(store.put(data), len(data)) for data in CHUNKS]


def meet_wrongly(worker: NodeServices, discovery: Sequence[str]) -> None:
    """A record of the trainer whose UDP address leads nowhere."""
    record = PeerRecord(TRAINER.node_id, "trainer", "0", NOWHERE, tuple(discovery), True)
    worker.peers.learn(record, b"")


@contextmanager
def web(folder: Path) -> Generator[str]:
    """A static web server over `folder`; its URL."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def bring(worker: NodeServices, chunks: Sequence[ChunkRef]) -> None:
    """Fetch from the trainer, the only node to ask."""
    await worker.fetcher.fetch(chunks, [], TRAINER.node_id)
    assert [worker.store.get(chunk.digest) for chunk in chunks] == CHUNKS


@pytest.mark.parametrize("kind", ["memory", "real"])
async def test_chunks_come_over_tcp_where_iroh_does_not_get_through(
    tmp_path: Path, kind: str
) -> None:
    factories = in_memory(MemoryNetwork()) if kind == "memory" else Factories()
    async with (
        node_services(TRAINER, tmp_path / "trainer", factories) as trainer,
        node_services(WORKER, tmp_path / "worker", factories) as worker,
    ):
        chunks = filled(trainer.store)
        meet_wrongly(worker, trainer.discovery_addresses())
        await bring(worker, chunks)
        assert worker.fetcher.fetched == {TRAINER.node_id: sum(map(len, CHUNKS))}
        async with asyncio.timeout(DEADLINE_S):  # it counts a chunk a little after we have it
            while trainer.blobs.served != {WORKER.node_id: sum(map(len, CHUNKS))}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_ticket_alone_leads_to_the_trainer_over_tcp(tmp_path: Path) -> None:
    factories = in_memory(MemoryNetwork())
    async with node_services(TRAINER, tmp_path / "trainer", factories) as trainer:
        addresses = trainer.discovery_addresses()
        async with node_services(WORKER, tmp_path / "worker", factories, addresses) as worker:
            worker.peers.hint(TRAINER.node_id, NOWHERE)
            await bring(worker, filled(trainer.store))


async def test_chunks_come_from_a_seed_where_nobody_is_reached(tmp_path: Path) -> None:
    factories = in_memory(MemoryNetwork())
    chunks = filled(FileStore(tmp_path / "bucket", max_bytes=1 << 30, fsync=False))
    with web(tmp_path / "bucket") as url:
        async with node_services(
            WORKER, tmp_path / "worker", factories, libp2p=False, seeds=[url]
        ) as worker:
            meet_wrongly(worker, [])
            await bring(worker, chunks)
            assert worker.fetcher.fetched == {b"seed:127.0.0.1": sum(map(len, CHUNKS))}


async def test_a_lying_seed_costs_time_and_never_a_wrong_chunk(tmp_path: Path) -> None:
    factories = in_memory(MemoryNetwork())
    bucket = tmp_path / "bucket"
    chunks = [ChunkRef(digest(data), len(data)) for data in CHUNKS]
    for chunk, data in zip(chunks, CHUNKS, strict=True):
        name = chunk.digest.hex()
        (bucket / name[:2] / name[2:4]).mkdir(parents=True, exist_ok=True)
        (bucket / name[:2] / name[2:4] / name).write_bytes(data[:-1] + b"!")
    with web(bucket) as url:
        async with (
            node_services(TRAINER, tmp_path / "trainer", factories) as trainer,
            node_services(
                WORKER, tmp_path / "worker", factories, seeds=[url, url + "/other"]
            ) as worker,
        ):
            filled(trainer.store)
            serving = asyncio.ensure_future(trainer.router(trainer.blobs.handle).run())
            worker.peers.hint(TRAINER.node_id, trainer.addresses())
            await bring(worker, chunks)
            serving.cancel()
            await asyncio.wait([serving])
            assert set(worker.fetcher.fetched) == {TRAINER.node_id}
            assert worker.fetcher.wasted[b"seed:127.0.0.1"] > 0
