"""Every engine that computes: temperature 0, top_k and top_p take the tokens that sampler.py says, whatever
the engine."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.engine_factories import DRAWING_PARAMS, Case
from support.engine_cases import request

from primerl.node.inference.engine import Engine, GenerateRequest, narrowing
from primerl.node.inference.sampler import Narrowed, draw
from primerl.node.models import huggingface

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

REQUESTS = [
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
        made = await asyncio.gather(*map(engine.generate, REQUESTS))
        halves = await asyncio.gather(
            *(engine.generate(replace(one, max_tokens=5)) for one in REQUESTS)
        )
        rest = await asyncio.gather(
            *(
                engine.generate(replace(one, prompt=(*one.prompt, *half.token_ids), max_tokens=7))
                for one, half in zip(REQUESTS, halves, strict=True)
            )
        )
    model: Any = huggingface.model_from_state(case.model_dir, case.states[0])
    for index, (one, whole) in enumerate(zip(REQUESTS, made, strict=True)):
        tokens, logprobs = by_definition(model, one, whole.token_ids)
        assert whole.token_ids == tokens
        assert whole.logprobs == pytest.approx(logprobs, abs=case.factory.within)
        # a completion in two pieces is the completion in one: what streams are made of
        assert [*halves[index].token_ids, *rest[index].token_ids] == tokens


def by_definition(
    model: Any, one: GenerateRequest, drawn: list[int]
) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of a plain forward pass over what was drawn."""
    logits = _logits(model, one, drawn)
    first, count = len(one.prompt), len(logits)
    temperature, top_k, top_p = narrowing(one)
    found = draw(
        logits,
        torch.full((count,), temperature),
        torch.full((count,), one.seed),
        torch.arange(first, first + count),
        Narrowed(torch.arange(count), torch.full((count,), top_k), torch.full((count,), top_p)),
    )
    return found.tokens.tolist(), found.logprobs.tolist()


def _logits(model: Any, one: GenerateRequest, drawn: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*one.prompt, *drawn]])).logits[0].float()
    return logits[len(one.prompt) - 1 : -1]
