"""One suite for every engine that engine_factories.py names; for update() see test_engine_update.py."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from math import isfinite
from typing import Any

import pytest
import pytest_asyncio
import torch
from conformance.engine_factories import DRAWING_PARAMS, Case
from support.engine_cases import (
    MAX_LENGTH,
    STOP,
    reference_logprobs,
    request,
    started,
    varied_requests,
)
from support.scripted_engine import scripted_hidden

from primerl.node.errors import EngineError
from primerl.node.inference.engine import Completion, Engine, GenerateRequest, narrowing
from primerl.node.inference.fingerprint import Hidden, Projection
from primerl.node.inference.model import LanguageModel
from primerl.node.inference.sampler import Narrowed, SampledTokens, draw
from primerl.node.models import huggingface
from primerl.node.models.support import pack_support, support_fault
from primerl.node.weights.state import State

DEADLINE_S = 240.0
NEAR, FAR = 0.02, 0.3
"""Distances: of a proof from the hidden states that it is of, and from those of another policy."""

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


async def generate_all(engine: Engine, requests: list[GenerateRequest]) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(engine.generate, requests))


async def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_in_another_order(
    engine: Engine,
) -> None:
    requests = varied_requests()
    alone = [(await generate_all(engine, [one]))[0].token_ids for one in requests]
    together = [one.token_ids for one in await generate_all(engine, requests)]
    backwards = [one.token_ids for one in await generate_all(engine, requests[::-1])]
    assert together == alone
    assert backwards[::-1] == alone


async def test_different_seeds_give_different_tokens(engine: Engine) -> None:
    requests = [request(seed=seed, stop=()) for seed in (0, 1, 2, 2**63 - 1)]
    completions = await generate_all(engine, requests)
    assert len({tuple(one.token_ids) for one in completions}) == len(requests)


async def test_every_token_has_a_logprob_and_every_completion_its_version(engine: Engine) -> None:
    for one in await generate_all(engine, varied_requests()):
        assert len(one.token_ids) == len(one.logprobs) > 0
        assert all(isfinite(value) and value <= 0 for value in one.logprobs)
        assert (one.policy_first, one.policy_last) == (0, 0)
    assert engine.policy_version == 0


async def test_logprobs_are_those_of_a_plain_forward_pass_at_the_request_temperature(
    engine: Engine, case: Case
) -> None:
    if not case.factory.real:
        pytest.skip("no model stands behind this engine")
    requests = varied_requests()
    for one, completion in zip(requests, await generate_all(engine, requests), strict=True):
        tokens = [*one.prompt, *completion.token_ids]
        wanted = reference_logprobs(case.model_dir, case.states[0], tokens, one.temperature)
        assert completion.logprobs == pytest.approx(
            wanted[len(one.prompt) :], abs=case.factory.within, rel=0
        )


async def test_a_sampled_stop_token_is_the_last_token_and_the_finish_is_stop(
    engine: Engine,
) -> None:
    stop = tuple(range(128))
    requests = [request(seed=seed, max_tokens=200, stop=stop) for seed in range(4)]
    for one in await generate_all(engine, requests):
        assert one.finish == "stop"
        assert one.token_ids[-1] in stop
        assert not set(one.token_ids[:-1]) & set(stop)


async def test_a_completion_without_a_stop_token_ends_at_its_length(engine: Engine) -> None:
    requests = [request(max_tokens=length, stop=()) for length in (1, 7, 40)]
    completions = await generate_all(engine, requests)
    assert [len(one.token_ids) for one in completions] == [1, 7, 40]
    assert {one.finish for one in completions} == {"length"}
    # a longer request continues a shorter one of the same seed
    assert completions[2].token_ids[:7] == completions[1].token_ids


async def test_a_stop_token_at_the_last_place_finishes_as_stop(engine: Engine) -> None:
    free = (await generate_all(engine, [request(max_tokens=5, stop=())]))[0]
    cut = free.token_ids.index(free.token_ids[-1]) + 1
    bound = request(max_tokens=cut, stop=(free.token_ids[-1],))
    [one] = await generate_all(engine, [bound])
    assert (len(one.token_ids), one.finish) == (cut, "stop")


async def test_a_completion_is_cut_where_the_engine_s_length_ends(engine: Engine) -> None:
    prompt = "a" * (MAX_LENGTH - 6)
    [one] = await generate_all(engine, [request(prompt, max_tokens=2000, stop=())])
    assert (len(one.token_ids), one.finish) == (6, "length")


async def test_after_a_load_tokens_come_from_the_new_weights(engine: Engine, case: Case) -> None:
    old = await generate_all(engine, varied_requests())
    await engine.load(5, case.states[1])
    new = await generate_all(engine, varied_requests())
    assert engine.policy_version == 5
    assert {(one.policy_first, one.policy_last) for one in new} == {(5, 5)}
    assert [one.token_ids for one in old] != [one.token_ids for one in new]


async def test_stamps_tell_the_weights_while_loads_run_beside_generation(
    engine: Engine, case: Case
) -> None:
    """A completion of one version is exactly what that version's weights give.

    Versions only rise, as in a run; odd ones are one policy and even ones the other.
    """
    alone: dict[int, list[int]] = {}
    for version in range(2):
        await engine.load(version, case.states[version])
        alone[version] = (await generate_all(engine, [request()]))[0].token_ids

    async def load_in_turn() -> None:
        for version in range(2, 8):
            await engine.load(version, case.states[version % 2])

    async def generate_in_turn() -> list[Completion]:
        return [await engine.generate(request()) for _ in range(6)]

    async with asyncio.timeout(DEADLINE_S):
        loading = asyncio.create_task(load_in_turn())
        found = await asyncio.gather(*(generate_in_turn() for _ in range(4)))
        await loading
    assert alone[0] != alone[1]
    for one in itertools.chain(*found):
        if one.policy_first == one.policy_last:
            # A scripted engine goes by the version, not by the weights: one version, one answer.
            version = one.policy_first % 2 if case.factory.real else one.policy_first
            assert one.token_ids == alone.setdefault(version, one.token_ids)
        else:
            assert 1 <= one.policy_first < one.policy_last <= 7
    assert engine.policy_version == 7


async def test_concurrent_loads_leave_the_version_that_was_asked_for_last(
    engine: Engine, case: Case
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        loads = [engine.load(version, case.states[version % 2]) for version in range(1, 6)]
        await asyncio.gather(*loads)
    [one] = await generate_all(engine, [request()])
    assert (engine.policy_version, one.policy_first) == (5, 5)


async def test_a_caller_that_gives_up_does_not_disturb_the_others(engine: Engine) -> None:
    [wanted] = await generate_all(engine, [request()])
    quitter = asyncio.create_task(engine.generate(request(seed=9)))
    stayer = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0)
    quitter.cancel()
    async with asyncio.timeout(DEADLINE_S):
        assert (await stayer).token_ids == wanted.token_ids
    with pytest.raises(asyncio.CancelledError):
        await quitter


BAD_REQUESTS = {
    "empty prompt": replace(request(), prompt=()),
    "token out of range": replace(request(), prompt=(1, 10_000)),
    "negative token": replace(request(), prompt=(1, -1)),
    "prompt too long": replace(request(), prompt=(1,) * MAX_LENGTH),
    "no tokens wanted": replace(request(), max_tokens=0),
    "temperature negative": replace(request(), temperature=-0.5),
    "temperature not a number": replace(request(), temperature=float("nan")),
    "seed too large": replace(request(), seed=2**63),
    "negative seed": replace(request(), seed=-1),
}


@pytest.mark.parametrize("fault", BAD_REQUESTS)
async def test_a_bad_request_is_refused_and_fails_nobody_else(engine: Engine, fault: str) -> None:
    good = asyncio.create_task(engine.generate(request()))
    with pytest.raises(EngineError):
        await engine.generate(BAD_REQUESTS[fault])
    async with asyncio.timeout(DEADLINE_S):
        assert (await good).token_ids


async def test_the_stop_token_of_these_cases_is_the_tokenizer_s(case: Case) -> None:
    from primerl.node.models.huggingface import stop_token_ids

    assert stop_token_ids(case.model_dir) == (STOP,)


# -- temperature 0, top_k and top_p ----------------------------------------------------------------

NARROWED = [
    request("abc", seed=1, stop=()),
    replace(request("abc", seed=1, stop=()), temperature=0.0),
    replace(request("xy", seed=2, stop=()), top_k=3),
    replace(request("xy", seed=3, stop=(), temperature=1.3), top_p=0.5),
    replace(request("q", seed=4, stop=()), top_k=8, top_p=0.7),
]


@pytest.mark.parametrize("case", DRAWING_PARAMS, indirect=True, scope="session")
async def test_tokens_are_those_that_the_definition_draws_from_the_models_logits(
    engine: Engine, case: Case
) -> None:
    async with asyncio.timeout(60.0):
        made = await asyncio.gather(*map(engine.generate, NARROWED))
        halves = await asyncio.gather(
            *(engine.generate(replace(one, max_tokens=5)) for one in NARROWED)
        )
        rest = await asyncio.gather(
            *(
                engine.generate(replace(one, prompt=(*one.prompt, *half.token_ids), max_tokens=7))
                for one, half in zip(NARROWED, halves, strict=True)
            )
        )
    model: Any = huggingface.model_from_state(case.model_dir, case.states[0])
    for index, (one, whole) in enumerate(zip(NARROWED, made, strict=True)):
        tokens, logprobs = by_definition(model, one, whole.token_ids)
        assert whole.token_ids == tokens
        assert whole.logprobs == pytest.approx(logprobs, abs=case.factory.within)
        # a completion in two pieces is the completion in one: what streams are made of
        assert [*halves[index].token_ids, *rest[index].token_ids] == tokens


@pytest.mark.parametrize("case", DRAWING_PARAMS, indirect=True, scope="session")
async def test_supports_are_the_tokens_that_the_definition_leaves_with_the_logprobs_over_them(
    engine: Engine, case: Case
) -> None:
    """Some ask for them, beside others that do not; the same tokens are drawn."""
    async with asyncio.timeout(60.0):
        asked = [replace(one, supported=one in NARROWED[2:]) for one in NARROWED]
        made = await asyncio.gather(*map(engine.generate, [*asked, *NARROWED]))
    model: Any = huggingface.model_from_state(case.model_dir, case.states[0])
    for one, whole, plain in zip(asked, made, made[len(asked) :], strict=False):
        assert (whole.token_ids, plain.support) == (plain.token_ids, b"")
        if not one.supported:
            assert whole.support == b""
            assert whole.logprobs == pytest.approx(plain.logprobs, abs=case.factory.within)
            continue
        assert support_fault(whole.support, whole.token_ids, 272, one.top_k, one.top_p) == ""
        found = defined(model, one, whole.token_ids)
        assert found.support is not None
        assert found.support_logprobs is not None
        assert whole.support == pack_support(found.support.numpy(), whole.token_ids)
        wanted = found.support_logprobs.tolist()
        assert whole.logprobs == pytest.approx(wanted, abs=case.factory.within)
        assert whole.logprobs != pytest.approx(plain.logprobs, abs=0.01)


async def test_a_support_of_tokens_that_are_drawn_from_all_is_refused(engine: Engine) -> None:
    for one in (request(), replace(request(), temperature=0.0, top_k=3)):
        with pytest.raises(EngineError, match="top_k or top_p"):
            await engine.generate(replace(one, supported=True))


def by_definition(
    model: Any, one: GenerateRequest, drawn: list[int]
) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of a plain forward pass over what was drawn."""
    found = defined(model, one, drawn)
    return found.tokens.tolist(), found.logprobs.tolist()


