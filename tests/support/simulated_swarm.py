"""A swarm of the product's own nodes in virtual time, on lines as people have them, which notes what came when.

Protocol, trust, leases, audits, gossip, storage and the exchange of chunks are the product's. Engines, the
learner and the environment are fakes that take as long as they are told to. Bytes are real, as the product
decides by rates.
"""

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from support.access_lines import MBIT_S, AccessLines, Line
from support.memory_network import MemoryNetwork
from support.shared_bytes import shared_bytes
from support.swarm import Running, Swarm, make_model
from support.witness import Fakes, WitnessBackend, WitnessEngine

from primerl.crypto.hashing import digest
from primerl.node.ops.metrics import EventLoopMonitor
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.workers import WorkerRegistry
from primerl.node.training.backend import StepMetrics, TrainBatch
from primerl.node.weights.payload import CHUNK_SHARE
from primerl.node.weights.state import Changed, State, Tensor

WINDOW = 1024 * 1024
"""Bytes that one direction of a stream holds under way and unread."""
PACKET = 64 * 1024
"""26 ms on a line of 20 Mbit/s; smaller ones take more events, and change little."""
SMALL = 1200
"""Bytes of a datagram of QUIC."""
MESH = 4
"""Earlier nodes that a node gossips with: twice as many on average. GossipSub aims at 6, and allows 12."""
LOOK_S = 0.05
JOIN_S = 20.0


@dataclass(frozen=True)
class Home:
    """What is simulated: equal lines with a round trip of 20 to 80 ms between two nodes."""

    up_mbit: float = 20.0
    down_mbit: float = 100.0
    trainer_up_mbit: float = 20.0
    version_bytes: int = 8_000_000
    """Of a delta."""
    step_s: float = 30.0
    """Of the learner."""
    token_s: float = 0.5
    """Of an engine; a rollout has four at most."""
    seed: int = 1

    def lines(self, trainer: bytes) -> AccessLines:
        """Make the lines."""
        chance = random.Random(self.seed)

        def line(node: bytes) -> Line:
            up = self.trainer_up_mbit if node == trainer else self.up_mbit
            return Line(up * MBIT_S, self.down_mbit * MBIT_S, chance.uniform(0.005, 0.020))

        return AccessLines(line, PACKET, SMALL)

    def ideal_s(self, peers: int) -> float:
        """Return the least time until all have a version, if trainer and peers have the same line up.

        M parts reach N peers in M + floor(log2 N) times that of a part (Mundinger, Weber and Weiss, Optimal
        scheduling of peer-to-peer file dissemination, Journal of Scheduling 2008).
        """
        whole = self.version_bytes / (self.up_mbit * MBIT_S)
        return whole * (1 + math.floor(math.log2(max(peers, 1))) / CHUNK_SHARE)


def small_digest(state: State) -> bytes:
    """Name a state by its small tensor, which tells all versions apart."""
    return digest(state["history.weight"].data.tobytes())


class SimulatedEngine(WitnessEngine):
    """An engine that keeps no weights, and notes when it had each version."""

    def __init__(self, fakes: Fakes, name: str, had: Callable[[int], None]) -> None:
        super().__init__(fakes, name)
        self._had = had

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        self._version, self._state = version, small_digest(state)
        self._had(version)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        del changed
        await self.load(version, state)


class SimulatedBackend(WitnessBackend):
    """A learner whose steps take a while. Its first state has no content, so that all may join at once."""

    def __init__(self, fakes: Fakes, home: Home) -> None:
        super().__init__(fakes)
        self._home = home

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """See TrainBackend."""
        await asyncio.sleep(self._home.step_s)
        return await super().step(batch)

    def policy(self) -> State:
        """See CountingBackend."""
        state = super().policy()
        if self._step:
            return state
        more = state["more.weight"]
        return {**state, "more.weight": Tensor(more.dtype, more.shape, 0 * more.data)}


class TimedLedger(Ledger):
    """A trainer's ledger that notes when each version was published."""

    def __init__(self, path: Path, published: dict[int, float], *, fsync: bool) -> None:
        super().__init__(path, fsync=fsync)
        self._published = published

    def add_head(self, epoch: int, version: int, sealed: bytes, manifest: bytes) -> None:
        """See Ledger."""
        super().add_head(epoch, version, sealed, manifest)
        self._published.setdefault(version, asyncio.get_running_loop().time())


