"""Cheats for a calibration: other weights, other sampling, and their separation by bounds.

Cheats are as good as possible: forged tokens come with the logprobs and the proof that the right model gives
them, so that only the seeded sampling can tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from primerl.node.errors import EngineError
from primerl.node.inference.fingerprint import Projection
from primerl.node.models.support import pack_support
from primerl.node.verification.auditor import AuditItem, AuditTarget, SampledSpan
from primerl.node.verification.bounds import SUSPECT, at_least
from primerl.node.verification.judgement import judge
from primerl.node.weights.state import State, Tensor, floats
from primerl.protocol.manifests import ProofContract, RunManifest
from primerl.protocol.rollouts import Evidence

if TYPE_CHECKING:
    from torch import Tensor as TorchTensor

    from primerl.node.inference.model import LanguageModel

CLAIMED = 0
"""Policy version that every forged rollout claims."""
ROWS = 32
"""Rollouts that are forged at once."""
TOP_K = 20
"""Tokens that a top-k cheat draws from."""
COOLED = 0.9
"""Factor on the temperature of a cheat that samples for better rewards."""

UNTOUCHED = ("embed", "lm_head")
"""Parts of the names of matrices that quantised models leave unquantised."""
INT4_GROUP = 128
"""Weights that share a scale in the usual int4 formats (GPTQ, AWQ)."""

BATCH = 16
"""Audited rollouts within which a cheat has to be caught."""
WANTED = 0.99
"""Least probability of catching a cheat within BATCH rollouts."""
COINCIDENCE = 1e-5
"""Probability among honest rollouts below which a number of suspects counts as a rejection."""


# -- other weights ---------------------------------------------------------------------------------


def int8(state: State) -> State:
    """Round to weight-only int8, one scale per output channel."""
    return _quantised(state, 8, 0)


def int4(state: State) -> State:
    """Round to weight-only int4, one scale per INT4_GROUP inputs."""
    return _quantised(state, 4, INT4_GROUP)


VARIANTS: dict[str, Callable[[State], State]] = {"int8 weights": int8, "int4 weights": int4}


def nudged(state: State, step: float, seed: int) -> State:
    """Make the next version of `state`: move every BF16 weight by `step`, up or down at random.

    Adam moves weights like this: nearly every element takes a step of about the learning rate. Rounding is
    stochastic: the trainer keeps weights in fp32, anywhere within the rounding interval of their bf16 value,
    and a step that is small beside it changes the bf16 value of a few of them.
    """
    chance = np.random.default_rng(seed)

    def moved(tensor: Tensor) -> Tensor:
        signs = chance.integers(0, 2, tensor.data.size, np.int8) * np.float32(2) - 1
        bits = (floats(tensor) + signs * np.float32(step)).view(np.uint32)
        bits = bits + chance.integers(0, 1 << 16, bits.size, np.uint32)
        return Tensor("BF16", tensor.shape, (bits >> 16).astype("<u2"))

    return {
        name: moved(tensor) if tensor.dtype == "BF16" else tensor for name, tensor in state.items()
    }


def _quantised(state: State, bits: int, group: int) -> State:
    """Round the BF16 matrices to `bits` bits and back, except embeddings and head.

    Symmetric, to nearest, one scale for `group` inputs of an output (for all of them if 0, or if the width is
    not a multiple): the weights of weight-only int8 and int4 inference.
    """
    return {
        name: _rounded(tensor, bits, group)
        if len(tensor.shape) >= 2
        and tensor.dtype == "BF16"
        and not any(part in name for part in UNTOUCHED)
        else tensor
        for name, tensor in state.items()
    }


def _rounded(tensor: Tensor, bits: int, group: int) -> Tensor:
    width = tensor.shape[-1]
    size = group if group and width % group == 0 else width
    blocks = floats(tensor).reshape(-1, size)
    largest = 2 ** (bits - 1) - 1
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-30) / largest
    rounded = np.rint(blocks / scales).clip(-largest, largest) * scales
    found = np.ascontiguousarray(rounded, np.float32).reshape(-1).view(np.uint32)
    to_even = ((found >> 16) & 1) + 0x7FFF
    return Tensor("BF16", tensor.shape, ((found + to_even) >> 16).astype("<u2"))


# -- other sampling --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForgedReply:
    """Reply to forge: prompt, the lease's seed and sampling, and forced first tokens."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    forced: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0


Distort = Callable[["TorchTensor"], "TorchTensor"]
"""Function that changes the logits [B, V] before the run's own sampling."""


def honestly(logits: "TorchTensor") -> "TorchTensor":
    """Return the logits unchanged, to sample as the run asks."""
    return logits


def cooler(logits: "TorchTensor") -> "TorchTensor":
    """Lower the temperature, for better rewards."""
    return logits.float() / COOLED


