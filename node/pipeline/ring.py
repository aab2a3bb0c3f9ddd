"""Relay frames between the neighbouring stages and our own engine; track the ring's health.

- Frames are relayed in order. Those of an older epoch, or of an epoch that failed here, are dropped.
- The stage that detects a failure sends a FAULT forward until it reaches stage 0, which alone begins a new
  epoch.
- A neighbour's frames can affect this ring only.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import Accepted, Prepared, PrepareVersion
from ...protocol.pipelines import PipelinePlan
from ...protocol.version import ALPN_PIPELINE
from ..p2p.connections import ConnectionPool
from ..p2p.rpc import ask, send
from ..p2p.transport import Stream, TransportError
from ..p2p.waiting import Notifier
from .frames import Frame, Head, Kind, Packet, fault_frame, packet, words_of
from .links import InboundLink, LocalLink, OutboundLink
from .trails import BadTrail, SignedTrails


@dataclass(frozen=True)
class RingFault:
    """Why a ring is not healthy."""

    rank: int | None
    """The stage that was lost or failed; None if unknown."""
    reason: str


@dataclass(frozen=True)
class RingStats:
    """Figures for status rows; bytes count all links of this ring so far."""

    epoch: int
    healthy: bool
    bytes_out: int
    bytes_in: int
    rtt_ms: float | None
    """Round trip to the next stage."""
    round_ms: float | None
    """Time of a ping around the ring, queues included; measured by stage 0 only."""
    busy_s: float
    idle_s: float
    """Busy and idle time of our engine within ring epochs; not measured on stage 0."""
    stall_share: float
    breaks: int
    waiting: int
    """Frames queued for the next stage."""


PING_S = 2.0
FAILED_PING_S = 0.2
"""Ping interval while the ring is not healthy."""
MAX_PINGS = 256
"""Most pings in flight; older ones are given up."""
EMA = 0.3


class RingPings:
    """Numbers the pings of stage 0 and measures their round trips; they return in order."""

    def __init__(self) -> None:
        self.round_ms: float | None = None
        """Round-trip time, as an exponential moving average."""
        self._number = 0
        self._first = 1
        """The first ping sent after the last failure; earlier ones do not count."""
        self._out: dict[int, float] = {}
        self._last = -PING_S
        self._active = 0.0

    def next(self, now: float, *, healthy: bool) -> int | None:
        """Return the number of the ping that is due; None if none is."""
        due = self._last + (PING_S if healthy else FAILED_PING_S)
        return self._number + 1 if now >= due else None

    def record_send(self, number: int, now: float) -> None:
        """Record that ping `number` was sent."""
        self._number = number
        self._last = now
        self._out[number] = now
        if len(self._out) > MAX_PINGS:
            del self._out[next(iter(self._out))]

    def record_activity(self, now: float) -> None:
        """Record that any frame arrived from the previous stage."""
        self._active = now

    def record_return(self, number: int, now: float) -> bool:
        """Record that a ping returned; true if it was sent since the last reset()."""
        since = self._out.pop(number, None)
        if since is None or number < self._first:
            return False
        self._out = {ping: at for ping, at in self._out.items() if ping > number}
        took = (now - since) * 1e3
        self.round_ms = took if self.round_ms is None else (1 - EMA) * self.round_ms + EMA * took
        return True

    def silent_s(self, now: float) -> float:
        """Return the seconds without activity while pings are in flight; else 0."""
        return now - max(self._active, min(self._out.values())) if self._out else 0.0

    def reset(self) -> None:
        """Discard the pings in flight, after a failure."""
        self._out.clear()
        self._first = self._number + 1


class ProcessMonitor:
    """Measures an engine's process: busy and idle time, and how long it has been silent."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Time with at least one micro-batch."""
        self.idle_s = 0.0
        """Time between two micro-batches of one ring epoch."""
        self._waiting: deque[tuple[bool, int, int, float]] = deque()
        """Frames without an answer yet: (is a micro-batch, epoch, number, time passed to the engine)."""
        self._active = 0.0
        self._steps = 0
        self._since: float | None = None
        """Start of the current busy or idle period; None outside ring epochs."""

    @property
    def stall_share(self) -> float:
        """Idle share of the time, 0 to 1."""
        total = self.busy_s + self.idle_s
        return self.idle_s / total if total else 0.0

    def record_input(self, head: Head, now: float) -> None:
        """Record that a frame was passed to the engine."""
        step = head.kind is Kind.STEP
        if step:
            self._advance(now)
            self._steps += 1
        elif head.kind is Kind.RESET:
            self._advance(None)
        self._waiting.append((step, head.epoch, head.number, now))

    def record_output(self, head: Head, now: float) -> None:
        """Record an answer.

        Frames passed to the engine before its input get no answer.
        """
        self._active = now
        step = head.kind in (Kind.STEP, Kind.DRAWN)
        key = (step, head.epoch, head.number)
        if not any(step_sent[:3] == key for step_sent in self._waiting):
            return
        if step:
            self._advance(now)
        while self._waiting:
            oldest = self._waiting.popleft()
            self._steps -= oldest[0]
            if oldest[:3] == key:
                return

    def silent_s(self, now: float) -> float:
        """Return the seconds without output while input is unanswered; else 0."""
        return now - max(self._active, self._waiting[0][3]) if self._waiting else 0.0

    def clear(self) -> None:
        """Discard unanswered input, when the process ended or failed."""
        self._waiting.clear()
        self._steps = 0
        self._since = None

    def _advance(self, now: float | None) -> None:
        """Count the time up to `now` as busy or idle; None begins a ring epoch."""
        if self._since is not None and now is not None:
            if self._steps:
                self.busy_s += now - self._since
            else:
                self.idle_s += now - self._since
        self._since = now


