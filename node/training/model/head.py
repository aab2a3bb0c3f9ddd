"""Logprobs and entropies straight from hidden states, chunk by chunk. Imports torch: import lazily.

The logits of all tokens never exist: those of a chunk are made, read and dropped, and made again in backward.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor


def head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) of `targets`, and the entropies (nats, no gradient).

    `hidden` [N, d] and `weight` [V, d] share a dtype; both results are [N] float32, softmax and sums included.
    At most `chunk` x V logits exist at a time, in the dtype of `hidden`.
    """
    return _HeadLogprobs.apply(hidden, weight, targets, 1.0 / temperature, chunk)  # type: ignore[no-any-return]


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        read, _ = _kernels(hidden.is_cuda)
        # three tensors, not rows of one: autograd must not take the results for views
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, log_z = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _chunks(len(hidden), chunk):
            logits = hidden[part] @ weight.T
            logprobs[part], entropy[part], log_z[part] = read(logits, targets[part], scale)
        ctx.save_for_backward(hidden, weight, targets, log_z)
        ctx.scale, ctx.chunk = scale, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, log_z = ctx.saved_tensors
        _, pull = _kernels(hidden.is_cuda)
        of_hidden = torch.empty_like(hidden)
        # fp32: one chunk more or less must not change what bf16 can add up
        learns = ctx.needs_input_grad[1]
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        for part in _chunks(len(hidden), ctx.chunk):
            logits = hidden[part] @ weight.T
            of_logits = pull(logits, targets[part], log_z[part], grad[part], ctx.scale)
            of_hidden[part] = of_logits @ weight
            if of_weight is not None:
                of_weight += of_logits.T @ hidden[part]
        found = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, found, None, None, None


def _read(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of the targets, entropies and log of the partition function, [N] each."""
    scaled = logits.float() * scale
    log_z = scaled.logsumexp(-1)
    mean = ((scaled - log_z[:, None]).exp() * scaled).sum(-1)
    chosen = logits.gather(-1, targets[:, None])[:, 0].float() * scale
    return chosen - log_z, log_z - mean, log_z


def _pull(logits: Tensor, targets: Tensor, log_z: Tensor, grad: Tensor, scale: float) -> Tensor:
    """The gradient of the logits: (one-hot - softmax) x grad x scale."""
    probabilities = (logits.float() * scale - log_z[:, None]).exp()
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = (columns[None] == targets[:, None]).float()
    return ((hit - probabilities) * (grad * scale)[:, None]).to(logits.dtype)


@cache
def _kernels(fused: bool) -> tuple[Any, Any]:
    """_read and _pull; on a GPU compiled, so that a chunk of fp32 logits never exists either."""
    if not fused:
        return _read, _pull
    return torch.compile(_read, dynamic=True), torch.compile(_pull, dynamic=True)


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, count)) for at in range(0, count, size))
