"""Measure which kernels of a GPU, or operations of a CPU, take the time."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def kernel_seconds() -> Generator[dict[str, float]]:
    """Profile the block; give a dictionary that then holds the seconds of each kernel by name.

    On a CPU these are the operations, without those that they call.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    found: dict[str, float] = {}
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        yield found
        if cuda:
            torch.cuda.synchronize()
    rows: Any = seen.key_averages()
    for row in rows:
        spent = row.self_device_time_total if cuda else row.self_cpu_time_total
        found[row.key] = found.get(row.key, 0.0) + spent / 1e6


def show_kernels(seconds: dict[str, float], most: int) -> None:
    """Print the `most` kernels that take longest, with their shares of all."""
    whole = sum(seconds.values()) or 1.0
    for name, spent in sorted(seconds.items(), key=lambda one: -one[1])[:most]:
        print(f"    {1e3 * spent:9.2f} ms {spent / whole:6.1%}  {name[:90]}", flush=True)
    print(f"    {1e3 * whole:9.2f} ms in {len(seconds)} kernels", flush=True)
