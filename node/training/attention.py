"""Attention within each packed sequence, never across sequences. Imports torch: import lazily.

Sequences lie one after the other in one row; nothing of one may ever reach another, whatever the kernel. On
CUDA the kernels stand behind one custom operator, so that compilation and checkpointing see one opaque step.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from ..ops.errors import named_line

ATTENTION_NAME = "primerl_packed"
"""What transformers' models call this attention."""
LONG = 2048
"""Mean length from which cuDNN's kernel, called once a sequence, beats the flash kernel called once for all
(H200: 1.6 against 1.8 ms for 32 x 2,048 tokens, 0.7 against 0.4 for 16 x 1,024)."""
LOOSE = 2.0
"""On a CPU sequences are padded to the longest, in one call, unless that makes over this times the tokens."""

HALF = (torch.bfloat16, torch.float16)
"""What the kernels for GPUs compute in."""

_aten: Any = torch.ops.aten
_ours: Any = torch.ops.primerl


@dataclass(frozen=True)
class Layout:
    """Where the sequences of a packed row end."""

    ends: Tensor
    """int32 [S], on the CPU: what loops over sequences reads it without waiting for a device."""
    offsets: Tensor
    """int32 [S + 1] on the device, with a leading 0."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Layout":
        """The layout of sequences of these lengths."""
        ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(ends, F.pad(ends, (1, 0)).to(device, non_blocking=True))


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
    context: DeviceMesh | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: query [1, H, T, D], key and value [1, KV, T, D].

    Returns [1, T, H, D]. There is no mask: the layout says everything. With `context` each of its ranks
    has a part of the row's tokens; between two exchanges each has all tokens of a part of the heads
    (Ulysses, Jacobs et al. 2023).
    """
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    if context is not None:
        q, k, v = (_all_tokens(one, context) for one in (q, k, v))
    if q.is_cuda and q.dtype in HALF:
        mixed, _lse = _ours.packed_attention(q, k, v, sequence_ends, sequence_offsets, scaling)
    else:
        mixed = attend_plainly(q, k, v, sequence_ends, scaling)
    if context is not None:
        mixed = _all_heads(mixed, context)
    return mixed[None], None


def _all_tokens(part: Tensor, context: DeviceMesh) -> Tensor:
    """[T / ranks, H, D] -> [T, H / ranks, D]."""
    ranks = context.size()
    by_rank = part.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _exchange(by_rank, context)


def _all_heads(part: Tensor, context: DeviceMesh) -> Tensor:
    """[T, H / ranks, D] -> [T / ranks, H, D]."""
    ranks = context.size()
    found = _exchange(part.contiguous(), context).unflatten(0, (ranks, -1))
    return found.transpose(0, 1).flatten(1, 2)


def _exchange(rows: Tensor, context: DeviceMesh) -> Tensor:
    """The i-th of equal parts goes to rank i, whose part comes back in its place."""
    sizes = [len(rows) // context.size()] * context.size()
    return all_to_all_single_autograd(rows, sizes, sizes, context)


# -- CUDA ------------------------------------------------------------------------------------------


@torch.library.custom_op("primerl::packed_attention", mutates_args=())
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, offsets: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k and v [T, KV, D] -> mixed [T, H, D] and the logsumexp [H, T] that backward needs."""
    parts = _parts(ends)
    if _are_long(parts):
        found = [_cudnn(q[part], k[part], v[part], scale) for part in parts]
        if len(found) == 1:
            return found[0]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)
    most = _longest(parts)
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, offsets, offsets, most, most, 0.0, True, False, scale=scale
    )
    return out, lse


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, offsets: Tensor, scale: float) -> Any:
    mixed = q.new_empty(q.shape)  # contiguous, as the kernels give it
    return mixed, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    parts = _parts(ends)
    if _are_long(parts):
        found = [
            _cudnn_backward(grad[part], q[part], k[part], v[part], out[part], lse[:, part], scale)
            for part in parts
        ]
        if len(found) == 1:
            return found[0]
        of_q, of_k, of_v = (torch.cat(one) for one in zip(*found, strict=True))
        return of_q, of_k, of_v
    most = _longest(parts)
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout of 0
    unused = torch.empty(0, device=q.device)
    arguments = (grad.contiguous(), q, k, v, out, lse, offsets, offsets, most, most)
    return _aten._flash_attention_backward(*arguments, 0.0, True, random, unused, scale=scale)


@packed_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ends, offsets, scale = inputs
    ctx.save_for_backward(q, k, v, *output, ends, offsets)
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Any) -> Any:
    found = _ours.packed_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return *found, None, None, None


packed_attention.register_autograd(_backward, setup_context=_keep)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence: mixed [L, H, D] and logsumexp [H, L]."""
    heads_first = (one.transpose(0, 1)[None] for one in (q, k, v))
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, True, False, scale=scale
    )
    return out[0].transpose(0, 1).contiguous(), lse.view(q.shape[1], len(q))


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads_first = (one.transpose(0, 1)[None] for one in (grad, q, k, v, out))
    undrawn = torch.zeros(
        (), dtype=torch.int64, device=q.device
    )  # seed and place of a dropout of 0
    nothing = (None, None, None)  # no bias, no offsets
    shape = (len(q), len(q), 0.0, True)
    found = _aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first,
        lse.contiguous()[None, :, :, None],
        undrawn,
        undrawn,
        *nothing,
        *shape,
        scale=scale,
    )
    of_q, of_k, of_v = (one[0].transpose(0, 1).contiguous() for one in found)
    return of_q, of_k, of_v


