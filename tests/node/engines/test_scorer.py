"""The scorer: it must find what the engine claimed, and load nothing twice."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import (
    FP32,
    make_llama,
    make_qwen3,
    reference_logprobs,
    started,
    varied_requests,
)

from primerl.node.engines.hf import HfEngine
from primerl.node.engines.scorer import HfScorer
from primerl.node.errors import EngineError
from primerl.node.weights.state import State

MAKERS: dict[str, Callable[[Path, int], State]] = {"qwen3": make_qwen3, "llama": make_llama}


@pytest.fixture(scope="module", params=MAKERS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, State]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    return directory, MAKERS[request.param](directory, 3)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    directory = tmp_path_factory.mktemp("tied")
    return directory, make_qwen3(directory, 3)


async def test_the_scorer_recomputes_what_the_engine_claimed(model: tuple[Path, State]) -> None:
    directory, state = model
    engine, scorer = await started(HfEngine(FP32), directory, state), HfScorer(FP32)
    try:
        requests = [replace(one, temperature=0.8) for one in varied_requests()]
        completions = await asyncio.gather(*map(engine.generate, requests))
        await scorer.start(directory)
        sequences = [
            [*one.prompt, *done.token_ids] for one, done in zip(requests, completions, strict=True)
        ]
        scores = await scorer.logprobs(state, sequences, 0.8, key=0)
    finally:
        await engine.close()
        await scorer.close()
    for one, done, tokens, found in zip(requests, completions, sequences, scores, strict=True):
        assert found == pytest.approx(reference_logprobs(directory, state, tokens, 0.8), abs=1e-5)
        assert found[len(one.prompt) :] == pytest.approx(done.logprobs, abs=1e-5)


async def test_the_scorer_loads_a_state_once_a_key(
    tied: tuple[Path, State], tmp_path: Path
) -> None:
    directory, state = tied
    other = make_qwen3(tmp_path, 9)
    scorer = HfScorer(FP32)
    await scorer.start(directory)
    try:
        first = await scorer.logprobs(state, [[1, 2, 3]], 1.0, key=0)
        assert await scorer.logprobs(other, [[1, 2, 3]], 1.0, key=0) == first
        assert await scorer.logprobs(other, [[1, 2, 3]], 1.0, key=1) != first
        assert await scorer.logprobs(state, [[1, 2, 3]], 1.0, key=0) == first
        assert await scorer.logprobs(state, [], 1.0, key=0) == []
    finally:
        await scorer.close()


@pytest.mark.parametrize("sequence", [[], [1, 272], [1, -1]])
async def test_the_scorer_refuses_tokens_that_the_model_lacks(
    tied: tuple[Path, State], sequence: list[int]
) -> None:
    directory, state = tied
    scorer = HfScorer(FP32)
    with pytest.raises(EngineError, match="start"):
        await scorer.logprobs(state, [[1]], 1.0, key=0)
    await scorer.start(directory)
    try:
        with pytest.raises(EngineError, match="outside"):
            await scorer.logprobs(state, [[1, 2], sequence], 1.0, key=0)
    finally:
        await scorer.close()
