"""Encode hidden states for links: raw, or 8 bits per element with a scale per token.

Boundary fingerprints are taken of the states as the receiver decodes them; rounded() computes those on the
sender. A token's scale follows from its own largest element, so nothing overflows and tokens are independent.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...protocol.pipelines import Encoding
from ..errors import EngineError
from .frames import Array

_E4M3_MAX = 448.0
"""Largest finite float8_e4m3fn."""
_INT8_MAX = 127.0
_MIN_SCALE = 2.0**-100
"""Lower bound of a scale, for tokens that are all zeros."""
_RAW: dict[torch.dtype, np.dtype[np.uint16] | np.dtype[np.float32]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
}


def pack(hidden: Tensor, encoding: Encoding) -> tuple[Array, ...]:
    """Encode `hidden` [T, d], float32 or bfloat16, as arrays for a frame; waits for the device.

    raw: the elements, bfloat16 as uint16 bits. fp8: e4m3 bits [T, d] and scales [T, 1] float32. int8: integers
    [T, d] and scales [T, 1] float32.
    """
    return arrays(codes(hidden, encoding))


def codes(hidden: Tensor, encoding: Encoding) -> tuple[Tensor, ...]:
    """Encode `hidden` on its device, for arrays(). Raises EngineError for other dtypes."""
    if encoding == "raw":
        if hidden.dtype not in _RAW:
            raise EngineError(
                f"hidden states of {hidden.dtype} cannot be sent: set engine.dtype to float32 or bfloat16"
            )
        hidden = hidden.detach()
        return (hidden.view(torch.int16) if hidden.dtype == torch.bfloat16 else hidden,)
    coded, scales = _coded(hidden, encoding)
    return coded.view(torch.uint8) if encoding == "fp8" else coded, scales


def arrays(coded: Sequence[Tensor]) -> tuple[Array, ...]:
    """Copy the tensors of codes() to the host, in the form of pack(); waits for the device."""
    copied = [tensor.cpu().numpy() for tensor in coded]
    return tuple(array.view(np.uint16) if array.dtype == np.int16 else array for array in copied)


def unpack(
    arrays: Sequence[Array],
    encoding: Encoding,
    *,
    dtype: torch.dtype,
    device: torch.device,
    width: int,
) -> Tensor:
    """Decode pack()'s arrays to states [T, `width`] in new memory.

    Exact for raw, else up to the precision of `encoding`.

    Raises EngineError for arrays that pack() cannot produce.
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
        raise EngineError(f"the previous stage sent no {encoding} states of width {width}")
    first = _uploaded(arrays[0], device)
    if encoding == "raw":
        if len(arrays) != 1:
            raise EngineError("the previous stage sent more than the raw states")
        return first.view(torch.bfloat16) if dtype == torch.bfloat16 else first
    if len(arrays) != 2 or arrays[1].dtype != np.float32 or arrays[1].shape != (len(first), 1):
        raise EngineError(f"the previous stage sent {encoding} states without a scale per token")
    if encoding == "fp8":
        first = first.view(torch.float8_e4m3fn)
    return _decoded(first, _uploaded(arrays[1], device), dtype)


def rounded(hidden: Tensor, encoding: Encoding) -> Tensor:
    """Return `hidden` [T, d] as the receiver decodes it; same dtype and device."""
    if encoding == "raw":
        return hidden
    return _decoded(*_coded(hidden, encoding), hidden.dtype)


def _uploaded(array: Array, device: torch.device) -> Tensor:
    """Copy `array` to `device` without waiting; always a copy, as a frame's memory is read-only."""
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    host = torch.empty(array.shape, dtype=kind, pin_memory=device.type == "cuda")
    host.numpy()[...] = array
    return host.to(device, non_blocking=True)


def _coded(hidden: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Quantize to codes [T, d] and scales [T, 1] fp32; element = code x scale, rounded."""
    values = hidden.detach().float()
    limit = _E4M3_MAX if encoding == "fp8" else _INT8_MAX
    scales = (values.abs().amax(1, keepdim=True) / limit).clamp_min(_MIN_SCALE)
    codes = values / scales
    if encoding == "fp8":
        return codes.clamp(-limit, limit).to(torch.float8_e4m3fn), scales
    return codes.round().clamp(-limit, limit).nan_to_num(0.0).to(torch.int8), scales


def _decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.float().mul_(scales).to(dtype)
