"""Workers that the trainer never names to each other, find each other by what they gossip of their holdings."""

import asyncio
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec
from support.hostile import HostileTrainer, policy
from support.memory_network import MemoryDiscovery
from support.swarm import Running, Swarm
from support.waiting import until

from primerl.crypto.keys import SecretKey
from primerl.node.errors import NetworkError
from primerl.node.weights.replica import prove
from primerl.protocol import tickets
from primerl.protocol.envelope import Envelope, Purpose, seal, unseal
from primerl.protocol.manifests import Holding, PeerRecord

HUB = SecretKey.from_seed(b"h" * 32)
LIAR = SecretKey.from_seed(b"l" * 32)


class Hub:
    """Where the workers' gossip meets; the trainer takes no part, and names no upstream peers."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._discovery = swarm.network.discovery(HUB.node_id)

    async def __aenter__(self) -> MemoryDiscovery:
        swarm = self._swarm
        ticket = msgspec.structs.replace(swarm.read_ticket(), discovery=self._discovery.addresses())
        swarm.ticket = tickets.issue(swarm.trainer.key, ticket)
        await self._discovery.start([])
        return self._discovery

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._discovery.close()


async def heard(hub: MemoryDiscovery, node: bytes, complete: bool) -> list[Holding]:
    """What was told of `node`, up to the first holding that is `complete` (or not)."""
    told: list[Holding] = []
    async for fact in hub.facts():
        envelope = msgspec.msgpack.decode(fact.sealed, type=Envelope)
        if envelope.purpose == Purpose.HOLDING and envelope.signer == node:
            told.append(unseal(fact.sealed, Purpose.HOLDING, Holding, now=0).body)
            if told[-1].complete == complete:
                break
    return told


def loaded(swarm: Swarm, name: str, version: int = 0) -> bool:
    """Whether the engine of that worker was given the version."""
    return any(event.version == version for event in swarm.fakes.loads(name))


async def joined(worker: Running) -> None:
    """Wait until it has all but weights."""
    async with asyncio.timeout(60.0):
        while True:
            with suppress(NetworkError):
                if (await worker.status())["phase"] == "catching up":
                    return
            await asyncio.sleep(0.02)


async def shown(worker: Running, node: bytes) -> None:
    """Wait until a worker has heard of a node."""
    async with asyncio.timeout(60.0):
        while True:
            if node.hex() in {row["id"] for row in await worker.peers()}:
                return
            await asyncio.sleep(0.01)


async def test_a_worker_fetches_from_a_holder_that_the_trainer_never_named(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        Swarm(tmp_path, model_dir, gossip=True) as swarm,
        HostileTrainer(swarm) as trainer,
        Hub(swarm) as hub,
    ):
        files = trainer.store.names()
        seeker = swarm.add_worker("seeker")
        await joined(seeker)
        holder = swarm.add_worker("holder")
        await joined(holder)
        swarm.network.partition(seeker.node_id, trainer.key.node_id)
        await trainer.publish(0, policy(0))
        told = await heard(hub, holder.node_id, complete=True)
        assert [(one.version, one.complete) for one in told] == [(0, False), (0, True)]
        await until(lambda: loaded(swarm, "holder"))
        # From here on the trainer tells of the version but cannot give it.
        trainer.store.collect(files)
        swarm.network.heal(seeker.node_id, trainer.key.node_id)
        await until(lambda: loaded(swarm, "seeker"))
        sources = (await seeker.status())["chunk_bytes_by_source"]
        assert sources[holder.node_id.hex()[:10]] > 0
    states = {event.state for event in swarm.fakes.loads("seeker")}
    assert states == {prove(0, policy(0)).digest}


async def test_a_liar_that_gossips_that_it_holds_everything_costs_a_worker_nothing(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        Swarm(tmp_path, model_dir, gossip=True) as swarm,
        HostileTrainer(swarm) as trainer,
        Hub(swarm) as hub,
    ):
        worker = swarm.add_worker("w1")
        await joined(worker)
        record = PeerRecord(LIAR.node_id, "inference", "0", ("nowhere:1",), (), True)
        everything = Holding(LIAR.node_id, 0, 2**53, True)
        soon = int(time.time()) + 600
        await hub.publish(seal(LIAR, Purpose.PEER, trainer.run, record, expires=soon))
        await hub.publish(seal(LIAR, Purpose.HOLDING, trainer.run, everything, expires=soon))
        await shown(worker, LIAR.node_id)
        for version in range(3):
            await trainer.publish(version, policy(version))
            await until(partial(loaded, swarm, "w1", version))
        assert set((await worker.status())["chunk_bytes_by_source"]) == {"trainer"}
