"""vLLM on two ranks of one machine, without a GPU: needs vLLM, and about a minute."""

import logging
from pathlib import Path

import pytest
import torch
from engine_cases import MAX_LENGTH, SHAPE, make_qwen3, started, varied_requests
from update_cases import blended

from primerl.node.config import EngineConfig
from primerl.node.engines.vllm import VllmEngine

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CONFIG = EngineConfig(
    type="vllm",
    max_model_len=MAX_LENGTH,
    max_batch=8,
    vllm={"tensor_parallel_size": 2, "kv_cache_memory_bytes": 64 << 20},
)


async def test_each_rank_writes_the_part_of_an_update_that_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit what a whole load gives; 272 words of 320 leave padding to the second rank."""
    torch.set_num_threads(1)
    monkeypatch.setenv(
        "VLLM_CPU_OMP_THREADS_BIND", "0|1"
    )  # else a NUMA node for each rank is wanted
    shape = SHAPE.model_copy(update={"head_dim": 32})
    states = [make_qwen3(tmp_path / str(seed), seed, shape) for seed in range(2)]
    new, changed = blended(states[0], states[1], 0.05)
    engine = VllmEngine(CONFIG)
    try:
        await started(engine, tmp_path / "0", states[0])
        before = [await engine.generate(one) for one in varied_requests()]
        with caplog.at_level(logging.INFO, "primerl.node.engines.vllm"):
            await engine.update(1, new, changed)
        assert "whole" not in caplog.text
        updated = [await engine.generate(one) for one in varied_requests()]
        await engine.load(1, new)
        assert [await engine.generate(one) for one in varied_requests()] == updated
    finally:
        await engine.close()
    assert [one.logprobs for one in before] != [one.logprobs for one in updated]