def defined(model: Any, one: GenerateRequest, drawn: list[int]) -> SampledTokens:
    """What a plain forward pass over what was drawn draws itself."""
    logits = _logits(model, one, drawn)
    first, count = len(one.prompt), len(logits)
    temperature, top_k, top_p = narrowing(one)
    return draw(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), one.seed),
        torch.arange(first, first + count),
        Narrowed(torch.arange(count), torch.full((count,), top_k), torch.full((count,), top_p)),
    )


def _logits(model: Any, one: GenerateRequest, drawn: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*one.prompt, *drawn]])).logits[0].float()
    return logits[len(one.prompt) - 1 : -1]


# -- proofs ----------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def proving(case: Case) -> AsyncIterator[Engine]:
    engine = case.factory.engine()
    try:
        yield await started(engine, case.model_dir, case.states[0], fingerprint="projection")
    finally:
        await engine.close()


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


# -- the end -----------------------------------------------------------------------------------------


async def test_close_fails_what_is_pending_and_everything_after(
    proving: Engine, case: Case
) -> None:
    """The last test: it closes the engine of those before, since vLLM takes its time to start."""
    await proving.load(0, case.states[0])
    pending = [
        asyncio.create_task(proving.generate(request(seed=seed, max_tokens=100, stop=())))
        for seed in range(3)
    ]
    await asyncio.sleep(0)
    await proving.close()
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(result) for result in results] == [EngineError] * 3
    with pytest.raises(EngineError):
        await proving.generate(request())
    with pytest.raises(EngineError):
        await proving.load(1, case.states[1])
    with pytest.raises(EngineError):
        await proving.update(1, case.states[1], {})
    await proving.close()
