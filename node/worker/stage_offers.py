"""Worker's side of pipelines: offers its memory repeatedly, and holds its newest plan.

A plan counts only if the trainer signed it for this run, it is valid, this node is in it, and no later plan of
its group was seen.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from ...crypto.hashing import NO_DIGEST, short
from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import OfferStage, StagePlanned, StageWait, SyncRecords
from ...protocol.pipelines import PipelinePlan, StageOffer, check_plan
from ...protocol.recent import RecentDict
from ..config.engine import PIPELINES_NEED_VLLM, EngineConfig, PipelineConfig
from ..errors import NodeError, UsageError
from ..gpus import usable
from ..inference.vllm_arguments import installed_release, resolve_parallel
from ..memory_plan.shape import read_shape
from ..memory_plan.stages import memory_to_offer
from ..models.json_files import read_json
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices
from ..p2p.transport import TransportError
from ..p2p.waiting import LogBackoff
from ..pipeline.acceptor import PathQuality
from .weight_sync import learn_records

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 15.0
RETRY_S = 2.0
"""Pause after a request that failed."""
PROBES = 16
"""Most nodes whose links are measured; the largest plan has as many stages."""
MEASURED_S = 60.0
"""Time for which a measurement counts."""
RECORD_S = 1200.0
"""Interval between renewals of our peer record at the trainer.

