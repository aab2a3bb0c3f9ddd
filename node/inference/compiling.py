"""Whether kernels written in Triton can be compiled here; PyTorch's CUDA builds bring it along."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def compiles(values: Tensor) -> bool:
    """Whether there are kernels for where `values` are."""
    return values.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
