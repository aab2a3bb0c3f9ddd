"""Measure which kernels of a GPU, or operations of a CPU, take the time, and where a GPU is idle."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

LONG_GAP_S = 50e-6
"""Gaps from here on are listed: the host was late; below, one kernel waited for the one before."""
MOST_GAPS = 10
NAME = 60


class Gap(NamedTuple):
    """A time in which a GPU did nothing, and what it did before and after."""

    seconds: float
    before: str
    after: str


@dataclass
class Kernels:
    """What ran in a profiled block; filled in when it ends."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By name. On a CPU these are the operations, without those that they call."""
    gaps: list[Gap] = field(default_factory=list[Gap])
    """Of a GPU, in order; none before its first kernel."""


@contextmanager
def profiled() -> Generator[Kernels]:
    """Profile the block; give what then holds its kernels."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    found = Kernels()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        yield found
        if cuda:
            torch.cuda.synchronize()
    rows: Any = seen.key_averages()
    for row in rows:
        spent = row.self_device_time_total if cuda else row.self_cpu_time_total
        found.seconds[row.key] = found.seconds.get(row.key, 0.0) + spent / 1e6
    if cuda:
        on_gpu: Any = [one for one in seen.events() or () if one.device_type.name == "CUDA"]
        spans = ((one.time_range.start, one.time_range.end, one.name) for one in on_gpu)
        found.gaps = gaps([(start / 1e6, end / 1e6, name) for start, end, name in spans])


def gaps(spans: Sequence[tuple[float, float, str]]) -> list[Gap]:
    """Return the times that none of `spans`, each (start, end, name) in seconds, covers."""
    found: list[Gap] = []
    busy, last = float("inf"), ""
    for start, end, name in sorted(spans):
        if start > busy:
            found.append(Gap(start - busy, last, name))
        if end > busy or not last:
            busy, last = end, name
    return found


def show_kernels(kernels: Kernels, most: int) -> None:
    """Print the `most` kernels that take longest, with their shares of all, and the longest gaps."""
    whole = sum(kernels.seconds.values()) or 1.0
    for name, spent in sorted(kernels.seconds.items(), key=lambda one: -one[1])[:most]:
        print(f"    {1e3 * spent:9.2f} ms {spent / whole:6.1%}  {name[:90]}", flush=True)
    print(f"    {1e3 * whole:9.2f} ms in {len(kernels.seconds)} kernels", flush=True)
    if not kernels.gaps:
        return
    long = sorted((one for one in kernels.gaps if one.seconds >= LONG_GAP_S), reverse=True)
    idle, late = (sum(one.seconds for one in some) for some in (kernels.gaps, long))
    print(
        f"    {1e3 * idle:9.2f} ms idle in {len(kernels.gaps)} gaps, {1e3 * late:.2f} ms of that in "
        f"{len(long)} of {1e6 * LONG_GAP_S:.0f} us or more:",
        flush=True,
    )
    for one in long[:MOST_GAPS]:
        between = f"{one.before[:NAME]} -> {one.after[:NAME]}"
        print(f"    {1e3 * one.seconds:9.2f} ms  {between}", flush=True)