The trainer shows that record to the other stages.
"""
KNOWN_GROUPS = 64
FINAL = frozenset({Reason.BANNED, Reason.NOT_FOUND, Reason.NOT_ADMITTED})


Probe = Callable[[bytes], Awaitable[PathQuality]]
"""Function that measures a link. Raises Refused, RemoteProtocolError, TransportError."""


@dataclass(frozen=True)
class AssignedPlan:
    """A plan that includes this node."""

    plan: PipelinePlan
    sealed: bytes
    rank: int

    @property
    def name(self) -> tuple[bytes, int]:
        """(group, generation): two plans with the same name are one plan."""
        return self.plan.group, self.plan.generation


def software(config: EngineConfig) -> str:
    """Name the software of a stage: a pipeline has only stages with equal names.

    Raises UsageError for any engine but vLLM.
    """
    if config.type != "vllm":
        raise UsageError(PIPELINES_NEED_VLLM)
    cuda = config.device != "cpu" and usable()
    return f"vllm {installed_release()}" + ("" if cuda else "+cpu")


def make_offer(
    config: EngineConfig, pp: PipelineConfig, model_dir: Path, fingerprint: str
) -> StageOffer:
    """Compute this machine's offer for the model whose config.json is in `model_dir`.

    Asks NVML. Raises EngineError, UsageError: also if engine.tp does not divide the model,
    which no plan would change.
    """
    model_config = read_json(model_dir / "config.json")
    shape = read_shape(model_config)
    release = software(config)
    config = resolve_parallel(config, model_config)
    return StageOffer(
        memory_bytes=memory_to_offer(config, pp, shape, fingerprint=fingerprint),
        engine="vllm",
        software=release,
        rank=pp.rank,
        world_size=pp.world_size,
        name=pp.name,
        encoding=pp.encoding,
    )


class StageOffers:
    """Repeated offers of this node's memory; as a stage, they show the trainer that it is alive."""

    def __init__(
        self,
        *,
        services: NodeServices,
        offer: StageOffer,
        probe: Probe,
        allow: Callable[[Iterable[bytes]], None] = lambda nodes: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe` measures the link to a node; `allow` is called with nodes that may probe us."""
        self._services = services
        self._node = services.key.node_id
        self._offer = offer
        self._probe = probe
        self._allow = allow
        self._clock = clock
        self._lost: tuple[bytes, ...] = ()
        self._newest = RecentDict[bytes, PipelinePlan](KNOWN_GROUPS)
        self._ways: dict[bytes, tuple[float, PathQuality]] = {}
        self._renewed = clock()
        self._lines = LogBackoff()
        self._poked = asyncio.Event()
        self._changed = asyncio.Condition()
        self.current: AssignedPlan | None = None
        """Current plan; None without one, or if it is void."""
        self.words = "offers its memory"
        """State for the operator."""

    async def run(self) -> None:
        """Offer until cancelled. Raises NodeError if the trainer refuses for good."""
        while True:
            pause = await self._once()
            try:
                async with asyncio.timeout(pause):
                    await self._poked.wait()
            except TimeoutError:
                pass  # no newer plan was announced
            self._poked.clear()

    async def newer(self, than: AssignedPlan | None) -> AssignedPlan | None:
        """Wait until the plan is not `than`, and return the new one.

        None: that plan is void, and the next one has to be waited for.
        """
        name = than and than.name
        async with self._changed:
            while (self.current and self.current.name) == name:
                await self._changed.wait()
            return self.current

    def complain(self, lost: Iterable[bytes]) -> None:
        """Report stages of the current plan that are unreachable or stalled to the trainer at once."""
        if self.current is not None:
            members = {stage.node for stage in self.current.plan.stages} - {self._node}
            self._lost = tuple(sorted(members & set(lost)))
            self._poked.set()

    def hurry(self) -> None:
        """Ask for a newer plan at once."""
        self._poked.set()

    # -- asking ------------------------------------------------------------------------------------

    async def _once(self) -> float:
        """Offer once; return the seconds until the next time."""
        lost, current = self._lost, self.current
        group, generation = current.name if current else (NO_DIGEST, 0)
        message = OfferStage(self._measured(), group, generation, lost)
        try:
            await self._renew()
            reply = await self._services.ask_trainer(
                message,
                StageWait | StagePlanned,  # type: ignore[arg-type]
                deadline=ASK_TIMEOUT_S,
            )
            self._lines.reset()
            if self._lost == lost:
                self._lost = ()
            await self._take(reply)
        except Refused as refusal:
            if refusal.reason in FINAL:
                raise NodeError(f"the trainer puts us into no pipeline: {refusal}") from refusal
            if refusal.reason is Reason.NOT_YET:  # the trainer has forgotten our record
                self._renewed = float("-inf")
            logger.info("our offer of a stage is refused: %s", refusal)
            return RETRY_S
        except (TransportError, RemoteProtocolError) as error:
            if self._lines.due():
                logger.info("no answer to our offer of a stage: %s", error)
            return RETRY_S
        return reply.retry_after_ms / 1000

    async def _renew(self) -> None:
        """Renew our record at the trainer, since records expire and it shows ours to others."""
        if self._clock() - self._renewed < RECORD_S:
            return
        message = SyncRecords((self._services.record(),))
        await self._services.ask_trainer(message, SyncRecords, deadline=ASK_TIMEOUT_S)
        self._renewed = self._clock()

    def _measured(self) -> StageOffer:
        ways = {node: way for node, (_, way) in self._ways.items()}
        return structs.replace(
            self._offer,
            round_trips={node: min(way.rtt_ms, 60_000.0) for node, way in ways.items()},
            bandwidths={node: way.bytes_per_s for node, way in ways.items()},
        )

    async def _take(self, reply: StageWait | StagePlanned) -> None:
        if isinstance(reply, StagePlanned):
            planned = self._open(reply.plan)
            self._learn(reply.records)
            await self._set(planned)
            return
        others = self._learn(reply.others)
        self.words = f"waiting for a pipeline, {len(others)} others offer their memory"
        await self._set(None)
        self._allow(others)
        await self._measure(others[:PROBES])

    def _open(self, sealed: bytes) -> AssignedPlan:
        """Open and check a sealed plan.

        Raises RemoteProtocolError, with ROLLBACK for a plan that was replaced.
        """
        opened = self._services.unseal(sealed, Purpose.PIPELINE, PipelinePlan)
        plan = opened.body
        check_plan(plan)
        rank = plan.rank_of(self._node)
        if rank is None or opened.sequence != plan.generation:
            raise RemoteProtocolError(Reason.WRONG_RECIPIENT, "a plan that we are not in")
        known = self._newest.get(plan.group)
        if known is not None and known.generation >= plan.generation and known != plan:
            raise RemoteProtocolError(
                Reason.ROLLBACK, f"generation {plan.generation}, {known.generation} was known"
            )
        self._newest[plan.group] = plan
        return AssignedPlan(plan, sealed, rank)

    async def _set(self, planned: AssignedPlan | None) -> None:
        before = self.current and self.current.name
        self.current = planned
        if planned is not None:
            stage, count = planned.plan.stages[planned.rank], len(planned.plan.stages)
            self.words = f"stage {planned.rank} of {count}, layers {stage.first}-{stage.end - 1}"
        if before == (planned and planned.name):
            return
        self._lost = ()
        logger.info("pipeline: %s", self.words)
        async with self._changed:
            self._changed.notify_all()

    def _learn(self, records: Sequence[bytes]) -> list[bytes]:
        nodes = learn_records(self._services.peers, self._services.run_id, records)
        return [node for node in nodes if node != self._node]

    async def _measure(self, others: Sequence[bytes]) -> None:
        """Probe the nodes not measured lately; nodes that are not reached stay unmeasured."""
        now = self._clock()
        due = [
            node
            for node in others
            if node not in self._ways or now - self._ways[node][0] > MEASURED_S
        ]
        self._ways = {node: self._ways[node] for node in others if node in self._ways}
        async with asyncio.TaskGroup() as tasks:
            for node in due:
                tasks.create_task(self._measure_one(node))

    async def _measure_one(self, node: bytes) -> None:
        try:
            way = await self._probe(node)
        except (TransportError, Refused, RemoteProtocolError) as error:
            logger.info("the way to %s cannot be measured: %s", short(node), error)
            return
        self._ways[node] = self._clock(), way
