"""What two engines must have in common for equal bits, and which may take part in a run that needs them."""

from importlib.metadata import version
from typing import Any

import msgspec
import pytest
from msgspec import structs
from support.protocol_cases import MANIFEST, QUANTIZED

from primerl.node.config.engine import EngineConfig
from primerl.node.config.run import RunConfig, VerificationConfig
from primerl.node.errors import UsageError
from primerl.node.inference import numerics
from primerl.node.verification.bounds import BUILT_IN, EXACT, proof_contract
from primerl.protocol.manifests import ProofContract, RouteShape, encode
from primerl.protocol.numerics import NumericsClass


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(type="vllm", device="cpu", **fields)


def named(**fields: Any) -> str:
    return numerics.engine_class(config(**fields), "0.32.0", lambda: "NVIDIA H100")


def test_a_class_names_release_device_and_cut() -> None:
    assert named() == "vLLM 0.32.0, NVIDIA H100, tp 1"
    assert named(tp=4, pp=2) == "vLLM 0.32.0, NVIDIA H100, tp 4, pp 2"
    assert numerics.engine_class(config(), "0.33.0", lambda: "NVIDIA H100") != named()


def test_a_class_on_gpus_names_the_kernels_that_are_not_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one(_: EngineConfig) -> int:
        return 1

    monkeypatch.setattr(numerics, "visible_gpus", one)
    assert named().startswith("vLLM 0.32.0, NVIDIA H100, tp 1, kernels ")


def test_what_may_choose_a_kernel_is_in_the_class_and_memory_is_not() -> None:
    memory = {"gpu_memory_utilization": 0.5, "enable_prefix_caching": False}
    assert named(vllm=memory) == named()
    assert named(vllm={"max_num_batched_tokens": 8192}) != named()
    assert named(vllm={"compilation_config": {"cudagraph_mode": "FULL"}}) == named()
    assert named(vllm={"compilation_config": {"mode": 0}}) != named()
    assert named(vllm={**memory, "attention_backend": "FLASH_ATTN"}) == (
        'vLLM 0.32.0, NVIDIA H100, tp 1, {"attention_backend": "FLASH_ATTN"}'
    )


def test_gpus_of_one_family_have_one_name() -> None:
    assert (
        numerics.family_of("NVIDIA H100 80GB HBM3")
        == numerics.family_of("NVIDIA H100 PCIe")
        == "NVIDIA H100"
    )
    assert numerics.family_of("NVIDIA GeForce RTX 4090") == "NVIDIA GeForce RTX 4090"
    assert numerics.family_of("a device") == "a device"


H100 = "NVIDIA H100 80GB HBM3"


def stated(*gpus: str, pipeline: bool = False, **engine: Any) -> NumericsClass:
    told = EngineConfig.model_validate({"dtype": "bfloat16", **engine})

    def count(asked: EngineConfig) -> int:
        return 0 if asked.device == "cpu" else len(gpus)

    return numerics.numerics_of(
        told,
        pipeline=pipeline,
        release=lambda: "0.25.1",
        device=lambda: numerics.family_of(gpus[0]),
        gpus=count,
    )


@pytest.mark.parametrize(
    ("product", "family"),
    [
        (H100, "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Tesla T4", "T4"),
        ("NVIDIA \u00b5X1 " + 100 * "y", "X1"),
    ],
)
def test_memory_and_form_of_a_gpu_are_no_other_class_of_noise(product: str, family: str) -> None:
    assert stated(product, type="vllm").device == family


def test_a_worker_states_engine_release_gpu_tensor_parallelism_and_dtype() -> None:
    assert stated(H100, H100, type="vllm", tp=2) == NumericsClass(
        "vllm", "0.25.1", "H100", 2, "bfloat16"
    )
    assert stated(H100, H100, H100, H100, type="vllm", tp="auto", dp=2).tp == 2
    assert stated(H100, type="vllm", pipeline=True).engine == "vllm pipeline"
    assert stated(H100, H100, type="hf", tp=2).tp == 1, "the embedded engine is on one device"
    assert stated(H100, type="hf", device="cpu").device == "cpu"
    assert stated(type="hf").device == "cpu"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "vllm"),
        ({"vllm": {"enforce_eager": True}}, "vllm, eager"),
        ({"vllm": {"compilation_config": {"mode": 0}}}, "vllm, eager"),
        ({"vllm": {"compilation_config": {"cudagraph_mode": "FULL"}}}, "vllm"),
        ({"vllm": {"compilation_config": {"mode": 1}}}, "vllm, compiled 1"),
        ({"batch_invariant": True}, "vllm, batch-invariant"),
        ({"vllm": {"attention_backend": "FLASHINFER"}}, "vllm, attention FLASHINFER"),
        ({"vllm": {"attention_config": {"backend": "TRITON_ATTN"}}}, "vllm, attention TRITON_ATTN"),
        ({"vllm": {"enable_chunked_prefill": True, "enable_prefix_caching": True}}, "vllm"),
        ({"device": "cpu", "vllm": {"enforce_eager": True}}, "vllm"),
    ],
)
def test_options_that_change_every_bit_are_part_of_the_class(
    options: dict[str, Any], name: str
) -> None:
    assert stated(H100, type="vllm", **options).engine == name


