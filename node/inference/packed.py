"""Causal attention among sequences that are packed one after the other; none sees another one.

On a GPU by torch's variable-length flash attention where it has one, elsewhere sequence by sequence: what is
found differs by rounding only.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .transfers import upload

logger = logging.getLogger(__name__)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> attention output [T, H, D]."""

_WIDEST = 256
"""Numbers a head that flash attention takes at most, in steps of 8."""
_FLASH_SINCE = (8, 0)
"""Compute capability."""


def among(
    lengths: Sequence[int], *, device: torch.device, dtype: torch.dtype, width: int
) -> Attend:
    """Attention within each of the sequences of `lengths`, of heads of `width` numbers."""
    longest = max(lengths)
    if longest == 1 or not _has_flash(device, dtype, width):
        return _by_runs(lengths)
    return _by_flash(
        upload(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device), longest
    )


def _by_flash(ends: Tensor, longest: int) -> Attend:
    kernel, extra = _flash()

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, ends, ends, longest, longest, window_size=(-1, 0), **extra)

    return attend


def _by_runs(lengths: Sequence[int]) -> Attend:
    """Neighbours of equal length go together."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    sizes = [length * count for length, count in runs]

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = zip(runs, *(one.split(sizes) for one in (q, k, v)), strict=True)
        mixed = [_equal(count, *heads) for (_, count), *heads in pieces]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    return attend


def _equal(count: int, *heads: Tensor) -> Tensor:
    q, k, v = (one.unflatten(0, (count, -1)).transpose(1, 2) for one in heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)


@cache
def _has_flash(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether torch's flash attention is there, takes this, and gives what it should."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(device) < _FLASH_SINCE or width % 8 or width > _WIDEST:
        return False
    lengths, generator = [3, 5], torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(8, heads, width, generator=generator, device=device).to(dtype)
        for heads in (4, 2, 2)
    )
    try:
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        found = _by_flash(ends, max(lengths))(0, q, k, v)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        detail = str(error).strip().partition("\n")[0]
        logger.warning("prefills are slower than they could be: no flash attention (%s)", detail)
        return False
    wanted = _by_runs(lengths)(0, q, k, v)
    return bool(torch.allclose(found.float(), wanted.float(), atol=0.05))


@cache
def _flash() -> tuple[Callable[..., Any], dict[str, Any]]:
    """torch's own, and what makes it take several query heads a key head. Raises ImportError."""
    from torch.nn.attention.varlen import varlen_attn

    # before there was a word for it, the kernel took fewer key heads all the same
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in known else {}
