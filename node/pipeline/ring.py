"""Relay frames between the neighbouring stages and our own engine, and track whether the ring is whole.

Frames are relayed in order, and dropped as soon as they are of no use: those of an older epoch, and of one that
broke here. When something is lost, the stage that notices tells the next one, so that stage 0 hears of it;
stage 0 alone begins anew. Nothing that a neighbour says is believed beyond this ring.
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
from .links import InboundLink, LocalLink, OutboundLink, Shaper
from .trails import BadTrail, SignedTrails


@dataclass(frozen=True)
class RingFault:
    """Why a ring is not whole."""

    rank: int | None
    """Of the stage that is lost or failed; None where it is not known."""
    words: str


@dataclass(frozen=True)
class RingStats:
    """For status rows; bytes and frames of activations and everything else, over all lines so far."""

    epoch: int
    whole: bool
    bytes_out: int
    bytes_in: int
    frames_out: int
    frames_in: int
    rtt_ms: float | None
    """To the next stage and back."""
    round_ms: float | None
    """Once round the ring, through every stage's queue; only stage 0 knows."""
    busy_s: float
    idle_s: float
    """Of our own stage within chains, where it is not stage 0."""
    stall_share: float
    breaks: int
    waiting: int
    """Frames that have not left yet."""


EVERY_S = 2.0
SOON_S = 0.2
"""While the ring is not whole: the next one may be the first that gets through."""
MAX_OUT = 256
"""Older ones are given up."""
EMA = 0.3


class RingPings:
    """Numbers that go out and come back in order."""

    def __init__(self) -> None:
        self.round_ms: float | None = None
        """How long one takes, smoothed."""
        self._number = 0
        self._first = 1
        """The first that counts: those before were sent before something broke."""
        self._out: dict[int, float] = {}
        self._last = -EVERY_S
        self._heard = 0.0

    def next(self, now: float, *, whole: bool) -> int | None:
        """The number to send now; None if it is not time yet."""
        due = self._last + (EVERY_S if whole else SOON_S)
        return self._number + 1 if now >= due else None

    def sent(self, number: int, now: float) -> None:
        """It left."""
        self._number = number
        self._last = now
        self._out[number] = now
        if len(self._out) > MAX_OUT:
            del self._out[next(iter(self._out))]

    def heard(self, now: float) -> None:
        """Something came round: the ring moves."""
        self._heard = now

    def back(self, number: int, now: float) -> bool:
        """A ping came back; true if it was sent since the last begin()."""
        since = self._out.pop(number, None)
        if since is None or number < self._first:
            return False
        self._out = {one: at for one, at in self._out.items() if one > number}
        took = (now - since) * 1e3
        self.round_ms = took if self.round_ms is None else (1 - EMA) * self.round_ms + EMA * took
        return True

    def silent_s(self, now: float) -> float:
        """How long nothing came round though something should have."""
        return now - max(self._heard, min(self._out.values())) if self._out else 0.0

    def begin(self) -> None:
        """Something broke: pings under way do not count any more."""
        self._out.clear()
        self._first = self._number + 1


