"""Packed prefills on a GPU: flash attention and kernels give what plain operations give, without waiting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_cases import SHAPE, make_qwen3
from support.gpu_cases import no_waiting

from primerl.node.inference.kernels import Kernels, differ
from primerl.node.inference.model import build_network
from primerl.node.inference.qwen3 import Plain, Qwen3Network

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WIDE = SHAPE.model_copy(
    update={"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
)
LENGTHS = [900, 300, 300, 7, 1]
NEAR = {"bfloat16": 0.05, "float32": 1e-3}
"""Relative, root mean square."""


@pytest.fixture(params=sorted(NEAR))
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Qwen3Network:
    state = make_qwen3(tmp_path, 3, WIDE)
    made = build_network(tmp_path, state, dtype=request.param, device="cuda")
    assert isinstance(made, Qwen3Network)
    return made


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 272, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).cuda()


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def near(network: Qwen3Network) -> float:
    return NEAR[str(network.empty_cache(1, 1).dtype).rpartition(".")[2]]


def test_packed_is_what_each_sequence_alone_is(network: Qwen3Network) -> None:
    tokens = some_tokens()
    with torch.inference_mode():
        together = network.packed(tokens, LENGTHS).split(LENGTHS)
        alone = [network.hidden(one[None])[0] for one in tokens.split(LENGTHS)]
        for found, wanted in zip(together, alone, strict=True):
            assert apart(found, wanted) < near(network)


def test_kernels_give_what_plain_operations_give(network: Qwen3Network) -> None:
    inside: Any = network
    layer, heads, kv_heads = inside._blocks[0], network.heads, network.kv_heads
    kernels, plain = Kernels(1e-6, kv_heads), Plain(1e-6, kv_heads)
    assert isinstance(inside._kernels, Kernels)
    with torch.inference_mode():
        assert differ(kernels, plain, layer, heads) == ""
        assert "off" in differ(Kernels(1.0, kv_heads), plain, layer, heads)
        with_kernels = network.packed(some_tokens(), LENGTHS)
        inside._kernels = inside._plain
        assert apart(with_kernels, network.packed(some_tokens(), LENGTHS)) < near(network)


def test_nothing_waits_for_the_device(network: Qwen3Network) -> None:
    tokens = some_tokens()
    with torch.inference_mode():
        network.packed(tokens, LENGTHS)
        with no_waiting():
            network.packed(tokens, LENGTHS)
