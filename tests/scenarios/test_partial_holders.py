"""Nodes that hold a share of the weights, as the stages of a pipeline do, in a swarm with others."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from support import weights_cases as cases
from support.bare_node import bare_services
from support.hostile import HostileTrainer
from support.swarm import CONFIG, Running, Swarm
from support.waiting import until
from support.witness import written

from primerl.crypto.keys import SecretKey
from primerl.node.app.peer_node import JoinedRun, PeerNode
from primerl.node.config.run import JoinConfig, WeightsConfig
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.inference.place import share_of
from primerl.node.p2p.serve import ChunkArrivals
from primerl.node.p2p.transport import Stream
from primerl.node.trainer.publisher import Publisher
from primerl.node.training.backend import Snapshot
from primerl.node.weights.payload import TensorShare, everything
from primerl.node.weights.state import Changed, State, Tensor
from primerl.node.worker.weight_sync import WeightSync, no_goal
from primerl.protocol.messages import ControlRequest, Hello
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage
from primerl.protocol.trust import AdmittedHead

Goal = Callable[[], AdmittedHead | None] | None

LONG = 1000
LAYERS = 8
WORDS = 200_000
"""Elements of a layer."""


@cache
def weights(version: int, rate: float) -> State:
    """Versions of a model of eight layers and an embedding that is drawn by, too; `rate` of it moves."""
    if not version:
        names = [f"model.layers.{n}.mlp.weight" for n in range(LAYERS)]
        body = {name: cases.like_a_model(n, WORDS) for n, name in enumerate(names)}
        return body | {
            "model.embed_tokens.weight": cases.like_a_model(90, WORDS // 2),
            "model.norm.weight": cases.like_a_model(91, 64),
        }
    return {
        name: moved(tensor, 100 * version + number, rate)
        for number, (name, tensor) in enumerate(weights(version - 1, rate).items())
    }


def moved(tensor: Tensor, seed: int, rate: float) -> Tensor:
    """Some of the elements one unit in the last place away."""
    chance = np.random.default_rng(seed)
    data = tensor.data.copy()
    chosen = chance.random(data.size) < rate
    data[chosen] += chance.choice(np.array([1, 0xFFFF], "<u2"), int(chosen.sum()))
    return Tensor(tensor.dtype, tensor.shape, data)


def stage(rank: int, stages: int) -> TensorShare:
    """What one of so many equal stages needs."""
    each = LAYERS // stages
    shape = PipelineShape("vllm", "1", "float32", 8, 64, 4, 64, 16, 256, 2)
    cuts = tuple(Stage(bytes([n]) * 32, n * each, (n + 1) * each) for n in range(stages))
    return share_of(PipelinePlan(bytes(32), 0, cuts, (), shape), rank)


@dataclass
class PartEngine:
    """An engine that takes what it is given at its word: what does not count as changed stays."""

    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    given: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    policy_version: int = -1

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        self.state = dict(state)
        self._took("load", version)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        assert state.keys() == self.state.keys() >= changed.keys()
        for name, positions in changed.items():
            self.state[name] = written(self.state[name], positions, state[name])
        self._took("update", version)

    def _took(self, how: str, version: int) -> None:
        self.given.append((how, version))
        self.policy_version = version

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """See Engine."""
        return EngineStats()

    async def close(self) -> None:
        """See Engine."""


class Holder(PeerNode):
    """A node that does nothing but hold weights."""

    def __init__(
        self, config: JoinConfig, running: Running, swarm: Swarm, share: TensorShare, goal: Goal
    ) -> None:
        super().__init__(config, running.key, running.data_dir, swarm._factories(running))  # pyright: ignore[reportPrivateUsage]
        self.engine = PartEngine()
        self.told: list[tuple[int, int, bool]] = []
        """What it says of itself to others."""
        self.ready = asyncio.Event()
        self._share, self._goal = share, goal

    @property
    def weight_sync(self) -> WeightSync:
        """What is tested."""
        assert self._weights is not None
        return self._weights

    def knows(self, order: tuple[int, int]) -> AdmittedHead | None:
        """A head, if it has heard of it."""
        return None if self._services is None else self._services.heads.trusted.heads.get(order)

    def has_fetched(self, version: int) -> bool:
        """Whether all that its share of the newest version, which is this one, takes is in its store."""
        assert self._services is not None
        return self.weight_sync.stored == (0, version)

    async def fetched(self) -> int:
        """Chunk bytes that it got from others."""
        return sum((await self._status()).chunk_bytes_by_source.values())

    async def _take_part(self, joined: JoinedRun) -> None:
        tell = joined.services.holdings.tell

        def noted(epoch: int, version: int, complete: bool) -> None:
            self.told.append((epoch, version, complete))
            tell(epoch, version, complete)

        joined.services.holdings.tell = noted  # type: ignore[method-assign]
        weight_sync = self._make_weights(joined, self.engine, share=self._share, goal=self._goal)
        self.ready.set()
        await self._follow_while(joined, weight_sync.run)


class Model(HostileTrainer):
    """A trainer that publishes weights() by the real publisher, and knows which nodes joined."""

    def __init__(self, swarm: Swarm, rate: float = 0.05) -> None:
        super().__init__(swarm)
        self.rate = rate

    async def __aenter__(self) -> "Model":
        await super().__aenter__()
        self.publisher = Publisher(
            bare_services(
                self.key,
                run_id=self.run,
                heads=self.book,
                store=self.store,
                arrivals=ChunkArrivals(),
                config=SimpleNamespace(weights=WeightsConfig()),
                keep_chunks={file.chunk.digest for file in self.documents.manifest.model.files},
            ),
            keep_states=1,
        )
        return self

    async def tell(self, *versions: int) -> None:
        """Publish these versions."""
        for version in versions:
            await self.publisher.publish(version, Snapshot(weights(version, self.rate)))

    def size(self, version: int, kind: str) -> int:
        """Bytes of an artifact."""
        manifest = self.book.manifest(self.book.trusted.heads[0, version])
        assert manifest is not None
        return sum(one.size for one in manifest.artifacts if one.kind == kind)

    def held(self, node: Holder, version: int, share: TensorShare) -> bool:
        """Whether the engine of `node` has its share of a version, and nothing else."""
        whole = weights(version, self.rate)
        return node.engine.policy_version == version and cases.same(
            node.engine.state, {name: whole[name] for name in share(list(whole))}
        )

    async def reply(self, peer: bytes, stream: Stream, request: ControlRequest) -> None:
        """Answer what a node says."""
        if isinstance(request, Hello):
            self.upstreams.append(request.record)
        await super().reply(peer, stream, request)


def add(swarm: Swarm, name: str, share: TensorShare = everything, *, goal: Goal = None) -> Holder:
    """Start a node."""
    running = Running(SecretKey.from_seed(name.encode().rjust(32, b"\0")), swarm.directory / name)
    settings = {"ticket": swarm.ticket, "network": CONFIG["network"], "fsync": False}
    node = Holder(JoinConfig.model_validate(settings), running, swarm, share, goal)
    running.task = asyncio.create_task(node.run())
    swarm.workers[name] = running
    return node


async def at(version: int, *nodes: Holder) -> None:
    """Wait until their engines have a version."""
    await until(lambda: all(node.engine.policy_version == version for node in nodes))


async def test_stages_fetch_and_hold_their_part_and_follow(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm, Model(swarm) as trainer:
        await trainer.tell(0)
        shares = {f"{rank}of{of}": stage(rank, of) for of in (2, 4) for rank in range(of)}
        nodes = {name: add(swarm, name, share) for name, share in shares.items()}
        whole = add(swarm, "whole")
        await at(0, whole, *nodes.values())
        fetched = {name: await node.fetched() for name, node in nodes.items()}
        await trainer.tell(1, 2)
        await at(2, whole, *nodes.values())
        for name, node in nodes.items():
            assert trainer.held(node, 2, shares[name])
            assert node.engine.given[0] == ("load", 0)
            assert {how for how, _ in node.engine.given[1:]} == {"update"}
            assert not any(complete for _, _, complete in node.told)
            assert node.told[-1][:2] == (0, 2)
            assert node.weight_sync.state_digest == whole.weight_sync.state_digest
        assert trainer.held(whole, 2, everything)
        assert whole.told[-1] == (0, 2, True)
        size = trainer.size(0, "anchor")
        for name, got in fetched.items():
            rank, of = int(name[0]), int(name[-1])
            table = WORDS // 2 if rank in (0, of - 1) else 0  # at both ends, as it is drawn by
            part = (LAYERS // of * WORDS + table) / (LAYERS * WORDS + WORDS // 2)
            assert part - 0.01 < got / size < part + 0.15, name


async def test_what_stages_hold_they_pass_on(tmp_path: Path, model_dir: Path) -> None:
    """The whole comes from two halves; the trainer has little to give."""
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm, Model(swarm) as trainer:
        await trainer.tell(0)
        halves = [add(swarm, f"half{rank}", stage(rank, 2)) for rank in range(2)]
        await at(0, *halves)
        whole = add(swarm, "whole")
        await at(0, whole)
        sources = (await whole._status()).chunk_bytes_by_source  # pyright: ignore[reportPrivateUsage]
        assert sources["trainer"] < 0.2 * sum(sources.values())
        assert trainer.held(whole, 0, everything)


async def test_a_node_that_stands_goes_exactly_where_it_is_asked_to(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm, Model(swarm) as trainer:
        await trainer.tell(0)
        share = stage(1, 2)
        node = add(swarm, "s1", share, goal=no_goal)
        await node.ready.wait()
        weight_sync = node.weight_sync
        await until(lambda: node.has_fetched(0))
        assert node.engine.given == []
        assert await weight_sync.reach((0, 0), 10.0)
        await trainer.tell(1, 2, 3)
        await until(lambda: node.has_fetched(3))
        assert weight_sync.order == (0, 0)
        ahead = await node.fetched()
        assert await weight_sync.reach((0, 2), 10.0)
        assert trainer.held(node, 2, share)
        assert not await weight_sync.reach((0, 1), 10.0), "there is no way back"
        assert await weight_sync.reach((0, 2), 10.0)
        assert trainer.held(node, 2, share)
        assert await weight_sync.reach((0, 3), 10.0)
        assert await node.fetched() == ahead, "all of it had been fetched ahead"
        assert node.engine.given == [("load", 0), ("update", 2), ("update", 3)]


async def test_an_unknown_version_is_refused_and_loaded_when_it_comes(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm, Model(swarm) as trainer:
        await trainer.tell(0)
        node = add(swarm, "s1", stage(1, 2), goal=no_goal)
        await node.ready.wait()
        assert not await node.weight_sync.reach((0, 1), 0.3)
        assert node.weight_sync.order == (0, -1)
        await trainer.tell(1)
        assert await node.weight_sync.reach((0, 1), 10.0)
        assert trainer.held(node, 1, stage(1, 2))


async def test_a_node_asked_for_an_unsigned_version_still_loads_signed_ones(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm, Model(swarm) as trainer:
        await trainer.tell(0)
        node = add(swarm, "s1", stage(1, 2), goal=no_goal)
        await node.ready.wait()
        assert not await node.weight_sync.reach((2**53, 2**53), 0.2)
        assert await node.weight_sync.reach((0, 0), 10.0)
        assert trainer.held(node, 0, stage(1, 2))


async def test_a_goal_is_not_passed(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm, Model(swarm) as trainer:
        await trainer.tell(0, 1, 2)
        node = add(swarm, "s1", stage(1, 2), goal=lambda: node.knows((0, 1)))
        await until(lambda: node.engine.policy_version == 1)
        await until(lambda: node.has_fetched(2))
        assert node.engine.given == [("load", 1)]
        assert trainer.held(node, 1, stage(1, 2))


async def test_a_stage_that_was_away_takes_its_part_of_the_deltas_that_it_missed(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        Model(swarm, rate=0.5) as trainer,
    ):
        await trainer.tell(0)
        share = stage(0, 2)
        node = add(swarm, "s0", share, goal=no_goal)
        await node.ready.wait()
        assert await node.weight_sync.reach((0, 0), 10.0)
        before = await node.fetched()
        swarm.network.partition(trainer.key.node_id, node.key.node_id)
        await trainer.tell(1, 2, 3, 4)
        swarm.network.heal(trainer.key.node_id, node.key.node_id)
        assert await node.weight_sync.reach((0, 4), 60.0)
        assert trainer.held(node, 4, share)
        got = await node.fetched() - before
        singles = sum(trainer.size(version, "delta") for version in range(1, 5))
        assert 0 < got < 0.9 * singles  # the first of two chunks each
