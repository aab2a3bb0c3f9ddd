"""What penalties, biases, min_tokens and min_p do to logits, token by token in plain Python: the definition."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf

import torch
from engine_cases import request
from torch import Tensor

from primerl.node.engines.adjustment import Adjustment
from primerl.node.engines.engine import GenerateRequest
from primerl.node.engines.requests import narrowing
from primerl.node.engines.sampling import Narrowed, draw


def adjusted(request: GenerateRequest, **fields: object) -> GenerateRequest:
    """`request` with an adjustment of these fields."""
    return replace(request, adjustment=Adjustment(**fields))  # pyright: ignore[reportArgumentType]


def changed(
    logits: Sequence[float], asked: Adjustment, prompt: Sequence[int], said: Sequence[int]
) -> list[float]:
    """As they go to the temperature; `prompt` and what was `said` since are those of the whole completion."""
    found = list(logits)
    for token, bias in asked.bias:
        found[token] += bias
    if len(said) < asked.min_tokens:
        for token in asked.ends:
            found[token] = -inf
    for token in {*prompt, *said}:
        if found[token] > 0:
            found[token] /= asked.repetition
        else:
            found[token] *= asked.repetition
    for token in set(said):
        found[token] -= asked.frequency * said.count(token) + asked.presence
    return found


def left(logits: Sequence[float], min_p: float, temperature: float) -> list[float]:
    """Without the tokens that min_p leaves out."""
    best = max(logits)
    shares = [exp((one - best) / temperature) for one in logits]
    return [one if share >= min_p else -inf for one, share in zip(logits, shares, strict=True)]


def by_definition(
    logits: Tensor, request: GenerateRequest, drawn: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Tokens and logprobs that `request` gets from `logits` [n, V], after it has `drawn` these."""
    asked = request.adjustment or Adjustment()
    begun = len(request.prompt) - asked.drawn
    prompt, before = request.prompt[:begun], list(request.prompt[begun:])
    temperature, top_k, top_p = narrowing(request)
    tokens: list[int] = []
    logprobs: list[float] = []
    for index, row in enumerate(logits):
        made = changed(row.tolist(), asked, prompt, [*before, *drawn[:index]])
        made = left(made, asked.min_p, temperature)
        found = draw(
            torch.tensor([made]),
            torch.tensor([temperature]),
            torch.tensor([request.seed]),
            torch.tensor([len(request.prompt) + index]),
            Narrowed(torch.tensor([0]), torch.tensor([top_k]), torch.tensor([top_p])),
        )
        token = int(found.tokens)
        tokens.append(token)
        logprobs.append(float(torch.log_softmax(row / temperature, -1)[token]))
    return tokens, logprobs


MANY = tuple(range(0, 272, 2))
"""Stop tokens, of which one would come soon."""
LONG = request("abca", seed=1, stop=(), max_tokens=24)
REQUESTS: dict[str, GenerateRequest] = {
    "presence_penalty": adjusted(replace(LONG, temperature=0.0), presence=2.0),
    "frequency_penalty": adjusted(replace(LONG, temperature=0.0), frequency=1.5),
    "a reward for what was said": adjusted(
        request("q", seed=3, stop=()), frequency=-2.0, presence=-2.0
    ),
    "repetition_penalty": adjusted(replace(LONG, temperature=0.0), repetition=1.8),
    "logit_bias": adjusted(request("xy", seed=4, stop=()), bias=((7, 100.0),)),
    "a bias that forbids": adjusted(
        replace(request("xy", seed=4, stop=()), top_k=5),
        bias=tuple((token, -100.0) for token in MANY),
    ),
    "min_tokens": adjusted(request("abc", seed=5, stop=MANY), min_tokens=6, ends=MANY),
    "min_p": adjusted(request("abc", seed=6, stop=(), temperature=1.6), min_p=0.3),
    "all of them": adjusted(
        replace(request("hello", seed=7, stop=MANY, temperature=1.2), top_k=40, top_p=0.9, top=3),
        min_p=0.02,
        presence=0.5,
        frequency=0.3,
        repetition=1.2,
        bias=((11, 3.0), (13, -4.0)),
        min_tokens=4,
        ends=MANY,
    ),
}
PLAIN = [request("abc", seed=1, stop=()), replace(request("xy", seed=4, stop=()), top_k=5)]