class ProcessMonitor:
    """Follows one process; cleared when another takes its place."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        """With a micro-batch."""
        self.idle_s = 0.0
        """Without one, between two of one chain."""
        self._waiting: deque[tuple[bool, int, int, float]] = deque()
        """(whether it is a micro-batch, epoch, number, handed over at)."""
        self._heard = 0.0
        self._steps = 0
        self._since: float | None = None
        """Since when it is busy, or idle; None where no chain runs."""

    @property
    def stall_share(self) -> float:
        """Share of the time in which it had nothing to do, 0 to 1."""
        whole = self.busy_s + self.idle_s
        return self.idle_s / whole if whole else 0.0

    def given(self, head: Head, now: float) -> None:
        """A frame was handed over."""
        step = head.kind is Kind.STEP
        if step:
            self._pass(now)
            self._steps += 1
        elif head.kind is Kind.RESET:
            self._pass(None)
        self._waiting.append((step, head.epoch, head.number, now))

    def answered(self, head: Head, now: float) -> None:
        """A frame came back; whatever was handed over before it will not."""
        self._heard = now
        step = head.kind in (Kind.STEP, Kind.DRAWN)
        what = (step, head.epoch, head.number)
        if not any(one[:3] == what for one in self._waiting):
            return
        if step:
            self._pass(now)
        while self._waiting:
            one = self._waiting.popleft()
            self._steps -= one[0]
            if one[:3] == what:
                return

    def silent_s(self, now: float) -> float:
        """How long it has said nothing though there is something to say; 0 where there is not."""
        return now - max(self._heard, self._waiting[0][3]) if self._waiting else 0.0

    def clear(self) -> None:
        """Nothing of it will come back."""
        self._waiting.clear()
        self._steps = 0
        self._since = None

    def _pass(self, now: float | None) -> None:
        """Count the time up to `now`; None begins a chain."""
        if self._since is not None and now is not None:
            if self._steps:
                self.busy_s += now - self._since
            else:
                self.idle_s += now - self._since
        self._since = now


logger = logging.getLogger(__name__)

TICK_S = 0.2
RING_PATIENCE = 1.5
"""Stage 0 waits this much longer than the others do: the neighbours of a fault can say where it is."""
GENERATION_BITS, MOMENT_BITS = 22, 30
REQUEST_LANE = 1
"""A request that fails costs its connection, and that must not be the one that frames run on."""
FROM_LINE = {
    True: (Kind.RESET, Kind.SWITCH, Kind.DRAWN),
    False: (Kind.RESET, Kind.SWITCH, Kind.STEP),
}
"""What stage 0, and what the others, take from the stage before."""


class Ring:
    """Our place in the ring of one sealed plan; `links` find the next stage by the peer table's addresses."""

    def __init__(
        self,
        sealed: bytes,
        plan: PipelinePlan,
        rank: int,
        *,
        links: ConnectionPool,
        local: LocalLink,
        stall_s: float = 20.0,
        shaper: Shaper | None = None,
        trails: SignedTrails | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.epoch = -1
        self.fault: RingFault | None = RingFault(None, "it was never whole yet")
        """Why it is not whole; None while it is."""
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
            shaper=shaper,
        )
        self._in: InboundLink | None = None
        self._in_epoch = -1
        self._gone_in = (0, 0)
        self._void = -1
        """Epoch that broke; nothing of it goes on."""
        self._rounds = RingPings()
        self._handed = ProcessMonitor()
        self._breaks = 0
        self._running = False
        self._changed = Notifier()

    # -- for the composition ---------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Ring"]:
        """Hold the lines while the body runs."""
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
    def is_whole(self) -> bool:
        """Stage 0: a ping went round since the last break. Others: own lines and own engine are there."""
        complete = self._out.up and self._in is not None and self._local.connected
        return complete and (self.rank != 0 or self.fault is None)

    async def whole(self) -> None:
        """Return once it is whole."""
        while not self.is_whole:
            await self._changed.wait()

    async def broken(self) -> RingFault:
        """Return why once it is not whole any more; at once if it is not."""
        while self.is_whole:
            await self._changed.wait()
        return self.fault or RingFault(None, self._missing())

    def begin(self) -> int:
        """Stage 0: the epoch of a new chain; frames of an older one are dropped from now on.

        Rises with the plan's generation, and across restarts of this node.
        """
        moment = int(time.time() * 10) % 2**MOMENT_BITS
        self.epoch = max(self.epoch + 1, (self._generation() << MOMENT_BITS) + moment)
        return self.epoch

    async def prepare(self, rank: int, term: int, version: int, *, deadline: float) -> None:
        """Stage 0: have another stage get its part of a version ready.

        Raises Refused, RemoteProtocolError, TransportError (TooSlow when the deadline passed).
        """
        peer = self.plan.stages[rank].node
        request = PrepareVersion(self.plan.group, self.plan.generation, term, version)
        connection = await self._links.get(peer, ALPN_PIPELINE, lane=REQUEST_LANE)
        reply = await ask(connection, request, Prepared, deadline=deadline)
        if reply.version != version:
            raise RemoteProtocolError(Reason.MALFORMED, "it prepared another version")

    def stats(self) -> RingStats:
        """A snapshot."""
        before, line = self._gone_in, self._in
        return RingStats(
            epoch=self.epoch,
            whole=self.is_whole,
            bytes_out=self._out.bytes,
            bytes_in=before[0] + (line.bytes if line else 0),
            frames_out=self._out.frames,
            frames_in=before[1] + (line.frames if line else 0),
            rtt_ms=self._out.rtt_ms,
            round_ms=self._rounds.round_ms,
            busy_s=self._handed.busy_s,
            idle_s=self._handed.idle_s,
            stall_share=self._handed.stall_share,
            breaks=self._breaks,
            waiting=len(self._out.box),
        )

    # -- the line from the stage before ----------------------------------------------------------

    async def accept(self, stream: Stream, epoch: int) -> None:
        """Take a line that the door let in, and serve it until it is lost.

        Raises RemoteProtocolError (REPLAYED: a newer line came before this one, or what came was no frame).
        """
        if not self._running:
            raise RemoteProtocolError(Reason.NOT_YET, "we are not ready for that plan yet")
        if self._in is not None and epoch <= self._in_epoch:
            raise RemoteProtocolError(Reason.REPLAYED, "there is a newer line from you")
        self._in_epoch = epoch
        line, old = InboundLink(stream, self._local.limits, stall_s=self._stall_s), self._in
        self._in = line
        words = "the line was closed"
        try:
            if old is not None:
                self._break(self._before(), "it opened another line")
                await old.close()
            await send(stream, Accepted())
            self._changed.fire()
            await line.serve(self._from_line)
        except (TransportError, TimeoutError, RemoteProtocolError) as error:
            words = str(error)
            raise
        finally:
            self._gone_in = (self._gone_in[0] + line.bytes, self._gone_in[1] + line.frames)
            if self._in is line:
                self._in = None
                self._break(self._before(), f"the line from stage {self._before()}: {words}")

    async def _from_line(self, packet: Packet) -> None:
        head = packet.head
        self._rounds.heard(time.monotonic())
        if packet.kind is Kind.FAULT:
            self._told(packet)
        elif packet.kind is Kind.PING:
            await self._pinged(packet)
        elif packet.kind in FROM_LINE[self.rank == 0] and self._goes_on(packet):
            if packet.kind is Kind.RESET and self.rank != 0:
                self.epoch, self.fault = head.epoch, None
                self._local.box.drop(lambda one: one.head.epoch < head.epoch)
            try:
                plain = self._trails.inward(packet) if self._trails else packet
            except BadTrail as error:
                # Stage 0 finds that it was changed on its way, not by whom; any other that it is no trail.
                return self._break(self._before() if self.rank else None, str(error))
            await self._hand(plain)

    def _goes_on(self, packet: Packet) -> bool:
        """Whether it is of the chain that runs; for all but stage 0 a RESET begins another one."""
        epoch = packet.head.epoch
        if packet.kind is Kind.RESET and self.rank != 0:
            # Of this generation: a lie about epochs spoils no later plan of the group.
            return epoch > self.epoch and epoch >> MOMENT_BITS == self._generation()
        return epoch == self.epoch and epoch != self._void

    async def _pinged(self, packet: Packet) -> None:
        if self.rank != 0:
            await self._hand(packet)
        elif self._rounds.back(packet.head.number, time.monotonic()) and self._complete():
            if self.fault is not None:
                self.fault = None
                logger.info("the ring is whole")
            self._changed.fire()

    async def _hand(self, packet: Packet) -> None:
        """To the process that computes."""
        if self._local.connected:
            if self.rank != 0:
                self._handed.given(packet.head, time.monotonic())
            await self._local.box.put(packet)

    def _told(self, packet: Packet) -> None:
        """The stage before tells of a fault, its own or one farther up."""
        rank = packet.head.number if packet.head.number < len(self.plan.stages) else None
        fault = RingFault(rank, words_of(packet.contents[: packet.head.body]))
        if self.rank != 0:
            self._forget(packet.head.epoch)
            self._out.box.put_only(packet)
        else:
            self._lose(fault)

    # -- the process that computes ---------------------------------------------------------------

    async def from_local(self, packet: Packet) -> None:
        """A frame of our own engine."""
        now = time.monotonic()
        if self.rank != 0:
            self._handed.answered(packet.head, now)
        if packet.kind is Kind.FAULT:
            self._handed.clear()
            self._break(self.rank, words_of(packet.contents[: packet.head.body]))
        elif self.rank == 0 and packet.kind is Kind.RESET and not self.is_whole:
            self._tell_local(packet.head.epoch, self.fault or RingFault(None, self._missing()))
        elif packet.kind is Kind.PING:
            if self.rank != 0:
                await self._out.box.put(packet)
        elif packet.head.epoch == self.epoch != self._void:
            try:
                signed = self._trails.outward(packet) if self._trails else packet
            except BadTrail as error:
                return self._break(self.rank, str(error))
            await self._out.box.put(signed)

    def local_changed(self, words: str) -> None:
        """Our own engine came, or is gone."""
        self._handed.clear()
        if words:
            self._break(self.rank, words)
        else:
            self._changed.fire()

    # -- losses ----------------------------------------------------------------------------------

    def _out_changed(self, words: str) -> None:
        after = (self.rank + 1) % len(self.plan.stages)
        if words:
            self._break(after, f"the line to stage {after}: {words}")
        else:
            self._changed.fire()

    def _break(self, rank: int | None, words: str) -> None:
        """Something of ours is lost: tell whom it concerns."""
        logger.warning("stage %d: the ring broke: %s", self.rank, words)
        if self.rank != 0:
            self._forget(self.epoch)
            self._out.box.put_only(self._fault_packet(self.epoch, RingFault(rank, words)))
        self._lose(RingFault(rank, words))

    def _lose(self, fault: RingFault) -> None:
        """It is not whole; the first fault since it was is the one that counts."""
        if self.fault is None:
            self.fault = fault
            self._breaks += 1
            if self.rank == 0:
                logger.warning("the ring broke: %s", fault.words)
                self._forget(self.epoch)
                self._tell_local(self.epoch, fault)
        elif self.fault.rank is None:
            self.fault = fault
        self._rounds.begin()
        self._changed.fire()

    def _forget(self, epoch: int) -> None:
        """Nothing of that chain goes on."""
        self._void = max(self._void, min(epoch, self.epoch))

        def over(one: Packet) -> bool:
            return one.kind not in (Kind.PING, Kind.FAULT) and one.head.epoch <= self._void

        self._out.box.drop(over)
        self._local.box.drop(over)

    def _tell_local(self, epoch: int, fault: RingFault) -> None:
        self._local.box.put_only(self._fault_packet(epoch, fault))

    def _fault_packet(self, epoch: int, fault: RingFault) -> Packet:
        rank = len(self.plan.stages) if fault.rank is None else fault.rank
        return packet(fault_frame(max(0, epoch), rank, fault.words), self._local.limits)

    # -- time ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self.rank == 0:
                self._ping(now)
            elif self._handed.silent_s(now) > self._stall_s:
                self._handed.clear()
                self._break(
                    self.rank,
                    f"the engine of stage {self.rank} gave nothing for {self._stall_s:g} s",
                )

    def _ping(self, now: float) -> None:
        """Stage 0: send one round now and then; it has to come back."""
        if not self._complete():
            return
        if self.is_whole and self._rounds.silent_s(now) > RING_PATIENCE * self._stall_s:
            return self._lose(
                RingFault(None, f"nothing came round for {self._rounds.silent_s(now):.0f} s")
            )
        number = self._rounds.next(now, whole=self.is_whole)
        if number is not None:
            frame = Frame(Kind.PING, max(0, self.epoch), number)
            self._out.box.put_first(packet(frame, self._local.limits))
            self._rounds.sent(number, now)

    def _complete(self) -> bool:
        return self._out.up and self._in is not None and self._local.connected

    def _missing(self) -> str:
        """What is not there, in words."""
        before, after = self._before(), (self.rank + 1) % len(self.plan.stages)
        if not self._local.connected:
            return "the engine has not connected yet"
        if not self._out.up:
            return f"no line to stage {after}: {self._out.why}"
        if self._in is None:
            return f"no line from stage {before} yet"
        return "no ping has come round yet"

    def _generation(self) -> int:
        """The part of an epoch that the plan decides; the rest is the time in tenths of seconds."""
        return self.plan.generation % 2**GENERATION_BITS

    def _before(self) -> int:
        return (self.rank - 1) % len(self.plan.stages)
