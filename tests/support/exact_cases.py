"""Honest and forged rollouts of an engine, for tests and benchmarks of exact numerics."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from support.auditor_cases import measured

from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.fingerprint import TOKEN_BYTES
from primerl.node.inference.model import LanguageModel
from primerl.node.inference.noise import gumbel
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.verification.auditor import AuditItem, Auditor, SampledSpan
from primerl.node.weights.state import State

SURELY_OFF = 1e-5
"""Nats; more than the noise of a logprob."""
Weights = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
Text = Callable[[Sequence[int], int], list[int]]
"""(number of a text, tokens) -> its first tokens."""


def altered(state: State, change: Weights, device: str = "cpu") -> State:
    """Apply `change` to the layers' matrices in fp32 on `device`; return a bf16 state."""
    generator = torch.Generator(device).manual_seed(5)
    found = dict(state)
    for name, tensor in state.items():
        if len(tensor.shape) == 2 and "layers." in name:
            weights = to_torch(tensor).to(device).float()
            found[name] = from_torch(change(weights, generator).bfloat16().cpu())
    return found


def low_rank(share: float, rank: int = 8) -> Weights:
    """Add a random matrix of this rank and of `share` of the norm."""

    def change(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        sizes = (weights.shape[0], rank), (rank, weights.shape[1])
        left, right = (
            torch.randn(size, generator=generator, device=weights.device) for size in sizes
        )
        moved = left @ right
        return weights + moved * (share * weights.norm() / moved.norm())

    return change


def stepped(lr: float) -> Weights:
    """Move each element of fp32 weights that round to these by `lr` up or down."""

    def change(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        bit = torch.exp2(torch.floor(torch.log2(weights.abs().clamp_min(1e-30))) - 7)
        drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
        signs = torch.randn(weights.shape, generator=generator, device=weights.device).sign()
        return weights + (drawn - 0.5) * bit * 0.998 + lr * signs

    return change


def requests(
    count: int,
    prompt: int,
    reply: int,
    vocabulary: int,
    temperature: float = 1.0,
    group: int = 8,
    *,
    portion: int = 0,
    text: Text | None = None,
) -> list[GenerateRequest]:
    """Groups of `group` that share a prompt, of `prompt` tokens or, every other one, 5 more.

    Prompts are random tokens, or what `text` makes. Portions differ in prompts and in seeds.
    """
    rng = np.random.default_rng(3 + portion)

    def random(_: Sequence[int], tokens: int) -> list[int]:
        return rng.integers(0, vocabulary, tokens).tolist()

    prompts = [
        tuple((text or random)((portion, number), prompt + 5 * (number % 2)))
        for number in range(-(-count // group))
    ]
    first = 10**12 + 10**6 * portion
    return [
        GenerateRequest(prompts[number // group], reply, temperature, first + number, ())
        for number in range(count)
    ]


def item_of(request: GenerateRequest, completion: Completion) -> AuditItem:
    """The branch of one reply, with the versions that drew it."""
    start, count = len(request.prompt), len(completion.token_ids)
    spans = completion.spans or ((0, completion.policy_first),)
    ends = [first for first, _ in spans[1:]] + [count]
    versions: list[int] = []
    for (_, version), end in zip(spans, ends, strict=True):
        versions += [version] * (end - len(versions))
    return AuditItem(
        token_ids=[*request.prompt, *completion.token_ids],
        replies=[SampledSpan(start, start + count, request.seed)],
        logprobs=completion.logprobs,
        versions=versions,
        proof=completion.proof,
        routes=completion.routes,
    )


async def play(engine: Engine, wanted: Sequence[GenerateRequest]) -> list[AuditItem]:
    """Generate honest replies to all of `wanted` concurrently; return their branches."""
    completions = await asyncio.gather(*map(engine.generate, wanted))
    return [item_of(*pair) for pair in zip(wanted, completions, strict=True)]


def claiming(items: Sequence[AuditItem], version: int) -> list[AuditItem]:
    """Make copies of `items` that claim `version`."""
    return [replace(item, versions=[version] * len(item.versions)) for item in items]


def shifted(items: Sequence[AuditItem], nats: float) -> list[AuditItem]:
    """Make copies of `items` with logprobs raised by this much."""
    return [replace(one, logprobs=[value + nats for value in one.logprobs]) for one in items]


async def near_ties(
    auditor: Auditor,
    items: Sequence[AuditItem],
    model_dir: Path,
    state: State,
    *,
    dtype: str,
    device: str = "cpu",
    temperature: float = 1.0,
) -> list[AuditItem]:
    """`items` cut at their nearest tie, which falls to the second best token: all else is true.

    The version of all is the first of the first one. The logprob is corrected by what `auditor` measures.
    """
    version = items[0].versions[0]
    network = LanguageModel.build(model_dir, state, dtype=dtype, device=device)
    cut = [_tied(network, item, device, temperature) for item in items]
    for sign in (1.0, -1.0):  # where the first correction goes the wrong way, the error doubles
        found = measured(await auditor.audit(cut, {version: state}))
        cut = [
            _corrected(item, sign * one.logprob_max) if one.logprob_max > SURELY_OFF else item
            for item, one in zip(cut, found, strict=True)
        ]
    return cut


def _corrected(item: AuditItem, nats: float) -> AuditItem:
    logprobs = list(item.logprobs)
    logprobs[-1] += nats
    return replace(item, logprobs=logprobs)


def _tied(network: LanguageModel, item: AuditItem, device: str, temperature: float) -> AuditItem:
    [reply] = item.replies
    ids = torch.tensor(item.token_ids, device=device)
    places = torch.arange(reply.start, reply.end, device=device)
    with torch.inference_mode():
        hidden = network.packed(ids, [len(ids)], None)[places - 1]
        scaled = network.logits(hidden).float() / temperature
        noise = gumbel(torch.full_like(places, reply.seed), places, scaled.shape[1])
        best = (scaled + noise).topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        gaps[best.indices[:, 0] != ids[places]] = torch.inf  # rounded otherwise than the worker's
        at = int(gaps.argmin())
        token = int(best.indices[at, 1])
        logprob = float(torch.log_softmax(scaled[at], -1)[token])
    return replace(
        item,
        token_ids=[*item.token_ids[: reply.start + at], token],
        replies=[replace(reply, end=reply.start + at + 1)],
        logprobs=[*item.logprobs[:at], logprob],
        versions=list(item.versions[: at + 1]),
        proof=item.proof[: (at + 1) * TOKEN_BYTES],
    )
