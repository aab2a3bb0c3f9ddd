"""Linear attention on packed rows: one call for all sequences, only where the kernels keep these apart."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from primerl.node.training import linear_attention
from primerl.node.training.attention_kernels import Layout
from primerl.node.training.linear_attention import reads_packed_rows

CPU = torch.device("cpu")
LENGTHS = [40, 1, 3, 70]
ORIGINAL: Callable[..., Any] = modeling.torch_chunk_gated_delta_rule


def layer(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    make: Any = Qwen3_5TextConfig
    config = make(
        hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], **sizes, **heads
    )
    return modeling.Qwen3_5GatedDeltaNet(config, 0)


class Kernel:
    """Stands in for flash-linear-attention, which needs a GPU: computes each sequence by transformers' code."""

    def __init__(self, *, mixes: bool = False) -> None:
        self.calls: list[int] = []
        self.mixes = mixes

    def __call__(
        self, *rows: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        self.calls.append(rows[0].shape[1])
        if cu_seqlens is None or self.mixes:
            return ORIGINAL(*rows, g=g, beta=beta, **named)
        sizes = cu_seqlens.diff().tolist()
        parts = zip(*(one.split(sizes, 1) for one in (*rows, g, beta)), strict=True)
        found = [ORIGINAL(q, k, v, g=g, beta=beta, **named)[0] for q, k, v, g, beta in parts]
        return torch.cat(found, 1), None


def installed(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", kernel)


def test_a_row_is_read_in_one_call_as_if_each_sequence_were_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, layout = layer(), Layout.of(LENGTHS, CPU)
    row = torch.randn(1, sum(LENGTHS), 32)
    alone = torch.cat([module(hidden_states=one) for one in row.split(LENGTHS, 1)], 1)
    kernel = Kernel()
    installed(monkeypatch, kernel)
    assert reads_packed_rows(module, CPU, torch.float32)
    kernel.calls.clear()
    read = linear_attention.in_one_call(module)
    found = read(row, sequence_ends=layout.ends, sequence_offsets=layout.offsets)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    assert kernel.calls == [sum(LENGTHS) + 3 * len(LENGTHS)]  # three zeros after each sequence


def test_gradients_of_one_call_are_those_of_each_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, layout = layer(), Layout.of(LENGTHS, CPU)
    installed(monkeypatch, Kernel())
    found: list[dict[str, Tensor]] = []
    for read in (
        linear_attention.in_one_call(module),
        linear_attention.sequence_for_sequence(module),
    ):
        row = torch.randn(1, sum(LENGTHS), 32, generator=torch.Generator().manual_seed(1))
        row.requires_grad_(True)
        out = read(row, sequence_ends=layout.ends, sequence_offsets=layout.offsets)
        module.zero_grad(set_to_none=True)
        (out * out).sum().backward()
        assert row.grad is not None
        of_weights = {name: one.grad for name, one in module.named_parameters()}
        found.append({"row": row.grad, **of_weights})
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)


def test_a_kernel_that_mixes_sequences_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, Kernel(mixes=True))
    assert not reads_packed_rows(layer(), CPU, torch.float32)
    assert "flash-linear-attention is not used: packed rows are" in caplog.text


class Broken(torch.autograd.Function):
    """Computes nothing in forward, and refuses in backward, as fla does with some releases of Triton."""

    @staticmethod
    def forward(ctx: Any, row: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return row.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("this Triton compiles it wrongly")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kernels_that_fail_are_left_for_the_code_of_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    module, layout = layer(), Layout.of(LENGTHS, CPU)
    row = torch.randn(1, sum(LENGTHS), 32)
    alone = torch.cat([module(hidden_states=one) for one in row.split(LENGTHS, 1)], 1)

    @functools.wraps(inspect.unwrap(ORIGINAL))
    def broken(*rows: Tensor, **_: Any) -> tuple[Tensor, None]:
        return Broken.apply(rows[2]), None  # type: ignore[no-untyped-call]

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", broken)
    monkeypatch.setattr(linear_attention, "find_spec", str)

    def on_cpu(module: Any, *_: object) -> bool:
        return reads_packed_rows(module, CPU, torch.float32)

    monkeypatch.setattr(linear_attention, "reads_packed_rows", on_cpu)
    causal = torch.nn.Module()
    causal.linear_attn = module
    linear_attention.reset_between_sequences(causal, torch.device(device), torch.bfloat16)
    tried = "RuntimeError: this Triton compiles it wrongly" in caplog.text
    assert tried is (device == "cuda")
    found = module(row, sequence_ends=layout.ends, sequence_offsets=layout.offsets)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    found.sum().backward()


def test_without_kernels_sequences_are_read_one_by_one() -> None:
    assert not reads_packed_rows(layer(), CPU, torch.float32)
