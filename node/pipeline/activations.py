"""Hidden states as they travel between stages: raw, or 8 bits a number with one scale a token.

The receiver unpacks exactly the numbers that are packed here, and rounded() gives them: a fingerprint of a
boundary is of that. Scales follow each token's largest number, so nothing overflows and no token is another's
business.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...protocol.pipelines import Encoding
from ..ops.errors import EngineError
from .frames import Array

_E4M3_MOST = 448.0
"""Largest number of float8_e4m3fn."""
_INT8_MOST = 127.0
_TINY = 2.0**-100
"""Least scale: a token of zeros has none of its own."""
_RAW: dict[torch.dtype, np.dtype[np.uint16] | np.dtype[np.float32]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
}


def pack(hidden: Tensor, encoding: Encoding) -> tuple[Array, ...]:
    """`hidden` [T, d], float32 or bfloat16, as arrays that a frame takes; waits for the device.

    raw: the numbers, bfloat16 as its bits; fp8: bits of e4m3, int8: integers, both with scales [T, 1] float32.
    """
    return arrays(codes(hidden, encoding))


def codes(hidden: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
    """What pack() takes from the device, still there; see arrays(). Raises EngineError."""
    if encoding == "raw":
        if hidden.dtype not in _RAW:
            raise EngineError(f"states of {hidden.dtype} do not travel: choose float32 or bfloat16")
        hidden = hidden.detach()
        return (hidden.view(torch.int16) if hidden.dtype == torch.bfloat16 else hidden,)
    coded, scales = _coded(hidden, encoding)
    return coded.view(torch.uint8) if encoding == "fp8" else coded, scales


def arrays(coded: Sequence[Tensor]) -> tuple[Array, ...]:
    """What codes() gave, as pack() gives it; waits for the device."""
    found = [one.cpu().numpy() for one in coded]
    return tuple(one.view(np.uint16) if one.dtype == np.int16 else one for one in found)


def unpack(
    arrays: Sequence[Array],
    encoding: Encoding,
    *,
    dtype: torch.dtype,
    device: torch.device,
    width: int,
) -> Tensor:
    """The states [T, `width`] that pack() was given, as near as `encoding` is; in memory of their own.

    Raises EngineError for arrays that pack() never makes.
    """
    wanted = (
        _RAW[dtype] if encoding == "raw" else np.dtype(np.uint8 if encoding == "fp8" else np.int8)
    )
    if (
        not arrays
        or arrays[0].ndim != 2
        or arrays[0].dtype != wanted
        or arrays[0].shape[1] != width
    ):
        raise EngineError(f"the stage before sent no {encoding} states of width {width}")
    first = _uploaded(arrays[0], device)
    if encoding == "raw":
        if len(arrays) != 1:
            raise EngineError("the stage before sent more than raw states")
        return first.view(torch.bfloat16) if dtype == torch.bfloat16 else first
    if len(arrays) != 2 or arrays[1].dtype != np.float32 or arrays[1].shape != (len(first), 1):
        raise EngineError(f"the stage before sent no scale for every token of {encoding} states")
    if encoding == "fp8":
        first = first.view(torch.float8_e4m3fn)
    return _decoded(first, _uploaded(arrays[1], device), dtype)


def rounded(hidden: Tensor, encoding: Encoding) -> Tensor:
    """`hidden` [T, d] as the receiver sees it: same dtype, same device."""
    if encoding == "raw":
        return hidden
    return _decoded(*_coded(hidden, encoding), hidden.dtype)


def _uploaded(array: Array, device: torch.device) -> Tensor:
    """A copy on `device`, not waited for; a copy anyway, as frames are read-only and streams are not."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=kind, pin_memory=device.type == "cuda")
    host.numpy()[...] = array
    return host.to(device, non_blocking=True)


def _coded(hidden: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Codes [T, d] and scales [T, 1] fp32; each number is about code x scale."""
    numbers = hidden.detach().float()
    most = _E4M3_MOST if encoding == "fp8" else _INT8_MOST
    scales = (numbers.abs().amax(1, keepdim=True) / most).clamp_min(_TINY)
    codes = numbers / scales
    if encoding == "fp8":
        return codes.clamp(-most, most).to(torch.float8_e4m3fn), scales
    return codes.round().clamp(-most, most).nan_to_num(0.0).to(torch.int8), scales


def _decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.float().mul_(scales).to(dtype)
