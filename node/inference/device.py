"""To a device and back without waiting for it: through pinned memory, in the order of its stream.

What download() gives may be read only once the device is done with it: see Mark.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the CPU on `device`."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_array(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of `values` on `device`, also where that is the CPU."""
    found = torch.from_numpy(values)
    return upload(found, device) if device.type == "cuda" else found.clone()


def download(values: Tensor) -> Tensor:
    """`values` on the CPU, there when a Mark is reached that was made after this."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Mark:
    """A place in the stream of `device`: reached when all is done that was asked for before."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if cuda else None

    def wait(self) -> None:
        """Until it is reached."""
        if self._event is not None:
            self._event.synchronize()


def compiles(values: Tensor) -> bool:
    """Whether there are kernels for where `values` are."""
    return values.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
