"""Plans and frames for tests of what travels between stages."""

from typing import Any

import numpy as np

from primerl.crypto.hashing import digest
from primerl.node.pipeline.frames import Frame, Kind
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage

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
    """Whether they say the same, queues apart."""
    return said(one) == said(other)


def said(frame: Frame) -> tuple[Any, ...]:
    """What a frame says, comparable."""
    tensors = [(one.dtype.name, one.shape, one.tobytes()) for one in frame.tensors]
    return (frame.kind, frame.epoch, frame.number, frame.body, frame.trail, tensors)
