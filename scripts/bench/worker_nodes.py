"""The two nodes of worker.py: a trainer without training, and an observed worker.

    python worker_nodes.py trainer|worker CONFIG_JSON      (commands: children.py)

Both are the real nodes over iroh. The trainer's parts that would take the engine's GPU are replaced: the
backend (weights stay as they are, though every batch makes a version) and the auditor (always content). The
worker is unchanged, except that its engine is wrapped in an observer that counts.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from primerl.node.app import rundir
from primerl.node.app.daemon import load_key
from primerl.node.app.factories import Factories
from primerl.node.app.trainer import TrainerNode
from primerl.node.app.worker import WorkerNode
from primerl.node.config.run import EngineConfig, JoinConfig, RunConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, EngineStats, GenerateRequest
from primerl.node.models.model_files import read_state
from primerl.node.ops.logs import configure
from primerl.node.storage.ledger import Ledger
from primerl.node.training.backend import Snapshot, StepMetrics, TrainBatch
from primerl.node.verification.auditor import AuditItem, Measured, Unreadable
from primerl.node.weights.state import Changed, State
from primerl.protocol.manifests import RunManifest
from primerl.scripts.bench.children import Event, Wire, cpu_by_process, cpu_seconds
from primerl.tests.support.counting_backend import CountingBackend
from primerl.tests.support.scripted_engine import ScriptedEngine

PROMPTS = 512
"""Number of distinct prompts that are kept for bare vLLM."""
LOOK_S = 0.02
"""Interval of samples of the event loop's thread; sampling costs next to nothing, so it is always on."""
IDLE = frozenset({"select", "poll", "epoll", "_run_once"})
PACKAGE = f"{os.sep}primerl{os.sep}"


class Sampler:
    """Sampling profiler of the thread that created it, since the last read()."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._found: Counter[str] = Counter()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def read(self, most: int = 12) -> dict[str, float]:
        """Return the share of time per function of our own code, or of a library; `idle` is waiting."""
        found, self._found = self._found, Counter()
        total = max(1, sum(found.values()))
        return {name: round(count / total, 4) for name, count in found.most_common(most)}

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
            if frame is not None:
                self._found[place(frame)] += 1


def place(frame: FrameType) -> str:
    """Return the innermost function of ours in a stack, else the innermost of all."""
    if frame.f_code.co_name in IDLE:
        return "idle"
    inner: FrameType | None = frame
    while inner is not None:
        path = inner.f_code.co_filename
        if PACKAGE in path or f"{os.sep}node{os.sep}" in path:
            return f"{Path(path).stem}.{inner.f_code.co_name}"
        inner = inner.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


class IdleBackend(CountingBackend):
    """TrainBackend that learns nothing: each step leaves the weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: State = {}
        self._base: State | None = None

    async def start(self, model_dir: Path) -> None:
        """Read the weights."""
        await super().start(model_dir)
        self._weights, self._base = await asyncio.to_thread(read_state, model_dir), None

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Do nothing."""
        return StepMetrics({"optim/skipped": 0.0})

    async def state(self) -> State:
        """Return the weights."""
        return self._weights

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """Return the weights, with no changes since the last snapshot."""
        base, self._base = self._base, self._weights
        found = asyncio.get_running_loop().create_future()
        found.set_result(Snapshot(self._weights, base))
        return found


class ContentAuditor:
    """Auditor that confirms every branch: audits are the trainer's load, not the worker's."""

    loading_s = 0.0

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """Do nothing."""

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """Return measurements without any difference."""
        return [Measured(0, 0, len(item.logprobs), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for item in items]

    async def close(self) -> None:
        """Do nothing: nothing is held."""


class WatchedLedger(Ledger):
    """A ledger that reports the first submission."""

    wire: Wire | None = None

    def receive(self, *arguments: Any, **more: Any) -> Any:
        """See Ledger.receive()."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.tell("arrived")
        return super().receive(*arguments, **more)


