"""Plans, frames, ports and rings of memory streams for the tests of pipelines."""

import asyncio
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from support.bare_node import serving
from support.memory_network import MemoryNetwork

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.errors import EngineError
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.transport import Transport
from primerl.node.pipeline import stage_loop
from primerl.node.pipeline.acceptor import LinkAcceptor
from primerl.node.pipeline.frames import Frame, FrameLimits, Kind
from primerl.node.pipeline.links import LocalLink
from primerl.node.pipeline.ports import DEPTH, PortClosed, PortTimeout, SocketPort, add_waited
from primerl.node.pipeline.ring import Ring
from primerl.node.pipeline.trails import SignedTrails
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage
from primerl.protocol.version import ALPN_PIPELINE
from primerl.scripts.bench.wan import DelayedPool

SHAPE = PipelineShape(
    engine="vllm",
    software="0",
    dtype="float32",
    hidden_size=16,
    max_model_len=64,
    max_sequences=8,
    max_step_tokens=32,
    block_size=16,
    kv_tokens=1024,
    micro_batches=4,
)


def plan(nodes: list[bytes], *, generation: int = 0, group: str = "group") -> PipelinePlan:
    """One layer a node."""
    stages = tuple(Stage(node, rank, rank + 1) for rank, node in enumerate(nodes))
    return PipelinePlan(digest(group.encode()), generation, stages, (), SHAPE)


def step(epoch: int, number: int, tokens: int = 3, body: bytes = b"what to do") -> Frame:
    """A micro-batch of `tokens` tokens."""
    hidden = np.full((tokens, SHAPE.hidden_size), number, np.float32)
    scales = np.arange(tokens, dtype=np.uint16)
    return Frame(Kind.STEP, epoch, number, body, (hidden, scales), b"trail")


def same(one: Frame, other: Frame) -> bool:
    """Return whether two frames are equal, apart from queueing times."""
    return fields_of(one) == fields_of(other)


def fields_of(frame: Frame) -> tuple[Any, ...]:
    """Return a frame's fields, comparable."""
    tensors = [(one.dtype.name, one.shape, one.tobytes()) for one in frame.tensors]
    return (frame.kind, frame.epoch, frame.number, frame.body, frame.trail, tensors)


class Pipe:
    """Frames in order, one way, at most `depth` of them; each arrives `delay_s` after it was sent."""

    def __init__(self, depth: int = DEPTH, delay_s: float = 0.0) -> None:
        self._depth = depth
        self._delay = delay_s
        self._frames: deque[tuple[float, Frame]] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    def put(self, frame: Frame) -> None:
        """Append `frame`, waiting for room. Raises PortClosed."""
        with self._changed:
            while not self._closed and len(self._frames) >= self._depth:
                self._changed.wait()
            if self._closed:
                raise PortClosed(self._closed)
            self._frames.append((time.monotonic() + self._delay, frame))
            self._changed.notify_all()

    def take(self, timeout_s: float | None) -> Frame:
        """Return the next frame, its queueing time added. Raises PortTimeout, PortClosed."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                due = self._frames[0][0] if self._frames else None
                if due is not None and due <= now:
                    break
                if due is None and self._closed:
                    raise PortClosed(self._closed)
                if until is not None and now >= until:
                    raise PortTimeout(f"no frame came in {timeout_s:g} s")
                ends = [one - now for one in (due, until) if one is not None]
                self._changed.wait(min(ends) if ends else None)
            came, frame = self._frames.popleft()
            self._changed.notify_all()
        return add_waited(frame, now - came)

    def close(self, why: str) -> None:
        """Accept no more frames; queued ones can still be taken. The first reason is kept."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop the queued frames."""
        with self._changed:
            self._frames.clear()


