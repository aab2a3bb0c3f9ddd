"""One stage of pipeline.py in a process: real iroh on loopback, acceptor, ring and engine.

    python scripts/bench/pipeline_stage.py RANK

Commands on stdin (children.py): `join` a plan, `connect` its stages by links of a given delay and rate,
`measure` at stage 0, `whole` for an engine with the whole model. Each join tears down the previous one;
reconnecting keeps the engine, which takes long to start.
"""

import asyncio
import hashlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import start_iroh
from primerl.node.config.run import EngineConfig, NetworkConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.place import StagePlace, share_of
from primerl.node.models.model_files import read_state
from primerl.node.p2p.connections import Router
from primerl.node.p2p.peers import PeerTable
from primerl.node.pipeline.acceptor import LinkAcceptor
from primerl.node.pipeline.frames import FrameLimits
from primerl.node.pipeline.hosted_stage import HostedHead, HostedStage
from primerl.node.pipeline.links import LocalLink
from primerl.node.pipeline.ring import Ring
from primerl.node.process.threads import share_python
from primerl.protocol.version import ALPN_PIPELINE
from primerl.scripts.bench.children import Event, Wire, cpu_seconds
from primerl.scripts.bench.wan import DelayedPool

STALL_S, START_S, LOOK_S = 60.0, 300.0, 0.05
VOCABULARY = 256
"""Token ids of prompts are below this."""


