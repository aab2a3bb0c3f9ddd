"""Attention within each packed sequence, never across sequences.

Imports torch: import lazily. Sequences lie one after the other in one row; no kernel may let one sequence
attend to another. On CUDA the kernels sit behind one custom operator, so that compilation and checkpointing see
one opaque step.

Layers may differ from causal attention over the whole sequence in three ways. A window: each token attends to
that many tokens, itself included. A sink: a learned score per head in the softmax's sum, with value 0 (Xiao et
al. 2023, as in gpt-oss). A soft cap: scores s become c tanh(s / c) (Gemma 2).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from .attention_kernels import Layout, Rules, kernel_for, longest_of, parts_of, scores_of, seen

ATTENTION_NAME = "primerl_packed"
"""Name under which this attention is registered with transformers."""
LOOSE = 2.0
"""On a CPU, sequences are padded to the longest and computed in one call, unless that makes more than this
times the tokens."""

HALF = (torch.bfloat16, torch.float16)
"""Dtypes supported by the GPU kernels."""

_ours: Any = torch.ops.primerl


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sequence_ends: Tensor,
    sequence_offsets: Tensor,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    context: DeviceMesh | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers expects.

    `query` is [1, H, T, D], `key` and `value` are [1, KV, T, D]. Returns [1, T, H, D]. There is no mask: the
    sequence layout replaces it. `s_aux` [H] are sinks. With `context`, each of its ranks has a part of the
    row's tokens; between two all-to-all exchanges each rank has all tokens of a part of the heads (Ulysses,
    Jacobs et al. 2023).
    """
    q, k, v = (rows[0].transpose(0, 1) for rows in (query, key, value))
    if context is not None:
        q, k, v = (_all_tokens(rows, context) for rows in (q, k, v))
        s_aux = None if s_aux is None else s_aux.chunk(context.size())[context.get_local_rank()]
    rules = Rules(scaling, sliding_window or 0, softcap or 0.0)
    if q.is_cuda and q.dtype in HALF:
        width = v.shape[-1]
        if width < q.shape[-1]:  # the kernels require equal head widths
            v = F.pad(v, (0, q.shape[-1] - width))
        mixed, _lse = _ours.packed_attention(
            q, k, v, s_aux, sequence_ends, sequence_offsets, scaling, rules.window, rules.cap
        )
        mixed = mixed[..., :width]
    else:
        mixed = attend_plainly(q, k, v, sequence_ends, rules, s_aux)
    if context is not None:
        mixed = _all_heads(mixed, context)
    return mixed[None], None


def _all_tokens(part: Tensor, context: DeviceMesh) -> Tensor:
    """Exchange [T / ranks, H, D] -> [T, H / ranks, D]."""
    ranks = context.size()
    by_rank = part.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _exchange(by_rank, context)


def _all_heads(part: Tensor, context: DeviceMesh) -> Tensor:
    """Exchange [T, H / ranks, D] -> [T / ranks, H, D]."""
    ranks = context.size()
    heads = _exchange(part.contiguous(), context).unflatten(0, (ranks, -1))
    return heads.transpose(0, 1).flatten(1, 2)


