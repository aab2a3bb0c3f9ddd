"""The network parts of a node: what exchanges, rings and liars of the tests are built of."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from support.protocol_cases import RUN, TRAINER

from primerl.crypto.keys import SecretKey
from primerl.node.ops.tracing import Tracing
from primerl.node.p2p.connections import Handler, Router
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.services import NodeServices
from primerl.node.p2p.transport import Transport
from primerl.protocol.trust import TrustedRun
from primerl.protocol.version import SPOKEN


def bare_services(
    key: SecretKey = TRAINER, *, trainer: bytes = TRAINER.node_id, **parts: Any
) -> NodeServices:
    """The services of the node with `key` in the run RUN of `trainer`; parts that are not given are None."""
    trusted = TrustedRun(parts.get("run_id", RUN), trainer)
    known: dict[str, Any] = {
        "key": key,
        "run_id": RUN,
        "heads": SimpleNamespace(trusted=trusted, order=lambda: (0, -1)),
        "keep_chunks": set[bytes](),
        "wire": SPOKEN,
        "tracing": Tracing(),
        "key_refusals": asyncio.Queue[Refused](1),
        "paused": lambda: "",
    }
    values: dict[str, Any] = {one.name: None for one in fields(NodeServices)}
    return NodeServices(**{**values, **known, **parts})


MOST = 64
"""Peers of a bare node, and streams of each of them."""


@asynccontextmanager
async def serving(
    transport: Transport, handlers: Mapping[bytes, Handler], peers: PeerTable | None = None
) -> AsyncGenerator[PeerTable]:
    """Answer requests by ALPN while the block lasts; close the transport at its end."""
    peers = peers or PeerTable()
    router = Router(transport, peers, handlers, max_streams_per_peer=MOST, max_peers=MOST)
    task = asyncio.create_task(router.run())
    try:
        yield peers
    finally:
        task.cancel()
        await asyncio.wait([task])
        await transport.close()
