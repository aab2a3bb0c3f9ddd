"""How fast a step was, by prime-rl's names. Imports torch: import lazily.

Tokens are those of whole sequences, prompts and padding included, as prime-rl counts them.
"""

import time
from collections.abc import Sequence

import torch

from .flops import Cost, peak_flops

GIB = 1 << 30


class Meter:
    """The phases of one step on one rank; a device is waited for only where a phase ends."""

    def __init__(self, cost: Cost, device: torch.device, ranks: int) -> None:
        self._cost = cost
        self._device = device
        self._ranks = ranks
        self._began = self._since = 0.0
        self._seconds: dict[str, float] = {}

    def start(self) -> None:
        """A step begins."""
        self._began = self._since = time.perf_counter()
        self._seconds = {}

    def phase(self, name: str) -> None:
        """What was done since the last call, or the start, was `name`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def figures(self, lengths: Sequence[int]) -> dict[str, float]:
        """Of the step that ends now, over sequences of these lengths on all ranks."""
        seconds = time.perf_counter() - self._began
        rate = sum(lengths) / max(seconds, 1e-9)
        found = {f"time/{name}": value for name, value in self._seconds.items()}
        found |= {
            "time/step": seconds,
            "perf/throughput": rate,
            "perf/throughput_per_gpu": rate / self._ranks,
        }
        if self._device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(self._device))
            if peak:
                used = self._cost.flops(lengths) / max(seconds, 1e-9)
                found["perf/mfu"] = 100 * used / self._ranks / peak
            found["perf/peak_memory"] = torch.cuda.max_memory_allocated(self._device) / GIB
        return found
