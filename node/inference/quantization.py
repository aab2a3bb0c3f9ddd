"""Quantize the weights of linear layers to FP8 (e4m3fn), to the same bits on every node and device.

A row of a checkpoint's matrix, the weights of one output, has one scale: its largest magnitude / 448 in fp32.
It is taken over the whole row before tensor parallelism cuts the matrix, so the bits do not depend on the
number of GPUs. Each step is one correctly rounded fp32 operation of two tensors: on a GPU, torch multiplies by
a rounded reciprocal where the divisor is a Python number.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..errors import EngineError
from ..models.tensors import from_torch, to_torch
from ..weights.state import State

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of FP8; a larger one has no code but NaN's."""
LEAST_SCALE = 2.0**-126
"""Smallest normal fp32 number, which is also the scale of a row of zeros."""
BLOCK = 1 << 22
"""Elements quantized at once, 12 bytes each."""
LINEAR = "_proj.weight"
"""End of the names of quantized tensors: projections of attention and of MLPs. Embeddings, norms, routers and
the head are not quantized."""


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Return whether a checkpoint's tensor is a weight [out, in] that FP8 rollouts quantize."""
    return len(shape) == 2 and name.endswith(LINEAR)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in] to FP8 codes [out, in] and fp32 scales [out]; weight ~ codes x scales.

    Rounds to the nearest, ties to even. Raises EngineError for a weight that is not finite.
    """
    codes = torch.empty_like(weight, dtype=FP8, memory_format=torch.contiguous_format)
    tops = (
        weight.abs().amax(1).float() if weight.shape[1] else weight.new_zeros(len(weight)).float()
    )
    if not bool(tops.isfinite().all()):
        raise EngineError(
            "a weight is infinite or NaN, which FP8 cannot hold: train with a lower lr"
        )
    scales = (tops / torch.full_like(tops, LARGEST)).clamp_(min=LEAST_SCALE)
    step = max(1, BLOCK // max(1, weight.shape[1]))
    for row in range(0, len(weight), step):
        part = slice(row, row + step)
        # a quotient may be a little above 448 by rounding
        quotients = (weight[part].float() / scales[part, None]).clamp_(-LARGEST, LARGEST)
        codes[part] = quotients.to(FP8)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes [out, in] x scales [out], rounded to fp32 and then to `dtype`."""
    return codes.float().mul_(scales[:, None]).to(dtype)


def dequantized_state(
    state: State, dtype: torch.dtype, names: Collection[str] | None = None
) -> State:
    """Return `state` with the weights that are quantized replaced by what their codes mean, in `dtype`.

    `names`: return these tensors only. Raises EngineError for a weight that is not finite.
    """
    return {
        name: from_torch(dequantize(*quantize(to_torch(tensor)), dtype))
        if is_quantized(name, tensor.shape)
        else tensor
        for name, tensor in state.items()
        if names is None or name in names
    }
