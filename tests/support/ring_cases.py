"""Rings of nodes in one process: real doors, lines and sockets; the stages compute next to nothing."""

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from support.frame_cases import SHAPE, plan, step
from support.memory_transport import MemoryNetwork

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.ops.errors import EngineError
from primerl.node.p2p.connections import ConnectionPool, Router
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.transport import Transport
from primerl.node.pipeline import stage_loop
from primerl.node.pipeline.acceptor import LinkAcceptor
from primerl.node.pipeline.frames import Frame, FrameLimits, Kind
from primerl.node.pipeline.links import LocalLink, Shaper
from primerl.node.pipeline.ports import SocketPort
from primerl.node.pipeline.ring import Ring
from primerl.node.pipeline.trails import SignedTrails
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.pipelines import PipelinePlan
from primerl.protocol.version import ALPN_PIPELINE

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
    """Adds one to every number, and takes its time."""

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
    """One node, as far as pipelines are concerned."""

    key: SecretKey
    transport: Transport
    peers: PeerTable
    links: ConnectionPool
    door: LinkAcceptor


class Chain:
    """Nodes of one plan. Stage 0's engine is the test itself, by `send` and `receive`."""

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
        self.shapers: dict[int, Shaper] = {}
        self.signs = False
        """Whether trails are signed."""
        self._make = make
        self._stack = AsyncExitStack()
        self._threads: list[threading.Thread] = []

    async def node(self, key: SecretKey) -> Node:
        """A node that answers ALPN_PIPELINE."""
        transport = await self._make(key)
        peers = PeerTable()
        links = ConnectionPool(transport, peers, connect_timeout_s=5.0)
        door = LinkAcceptor(key.node_id, RUN, TRAINER.node_id)
        router = Router(
            transport, peers, {ALPN_PIPELINE: door.handle}, max_streams_per_peer=32, max_peers=32
        )
        serving = asyncio.create_task(router.run())

        async def end() -> None:
            serving.cancel()
            await asyncio.wait([serving])
            await links.close()
            await transport.close()

        self._stack.push_async_callback(end)
        return Node(key, transport, peers, links, door)

    def acquaint(self) -> None:
        """Everybody knows everybody's addresses."""
        for node in self.nodes:
            for other in self.nodes:
                node.peers.hint(other.key.node_id, other.transport.addresses())

    async def start(self) -> None:
        """All nodes, rings and engines."""
        self.nodes = [await self.node(key) for key in self.keys]
        self.acquaint()
        for rank, node in enumerate(self.nodes):
            local = LocalLink(self.directory / f"{rank}.sock", LIMITS)
            await self._stack.enter_async_context(local)
            self.locals.append(local)
            self.rings.append(await self.ring(rank, node))
            await self.compute(rank)

    async def ring(self, rank: int, node: Node) -> Ring:
        """The ring of one node, running."""
        ring = Ring(
            sealed(self.plan),
            self.plan,
            rank,
            links=node.links,
            local=self.locals[rank],
            stall_s=self.stall_s,
            shaper=self.shapers.get(rank),
            trails=SignedTrails(node.key, RUN, self.plan, rank) if self.signs else None,
        )
        await self._stack.enter_async_context(ring.running())
        node.door.attach(ring)
        return ring

    async def compute(self, rank: int) -> None:
        """The engine of one stage, as it would be in a process of its own."""
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
        """End everything."""
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
        """Wait until the ring is whole and begin a chain, as an engine does."""
        await soon(self.rings[0].whole())
        epoch = self.rings[0].begin()
        await self.send(Frame(Kind.RESET, epoch, 0))
        while (await self.receive(Kind.RESET)).epoch != epoch:
            pass
        return epoch

    async def trip(self, epoch: int, number: int, tokens: int = 3) -> Frame:
        """One micro-batch round the ring."""
        await self.send(step(epoch, number, tokens))
        return await self.receive(Kind.DRAWN)


@asynccontextmanager
async def chain(
    stages: int, network: MemoryNetwork | None = None, **settings: object
) -> AsyncGenerator[Chain]:
    """A running chain over the memory transport; `settings` are attributes of it."""
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
