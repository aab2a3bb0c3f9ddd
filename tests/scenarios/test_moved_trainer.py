"""A trainer that comes back elsewhere: its worker reads the ticket again, at the place of the first."""

import asyncio
from pathlib import Path

from support.swarm import Running, Swarm

from primerl.crypto.keys import SecretKey
from primerl.node.app.tickets import TicketPlace
from primerl.node.config.run import NetworkConfig
from primerl.node.errors import TicketError
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.transport import Transport
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL


class IrohSwarm(Swarm):
    """A swarm over QUIC on loopback, each start of a node at a port of its own."""

    async def _transport(
        self, running: Running, network: NetworkConfig, key: SecretKey, port: int
    ) -> Transport:
        del running, network, port
        alpns = (ALPN_CONTROL, ALPN_BLOBS)
        transport = IrohTransport(key, host="127.0.0.1", port=0, alpns=alpns)
        await transport.start()
        return transport


async def test_a_worker_follows_its_trainer_to_the_address_of_a_newer_ticket_at_the_same_place(
    tmp_path: Path, model_dir: Path
) -> None:
    page = tmp_path / "page"
    read: list[str] = []

    def look() -> str:
        read.append(page.read_text())
        if not read[-1]:
            raise TicketError("the page is empty")
        return read[-1]

    async with IrohSwarm(tmp_path, model_dir, max_steps=100_000) as swarm:
        await swarm.start_trainer()
        before = swarm.read_ticket()
        page.write_text(swarm.ticket)
        worker = swarm.add_worker("worker")
        assert worker.node is not None
        worker.node.ticket_place = TicketPlace("the page", look, first_s=0.2, most_s=0.2)
        await swarm.wait_step(1)
        joining = len(read)
        await swarm.wait_step(4)
        assert len(read) == joining, "nothing is read while the trainer is heard"
        page.write_text("")
        await swarm.stop_trainer()
        await swarm.start_trainer(resume=True)
        moved = swarm.read_ticket()
        assert (moved.run, moved.trainer) == (before.run, before.trainer)
        assert set(moved.addresses).isdisjoint(before.addresses)
        async with asyncio.timeout(60):
            while len(read) < joining + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        rows = await swarm.trainer.peers()
        assert [row for row in rows if row["path"] != "-"] == [], "no ticket, no way to the trainer"
        page.write_text(swarm.ticket)
        await swarm.until_row(worker, lambda row: row["path"] == "direct" and row["leases"], 60.0)
