"""The learner's plan, against what docs/benchmarks.md measured on an H200 and against torch's own on a CPU."""

import importlib
from typing import Any

import pytest

from primerl.node.config.run import ModelCreateConfig, RunConfig
from primerl.node.config.training import LoraConfig, TrainingConfig
from primerl.node.memory_plan.memory import (
    GIB,
    LearnerMemory,
    plan_learner,
    plan_trainer,
    worker_share,
)
from primerl.node.memory_plan.shape import ModelShape, read_shape


def qwen(hidden: int, layers: int, heads: int, width: int) -> ModelShape:
    return read_shape(
        {
            "model_type": "qwen3",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": width,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        }
    )


SMALL, LARGE = qwen(1024, 28, 16, 3072), qwen(2560, 36, 32, 9728)
"""0.6b and 4b of scripts/bench/shapes.py."""
TINY = read_shape({"model_type": "qwen3", **ModelCreateConfig().model_dump()})


def counted(plan: LearnerMemory) -> float:
    """GiB that torch's allocator sees: without a context, and without slack."""
    return sum(line.nbytes for line in plan.peak if not line.estimate) / GIB


def config(**more: Any) -> TrainingConfig:
    fields: dict[str, Any] = {"seq_len": 16384, **more}
    return TrainingConfig(**fields)


LEFT = 6 * 28 * SMALL.layer_parameters() / GIB
"""What a row of the bench counted of a closed learner before it: weights and masters of its layers, which
stand in circles until Python collects them (docs/benchmarks.md)."""


@pytest.mark.parametrize(
    ("shape", "more", "left", "measured"),
    [
        (SMALL, {}, 0, 34.9),
        (SMALL, {"activation_checkpointing": "selective"}, 0, 18.2),
        (SMALL, {"head_chunk": 1024}, 0, 28.8),
        (SMALL, {"seq_len": 65536}, 0, 93.3),
        (SMALL, {"seq_len": 65536, "activation_checkpointing": "selective"}, 0, 26.6),
        (LARGE, {}, 0, 121.8),
        (LARGE, {"activation_checkpointing": "full"}, 0, 69.5),
        (SMALL, {"activation_checkpointing": "full"}, 1, 18.9),
        (SMALL, {"compile": False}, 1, 50.7),
        (SMALL, {"optimizer_offload": True}, 3, 37.8),
    ],
)
def test_a_learner_takes_what_was_measured_on_an_h200(
    shape: ModelShape, more: dict[str, Any], left: int, measured: float
) -> None:
    plan = plan_learner(config(**more), shape, gpu=True, exports=False)
    assert counted(plan) + left * LEFT == pytest.approx(measured, rel=0.015)


def test_what_stays_is_torchs_own_masters_and_moments() -> None:
    """On a CPU, in fp32: weights that are their own masters, two moments, and an export's bits."""
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(24))]
    optimizer = torch.optim.AdamW(parameters)
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    moments = sum(
        optimizer.state[one][name].nbytes
        for one in parameters
        for name in ("exp_avg", "exp_avg_sq")
    )
    lines = {line.name: line.nbytes for line in plan_learner(config(), TINY, gpu=False).resident}
    assert moments == 8 * 1024
    assert lines == {
        "masters": 4 * TINY.parameters,
        "Adam's moments": 8 * TINY.parameters,
        "bits of the last version": 2 * TINY.parameters,
    }


