"""A model, offering nodes and a coordinator with a stopped clock, for tests of plans."""

from pathlib import Path
from typing import Any

from support.bare_node import bare_services

from primerl.crypto.keys import SecretKey
from primerl.node.memory_plan.planner import PlanLimits
from primerl.node.memory_plan.shape import ModelShape, read_shape
from primerl.node.memory_plan.stages import CutModel
from primerl.node.p2p.peers import PeerTable
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.pipeline_coordinator import PipelineCoordinator
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.manifests import PeerRecord
from primerl.protocol.messages import OfferStage, StagePlanned, StageWait
from primerl.protocol.pipelines import PipelinePlan, StageOffer, check_plan

RUN = b"r" * 32
TRAINER = SecretKey.from_seed(b"t" * 32)
NOW = 1_800_000_000

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
SHAPE: ModelShape = read_shape(CONFIG)
TERMS = PlanLimits("float32", hidden_size=64, max_model_len=256, max_sequences=8)
MODEL = CutModel(SHAPE, TERMS)
PART = 2_900_000
"""Bytes: half of the model, with room for sequences."""


def key(number: int) -> SecretKey:
    return SecretKey.from_seed(bytes([number]) * 32)


def node(number: int) -> bytes:
    return key(number).node_id


def offer(memory: int = PART, **more: Any) -> StageOffer:
    fields: dict[str, Any] = {"engine": "vllm", "software": "vllm 1", **more}
    return StageOffer(memory_bytes=memory, **fields)


def record(secret: SecretKey, run: bytes = RUN, *, shared: bool = True, now: int = NOW) -> bytes:
    body = PeerRecord(secret.node_id, "inference", "1", ("10.0.0.1:1",), (), shared)
    return seal(secret, Purpose.PEER, run, body, expires=now + 3600)


def opened(reply: StageWait | StagePlanned, now: int = NOW) -> PipelinePlan:
    """Open and check the plan of a reply, as a worker does."""
    assert isinstance(reply, StagePlanned), "there is no plan"
    trainer = TRAINER.node_id
    found = unseal(reply.plan, Purpose.PIPELINE, PipelinePlan, now=now, run=RUN, signer=trainer)
    check_plan(found.body)
    assert found.sequence == found.body.generation
    return found.body


class OfferNetwork:
    """A coordinator and offering nodes, all 10 ms apart."""

    def __init__(self, directory: Path, model: CutModel | None = MODEL) -> None:
        self.ledger = Ledger(directory / "ledger.db", fsync=False)
        self.peers = PeerTable()
        self.model = model
        self.now = 1000.0
        self.away = 0.0
        """Seconds by which the wall clock is ahead."""
        self.refused: dict[bytes, str] = {}
        self.heard: dict[bytes, float] = {}
        """When a node asked for anything last."""
        self.started = self.now
        self.coordinator = self.make()

    def make(self) -> PipelineCoordinator:
        return PipelineCoordinator(
            services=bare_services(TRAINER, run_id=RUN, ledger=self.ledger, peers=self.peers),
            model=self.model,
            heard=lambda node: self.heard.get(node, self.started),
            refused=lambda node: self.refused.get(node, ""),
            clock=lambda: self.now,
            wall=lambda: NOW + self.away,
        )

    def restart(self) -> None:
        """Restart the trainer's coordinator."""
        self.heard, self.started = {}, self.now
        self.coordinator = self.make()

    def know(self, number: int, *, shared: bool = True) -> None:
        """Register a node."""
        secret = key(number)
        body = PeerRecord(secret.node_id, "inference", "1", ("10.0.0.1:1",), (), shared)
        self.peers.learn(body, record(secret, shared=shared))

    def offer(
        self,
        number: int,
        memory: int = PART,
        *,
        of: PipelinePlan | None = None,
        lost: tuple[int, ...] = (),
        shared: bool = True,
        **more: Any,
    ) -> StageWait | StagePlanned:
        """Send one offer, within the plan `of`; may report failed stages."""
        self.know(number, shared=shared)
        self.heard[node(number)] = self.now
        ways = {node(other): 10.0 for other in range(1, 20) if other != number}
        said = offer(memory, **{"round_trips": ways, **more})
        message = OfferStage(said)
        if of is not None:
            gone = tuple(map(node, lost))
            message = OfferStage(said, of.group, of.generation, gone)
        return self.coordinator.offered(node(number), message)

    def later(self, seconds: float) -> None:
        self.now += seconds

    def gather(self, *numbers: int, **more: Any) -> PipelinePlan:
        """Have all these nodes offer until they are in a plan."""
        for number in numbers:
            self.offer(number, **more)
        self.later(4.0)
        for number in numbers:
            self.offer(number, **more)
        return self.plan(*numbers, **more)

    def plan(self, *numbers: int, **more: Any) -> PipelinePlan:
        """Return the one plan that these nodes, or some of them, are in."""
        replies = [self.offer(number, **more) for number in numbers]
        plans = [opened(reply) for reply in replies if isinstance(reply, StagePlanned)]
        assert plans
        assert all(one == plans[0] for one in plans)
        return plans[0]


def ranks(plan: PipelinePlan) -> list[int]:
    """The numbers of its nodes, in order."""
    numbers = {node(number): number for number in range(1, 20)}
    return [numbers[stage.node] for stage in plan.stages]
