"""Packed-attention kernels for GPUs: FlashAttention-4, torch's flash kernel, plain softmax.

FlashAttention-4 is the package flash-attn-4, the extra `flash`. It is used if it runs on the GPU and agrees
with plain attention; its kernels are compiled on their first call, in seconds. Imports torch: import lazily.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..models.device import upload

logger = logging.getLogger(__name__)

CHECKED = [300, 129, 1]
"""Lengths of the sequences for comparing FlashAttention-4 with plain attention."""
NEAR = 0.02
"""Largest relative error allowed, root mean square; bf16 has 8 bits."""

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Layout:
    """Ends of the sequences in a packed row."""

    ends: Tensor
    """int32 [S], on the CPU: loops over sequences read it without waiting for a device."""
    offsets: Tensor
    """int32 [S + 1] on the device, with a leading 0."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Layout":
        """Make the layout of sequences of these lengths."""
        offsets = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
        return cls(offsets[1:].clone(), upload(offsets, device))


@dataclass(frozen=True)
class Rules:
    """Scale, window and cap of a layer's attention scores."""

    scale: float
    window: int = 0
    """Tokens that each token attends to, itself included; 0: all earlier tokens."""
    cap: float = 0.0
    """Soft cap of the scores; 0: none."""


class Kernel(Protocol):
    """Causal attention within each sequence, and its gradients."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, rules: Rules
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed values [T, H, D] and the logsumexp [H, T], float32.

        q is [T, H, D], k and v are [T, KV, D].
        """
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Layout,
        rules: Rules,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, given `grad` [T, H, D], the gradient of `out`.

        `out` and `lse` may include sinks.
        """
        ...


def kernel_for(q: Tensor, k: Tensor, rules: Rules) -> Kernel:
    """Return the fastest kernel for q [T, H, D] and k [T, KV, D] on their device."""
    groups, width = q.shape[1] // k.shape[1], q.shape[2]
    exact = torch.are_deterministic_algorithms_enabled()
    if flash4_agrees(q.device, q.dtype, groups, width, rules.window > 0, rules.cap, exact):
        return FLASH4
    return MATHEMATICS if rules.cap else FLASH2


class Flash4:
    """FlashAttention-4, by its internal functions.

    The public ones do not give the logsumexp to the backward pass of a custom operator.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, layout: Layout, rules: Rules
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward()."""
        out, lse, *_ = _flash4()._flash_attn_fwd(
            q, k, v, return_lse=True, **_flash4_arguments(layout, rules)
        )
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Layout,
        rules: Rules,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel.backward(); deterministic in torch's deterministic mode."""
        exact = torch.are_deterministic_algorithms_enabled()
        arguments = {"deterministic": exact, **_flash4_arguments(layout, rules)}
        of_q, of_k, of_v, *_ = _flash4()._flash_attn_bwd(q, k, v, out, grad, lse, **arguments)
        return of_q, of_k, of_v


class Flash2:
    """torch's own flash kernel, without support for caps."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, layout: Layout, rules: Rules
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward()."""
        shape, named = _flash2_arguments(layout, rules)
        out, lse, *_ = _aten._flash_attention_forward(q, k, v, *shape, False, **named)
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Layout,
        rules: Rules,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel.backward()."""
        shape, named = _flash2_arguments(layout, rules)
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for a dropout of 0
        unused = torch.empty(0, device=q.device)
        return _aten._flash_attention_backward(
            grad, q, k, v, out, lse, *shape, random, unused, **named
        )


class Mathematics:
    """Softmax attention in fp32; all scores of one sequence are in memory at once."""

    @classmethod
    def forward(
        cls, q: Tensor, k: Tensor, v: Tensor, layout: Layout, rules: Rules
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward()."""
        parts = [cls._mixed(q[part], k[part], v[part], rules) for part in parts_of(layout.ends)]
        return torch.cat([value for value, _ in parts]), torch.cat([value for _, value in parts], 1)

    @classmethod
    def backward(
        cls,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: Layout,
        rules: Rules,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel.backward()."""
        gradients = [
            cls._gradients(grad[part], q[part], k[part], v[part], out[part], lse[:, part], rules)
            for part in parts_of(layout.ends)
        ]
        of_q, of_k, of_v = (torch.cat(parts) for parts in zip(*gradients, strict=True))
        return of_q, of_k, of_v

    @classmethod
    def _mixed(cls, q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
        scores = cls._scores(q, k, rules)
        mixed = torch.einsum("kgqs,skd->qkgd", scores.softmax(-1), v.float())
        return mixed.flatten(1, 2).to(q.dtype), scores.logsumexp(-1).flatten(0, 1)

    @classmethod
    def _gradients(
        cls, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rules: Rules
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of softmax attention (Dao et al. 2022, appendix B).

        The derivative of a cap is 1 - (score / cap)^2.
        """
        groups = (k.shape[1], -1)
        scores = cls._scores(q, k, rules)
        weights = torch.exp(scores - lse.unflatten(0, groups)[..., None])
        pulled = grad.float().unflatten(1, groups)
        of_weights = torch.einsum("qkgd,skd->kgqs", pulled, v.float())
        row = (grad.float() * out.float()).sum(-1).T.unflatten(0, groups)[..., None]
        of_scores = weights * (of_weights - row) * rules.scale
        if rules.cap:  # a score of minus infinity has a weight of 0
            of_scores = of_scores * (1 - (scores / rules.cap).nan_to_num(0, 0, 0).square())
        of_q = torch.einsum("kgqs,skd->qkgd", of_scores, k.float()).flatten(1, 2)
        of_k = torch.einsum("kgqs,qkgd->skd", of_scores, q.float().unflatten(1, groups))
        of_v = torch.einsum("kgqs,qkgd->skd", weights, pulled)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, rules: Rules) -> Tensor:
        """Return scores [KV, H / KV, L, L]: scaled, capped, minus infinity where masked."""
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        products = torch.einsum("qkgd,skd->kgqs", grouped, k.float())
        return scores_of(products, seen(len(q), rules.window, q.device), rules)


