"""The decode loop: one batch of requests through a network, one token a step.

Rows may differ in everything but the network; nothing of a row may depend on another one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ..errors import EngineError
from .engine import GenerateRequest
from .network import Network, Session
from .sampling import sample

COMPACT_AT = 0.75
"""Share of unfinished rows at which finished ones are dropped; copying the cache costs about a step."""


@dataclass
class Drawn:
    """What one request got; `stopped` by a stop token, else by length."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool = False


@dataclass
class Rows:
    """The live rows' arguments, each [B] on the network's device; `stops` [B, S] is filled with -1.

    `requests` are the indices of their requests, `positions` those of the tokens to draw next,
    `ends` the positions at which they must end.
    """

    requests: Tensor
    seeds: Tensor
    temperatures: Tensor
    positions: Tensor
    ends: Tensor
    stops: Tensor
    alive: Tensor

    def select(self, rows: Tensor) -> "Rows":
        """The rows `rows` [N]."""
        return Rows(**{name: values[rows] for name, values in vars(self).items()})


def decode(
    network: Network,
    requests: Sequence[GenerateRequest],
    *,
    max_length: int,
    cancelled: Callable[[], bool],
) -> list[Drawn]:
    """Sample every request, prompt and completion together at most `max_length` tokens.

    `cancelled` is asked before every step; EngineError is raised when it says yes, and when the
    network's logits are not numbers.
    """
    drawn = [Drawn([], []) for _ in requests]
    with torch.inference_mode():
        rows = _rows(requests, network.device, max_length)
        session, logits = _prefill(network, requests)
        while True:
            if cancelled():
                raise EngineError("the engine was closed while it generated: start it again")
            tokens, logprobs = sample(logits, rows.temperatures, rows.seeds, rows.positions)
            stopped = (tokens[:, None] == rows.stops).any(1)
            _record(drawn, rows, tokens, logprobs, stopped)
            rows.positions += 1
            rows.alive &= ~stopped & (rows.positions < rows.ends)
            rows, tokens = _compact(rows, session, tokens)
            if not len(tokens):
                return drawn
            logits = session.step(tokens)


def _rows(requests: Sequence[GenerateRequest], device: torch.device, max_length: int) -> Rows:
    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    lengths = [len(request.prompt) for request in requests]
    limits = [length + one.max_tokens for length, one in zip(lengths, requests, strict=True)]
    widest = max(len(request.stop_token_ids) for request in requests) or 1
    stops = [[*one.stop_token_ids, *[-1] * (widest - len(one.stop_token_ids))] for one in requests]
    temperatures = [request.temperature for request in requests]
    return Rows(
        requests=column(list(range(len(requests)))),
        seeds=column([request.seed for request in requests]),
        temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
        positions=column(lengths),
        ends=column([min(limit, max_length) for limit in limits]),
        stops=torch.tensor(stops, dtype=torch.int64, device=device),
        alive=torch.ones(len(requests), dtype=torch.bool, device=device),
    )


def _prefill(network: Network, requests: Sequence[GenerateRequest]) -> tuple[Session, Tensor]:
    """Read every different prompt once, then give each request its copy."""
    prompts = {prompt: row for row, prompt in enumerate(dict.fromkeys(r.prompt for r in requests))}
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=network.device)
    tokens = torch.tensor(padded, dtype=torch.int64, device=network.device)
    columns = torch.arange(width, device=network.device)
    session, logits = network.prefill(tokens, columns >= width - lengths[:, None])
    if len(prompts) < len(requests):
        owners = torch.tensor([prompts[r.prompt] for r in requests], device=network.device)
        session.select(owners)
        logits = logits[owners]
    return session, logits


def _record(
    drawn: list[Drawn], rows: Rows, tokens: Tensor, logprobs: Tensor, stopped: Tensor
) -> None:
    columns = (rows.requests, rows.alive, tokens, logprobs, stopped)
    for index, alive, token, logprob, stop in zip(*(c.tolist() for c in columns), strict=True):
        if not alive:
            continue
        if not isfinite(logprob):
            raise EngineError("the policy's logits are not numbers: load another version")
        drawn[index].token_ids.append(token)
        drawn[index].logprobs.append(logprob)
        drawn[index].stopped = stop


def _compact(rows: Rows, session: Session, tokens: Tensor) -> tuple[Rows, Tensor]:
    """Drop finished rows once they are many; all gone leaves no tokens."""
    alive = int(rows.alive.sum())
    if alive == 0:
        return rows, tokens[:0]
    if alive > COMPACT_AT * len(tokens):
        return rows, tokens
    kept = rows.alive.nonzero()[:, 0]
    session.select(kept)
    return rows.select(kept), tokens[kept]
