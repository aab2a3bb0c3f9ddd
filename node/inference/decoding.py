"""Decode loop: one batch of requests through a network, one token per step.

Rows share only the network; no row may depend on another one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ..errors import EngineError
from .engine import GenerateRequest, narrowing
from .model import LanguageModel, ModelOutput, Session
from .sampler import Narrowed, SampledTokens, draw

COMPACT_AT = 0.75
"""Share of unfinished rows at which others are dropped; copying the cache costs a step."""


@dataclass
class DecodedReply:
    """Result of one request; ended by a stop token if `stopped`, else by its length limit.

    `hidden` [tokens, d] fp32 are the states that led to the tokens, `routes` [tokens, layers, k] the experts,
    `support` [tokens, W] int32 SampledTokens.support; all are None unless requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool = False
    hidden: Tensor | None = None
    routes: Tensor | None = None
    support: Tensor | None = None


@dataclass
class Rows:
    """Arguments of the rows of a batch, each [B] on the network's device.

    `stops` [B, S] is padded with -1. `requests` are indices of requests, `positions` those of the tokens to
    draw next, `ends` the positions at which the rows must end.
    """

    requests: Tensor
    seeds: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    positions: Tensor
    ends: Tensor
    stops: Tensor
    alive: Tensor

    def select(self, rows: Tensor) -> "Rows":
        """Return the rows with indices `rows` [N]."""
        return Rows(**{name: values[rows] for name, values in vars(self).items()})

    def narrowed(self) -> Narrowed | None:
        """Return the rows that may draw only from their likeliest tokens; None if no row is limited."""
        rows = ((self.top_ks > 0) | (self.top_ps < 1)).nonzero()[:, 0]
        return Narrowed(rows, self.top_ks[rows], self.top_ps[rows]) if len(rows) else None


def decode(
    network: LanguageModel,
    requests: Sequence[GenerateRequest],
    *,
    max_length: int,
    cancelled: Callable[[], bool],
    keep_hidden: bool = False,
    keep_routes: bool = False,
) -> list[DecodedReply]:
    """Sample every request, prompt and completion together at most `max_length` tokens.

    `cancelled` is called before every step. Raises EngineError if it returns True, if the network's logits are
    not numbers, or if hidden states are to be kept and the network does not show them.
    """
    replies = [DecodedReply([], []) for _ in requests]
    hidden, routes, supports = Trail(), Trail(), Trail()
    supported = [request.supported for request in requests]
    with torch.inference_mode():
        rows = _rows(requests, network.device, max_length)
        narrow = rows.narrowed() is not None
        session, output = _prefill(network, requests, keep_routes)
        while True:
            if cancelled():
                raise EngineError("the engine was closed while it generated: start it again")
            if keep_hidden:
                hidden.add(_shown(output), rows)
            if output.routes is not None:
                routes.add(output.routes, rows)
            narrowed = rows.narrowed() if narrow else None
            sampled = draw(output.logits, rows.temperatures, rows.seeds, rows.positions, narrowed)
            stopped = (sampled.tokens[:, None] == rows.stops).any(1)
            if any(supported) and sampled.support is not None:
                supports.add(sampled.support, rows)
            _record(replies, rows, sampled, stopped, supported)
            rows.positions += 1
            rows.alive &= ~stopped & (rows.positions < rows.ends)
            rows, tokens = _compact(rows, session, sampled.tokens)
            if not len(tokens):
                break
            output = session.step(tokens)
        counts = [len(reply.token_ids) for reply in replies]
        for reply, own in zip(replies, hidden.share_out(counts), strict=False):
            reply.hidden = own.float()
        for reply, own in zip(replies, routes.share_out(counts), strict=False):
            reply.routes = own
        for reply, own in zip(replies, supports.share_out(counts), strict=False):
            reply.support = own
    return replies


def _shown(output: ModelOutput) -> Tensor:
    if output.hidden is None:
        raise EngineError(
            "this model does not show the hidden states that feed its head: "
            "choose another model, or a run without fingerprints"
        )
    return output.hidden