def _exchange(rows: Tensor, context: DeviceMesh) -> Tensor:
    """Send the i-th of equal parts to rank i; its part takes the same place."""
    sizes = [len(rows) // context.size()] * context.size()
    return all_to_all_single_autograd(rows, sizes, sizes, context)


# -- CUDA ------------------------------------------------------------------------------------------


@torch.library.custom_op("primerl::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ends: Tensor,
    offsets: Tensor,
    scale: float,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention: q [T, H, D], k and v [T, KV, D], sinks [H] -> [T, H, D].

    Also returns the logsumexp [H, T] for backward. `window` 0 means all earlier tokens, `cap` 0 means no cap.
    """
    rules = Rules(scale, window, cap)
    out, lse = kernel_for(q, k, rules).forward(q, k, v, Layout(ends, offsets), rules)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.contiguous(), lse.contiguous()  # a kernel may lay `out` out as it finds `q`


@packed_attention.register_fake
def _(q: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("primerl::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    offsets: Tensor,
    scale: float,
    window: int,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    `out` and `lse` include the sinks, so a kernel need not know of sinks.
    """
    rules = Rules(scale, window, cap)
    kernel, layout = kernel_for(q, k, rules), Layout(ends, offsets)
    gradients = kernel.backward(grad.contiguous(), q, k, v, out, lse, layout, rules)
    of_q, of_k, of_v = (gradient.contiguous() for gradient in gradients)
    return of_q, of_k, of_v


@packed_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, sinks, ends, offsets, *ctx.rules = inputs
    ctx.save_for_backward(q, k, v, *output, ends, offsets, sinks)


def _backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    *saved, sinks = ctx.saved_tensors
    gradients = _ours.packed_attention_backward(grad, *saved, *ctx.rules)
    out, lse = saved[3], saved[4]
    of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
    return *gradients, of_sinks, None, None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_keep)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks to attention `out` [T, H, D] and its logsumexp `lse` [H, T].

    A sink adds exp(sink) to the softmax's sum and nothing to the weighted values.
    """
    scores = sinks.to(lse.dtype)[:, None]
    weight = torch.sigmoid(lse - scores)
    return (out * weight.T[..., None]).to(out.dtype), torch.logaddexp(lse, scores.expand_as(lse))


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, [H].

    It is minus the sink's share of the softmax times grad . out, summed over tokens. `out` [T, H, D] and `lse`
    [H, T] include the sinks.
    """
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    pulled = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * pulled.T).sum(1).to(sinks.dtype)


# -- CPUs, and fp32 -------------------------------------------------------------------------------------------


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, rules: Rules, sinks: Tensor | None = None
) -> Tensor:
    def mixed(rows: list[Tensor]) -> Tensor:
        q, k, v = rows
        return _mixed(q, k, v, rules, sinks)

    return sequence_by_sequence(mixed, [q, k, v], ends)


def sequence_by_sequence(
    compute: Callable[[list[Tensor]], Tensor], rows: list[Tensor], ends: Tensor
) -> Tensor:
    """Apply `compute` [S, L, ...] to packed `rows` [T, ...] and pack the result again.

    `compute` must be causal. Sequences are padded with zeros to the longest, or computed one by one where
    padding makes too many tokens.
    """
    parts = parts_of(ends)
    longest = longest_of(parts)
    if longest * len(parts) > LOOSE * len(rows[0]):
        return torch.cat([compute([row[part][None] for row in rows])[0] for part in parts])
    starts = torch.tensor([part.start for part in parts])
    places = starts[:, None] + torch.arange(longest)
    inside = places < ends[:, None]
    device = rows[0].device
    # a row of zeros follows the last token
    places, inside = places.where(inside, len(rows[0])).to(device), inside.to(device)
    return compute([F.pad(row, (0, 0) * (row.dim() - 1) + (0, 1))[places] for row in rows])[inside]


def _mixed(q: Tensor, k: Tensor, v: Tensor, rules: Rules, sinks: Tensor | None) -> Tensor:
    """Compute causal attention of [S, L, H, D]; no token attends to the padding on its right."""
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    length = q.shape[2]
    window = rules.window if rules.window < length else 0
    if sinks is not None or rules.cap:
        mixed = _softmax_mixed(q, k, v, seen(length, window, q.device), rules, sinks)
    else:
        mask = seen(length, window, q.device) if window else None
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=rules.scale, enable_gqa=True
        )
    return mixed.transpose(1, 2)


def _softmax_mixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rules: Rules, sinks: Tensor | None
) -> Tensor:
    """Return [S, H, L, D] of q [S, H, L, D], k and v [S, KV, L, D].

    Holds all scores in memory at once.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(groups, 1) for heads in (k, v))
    scores = q @ k.transpose(2, 3)
    scores = scores_of(scores.to(torch.promote_types(scores.dtype, torch.float32)), mask, rules)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


attend_plainly: Any = torch.compiler.disable(_attend_plainly)  # reads the layout in Python