def test_the_name_of_a_class_fits_whatever_the_options_are() -> None:
    long = stated(H100, type="vllm", vllm={"attention_backend": 100 * "A"}, batch_invariant=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(long), type=NumericsClass) == long


def test_the_embedded_engine_states_the_release_of_torch() -> None:
    assert numerics.numerics_of(EngineConfig(device="cpu")).release == version("torch")


def test_a_processor_is_named_by_its_widest_instructions() -> None:
    assert numerics.widest("model name: a\nflags\t\t: fpu avx2 avx512f amx_tile\n") == "amx_tile"
    assert numerics.widest("flags : fpu avx2\n") == "avx2"
    assert numerics.widest("Features : fp asimd\n") == "asimd"
    assert numerics.widest("") == ""


def exact_contract() -> ProofContract:
    told = {"engine": {"type": "vllm", "dtype": "bfloat16", "device": "cpu"}}
    return proof_contract(RunConfig.model_validate(told | {"verification": {"numerics": "exact"}}))


def test_an_exact_run_has_bounds_of_rounding_and_the_class_of_its_trainer() -> None:
    contract = exact_contract()
    assert (contract.reject, contract.suspect) == EXACT
    assert contract.engine_class == numerics.engine_class(config())
    assert contract.bounds == "fixed", "there is no noise to measure"
    for exact, calibrated in zip(EXACT, BUILT_IN["float32"], strict=True):
        assert exact.sampling < calibrated.sampling / 50
        assert exact.logprob < calibrated.logprob / 5


def test_calibrated_numerics_leave_no_trace_in_a_manifest() -> None:
    assert b"numerics" not in encode(MANIFEST)
    assert b"engine_class" not in encode(MANIFEST)
    assert b"numerics" in encode(structs.replace(MANIFEST, proofs=exact_contract()))


def test_only_engines_of_its_class_take_part_in_an_exact_run() -> None:
    run = structs.replace(MANIFEST, proofs=exact_contract())
    own = config()
    numerics.check_exact(own, run)
    assert numerics.config_for_run(own, run).batch_invariant
    assert numerics.config_for_run(own, MANIFEST) == own
    numerics.check_exact(EngineConfig(), MANIFEST)
    with pytest.raises(UsageError, match=r"set engine\.type to vllm"):
        numerics.check_exact(EngineConfig(), run)
    with pytest.raises(UsageError, match=r"exact for .* tp 1, and this machine is .* tp 2"):
        numerics.check_exact(config(tp=2), run)
    mtp = {"speculative_config": {"method": "mtp", "model": ".", "num_speculative_tokens": 1}}
    with pytest.raises(UsageError, match=r"remove engine\.vllm\.speculative_config"):
        numerics.check_exact(config(vllm=mtp), run)
    with pytest.raises(ValueError, match=r"remove engine\.vllm\.speculative_config"):
        RunConfig(engine=config(vllm=mtp), verification=VerificationConfig(numerics="exact"))


def test_the_manifest_decides_the_quantization_and_no_config_contradicts_it() -> None:
    assert b"quantization" not in encode(MANIFEST)
    assert proof_contract(RunConfig(engine=EngineConfig(quantization="fp8"))) == structs.replace(
        proof_contract(RunConfig()), quantization="fp8"
    )
    for given in ({}, {"quantization": "fp8"}):
        own = EngineConfig.model_validate(given)
        numerics.check_quantization(own, QUANTIZED)
        assert numerics.config_for_run(own, QUANTIZED).quantization == "fp8"
    for run, other, named in ((QUANTIZED, "none", "fp8"), (MANIFEST, "fp8", "none")):
        with pytest.raises(UsageError, match=rf"says quantization {named}, .*is {other}: leave it"):
            numerics.check_quantization(EngineConfig.model_validate({"quantization": other}), run)


KEEPING = structs.replace(MANIFEST, proofs=structs.replace(MANIFEST.proofs, kv_cache="kept"))


