# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""What lies between the products of qwen3.py, on a GPU: each of Plain's methods in one pass over memory.

Every kernel computes in fp32 and rounds where Plain's operations round, so that both give the same but for
the order of a sum.
"""

import subprocess
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

FAILURES = (TritonError, RuntimeError, OSError, ValueError, subprocess.SubprocessError)
"""What it may end with where kernels cannot be compiled (no C compiler) or run."""

HEADS = 16
"""Of a token that one program turns."""
COLUMNS = 1024
NEAR = 2.0**-6
"""Twice the last bit of a bf16: one that fell to the other side, in a sum of two."""


class Kernels:
    """See Between, in qwen3.py."""

    def __init__(self, eps: float, kv_heads: int) -> None:
        self._eps = eps
        self._kv_heads = kv_heads

    def turned(
        self, qkv: Tensor, heads: int, layer: Any, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Between; in place."""
        tokens, _, width = qkv.shape
        both = heads + self._kv_heads
        with torch.cuda.device(qkv.device):
            _turn[(tokens, triton.cdiv(both, HEADS))](
                *(qkv, qkv.stride(0), layer.norm_q, layer.norm_k, *turn, self._eps),
                HEADS=heads,
                BOTH=both,
                WIDTH=width,
                HEAD_BLOCK=HEADS,
                HALF_BLOCK=triton.next_power_of_2(width // 2),
            )
        return tuple(qkv.split([heads, self._kv_heads, self._kv_heads], 1))  # type: ignore[return-value]

    def added(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See Between; the sum is in `x`, its norm in `more`."""
        tokens, width = x.shape
        block = triton.next_power_of_2(width)
        with torch.cuda.device(x.device):
            _add[(tokens,)](
                *(x, more, weight, self._eps),
                WIDTH=width,
                BLOCK=block,
                num_warps=4 if block <= 2048 else 8,
            )
        return x, more

    def gated(self, both: Tensor) -> Tensor:
        """See Between."""
        tokens, width = both.shape[0], both.shape[1] // 2
        made = torch.empty(tokens, width, dtype=both.dtype, device=both.device)
        with torch.cuda.device(both.device):
            _gate[(tokens, triton.cdiv(width, COLUMNS))](both, made, WIDTH=width, BLOCK=COLUMNS)
        return made


def differ(kernels: Any, plain: Any, layer: Any, heads: int, kv_heads: int) -> str:
    """How `kernels` differ from `plain` on a few tokens by more than rounding; "" if they do not."""
    generator = torch.Generator(layer.qkv.device).manual_seed(0)

    def some(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=layer.qkv.device)
        return values.to(layer.qkv.dtype)

    hidden, width, inner = len(layer.norm_in), len(layer.norm_q), layer.down.shape[1]
    cos, sin = some(5, width // 2), some(5, width // 2)
    turn = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    qkv = some(5, heads + 2 * kv_heads, width)
    sums, both = (some(5, hidden), some(5, hidden)), some(5, 2 * inner)
    found, wanted = (
        (
            *one.turned(qkv.clone(), heads, layer, turn),
            *one.added(*(part.clone() for part in sums), layer.norm_mlp),
            one.gated(both.clone()),
        )
        for one in (kernels, plain)
    )
    names = ("queries", "keys", "values", "sums", "norms", "gates")
    for name, mine, own in zip(names, found, wanted, strict=True):
        most = float((mine.float() - own.float()).abs().max())
        if not most <= NEAR * max(1.0, float(own.float().abs().max())):
            return f"{name} are {most:.3g} off"
    return ""


@triton.jit
def _turn(
    qkv,
    row,
    norm_q,
    norm_k,
    cosines,
    sines,
    eps,
    HEADS: tl.constexpr,
    BOTH: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    half = WIDTH // 2
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = column < half
    seen = (head < BOTH) & inside
    kind = qkv.dtype.element_ty
    place = qkv + token * row + head * WIDTH + column
    first = tl.load(place, mask=seen, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=seen, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)[:, None]
    scale = tl.rsqrt(squares / WIDTH + eps)
    query = head < HEADS
    q_first = tl.load(norm_q + column, mask=inside, other=0.0)
    q_second = tl.load(norm_q + half + column, mask=inside, other=0.0)
    k_first = tl.load(norm_k + column, mask=inside, other=0.0)
    k_second = tl.load(norm_k + half + column, mask=inside, other=0.0)
    first = first * scale * tl.where(query, q_first, k_first).to(tl.float32)
    second = second * scale * tl.where(query, q_second, k_second).to(tl.float32)
    first = first.to(kind).to(tl.float32)
    second = second.to(kind).to(tl.float32)
    # the first half of the cosines, the second of the sines: the others are the same, and negated
    place_of_angle = token * WIDTH + column
    cos = tl.load(cosines + place_of_angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sines + place_of_angle + half, mask=inside, other=0.0).to(tl.float32)
    left = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
    right = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
    tl.store(place, left.to(kind), mask=seen)
    tl.store(place + half, right.to(kind), mask=seen)


@triton.jit
def _add(x, more, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = x.dtype.element_ty
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(more + row + column, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(kind)
    tl.store(x + row + column, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(more + row + column, value.to(kind), mask=inside)


@triton.jit
def _gate(both, made, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = both.dtype.element_ty
    gate = tl.load(both + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    soft = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(made + token * WIDTH + column, (soft * up).to(kind), mask=inside)
