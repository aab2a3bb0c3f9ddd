"""What only a GPU shows of vLLM in processes of its own: sleep, memory that runs out, engines side by side.

Two minutes on one GPU, three on two:

    python -m pytest -m gpu -q tests/gpu/test_hosted_gpu.py
"""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
import torch
from support.engine_cases import blended
from support.waiting import until

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # of vLLM, torch and CUDA, in versions that vary
]

DEADLINE_S = 200.0
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 320,
}
SHARE = 0.2

Policies = tuple[Path, State, State]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    contract = tmp_path_factory.mktemp("contract")
    states: list[State] = []
    for seed in range(2):
        full = tmp_path_factory.mktemp("full")
        huggingface.create(full, SHAPE, seed)
        for name in huggingface.contract_files(full):
            shutil.copyfile(full / name, contract / name)
        states.append(huggingface.policy_state(huggingface.load_model(full)))
    return contract, states[0], states[1]


@asynccontextmanager
async def running(policies: Policies, **shape: Any) -> AsyncGenerator[HostedEngine]:
    """An engine that holds the first policy as version 0."""
    vllm = {"gpu_memory_utilization": SHARE, "enforce_eager": True}
    config = EngineConfig(
        type="vllm", dtype="bfloat16", max_batch=32, max_model_len=512, vllm=vllm, **shape
    )
    engine = HostedEngine(config)
    try:
        await engine.start(policies[0], fingerprint="projection")
        await engine.load(0, policies[1])
        yield engine
    finally:
        await engine.close()


def used() -> float:
    """Share of the GPU's memory that is in use, by anybody."""
    free, total = torch.cuda.mem_get_info()
    return 1 - free / total


async def tokens(engine: HostedEngine, group: bytes = b"") -> list[list[int]]:
    wanted = [GenerateRequest((3, 5, 7), 40, 1.0, seed, (), group) for seed in range(4)]
    async with asyncio.timeout(DEADLINE_S):
        return [one.token_ids for one in await asyncio.gather(*map(engine.generate, wanted))]


async def test_a_sleeping_engine_gives_its_memory_away_and_wakes_for_requests_and_policies(
    policies: Policies,
) -> None:
    _, old, other = policies
    new, changed = blended(old, other, 0.1)
    async with running(policies, sleep_after_s=2.0) as engine:
        awake = await tokens(engine)
        full = used()
        await until(lambda: used() < full - SHARE / 2)
        print(f"\nGPU memory in use: awake {full:.3f}, asleep {used():.3f}")
        assert await tokens(engine) == awake
        await until(lambda: used() < full - SHARE / 2)
        await engine.update(1, new, changed)
        updated = await tokens(engine)
        assert updated != awake
        await until(lambda: used() < full - SHARE / 2)
        await engine.load(2, new)
        assert await tokens(engine) == updated
        assert engine.stats().restarts == 0


async def test_less_free_memory_than_vllm_is_to_take_is_explained(policies: Policies) -> None:
    free, total = torch.cuda.mem_get_info()
    held = torch.empty(int(free - SHARE / 2 * total), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(EngineError, match="gpu_memory_utilization") as caught:
            async with running(policies):
                pass
        print(f"\n{caught.value}")
    finally:
        del held
        torch.cuda.empty_cache()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_two_engines_take_a_gpu_each_and_share_every_policy(policies: Policies) -> None:
    _, old, other = policies
    new, changed = blended(old, other, 0.1)
    async with running(policies, dp=2) as engine:
        shown = {psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in engine.pids}
        assert len(shown) == 2
        second: list[list[int]] = []
        for version in range(2):
            if version:
                await engine.update(1, new, changed)
            held = asyncio.create_task(
                engine.generate(GenerateRequest((1,), 400, 1.0, 1, (), b"%d" % version))
            )
            await asyncio.sleep(0)
            first, second = await tokens(engine, b"%d" % version), await tokens(engine, b"other")
            assert first == second
            await held
        restarts = engine.stats().restarts
        psutil.Process(engine.pids[0]).kill()
        await until(lambda: engine.stats().restarts == restarts + 1)
        assert await tokens(engine, b"again") == second
