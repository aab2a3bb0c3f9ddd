# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""boundary_states.project() in one launch, for CUDA: by itself it is a dozen, for a few rows at a time.

Sums are in another order than torch's, so the last bits differ: fingerprints are rounded to eight bits anyway,
and whoever compares allows for more (boundary_states.NEAR).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
WARPS = 4


def project_on_gpu(states: Tensor, signs: Tensor, limit: float) -> Tensor:
    """States [rows, width] of any float -> [rows, columns of `signs`] fp32, not waited for.

    `signs` [width, n], n at most 8, fp32; `limit` as boundary_states.LIMIT.
    """
    states = states if states.stride(1) == 1 else states.contiguous()
    rows, width = states.shape
    found = torch.empty(rows, signs.shape[1], dtype=torch.float32, device=states.device)
    if rows:
        with torch.cuda.device(states.device):
            launch(states, signs, limit, found, (rows,), width)
    return found


def launch(
    states: Tensor, signs: Tensor, limit: float, found: Tensor, grid: tuple[int], width: int
) -> None:
    """The kernel alone: Triton's interpreter takes it without a GPU."""
    _project[grid](
        *(states, states.stride(0), width, signs, signs.shape[1], limit, found),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _project(states, stride, width, signs, columns, limit, found, BLOCK: tl.constexpr):
    """Of one row: once over it for its mean magnitude and length, once for what is left of it."""
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
    # of what is not finite nothing finite is made: `length` is then not finite either
    stretch = tl.sqrt(length) / tl.maximum(left, 1.1754943508222875e-38)
    tl.store(found + row * columns + column, tl.sum(sums, axis=0) * stretch, mask=column < columns)