class Trail:
    """Tensors of each token of a batch, kept step by step and split by request at the end.

    Bounded by the batch: steps x rows x width, in the dtype and on the device of the network.
    """

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._owners: list[Tensor] = []

    def add(self, shown: Tensor, rows: Rows) -> None:
        """Keep `shown` [B, ...], which leads to the next token of every live row."""
        self._steps.append(shown)
        self._owners.append(rows.requests.where(rows.alive, -1))

    def share_out(self, counts: Sequence[int]) -> Sequence[Tensor]:
        """Return the tensors [tokens, ...] of the requests in order, by their `counts` of tokens.

        Empty if add() was not called.
        """
        if not self._steps:
            return ()
        owners = torch.cat(self._owners)
        steps = torch.cat(self._steps)
        self._steps.clear()
        order = owners.argsort(stable=True)
        order = order[int((owners == -1).sum()) :]
        return [steps[part] for part in order.split(list(counts))]


def _rows(requests: Sequence[GenerateRequest], device: torch.device, max_length: int) -> Rows:
    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def numbers(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    lengths = [len(request.prompt) for request in requests]
    limits = [
        length + request.max_tokens for length, request in zip(lengths, requests, strict=True)
    ]
    widest = max(len(request.stop_token_ids) for request in requests) or 1
    stops = [
        [*request.stop_token_ids, *[-1] * (widest - len(request.stop_token_ids))]
        for request in requests
    ]
    temperatures, top_ks, top_ps = zip(*map(narrowing, requests), strict=True)
    return Rows(
        requests=column(list(range(len(requests)))),
        seeds=column([request.seed for request in requests]),
        temperatures=numbers(temperatures),
        top_ks=column(top_ks),
        top_ps=numbers(top_ps),
        positions=column(lengths),
        ends=column([min(limit, max_length) for limit in limits]),
        stops=torch.tensor(stops, dtype=torch.int64, device=device),
        alive=torch.ones(len(requests), dtype=torch.bool, device=device),
    )


def _prefill(
    network: LanguageModel, requests: Sequence[GenerateRequest], keep_routes: bool
) -> tuple[Session, ModelOutput]:
    """Read each distinct prompt once, then copy the result to every request with that prompt."""
    prompts = {prompt: row for row, prompt in enumerate(dict.fromkeys(r.prompt for r in requests))}
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=network.device)
    tokens = torch.tensor(padded, dtype=torch.int64, device=network.device)
    columns = torch.arange(width, device=network.device)
    session, output = network.prefill(
        tokens, columns >= width - lengths[:, None], keep_routes=keep_routes
    )
    if len(prompts) < len(requests):
        owners = torch.tensor([prompts[r.prompt] for r in requests], device=network.device)
        session.select(owners)
        hidden, routes = (
            None if column is None else column[owners] for column in (output.hidden, output.routes)
        )
        output = ModelOutput(hidden, output.logits[owners], routes)
    return session, output


def _record(
    replies: list[DecodedReply],
    rows: Rows,
    sampled: SampledTokens,
    stopped: Tensor,
    supported: Sequence[bool],
) -> None:
    over = sampled.logprobs if sampled.support_logprobs is None else sampled.support_logprobs
    columns = (rows.requests, rows.alive, sampled.tokens, sampled.logprobs, over, stopped)
    for index, alive, token, logprob, own, stop in zip(*(c.tolist() for c in columns), strict=True):
        if not alive:
            continue
        logprob = own if supported[index] else logprob
        if not isfinite(logprob):
            raise EngineError("the policy's logits are not numbers: load another version")
        replies[index].token_ids.append(token)
        replies[index].logprobs.append(logprob)
        replies[index].stopped = stop


def _compact(rows: Rows, session: Session, tokens: Tensor) -> tuple[Rows, Tensor]:
    """Drop finished rows once they are many; returns no tokens if all rows are finished."""
    alive = int(rows.alive.sum())
    if alive == 0:
        return rows, tokens[:0]
    if alive > COMPACT_AT * len(tokens):
        return rows, tokens
    unfinished = rows.alive.nonzero()[:, 0]
    session.select(unfinished)
    return rows.select(unfinished), tokens[unfinished]
