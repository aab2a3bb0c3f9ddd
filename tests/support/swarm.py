"""A swarm in one process: a real trainer and real workers over the memory transport, fakes at the seams.

Tests observe it from outside: weights given to engines, batches trained, files on disk.
"""

import asyncio
import json
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import pytest
from support.counting_environment import STOP, CountingEnvironment
from support.drifting_backend import DriftingBackend
from support.memory_network import MemoryNetwork, MemoryTransport
from support.witness import Fakes, WitnessAuditor, WitnessBackend, WitnessEngine

from primerl.crypto.keys import SecretKey
from primerl.node.app import rundir
from primerl.node.app.factories import Factories, MakeLedger, NodeTimeouts
from primerl.node.app.learner import LearnerNode
from primerl.node.app.standby import OWN_CONFIG, StandbyNode
from primerl.node.app.trainer import Farewell, TrainerNode
from primerl.node.app.worker import WorkerNode
from primerl.node.config.run import (
    EngineConfig,
    EnvironmentConfig,
    JoinConfig,
    NetworkConfig,
    RunConfig,
)
from primerl.node.environments.environment import Environment
from primerl.node.inference.engine import Engine
from primerl.node.ops import control
from primerl.node.p2p.discovery import Discovery
from primerl.node.p2p.transport import Transport
from primerl.node.storage.ledger import Ledger
from primerl.node.verification.auditor import Auditor
from primerl.node.verification.envelope import Reader
from primerl.node.weights.checkpoint import write_checkpoint
from primerl.node.weights.state import Tensor
from primerl.protocol import tickets
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.leaders import LeaderList, certify, without
from primerl.protocol.manifests import PolicyHead, Ticket

T = TypeVar("T")

VOCABULARY = 96
DEFAULT_FAREWELL = Farewell()
RUN = "r"
"""Short: a control socket's path has little room."""

CONFIG: dict[str, Any] = {
    "name": RUN,
    "max_steps": 3,
    "fsync": False,
    "network": {"libp2p": False},
    "environment": {"id": "reverse-text"},  # by name; a CountingEnvironment is played
    "sampling": {"max_tokens": 4},
    "rollouts": {
        "group_size": 4,
        "groups_per_batch": 4,
        "groups_per_lease": 2,
        "max_off_policy_steps": 2,
        "lease_timeout_s": 30.0,
        "batch_timeout_s": 30.0,
    },
    "training": {"seq_len": 64},
    "verification": {"audit_rate": 1.0},
    "evaluation": {"prompts": 0},
}


def make_model(directory: Path) -> Path:
    """Make a model directory with all contract files, a tokenizer that ends with STOP, weights."""
    from tokenizers import Tokenizer, models

    directory.mkdir(parents=True, exist_ok=True)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{STOP}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = {"model_type": "qwen3", "vocab_size": VOCABULARY, "eos_token_id": STOP}
    (directory / "config.json").write_text(json.dumps(shape))
    weights = {"history.weight": Tensor("BF16", (4,), np.arange(4, dtype="<u2"))}
    write_checkpoint(directory / "model.safetensors", weights)
    return directory


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `base`, section by section."""
    result = dict(base)
    for name, value in changes.items():
        nested = isinstance(value, dict) and name in result
        result[name] = merged(result[name], value) if nested else value
    return result


async def side_by_side(case: Callable[[T], Awaitable[None]], cases: Sequence[T]) -> None:
    """Run all cases concurrently, as they mostly wait; name the one that fails."""

    async def named(one: T) -> None:
        try:
            await case(one)
        except BaseException as error:
            error.add_note(f"in the case {one!r}")
            raise

    async with asyncio.TaskGroup() as tasks:
        for one in cases:
            tasks.create_task(named(one))


def shaky(seed: int, longest_s: float) -> Callable[[bytes, bytes], Awaitable[None]]:
    """Make a network delay with random times from a seed."""
    chance = random.Random(seed)

    async def delay(source: bytes, target: bytes) -> None:
        await asyncio.sleep(chance.random() * longest_s)

    return delay


@dataclass
class Running:
    """A node of the swarm and the task that runs it."""

    key: SecretKey
    data_dir: Path
    engine: WitnessEngine | None = None
    task: "asyncio.Task[None] | None" = None
    node: WorkerNode | None = None
    """Of a worker, the newest."""
    stop: Callable[[], Awaitable[Any]] | None = None
    copied: bool = False
    """Whether it is a copy of another worker's directory, elsewhere."""
    public: str = ""
    """IP address that the trainer sees of it."""
    transport: MemoryTransport | None = None

    @property
    def node_id(self) -> bytes:
        """Its id."""
        return self.key.node_id

    async def ended(self, timeout: float = 100.0) -> None:
        """Wait until the node ends by itself; raise its error."""
        assert self.task is not None
        async with asyncio.timeout(timeout):
            await asyncio.shield(self.task)

    async def status(self) -> dict[str, Any]:
        """Return the output of `primerl-node status --json`."""
        return await asyncio.to_thread(control.ask, self.data_dir, "status")

    async def peers(self) -> list[dict[str, Any]]:
        """Return the output of `primerl-node peers --json`."""
        return await asyncio.to_thread(control.ask, self.data_dir, "peers")


