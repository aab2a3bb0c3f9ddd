"""Why an engine's process ended, from its exit code and what it wrote last, with what to do. No I/O."""

import re
import signal
from collections.abc import Sequence

_WORDS: tuple[tuple[str, str], ...] = (
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "vLLM has no room for its cache: raise engine.vllm.gpu_memory_utilization or lower "
        "engine.max_model_len",
    ),
    (
        r"Free memory on device.* is less than desired",
        "less GPU memory is free than vLLM was told to take: lower engine.vllm.gpu_memory_utilization "
        "or end what else uses this GPU",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation",
        "vLLM ran out of GPU memory: lower engine.vllm.gpu_memory_utilization or engine.max_batch",
    ),
    (
        r"\bMemoryError\b|not enough memory: you tried|Cannot allocate memory",
        "vLLM ran out of the machine's memory: lower engine.max_batch or engine.max_model_len",
    ),
    (
        r"No space left on device",
        "vLLM found no space left: make room on the disk and in /dev/shm",
    ),
    (
        r"NCCL error|ncclUnhandled|ncclSystemError",
        "vLLM's GPUs lost each other: look at nvidia-smi and dmesg",
    ),
    (
        r"CUDA error|CUDA driver error|Xid",
        "vLLM's GPU failed: look at nvidia-smi and dmesg",
    ),
    (
        r"Engine core proc \S+ died|EngineCore died|EngineDeadError",
        "vLLM's engine process ended: look at its log lines above; without any, the machine may have "
        "run out of memory",
    ),
)
"""What it may have written (a regular expression), and what that means. The first that is found counts."""

_OTHERS: tuple[tuple[str, str], ...] = (
    (
        r"out of memory|OutOfMemoryError|\bMemoryError\b|not enough memory|Cannot allocate memory",
        "the engine ran out of memory: lower engine.max_batch or engine.max_model_len",
    ),
    (r"CUDA error|CUDA driver error|Xid", "the engine's GPU failed: look at nvidia-smi and dmesg"),
)
"""As above, of other engines than vLLM."""

_SIGNALS = {
    signal.SIGKILL: "was killed from outside: if nobody did so the machine ran out of memory, lower "
    "engine.max_batch or engine.max_model_len",
    signal.SIGBUS: "found no room in shared memory: give the container more (docker: --shm-size)",
    signal.SIGTERM: "was asked to end from outside",
}


def explain(code: int | None, lines: Sequence[str], title: str = "vLLM") -> str:
    """One sentence for the operator. `code` as asyncio gives it: negative for a signal, None while it runs."""
    if known := meaning(lines, title):
        return known
    if code is not None and code < 0:
        return f"{title}'s process {_signal(-code)}"
    last = f" ({lines[-1]})" if lines else ""
    ended = "broke" if code is None else f"ended with exit code {code}"
    return f"{title}'s process {ended}{last}: look at its log lines above"


def meaning(lines: Sequence[str], title: str = "vLLM") -> str:
    """What the lines of a process are known to mean, with what to do; empty if nothing is."""
    known = _WORDS if title == "vLLM" else _OTHERS
    found = (words for pattern, words in known if any(re.search(pattern, line) for line in lines))
    return next(found, "")


def _signal(number: int) -> str:
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"was ended by signal {number}: look at its log lines above"
    return _SIGNALS.get(known, f"crashed ({known.name}): look at its log lines above")
