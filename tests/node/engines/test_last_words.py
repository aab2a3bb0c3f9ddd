"""What an operator is told when vLLM's process ends."""

import pytest

from primerl.node.engines.last_words import explain

SAID = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "lower engine.vllm.gpu",
    "RuntimeError: CUDA error: out of memory": "lower engine.vllm.gpu_memory_utilization or engine.max",
    "ValueError: Free memory on device cuda:0 (3/139 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 125 GiB).": "less GPU memory is free",
    "ValueError: No available memory for the cache blocks.": "raise engine.vllm.gpu_memory_utilization",
    "ValueError: To serve at least one request, 4 GiB KV cache is needed, which is larger than the "
    "available KV cache memory (1 GiB).": "lower engine.max_model_len",
    "RuntimeError: [enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes": (
        "the machine's memory"
    ),
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp": "lost each other",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "nvidia-smi and dmesg",
    "vLLM failed (EngineDeadError EngineCore encountered an issue)": "engine process ended",
}


@pytest.mark.parametrize("line", SAID)
def test_a_known_cause_is_named_with_what_to_do_wherever_it_was_said(line: str) -> None:
    for code in (1, None, -6):
        assert SAID[line] in explain(code, ["something else", line, "and then a traceback"])


def test_memory_that_ran_out_counts_more_than_the_process_that_died_of_it() -> None:
    lines = ["EngineDeadError", "torch.OutOfMemoryError: CUDA out of memory."]
    assert "ran out of GPU memory" in explain(None, lines)


def test_without_a_known_cause_the_signal_or_the_last_line_is_told() -> None:
    assert "killed from outside" in explain(-9, [])
    assert "shared memory" in explain(-7, ["harmless"])
    assert "crashed (SIGSEGV)" in explain(-11, [])
    assert "signal 200" in explain(-200, [])
    assert "exit code 3 (the last line)" in explain(3, ["a line", "the last line"])
    assert "broke" in explain(None, [])