class MemoryPort:
    """One end: sends into one pipe, receives from another."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    def send(self, frame: Frame) -> None:
        """Send `frame`. Raises PortClosed."""
        self._outgoing.put(frame)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame. Raises PortTimeout, PortClosed."""
        return self._incoming.take(timeout_s)

    def close(self) -> None:
        """Close both directions; the other end still gets the frames sent before."""
        self._incoming.close("this port was closed")
        self._incoming.clear()
        self._outgoing.close("the other end was closed")


def pair(depth: int = DEPTH) -> tuple[MemoryPort, MemoryPort]:
    """Make two connected ports."""
    there, back = Pipe(depth), Pipe(depth)
    return MemoryPort(back, there), MemoryPort(there, back)


def ring(stages: int, depth: int = DEPTH, delay_s: float = 0.0) -> list[MemoryPort]:
    """The ports of a pipeline without a network: each sends to the next one, the last to the first."""
    pipes = [Pipe(depth, delay_s) for _ in range(stages)]
    return [MemoryPort(pipes[rank - 1], pipe) for rank, pipe in enumerate(pipes)]


WAIT_S = 60.0
TRAINER = SecretKey.from_seed(bytes(31) + b"T")
RUN = digest(b"the run")
STALL_S = 3.0
LIMITS = FrameLimits.of(SHAPE)

T = TypeVar("T")


def sealed(
    of: PipelinePlan, key: SecretKey = TRAINER, run: bytes = RUN, lasts_s: int = 600
) -> bytes:
    return seal(key, Purpose.PIPELINE, run, of, expires=int(time.time()) + lasts_s)


def key_of(number: int) -> SecretKey:
    return SecretKey.from_seed(bytes(31) + bytes([number]))


async def soon(work: Awaitable[T]) -> T:
    async with asyncio.timeout(WAIT_S):
        return await work


class Adder:
    """Adds one to every element, after a delay."""

    def __init__(self, last: bool) -> None:
        self.last = last
        self.resets = 0
        self.switched: list[int] = []
        self.takes_s = 0.0
        self.fails = ""
        self.says = b""
        """Put on the trail."""

    def reset(self) -> None:
        self.resets += 1

    def switch(self, version: int) -> None:
        self.switched.append(version)

    def step(self, frame: Frame) -> Frame:
        if self.fails:
            raise EngineError(self.fails)
        time.sleep(self.takes_s)
        tensors = (frame.tensors[0] + 1, *frame.tensors[1:])
        kind = Kind.DRAWN if self.last else Kind.STEP
        return replace(
            frame,
            kind=kind,
            tensors=tensors,
            trail=frame.trail + (self.says if frame.trail else b""),
        )


@dataclass
class Node:
    """One node with the parts that pipelines need."""

    key: SecretKey
    transport: Transport
    peers: PeerTable
    links: DelayedPool
    acceptor: LinkAcceptor


