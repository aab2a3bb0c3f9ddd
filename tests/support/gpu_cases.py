"""Shared parts of kernel tests; importing it first skips a module on machines without GPU."""

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
    """Raise an error where the host would wait for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
