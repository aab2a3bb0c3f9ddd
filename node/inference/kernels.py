# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""Triton kernels for CUDA: the draw of sampler.py, the projection of boundary_states.py, and qwen3.Plain.

- The noise must round as sampler.py's does, line by line, and is launched without floating-point fusion: an
  auditor on other hardware draws each token again.
- Sums of a projection are in another order than torch's, so the last bits differ: fingerprints are rounded to
  eight bits, and comparisons allow for more (boundary_states.NEAR).
- Qwen3's kernels compute in fp32 and round where Plain's operations round: both give the same but for the order
  of a sum.
"""

import subprocess
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from . import noise

GOLDEN64 = tl.constexpr(noise.GOLDEN64)
MIX64_A = tl.constexpr(noise.MIX64_A)
MIX64_B = tl.constexpr(noise.MIX64_B)
GOLDEN32 = tl.constexpr(noise.GOLDEN32)
MIX32_A = tl.constexpr(noise.MIX32_A)
MIX32_B = tl.constexpr(noise.MIX32_B)
LN2 = tl.constexpr(noise.LN2)
SLOPE = tl.constexpr(noise.SLOPE)
EXPONENT_OF_ONE = tl.constexpr(noise.EXPONENT_OF_ONE)
MANTISSA = tl.constexpr(noise.MANTISSA)
A5, A4, A3, A2, A1, A0 = map(tl.constexpr, noise.HALF_LOG)
C6, C5, C4, C3, C2, C1, C0 = map(tl.constexpr, noise.CURVE)

BLOCK = 4096
WARPS = 8


def draw_on_gpu(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, logprobs, scores and logsumexp of sampler.SampledTokens; two launches, no waiting."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    parts = torch.empty(3, rows, blocks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    found = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        _score[(rows, blocks)](
            *(logits, logits.stride(0), vocabulary, temperature, seeds, positions, parts, indices),
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
        _choose[(rows,)](
            *(logits, logits.stride(0), temperature, parts, indices, blocks, tokens, found),
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return tokens, found[0], found[1], found[2]


def gumbel_on_gpu(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """sampler.gumbel() by the kernel's own noise: for tests."""
    values = torch.empty(len(seeds), vocabulary, dtype=torch.float32, device=seeds.device)
    with torch.cuda.device(seeds.device):
        _dump[(len(seeds), triton.cdiv(vocabulary, BLOCK))](
            *(values, vocabulary, seeds, positions),
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return values


@triton.jit
def _mix64(value):
    value = value + GOLDEN64
    value = (value ^ (value >> 30)) * MIX64_A
    value = (value ^ (value >> 27)) * MIX64_B
    return value ^ (value >> 31)


@triton.jit
def _mix32(value):
    value = (value ^ (value >> 16)) * MIX32_A
    value = (value ^ (value >> 13)) * MIX32_B
    return value ^ (value >> 16)


@triton.jit
def _gumbel(seed, position, tokens):
    """The noise of `tokens` int32 for one seed and position, int64; see sampler._gumbel_of_()."""
    key = _mix64(seed.to(tl.uint64, bitcast=True))
    key = _mix64(key + position.to(tl.uint64, bitcast=True))
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _mix32(_mix32(tokens.to(tl.uint32, bitcast=True) * GOLDEN32 + low) ^ high)
    bits = bits.to(tl.int32, bitcast=True)
    value = (bits & 0x7FFFFFFF).to(tl.float32) + 0.5
    raw = value.to(tl.int32, bitcast=True)
    halvings = ((raw >> 23) - 158).to(tl.float32) * -LN2
    rest = 2.0 - ((raw & MANTISSA) | EXPONENT_OF_ONE).to(tl.float32, bitcast=True)
    near_one = bits >= 0
    rest = tl.where(near_one, value * 4.656612873077393e-10, rest)  # 2**-31
    halvings = tl.where(near_one, 0.0, halvings)
    energy = ((((A5 * rest + A4) * rest + A3) * rest + A2) * rest + A1) * rest + A0
    energy = energy * rest + halvings
    raw = energy.to(tl.int32, bitcast=True)
    line = (raw - EXPONENT_OF_ONE).to(tl.float32) * SLOPE
    m = ((raw & MANTISSA) | EXPONENT_OF_ONE).to(tl.float32, bitcast=True)
    curve = (((((C6 * m + C5) * m + C4) * m + C3) * m + C2) * m + C1) * m + C0
    return curve + line


@triton.jit
def _score(
    logits, stride, vocabulary, temperature, seeds, positions, parts, indices, BLOCK: tl.constexpr
):
    """Of one row's block: greatest score and its token, greatest logit, sum of exponentials."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    value = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf"))
    scaled = value.to(tl.float32) * tl.div_rn(1.0, tl.load(temperature + row))
    noise = _gumbel(tl.load(seeds + row), tl.load(positions + row), tokens)
    score, index = tl.max(scaled + noise, axis=0, return_indices=True)
    peak = tl.max(scaled, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(scaled - base), axis=0)
    at = row * tl.num_programs(1) + block
    size = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(parts + at, score)
    tl.store(parts + size + at, peak)
    tl.store(parts + 2 * size + at, total)
    tl.store(indices + at, tl.minimum(block * BLOCK + index, vocabulary - 1))


@triton.jit
def _choose(
    logits, stride, temperature, parts, indices, blocks, tokens, found, BLOCKS: tl.constexpr
):
    """Of one row: the blocks' results put together. `minimum` keeps NaN from leading outside."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lanes = tl.arange(0, BLOCKS)
    inside, at = lanes < blocks, row * blocks + lanes
    scores = tl.load(parts + at, mask=inside, other=float("-inf"))
    peaks = tl.load(parts + rows * blocks + at, mask=inside, other=float("-inf"))
    totals = tl.load(parts + 2 * rows * blocks + at, mask=inside, other=0.0)
    score, lane = tl.max(scores, axis=0, return_indices=True)
    token = tl.load(indices + row * blocks + tl.minimum(lane, blocks - 1))
    peak = tl.max(peaks, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    logsumexp = base + tl.log(tl.sum(totals * tl.exp(peaks - base), axis=0))
    value = tl.load(logits + row * stride + token).to(tl.float32)
    scaled = value * tl.div_rn(1.0, tl.load(temperature + row))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(found + row, scaled - logsumexp)
    tl.store(found + rows + row, score)
    tl.store(found + 2 * rows + row, logsumexp)


@triton.jit
def _dump(noise, vocabulary, seeds, positions, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    value = _gumbel(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(noise + row * vocabulary + tokens, value, mask=tokens < vocabulary)


PROJECT_BLOCK = 512
PROJECT_WARPS = 4


def project_on_gpu(states: Tensor, signs: Tensor, limit: float) -> Tensor:
    """States [rows, width] of any float -> [rows, columns of `signs`] fp32, not waited for.

    `signs` [width, n], n at most 8, fp32; `limit` as boundary_states.LIMIT.
    """
    states = states if states.stride(1) == 1 else states.contiguous()
    rows, width = states.shape
    found = torch.empty(rows, signs.shape[1], dtype=torch.float32, device=states.device)
    if rows:
        with torch.cuda.device(states.device):
            launch_project(states, signs, limit, found, (rows,), width)
    return found


def launch_project(
    states: Tensor, signs: Tensor, limit: float, found: Tensor, grid: tuple[int], width: int
) -> None:
    """The kernel alone: Triton's interpreter takes it without a GPU."""
    _project[grid](
        *(states, states.stride(0), width, signs, signs.shape[1], limit, found),
        BLOCK=PROJECT_BLOCK,
        num_warps=PROJECT_WARPS,
    )


@triton.jit
def _project(states, stride, width, signs, columns, limit, found, BLOCK: tl.constexpr):
    """Project one row in two passes: mean magnitude and length first, then the clipped row."""
    row = tl.program_id(0).to(tl.int64)
    start = states + row * stride
    lanes, column = tl.arange(0, BLOCK), tl.arange(0, 8)
    magnitudes = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + lanes
        value = tl.load(start + at, mask=at < width, other=0.0).to(tl.float32)
        magnitudes += tl.abs(value)
        squares += value * value
    most = limit * (tl.sum(magnitudes, axis=0) / width)
    length = tl.sum(squares, axis=0)
    squares = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, 8], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + lanes
        inside = at < width
        value = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
        cut = tl.minimum(tl.maximum(value, -most), most)
        squares += cut * cut
        places = at[:, None] * columns + column[None, :]
        known = inside[:, None] & (column[None, :] < columns)
        sums += cut[:, None] * tl.load(signs + places, mask=known, other=0.0)
    left = tl.sqrt(tl.sum(squares, axis=0))
    # a row that is not finite stays so: its `length` is not finite either
    stretch = tl.sqrt(length) / tl.maximum(left, 1.1754943508222875e-38)
    tl.store(found + row * columns + column, tl.sum(sums, axis=0) * stretch, mask=column < columns)


FAILURES = (TritonError, RuntimeError, OSError, ValueError, subprocess.SubprocessError)
"""What it may end with where kernels cannot be compiled (no C compiler) or run."""

HEADS = 16
"""Of a token that one program turns."""
COLUMNS = 1024
NEAR = 2.0**-6
"""Twice the last bit of a bf16: one that fell to the other side, in a sum of two."""


class Kernels:
    """The operations of qwen3.Plain, each in one pass over memory."""

    def __init__(self, eps: float, kv_heads: int) -> None:
        self.eps = eps
        self.kv_heads = kv_heads

    def turned(
        self, qkv: Tensor, heads: int, layer: Any, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """See Plain; in place."""
        tokens, _, width = qkv.shape
        both = heads + self.kv_heads
        with torch.cuda.device(qkv.device):
            _turn[(tokens, triton.cdiv(both, HEADS))](
                *(qkv, qkv.stride(0), layer.norm_q, layer.norm_k, *turn, self.eps),
                HEADS=heads,
                BOTH=both,
                WIDTH=width,
                HEAD_BLOCK=HEADS,
                HALF_BLOCK=triton.next_power_of_2(width // 2),
            )
        return qkv.split([heads, self.kv_heads, self.kv_heads], 1)

    def added(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See Plain; the sum is in `x`, its norm in `more`."""
        tokens, width = x.shape
        block = triton.next_power_of_2(width)
        with torch.cuda.device(x.device):
            _add[(tokens,)](
                *(x, more, weight, self.eps),
                WIDTH=width,
                BLOCK=block,
                num_warps=4 if block <= 2048 else 8,
            )
        return x, more

    def gated(self, both: Tensor) -> Tensor:
        """See Plain."""
        tokens, width = both.shape[0], both.shape[1] // 2
        made = torch.empty(tokens, width, dtype=both.dtype, device=both.device)
        with torch.cuda.device(both.device):
            _gate[(tokens, triton.cdiv(width, COLUMNS))](both, made, WIDTH=width, BLOCK=COLUMNS)
        return made


def differ(kernels: Kernels, plain: Any, layer: Any, heads: int) -> str:
    """Say how `kernels` differ from `plain` on a few tokens by more than rounding; "" if they do not."""
    generator = torch.Generator(layer.qkv.device).manual_seed(0)

    def some(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=layer.qkv.device)
        return values.to(layer.qkv.dtype)

    hidden, width, inner = len(layer.norm_in), len(layer.norm_q), layer.down.shape[1]
    cos, sin = some(5, width // 2), some(5, width // 2)
    turn = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    qkv = some(5, heads + 2 * plain.kv_heads, width)
    sums, both = (some(5, hidden), some(5, hidden)), some(5, 2 * inner)
    found, wanted = (
        (
            *one.turned(qkv.clone(), heads, layer, turn),
            *one.added(sums[0].clone(), sums[1].clone(), layer.norm_mlp),
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
