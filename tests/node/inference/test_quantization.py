"""FP8 weights: the same bits everywhere, and what they cost a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_cases import FP32, MADE, SHAPE, blended, make_qwen3, request

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference import quantization
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.model import LanguageModel
from primerl.node.weights.state import State

TOKENS = torch.randint(0, 272, (3, 40), generator=torch.Generator().manual_seed(0))
GOLDEN = [
    ([1.0, -0.5, 0.3, 0.0], "7e f6 70 00", "2549123b"),
    ([448.0, 1.0, -0.0, 17.0], "7e 38 80 58", "0000803f"),
    ([0.02, -0.00123, 0.0005, 0.0101], "7e de 53 76", "b76d3b38"),
    ([3e38, 1.0, -2e38, 1e30], "7e 00 f9 00", "9224017b"),
    ([0.0, -0.0, 0.0, -0.0], "00 80 00 80", "00008000"),
    ([1e-40, -1e-40, 0.0, 5e-41], "04 84 00 04", "00008000"),
]
"""Rows (bf16), codes, and bytes of the scale (fp32, little-endian)."""


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return (drawn * 0.02).bfloat16()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    directory = tmp_path_factory.mktemp("model")
    state = make_qwen3(directory, 0)
    return directory, state, make_qwen3(tmp_path_factory.mktemp("other"), 1)


@pytest.mark.parametrize(("row", "codes", "scale"), GOLDEN)
def test_golden_bytes(row: list[float], codes: str, scale: str) -> None:
    found, scales = quantization.quantize(torch.tensor([row]).bfloat16())
    assert found.view(torch.uint8).numpy().tobytes().hex(" ") == codes
    assert scales.numpy().astype("<f4").tobytes().hex() == scale


def test_each_code_is_the_nearest_number_that_fp8_has() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(quantization.FP8).double()
    numbers = numbers[numbers.isfinite()]
    original = weight(16, 512)
    codes, scales = quantization.quantize(original)
    exact = original.double() / scales.double()[:, None]
    nearest = (exact[..., None] - numbers).abs().amin(-1)
    assert torch.allclose((exact - codes.double()).abs(), nearest, rtol=0, atol=1e-4)
    assert bool((codes.double().abs().amax(1) == 448).all())


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    """Tensor parallelism may cut outputs anywhere; so may the blocks that are quantized at once."""
    whole = weight(2500, 2048)
    assert whole.numel() > quantization.BLOCK
    codes, scales = quantization.quantize(whole)
    for rows in (slice(1), slice(7, 8), slice(2040, 2060)):
        part, own = quantization.quantize(whole[rows].clone())
        assert same(part, codes[rows])
        assert torch.equal(own, scales[rows])


def test_one_huge_weight_coarsens_its_own_row_alone() -> None:
    original = weight(4, 64)
    original[1, 5] = 2.0**20
    found = quantization.dequantize(*quantization.quantize(original), torch.float32)
    assert float(found[1, 5]) == pytest.approx(2.0**20, rel=1e-6)
    assert int(found[1].count_nonzero()) == 1
    calm = [0, 2, 3]
    assert torch.allclose(found[calm], original[calm].float(), rtol=2**-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    original = weight(4, 64)
    original[2, 3] = bad
    with pytest.raises(EngineError, match="infinite or NaN"):
        quantization.quantize(original)


def test_an_empty_weight_and_one_of_fp32_are_quantized() -> None:
    codes, scales = quantization.quantize(torch.zeros(3, 0))
    assert codes.shape == (3, 0)
    assert scales.tolist() == [quantization.LEAST_SCALE] * 3
    original = weight(4, 64)
    kept = original.float()
    assert same(quantization.quantize(kept)[0], quantization.quantize(original)[0])
    assert torch.equal(kept, original.float())


def test_linear_layers_are_quantized_and_nothing_else(model: tuple[Path, State, State]) -> None:
    _, state, _ = model
    names = {
        name for name, tensor in state.items() if quantization.is_quantized(name, tensor.shape)
    }
    kinds = {name.split(".")[-2] for name in names}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(names) == 7 * MADE["num_hidden_layers"]
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert not quantization.is_quantized(name, (8, 8))
    assert not quantization.is_quantized("model.layers.0.self_attn.q_proj.bias", (8,))
    after = quantization.dequantized_state(state, torch.float32)
    assert {name for name in state if after[name] is not state[name]} == names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_in_place_gives_the_bits_of_a_fresh_model(
    model: tuple[Path, State, State], dtype: str
) -> None:
    directory, state, other = model
    options: dict[str, Any] = {"dtype": dtype, "device": "cpu", "quantization": "fp8"}
    network = LanguageModel.build(directory, state, **options)
    with torch.inference_mode():
        before = network.forward(TOKENS)
        for seed in range(3):
            state, changed = blended(state, other, 0.01, seed)
            assert network.update(state, changed)
        fresh = LanguageModel.build(directory, state, **options).forward(TOKENS)
        assert torch.equal(network.forward(TOKENS), fresh)
        assert not torch.equal(before, fresh)
        plain, far = (
            LanguageModel.build(directory, one, dtype=dtype, device="cpu").forward(TOKENS)
            for one in (state, other)
        )
    costs, foreign = (
        float((fresh.float().log_softmax(-1) - one.float().log_softmax(-1)).abs().mean())
        for one in (plain, far)
    )
    assert 0 < 8 * costs < foreign


async def test_the_embedded_engine_draws_by_quantized_weights_after_loads_and_updates(
    model: tuple[Path, State, State],
) -> None:
    directory, state, other = model
    after, changed = blended(state, other, 0.05)
    config = FP32.model_copy(update={"quantization": "fp8"})
    found: list[Any] = []
    for one, update in ((config, True), (config, False), (FP32, False)):
        engine = HfEngine(one)
        try:
            await engine.start(directory, fingerprint="projection")
            await engine.load(0, state if update else after)
            if update:
                await engine.update(0, after, changed)
            found.append(await engine.generate(request(max_tokens=24)))
        finally:
            await engine.close()
    assert found[0] == found[1]
    assert found[0].logprobs != found[2].logprobs


async def test_a_mixture_of_experts_is_refused_before_anything_starts(tmp_path: Path) -> None:
    make_qwen3(tmp_path, 0, SHAPE | {"num_experts": 4})
    engine = HfEngine(EngineConfig(quantization="fp8"))
    with pytest.raises(UsageError, match="mixture of experts"):
        await engine.start(tmp_path)
    await engine.close()