class Swarm:
    """A trainer and its workers. Nodes are stopped when the context ends."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        network: MemoryNetwork | None = None,
        fakes: Fakes | None = None,
        gossip: bool = False,
        at_home: bool = True,
        trainer_ledger: MakeLedger = Ledger,
        farewell: Farewell = DEFAULT_FAREWELL,
        **overrides: Any,
    ) -> None:
        self.directory = directory
        self.network = network or MemoryNetwork()
        self.fakes = fakes or Fakes()
        self.gossip = gossip
        self._at_home = at_home
        self.ticket = ""
        self.workers: dict[str, Running] = {}
        self.standbys: dict[str, StandbyNode] = {}
        self.learning: dict[str, DriftingBackend] = {}
        """The newest backend of each learner."""
        self.root: SecretKey | None = None
        """The run's root key; None: that of its trainer."""
        self.listed: LeaderList | None = None
        """The newest list of leaders that the root signed."""
        self.backends: list[WitnessBackend] = []
        self.reader: Reader | None = None
        """Reads texts in float32, if there is an envelope."""
        """One for every start of the trainer."""
        self.settings = merged(CONFIG, overrides) | {"output_dir": directory}
        if "environments" in overrides:
            del self.settings["environment"]
        self.environments: dict[str, dict[str, Environment]] = {}
        """Environments that a worker has in place of counting ones, by its name and their ids."""
        self.played: list[EnvironmentConfig] = []
        """Options of all environments that were made, on whichever node."""
        self.settings["model"] = {"name": str(model)}
        self.trainer = Running(SecretKey.from_seed(bytes(31) + b"t"), directory / RUN / "trainer")
        self._trainer_ledger = trainer_ledger
        self._farewell = farewell
        self.timeouts = NodeTimeouts(connect_s=2.0)
        self.node: TrainerNode | None = None
        self._ticketed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for running in [*self.workers.values(), self.trainer]:
            await self._end(running)

    # -- the trainer -----------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """The directory of the run, where its trainer is."""
        return self.trainer.data_dir.parent

    @property
    def backend(self) -> WitnessBackend:
        """The backend of the trainer that runs now."""
        return self.backends[-1]

    def make_backend(self) -> WitnessBackend:
        """Make the backend of a trainer that starts."""
        learns = self.settings.get("learners")
        return DriftingBackend(self.fakes) if learns else WitnessBackend(self.fakes)

    def read_ticket(self) -> Ticket:
        """Read and open the ticket."""
        return tickets.read(self.ticket, now=int(time.time()))

    async def start_trainer(
        self, *, resume: bool | Mapping[str, Any] = False, **overrides: Any
    ) -> None:
        """Start the trainer and wait for its ticket."""
        self.settings = merged(self.settings, overrides)
        config = RunConfig.model_validate({**self.settings, "resume": resume})
        rundir.prepare(config)
        self._ticketed.clear()
        node = TrainerNode(
            config,
            self.trainer.key,
            self.trainer.data_dir,
            self._announced,
            self._factories(self.trainer),
        )
        self.node = node
        node.farewell = self._farewell
        self.trainer.stop = node.request_stop
        self.trainer.task = asyncio.create_task(node.run())
        waiting = asyncio.create_task(self._ticketed.wait())
        await asyncio.wait(
            {self.trainer.task, waiting}, timeout=100.0, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        if self.trainer.task.done():
            self.trainer.task.result()
        assert self.ticket

    async def stop_trainer(self) -> None:
        """Stop the trainer as an operator does."""
        assert self.trainer.stop is not None
        await self.trainer.stop()
        await self.trainer.ended()

    async def crash_trainer(self, *, resume_points: bool = True) -> None:
        """Kill the trainer: it sends nothing more, and only what is on disk now remains.

        Without `resume_points` those of the steps since the last checkpoint are lost.
        """
        self.network.drop(self.trainer.node_id)
        image = self.directory / "image"
        with suppress(shutil.Error):  # a directory that a thread removes just now is half there
            shutil.copytree(
                self.run_dir, image, copy_function=_copy, ignore=shutil.ignore_patterns("*.sock")
            )
        await self._end(self.trainer)
        shutil.rmtree(self.run_dir)
        image.rename(self.run_dir)
        if not resume_points:
            for point in self.run_dir.glob("checkpoints/*.resume"):
                point.unlink()

    async def lose_disk(self) -> None:
        """Kill the trainer, and remove all that it wrote."""
        self.network.drop(self.trainer.node_id)
        await self._end(self.trainer)
        while self.run_dir.exists():  # a thread may still remove a file of its own
            shutil.rmtree(self.run_dir, ignore_errors=True)

    async def wait_step(self, step: int, timeout: float = 100.0) -> None:
        """Wait until version `step` is published; raise the trainer's error if it ends before."""
        async with asyncio.timeout(timeout):
            while True:
                assert self.trainer.task is not None
                if self.trainer.task.done():
                    return self.trainer.task.result()
                if (await self.trainer.status())["version"] >= step:
                    return
                await asyncio.sleep(0.05)  # a status costs milliseconds

    async def finished(self, timeout: float = 100.0) -> dict[str, Any]:
        """Wait for the end of the run; return its summary."""
        await self.trainer.ended(timeout)
        return json.loads((self.run_dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        text = (self.run_dir / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def heads(self) -> dict[tuple[int, int], PolicyHead]:
        """Return all signed heads by epoch and version; the trainer must not be running."""
        ledger = Ledger(self.trainer.data_dir / "ledger.db")
        try:
            opened = [
                unseal(sealed, Purpose.HEAD, PolicyHead, now=0).body for sealed, _ in ledger.heads()
            ]
        finally:
            ledger.close()
        return {(head.term, head.version): head for head in opened}

    # -- workers ---------------------------------------------------------------------------------

    def add_worker(
        self,
        name: str,
        *,
        engine: WitnessEngine | None = None,
        ledger: MakeLedger = Ledger,
        engine_section: Mapping[str, Any] | None = None,
        copy_of: str = "",
        public: str = "",
        **overrides: Any,
    ) -> Running:
        """Start a worker, or start one again in its old directory.

        With `copy_of` it has the key of that worker, at another place. `public` is the IP address that the
        trainer sees.
        """
        known = self.workers.get(name)
        worker = known or Running(key_of(copy_of or name), self.directory / name)
        worker.copied, worker.public = bool(copy_of), public
        worker.engine = engine or WitnessEngine(self.fakes, name)
        base = {"ticket": self.ticket, "network": CONFIG["network"], "fsync": False, "wait": True}
        base["engine"] = dict(engine_section or {})
        config = JoinConfig.model_validate(merged(base, overrides))
        factories = self._factories(worker, ledger)
        node = WorkerNode(config, worker.key, worker.data_dir, factories)
        worker.node, worker.stop = node, node.request_stop
        worker.task = asyncio.create_task(node.run())
        self.workers[name] = worker
        return worker

    async def certify(self, *names: str, lease_s: int = 60) -> None:
        """Let these standbys lead the run after its trainer, which is told so."""
        ids = [key_of(name).node_id for name in names]
        self.listed = LeaderList(1, (self.trainer.node_id, *ids), lease_s)
        await self._publish_leaders(self.trainer)

    async def revoke(self, node: Running, at: Running) -> None:
        """Let a node lead no more; `at` is told first, and nodes that are cut off do not hear of it."""
        assert self.listed is not None
        self.listed = without(self.listed, [node.node_id])
        await self._publish_leaders(at)

    async def _publish_leaders(self, at: Running) -> None:
        assert self.listed is not None
        data_dir = at.data_dir
        known = await asyncio.to_thread(control.ask, data_dir, "leaders")
        sealed = certify(
            self.root or self.trainer.key, bytes.fromhex(known["run"]), self.listed
        ).hex()
        await asyncio.to_thread(control.ask, data_dir, "leaders", sealed=sealed)

    async def succeed(self, name: str = "standby", timeout: float = 60.0) -> None:
        """Wait until a standby leads the run; it is the swarm's trainer from then on."""
        standby = self.workers.pop(name)
        await standby.ended(timeout)
        node = self.standbys[name]
        assert node.leads, node.farewell
        self.trainer = Running(standby.key, node.copy / "trainer")
        own = json.loads((standby.data_dir / OWN_CONFIG).read_text())
        await self.start_trainer(resume=True, **own)

    def add_standby(self, name: str = "standby") -> tuple[StandbyNode, Running]:
        """Start a standby."""
        running = Running(key_of(name), self.directory / name)
        config = JoinConfig.model_validate(
            {
                "role": "standby",
                "ticket": self.ticket,
                "network": CONFIG["network"],
                "fsync": False,
                "wait": True,
            }
        )
        node = StandbyNode(config, running.key, running.data_dir, self._factories(running))
        running.stop = node.request_stop
        running.task = asyncio.create_task(node.run())
        self.workers[name], self.standbys[name] = running, node
        return node, running

    def add_learner(self, name: str, factor: float = 1.0) -> tuple[LearnerNode, Running]:
        """Start a learner; what it learns at each step is multiplied by `factor`."""
        running = Running(key_of(name), self.directory / name)
        config = JoinConfig.model_validate(
            {
                "role": "learner",
                "ticket": self.ticket,
                "network": CONFIG["network"],
                "fsync": False,
                "wait": True,
            }
        )

        def make(_config: object, _settings: object) -> DriftingBackend:
            self.learning[name] = DriftingBackend(self.fakes, factor)
            return self.learning[name]

        factories = replace(self._factories(running), learner=make)
        node = LearnerNode(config, running.key, running.data_dir, factories)
        running.stop = node.request_stop
        running.task = asyncio.create_task(node.run())
        self.workers[name] = running
        return node, running

    async def until_row(
        self, worker: Running, holds: Callable[[dict[str, Any]], bool], timeout: float
    ) -> dict[str, Any]:
        """Wait until the trainer's row of a node satisfies a condition."""
        return await self.until_row_of(worker.node_id, holds, timeout)

    async def until_row_of(
        self, node: bytes, holds: Callable[[dict[str, Any]], bool], timeout: float
    ) -> dict[str, Any]:
        """Wait until the trainer's row of the node of that id satisfies a condition."""
        async with asyncio.timeout(timeout):
            while True:
                rows = {row["id"]: row for row in await self.trainer.peers()}
                row = rows.get(node.hex())
                if row is not None and holds(row):
                    return row
                await asyncio.sleep(0.02)

    async def stop_worker(self, name: str) -> None:
        """Stop a worker gracefully and wait for its end."""
        worker = self.workers[name]
        assert worker.stop is not None
        await worker.stop()
        await worker.ended()

    async def crash_worker(self, name: str) -> None:
        """Kill a worker without a goodbye."""
        self.network.drop(self.workers[name].node_id)
        await self._end(self.workers[name])

    async def kill_worker(self, name: str) -> None:
        """Kill a worker as `kill -9` does: the trainer hears nothing, not even that the connections end."""
        transport = self.workers[name].transport
        assert transport is not None
        transport.vanish()
        await self._end(self.workers[name])

    async def _end(self, running: Running) -> None:
        if running.task is None:
            return
        if running is self.trainer and self.node:
            self.node.farewell = Farewell(0.0, 0.0, 0.0)  # it is killed, and waits for nobody
            if role := self.node.trainer_role:
                role.stop_s = 0.0
        running.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await running.task
        running.task = None

    # -- factories -----------------------------------------------------------------------------------

    def _announced(self, ticket: str) -> None:
        self.ticket = ticket
        self._ticketed.set()

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        """The fakes of one node."""

        def backend(config: RunConfig) -> WitnessBackend:
            self.backends.append(self.make_backend())
            return self.backends[-1]

        def engine(config: EngineConfig) -> Engine:
            return running.engine or WitnessEngine(self.fakes, "evaluation")

        def evaluation_engine(config: EngineConfig) -> Engine:
            return WitnessEngine(self.fakes, "evaluation")

        def auditor(config: EngineConfig, timeout_s: float) -> Auditor:
            return WitnessAuditor(self.fakes)

        def environment(
            config: EnvironmentConfig, model: Path, seed: int, max_tokens: int, temperature: float
        ) -> Environment:
            self.played.append(config)
            own = self.environments.get(running.data_dir.name, {})
            if config.id in own:
                return own[config.id]
            name = "counting" if config.id == CONFIG["environment"]["id"] else config.id
            return CountingEnvironment(max_tokens=max_tokens, name=name)

        return Factories(
            transport=partial(self._transport, running),
            discovery=self._discovery,
            environment=environment,
            engine=engine,
            evaluation_engine=evaluation_engine,
            auditor=auditor,
            reader=lambda config, timeout_s: self.reader,
            backend=backend,
            ledger=ledger or self._trainer_ledger,
            timeouts=self.timeouts,
        )

    async def _transport(
        self, running: Running, network: NetworkConfig, key: SecretKey, port: int
    ) -> Transport:
        """A node that starts again has the address that it had before, like one on a fixed port."""
        away = running.copied or not self._at_home
        make = self.network.transport if away else partial(at_home, self.network)
        running.transport = make(key.node_id)
        running.transport.public = running.public
        return running.transport

    async def _discovery(
        self, network: NetworkConfig, key: SecretKey, run: bytes, bootstrap: Sequence[str]
    ) -> Discovery | None:
        if not self.gossip:
            return None
        discovery = self.network.discovery(key.node_id)
        await discovery.start(bootstrap)
        return discovery


def key_of(worker: str) -> SecretKey:
    """The key of the worker of that name."""
    return SecretKey.from_seed(worker.encode().rjust(32, b"\x00"))


def at_home(network: MemoryNetwork, node_id: bytes) -> MemoryTransport:
    """A transport at the one address that belongs to `node_id`."""
    transport = network.transport(node_id)
    network.forget(transport)
    transport.address = f"{node_id[:4].hex()}:4433"
    network.transports[transport.address] = transport
    return transport


def _copy(source: str, target: str) -> str:
    """Copy a file, unless a writer has just renamed it away."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)
    return target


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model directory for all runs."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", autouse=True)
def quiet_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep test nodes out of the user's node registry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield
