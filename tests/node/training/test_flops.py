"""The cost of a step: closed forms on known models, and the figures that were published with them."""

from types import SimpleNamespace
from typing import Any

import pytest

from primerl.node.training.meter import Cost, cost_of, peak_flops

PEAK = 989e12
SMALL = 596_049_920
"""Parameters of Qwen3-0.6B, whose head is its embedding."""


def qwen3(**changes: Any) -> Any:
    """Qwen3-0.6B's shape."""
    from transformers import Qwen3Config

    make: Any = Qwen3Config
    shape: dict[str, Any] = {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    return make(**(shape | changes))


def qwen3_moe(**changes: Any) -> Any:
    """Qwen3-30B-A3B's shape."""
    from transformers import Qwen3MoeConfig

    make: Any = Qwen3MoeConfig
    shape: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    }
    return make(**(shape | changes))


def counted(config: Any) -> int:
    """Parameters of the model that transformers makes of it, without any memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    ("length", "rate", "percent"),
    [(16_384, 11_900, 11.1), (65_536, 10_150, 26.8), (16_384, 25_500, 23.7)],
)
def test_published_rates_are_the_published_share_of_the_peak(
    length: int, rate: float, percent: float
) -> None:
    """Of prime-rl on Qwen3-0.6B and an H100, in tokens per second."""
    config = qwen3()
    assert counted(config) == SMALL
    cost = cost_of(config, SMALL)
    flops_per_token = cost.flops([length]) / length
    assert 100 * rate * flops_per_token / PEAK == pytest.approx(percent, rel=0.02)


def test_a_token_costs_six_flops_for_each_parameter_and_its_share_of_attention() -> None:
    cost = cost_of(qwen3(), SMALL)
    assert cost == Cost(SMALL, 28 * 16 * 128)
    assert cost.flops([1000]) == 6 * 1000 * SMALL + 6 * 1000**2 * 28 * 16 * 128
    assert cost.flops([]) == 0


def test_packed_sequences_cost_less_than_a_whole_one() -> None:
    cost = cost_of(qwen3(), SMALL)
    assert cost.flops([500, 500]) < cost.flops([1000])
    assert cost.flops([500, 500]) == 2 * cost.flops([500])


def test_an_embedding_that_is_not_the_head_costs_nothing() -> None:
    config = qwen3(tie_word_embeddings=False)
    table = 151_936 * 1024
    assert counted(config) == SMALL + table
    assert cost_of(config, SMALL + table) == cost_of(qwen3(), SMALL)


def test_a_missing_head_dim_is_derived_from_the_model_width() -> None:
    config = SimpleNamespace(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=10, head_dim=None
    )
    assert cost_of(config, 1000) == Cost(1000 - 640, 3 * 64)


def test_of_experts_only_those_that_a_token_visits_cost() -> None:
    """The name of Qwen3-30B-A3B: 30.5 billion parameters, 3.3 billion of them active."""
    config = qwen3_moe()
    total = counted(config)
    assert total == pytest.approx(30.53e9, rel=1e-3)
    table = 151_936 * 2048
    active = cost_of(config, total).parameters + table
    assert active == pytest.approx(3.35e9, rel=5e-3)
    idle = 120 * 3 * 2048 * 768 * 48
    assert active == total - idle


def test_layers_without_experts_are_not_taken_for_mixtures() -> None:
    sparse = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = qwen3_moe(**sparse)
    total = counted(config)
    idle = total - cost_of(config, total).parameters - 151_936 * 2048
    assert idle == 120 * 3 * 2048 * 768 * 2


def test_a_device_is_known_by_the_longest_name_in_its_own() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == PEAK
    assert peak_flops("NVIDIA GB200") != peak_flops("NVIDIA B200")
    assert peak_flops("NVIDIA GeForce RTX 4090") == 165e12
    assert peak_flops("a toaster") is None
