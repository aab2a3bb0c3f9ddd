"""What tests of kernels share. A module that imports this before any kernel is skipped where none can run."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@contextmanager
def no_waiting() -> Generator[None]:
    """Anything that makes the host wait for the device is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