class Chain:
    """The nodes of one plan. The test acts as stage 0's engine, by `send` and `receive`."""

    def __init__(
        self, directory: Path, stages: int, make: Callable[[SecretKey], Awaitable[Transport]]
    ) -> None:
        self.directory = directory
        self.keys = [key_of(number) for number in range(stages)]
        self.plan = plan([key.node_id for key in self.keys])
        self.nodes: list[Node] = []
        self.rings: list[Ring] = []
        self.locals: list[LocalLink] = []
        self.computes: dict[int, Adder] = {}
        self.ports: dict[int, SocketPort] = {}
        self.stall_s = STALL_S
        self.delays: dict[int, float] = {}
        """Seconds by which a stage's link delays its frames."""
        self.rates: dict[int, float] = {}
        """Bytes per second of a stage's link."""
        self.signs = False
        """Whether trails are signed."""
        self._make = make
        self._stack = AsyncExitStack()
        self._threads: list[threading.Thread] = []

    async def node(self, key: SecretKey) -> Node:
        """A node that answers ALPN_PIPELINE."""
        transport = await self._make(key)
        peers = PeerTable()
        links = DelayedPool(transport, peers, connect_timeout_s=5.0)
        acceptor = LinkAcceptor(key.node_id, RUN, TRAINER.node_id)
        await self._stack.enter_async_context(
            serving(transport, {ALPN_PIPELINE: acceptor.handle}, peers)
        )
        self._stack.push_async_callback(links.close)
        return Node(key, transport, peers, links, acceptor)

    def acquaint(self) -> None:
        """Give every node the addresses of all others."""
        for node in self.nodes:
            for other in self.nodes:
                node.peers.hint(other.key.node_id, other.transport.addresses())

    async def start(self) -> None:
        """Start all nodes, rings and engines."""
        self.nodes = [await self.node(key) for key in self.keys]
        self.acquaint()
        for rank, node in enumerate(self.nodes):
            local = LocalLink(self.directory / f"{rank}.sock", LIMITS)
            await self._stack.enter_async_context(local)
            self.locals.append(local)
            self.rings.append(await self.ring(rank, node))
            await self.compute(rank)

    async def ring(self, rank: int, node: Node) -> Ring:
        """Run the ring of one node."""
        node.links.delay_s = self.delays.get(rank, 0.0)
        node.links.bytes_per_s = self.rates.get(rank, 0.0)
        ring = Ring(
            sealed(self.plan),
            self.plan,
            rank,
            links=node.links,
            local=self.locals[rank],
            stall_s=self.stall_s,
            trails=SignedTrails(node.key, RUN, self.plan, rank) if self.signs else None,
        )
        await self._stack.enter_async_context(ring.running())
        node.acceptor.attach(ring)
        return ring

    async def compute(self, rank: int) -> None:
        """Run the engine of one stage, as its own process would."""
        path = str(self.locals[rank].path)
        port = self.ports[rank] = await asyncio.to_thread(SocketPort, path, LIMITS)
        if rank:
            compute = self.computes[rank] = Adder(rank == len(self.keys) - 1)
            thread = threading.Thread(
                target=stage_loop.serve, args=(port, compute), kwargs={"rank": rank}
            )
            thread.start()
            self._threads.append(thread)

    async def close(self) -> None:
        """Close everything."""
        for compute in self.computes.values():
            compute.takes_s = 0.0
        for port in self.ports.values():
            await asyncio.to_thread(port.close)
        await self._stack.aclose()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, WAIT_S)
            assert not thread.is_alive()

    # -- stage 0's engine ------------------------------------------------------------------------

    async def send(self, frame: Frame) -> None:
        await asyncio.to_thread(self.ports[0].send, frame)

    async def receive(self, kind: Kind | None = None) -> Frame:
        """The next frame, of that kind."""
        while True:
            frame = await asyncio.to_thread(self.ports[0].receive, WAIT_S)
            if kind is None or frame.kind is kind:
                return frame

    async def begin(self) -> int:
        """Wait until the ring is healthy and begin an epoch, as an engine does."""
        await soon(self.rings[0].wait_healthy())
        epoch = self.rings[0].begin()
        await self.send(Frame(Kind.RESET, epoch, 0))
        while (await self.receive(Kind.RESET)).epoch != epoch:
            pass
        return epoch

    async def trip(self, epoch: int, number: int, tokens: int = 3) -> Frame:
        """Send one micro-batch around the ring."""
        await self.send(step(epoch, number, tokens))
        return await self.receive(Kind.DRAWN)


@asynccontextmanager
async def chain(
    stages: int, network: MemoryNetwork | None = None, **settings: object
) -> AsyncGenerator[Chain]:
    """Run a Chain over the memory transport; `settings` are attributes of it."""
    world = network or MemoryNetwork()

    async def make(key: SecretKey) -> Transport:
        return world.transport(key.node_id)

    with tempfile.TemporaryDirectory() as directory:
        made = Chain(Path(directory), stages, make)
        for name, value in settings.items():
            setattr(made, name, value)
        try:
            await made.start()
            yield made
        finally:
            await made.close()