class WatchedEngine:
    """An Engine that counts another engine's work, and reports the first of each of its actions."""

    def __init__(self, engine: Engine, wire: Wire) -> None:
        self._engine, self._wire = engine, wire
        self._told: set[str] = set()
        self._changed, self.filled = time.perf_counter(), 0.0
        self.tokens = self.completions = self.inflight = self.updates = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.prompts: dict[tuple[int, ...], None] = {}
        self.request: GenerateRequest | None = None

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._engine.policy_version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine.start()."""
        self._wire.tell("joined")
        await self._engine.start(model_dir, fingerprint=fingerprint)
        self._wire.tell("engine")

    async def load(self, version: int, state: State) -> None:
        """See Engine.load()."""
        self._first("fetched")
        await self._engine.load(version, state)
        self._first("loaded")

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine.update()."""
        self.updates += 1
        await self._engine.update(version, state, changed)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine.generate()."""
        await self.gate.wait()
        self._first("leased")
        self.request = request
        if len(self.prompts) < PROMPTS:
            self.prompts[request.prompt] = None
        self.note(1)
        try:
            completion = await self._engine.generate(request)
        finally:
            self.note(-1)
        self._first("generated")
        self.tokens += len(completion.token_ids)
        self.completions += 1
        return completion

    def stats(self) -> EngineStats:
        """See Engine.stats()."""
        return self._engine.stats()

    async def close(self) -> None:
        """See Engine.close()."""
        await self._engine.close()

    def note(self, change: int = 0) -> None:
        """Change the number in flight by `change`; `filled` is that number integrated over time."""
        now = time.perf_counter()
        self.filled += self.inflight * (now - self._changed)
        self._changed, self.inflight = now, self.inflight + change

    def _first(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._wire.tell(name)


async def trainer(wire: Wire, settings: dict[str, Any]) -> None:
    """Run a trainer that hands out leases until its parent ends it."""
    config = RunConfig.model_validate(settings)
    directory = rundir.prepare(config)
    configure(config.log, directory / "logs" / "trainer.jsonl")
    data_dir = directory / "trainer"
    backend = IdleBackend()

    def ledger(path: Path, *, fsync: bool) -> Ledger:
        found = WatchedLedger(path, fsync=fsync)
        found.wire = wire
        return found

    factories = Factories(
        backend=lambda config: backend,
        auditor=lambda config, timeout_s: ContentAuditor(),
        evaluation_engine=lambda config: ScriptedEngine(),
        ledger=ledger,
    )
    node = TrainerNode(
        config,
        load_key(data_dir),
        data_dir,
        lambda text: wire.tell("ticket", ticket=text),
        factories,
    )

    sampler = Sampler()

    async def where(command: Event) -> Event:
        return {"does": sampler.read(), "processes": cpu_by_process(os.getpid())}

    await until_told(wire, node, {"where": where})


async def worker(wire: Wire, settings: dict[str, Any]) -> None:
    """Run a worker until its parent ends it."""
    config = JoinConfig.model_validate(settings)
    data_dir = Path(config.data_dir or ".")
    configure(config.log, data_dir / "logs" / "worker.jsonl")
    engines: list[WatchedEngine] = []

    def watched(engine: EngineConfig) -> Engine:
        engines.append(WatchedEngine(build_engine(engine), wire))
        return engines[-1]

    node = WorkerNode(config, load_key(data_dir), data_dir, Factories(engine=watched))
    sampler = Sampler()

    async def count(command: Event) -> Event:
        one = engines[0]
        one.note()
        return {
            "filled": one.filled,
            # includes unfinished replies if the engine reports them
            "tokens": one.stats().generated_tokens or one.tokens,
            "completions": one.completions,
            "inflight": one.inflight,
            "updates": one.updates,
            "clock": time.perf_counter(),
            "own_cpu": time.process_time(),
            "cpu": cpu_seconds(os.getpid()),
        }

    async def where(command: Event) -> Event:
        return {"does": sampler.read(), "processes": cpu_by_process(os.getpid())}

    async def hold(command: Event) -> Event:
        engines[0].gate.clear()
        return {}

    async def go(command: Event) -> Event:
        engines[0].gate.set()
        return {}

    async def asked(command: Event) -> Event:
        one = engines[0].request
        assert one is not None
        return {
            "prompts": [list(prompt) for prompt in engines[0].prompts],
            "max_tokens": one.max_tokens,
            "temperature": one.temperature,
            "stop_token_ids": list(one.stop_token_ids),
        }

    wire.tell("up")
    await until_told(
        wire, node, {"count": count, "asked": asked, "where": where, "hold": hold, "go": go}
    )


async def until_told(
    wire: Wire, node: TrainerNode | WorkerNode, handlers: Mapping[str, Any]
) -> None:
    """Run a node until the parent sends `stop` or ends."""
    running = asyncio.create_task(node.run())
    serving = asyncio.create_task(wire.serve(handlers))
    await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    if not running.done():
        await node.request_stop()
    await running


def main() -> None:
    """Run the node named by the first argument."""
    wire = Wire()
    work = {"trainer": trainer, "worker": worker}[sys.argv[1]]
    asyncio.run(work(wire, json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
