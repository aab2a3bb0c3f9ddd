"""The network half of a node, built once for every role: transport, peers, heads, chunks, discovery.

Opened and closed as one; closing goes in reverse and never raises.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol.manifests import Role
from ...protocol.trust import TrustedRun
from ..config.run import NodeConfig
from ..errors import BusyError
from ..ops.tracing import Tracing
from ..p2p.chunk_client import TcpChunks
from ..p2p.connections import ConnectionPool
from ..p2p.discovery import Discovery
from ..p2p.download import BlobFetcher
from ..p2p.gossip import HoldingsAnnouncer
from ..p2p.heads import HeadServer, HeadStore
from ..p2p.limits import Rates
from ..p2p.peers import PeerTable
from ..p2p.seeds import open_seeds
from ..p2p.serve import BlobServer, ChunkArrivals, TcpChunkServer, serving
from ..p2p.services import NodeServices
from ..p2p.transport import AddressInUse, Transport
from ..removal import remove_tree
from ..storage.chunk_store import CHUNKS, FileStore
from ..storage.ledger import Ledger
from ..storage.run_files import fetched_for_run
from ..worker.weight_sync import read_committed
from .factories import Factories

logger = logging.getLogger(__name__)

RUN = re.compile("[0-9a-f]{16}")
"""Name of the directory of a run that was joined."""
PORT, LIBP2P_PORT = "port", "libp2p_port"


def open_store(config: NodeConfig, directory: Path) -> FileStore:
    """Open the chunk store of a node, below `directory`."""
    limit = int(config.weights.max_disk_gib * 2**30)
    return FileStore(directory / CHUNKS, max_bytes=limit, fsync=config.fsync)


def drop_other_runs(directory: Path) -> None:
    """Remove what was fetched for other runs than that of `directory`, runs/ID: they can be joined again.

    Their ledgers stay. What cannot be removed is logged.
    """
    for other in directory.parent.iterdir():
        if other == directory or not RUN.fullmatch(other.name) or other.is_symlink():
            continue
        try:
            remove_tree(other, fetched_for_run, keep_root=True)
        except OSError as error:
            logger.warning("files of an earlier run stay in %s: %s", other, error)


@asynccontextmanager
async def open_services(
    config: NodeConfig,
    key: SecretKey,
    ledger: Ledger,
    store: FileStore,
    *,
    run_id: bytes,
    trainer: bytes,
    role: Role,
    bootstrap: tuple[str, ...] = (),
    factories: Factories,
    rates: Rates | None = None,
) -> AsyncGenerator[NodeServices]:
    """Build and start everything over the node's ledger and chunk store, at the rates of its line.

    Raises:
        BusyError: the configured port is taken.
    """
    async with AsyncExitStack() as cleanup:
        ledger.claim(key.node_id)
        tracing = Tracing(run_id, role, key.node_id)
        cleanup.push_async_callback(tracing.close)
        transport = await _start_transport(config, key, ledger, factories)
        cleanup.push_async_callback(transport.close)
        peers = PeerTable()
        trusted = TrustedRun(run_id, trainer, read_committed(ledger))
        hidden = role != "trainer" and not config.network.share_address
        links = ConnectionPool(
            transport,
            peers,
            connect_timeout_s=factories.timeouts.connect_s,
            may_dial=lambda peer: not hidden or peer in trusted.leaders,
        )
        cleanup.push_async_callback(links.close)
        discovery = None
        if not hidden:  # whoever takes part in discovery is connected to other workers
            discovery = await _start_discovery(config, key, ledger, run_id, bootstrap, factories)
        if discovery is not None:
            cleanup.push_async_callback(discovery.close)
        arrivals = ChunkArrivals()
        heads = HeadStore(trusted, ledger)
        rates = rates or Rates(config.limits.upload, config.limits.download)
        blobs = BlobServer(store, arrivals, rates.up)
        network = config.network
        seeds = await cleanup.enter_async_context(open_seeds(network.seeds, pacer=rates.down))
        tcp: tuple[TcpChunks, TcpChunkServer] | None = None
        if discovery is not None:
            paths = TcpChunks(
                discovery, peers, bootstrap=bootstrap, trainer=trainer, pacer=rates.down
            )
            tcp = paths, TcpChunkServer(discovery, peers, blobs.handle)
            await cleanup.enter_async_context(serving(tcp[1]))
        yield NodeServices(
            key=key,
            run_id=run_id,
            role=role,
            config=config,
            ledger=ledger,
            store=store,
            transport=transport,
            peers=peers,
            links=links,
            arrivals=arrivals,
            blobs=blobs,
            fetcher=BlobFetcher(
                links,
                peers,
                store,
                arrivals,
                seeds=seeds,
                paths=tcp[0] if tcp else None,
                pacer=rates.down,
            ),
            heads=heads,
            head_server=HeadServer(heads),
            discovery=discovery,
            holdings=HoldingsAnnouncer(key, run_id),
            fraud=asyncio.Queue(16),
            wire=factories.wire,
            rates=rates,
            tcp=tcp,
            tracing=tracing,
        )


async def _start_transport(
    config: NodeConfig, key: SecretKey, ledger: Ledger, factories: Factories
) -> Transport:
    """Start iroh on the configured port, else on the port of the last start, so that peers find us again."""
    wanted = config.network.port
    remembered = _kept_port(ledger, PORT)
    for port in [wanted] if wanted else [remembered, 0] if remembered else [0]:
        try:
            transport = await factories.transport(config.network, key, port)
        except AddressInUse as error:
            if wanted:
                raise BusyError(str(error)) from error
            logger.warning("port %d of the last start is taken, using another", port)
            continue
        ledger.set(PORT, _port(transport).to_bytes(4, "big"))
        return transport
    raise BusyError("no free UDP port")


def _kept_port(ledger: Ledger, name: str) -> int:
    """Return the port of the last start; 0 without one."""
    port = int.from_bytes(ledger.get(name) or b"", "big")
    return port if port < 2**16 else 0


def _port(transport: Transport) -> int:
    """Return the port of our first address; 0 where addresses have none."""
    last = transport.addresses()[0].rsplit(":", 1)[-1] if transport.addresses() else ""
    return int(last) if last.isdigit() else 0


async def _start_discovery(
    config: NodeConfig,
    key: SecretKey,
    ledger: Ledger,
    run_id: bytes,
    bootstrap: tuple[str, ...],
    factories: Factories,
) -> Discovery | None:
    """Start libp2p, with its TCP port chosen as in _start_transport()."""
    wanted = config.network.port
    remembered = _kept_port(ledger, LIBP2P_PORT)
    for port in [wanted] if wanted else [remembered, 0] if remembered else [0]:
        network = config.network.model_copy(update={"port": port})
        try:
            discovery = await factories.discovery(network, key, run_id, bootstrap)
        except AddressInUse as error:
            if port == remembered and not wanted and port:
                logger.warning("TCP port %d of the last start is taken, using another", port)
                continue
            raise BusyError(str(error)) from error
        if discovery is not None and (bound := _tcp_port(discovery)):
            ledger.set(LIBP2P_PORT, bound.to_bytes(4, "big"))
        return discovery
    raise BusyError("no free TCP port")


def _tcp_port(discovery: Discovery) -> int:
    """Return the port of our first multiaddr; 0 where that has none."""
    _, _, rest = "".join(discovery.addresses()[:1]).partition("/tcp/")
    port = rest.split("/")[0]
    return int(port) if port.isdigit() else 0