def test_the_manifest_decides_whether_engines_keep_keys_and_values() -> None:
    assert b"kv_cache" not in encode(MANIFEST)
    engine = EngineConfig(type="vllm", keep_kv_cache=True)
    assert proof_contract(RunConfig(engine=engine)).kv_cache == "kept"
    assert numerics.config_for_run(EngineConfig(type="vllm"), KEEPING).keep_kv_cache
    assert not numerics.config_for_run(engine, MANIFEST).keep_kv_cache
    numerics.check_kept(EngineConfig(type="vllm"), KEEPING)
    numerics.check_kept(EngineConfig(), MANIFEST)
    with pytest.raises(UsageError, match=r"keep keys and values: only vLLM .*set engine\.type to"):
        numerics.check_kept(EngineConfig(), KEEPING)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pp": 2}, "keep_kv_cache and pp cannot be combined"),
        ({"batch_invariant": True}, "keep_kv_cache and batch_invariant cannot"),
        ({"vllm": {"block_size": 64}}, r"keep_kv_cache and vllm\.block_size cannot"),
        (
            {"vllm": {"kv_offloading_size": 1.0}},
            r"keep_kv_cache and vllm\.kv_offloading_size cannot",
        ),
    ],
)
def test_what_was_never_tried_with_a_kept_cache_is_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig.model_validate({"type": "vllm", "keep_kv_cache": True, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": {"keep_kv_cache": True}},
        {
            "engine": {"type": "vllm", "keep_kv_cache": True},
            "verification": {"auditor": "hf"},
        },
        {
            "engine": {"type": "vllm", "keep_kv_cache": True},
            "verification": {"numerics": "exact"},
        },
    ],
)
def test_a_run_that_keeps_a_cache_has_vllm_on_both_sides_and_calibrated_numerics(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"vLLM keeps keys and values|never tried with exact"):
        RunConfig.model_validate(settings)


def test_the_auditor_of_a_run_that_keeps_a_cache_is_vllm_in_any_dtype() -> None:
    for keeps, auditor in ((False, "hf"), (True, "vllm")):
        config = RunConfig(engine=EngineConfig(type="vllm", keep_kv_cache=keeps))
        assert (config.auditor, config.may_replace_auditor) == (auditor, not keeps)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"sliding_window": 4096}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"layer_types": ["linear_attention"]}, "linear attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_only_layers_of_full_attention_keep_their_blocks(shape: dict[str, Any], kind: str) -> None:
    keeping = EngineConfig(type="vllm", keep_kv_cache=True)
    with pytest.raises(UsageError, match=f"the model has {kind}, .*leave engine.keep_kv_cache out"):
        numerics.check_keeps(keeping, shape)
    numerics.check_keeps(EngineConfig(), shape)
    numerics.check_keeps(keeping, {"sliding_window": 4096, "use_sliding_window": False})
    numerics.check_keeps(keeping, {"layer_types": ["full_attention"]})


def test_fp8_is_refused_where_the_batch_must_not_matter() -> None:
    with pytest.raises(ValueError, match=r"quantization and batch_invariant cannot be combined"):
        EngineConfig(quantization="fp8", batch_invariant=True)
    engine = EngineConfig(type="vllm", quantization="fp8")
    exact = VerificationConfig(numerics="exact")
    with pytest.raises(ValueError, match=r"leave engine\.quantization out, or set"):
        RunConfig(engine=engine, verification=exact)


def test_stages_on_one_host_do_not_take_part_in_a_run_that_replays_routes() -> None:
    run = structs.replace(MANIFEST, routes=RouteShape(layers=2, experts=8, top_k=2))
    numerics.check_routes(config(tp=2), run)
    assert numerics.config_for_run(config(tp=2), run).enable_return_routed_experts
    numerics.check_routes(config(pp=2), MANIFEST)
    numerics.check_routes(EngineConfig(), run)
    with pytest.raises(UsageError, match=r"which experts read a token: set engine\.pp to 1"):
        numerics.check_routes(config(pp=2), run)
    told: dict[str, Any] = {"training": {"enable_router_replay": True}}
    with pytest.raises(
        ValueError, match=r"set engine\.pp to 1, or leave training\.enable_router_replay"
    ):
        RunConfig.model_validate(told | {"engine": {"type": "vllm", "pp": 2}})
    exact = {"engine": {"type": "vllm"}, "verification": {"numerics": "exact"}}
    RunConfig.model_validate(told | exact)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({}, "need vLLM"),
        ({"engine": {"type": "vllm"}, "verification": {"auditor": "hf"}}, "need vLLM"),
    ],
)
def test_a_run_that_cannot_be_exact_is_refused_at_once(section: dict[str, Any], words: str) -> None:
    section["verification"] = {"numerics": "exact", **section.get("verification", {})}
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(section)
