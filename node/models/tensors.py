"""Convert between the tensors of a `State` and torch tensors, bit for bit.

The result of to_torch() may share memory with its State and must not be modified. The result of from_torch()
owns its memory unless a view is asked for, so that a training step cannot change a published state.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EngineError
from ..weights.state import BITS, State, Tensor

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F16": "float16",
    "BF16": "bfloat16",
    "I16": "int16",
    "U16": "uint16",
    "F32": "float32",
    "I32": "int32",
    "U32": "uint32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_SIGNED = {1: np.dtype(np.uint8), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
"""Bytes per element -> numpy dtype of the same size that torch supports (it lacks most unsigned ones)."""


def torch_dtype(name: str) -> "torch.dtype":
    """Return the torch dtype for a safetensors or torch name ("BF16", "bfloat16").

    Raises EngineError.
    """
    import torch

    dtype = getattr(torch, _TORCH_NAMES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"dtype {name!r} is unknown: use one of {', '.join(sorted(BITS))}")
    return dtype


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the safetensors name of a torch dtype.

    Raises EngineError for dtypes that a state cannot hold (complex, float8, quantized).
    """
    short = str(dtype).rpartition(".")[2]
    for name, torch_name in _TORCH_NAMES.items():
        if torch_name == short:
            return name
    raise EngineError(f"a state cannot hold {short}: convert to one of {', '.join(sorted(BITS))}")


def to_torch(
    tensor: Tensor,
    device: "torch.device | str | None" = None,
    dtype: "torch.dtype | None" = None,
) -> "torch.Tensor":
    """Convert `tensor` to torch, then move it to `device` and cast it to `dtype`, if given.

    Shares memory with `tensor.data` if that is writeable (torch has no read-only tensors) and neither device
    nor dtype changes.
    """
    import torch

    bits = tensor.data.view(_SIGNED[tensor.data.itemsize])
    if not bits.flags.writeable:
        bits = bits.copy()
    flat = torch.from_numpy(bits).view(torch_dtype(tensor.dtype))
    return flat.reshape(tensor.shape).to(device=device, dtype=dtype)


def from_torch(t: "torch.Tensor", dtype: str | None = None, *, view: bool = False) -> Tensor:
    """Copy `t` to a state's tensor, cast to the named `dtype` if given (to nearest even).

    With `view` the result shares the memory of a contiguous CPU tensor that has this dtype already. Raises
    EngineError for dtypes that a state cannot hold (complex, float8, quantized).
    """
    import torch

    name = dtype or dtype_name(t.dtype)
    converted = t.detach().to(torch_dtype(name))
    shared = converted.data_ptr() == t.data_ptr()
    on_cpu = converted.to("cpu", copy=shared and not view).contiguous()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[on_cpu.element_size()]
    bits = on_cpu.reshape(-1).view(signed).numpy().view(BITS[name])
    return Tensor(name, tuple(t.shape), bits)


def bf16_state(named: Iterable[tuple[str, "torch.Tensor"]], *, view: bool = False) -> State:
    """Make a state of named tensors, floating-point ones cast to bf16, others unchanged.

    `view`: see from_torch().
    """
    return {
        name: from_torch(tensor, "BF16" if tensor.is_floating_point() else None, view=view)
        for name, tensor in named
    }