def top_k(logits: "TorchTensor") -> "TorchTensor":
    """Keep the most probable tokens only."""
    top = logits.topk(min(TOP_K, logits.shape[-1]), -1)
    kept = logits.new_full(logits.shape, -float("inf"))
    return kept.scatter_(1, top.indices, top.values)


def first_replies(
    played: Sequence[AuditTarget], count: int
) -> list[tuple[ForgedReply, tuple[int, ...]]]:
    """List (prompt and seed, honest reply) of the first replies of `count` rollouts."""
    items = [one.items[0] for one in played[:count]]
    return [
        (
            ForgedReply(
                tuple(item.token_ids[: item.replies[0].start]),
                item.replies[0].seed,
                item.temperature,
                top_k=item.top_k,
                top_p=item.top_p,
            ),
            first_reply(item),
        )
        for item in items
    ]


def first_reply(item: AuditItem) -> tuple[int, ...]:
    """Return the tokens of an item's first reply."""
    return tuple(item.token_ids[item.replies[0].start : item.replies[0].end])


def forgeries(
    honest: Sequence[tuple[ForgedReply, tuple[int, ...]]], stops: Sequence[int]
) -> dict[str, tuple[list[ForgedReply], Distort]]:
    """Plan the cheats with the right model: name -> (replies to forge, change of logits)."""
    lines = [line for line, _ in honest]
    half = len(honest) // 2
    others = [reply for _, reply in [*honest[half:], *honest[:half]]]
    said = sorted({token for _, reply in honest for token in reply} - set(stops))
    return {
        f"temperature x {COOLED}": (lines, cooler),
        f"top-k {TOP_K}": (lines, top_k),
        "foreign text": (_forced(lines, others), honestly),
        "one token edited": (
            _forced(lines, [_edited(reply, said) for _, reply in honest]),
            honestly,
        ),
    }


def _forced(lines: Sequence[ForgedReply], replies: Sequence[tuple[int, ...]]) -> list[ForgedReply]:
    return [replace(line, forced=reply) for line, reply in zip(lines, replies, strict=True)]


def _edited(reply: tuple[int, ...], said: Sequence[int]) -> tuple[int, ...]:
    """Cut a reply in the middle; end it with another token from an honest reply."""
    middle = (len(reply) - 1) // 2
    others = [token for token in said if token != reply[middle]] or [0]
    return (*reply[:middle], others[sum(reply) % len(others)])


def forge(
    network: "LanguageModel",
    lines: Sequence[ForgedReply],
    run: RunManifest,
    distort: Distort = honestly,
) -> list[AuditItem]:
    """Generate rollouts of one reply, with `network`'s logprobs and proofs of their tokens.

    All claim policy CLAIMED and the run's sampling, with any `network` and `distort`.
    """
    import torch

    found: list[AuditItem] = []
    with torch.inference_mode():
        for start in range(0, len(lines), ROWS):
            found += _forge(network, lines[start : start + ROWS], run, distort)
    return found


def _forge(
    network: "LanguageModel", lines: Sequence[ForgedReply], run: RunManifest, distort: Distort
) -> list[AuditItem]:
    import torch

    from primerl.node.inference.sampler import Limits, draw

    device, most = network.device, max(one.sampling.max_tokens for one in run.environments)
    lengths = torch.tensor([len(line.prompt) for line in lines], device=device)
    width = int(lengths.max())
    padded = [[*[0] * (width - len(line.prompt)), *line.prompt] for line in lines]
    columns = torch.arange(width, device=device)
    session, output = network.prefill(
        torch.tensor(padded, device=device), columns >= width - lengths[:, None]
    )
    seeds = torch.tensor([line.seed for line in lines], device=device)
    temperature = torch.tensor([line.temperature for line in lines], device=device)
    limits = Limits(
        np.array([line.top_k for line in lines], np.int64),
        np.array([line.top_p for line in lines], np.float32),
    ).narrowed(slice(None), device)
    forced = torch.full((most, len(lines)), -1, device=device)
    for row, line in enumerate(lines):
        told = line.forced[:most]
        forced[: len(told), row] = torch.tensor(told, dtype=torch.long, device=device)
    stops = torch.tensor(run.model.stop_token_ids, dtype=torch.long, device=device)
    counts = torch.zeros_like(lengths)
    alive = torch.ones_like(lengths, dtype=torch.bool)
    steps: list[tuple[TorchTensor, TorchTensor, TorchTensor, TorchTensor]] = []
    for step in range(most):
        if output.hidden is None:
            raise EngineError(
                "this architecture does not show its hidden states: choose another model"
            )
        noise = temperature, seeds, lengths + step
        drawn = draw(distort(output.logits), *noise, limits).tokens
        tokens = torch.where(forced[step] >= 0, forced[step], drawn)
        scaled = output.logits.float() / temperature[:, None]
        right = None if limits is None else draw(output.logits, *noise, limits).support
        support, logprobs = stated(scaled, tokens, right)
        steps.append((tokens, logprobs, output.hidden.float(), support))
        counts += alive
        alive &= ~torch.isin(tokens, stops) & (lengths + step + 1 < run.limits.max_model_len)
        if not alive.any():
            break
        output = session.step(tokens)
    columns_of = [torch.stack(column, 1).cpu() for column in zip(*steps, strict=True)]
    rows = zip(lines, counts.tolist(), *columns_of, strict=True)
    return [_item(line, *(part[:count] for part in parts)) for line, count, *parts in rows]


