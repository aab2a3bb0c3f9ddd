"""Proofs of completions, for every engine; for the rest see test_engine.py."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from conformance.engine_factories import Case
from support.engine_cases import request, started, varied_requests
from support.scripted_engine import scripted_hidden

from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.fingerprint import Hidden, Projection
from primerl.node.inference.model import LanguageModel
from primerl.node.ops.errors import EngineError
from primerl.node.weights.state import State

DEADLINE_S = 240.0
NEAR, FAR = 0.02, 0.3
"""Distances: of a proof from the hidden states that it is of, and from those of another policy."""

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def proving(case: Case) -> AsyncIterator[Engine]:
    engine = case.factory.engine()
    try:
        yield await started(engine, case.model_dir, case.states[0], fingerprint="projection")
    finally:
        await engine.close()


async def generate_all(engine: Engine, requests: list[GenerateRequest]) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(engine.generate, requests))


def hidden_states(case: Case, state: State, asked: GenerateRequest, done: Completion) -> Hidden:
    """What led to each token of a completion, by one pass over prompt and completion."""
    if not case.factory.real:
        return scripted_hidden(done.policy_first + (state is not case.states[0]), done.token_ids)
    network = LanguageModel.build(case.model_dir, state, dtype="float32", device="cpu")
    tokens = torch.tensor([[*asked.prompt, *done.token_ids]])
    with torch.inference_mode():
        return network.hidden(tokens)[0, len(asked.prompt) - 1 : -1].numpy()


async def test_every_completion_brings_the_proof_of_its_tokens(proving: Engine) -> None:
    scheme = Projection()
    for one in await generate_all(proving, varied_requests()):
        assert len(one.proof) == scheme.size(len(one.token_ids)) > 0
        scheme.check(one.proof, len(one.token_ids))


async def test_a_proof_is_of_the_hidden_states_of_its_policy_and_of_no_other(
    proving: Engine, case: Case
) -> None:
    """Rows end at different steps and are dropped on the way: each has its own states all the same."""
    requests = [
        replace(one, max_tokens=4 + 9 * index, stop_token_ids=())
        for index, one in enumerate(varied_requests())
    ]
    for asked, done in zip(requests, await generate_all(proving, requests), strict=True):
        own, other = (hidden_states(case, state, asked, done) for state in case.states)
        assert Projection().compare(done.proof, own).distance < NEAR
        assert Projection().compare(done.proof, other).distance > FAR


async def test_a_fingerprint_changes_nothing_that_is_sampled(
    engine: Engine, proving: Engine
) -> None:
    wanted = await generate_all(engine, [request(seed=seed) for seed in range(4)])
    found = await generate_all(proving, [request(seed=seed) for seed in range(4)])
    assert {one.proof for one in wanted} == {b""}
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


async def test_an_unknown_fingerprint_is_an_engine_error(case: Case) -> None:
    engine = case.factory.engine()
    try:
        with pytest.raises(EngineError, match="projection"):
            await engine.start(case.model_dir, fingerprint="thumb")
    finally:
        await engine.close()
