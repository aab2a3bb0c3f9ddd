"""What a worker says of how it computes."""

from importlib.metadata import version

import pytest

from primerl.node.config.engine import EngineConfig
from primerl.node.worker.numerics import device_family, numerics_of, release_of
from primerl.protocol.numerics import NumericsClass

RELEASES = {"vllm": "0.25.1", "torch": "2.13.0+cu130"}
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("product", "family"),
    [
        (H100, "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Tesla T4", "T4"),
        ("", "gpu"),
    ],
)
def test_memory_and_form_of_a_gpu_do_not_change_how_it_computes(product: str, family: str) -> None:
    assert device_family(product) == family


def stated(*gpus: str, pipeline: bool = False, **engine: object) -> NumericsClass:
    config = EngineConfig.model_validate({"dtype": "bfloat16", **engine})
    return numerics_of(config, pipeline=pipeline, gpus=lambda: gpus, release=RELEASES.__getitem__)


def test_vllm_states_its_release_its_gpu_and_its_tensor_parallelism() -> None:
    found = stated(H100, H100, type="vllm", tp=2)
    assert found == NumericsClass("vllm", "0.25.1", "H100", 2, "bfloat16")
    assert stated(H100, H100, H100, H100, type="vllm", tp="auto", dp=2).tp == 2
    assert stated(H100, type="vllm", pipeline=True).engine == "vllm pipeline"


def test_the_embedded_engine_states_torch_and_is_on_one_device() -> None:
    assert stated(H100, H100, type="hf", tp=2) == NumericsClass(
        "hf", "2.13.0+cu130", "H100", 1, "bfloat16"
    )
    assert stated(H100, type="hf", device="cpu").device == "cpu"
    assert stated(type="hf").device == "cpu"


def test_a_release_is_found_by_the_module_whatever_its_distribution_is_called() -> None:
    assert release_of("torch") == version("torch")
    assert release_of("yaml") == version("PyYAML")
    assert release_of("no_such_module") == ""


def test_an_odd_product_name_still_makes_a_claim_that_travels() -> None:
    assert stated("NVIDIA \u00b5X1\n" + 100 * "x").device == "X1 " + 61 * "x"
