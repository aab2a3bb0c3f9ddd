"""How a node leaves its run."""

import asyncio

import pytest
from support.bare_node import bare_services
from support.memory_network import MemoryNetwork
from support.protocol_cases import TRAINER, WORKER

from primerl.node.p2p import services as services_module
from primerl.node.p2p.connections import ConnectionPool
from primerl.node.p2p.peers import PeerTable

CONNECT_S = 60.0


async def test_a_node_whose_trainer_is_gone_does_not_wait_for_a_connection_to_say_goodbye(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services_module, "GOODBYE_S", 0.1)
    network = MemoryNetwork()
    trainer, worker = network.transport(TRAINER.node_id), network.transport(WORKER.node_id)
    network.stall(TRAINER.node_id, WORKER.node_id)
    peers = PeerTable()
    peers.hint(TRAINER.node_id, trainer.addresses())
    links = ConnectionPool(worker, peers, connect_timeout_s=CONNECT_S)
    async with asyncio.timeout(CONNECT_S / 2):
        await bare_services(WORKER, links=links).say_goodbye()
    await links.close()
    await worker.close()
    await trainer.close()
