"""FP8 rollouts on a GPU: the bits of the routine, vLLM's kernels, updates in place, and audits."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from support.auditor_cases import make_run, measured
from support.engine_cases import blended, make_qwen3
from support.exact_cases import play, requests
from support.protocol_cases import played_otherwise

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.quantization import quantize
from primerl.node.models import huggingface
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of vLLM, torch and CUDA, in versions that vary
]

SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 320,
}
CONFIG = EngineConfig(
    type="vllm",
    dtype="bfloat16",
    quantization="fp8",
    max_batch=32,
    max_model_len=512,
    vllm={"gpu_memory_utilization": 0.2},
)
EAGER = CONFIG.model_copy(update={"vllm": CONFIG.vllm | {"enforce_eager": True}})
COST = 0.1
"""Most of the mean absolute difference of logprobs to bf16 weights; 0.02 by a simulation, and 0.4 to the
logprobs of another policy."""


def case(directory: Path) -> tuple[Path, list[State]]:
    states: list[State] = []
    for seed in range(2):
        huggingface.create(directory / str(seed), SHAPE, seed)
        states.append(huggingface.policy_state(huggingface.load_model(directory / str(seed))))
    return directory / "0", states


def wanted(max_tokens: int = 64) -> list[GenerateRequest]:
    prompts = [tuple((7 * index + 3) % 256 for index in range(length)) for length in (1, 40, 300)]
    return [
        GenerateRequest(prompt, max_tokens, temperature, seed, ())
        for seed, prompt in enumerate(prompts)
        for temperature in (0.7, 1.0)
    ]


async def one_by_one(engine: HostedEngine) -> list[Completion]:
    return [await engine.generate(one) for one in wanted()]


@asynccontextmanager
async def running(config: EngineConfig, model_dir: Path) -> AsyncGenerator[HostedEngine]:
    engine = HostedEngine(config)
    try:
        await engine.start(model_dir, fingerprint="projection")
        yield engine
    finally:
        await engine.close()


def difference(model_dir: Path, state: State, found: list[Completion]) -> float:
    """Mean |logprob of vLLM - logprob of transformers with these weights, in fp32|."""
    model: Any = huggingface.model_from_state(model_dir, state, device="cuda")
    apart: list[torch.Tensor] = []
    for one, completion in zip(wanted(), found, strict=True):
        tokens = torch.tensor([[*one.prompt, *completion.token_ids]], device="cuda")
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits[0].float() / one.temperature
        logprobs = torch.log_softmax(logits, -1)[len(one.prompt) - 1 : -1].cpu()
        chosen = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        apart.append((chosen - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(apart).mean())


async def test_a_gpu_rounds_weights_to_the_bits_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3000, 2048, generator=generator)
    scales = torch.randint(-140, 120, (3000, 1), generator=generator).double().exp2()
    rows = (drawn.double() * scales).bfloat16()
    rows[5], rows[6, 7] = 0.0, 3e38
    codes, own = quantize(rows)
    other_codes, other = quantize(rows.cuda())
    assert torch.equal(own.view(torch.int32), other.cpu().view(torch.int32))
    assert torch.equal(codes.view(torch.uint8), other_codes.cpu().view(torch.uint8))


@pytest.mark.parametrize("config", [EAGER, CONFIG], ids=["eager", "compiled"])
async def test_an_update_in_place_is_a_fresh_load_to_the_last_bit_and_costs_little(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: EngineConfig
) -> None:
    model_dir, states = case(tmp_path)
    state = states[0]
    async with running(config, model_dir) as engine:
        await engine.load(0, state)
        before = await one_by_one(engine)
        cost = difference(model_dir, state, before)
        foreign = difference(model_dir, states[1], before)
        print(f"to bf16 weights {cost:.4f} nats, to another policy {foreign:.4f}")
        assert 1e-3 < cost < COST < foreign
        with caplog.at_level(logging.INFO, "primerl.node.inference.handover"):
            for seed, share in enumerate((0.05, 0.001, 0.3)):
                state, changed = blended(state, states[1], share, seed)
                await engine.update(1 + seed, state, changed)
        assert "whole" not in caplog.text
        updated = await one_by_one(engine)
        assert [one.logprobs for one in updated] != [one.logprobs for one in before]
        await engine.load(3, state)
        assert await one_by_one(engine) == updated
        cost = difference(model_dir, state, updated)
        print(f"after updates: {cost:.4f} nats")
        assert 1e-3 < cost < COST
    async with running(config, model_dir) as fresh:
        await fresh.load(3, state)
        assert await one_by_one(fresh) == updated


async def test_an_audit_tells_fp8_rollouts_from_bf16_ones(tmp_path: Path) -> None:
    """By fingerprints: the auditor computes what the manifest says."""
    state = make_qwen3(tmp_path, 0, SHAPE)
    run = make_run("bfloat16")
    run = structs.replace(run, proofs=structs.replace(run.proofs, quantization="fp8"))
    run = played_otherwise(run, temperature=1.0)
    auditor = VllmAuditor(CONFIG, timeout_s=240.0)
    asked = requests(64, 40, 64, SHAPE["vocab_size"])
    found: dict[str, list[float]] = {}
    try:
        await auditor.start(tmp_path, run)
        for name in ("fp8", "none"):
            config = EAGER.model_copy(update={"quantization": name})
            async with running(config, tmp_path) as engine:
                await engine.load(0, state)
                async with asyncio.timeout(240):
                    items = await play(engine, asked)
            seen = measured(await auditor.audit(items, {0: state}))
            for measure in ("fingerprint", "sampling", "logprob", "logprob_max"):
                values = sorted(getattr(one, measure) for one in seen)
                print(
                    f"{name:5} {measure:12} {values[len(values) // 2]:.4g}, most {values[-1]:.4g}"
                )
            found[name] = sorted(one.fingerprint for one in seen)
    finally:
        await auditor.close()
    assert found["fp8"][-1] < found["none"][0], "the fingerprints of both do not overlap"
