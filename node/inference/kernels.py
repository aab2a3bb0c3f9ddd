# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""Triton kernels for CUDA: the draw of sampler.py, the projection of boundary_states.py, merged adapters.

- The noise must round exactly as in noise.py, operation by operation, and is launched without floating-point
  fusion: an auditor on other hardware draws each token again.
- Sums of a projection are in another order than torch's, so the last bits differ: fingerprints are rounded to
  eight bits, and comparisons allow for more (boundary_states.NEAR).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """Return the tokens, logprobs, scores and logsumexp of sampler.SampledTokens.

    Makes two launches and does not wait for the device.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    parts = torch.empty(3, rows, blocks, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    results = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):
        _score[(rows, blocks)](
            *(logits, logits.stride(0), vocabulary, temperature, seeds, positions, parts, indices),
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
        _choose[(rows,)](
            *(logits, logits.stride(0), temperature, parts, indices, blocks, tokens, results),
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return tokens, results[0], results[1], results[2]


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
    """Return the noise of `tokens` int32 for one seed and position, int64.

    See noise._gumbel_of_().
    """
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
    """Reduce one row's block to its best score and token, greatest logit, sum of exponentials."""
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
    logits, stride, temperature, parts, indices, blocks, tokens, results, BLOCKS: tl.constexpr
):
    """Combine the block results of one row. `minimum` keeps indices in range despite NaN."""
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
    tl.store(results + row, scaled - logsumexp)
    tl.store(results + rows + row, score)
    tl.store(results + 2 * rows + row, logsumexp)


PROJECT_BLOCK = 512
PROJECT_WARPS = 4


def project_on_gpu(states: Tensor, signs: Tensor, limit: float) -> Tensor:
    """Project states [rows, width] of any float type to [rows, n] fp32, without waiting.

    `signs` is [width, n] fp32 with n at most 8; `limit` as boundary_states.LIMIT.
    """
    states = states if states.stride(1) == 1 else states.contiguous()
    rows, width = states.shape
    projected = torch.empty(rows, signs.shape[1], dtype=torch.float32, device=states.device)
    if rows:
        with torch.cuda.device(states.device):
            launch_project(states, signs, limit, projected, (rows,), width)
    return projected


def launch_project(
    states: Tensor, signs: Tensor, limit: float, projected: Tensor, grid: tuple[int], width: int
) -> None:
    """Launch the kernel alone: Triton's interpreter can run it without a GPU."""
    _project[grid](
        *(states, states.stride(0), width, signs, signs.shape[1], limit, projected),
        BLOCK=PROJECT_BLOCK,
        num_warps=PROJECT_WARPS,
    )


@triton.jit
def _project(states, stride, width, signs, columns, limit, projected, BLOCK: tl.constexpr):
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
    cut_length = tl.sqrt(tl.sum(squares, axis=0))
    # a row that is not finite stays so, since its `length` is not finite either
    stretch = tl.sqrt(length) / tl.maximum(cut_length, 1.1754943508222875e-38)
    tl.store(
        projected + row * columns + column, tl.sum(sums, axis=0) * stretch, mask=column < columns
    )


MERGED_ROWS, MERGED_COLUMNS = 8, 256
"""Tile of _add_product, in elements."""
MERGING_PROGRAMS = 64
"""Enough to keep PCIe busy, and few enough to leave a GPU to the others that compute there."""


def add_product_on_gpu(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Return weights/adapters.add_product(), to the same bits, on the device of `a`, without waiting for it.

    `weight` is there, too, or in pinned memory, from which the kernel reads it directly: a copy before each
    launch would wait for other users of the device as often. `scale` is float64 [1].
    """
    merged = torch.empty(weight.shape, dtype=weight.dtype, device=a.device)
    with torch.cuda.device(a.device):
        launch_add_product(weight, a, b, scale, merged)
    return merged


def launch_add_product(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor, merged: Tensor) -> None:
    """Launch the kernel alone: Triton's interpreter can run it without a GPU."""
    rows, columns = weight.shape
    across = triton.cdiv(columns, MERGED_COLUMNS)
    tiles = triton.cdiv(rows, MERGED_ROWS) * across
    _add_product[(min(tiles, MERGING_PROGRAMS),)](
        *(weight, a, b, scale, rows, columns, across, tiles, merged),
        RANK=a.shape[0],
        ROWS=MERGED_ROWS,
        BLOCK=MERGED_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _add_product(
    weight,
    a,
    b,
    scale,
    rows,
    columns,
    across,
    tiles,
    merged,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge every tile whose number, modulo the number of programs, is this program's; `across` make a row."""
    factor = tl.load(scale)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        before = tl.load(weight + at, mask=inside)
        product = tl.zeros((ROWS, BLOCK), tl.float64)
        for part in range(RANK):
            factor_b = tl.load(b + row * RANK + part, mask=row < rows).to(tl.float64)
            right = tl.load(a + part * columns + column, mask=column < columns).to(tl.float64)
            product += factor_b[:, None] * right[None, :]
        total = (product * factor).to(tl.float32) + before.to(tl.float32)
        tl.store(merged + at, total.to(merged.dtype.element_ty), mask=inside)