class SimulatedSwarm(Swarm):
    """A trainer and workers at home."""

    def __init__(self, directory: Path, home: Home, **overrides: Any) -> None:
        async def pause() -> None:
            await asyncio.sleep(home.token_s)

        self.home = home
        self._patched = ExitStack()
        self.published: dict[int, float] = {}
        """When each version was published, in seconds of the loop."""
        self.had: defaultdict[int, dict[str, float]] = defaultdict(dict)
        """When each worker had each version."""
        self.may_end: set[str] = set()
        """Workers whose end is no failure."""

        def ledger(path: Path, *, fsync: bool = True) -> Ledger:
            return TimedLedger(path, self.published, fsync=fsync)

        fakes = Fakes(pause=pause, words=home.version_bytes // 2, named=small_digest, last_step=0)
        super().__init__(
            directory,
            make_model(directory / "model"),
            fakes=fakes,
            gossip=True,
            trainer_ledger=ledger,
            max_steps=1_000_000,
            **overrides,
        )
        self.lines = home.lines(self.trainer.node_id)
        self.network = MemoryNetwork(lines=self.lines, mesh=MESH)
        self.network.window = WINDOW

    async def __aenter__(self) -> Self:
        # no thread watches for stalls: it would see time leap
        self._patched.enter_context(patch.object(EventLoopMonitor, "run", _look_away))
        self._patched.enter_context(shared_bytes())
        return await super().__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self._patched.close()

    @property
    def registry(self) -> WorkerRegistry:
        """The trainer's knowledge of its workers."""
        assert self.node is not None
        assert self.node.trainer_role is not None
        return self.node.trainer_role.scheduler.registry

    def join(
        self, name: str, *, make_engine: "type[SimulatedEngine] | None" = None, **overrides: Any
    ) -> Running:
        """Start a worker."""
        engine = (make_engine or SimulatedEngine)(self.fakes, name, partial(self._note, name))
        return self.add_worker(name, engine=engine, **overrides)

    def _note(self, name: str, version: int) -> None:
        self.had[version].setdefault(name, asyncio.get_running_loop().time())

    def make_backend(self) -> WitnessBackend:
        """See Swarm."""
        return SimulatedBackend(self.fakes, self.home)

    async def join_all(self, peers: int, hidden: int = 0) -> None:
        """Start that many workers within JOIN_S; once each has a version, let the learner begin.

        The last `hidden` of them do not share their address.
        """
        for number in range(peers):
            shares = number < peers - hidden
            self.join(f"w{number}", network={"share_address": shares})
            await asyncio.sleep(JOIN_S / peers)
        while len(set().union(*self.had.values())) < peers:
            self._raise_failures()
            await asyncio.sleep(LOOK_S)
        self.fakes.go.set()

    async def until_published(self, version: int) -> None:
        """Wait until a version is published."""
        while version not in self.published:
            self._raise_failures()
            await asyncio.sleep(LOOK_S)

    async def until_covered(self, version: int, names: Sequence[str], timeout_s: float) -> bool:
        """Wait until these workers have a version or a later one; False after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(self.reached(name, version) == math.inf for name in names):
                    self._raise_failures()
                    await asyncio.sleep(LOOK_S)
                return True
        return False

    def reached(self, name: str, version: int) -> float:
        """Return when a worker had a version or a later one; infinite if it has not."""
        times = [had[name] for later, had in self.had.items() if later >= version and name in had]
        return min(times, default=math.inf)

    def coverage(self, version: int, names: Sequence[str]) -> list[float]:
        """List the seconds from the publication of a version until each worker had it, sorted."""
        began = self.published[version]
        return sorted(self.reached(name, version) - began for name in names)

    def _raise_failures(self) -> None:
        workers = (one for name, one in self.workers.items() if name not in self.may_end)
        for running in (self.trainer, *workers):
            if running.task is not None and running.task.done():
                running.task.result()


async def _look_away(_: EventLoopMonitor) -> None:
    """Watch nothing."""
    await asyncio.Event().wait()


def share_at(seconds: Sequence[float], share: float) -> float:
    """Return the time after which that share of the workers had it; `seconds` sorted."""
    return seconds[max(0, math.ceil(share * len(seconds)) - 1)]
