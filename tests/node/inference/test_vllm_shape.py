"""How a model is spread over GPUs: decisions and refusals before vLLM is started."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.multimodal_cases import CHECKPOINTS

from primerl.node.app.daemon import check_config
from primerl.node.config.run import EngineConfig, ModelConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.gpus import TorchBuild
from primerl.node.inference.numerics import check_quantized
from primerl.node.inference.parameter_placement import difference
from primerl.node.inference.vllm import join_checks
from primerl.node.inference.vllm_arguments import (
    check_family,
    check_parallel,
    resolve_parallel,
    visible_gpus,
)
from primerl.node.inference.vllm_sampling import RankPlace

SHAPE: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}
EXPERTS = SHAPE | {"num_experts": 4, "moe_intermediate_size": 6}


def vllm(**fields: Any) -> EngineConfig:
    return EngineConfig(type="vllm", **fields)


@pytest.mark.parametrize(
    ("gpus", "fields", "tp"),
    [
        (0, {}, 1),
        (1, {}, 1),
        (8, {}, 8),
        (8, {"dp": 2}, 4),
        (8, {"pp": 4}, 2),
        (3, {"dp": 2}, 1),
        (0, {"pp": 2}, 1),
    ],
)
def test_auto_is_every_visible_gpu_divided_by_stages_and_engines(
    gpus: int, fields: dict[str, Any], tp: int
) -> None:
    assert resolve_parallel(vllm(tp="auto", **fields), SHAPE, gpus).tp == tp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_may_be_divided_and_those_of_keys_and_values_copied(tp: int) -> None:
    check_parallel(vllm(tp=tp), SHAPE)


@pytest.mark.parametrize("tp", [3, 5, 6, 7, 16, "auto"])
def test_what_does_not_divide_the_model_is_refused_with_what_does(tp: Any) -> None:
    with pytest.raises(UsageError, match=r"one of 1, 2, 4, 8$"):
        resolve_parallel(vllm(tp=tp), SHAPE, 6 if tp == "auto" else 16)


def test_the_inner_width_counts_too_and_that_of_experts_unless_they_stay_whole() -> None:
    with pytest.raises(UsageError, match=r"one of 1, 2$"):
        check_parallel(vllm(tp=4), SHAPE | {"intermediate_size": 6})
    with pytest.raises(UsageError, match=r"one of 1, 2$"):
        check_parallel(vllm(tp=4), EXPERTS)
    check_parallel(vllm(tp=4, vllm={"enable_expert_parallel": True}), EXPERTS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "gpt_oss", "num_local_experts": 4}, "on GPUs only"),
        ({"kv_lora_rank": 16, "n_routed_experts": 4}, "latent attention"),
    ],
)
def test_some_families_are_not_for_vllm_on_a_cpu(fields: dict[str, Any], reason: str) -> None:
    check_family(vllm(), SHAPE | fields, cpu=False)
    with pytest.raises(EngineError, match=reason):
        check_family(vllm(), SHAPE | fields, cpu=True)


def test_mixtures_of_experts_are() -> None:
    check_family(vllm(), EXPERTS, cpu=True)


def test_linear_attention_is_for_vllm_on_a_cpu_in_bf16_alone() -> None:
    linear = SHAPE | {"layer_types": ["linear_attention"], "linear_key_head_dim": 128}
    check_family(vllm(dtype="bfloat16"), linear, cpu=True)
    with pytest.raises(EngineError, match=r"in bfloat16 on a CPU, .* float32: set it to bfloat16"):
        check_family(vllm(dtype="float32"), linear, cpu=True)
    with pytest.raises(EngineError, match=r"linear_key_head_dim is 96, .* multiples of 64"):
        check_family(vllm(dtype="bfloat16"), linear | {"linear_key_head_dim": 96}, cpu=True)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_text_model_that_older_releases_serve_only_as_a_part_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPE | {"model_type": kind}
    arguments = "primerl.node.inference.vllm_arguments"
    monkeypatch.setattr(f"{arguments}.is_installed", lambda: False)
    check_family(vllm(), shape, cpu=False, release="0.32.0")
    check_family(vllm(), shape, cpu=False, release="")
    with pytest.raises(EngineError, match=rf"0\.25\.1 is not known.*{kind}.*install vLLM 0\.32"):
        check_family(vllm(), shape, cpu=False, release="0.25.1")
    monkeypatch.setattr(f"{arguments}.is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(EngineError, match=rf"imports torchvision for {kind}"):
        check_family(vllm(), shape, cpu=False, release="0.32.0")


@pytest.mark.parametrize("cpu", [True, False])
def test_queries_that_ministral_scales_are_refused_where_vllm_leaves_that_out(cpu: bool) -> None:
    rope = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 256}
    scaled = SHAPE | {"model_type": "ministral3", "rope_parameters": rope}
    check_family(vllm(max_model_len=256), scaled, cpu=cpu)
    with pytest.raises(EngineError, match=r"beyond 256 tokens.* engine\.max_model_len to 256"):
        check_family(vllm(max_model_len=257), scaled, cpu=cpu)
    plain = scaled | {"rope_parameters": rope | {"llama_4_scaling_beta": 0.0}}
    check_family(vllm(max_model_len=4096), plain, cpu=cpu)


def test_a_pipeline_has_at_most_as_many_stages_as_there_are_layers() -> None:
    check_parallel(vllm(pp=6), SHAPE)
    with pytest.raises(UsageError, match="6 layers"):
        check_parallel(vllm(pp=7), SHAPE)


def test_more_than_is_visible_is_refused_but_not_on_a_cpu() -> None:
    with pytest.raises(UsageError, match=r"wants 8 GPUs, and 4"):
        resolve_parallel(vllm(tp=2, pp=4), SHAPE, 4)
    with pytest.raises(UsageError, match=r"wants 4 GPUs, and 2"):
        resolve_parallel(vllm(tp="auto", dp=4), SHAPE, 2)
    assert resolve_parallel(vllm(tp=2, pp=2), SHAPE, 0).tp == 2


@pytest.mark.parametrize(
    ("names", "device", "count"),
    [
        (("0", "1"), "auto", 2),
        (("0", "1"), "cpu", 0),
        ((), "auto", 0),
        (("MIG-a", "MIG-b"), "auto", 1),
    ],
)
def test_gpus_are_counted_as_one_process_can_join_them(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], device: str, count: int
) -> None:
    def visible(_: object) -> tuple[str, ...]:
        return names

    monkeypatch.setattr("primerl.node.inference.vllm_arguments.visible", visible)
    assert visible_gpus(vllm(device=device)) == count


def test_a_model_that_is_known_is_looked_at_before_anything_starts(tmp_path: Path) -> None:
    create = ModelConfig(create={"num_attention_heads": 4})
    check_config(vllm(tp=4), create)
    with pytest.raises(UsageError, match=r"engine\.tp is 3"):
        check_config(vllm(tp=3), create)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(UsageError, match=r"engine\.pp is 7"):
        check_config(vllm(pp=7), ModelConfig(name=str(tmp_path)))
    check_config(vllm(pp=7), ModelConfig(name="somebody/model"))  # not here: seen at the start


@pytest.mark.parametrize("cuda", ["", "13.0"])
def test_a_model_that_vllm_does_not_serve_here_is_refused_before_anything_starts(
    cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> TorchBuild:
        return TorchBuild("2.13.0", cuda)

    monkeypatch.setattr("primerl.node.gpus.torch_build", build)
    shape = SHAPE | {"layer_types": ["linear_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with nullcontext() if cuda else pytest.raises(EngineError, match="in bfloat16 on a CPU"):
        check_config(vllm(dtype="float32"), ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_experts": 8}, "a mixture of experts"),
        ({"layer_types": ["linear_attention"]}, "of linear attention"),
        ({"kv_lora_rank": 16}, "of latent attention"),
        ({"n_routed_experts": 8}, "a mixture of experts"),
        ({"model_type": "qwen3_5", **CHECKPOINTS["qwen3_5"][1]}, "of linear attention"),
    ],
)
def test_fp8_is_refused_for_models_that_no_engine_quantizes(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | fields))
    for config in (
        EngineConfig(quantization="fp8"),
        vllm(quantization="fp8", dtype="bfloat16"),  # which it has to be with a torch for GPUs
    ):
        with pytest.raises(UsageError, match=rf"the model is {reason}.*leave engine\.quantization"):
            check_config(config, ModelConfig(name=str(tmp_path)))
    check_config(EngineConfig(), ModelConfig(name=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    check_config(EngineConfig(quantization="fp8"), ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("cuda", ["", "13.0"])
def test_fp8_on_a_gpu_is_for_bfloat16(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> TorchBuild:
        return TorchBuild("2.13.0", cuda)

    monkeypatch.setattr("primerl.node.gpus.torch_build", build)
    check_quantized(vllm(quantization="fp8", dtype="bfloat16"), SHAPE)
    check_quantized(EngineConfig(quantization="fp8"), SHAPE)
    with pytest.raises(UsageError, match=r"set engine\.dtype to") if cuda else nullcontext():
        check_quantized(vllm(quantization="fp8"), SHAPE)


@pytest.mark.parametrize("fields", [{"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_an_engine_that_is_not_vllm_is_not_spread(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"set engine\.type to vllm"):
        check_config(EngineConfig(**fields))
    check_config(EngineConfig(tp="auto", vllm={"quantization": "fp8"}))


# -- ranks -----------------------------------------------------------------------------------------


class Parallel:
    def __init__(self, tp: int, pp: int) -> None:
        self.tensor_parallel_size, self.pipeline_parallel_size = tp, pp


def test_the_last_stage_draws_and_its_first_rank_is_collected_from() -> None:
    places = [RankPlace.of(rank, Parallel(2, 3)) for rank in range(6)]
    assert [place.first for place in places] == [True, True, False, False, False, False]
    assert [place.last for place in places] == [False, False, False, False, True, True]
    assert [place.collecting for place in places] == [False] * 4 + [True, False]
    assert RankPlace.of(0, Parallel(1, 1)) == (True, True, True)


def test_a_tensor_has_to_belong_to_a_rank() -> None:
    assert join_checks([["", ["b"], []], ["", ["a"], ["b"]]]) == ("", frozenset({"b"}))
    assert (
        join_checks([["", ["b", "x"], []], ["", ["x"], []]]).fault
        == "tensor 'x' is not the model's"
    )
    assert join_checks([["", ["x"], []], ["bad", [], []]]).fault == "bad"
    assert join_checks([["", ["x"], []]]).fault == "tensor 'x' is not the model's"


def test_a_later_state_has_the_tensors_of_the_first() -> None:
    known = {"a": (1, 2), "b": (3,)}
    assert difference(known, dict(known)) == ""
    assert "'b' is missing" in difference(known, {"a": (1, 2)})
    assert "'c' is not" in difference(known, known | {"c": (1,)})
    assert "[2, 1]" in difference(known, known | {"a": (2, 1)})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (vllm(batch_invariant=True), "numerics to calibrated"),
        (vllm(vllm={"compilation_config": {"cudagraph_mode": "full"}}), "cudagraph_mode FULL"),
    ],
)
def test_kernels_that_are_right_for_heads_of_128_only_are_refused_for_others_on_a_gpu(
    config: EngineConfig, reason: str
) -> None:
    check_family(config, SHAPE | {"head_dim": 128}, cpu=False)
    check_family(config, SHAPE | {"head_dim": 64}, cpu=True)
    check_family(vllm(), SHAPE | {"head_dim": 64}, cpu=False)
    with pytest.raises(EngineError, match=f"heads have size 64.*{reason}"):
        check_family(config, SHAPE | {"head_dim": 64}, cpu=False)
    with pytest.raises(EngineError, match=r"config\.json has no 'hidden_size'"):
        check_family(config, {"model_type": "gpt2", "n_embd": 768}, cpu=False)
