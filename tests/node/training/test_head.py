"""Logprobs straight from hidden states: what torch's log_softmax gives, whatever the chunks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import make_family
from torch import Tensor

from primerl.node.errors import EngineError
from primerl.node.models import huggingface
from primerl.node.training.model import check_head, compiled_by_rows, head_logprobs

TOKENS, WIDTH, VOCABULARY = 13, 7, 29
CHUNKS = [1, 2, 5, TOKENS, TOKENS + 1, 10_000]


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=rng, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=rng, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=rng)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float = 0.0
) -> Tensor:
    logits = hidden.double() @ weight.double().T
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def pulled(logprobs: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Gradients of a sum in which every token has another weight."""
    pull = torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)
    return torch.autograd.grad(logprobs, (hidden, weight), pull)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_log_softmax(
    temperature: float, dtype: torch.dtype, cap: float
) -> None:
    hidden, weight, targets = inputs(dtype=dtype)
    expected = plain(hidden, weight, targets, temperature, cap)
    slopes = pulled(expected, hidden, weight)
    for chunk in CHUNKS:
        logprobs, _ = head_logprobs(hidden, weight, targets, temperature, chunk, cap)
        assert logprobs.dtype == torch.float32
        assert torch.allclose(logprobs.double(), expected, atol=1e-5), chunk
        for slope, right in zip(pulled(logprobs, hidden, weight), slopes, strict=True):
            assert slope.dtype == dtype
            assert torch.allclose(slope, right, atol=3e-5), chunk


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("chunk", [2, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_over_a_support_values_and_gradients_are_those_of_a_softmax_of_these_tokens_alone(
    chunk: int, dtype: torch.dtype, cap: float
) -> None:
    hidden, weight, targets = inputs(dtype=dtype)
    support = torch.full((TOKENS, 5), -1)
    support[:, 0] = targets
    support[3:9, 1:4] = (targets[3:9, None] + torch.arange(1, 4)) % VOCABULARY
    support[9:] = -1  # over all
    found, entropy = head_logprobs(hidden, weight, targets, 0.7, chunk, cap, support)
    logits = hidden.double() @ weight.double().T
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / 0.7
    left = torch.zeros(TOKENS, VOCABULARY, dtype=torch.int64)
    left = left.scatter_add(1, support.clamp_min(0), (support >= 0).long()) > 0
    left[9:] = True
    kept = logits.masked_fill(~left, -torch.inf)
    wanted = kept.gather(1, targets[:, None])[:, 0] - kept.logsumexp(-1)
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    assert torch.equal(found[:3], torch.zeros(3))
    assert torch.equal(entropy, head_logprobs(hidden, weight, targets, 0.7, chunk, cap)[1])
    for one, other in zip(
        pulled(found, hidden, weight), pulled(wanted, hidden, weight), strict=True
    ):
        assert torch.allclose(one, other, atol=3e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropies_are_those_of_the_softmax_and_have_no_gradient(temperature: float) -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = head_logprobs(hidden, weight, targets, temperature, 4)
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_change_no_bit_of_the_values(chunk: int) -> None:
    hidden, weight, targets = inputs(dtype=torch.float64)
    whole = head_logprobs(hidden, weight, targets, 1.0, TOKENS)
    parts = head_logprobs(hidden, weight, targets, 1.0, chunk)
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=0)


def test_no_token_gives_nothing_and_pulls_nothing() -> None:
    hidden, weight, targets = inputs(0)
    logprobs, entropy = head_logprobs(hidden, weight, targets, 1.0, 8)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, WIDTH)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_logits_so_large_that_their_exponentials_overflow_are_read_right() -> None:
    hidden, weight, targets = inputs()
    found, entropy = head_logprobs(hidden * 1e3, weight, targets, 1.0, 3)
    wanted = plain(hidden * 1e3, weight, targets, 1.0)
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-2)
    assert entropy.isfinite().all()
    (grad,) = torch.autograd.grad(found.sum(), (weight,))
    assert grad.isfinite().all()


def test_bf16_is_summed_up_in_fp32() -> None:
    hidden, weight, targets = inputs(dtype=torch.bfloat16)
    found, _ = head_logprobs(hidden, weight, targets, 1.0, 1)
    wanted = plain(hidden, weight, targets, 1.0)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), wanted, atol=0.05)  # the logits are rounded
    one, other = (torch.autograd.grad(x.sum(), (weight,))[0] for x in (found, wanted))
    assert one.dtype == torch.bfloat16
    assert torch.allclose(one.float(), other.float(), atol=0.1)


def test_the_results_may_be_changed_in_place() -> None:
    """FSDP warns of views, whose hooks an in-place operation would silently drop."""
    hidden, weight, targets = inputs()
    for one in head_logprobs(hidden, weight, targets, 1.0, 8):
        assert not one._is_view()


def test_one_compilation_serves_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="eager")
    )  # no C++ is built

    def normed(rows: Tensor, scale: Tensor) -> Tensor:
        return rows / rows.norm(dim=-1, keepdim=True) * scale[:, None]

    compiled = compiled_by_rows(normed)
    compiled(torch.ones(5, 16), torch.ones(5))
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (2, 7, 33):
            rows, scale = torch.randn(count, 16), torch.rand(count)
            assert torch.allclose(compiled(rows, scale), normed(rows, scale), atol=1e-6)
        with pytest.raises(RuntimeError, match="recompile"):
            compiled(torch.ones(5, 17), torch.ones(5))


def test_a_model_that_does_more_with_hidden_states_is_refused(tmp_path: Path) -> None:
    make_family("granite", tmp_path, logits_scaling=2.0)
    model: Any = huggingface.load_model(tmp_path)
    check_head(model)
    own = model.forward

    def shifted(*given: Any, **named: Any) -> Any:
        found = own(*given, **named)
        found.logits = found.logits + 1.0
        return found

    model.forward = shifted
    with pytest.raises(EngineError, match="does more between hidden states and logits"):
        check_head(model)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_5_text", "gpt_oss"])
def test_the_head_is_checked_without_running_a_layer(family: str, tmp_path: Path) -> None:
    make_family(family, tmp_path)
    model: Any = huggingface.load_model(tmp_path)
    model.base_model.layers = None
    check_head(model)
    with pytest.raises(TypeError):  # the model itself is as before
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