class Member:
    """This process: a node with a key, and at most one engine."""

    def __init__(self, rank: int, home: Path, wire: Wire) -> None:
        self.rank, self.home, self.wire = rank, home, wire
        self.key = SecretKey.generate()
        self.peers = PeerTable()
        self.engine: Engine | None = None
        self.ring: Ring | None = None
        self._joined, self._connected = AsyncExitStack(), AsyncExitStack()
        self._ring_of: Callable[[], Ring] | None = None
        """Makes a ring of the joined plan."""
        self._joins = 0
        self._looks: list[tuple[int, float]] = []

    async def serve(self) -> None:
        """Serve commands until stdin ends."""
        network = NetworkConfig(host="127.0.0.1", libp2p=False)
        self.transport = await start_iroh(network, self.key, 0)
        self.links = DelayedPool(self.transport, self.peers, connect_timeout_s=10.0)
        self.wire.tell("up", node=self.key.node_id.hex(), addresses=self.transport.addresses())
        try:
            handlers = {
                "join": self.join,
                "connect": self.connect,
                "leave": self.leave,
                "whole": self.whole,
                "measure": self.measure,
            }
            await self.wire.serve(handlers)
        finally:
            await self.leave({})
            await self.links.close()
            await self.transport.close()

    async def leave(self, _: Event) -> Event:
        """Leave the joined plan, and close the engine."""
        await self._connected.aclose()
        await self._joined.aclose()
        self._connected, self._joined = AsyncExitStack(), AsyncExitStack()
        self.engine = self.ring = self._ring_of = None
        return {}

    async def whole(self, command: Event) -> Event:
        """Start an engine with the whole model."""
        await self.leave({})
        engine = self.engine = build_engine(EngineConfig.model_validate(command["engine"]))
        self._joined.push_async_callback(engine.close)
        model = Path(command["model"])
        await engine.start(model, fingerprint=command["fingerprint"])
        await engine.load(0, read_state(model))
        return {}

    async def join(self, command: Event) -> Event:
        """Become a stage of the sealed plan, with an engine that has its weights, but without links."""
        await self.leave({})
        for node, addresses in command["peers"].items():
            self.peers.hint(bytes.fromhex(node), addresses)
        sealed, run = bytes.fromhex(command["plan"]), bytes.fromhex(command["run"])
        acceptor = LinkAcceptor(self.key.node_id, run, bytes.fromhex(command["trainer"]))
        plan = acceptor.admit(sealed)
        await self._serve_links(acceptor)
        self._joins += 1
        path = self.home / f"{self._joins}.sock"
        limits = FrameLimits.of(plan.shape)
        local = await self._joined.enter_async_context(LocalLink(path, limits))

        def ring_of() -> Ring:
            ring = Ring(
                sealed,
                plan,
                self.rank,
                links=self.links,
                local=local,
                stall_s=STALL_S,
            )
            acceptor.attach(ring, None)
            return ring

        self._ring_of = ring_of
        place = StagePlace(plan, self.rank, str(path))
        config, model = EngineConfig.model_validate(command["engine"]), Path(command["model"])
        state = read_state(model)
        wanted = share_of(plan, self.rank)(state.keys())
        engine = HostedStage(config, place) if self.rank else HostedHead(config, place)
        self.engine = engine
        self._joined.push_async_callback(engine.close)
        await engine.start(model, fingerprint=plan.shape.fingerprint)
        await engine.load(0, {name: state[name] for name in wanted})
        return {"tensors": sum(state[name].data.nbytes for name in wanted)}

    async def connect(self, command: Event) -> Event:
        """Open links in place of existing ones; answer once the ring is healthy."""
        assert self._ring_of is not None, "join comes first"
        await self._connected.aclose()
        self.links.delay_s, self.links.bytes_per_s = command["delay_s"], command["bytes_per_s"]
        self._connected = AsyncExitStack()
        ring = self.ring = self._ring_of()
        await self._connected.enter_async_context(ring.running())
        async with asyncio.timeout(START_S):
            await ring.wait_healthy()
            if self.rank == 0:
                await self.engine.rejoin(ring.begin())  # pyright: ignore
        return {}

    async def _serve_links(self, acceptor: LinkAcceptor) -> None:
        router = Router(
            self.transport,
            self.peers,
            {ALPN_PIPELINE: acceptor.handle},
            max_streams_per_peer=16,
            max_peers=64,
        )
        answering = asyncio.create_task(router.run(), name="router")

        async def stop() -> None:
            answering.cancel()
            await asyncio.wait([answering])

        self._joined.push_async_callback(stop)

    async def measure(self, command: Event) -> Event:
        """Measure output tokens/s of `sequences` sequences begun at once, each `tokens` long."""
        assert self.engine is not None, "join or whole comes first"
        before, busy = self._sent(), cpu_seconds(os.getpid())
        watching = asyncio.create_task(self._watch(), name="watch")
        begin = time.monotonic()
        done = await asyncio.gather(
            *(self._one(row, command) for row in range(command["sequences"]))
        )
        seconds = time.monotonic() - begin
        watching.cancel()
        await asyncio.wait([watching])
        keep(Path(command["keep"]), done)
        drawn = sum(len(one.token_ids) for one in done)
        found: Event = {
            "tokens_per_s": drawn / seconds,
            "seconds": seconds,
            "drawn": drawn,
            "cpu_s": cpu_seconds(os.getpid()) - busy,
            "digest": digest_of(done),
        }
        if self.ring is not None:
            computed = drawn + command["sequences"] * (command["prompt"] - 1)
            sent = self._sent() - before
            found["bytes_per_token"] = sent / computed
            found["mbit_s"] = sent * 8 / seconds / 1e6
            found |= self._seen()
        return found

    async def _watch(self) -> None:
        """Sample the number of micro-batches and the stall share of the slowest stage during work."""
        self._looks = []
        while True:
            await asyncio.sleep(LOOK_S)
            if (found := lanes_of(self.engine)) is not None and found.in_flight:
                self._looks.append((found.lanes, found.stall_share))

    def _seen(self) -> Event:
        looks = self._looks[len(self._looks) // 2 :]  # by then the number has settled
        if not looks:
            return {}
        lanes, stalls = zip(*looks, strict=True)
        return {"micro_batches": statistics.median(lanes), "stall_share": statistics.mean(stalls)}

    async def _one(self, row: int, command: Event) -> Completion:
        assert self.engine is not None
        prompt = np.random.default_rng(row).integers(0, VOCABULARY, command["prompt"])
        request = GenerateRequest(tuple(map(int, prompt)), command["tokens"], 1.0, row, ())
        return await self.engine.generate(request)

    def _sent(self) -> int:
        return self.ring.stats().bytes_out if self.ring else 0


def lanes_of(engine: Engine | None) -> Any:
    """Return the micro-batch statistics of a head that makes its own; None for other engines."""
    lanes = getattr(engine, "lanes", None)
    return lanes() if lanes is not None else None


def keep(path: Path, done: Sequence[Completion]) -> None:
    """Write tokens and log-probabilities of completions of equal length."""
    drawn = {
        "tokens": [one.token_ids for one in done],
        "logprobs": [one.logprobs for one in done],
    }
    path.write_text(json.dumps(drawn))


def digest_of(done: list[Completion]) -> str:
    """Return a digest of all tokens, to check that two ways of computing draw the same ones."""
    return hashlib.sha256(repr([one.token_ids for one in done]).encode()).hexdigest()[:16]


async def run(rank: int) -> None:
    """Run stage `rank` of the plans that are sent."""
    share_python()  # as a node does
    wire = Wire()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="prl") as home:
        await Member(rank, Path(home), wire).serve()


def main() -> None:
    """Run until stdin ends."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    arguments: list[Any] = sys.argv[1:]
    asyncio.run(run(int(arguments[0])))


if __name__ == "__main__":
    main()
