"""Accept pipeline requests from the peers named in a plan that the trainer signed.

A plan is valid because the trainer signed it, whichever peer presents it, and only the newest generation of a
group is accepted. A stage may open a link to the next stage only.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from ...crypto.hashing import short
from ...protocol.envelope import Purpose, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import (
    MAX_PROBE,
    MAX_SEALED,
    OpenLine,
    PipelineRequest,
    Prepared,
    PrepareVersion,
    Probe,
)
from ...protocol.pipelines import PipelinePlan, check_plan
from ...protocol.version import ALPN_PIPELINE, KIB, MIB
from ..p2p.connections import ConnectionPool
from ..p2p.limits import TokenBuckets
from ..p2p.rpc import Refused, ask, receive, send
from ..p2p.transport import Stream, TransportError
from .ring import Ring

EMPTY_PROBES = 4
"""Probes without payload; the fastest gives the round-trip time."""
FULL_PROBES = 3
"""Probes of MAX_PROBE bytes each way: the first ones open the congestion window, the fastest gives the rate."""
MIN_TIME_S = 1e-4
PROBE_LANE = 1
RETRY_S = 0.3
"""Pause before a node that did not answer is probed again."""
PROBE_BYTES_PER_S = 1.0 * MIB
PROBE_BURST_BYTES = 16.0 * MIB
"""Bytes that one peer may send and request in a burst."""
MAX_PROBING_PEERS = 1024
"""Peers whose rate is tracked at a time."""


@dataclass(frozen=True)
class PathQuality:
    """Measured quality of the path from this node to another."""

    rtt_ms: float
    bytes_per_s: float
    """Of the slower direction."""


async def probe(links: ConnectionPool, peer: bytes, *, deadline: float) -> PathQuality:
    """Measure the path to `peer`, `deadline` seconds for each message.

    Raises Refused, TransportError.
    """
    connection = await links.get(peer, ALPN_PIPELINE, lane=PROBE_LANE)

    async def time_probe(request: Probe) -> float:
        begin = time.monotonic()
        reply = await ask(connection, request, Probe, deadline=deadline)
        if len(reply.payload) != request.answer:
            raise RemoteProtocolError(Reason.MALFORMED, "the probe's reply has the wrong length")
        return max(MIN_TIME_S, time.monotonic() - begin)

    round_trip = min([await time_probe(Probe()) for _ in range(EMPTY_PROBES)])
    up = min([await time_probe(Probe(bytes(MAX_PROBE))) for _ in range(FULL_PROBES)])
    down = min([await time_probe(Probe(answer=MAX_PROBE)) for _ in range(FULL_PROBES)])
    slower = max(MIN_TIME_S, max(up, down) - round_trip)
    return PathQuality(round_trip * 1e3, MAX_PROBE / slower)


async def is_reachable(links: ConnectionPool, node: bytes, *, within_s: float) -> bool:
    """Return whether `node` replies in time, also with a refusal; it may take a while to change networks."""
    until = time.monotonic() + within_s
    while (remaining_s := until - time.monotonic()) > 0:
        try:
            connection = await links.get(node, ALPN_PIPELINE, patience=remaining_s, lane=PROBE_LANE)
            await ask(connection, Probe(), Probe, deadline=max(RETRY_S, remaining_s))
        except TransportError:
            await links.drop(node, ALPN_PIPELINE, lane=PROBE_LANE)
            await asyncio.sleep(RETRY_S)
        except (Refused, RemoteProtocolError):
            return True
        else:
            return True
    return False


logger = logging.getLogger(__name__)

REQUEST_S = 10.0
"""Deadline for receiving a complete request."""
MAX_GROUPS = 256
Prepare = Callable[[PrepareVersion], Awaitable[None]]


@dataclass(frozen=True)
class _SeenPlan:
    """The newest plan seen of a group."""

    plan: PipelinePlan
    payload: bytes
    """The exact bytes that were signed."""


class LinkAcceptor:
    """Handles incoming ALPN_PIPELINE streams of this node."""

    def __init__(self, node: bytes, run: bytes, trainer: bytes) -> None:
        self.newer: Callable[[bytes], None] | None = None
        """Called with a sealed plan that includes this node and is newer than the known plan of its group."""
        self._node = node
        self._run = run
        self._trainer = trainer
        self._plans: OrderedDict[bytes, _SeenPlan] = OrderedDict()
        self._rings: dict[bytes, tuple[Ring, Prepare | None]] = {}
        self._probers: frozenset[bytes] = frozenset()
        self._buckets = TokenBuckets(PROBE_BYTES_PER_S, PROBE_BURST_BYTES, MAX_PROBING_PEERS)

    def admit(self, sealed: bytes) -> PipelinePlan:
        """Open a sealed plan.

        Accept it if the trainer signed it and it is no older than the group's known plan. Raises
        RemoteProtocolError: unseal()'s reasons, MALFORMED, ROLLBACK, EQUIVOCATION.
        """
        return self._admit(sealed)[0]

    def _admit(self, sealed: bytes) -> tuple[PipelinePlan, bool]:
        """Return the plan and whether it is new."""
        opened = unseal(
            sealed,
            Purpose.PIPELINE,
            PipelinePlan,
            now=int(time.time()),
            run=self._run,
            signer=self._trainer,
        )
        plan = opened.body
        check_plan(plan)
        known = self._plans.get(plan.group)
        if known is not None and plan.generation < known.plan.generation:
            raise RemoteProtocolError(Reason.ROLLBACK, "this pipeline has a newer plan")
        news = known is None or plan.generation > known.plan.generation
        if known is not None and not news and known.payload != opened.payload:
            raise RemoteProtocolError(
                Reason.EQUIVOCATION, "two different plans of the same generation"
            )
        self._plans[plan.group] = _SeenPlan(plan, opened.payload)
        self._plans.move_to_end(plan.group)
        self._evict_idle_group()
        return plan, news

    def attach(self, ring: Ring, prepare: Prepare | None = None) -> None:
        """Accept links for `ring`, replacing any earlier ring of its group.

        `prepare` serves requests from its stage 0, and refuses by raising RemoteProtocolError.
        """
        self._rings[ring.plan.group] = (ring, prepare)

    def detach(self, ring: Ring) -> None:
        """Stop accepting links for `ring`."""
        if self._rings.get(ring.plan.group, (None,))[0] is ring:
            del self._rings[ring.plan.group]

    def allow(self, others: Iterable[bytes]) -> None:
        """Set the peers that may probe this node, besides the ones that share a plan with it."""
        self._probers = frozenset(others)

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one stream; a handler for the router."""
        limit = (MAX_PROBE if self._may_probe(peer) else MAX_SEALED) + KIB
        async with asyncio.timeout(REQUEST_S):
            request = await receive(stream, PipelineRequest, limit)  # type: ignore[arg-type]
        if isinstance(request, OpenLine):
            await self._open(peer, stream, request)
        elif isinstance(request, PrepareVersion):
            await self._prepare(peer, stream, request)
        else:
            await self._probe(peer, stream, request)

    async def _open(self, peer: bytes, stream: Stream, request: OpenLine) -> None:
        plan, news = self._admit(request.plan)
        rank = plan.rank_of(self._node)
        if rank is None or plan.before(rank) != peer:
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "the plan has no link from you to us")
        ring, _ = self._rings.get(plan.group, (None, None))
        if ring is None or ring.plan.generation != plan.generation:
            if news and self.newer is not None:
                self.newer(request.plan)
            raise RemoteProtocolError(Reason.NOT_YET, "this node is not ready for that plan yet")
        logger.info("%s opened the link from stage %d to %d", short(peer), rank - 1, rank)
        await ring.accept(stream, request.epoch)

    async def _prepare(self, peer: bytes, stream: Stream, request: PrepareVersion) -> None:
        ring, prepare = self._rings.get(request.group, (None, None))
        if ring is None or ring.plan.stages[0].node != peer or ring.rank == 0:
            raise RemoteProtocolError(
                Reason.NOT_ADMITTED, "you are not stage 0 of a pipeline that we run"
            )
        if ring.plan.generation != request.generation or prepare is None:
            raise RemoteProtocolError(Reason.NOT_YET, "this node is not ready for that plan yet")
        await prepare(request)
        await send(stream, Prepared(request.version))
        await stream.finish()

    async def _probe(self, peer: bytes, stream: Stream, request: Probe) -> None:
        if not self._may_probe(peer):
            raise RemoteProtocolError(
                Reason.NOT_ADMITTED, "this node does not accept your probes: no plan includes both"
            )
        size = len(request.payload) + request.answer
        if self._buckets.debt(peer, time.monotonic(), size) > 0:
            raise RemoteProtocolError(Reason.RATE_LIMITED, "too many probes: probe less often")
        await send(stream, Probe(bytes(request.answer)))
        await stream.finish()

    def _may_probe(self, peer: bytes) -> bool:
        if peer in self._probers:
            return True
        plans = (known.plan for known in self._plans.values())
        return any(
            plan.rank_of(self._node) is not None
            and (plan.rank_of(peer) is not None or peer in plan.spares)
            for plan in plans
        )

    def _evict_idle_group(self) -> None:
        """Above MAX_GROUPS, drop the least recently seen group that has no ring."""
        if len(self._plans) > MAX_GROUPS:
            idle = next((group for group in self._plans if group not in self._rings), None)
            if idle is not None:
                del self._plans[idle]