logger = logging.getLogger(__name__)

TICK_S = 0.2
RING_PATIENCE = 1.5
"""Factor on stage 0's timeout: the neighbours of a failed stage time out first and can name it."""
GENERATION_BITS, MOMENT_BITS = 22, 30
REQUEST_LANE = 1
"""Lane for requests: a failed request drops its connection, which must not be the one that carries frames."""
INBOUND_KINDS = {
    True: (Kind.RESET, Kind.SWITCH, Kind.DRAWN),
    False: (Kind.RESET, Kind.SWITCH, Kind.STEP),
}
"""Frames accepted from the previous stage: on stage 0 (True), and on the others."""


class Ring:
    """One node's part in the ring of a sealed plan; `links` dials the next stage."""

    def __init__(
        self,
        sealed: bytes,
        plan: PipelinePlan,
        rank: int,
        *,
        links: ConnectionPool,
        local: LocalLink,
        stall_s: float = 20.0,
        trails: SignedTrails | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.epoch = -1
        self.fault: RingFault | None = RingFault(None, "it has not been healthy yet")
        """Why the ring is not healthy; None while it is."""
        self._links = links
        self._local = local
        self._stall_s = stall_s
        self._trails = trails
        self._out = OutboundLink(
            links,
            plan.after(rank),
            sealed,
            stall_s=stall_s,
            changed=self._out_changed,
        )
        self._in: InboundLink | None = None
        self._in_epoch = -1
        self._closed_in = 0
        """Bytes of inbound links that are closed."""
        self._failed_epoch = -1
        """Newest epoch that failed; its frames are dropped."""
        self._pings = RingPings()
        self._engine = ProcessMonitor()
        self._breaks = 0
        self._running = False
        self._changed = Notifier()

    # -- public ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Ring"]:
        """Keep the links up while the body runs."""
        self._local.listener, self._running = self, True
        self._local.box.clear()
        async with asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(self._out.run()), tasks.create_task(self._watch())]
            try:
                yield self
            finally:
                self._running = False
                if self._local.listener is self:
                    self._local.listener = None
                for job in jobs:
                    job.cancel()
                if self._in is not None:
                    await self._in.close()

    @property
    def is_healthy(self) -> bool:
        """Stage 0: a ping returned since the last failure.

        Others: own links and engine are connected.
        """
        return self._complete() and (self.rank != 0 or self.fault is None)

    async def wait_healthy(self) -> None:
        """Return once the ring is healthy."""
        while not self.is_healthy:
            await self._changed.wait()

    async def wait_failed(self) -> RingFault:
        """Return the reason once the ring is not healthy; at once if it is not."""
        while self.is_healthy:
            await self._changed.wait()
        return self.fault or RingFault(None, self._missing())

    def begin(self) -> int:
        """Return the number of a new epoch, on stage 0.

        From now on frames of older epochs are dropped. Numbers increase with the plan's generation and across
        restarts of this node.
        """
        moment = int(time.time() * 10) % 2**MOMENT_BITS
        self.epoch = max(self.epoch + 1, (self._generation() << MOMENT_BITS) + moment)
        return self.epoch

    async def prepare(self, rank: int, policy_epoch: int, version: int, *, deadline: float) -> None:
        """Ask another stage, from stage 0, to prepare its part of a version.

        Raises Refused, RemoteProtocolError, TransportError (TooSlow after the deadline).
        """
        peer = self.plan.stages[rank].node
        request = PrepareVersion(self.plan.group, self.plan.generation, policy_epoch, version)
        connection = await self._links.get(peer, ALPN_PIPELINE, lane=REQUEST_LANE)
        reply = await ask(connection, request, Prepared, deadline=deadline)
        if reply.version != version:
            raise RemoteProtocolError(Reason.MALFORMED, "the stage prepared another version")

    def stats(self) -> RingStats:
        """Return the current figures."""
        return RingStats(
            epoch=self.epoch,
            healthy=self.is_healthy,
            bytes_out=self._out.bytes,
            bytes_in=self._closed_in + (self._in.bytes if self._in else 0),
            rtt_ms=self._out.rtt_ms,
            round_ms=self._pings.round_ms,
            busy_s=self._engine.busy_s,
            idle_s=self._engine.idle_s,
            stall_share=self._engine.stall_share,
            breaks=self._breaks,
            waiting=len(self._out.box),
        )

    # -- frames from the previous stage ----------------------------------------------------------

    async def accept(self, stream: Stream, epoch: int) -> None:
        """Serve an inbound link that the acceptor admitted, until it is lost.

        Raises RemoteProtocolError: REPLAYED if a newer link exists, or the reason of an invalid frame.
        """
        if not self._running:
            raise RemoteProtocolError(Reason.NOT_YET, "this node is not ready for that plan yet")
        if self._in is not None and epoch <= self._in_epoch:
            raise RemoteProtocolError(Reason.REPLAYED, "you have opened a newer link")
        self._in_epoch = epoch
        link, old = InboundLink(stream, self._local.limits, stall_s=self._stall_s), self._in
        self._in = link
        reason = "the link was closed"
        try:
            if old is not None:
                self._fail(self._previous, f"stage {self._previous} opened another link")
                await old.close()
            await send(stream, Accepted())
            self._changed.fire()
            await link.serve(self._on_inbound)
        except (TransportError, TimeoutError, RemoteProtocolError) as error:
            reason = str(error)
            raise
        finally:
            self._closed_in += link.bytes
            if self._in is link:
                self._in = None
                self._fail(self._previous, f"the link from stage {self._previous}: {reason}")

    async def _on_inbound(self, packet: Packet) -> None:
        head = packet.head
        self._pings.record_activity(time.monotonic())
        if packet.kind is Kind.FAULT:
            self._on_fault(packet)
        elif packet.kind is Kind.PING:
            await self._on_ping(packet)
        elif packet.kind in INBOUND_KINDS[self.rank == 0] and self._is_current(packet):
            if packet.kind is Kind.RESET and self.rank != 0:
                self.epoch, self.fault = head.epoch, None
                self._local.box.drop(lambda queued: queued.head.epoch < head.epoch)
            try:
                plain = self._trails.inward(packet) if self._trails else packet
            except BadTrail as error:
                # Stage 0 cannot tell which stage changed the trail; another stage only checks its form,
                # for which the previous stage is responsible.
                return self._fail(self._previous if self.rank else None, str(error))
            await self._pass_to_engine(plain)

    def _is_current(self, packet: Packet) -> bool:
        """Return whether a packet belongs to the current epoch.

        Except on stage 0, a RESET begins a newer one.
        """
        epoch = packet.head.epoch
        if packet.kind is Kind.RESET and self.rank != 0:
            # Only of this generation, so that a false epoch cannot block later plans of the group.
            return epoch > self.epoch and epoch >> MOMENT_BITS == self._generation()
        return epoch == self.epoch and epoch != self._failed_epoch

    async def _on_ping(self, packet: Packet) -> None:
        if self.rank != 0:
            await self._pass_to_engine(packet)
        elif self._pings.record_return(packet.head.number, time.monotonic()) and self._complete():
            if self.fault is not None:
                self.fault = None
                logger.info("the ring is healthy")
            self._changed.fire()

    async def _pass_to_engine(self, packet: Packet) -> None:
        if self._local.connected:
            if self.rank != 0:
                self._engine.record_input(packet.head, time.monotonic())
            await self._local.box.put(packet)

    def _on_fault(self, packet: Packet) -> None:
        """Forward a FAULT from the previous stage, or handle it on stage 0."""
        rank = packet.head.number if packet.head.number < len(self.plan.stages) else None
        fault = RingFault(rank, words_of(packet.contents[: packet.head.body]))
        if self.rank != 0:
            self._drop_epoch(packet.head.epoch)
            self._out.box.put_only(packet)
        else:
            self._set_fault(fault)

    # -- frames from our own engine --------------------------------------------------------------

    async def from_local(self, packet: Packet) -> None:
        """Relay a frame of our own engine to the next stage."""
        now = time.monotonic()
        if self.rank != 0:
            self._engine.record_output(packet.head, now)
        if packet.kind is Kind.FAULT:
            self._engine.clear()
            self._fail(self.rank, words_of(packet.contents[: packet.head.body]))
        elif self.rank == 0 and packet.kind is Kind.RESET and not self.is_healthy:
            fault = self.fault or RingFault(None, self._missing())
            self._send_local_fault(packet.head.epoch, fault)
        elif packet.kind is Kind.PING:
            if self.rank != 0:
                await self._out.box.put(packet)
        elif packet.head.epoch == self.epoch != self._failed_epoch:
            try:
                signed = self._trails.outward(packet) if self._trails else packet
            except BadTrail as error:
                return self._fail(self.rank, str(error))
            await self._out.box.put(signed)

    def local_changed(self, words: str) -> None:
        """Handle that our own engine connected (""), or disconnected (the reason)."""
        self._engine.clear()
        if words:
            self._fail(self.rank, words)
        else:
            self._changed.fire()

    # -- failures --------------------------------------------------------------------------------

    def _out_changed(self, reason: str) -> None:
        if reason:
            self._fail(self._next, f"the link to stage {self._next}: {reason}")
        else:
            self._changed.fire()

    def _fail(self, rank: int | None, reason: str) -> None:
        """Handle a failure of stage `rank` detected here: tell the next stage, set the fault."""
        logger.warning("stage %d: the ring failed: %s", self.rank, reason)
        if self.rank != 0:
            self._drop_epoch(self.epoch)
            self._out.box.put_only(self._fault_packet(self.epoch, RingFault(rank, reason)))
        self._set_fault(RingFault(rank, reason))

    def _set_fault(self, fault: RingFault) -> None:
        """Mark the ring failed.

        Keeps the first fault since it was healthy, unless only a later one has a rank.
        """
        if self.fault is None:
            self.fault = fault
            self._breaks += 1
            if self.rank == 0:
                logger.warning("the ring failed: %s", fault.reason)
                self._drop_epoch(self.epoch)
                self._send_local_fault(self.epoch, fault)
        elif self.fault.rank is None:
            self.fault = fault
        self._pings.reset()
        self._changed.fire()

    def _drop_epoch(self, epoch: int) -> None:
        """Drop all queued and later frames of `epoch` and older ones."""
        self._failed_epoch = max(self._failed_epoch, min(epoch, self.epoch))

        def failed(queued: Packet) -> bool:
            return (
                queued.kind not in (Kind.PING, Kind.FAULT)
                and queued.head.epoch <= self._failed_epoch
            )

        self._out.box.drop(failed)
        self._local.box.drop(failed)

    def _send_local_fault(self, epoch: int, fault: RingFault) -> None:
        self._local.box.put_only(self._fault_packet(epoch, fault))

    def _fault_packet(self, epoch: int, fault: RingFault) -> Packet:
        rank = len(self.plan.stages) if fault.rank is None else fault.rank
        return packet(fault_frame(max(0, epoch), rank, fault.reason), self._local.limits)

    # -- timeouts --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self.rank == 0:
                self._ping(now)
            elif self._engine.silent_s(now) > self._stall_s:
                self._engine.clear()
                self._fail(
                    self.rank,
                    f"the engine of stage {self.rank} did not answer for {self._stall_s:g} s",
                )

    def _ping(self, now: float) -> None:
        """Send a ping from stage 0 when one is due; fail the ring when pings do not return."""
        if not self._complete():
            return
        if self.is_healthy and self._pings.silent_s(now) > RING_PATIENCE * self._stall_s:
            return self._set_fault(
                RingFault(None, f"no frame returned for {self._pings.silent_s(now):.0f} s")
            )
        number = self._pings.next(now, healthy=self.is_healthy)
        if number is not None:
            frame = Frame(Kind.PING, max(0, self.epoch), number)
            self._out.box.put_first(packet(frame, self._local.limits))
            self._pings.record_send(number, now)

    def _complete(self) -> bool:
        """Return whether both links and the engine are connected."""
        return self._out.up and self._in is not None and self._local.connected

    def _missing(self) -> str:
        """Describe the missing connection."""
        if not self._local.connected:
            return "the engine has not connected yet"
        if not self._out.up:
            return f"no link to stage {self._next}: {self._out.why}"
        if self._in is None:
            return f"no link from stage {self._previous} yet"
        return "no ping has returned yet"

    def _generation(self) -> int:
        """Return the plan's part of an epoch number; the rest is the time in tenths of a second."""
        return self.plan.generation % 2**GENERATION_BITS

    @property
    def _previous(self) -> int:
        return (self.rank - 1) % len(self.plan.stages)

    @property
    def _next(self) -> int:
        return (self.rank + 1) % len(self.plan.stages)