def kept_by_torch(layers: int, tokens: int) -> int:
    """Bytes that autograd really keeps of a tiny Qwen3's forward pass for backward, without its weights."""
    import torch

    torch.set_num_threads(1)
    transformers: Any = importlib.import_module("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 192,
        "vocab_size": 64,
    }
    made = transformers.Qwen3Config(**sizes, num_hidden_layers=layers, attn_implementation="sdpa")
    model = transformers.Qwen3ForCausalLM(made).to(torch.bfloat16)
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros((1, tokens), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(kept.values())


def test_a_layer_that_is_not_compiled_keeps_what_autograd_keeps() -> None:
    tokens = 512
    real = kept_by_torch(3, tokens) - kept_by_torch(2, tokens)
    two = config(seq_len=tokens, compile=False, dtype="bfloat16")
    one = [
        next(line.nbytes for line in plan.backward_start if line.name == "kept for backward")
        for plan in (plan_learner(two, shape_of(layers), gpu=False) for layers in (2, 3))
    ]
    assert one[1] - one[0] == pytest.approx(real, rel=0.15)


def shape_of(layers: int) -> ModelShape:
    made = ModelCreateConfig(num_hidden_layers=layers)
    return read_shape({"model_type": "qwen3", **made.model_dump()})


# -- options ---------------------------------------------------------------------------------------


def test_ranks_share_what_stays() -> None:
    alone = plan_learner(config(), LARGE, gpu=True)
    four = plan_learner(config(), LARGE, gpu=True, ranks=4)
    stays = {line.name: line.nbytes for line in four.resident}
    assert stays["Adam's moments"] == 8 * LARGE.parameters // 4
    assert four.total < alone.total
    whole = config(fsdp={"reshard_after_forward": False})
    kept = {
        line.name: line.nbytes for line in plan_learner(whole, LARGE, gpu=True, ranks=4).resident
    }
    assert kept["weights, gathered"] == 2 * LARGE.parameters > stays["weights, gathered"]


def test_adapters_need_moments_of_their_own_only() -> None:
    lora = plan_learner(config(lora=LoraConfig(rank=16)), LARGE, gpu=True)
    lines = {line.name: line.nbytes for line in lora.resident}
    adapters = LARGE.adapter_parameters(16, LoraConfig().target_modules)
    assert lines["weights"] == 2 * LARGE.parameters
    assert lines["Adam's moments"] == 8 * adapters < LARGE.parameters


@pytest.mark.parametrize(
    "more",
    [
        {"activation_checkpointing": "selective"},
        {"head_chunk": 1024},
        {"optimizer_offload": True},
        {"context_parallel": 2},
        {"seq_len": 8192},
    ],
)
def test_what_saves_memory_is_planned_to(more: dict[str, Any]) -> None:
    assert (
        plan_learner(config(**more), SMALL, gpu=True).total
        < plan_learner(config(), SMALL, gpu=True).total
    )


# -- beside a worker -------------------------------------------------------------------------------


def run(**more: Any) -> RunConfig:
    engine = {"type": "vllm", "dtype": "bfloat16"}
    return RunConfig.model_validate({"engine": engine, **more})


def test_a_trainer_also_evaluates_and_audits() -> None:
    names = {line.name for line in plan_trainer(run(), SMALL, gpu=True)[1]}
    assert {"evaluation's network", "evaluation's CUDA context", "the auditor's networks"} < names
    quiet = run(evaluation={"prompts": 0})
    assert names - {line.name for line in plan_trainer(quiet, SMALL, gpu=True)[1]} == {
        "evaluation's network",
        "evaluation's CUDA context",
    }


def test_the_auditor_keeps_several_small_networks_and_one_large_one() -> None:
    def audited(shape: ModelShape) -> int:
        lines = plan_trainer(run(), shape, gpu=True)[1]
        return next(line.nbytes for line in lines if line.name == "the auditor's networks")

    assert audited(LARGE) == 2 * LARGE.parameters
    assert audited(TINY) == 5 * 2 * TINY.parameters  # max_off_policy_steps + 3


def test_what_a_trainer_leaves_goes_to_the_worker() -> None:
    gpu = 80 * GIB
    learner, others = plan_trainer(run(), SMALL, gpu=True)
    share = worker_share(run(), SMALL, gpu)
    assert 0 < share * gpu <= gpu - learner.total - others.total
    assert worker_share(run(), LARGE, 24 * GIB) == 0.0
