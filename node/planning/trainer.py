"""What a learner takes of each GPU at its worst moment.

There are two: when backward begins, all that forward kept stands beside the head's logits; and when it ends,
all gradients stand beside one layer that is computed again. What is counted here is what docs/benchmarks.md
has measured to 1.5 % (tests/node/planning/test_trainer_plan.py).
"""

from dataclasses import dataclass

from ..training_config import TrainingConfig
from .bill import MIB, Bill, Line
from .shape import ModelShape
from .worker import CONTEXT

CHUNK_BUFFERS = 3
"""Logits of a chunk, their gradient, and one of the chunk before (training/model/head.py)."""
SLACK = 0.05
"""Of what comes and goes: what torch's allocator holds and cannot use."""
EXPORT_TRANSIENT = 640 * MIB
"""While what changed is looked for (training/export/device.py)."""


@dataclass(frozen=True)
class LearnerPlan:
    """The memory of a learner on each of its GPUs, or in the machine."""

    stays: Bill
    """Also between steps."""
    backward: Bill
    """On top of it when backward begins."""
    ending: Bill
    """On top of it when backward ends."""

    @property
    def peak(self) -> Bill:
        """The dearer of the two moments."""
        worse = max(self.backward, self.ending, key=lambda bill: bill.total)
        return self.stays + worse

    @property
    def total(self) -> int:
        """Bytes at the worst moment."""
        return self.peak.total


def plan_learner(
    config: TrainingConfig, shape: ModelShape, *, gpu: bool, ranks: int = 1, exports: bool = True
) -> LearnerPlan:
    """The plan for `ranks` that share the model; `exports` whether versions are published from it."""
    sizes = _Sizes(config, shape, gpu, ranks)
    return LearnerPlan(
        Bill.of(_stays(sizes, exports)),
        Bill.of([*_kept(sizes), *_head(sizes), *_overhead(sizes, sizes.kept + sizes.logits)]),
        Bill.of([*_ending(sizes), *_overhead(sizes, sizes.layer)]),
    )


class _Sizes:
    """Counts that several lines need."""

    def __init__(self, config: TrainingConfig, shape: ModelShape, gpu: bool, ranks: int) -> None:
        self.config, self.shape, self.gpu, self.ranks = config, shape, gpu, ranks
        self.half = config.dtype == "bfloat16" or (config.dtype == "auto" and gpu)
        self.element = 2 if self.half else 4
        self.tokens = -(-config.seq_len // config.context_parallel)
        lora = config.lora
        self.learned = shape.parameters
        if lora is not None:
            self.learned = shape.adapter_parameters(lora.rank, lora.target_modules)
        self.compiled = config.compile if config.compile is not None else gpu

    @property
    def layer(self) -> int:
        """Bytes that forward keeps of a layer for backward, if nothing is computed again."""
        return self.tokens * _layer_elements(self.shape, self.compiled) * self.element

    @property
    def kept(self) -> int:
        """Bytes of all layers when backward begins."""
        shape, how = self.shape, self.config.activation_checkpointing
        if how == "none":
            return shape.layers * self.layer
        width = shape.hidden + (shape.attention_width if how == "selective" else 0)
        return shape.layers * self.tokens * width * self.element

    @property
    def logits(self) -> int:
        """Bytes of the logits that exist at a time."""
        rows = min(self.tokens, self.config.head_chunk)
        plain = 0 if self.gpu else 2 * rows * self.shape.vocabulary * 4  # not compiled: fp32 too
        return CHUNK_BUFFERS * rows * self.shape.vocabulary * self.element + plain


def _layer_elements(shape: ModelShape, compiled: bool) -> int:
    """Elements that one layer keeps of a token.

    Compiled: its input and both norms' outputs and the sum between them, queries and keys before and after
    norm and rotation, values, attention's output, gate, up and their product. Not compiled: also each norm's
    input in fp32 and its normed value, and the gate's activation.
    """
    hidden, queries, keys = shape.hidden, shape.attention_width, shape.kv_width
    width = shape.intermediate
    if shape.experts and shape.sparse_layers:
        routed = shape.experts_per_token * (3 * shape.expert_width + shape.hidden)
        width = (routed + 3 * shape.shared_width) // 3
    found = 4 * hidden + 2 * (queries + keys) + keys + queries + 3 * width
    if not compiled:
        found += 3 * 2 * hidden + 2 * (queries + keys) + width
    return found


def _stays(sizes: _Sizes, exports: bool) -> list[Line]:
    shape, config, ranks = sizes.shape, sizes.config, sizes.ranks
    count, learned = shape.parameters, sizes.learned
    lines: list[Line] = []
    if ranks > 1:
        lines.append(Line("weights, gathered", _gathered(sizes), "two layers, embeddings and head"))
    elif sizes.half:
        lines.append(Line("weights", 2 * count, "bf16"))
    frozen = config.lora is not None and (not sizes.half or ranks > 1)
    lines.append(Line("masters", (4 * learned + (4 * count if frozen else 0)) // ranks, "fp32"))
    if not (config.optimizer_offload and sizes.gpu):
        lines.append(Line("Adam's moments", 8 * learned // ranks, "fp32, two"))
    if exports:
        lines.append(Line("bits of the last version", 2 * learned // ranks, "to find what changed"))
    if config.loss.needs_reference:
        lines.append(Line("reference policy", sizes.element * count // ranks))
    if sizes.gpu:
        lines.append(Line("CUDA context, libraries", CONTEXT, "", True))
    return lines


def _gathered(sizes: _Sizes) -> int:
    shape, fsdp = sizes.shape, sizes.config.fsdp
    if not fsdp.reshard_after_forward:
        return sizes.element * shape.parameters
    tables = shape.embedding * (1 if shape.tied else 2)
    return sizes.element * (tables + 2 * shape.layer_parameters())


def _kept(sizes: _Sizes) -> list[Line]:
    how = sizes.config.activation_checkpointing
    return [Line("kept for backward", sizes.kept, f"{sizes.tokens} tokens, recompute: {how}")]


def _head(sizes: _Sizes) -> list[Line]:
    rows = min(sizes.tokens, sizes.config.head_chunk)
    lines = [
        Line("logits", sizes.logits, f"{CHUNK_BUFFERS} x {rows} tokens"),
        Line("hidden states, theirs", 2 * sizes.tokens * sizes.shape.hidden * sizes.element),
    ]
    if sizes.config.lora is None:
        lines.append(
            Line("gradient of the head", (4 + sizes.element) * sizes.shape.embedding, "fp32 sums")
        )
    return lines


def _ending(sizes: _Sizes) -> list[Line]:
    again = sizes.config.activation_checkpointing != "none"
    return [
        Line("gradients", 4 * sizes.learned // sizes.ranks, "fp32"),
        Line(
            "a layer, computed again" if again else "a layer", sizes.layer, f"{sizes.tokens} tokens"
        ),
        Line("its gradients", sizes.layer // 4, "", True),
    ]


def _overhead(sizes: _Sizes, moving: int) -> list[Line]:
    return [Line("the allocator's slack", int(SLACK * moving), "", True)] if sizes.gpu else []
