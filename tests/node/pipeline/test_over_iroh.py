"""A ring over QUIC on the loopback interface, and probes of it."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support.ring_cases import Chain, soon

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.transport import Transport
from primerl.node.pipeline.acceptor import probe
from primerl.protocol.version import ALPN_PIPELINE

pytestmark = pytest.mark.net


async def make(key: SecretKey) -> Transport:
    transport = IrohTransport(key, host="127.0.0.1", port=0, alpns=(ALPN_PIPELINE,))
    await transport.start()
    return transport


@pytest.fixture
async def made() -> AsyncIterator[Chain]:
    with tempfile.TemporaryDirectory() as directory:
        chain = Chain(Path(directory), 3, make)
        await chain.start()
        yield chain
        await chain.close()


async def test_micro_batches_go_round_and_a_lost_connection_is_mended(made: Chain) -> None:
    epoch = await made.begin()
    assert np.all((await made.trip(epoch, 1)).tensors[0] == 3)
    assert made.rings[0].stats().rtt_ms is not None
    node = made.nodes[1]
    await node.links.drop(made.keys[2].node_id, ALPN_PIPELINE)
    assert (await soon(made.rings[0].wait_failed())).rank in (1, 2)
    again = await made.begin()
    assert again > epoch
    assert (await soon(made.trip(again, 2))).number == 2


async def test_a_probe_measures_the_way(made: Chain) -> None:
    await made.begin()  # every stage knows the others
    way = await soon(probe(made.nodes[0].links, made.keys[2].node_id, deadline=60.0))
    assert 0.0 < way.rtt_ms < 2000.0
    assert way.bytes_per_s > 1e5


async def test_a_node_that_starts_again_elsewhere_is_found_again(made: Chain) -> None:
    epoch = await made.begin()
    await made.nodes[2].transport.close()
    assert (await soon(made.rings[0].wait_failed())).rank in (1, 2)
    made.nodes[2] = await made.node(made.keys[2])
    made.acquaint()
    made.rings[2] = await made.ring(2, made.nodes[2])
    again = await made.begin()
    assert again > epoch
    assert (await soon(made.trip(again, 1))).number == 1