def stated(
    scaled: "TorchTensor", tokens: "TorchTensor", support: "TorchTensor | None"
) -> "tuple[TorchTensor, TorchTensor]":
    """Return supports [N, W] int32 that have the `tokens` [N], and the logprobs of these over them.

    `scaled` [N, V] are logits / temperature, `support` is SampledTokens.support; None: of draws from all.
    """
    import torch

    if support is None:
        support = torch.full((len(tokens), 1), -1, dtype=torch.int32, device=tokens.device)
    missing = ((support >= 0).any(1) & (support != tokens[:, None]).all(1)).nonzero()[:, 0]
    last = (support[missing] >= 0).sum(1).clamp_max(support.shape[1] - 1)
    support = support.index_put((missing, last), tokens[missing].int())
    over = scaled.gather(1, support.clamp_min(0).long()).masked_fill(support < 0, -torch.inf)
    sums = over.logsumexp(1).where(support[:, 0] >= 0, scaled.logsumexp(1))
    return support, scaled.gather(1, tokens[:, None])[:, 0] - sums


def _item(
    line: ForgedReply,
    tokens: "TorchTensor",
    logprobs: "TorchTensor",
    hidden: "TorchTensor",
    support: "TorchTensor",
) -> AuditItem:
    limited = line.temperature > 0 and (line.top_k > 0 or line.top_p < 1)
    start, end = len(line.prompt), len(line.prompt) + len(tokens)
    return AuditItem(
        token_ids=[*line.prompt, *tokens.tolist()],
        replies=[SampledSpan(start, end, line.seed)],
        logprobs=logprobs.tolist(),
        versions=[CLAIMED] * len(tokens),
        temperature=line.temperature,
        top_k=line.top_k,
        top_p=line.top_p,
        support=pack_support(support.numpy(), tokens.tolist()) if limited else b"",
        proof=Projection().make(hidden.numpy()),
    )


def device_name(device: str) -> str:
    """Return the product name of a GPU, else the type of the device."""
    import torch

    from primerl.node.inference.model import pick_device

    found = pick_device(device)
    return torch.cuda.get_device_name(found) if found.type == "cuda" else found.type


# -- separation of cheats from honest work ---------------------------------------------------------


@dataclass(frozen=True)
class Separated:
    """Judgements of a cheat's rollouts."""

    name: str
    rollouts: int
    rejected: int
    suspected: int
    """Suspected rollouts, the rejected ones included."""
    batches: float
    """Share of batches of BATCH rollouts that are caught."""
    required: bool
    """Whether bounds have to catch this cheat."""

    @property
    def separates(self) -> bool:
        """Whether the cheat is caught with a probability of at least WANTED."""
        return self.batches >= WANTED


def separate(
    name: str, found: Sequence[Evidence], contract: ProofContract, *, required: bool = True
) -> Separated:
    """Judge the rollouts of one cheat."""
    judged = [judge(one, contract) for one in found]
    rejected = sum(one.reason is not None for one in judged)
    suspected = sum(one.suspect for one in judged)
    share = batches_caught(len(found), rejected, suspected)
    return Separated(name, len(found), rejected, suspected, share, required)


def batches_caught(rollouts: int, rejected: int, suspected: int, size: int = BATCH) -> float:
    """Compute the share of batches with a rejection, or more suspects than honest batches have.

    A batch is `size` of the `rollouts`, drawn with replacement; `suspected` includes the `rejected`.
    """
    if not rollouts:
        return 0.0
    odd, clean = (suspected - rejected) / rollouts, 1 - suspected / rollouts
    few = range(most_suspects(size) + 1)
    return 1 - sum(comb(size, count) * odd**count * clean ** (size - count) for count in few)


def most_suspects(size: int, share: float = SUSPECT, coincidence: float = COINCIDENCE) -> int:
    """Find the number of suspects that `size` honest rollouts exceed only by `coincidence`.

    Each is suspect with probability `share`; `coincidence` is the largest probability of exceeding the number.
    """
    limit = 0
    while at_least(limit + 1, size, share) > coincidence:
        limit += 1
    return limit
