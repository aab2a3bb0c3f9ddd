"""A worker's part in pipelines: offers, takes the stage that a plan gives it, moves when a newer one says so.

A stage is built here; stage 0 is an inference worker like any other, with a longer engine.
"""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...crypto.hashing import short
from ...protocol.pipelines import PipelinePlan, PipelineShape
from ..config.engine import EngineConfig
from ..config.run import JoinConfig
from ..inference.place import StagePlace, share_of
from ..ops.figures import StageRow
from ..pipeline.acceptor import LinkAcceptor, is_reachable, probe
from ..pipeline.frames import FrameLimits
from ..pipeline.hosted_stage import HeadEngine
from ..pipeline.links import LocalLink
from ..pipeline.ring import Ring
from ..pipeline.trails import SignedTrails
from ..worker.pipelined_engine import Order, PipelinedEngine
from ..worker.stage import RingSupervisor, StageRole
from ..worker.stage_offers import AssignedPlan, StageOffers, make_offer
from .factories import Factories
from .peer_node import JoinedRun

if TYPE_CHECKING:
    from .worker import WorkerNode

T = TypeVar("T")

SOCKET_NAME = "stage.sock"
PROBE_S = 10.0
LOOK_S = 1.0
WAITING = "waiting for a pipeline"


class StageSupervisor:
    """Supervise a worker's stages in pipelines, from plan to plan."""

    def __init__(
        self,
        config: JoinConfig,
        data_dir: Path,
        factories: Factories,
        joined: JoinedRun,
        acceptor: LinkAcceptor,
        worker: "WorkerNode",
    ) -> None:
        self._config = config
        self._key = joined.services.key
        self._socket = data_dir / SOCKET_NAME
        self._factories = factories
        self._joined = joined
        self._acceptor = acceptor
        self._worker = worker
        self._offers: StageOffers | None = None
        self._chain: RingSupervisor | None = None
        self._head: HeadEngine | None = None

    async def run(self) -> None:
        """Take part until the run ends. Raises NodeError."""
        offers = self._offers = await self._make_offers()
        self._acceptor.newer = lambda sealed: offers.hurry()
        async with asyncio.TaskGroup() as tasks:
            offering = tasks.create_task(offers.run())
            try:
                await self._take_stages(offers)
            finally:
                offering.cancel()
                if not self._joined.services.heads.ended:
                    await self._joined.services.say_goodbye()

    def row(self) -> StageRow | None:
        """Return the status row of this node's stage; None while it has none."""
        if self._chain is None:
            return None
        return stage_row(self._chain.plan, self._chain.planned.rank, self._chain.ring, self._head)

    @property
    def leads(self) -> bool:
        """Whether this node is stage 0, which takes leases."""
        return self._chain is not None and self._chain.planned.rank == 0

    @property
    def waits_for(self) -> str:
        """Description of what this node waits for; empty while its stage works."""
        row = self.row()
        if row is None:
            return self._offers.words if self._offers else ""
        return "" if row.state == "healthy" else f"stage {row.rank} of {row.stages}: {row.state}"

    # -- offers and plans ----------------------------------------------------------------------------

    async def _make_offers(self) -> StageOffers:
        config, services, documents = self._config, self._joined.services, self._joined.documents
        fingerprint = documents.manifest.proofs.fingerprint
        offer = await asyncio.to_thread(
            make_offer, config.engine, config.pp, self._joined.model_dir, fingerprint
        )
        return StageOffers(
            services=services,
            offer=offer,
            probe=lambda peer: probe(services.links, peer, deadline=PROBE_S),
            allow=self._acceptor.allow,
        )

    async def _take_stages(self, offers: StageOffers) -> None:
        planned = None
        while not self._joined.services.heads.ended:
            if planned is None:
                self._worker.enter(WAITING)
                planned = await self._unless_ended(offers.newer(None))
            else:
                planned = await self._hold_stage(offers, planned)

    async def _unless_ended(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `waiting`; None once the run has ended."""
        book = self._joined.services.heads
        work = asyncio.ensure_future(waiting)
        try:
            while not work.done() and not book.ended:
                await asyncio.wait({work}, timeout=LOOK_S)
            return work.result() if work.done() else None
        finally:
            work.cancel()

    async def _hold_stage(self, offers: StageOffers, planned: AssignedPlan) -> AssignedPlan | None:
        """Hold a stage; return the plan that moves it, None for no plan or the end of the run."""
        place = StagePlace(planned.plan, planned.rank, str(self._socket))
        moved: asyncio.Task[AssignedPlan | None]
        async with LocalLink(self._socket, FrameLimits.of(place.shape)) as local:
            chain = self._chain = self._make_chain(planned, local)
            self._worker.enter("running")
            try:
                async with asyncio.TaskGroup() as tasks:
                    keeping = tasks.create_task(chain.run())
                    work = tasks.create_task(self._work(place, chain))
                    moved = tasks.create_task(_moved(offers, chain))
                    await asyncio.wait({work, moved}, return_when=asyncio.FIRST_COMPLETED)
                    for task in (keeping, work, moved):
                        task.cancel()
            finally:
                self._chain = self._head = None
        return None if moved.cancelled() else moved.result()

    def _make_chain(self, planned: AssignedPlan, local: LocalLink) -> RingSupervisor:
        services, stall_s = self._joined.services, self._factories.timeouts.stall_s
        key, run_id = self._key, self._joined.documents.run_id
        assert self._offers is not None  # run() makes them first

        def make(planned: AssignedPlan) -> Ring:
            return Ring(
                planned.sealed,
                planned.plan,
                planned.rank,
                links=services.links,
                local=local,
                stall_s=stall_s,
                trails=SignedTrails(key, run_id, planned.plan, planned.rank),
            )

        async def reachable(node: bytes) -> bool:
            return await is_reachable(services.links, node, within_s=stall_s / 2)

        offers = self._offers
        return RingSupervisor(
            planned,
            make,
            self._acceptor,
            offers.complain,
            reachable,
            lambda: offers.current,
            stall_s=stall_s,
        )

    # -- the stages ------------------------------------------------------------------------------------

    async def _work(self, place: StagePlace, chain: RingSupervisor) -> None:
        config = engine_config(self._config.engine, place.shape)
        if place.first:
            await self._lead(place, chain, config)
        else:
            await self._follow(place, chain, config)

    async def _lead(self, place: StagePlace, chain: RingSupervisor, config: EngineConfig) -> None:
        """Stage 0: an inference worker."""
        head = self._head = self._factories.pipeline_head(config, place)

        def order_of(version: int) -> Order | None:
            order = self._worker.writing
            return order if order and order[1] == version else None

        engine = PipelinedEngine(head, chain, order_of, lambda: chain.planned.sealed)
        async with asyncio.TaskGroup() as tasks:
            supervising = tasks.create_task(engine.run())
            await self._worker.infer(self._joined, engine, config, share_of(place.plan, 0))
            supervising.cancel()

    async def _follow(self, place: StagePlace, chain: RingSupervisor, config: EngineConfig) -> None:
        """Run a later stage: it takes no leases and computes its layers."""
        run, services = self._joined.documents.manifest, self._joined.services
        engine = self._factories.pipeline_stage(config, place)
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(chain.watch())
                await engine.start(self._joined.model_dir, fingerprint=run.proofs.fingerprint)
                weight_sync = self._worker.stage_weights(
                    self._joined, engine, share_of(place.plan, place.rank)
                )
                role = StageRole(
                    run=run, book=services.heads, weight_sync=weight_sync, engine=engine
                )
                chain.prepare_own = role.prepare
                await role.run()
                watching.cancel()
        finally:
            await engine.close()


async def _moved(offers: StageOffers, chain: RingSupervisor) -> AssignedPlan | None:
    """Follow the plans for as long as they leave this stage as it is; the first that does not."""
    while True:
        planned = await offers.newer(chain.planned)
        if planned is None or not same_stage(chain.planned, planned):
            return planned
        chain.use(planned)


def same_stage(old: AssignedPlan, new: AssignedPlan) -> bool:
    """Return whether our stage of `old` stays the same in `new`, so that its engine can go on."""
    cuts = [[(stage.first, stage.end) for stage in assigned.plan.stages] for assigned in (old, new)]
    return (
        old.rank == new.rank
        and old.plan.group == new.plan.group
        and old.plan.shape == new.plan.shape
        and cuts[0] == cuts[1]
    )


def engine_config(config: EngineConfig, shape: PipelineShape) -> EngineConfig:
    """Overlay this node's engine config with the settings that all stages share."""
    agreed = {
        "max_batch": shape.max_sequences,
        "max_model_len": shape.max_model_len,
        "dtype": shape.dtype,
    }
    return config.model_copy(update=agreed)


def stage_row(
    plan: PipelinePlan, rank: int, ring: Ring | None, head: HeadEngine | None
) -> StageRow:
    """Make the status row of a worker's own stage; `head` where it is stage 0."""
    stage = plan.stages[rank]
    row = StageRow(
        group=short(plan.group),
        generation=plan.generation,
        rank=rank,
        stages=len(plan.stages),
        layers=f"{stage.first}-{stage.end - 1}",
        state="starting",
    )
    if ring is None:
        return row
    stats, fault = ring.stats(), ring.fault
    row.state = "healthy" if stats.healthy else fault.reason if fault else "starting"
    row.epoch, row.breaks = stats.epoch, stats.breaks
    row.bytes_out, row.bytes_in = stats.bytes_out, stats.bytes_in
    row.rtt_ms, row.round_ms = stats.rtt_ms, stats.round_ms
    row.stall_share = stats.stall_share if rank else None
    if head is not None:
        lanes = head.lanes()
        row.lanes, row.in_flight, row.stall_share = lanes.lanes, lanes.in_flight, lanes.stall_share
    return row
