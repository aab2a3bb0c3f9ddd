"""What an operator is told when the process of an engine ends."""

import pytest

from primerl.node.inference.engine_replica import MEMORY_ADVICE, OTHER_CAUSES, VLLM_CAUSES
from primerl.node.process.exit_reason import Causes, exit_reason

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


def explain(code: int | None, lines: list[str], causes: Causes = VLLM_CAUSES) -> str:
    return exit_reason("it", code, lines, causes=causes, memory_advice=MEMORY_ADVICE)


def test_of_memory_that_did_not_suffice_it_is_said_what_was_free_and_what_was_asked() -> None:
    crowded = (
        "ValueError: Free memory on device cuda:0 (3.1/139.8 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 125.82 GiB). Decrease GPU memory utilization."
    )
    assert "(3.1/139.8 GiB free, 0.9, 125.82 GiB asked for): lower" in explain(1, [crowded])
    full = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "139.80 GiB of which 812.00 MiB is free. Process 12 has 120 GiB memory in use."
    )
    assert "(812.00 MiB free, 2.00 GiB asked for): lower" in explain(1, [full])


@pytest.mark.parametrize("line", SAID)
def test_a_known_cause_is_named_with_what_to_do_wherever_it_was_said(line: str) -> None:
    for code in (1, None, -6):
        assert SAID[line] in explain(code, ["something else", line, "and then a traceback"])


def test_memory_that_ran_out_counts_more_than_the_process_that_died_of_it() -> None:
    lines = ["EngineDeadError", "torch.OutOfMemoryError: CUDA out of memory."]
    assert "ran out of GPU memory" in explain(None, lines)


def test_what_to_do_names_no_option_that_another_engine_lacks() -> None:
    found = explain(1, ["torch.OutOfMemoryError: CUDA out of memory."], OTHER_CAUSES)
    assert "the engine ran out of memory" in found
    assert "vllm" not in found.lower()