FLASH4, FLASH2, MATHEMATICS = Flash4(), Flash2(), Mathematics()


@cache
def flash4_agrees(
    device: torch.device,
    dtype: torch.dtype,
    groups: int,
    width: int,
    windows: bool,
    cap: float,
    exact: bool,
) -> bool:
    """Return whether FlashAttention-4 runs for such heads and agrees with plain attention.

    False if it is not installed.

    `groups` is the number of heads per key-value head, `width` the width of a head. `exact` is torch's
    deterministic mode, which uses other kernels.
    """
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return False
    rng = torch.Generator(device).manual_seed(0)
    layout = Layout.of(CHECKED, device)
    q, k, v, grad = (
        torch.randn(sum(CHECKED), heads, width, generator=rng, device=device, dtype=dtype)
        for heads in (2 * groups, 2, 2, 2 * groups)
    )
    rules = Rules(width**-0.5, 100 if windows else 0, cap)
    out, lse = MATHEMATICS.forward(q, k, v, layout, rules)
    wanted = (out, lse, *MATHEMATICS.backward(grad, q, k, v, out, lse, layout, rules))

    def compute() -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        out, lse = FLASH4.forward(q, k, v, layout, rules)
        return (out, lse, *FLASH4.backward(grad, q, k, v, out, lse, layout, rules)), wanted

    return agree("FlashAttention-4", "it is %.2g off plain attention", compute)


def agree(
    library: str, fault: str, compute: Callable[[], tuple[Iterable[Tensor], Iterable[Tensor]]]
) -> bool:
    """Return whether `compute` gives results of the kernels of `library` near those that are wanted.

    Logs why they are not used: `fault` with the error, or what the kernels raise.
    """
    try:
        computed, wanted = compute()
    except Exception as error:  # kernels are compiled here, and young compilers may raise anything
        logger.warning("%s is not used: %s: %s", library, type(error).__name__, error)
        return False
    worst = max(
        _relative_error(result, other) for result, other in zip(computed, wanted, strict=True)
    )
    if not worst < NEAR:
        logger.warning("%s is not used: " + fault, library, worst)
        return False
    return True


def _relative_error(computed: Tensor, wanted: Tensor) -> float:
    """Return the root mean square of the difference over that of `wanted`."""
    return float((computed.float() - wanted.float()).norm() / wanted.float().norm())


def _flash4_arguments(layout: Layout, rules: Rules) -> dict[str, Any]:
    longest = longest_of(parts_of(layout.ends))
    window = rules.window
    return {
        "cu_seqlens_q": layout.offsets,
        "cu_seqlens_k": layout.offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": rules.scale,
        "softcap": rules.cap,
        "causal": not window,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
    }


def _flash2_arguments(layout: Layout, rules: Rules) -> tuple[tuple[Any, ...], dict[str, Any]]:
    longest = longest_of(parts_of(layout.ends))
    sides = {"window_size_left": rules.window - 1, "window_size_right": 0} if rules.window else {}
    shape = (layout.offsets, layout.offsets, longest, longest, 0.0, True)
    return shape, {"scale": rules.scale, **sides}


@cache
def _flash4() -> Any:
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    return interface


def scores_of(products: Tensor, mask: Tensor, rules: Rules) -> Tensor:
    """Scale and cap products of queries and keys [..., L, L].

    The result is minus infinity where `mask` is False.
    """
    scores = products * rules.scale
    if rules.cap:
        scores = torch.tanh(scores / rules.cap) * rules.cap
    return scores.masked_fill(~mask, float("-inf"))


def seen(length: int, window: int, device: torch.device) -> Tensor:
    """Return the mask [L, L]: True if a token (row) attends to another.

    `window` 0 means all earlier tokens.
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal.triu(1 - window) if window else causal


def parts_of(ends: Tensor) -> list[slice]:
    """Return one slice per sequence from the sequences' end positions."""
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def longest_of(parts: list[slice]) -> int:
    """Return the length of the longest sequence."""
    return max(part.stop - part.start for part in parts)
