"""A worker that offers to be a stage: what it asks, what it believes, and what it tells others."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.bare_node import bare_services
from support.memory_network import MemoryNetwork
from support.offer_cases import NOW, RUN, TRAINER, OfferNetwork, key, node, offer, record
from support.waiting import until

from primerl.crypto.keys import SecretKey
from primerl.node.config.engine import EngineConfig, PipelineConfig
from primerl.node.config.run import NodeConfig
from primerl.node.errors import NodeError, UsageError
from primerl.node.models import huggingface
from primerl.node.p2p.connections import ConnectionPool, Router
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.transport import Stream, Unreachable
from primerl.node.worker.stage_offers import RECORD_S, AssignedPlan, StageOffers, make_offer
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import PeerRecord
from primerl.protocol.messages import ControlRequest, OfferStage, StagePlanned, SyncRecords
from primerl.protocol.pipelines import PipelinePlan
from primerl.protocol.version import ALPN_CONTROL


@dataclass(frozen=True)
class Measured:
    rtt_ms: float = 7.0
    bytes_per_s: float = 1e6


CONFIG = NodeConfig.model_validate({"network": {"advertise": ["10.0.0.1:1"]}})


@dataclass
class Net:
    """A pipeline coordinator behind a memory transport, and workers that offer to it."""

    world: OfferNetwork
    network: MemoryNetwork
    forge: Callable[[bytes, StagePlanned], StagePlanned] | None = None
    heard: list[OfferStage] = field(default_factory=list[OfferStage])
    renewed: list[bytes] = field(default_factory=list[bytes])
    probed: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    now: float = 0.0

    async def answer(self, peer: bytes, stream: Stream) -> None:
        request: ControlRequest = await receive(stream, ControlRequest)  # type: ignore[arg-type]
        if isinstance(request, SyncRecords):
            self.renewed.extend(request.records)
            await send(stream, SyncRecords(()))
        else:
            assert isinstance(request, OfferStage)
            self.heard.append(request)
            reply = self.world.coordinator.offered(peer, request)
            if self.forge is not None and isinstance(reply, StagePlanned):
                reply = self.forge(peer, reply)
            await send(stream, reply)
        await stream.finish()

    def offers(self, number: int, **more: Any) -> StageOffers:
        """A worker's offers; a probe of node 9 gets no answer."""
        self.world.know(number)
        peers = PeerTable()
        peers.hint(TRAINER.node_id, self.trainer.addresses())
        links = ConnectionPool(self.network.transport(node(number)), peers, connect_timeout_s=2.0)

        async def probe(other: bytes) -> Measured:
            if other == node(9):
                raise Unreachable("nobody there")
            self.probed.append((number, other))
            return Measured()

        fields: dict[str, Any] = {"offer": offer(), "probe": probe, **more}
        return StageOffers(
            services=bare_services(
                key(number),
                run_id=RUN,
                trainer=TRAINER.node_id,
                role="inference",
                config=CONFIG,
                links=links,
                peers=peers,
            ),
            clock=lambda: self.now,
            **fields,
        )

    def __post_init__(self) -> None:
        self.trainer = self.network.transport(TRAINER.node_id)
        self.router = Router(
            self.trainer,
            self.world.peers,
            {ALPN_CONTROL: self.answer},
            max_streams_per_peer=8,
            max_peers=16,
        )


@asynccontextmanager
async def net(directory: Path) -> AsyncGenerator[Net]:
    found = Net(OfferNetwork(directory), MemoryNetwork())
    running = asyncio.create_task(found.router.run())
    try:
        yield found
    finally:
        for transport in list(found.network.transports.values()):
            await transport.close()
        await asyncio.wait_for(running, 60.0)
        found.world.ledger.close()


@asynccontextmanager
async def offering(*some: StageOffers) -> AsyncGenerator[None]:
    """These workers offer as long as the context lasts."""
    async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one.run()) for one in some]
        yield
        for task in running:
            task.cancel()


def placed(rank: int) -> dict[str, Any]:
    return {"offer": offer(rank=rank, world_size=2)}


async def planned(one: StageOffers, than: AssignedPlan | None = None) -> AssignedPlan:
    found = await one.newer(than)
    assert found is not None
    return found