# -- CPUs, and fp32 -------------------------------------------------------------------------------------------


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    parts = _parts(ends)
    longest = _longest(parts)
    if longest * len(parts) > LOOSE * len(q):
        each = [_sdpa(q[part][None], k[part][None], v[part][None], scale)[0] for part in parts]
        return torch.cat(each)
    starts = torch.tensor([part.start for part in parts])
    places = starts[:, None] + torch.arange(longest)
    inside = places < ends[:, None]
    # a row of zeros stands behind the last token
    places, inside = places.where(inside, len(q)).to(q.device), inside.to(q.device)
    q, k, v = (F.pad(one, (0, 0, 0, 0, 0, 1))[places] for one in (q, k, v))
    return _sdpa(q, k, v, scale)[inside]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of [S, L, H, D]: nothing sees the padding on its right."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return mixed.transpose(1, 2)


attend_plainly: Any = torch.compiler.disable(_attend_plainly)  # it asks for the layout in Python


# -- both ------------------------------------------------------------------------------------------


def _parts(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def _longest(parts: list[slice]) -> int:
    return max(part.stop - part.start for part in parts)


def _are_long(parts: list[slice]) -> bool:
    """Whether cuDNN's kernel is for them; it has no deterministic form, the flash kernel has."""
    long = parts[-1].stop >= LONG * len(parts)
    return long and not torch.are_deterministic_algorithms_enabled()


logger = logging.getLogger(__name__)

PACKAGE = "flash_attn_interface"
"""The module of FlashAttention-3."""
NAME = "FA3"
"""What torch calls it."""
HOPPER = 9
"""The generation of GPUs that it is for, as torch counts them."""
LENGTHS = (5, 130, 64)
SCALE = 0.125
TOLERANCE = 2e-2
"""bf16 numbers around 1 are 0.008 apart."""

Attend = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]

_FAULTS = (AttributeError, ImportError, RuntimeError, TypeError, ValueError)
"""What torch raises that lacks this, for a package that lacks it, or for a GPU that cannot."""


@functools.cache
def use_flash_attention_3(device: torch.device) -> bool:
    """Have the flash operator computed by the package from now on, if it is there and right."""
    if device.type != "cuda" or find_spec(PACKAGE) is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    return activate(_api("activate"), _api("restore"), lambda: agrees(device))


def activate(
    switch_on: Callable[[str], object], switch_off: Callable[[], object], right: Callable[[], bool]
) -> bool:
    """Switch it on and keep it if it is right; else everything is as before, and the log says so."""
    try:
        switch_on(NAME)
        if right():
            logger.info("attention is computed by FlashAttention-3")
            return True
        fault = "it computes something else than plain attention"
    except _FAULTS as error:
        fault = named_line(error)
    logger.warning("FlashAttention-3 is installed but not used: %s", fault)
    switch_off()
    return False


def agrees(device: torch.device) -> bool:
    """Whether the operator on `device` and plain attention give the same outputs and gradients."""
    layout = Layout.of(list(LENGTHS), device)
    made = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=made).to(device, torch.bfloat16) for shape in shapes]

    def computed(attend: Attend) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in given]
        mixed = attend(leaves[0], leaves[1], leaves[2], layout)
        mixed.float().square().mean().backward()
        return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return all(map(_near, computed(_packed), computed(_plain)))


def _plain(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    return attend_plainly(q, k, v, layout.ends, SCALE)


def _packed(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    return torch.ops.primerl.packed_attention(q, k, v, layout.ends, layout.offsets, SCALE)[0]


def _near(one: Tensor, other: Tensor) -> bool:
    scale = other.float().abs().max().clamp(min=1e-6)
    return bool(((one.float() - other.float()).abs().max() / scale) < TOLERANCE)


def _api(what: str) -> Callable[..., object]:
    """torch.nn.attention's function of that kind; older releases have none."""
    import torch.nn.attention as known

    found = getattr(known, f"{what}_flash_attention_impl", None)

    def missing(*_: object) -> None:
        if what == "activate":
            raise AttributeError(f"torch {torch.__version__} cannot be told to use it")

    return found or missing
