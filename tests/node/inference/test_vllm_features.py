"""What engine.vllm may say, and which vLLM it is said to: runs without vLLM."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from primerl.node.config.engine import EngineConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference import vllm_arguments

SOURCE = '''
@dataclass
class EngineArgs:
    """Arguments."""

    model: str = "m"
    gpu_memory_utilization: float = 0.9
    names = 1

    def method(self) -> None:
        local: int = 1


@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False


class Other:
    unrelated: int = 1
'''
FIELDS = frozenset({"model", "gpu_memory_utilization", "enable_log_requests"})


def test_what_would_break_a_contract_is_refused_with_the_reason_and_what_to_do() -> None:
    for name, option in vllm_arguments.REFUSED.items():
        expected = f"engine.vllm.{name} cannot be set ({option.reason}): {option.advice}"
        with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
            vllm_arguments.check_overrides({"gpu_memory_utilization": 0.5, name: 1})
        assert option.advice.startswith(("remove it", "set engine.")), name


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 2, "model": "."}


@pytest.mark.parametrize(
    "config",
    [
        None,
        NGRAM,
        NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 2},
        NGRAM | {"prompt_lookup_max": 5},
        MTP,
    ],
)
def test_drafts_of_n_grams_and_of_the_models_own_head_pass(config: dict[str, Any] | None) -> None:
    vllm_arguments.check_overrides({"speculative_config": config})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model": "other/model", "num_speculative_tokens": 4}, "a draft model is a second model"),
        ({"method": "draft_model"}, "a draft model is a second model"),
        ({"method": "mtp", "num_speculative_tokens": 1}, "model None is not a directory"),
        (MTP | {"model": "some/model"}, "published checkpoint of the run's model"),
        (MTP | {"prompt_lookup_max": 2}, "prompt_lookup_max is refused .method mtp has"),
        (MTP | {"draft_sample_method": "probabilistic"}, "draft_sample_method is refused"),
        ({"method": "qwen3_next_mtp"}, 'vLLM calls every MTP head "mtp"'),
        ({"method": "eagle3", "model": "x"}, "drafts of an EAGLE head were never compared"),
        ({"method": "ngram_gpu"}, "asynchronous scheduling"),
        ({"method": "suffix"}, "n-grams and of an MTP head are all that this package verifies"),
        ({"method": ["ngram"]}, "n-grams and of an MTP head are all that this package verifies"),
        ({}, "method None is refused"),
        ("ngram", "must be a table"),
        (0, "must be a table"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number"),
        (NGRAM | {"num_speculative_tokens": 129}, "from 1 to 128"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens must be a whole number"),
        (NGRAM | {"prompt_lookup_min": "2"}, "prompt_lookup_min must be a whole number"),
        (NGRAM | {"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "is above prompt_lookup_max"),
        (NGRAM | {"rejection_sample_method": "synthetic"}, "rejection_sample_method is refused"),
        (NGRAM | {"model": "x"}, "model is refused"),
    ],
)
def test_other_drafts_are_refused_by_name_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=rf"^engine\.vllm\.speculative_config.*{reason}"):
        vllm_arguments.check_overrides({"speculative_config": config})


def test_drafts_take_one_engine_and_attention_that_can_go_back() -> None:
    drafting = EngineConfig(vllm={"speculative_config": NGRAM})
    assert drafting.draft_tokens == 4
    assert EngineConfig(vllm={"speculative_config": "ngram"}).draft_tokens == 0
    with pytest.raises(ValueError, match=r"pp and vllm\.speculative_config cannot be combined"):
        EngineConfig(pp=2, vllm={"speculative_config": NGRAM})
    linear = {"layer_types": ["linear_attention", "full_attention"]}
    vllm_arguments.check_family(EngineConfig(), linear, cpu=False)
    with pytest.raises(EngineError, match=r"remove engine\.vllm\.speculative_config"):
        vllm_arguments.check_family(drafting, linear, cpu=False)
    with pytest.raises(UsageError, match=r"async_scheduling and speculative_config"):
        vllm_arguments.check_overrides({"speculative_config": NGRAM, "async_scheduling": True})


def test_a_head_that_drafts_is_of_the_runs_model(tmp_path: Path) -> None:
    """And vLLM reads it as safetensors, whatever it does with the weights of the run."""
    small = {"hidden_size": 8, "vocab_size": 16, "num_attention_heads": 1, "num_hidden_layers": 2}
    shape = {"model_type": "glm4_moe", "num_nextn_predict_layers": 1, **small}
    base = tmp_path / "base"
    config = EngineConfig(vllm={"speculative_config": MTP | {"model": str(base)}})

    def write(shape: dict[str, Any], *names: str) -> None:
        base.mkdir(exist_ok=True)
        (base / "config.json").write_text(json.dumps(shape))
        save_file({name: torch.zeros(1) for name in names}, base / "model.safetensors")

    head = "model.layers.2.eh_proj.weight"
    write(shape, "model.norm.weight", head)
    vllm_arguments.check_family(config, shape, cpu=True)
    arguments = vllm_arguments.engine_arguments(config, tmp_path, shape, cpu=False)
    assert arguments["async_scheduling"] is False
    assert arguments["speculative_config"] == {
        **config.vllm["speculative_config"],
        "draft_load_config": {"load_format": "safetensors"},
    }
    with pytest.raises(EngineError, match="deepseek_v3 and glm4_moe only, not for qwen3"):
        vllm_arguments.check_family(config, shape | {"model_type": "qwen3"}, cpu=True)
    with pytest.raises(EngineError, match="has vocab_size 16, and the run's model 32"):
        vllm_arguments.check_family(config, shape | {"vocab_size": 32}, cpu=True)
    write(shape, "model.norm.weight")  # as transformers saves it
    with pytest.raises(EngineError, match=f"has no MTP head .{re.escape(head)}"):
        vllm_arguments.check_family(config, shape, cpu=True)
    none = shape | {"num_nextn_predict_layers": 0}
    write(none, "model.norm.weight", head)
    with pytest.raises(EngineError, match="has no MTP head"):
        vllm_arguments.check_family(config, none, cpu=True)


@pytest.mark.parametrize(
    "name",
    [
        *("quantization", "kv_cache_dtype", "spec_model", "kv_transfer_config"),
        *("cpu_offload_gb", "enable_eplb", "enable_lora", "logprobs_mode", "worker_extension_cls"),
        *("tensor_parallel_size", "data_parallel_size", "dtype", "enable_batch_sharded_sampling"),
    ],
)
def test_what_was_asked_about_has_an_answer(name: str) -> None:
    assert name in vllm_arguments.REFUSED


def test_known_harmless_options_pass_and_so_do_unlisted_ones() -> None:
    harmless = ("kv_offloading_size", "enable_expert_parallel", "enable_prefix_caching")
    vllm_arguments.check_overrides(
        {name: 1 for name in (*harmless, "gpu_memory_utilization", "some_new_one")}
    )


def test_no_argument_has_two_answers() -> None:
    names = [name for option in vllm_arguments.REFUSALS for name in option.names.split()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "harmless",
    [
        {"quantization": None},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_offloading_backend": "native"},
        {"moe_backend": "triton"},
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
    ],
)
def test_a_refused_argument_that_says_the_default_passes(harmless: dict[str, Any]) -> None:
    vllm_arguments.check_overrides(harmless)


@pytest.mark.parametrize(
    "harmful",
    [
        {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
        {"kv_transfer_config": {"kv_connector": "MultiConnector"}},
        {"kv_transfer_config": '{"kv_connector": "OffloadingConnector"}'},
        {
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_connector_module_path": "x",
            }
        },
        {"kv_offloading_backend": "lmcache"},
        {"moe_backend": "auto"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"data_parallel_size": 0},
    ],
)
def test_other_values_do_not(harmful: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(harmful))):
        vllm_arguments.check_overrides(harmful)


def test_it_is_known_what_keeps_keys_outside_of_vllm_s_own_cache() -> None:
    assert vllm_arguments.keeps_elsewhere({"kv_offloading_size": 4})
    assert vllm_arguments.keeps_elsewhere(
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}
    )
    assert not vllm_arguments.keeps_elsewhere(
        {"kv_offloading_size": None, "enable_prefix_caching": True}
    )


def test_keys_and_values_in_fp8_are_allowed_without_audits() -> None:
    vllm_arguments.check_overrides({"kv_cache_dtype": "fp8"}, proven=False)
    with pytest.raises(UsageError, match="quantization"):
        vllm_arguments.check_overrides({"quantization": "fp8"}, proven=False)


def test_the_arguments_are_the_fields_of_both_classes_and_nothing_else() -> None:
    assert vllm_arguments.read_arguments(SOURCE) == FIELDS


def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest_that_it_has() -> None:
    vllm_arguments.check_names({"gpu_memory_utilization": 1}, FIELDS)
    with pytest.raises(UsageError, match="did you mean gpu_memory_utilization"):
        vllm_arguments.check_names({"gpu_memory_utilisation": 1}, FIELDS)
    with pytest.raises(UsageError, match="remove it"):
        vllm_arguments.check_names({"xyz": 1}, FIELDS)
    vllm_arguments.check_names({"xyz": 1}, frozenset())  # nothing is installed that could be asked


def test_release_and_arguments_are_read_from_where_vllm_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    broken = "raise RuntimeError('imported')"
    (tmp_path / "vllm" / "__init__.py").write_text(broken)
    (tmp_path / "vllm" / "_version.py").write_text(f"{broken}\n__version__ = version = '0.24.1'\n")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(f"{broken}\n{SOURCE}")
    monkeypatch.setattr(vllm_arguments, "_places", lambda: [str(tmp_path / "vllm")])
    vllm_arguments.installed_arguments.cache_clear()
    try:
        assert vllm_arguments.installed_arguments() == FIELDS
    finally:
        vllm_arguments.installed_arguments.cache_clear()
    assert vllm_arguments.installed_release() == "0.24.1"
    with pytest.raises(EngineError, match=re.escape(vllm_arguments.SUPPORTED)):
        vllm_arguments.check_installed()


def test_without_vllm_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_places", list[str])
    vllm_arguments.installed_arguments.cache_clear()
    try:
        assert vllm_arguments.installed_arguments() == frozenset()
    finally:
        vllm_arguments.installed_arguments.cache_clear()
    assert vllm_arguments.installed_release() == ""
    vllm_arguments.check_installed()


@pytest.mark.parametrize("release", ["0.25.1", "0.25.2", "0.32.0", "0.32.1+cpu"])
def test_the_two_supported_releases_are_accepted(release: str) -> None:
    vllm_arguments.check_release(release)


@pytest.mark.parametrize(
    "release", ["0.9.2", "0.25.0", "0.26.0", "0.31.2", "0.33.0", "1.0.0", "dev"]
)
def test_another_release_is_refused_by_naming_both(release: str) -> None:
    with pytest.raises(EngineError, match=re.escape(vllm_arguments.SUPPORTED)):
        vllm_arguments.check_release(release)
