"""What a trainer takes of a GPU besides its learner, and what it leaves to a worker on the same one."""

from ..config import RunConfig
from .bill import MIB, Bill, Line
from .shape import ModelShape
from .trainer import LearnerPlan, plan_learner
from .worker import CONTEXT, ELEMENT, RESERVE, uncounted

AUDIT_TOKENS = 1 << 14
"""Of a forward pass of the process that audits (audits/replay.py)."""
AUDIT_KEEPS = 1 << 30
"""Bytes of states whose networks it keeps for the next audit; one it keeps always."""
AUDIT_LOGITS = 256 * MIB
"""That exist at a time there."""


def plan_trainer(config: RunConfig, shape: ModelShape, *, gpu: bool) -> tuple[LearnerPlan, Bill]:
    """The learner, and what else a trainer of `config` keeps on its first device."""
    ranks = fsdp_ranks(config)
    return plan_learner(config.training, shape, gpu=gpu, ranks=ranks), companions(
        config, shape, gpu=gpu
    )


def companions(config: RunConfig, shape: ModelShape, *, gpu: bool) -> Bill:
    """The network that evaluates, and the process that audits."""
    element = ELEMENT[config.engine.dtype]
    network = shape.parameters * element
    pass_width = 4 * shape.hidden + max(3 * shape.intermediate, 2 * shape.attention_width)
    evaluates = config.evaluation.prompts or config.warmup is not None
    return Bill.of(
        [
            Line(
                "evaluation's network", network if evaluates else 0, f"{element} bytes a parameter"
            ),
            Line(
                "evaluation's CUDA context",
                CONTEXT if gpu and evaluates else 0,
                "in a process of its own",
                True,
            ),
            _audited(config, shape, element),
            Line(
                "an audit's forward pass",
                AUDIT_TOKENS * pass_width * element + 3 * AUDIT_LOGITS,
                f"{AUDIT_TOKENS} tokens",
                True,
            ),
            Line("the auditor's CUDA context", CONTEXT if gpu else 0, "", True),
        ]
    )


def _audited(config: RunConfig, shape: ModelShape, element: int) -> Line:
    """One network, or as many of the versions in use as are small."""
    versions = config.rollouts.max_off_policy_steps + 3
    kept = max(1, min(versions, AUDIT_KEEPS // (2 * shape.parameters)))
    return Line("the auditor's networks", kept * shape.parameters * element, f"{kept} at a time")


def fsdp_ranks(config: RunConfig) -> int:
    """GPUs that share the model, as far as the config says; 1 where nothing is shared."""
    training = config.training
    if training.backend != "fsdp":
        return 1
    return max(1, (training.fsdp.ranks or 2) * training.fsdp.nodes // training.fsdp.replicas)


def worker_share(config: RunConfig, shape: ModelShape, gpu: int) -> float:
    """gpu_memory_utilization for a vLLM on a GPU of `gpu` bytes that this run's trainer uses too.

    0.0 if the trainer leaves nothing.
    """
    learner, others = plan_trainer(config, shape, gpu=True)
    beyond = Bill.of(uncounted(config.engine, shape))
    left = gpu - learner.total - others.total - beyond.total - RESERVE
    return max(0, int(100 * left / gpu)) / 100
