"""Pipeline plans: which nodes hold which layers of one model, and may talk to each other about it.

A plan is sealed by the run's trainer. A node that it does not name, or names in another role, is refused; a
plan with a higher generation replaces the one before it in its group.
"""

from typing import Annotated, Literal

import msgspec

from ..crypto.hashing import Digest
from ..crypto.keys import NodeId
from .errors import Reason, RemoteProtocolError
from .manifests import MAX_NAME, Name, Version
from .version import MIB

MAX_STAGES = 16
MAX_SPARES = 8
MAX_MICRO_BATCHES = 64
MAX_LAYERS = 4096
Layers = Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
Encoding = Literal["raw", "fp8", "int8"]
"""How a hidden state travels: as it is, or 8 bits a number with one scale a token."""
GroupName = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Stage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node's part of the model: layers `first` to `end` - 1."""

    node: NodeId
    first: Layers
    end: Layers


class PipelineShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters that every stage must agree on; limits of messages follow from it."""

    engine: Literal["hf", "vllm"]
    """`vllm`; nodes of older releases may say `hf`, for which no plans are made any more."""
    software: Name
    """The engine's release, which decides the form of a step; every stage runs the same."""
    dtype: Literal["float32", "bfloat16"]
    hidden_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    max_model_len: Annotated[int, msgspec.Meta(ge=2, le=2**24)]
    max_sequences: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    """Most that are in flight in the whole pipeline."""
    max_step_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    """Most tokens of one micro-batch."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    kv_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    """Tokens whose keys and values every stage has room for, in its own layers."""
    micro_batches: Annotated[int, msgspec.Meta(ge=1, le=MAX_MICRO_BATCHES)]
    """Most that are in flight at a time; how many there are follows the round trip."""
    encoding: Encoding = "raw"
    fingerprint: Literal["", "projection"] = ""
    """Fingerprint of the states at every boundary; empty: none."""


class PipelinePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers of each stage. Stage 0 schedules; each sends to the next one, the last to stage 0."""

    group: Digest
    """Random: which pipeline this is."""
    generation: Version
    """Higher after every change of the stages; (group, generation) names one plan."""
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=2, max_length=MAX_STAGES)]
    spares: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MAX_SPARES)]
    """Nodes that may replace a lost stage in the next generation, best first; not to be talked to before."""
    shape: PipelineShape

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return self.stages[-1].end

    def rank_of(self, node: bytes) -> int | None:
        """Find the stage of `node`; None if it has none."""
        ranks = (rank for rank, stage in enumerate(self.stages) if stage.node == node)
        return next(ranks, None)

    def before(self, rank: int) -> bytes:
        """Return the node that sends to stage `rank`."""
        return self.stages[rank - 1].node

    def after(self, rank: int) -> bytes:
        """Return the node that stage `rank` sends to."""
        return self.stages[(rank + 1) % len(self.stages)].node


class StageOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The resources of a worker that cannot, or does not want to, hold the whole model."""

    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    """Memory for weights, keys and values."""
    engine: Literal["hf", "vllm"]
    """`vllm`; an offer of `hf`, from a node of an older release, is refused."""
    software: Name
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_STAGES)] = -1
    """The stage that its operator wants it to be; -1 leaves that to the trainer."""
    world_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_STAGES)] = 0
    """Number of stages; 0 leaves that to the trainer."""
    name: GroupName = ""
    """Only offers with the same name are put together."""
    encoding: Encoding = "raw"
    round_trips: Annotated[
        dict[NodeId, Annotated[float, msgspec.Meta(ge=0, le=60_000)]],
        msgspec.Meta(max_length=64),
    ] = {}
    """Milliseconds to others that offered, as measured."""
    bandwidths: Annotated[
        dict[NodeId, Annotated[float, msgspec.Meta(ge=0, le=1e15)]], msgspec.Meta(max_length=64)
    ] = {}
    """Bytes a second to them, as measured."""


def check_plan(plan: PipelinePlan) -> None:
    """Raise RemoteProtocolError (MALFORMED) for an inconsistent plan, even one that is signed."""
    nodes = [stage.node for stage in plan.stages]
    if len({*nodes, *plan.spares}) != len(nodes) + len(plan.spares):
        raise RemoteProtocolError(Reason.MALFORMED, "a plan names a node twice")
    at = 0
    for stage in plan.stages:
        if stage.first != at or stage.end <= stage.first:
            raise RemoteProtocolError(
                Reason.MALFORMED, "the stages' layers do not follow each other"
            )
        at = stage.end
    if plan.shape.max_step_tokens * plan.shape.hidden_size * 8 > MAX_STEP:
        raise RemoteProtocolError(Reason.TOO_LARGE, "a micro-batch would be too large")


MAX_STEP = 512 * MIB
"""Bytes of the tensors of one micro-batch."""
