"""Asynchronous copies to and from a device, through pinned memory, in stream order.

The result of download() may be read only after the device has finished the copy: see Mark.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` from the CPU to `device`."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_array(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy `values` to `device`, also if that is the CPU."""
    tensor = torch.from_numpy(values)
    return upload(tensor, device) if device.type == "cuda" else tensor.clone()


def download(values: Tensor) -> Tensor:
    """Copy `values` to the CPU; complete once a Mark made after this call is reached."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Mark:
    """Point in the stream of `device`, reached once all work enqueued before it is done."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._event = torch.cuda.current_stream(device).record_event() if cuda else None

    @property
    def is_reached(self) -> bool:
        """Whether the mark is reached."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the mark is reached."""
        if self._event is not None:
            self._event.synchronize()


def compiles(values: Tensor) -> bool:
    """Return whether Triton kernels can run on the device of `values`."""
    return values.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
