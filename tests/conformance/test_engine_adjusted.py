"""Every engine that computes: penalties, logit_bias, min_tokens and min_p take the tokens that their definition
says (adjusted_cases.py). A pipeline of several nodes refuses them: test_hosted_stage.py."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from adjusted_cases import PLAIN, REQUESTS, adjusted, by_definition
from conformance.engine_factories import DRAWING_PARAMS, Case, make_case
from engine_cases import STOP

from primerl.node import models
from primerl.node.engines.engine import Completion, Engine, GenerateRequest
from primerl.node.errors import EngineError


@pytest.fixture(scope="module", params=DRAWING_PARAMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory)


async def made_by(engine: Engine, requests: list[GenerateRequest]) -> list[Completion]:
    async with asyncio.timeout(120.0):
        return await asyncio.gather(*map(engine.generate, requests))


async def test_tokens_are_those_of_the_definition_and_logprobs_those_of_the_model_as_it_is(
    engine: Engine, case: Case
) -> None:
    found = await made_by(engine, [*REQUESTS.values(), *PLAIN])
    model: Any = models.model_from_state(case.model_dir, case.states[0])
    for name, one, whole in zip(REQUESTS, REQUESTS.values(), found, strict=False):
        with torch.inference_mode():
            ids = torch.tensor([[*one.prompt, *whole.token_ids]])
            logits = model(input_ids=ids).logits[0].float()[len(one.prompt) - 1 : -1]
        tokens, logprobs = by_definition(logits, one, whole.token_ids)
        assert whole.token_ids == tokens, name
        assert whole.logprobs == pytest.approx(logprobs, abs=case.factory.within), name
        assert len(whole.likeliest) == (len(tokens) if one.top else 0)
    changed = [one.token_ids for one in found]
    free = await made_by(engine, [replace(one, adjustment=None) for one in REQUESTS.values()])
    same = [
        name
        for name, one, other in zip(REQUESTS, changed, free, strict=False)
        if one == other.token_ids
    ]
    assert same == [], "these change nothing: the test shows nothing of them"


async def test_requests_beside_them_get_what_they_get_alone(engine: Engine, case: Case) -> None:
    alone = await made_by(engine, PLAIN)
    beside = (await made_by(engine, [*REQUESTS.values(), *PLAIN]))[-len(PLAIN) :]
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
    exactly = [pytest.approx(one.logprobs, abs=case.factory.within) for one in alone]
    assert [one.logprobs for one in beside] == exactly


async def test_a_completion_in_pieces_is_the_completion_in_one(engine: Engine, case: Case) -> None:
    asked = [replace(one, stop_token_ids=(STOP,)) for one in REQUESTS.values()]
    whole = await made_by(engine, asked)
    first = await made_by(engine, [replace(one, max_tokens=5) for one in asked])
    going = [index for index, one in enumerate(first) if one.finish == "length"]
    assert len(going) > 4
    rest = [goes_on(asked[index], first[index].token_ids) for index in going]
    for index, found in zip(going, await made_by(engine, rest), strict=True):
        assert [*first[index].token_ids, *found.token_ids] == whole[index].token_ids


def goes_on(one: GenerateRequest, drawn: list[int]) -> GenerateRequest:
    assert one.adjustment is not None
    return replace(
        one,
        prompt=(*one.prompt, *drawn),
        max_tokens=one.max_tokens - len(drawn),
        adjustment=msgspec.structs.replace(one.adjustment, drawn=len(drawn)),
    )


async def test_a_token_that_the_model_has_not_is_refused_and_the_engine_goes_on(
    engine: Engine, case: Case
) -> None:
    wrong = adjusted(PLAIN[0], bias=((272, 1.0),))
    with pytest.raises(EngineError, match=r"outside 0\.\.271"):
        await engine.generate(wrong)
    assert (await made_by(engine, PLAIN))[0].token_ids
