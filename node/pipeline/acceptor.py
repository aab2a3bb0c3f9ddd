"""Accept pipeline requests from the peers that a plan of the trainer names, each in its role.

A plan counts because the trainer signed it, not because of the peer that shows it, and only the newest
generation of a group counts. A stage opens a link to the one after it and to no other.
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

SMALL = 4
"""Empty probes; the quickest of them is the round trip."""
LARGE = 3
"""Full ones: the first open the congestion window, the quickest is the rate."""
LEAST_S = 1e-4
LANE = 1
AGAIN_S = 0.3
"""Pause before a node that did not answer is asked again."""
RATE = 1.0 * MIB
BURST = 16.0 * MIB
"""Bytes that one peer may have us send."""


@dataclass(frozen=True)
class PathQuality:
    """From here to a node."""

    rtt_ms: float
    bytes_per_s: float
    """The lower of both directions."""


async def probe(links: ConnectionPool, peer: bytes, *, deadline: float) -> PathQuality:
    """Measure the way to `peer`; each message has `deadline` seconds. Raises Refused, TransportError."""
    connection = await links.get(peer, ALPN_PIPELINE, lane=LANE)

    async def took(request: Probe) -> float:
        begin = time.monotonic()
        reply = await ask(connection, request, Probe, deadline=deadline)
        if len(reply.payload) != request.answer:
            raise RemoteProtocolError(Reason.MALFORMED, "a probe was answered by another length")
        return max(LEAST_S, time.monotonic() - begin)

    round_trip = min([await took(Probe()) for _ in range(SMALL)])
    up = min([await took(Probe(bytes(MAX_PROBE))) for _ in range(LARGE)])
    down = min([await took(Probe(answer=MAX_PROBE)) for _ in range(LARGE)])
    slower = max(LEAST_S, max(up, down) - round_trip)
    return PathQuality(round_trip * 1e3, MAX_PROBE / slower)


async def is_reachable(links: ConnectionPool, node: bytes, *, within_s: float) -> bool:
    """Return whether `node` replies in time, also with a refusal; it may need some to change networks."""
    until = time.monotonic() + within_s
    while (left := until - time.monotonic()) > 0:
        try:
            connection = await links.get(node, ALPN_PIPELINE, patience=left, lane=LANE)
            await ask(connection, Probe(), Probe, deadline=max(AGAIN_S, left))
        except TransportError:
            await links.drop(node, ALPN_PIPELINE, lane=LANE)
            await asyncio.sleep(AGAIN_S)
        except (Refused, RemoteProtocolError):
            return True
        else:
            return True
    return False


class ProbeResponder:
    """Answers probes, up to a rate of bytes for each peer."""

    def __init__(self, *, limit: int = 1024) -> None:
        self._buckets = TokenBuckets(RATE, BURST, limit)

    async def answer(self, peer: bytes, stream: Stream, request: Probe) -> None:
        """Send the requested number of bytes. Raises RemoteProtocolError(RATE_LIMITED)."""
        size = len(request.payload) + request.answer
        if self._buckets.debt(peer, time.monotonic(), size) > 0:
            raise RemoteProtocolError(Reason.RATE_LIMITED, "too many probes: measure less often")
        await send(stream, Probe(bytes(request.answer)))
        await stream.finish()


logger = logging.getLogger(__name__)

REQUEST_S = 10.0
"""For a request to come in whole."""
MAX_GROUPS = 256
Prepare = Callable[[PrepareVersion], Awaitable[None]]


@dataclass(frozen=True)
class _Known:
    """The newest plan of a group that we have seen."""

    plan: PipelinePlan
    payload: bytes
    """As it was signed."""


class LinkAcceptor:
    """The handler of ALPN_PIPELINE of one node."""

    def __init__(
        self, node: bytes, run: bytes, trainer: bytes, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.newer: Callable[[bytes], None] | None = None
        """Called with a sealed plan that names us, newer than what we knew of its group."""
        self._node = node
        self._run = run
        self._trainer = trainer
        self._clock = clock
        self._plans: OrderedDict[bytes, _Known] = OrderedDict()
        self._rings: dict[bytes, tuple[Ring, Prepare | None]] = {}
        self._others: frozenset[bytes] = frozenset()
        self._answers = ProbeResponder()

    def admit(self, sealed: bytes) -> PipelinePlan:
        """The plan in `sealed`, if the trainer signed it and it is not older than what we know of its group.

        Raises RemoteProtocolError: what unseal() raises, MALFORMED, ROLLBACK, EQUIVOCATION.
        """
        return self._admit(sealed)[0]

    def _admit(self, sealed: bytes) -> tuple[PipelinePlan, bool]:
        """(plan, whether it was news)."""
        opened = unseal(
            sealed,
            Purpose.PIPELINE,
            PipelinePlan,
            now=int(self._clock()),
            run=self._run,
            signer=self._trainer,
        )
        plan = opened.body
        check_plan(plan)
        known = self._plans.get(plan.group)
        if known is not None and plan.generation < known.plan.generation:
            raise RemoteProtocolError(Reason.ROLLBACK, "there is a newer plan of this pipeline")
        news = known is None or plan.generation > known.plan.generation
        if known is not None and not news and known.payload != opened.payload:
            raise RemoteProtocolError(Reason.EQUIVOCATION, "two plans of one generation")
        self._plans[plan.group] = _Known(plan, opened.payload)
        self._plans.move_to_end(plan.group)
        self._forget_one()
        return plan, news

    def attach(self, ring: Ring, prepare: Prepare | None = None) -> None:
        """Let lines of its plan in; `prepare` serves its stage 0, and refuses by RemoteProtocolError.

        One ring a group: another one takes its place.
        """
        self._rings[ring.plan.group] = (ring, prepare)

    def detach(self, ring: Ring) -> None:
        """It runs no more."""
        if self._rings.get(ring.plan.group, (None,))[0] is ring:
            del self._rings[ring.plan.group]

    def allow(self, others: Iterable[bytes]) -> None:
        """Who may measure the way to us, besides those that are in a plan with us."""
        self._others = frozenset(others)

    async def handle(self, peer: bytes, stream: Stream) -> None:
        """Answer one stream, as a router's handler."""
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
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "that plan opens no line from you to us")
        ring, _ = self._rings.get(plan.group, (None, None))
        if ring is None or ring.plan.generation != plan.generation:
            if news and self.newer is not None:
                self.newer(request.plan)
            raise RemoteProtocolError(Reason.NOT_YET, "we are not ready for that plan yet")
        logger.info("%s opens a line: stage %d to %d", short(peer), rank - 1, rank)
        await ring.accept(stream, request.epoch)

    async def _prepare(self, peer: bytes, stream: Stream, request: PrepareVersion) -> None:
        ring, prepare = self._rings.get(request.group, (None, None))
        if ring is None or ring.plan.stages[0].node != peer or ring.rank == 0:
            raise RemoteProtocolError(Reason.NOT_ADMITTED, "you do not lead a pipeline of ours")
        if ring.plan.generation != request.generation or prepare is None:
            raise RemoteProtocolError(Reason.NOT_YET, "we are not ready for that plan yet")
        await prepare(request)
        await send(stream, Prepared(request.version))
        await stream.finish()

    async def _probe(self, peer: bytes, stream: Stream, request: Probe) -> None:
        if not self._may_probe(peer):
            raise RemoteProtocolError(
                Reason.NOT_ADMITTED, "this node was not asked to measure with you"
            )
        await self._answers.answer(peer, stream, request)

    def _may_probe(self, peer: bytes) -> bool:
        if peer in self._others:
            return True
        plans = (known.plan for known in self._plans.values())
        return any(
            plan.rank_of(self._node) is not None
            and (plan.rank_of(peer) is not None or peer in plan.spares)
            for plan in plans
        )

    def _forget_one(self) -> None:
        """Of too many groups the one that was heard of longest ago, unless it runs."""
        if len(self._plans) > MAX_GROUPS:
            idle = next((group for group in self._plans if group not in self._rings), None)
            if idle is not None:
                del self._plans[idle]