async def test_two_workers_hear_of_the_plan_that_they_are_in(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        first, second = world.offers(1, **placed(0)), world.offers(2, **placed(1))
        async with offering(first, second):
            one = await planned(first)
            second.hurry()
            other = await planned(second)
            assert one.plan == other.plan
            assert (one.rank, other.rank) == (0, 1)
            assert first.words == "stage 0 of 2, layers 0-3"
            assert first.current == one


async def test_others_are_measured_before_there_is_a_plan(tmp_path: Path) -> None:
    allowed: list[bytes] = []
    async with net(tmp_path) as world:
        one = world.offers(1, allow=allowed.extend)
        for number in (2, 9):
            world.world.offer(number)
        async with offering(one):
            while len(world.heard) < 3:
                one.hurry()
                await asyncio.sleep(0.01)
            assert {*allowed} == {node(2), node(9)}
            assert world.probed == [(1, node(2))]  # once; number 9 is asked again
            said = world.heard[-1].offer
            assert said.round_trips == {node(2): 7.0}
            assert said.bandwidths == {node(2): 1e6}
            assert "2 others" in one.words


async def test_a_complaint_is_told_at_once_and_once(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        first, second = world.offers(1, **placed(0)), world.offers(2, **placed(1))
        async with offering(first, second):
            before = await planned(first)
            first.complain([node(2), node(7), node(1)])
            after = await planned(first, before)
            assert after.name == (before.plan.group, 1)
            first.hurry()
            told = [one for one in world.heard if one.lost]
            assert [(one.lost, one.generation) for one in told] == [((node(2),), 0)]


async def test_a_plan_that_is_void_is_waited_out(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        first = world.offers(1, **placed(0))
        world.world.offer(2, rank=1, world_size=2)
        async with offering(first):
            before = await planned(first)
            world.world.coordinator.dissolve(before.plan.group, node(2), "false work")
            first.hurry()
            assert await first.newer(before) is None
            assert first.current is None
            world.world.offer(3, rank=1, world_size=2)
            first.hurry()
            after = await planned(first)
            assert after.name == (before.plan.group, 1)
            assert after.plan.stages[1].node == node(3)


async def test_a_node_that_is_sent_away_learns_why(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        world.world.refused[node(1)] = "false work"
        with pytest.raises(NodeError, match="false work"):
            await asyncio.wait_for(world.offers(1).run(), 60.0)


async def test_our_record_is_renewed_before_it_runs_out(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        one = world.offers(1)
        async with offering(one):
            await until(lambda: bool(world.heard))
            assert world.renewed == []
            world.now += RECORD_S + 1
            one.hurry()
            await until(lambda: bool(world.renewed))
            (renewed,) = world.renewed
            opened = unseal(
                renewed, Purpose.PEER, PeerRecord, now=int(time.time()), run=RUN, signer=node(1)
            )
            assert opened.body.addresses == ("10.0.0.1:1",)


# -- what is not believed --------------------------------------------------------------------------


def sealed(plan: PipelinePlan, secret: SecretKey = TRAINER, **more: Any) -> bytes:
    fields: dict[str, Any] = {"expires": NOW + 3600, "sequence": plan.generation, **more}
    return seal(
        secret, fields.pop("purpose", Purpose.PIPELINE), fields.pop("run", RUN), plan, **fields
    )


async def first_plan(world: Net) -> tuple[StageOffers, AssignedPlan]:
    """A worker that is stage 0 and whose trainer may lie from now on."""
    one = world.offers(1, **placed(0))
    world.world.offer(2, rank=1, world_size=2)
    await one._once()  # pyright: ignore[reportPrivateUsage]
    assert one.current is not None
    return one, one.current


async def believes(world: Net, one: StageOffers, data: bytes) -> AssignedPlan | None:
    """What it holds for true after the trainer said this."""
    world.world.later(5.0)
    world.world.offer(2, rank=1, world_size=2)
    world.forge = lambda peer, reply: structs.replace(reply, plan=data)
    await one._once()  # pyright: ignore[reportPrivateUsage]
    return one.current


async def test_only_a_plan_of_the_trainer_for_this_run_counts(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        one, now = await first_plan(world)
        newer = structs.replace(now.plan, generation=5)
        alien = structs.replace(now.plan.stages[0], node=node(4))
        broken = (newer.stages[0], structs.replace(newer.stages[1], first=0))
        for forged in (
            sealed(newer, key(3)),
            sealed(newer, run=b"x" * 32),
            sealed(newer, purpose=Purpose.LEASE),
            sealed(newer, expires=1000),
            sealed(newer, sequence=4),
            sealed(structs.replace(newer, stages=(alien, newer.stages[1]))),
            sealed(structs.replace(newer, stages=broken)),
            sealed(newer)[:-1] + bytes([sealed(newer)[-1] ^ 1]),
            b"garbage",
        ):
            assert await believes(world, one, forged) == now
        found = await believes(world, one, sealed(newer))
        assert found is not None
        assert found.plan == newer


async def test_a_group_never_goes_back(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        one, first = await first_plan(world)
        newer = structs.replace(first.plan, generation=5)
        await believes(world, one, sealed(newer))
        for old in (first.plan, structs.replace(first.plan, generation=4)):
            found = await believes(world, one, sealed(old))
            assert found is not None
            assert found.plan == newer
        twisted = structs.replace(newer, spares=(node(6),))
        found = await believes(world, one, sealed(twisted))
        assert found is not None
        assert found.plan == newer


async def test_records_that_their_nodes_did_not_sign_are_not_learnt(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        other = world.world.peers.get(node(2))
        one = world.offers(1)
        world.world.offer(2)
        other.sealed = record(key(2), run=b"x" * 32)
        await one._once()  # pyright: ignore[reportPrivateUsage]
        assert world.probed == []
        assert "0 others" in one.words


async def test_a_refusal_for_now_is_no_end(tmp_path: Path) -> None:
    async with net(tmp_path) as world:
        one = world.offers(1)

        def busy(peer: bytes, request: OfferStage) -> StagePlanned:
            raise RemoteProtocolError(Reason.BUSY, "too many")

        world.world.coordinator.offered = busy  # type: ignore[method-assign]
        assert await one._once() > 0  # pyright: ignore[reportPrivateUsage]


def test_gpus_that_cannot_share_the_layers_are_not_offered(tmp_path: Path) -> None:
    """Before there is a plan: one that names this node would fail at every start."""
    huggingface.create(tmp_path, {}, 0)
    pp = PipelineConfig(memory_gib=1.0)
    found = make_offer(EngineConfig(type="vllm", tp=2, device="cpu"), pp, tmp_path, "projection")
    assert found.memory_bytes == 1 << 30
    with pytest.raises(UsageError, match=r"engine\.tp is 3, which does not divide the model"):
        make_offer(EngineConfig(type="vllm", tp=3, device="cpu"), pp, tmp_path, "projection")
