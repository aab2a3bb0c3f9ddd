"""Honest branches of a real engine, and forged ones, for the tests of auditors."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from support.engine_cases import FP32, SHAPE, blended, make_qwen3
from support.protocol_cases import MANIFEST, PROOFS, played_otherwise
from torch import Tensor

from primerl.node.inference.boundary_states import pack_projected, project
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.model import LanguageModel
from primerl.node.inference.sampler import Narrowed, draw
from primerl.node.models.routers import route_shape
from primerl.node.models.support import pack_support
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.pipeline.activations import rounded
from primerl.node.verification.auditor import (
    AuditItem,
    BoundaryClaim,
    Measured,
    SampledSpan,
    Unreadable,
    evidence,
    other_versions,
)
from primerl.node.verification.bounds import BUILT_IN, bands
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judgement import Judgement, judge
from primerl.node.weights.state import State, digests, state_digest
from primerl.protocol.manifests import RunManifest
from primerl.protocol.pipelines import Encoding
from primerl.protocol.rollouts import Evidence, join_support
from primerl.scripts.bench.calibrate_cheats import stated

TEMPERATURE = 0.8
LENGTH = 96
OWN, NEAR, FAR = 5, 6, 9
"""Versions: the one that honest branches claim, one that differs a little, and another model."""


@dataclass(frozen=True)
class Case:
    """A model, its policy versions and honest branches of version OWN."""

    run: RunManifest
    model_dir: Path
    states: dict[int, State]
    honest: list[AuditItem]

    @cached_property
    def item(self) -> AuditItem:
        """Return item `number`, of one reply."""
        return self.honest[0]

    def forged(self, item: AuditItem, version: int = OWN) -> AuditItem:
        """Replace logprobs and proof of `item` by those of a prefill of its tokens."""
        return self.claimed(item, *self.prefill(item, version))

    def stated(self, item: AuditItem, top_k: int = 0, top_p: float = 1.0) -> AuditItem:
        """Replace the supports of `item` by those that these limits leave, and its logprobs accordingly."""
        places = [place for reply in item.replies for place in range(reply.start, reply.end)]
        tokens = [item.token_ids[place] for place in places]
        drawn, rows = torch.tensor(tokens), torch.arange(len(tokens))
        led, _ = self.prefill(item)
        limits = torch.full_like(rows, top_k), torch.full((len(rows),), top_p)
        with torch.inference_mode():
            logits = _network(self, self.states[OWN]).logits(led).float()
            heat = torch.full((len(rows),), item.temperature)
            left = draw(logits, heat, rows, rows, Narrowed(rows, *limits)).support
            support, logprobs = stated(logits / item.temperature, drawn, left)
        return replace(
            item, support=pack_support(support.numpy(), tokens), logprobs=logprobs.tolist()
        )

    def prefill(self, item: AuditItem, version: int = OWN) -> tuple[Tensor, Tensor]:
        """Return hidden states [S, d] and logprobs [S] of the sampled tokens."""
        network = _network(self, self.states[version])
        places = [place for reply in item.replies for place in range(reply.start, reply.end)]
        with torch.inference_mode():
            hidden = network.hidden(torch.tensor([item.token_ids]))[0]
            led = hidden[torch.tensor(places) - 1]
            logprobs = torch.log_softmax(network.logits(led).float() / TEMPERATURE, -1)
            tokens = torch.tensor([item.token_ids[place] for place in places])
            return led, logprobs.gather(1, tokens[:, None])[:, 0]

    def claimed(self, item: AuditItem, hidden: Tensor, logprobs: Tensor) -> AuditItem:
        """Replace logprobs [S] of `item`, and its proof by that of these hidden states [S, d]."""
        counts = [reply.end - reply.start for reply in item.replies]
        make = Projection().make
        proof = b"".join(make(part.float().numpy()) for part in hidden.split(counts))
        return replace(item, logprobs=logprobs.tolist(), proof=proof)


def make_run(dtype: str) -> RunManifest:
    """Make a run of this numerics class."""
    run = structs.replace(MANIFEST, proofs=structs.replace(PROOFS, dtype=dtype))
    return played_otherwise(run, temperature=TEMPERATURE, max_tokens=LENGTH)


async def make_case(
    directory: Path,
    dtype: str,
    make: Callable[[Path, int], State] = make_qwen3,
) -> Case:
    """Two replies with a question between them in every fourth branch."""
    torch.set_num_threads(1)
    run = make_run(dtype)
    first = make(directory / "own", 0)
    run = structs.replace(run, routes=route_shape(directory / "own"))
    far = make(directory / "far", 1)
    near, _ = blended(first, far, 0.002)
    states = {OWN: first, NEAR: near, FAR: far}
    honest = await generate(directory / "own", first, dtype)
    return Case(run, directory / "own", states, honest)


async def generate(
    model_dir: Path,
    state: State,
    dtype: str,
    temperature: float = TEMPERATURE,
    version: int = OWN,
    quantization: str = "none",
    top_k: int = 0,
    top_p: float = 1.0,
    supported: bool = False,
) -> list[AuditItem]:
    """Generate branches of all lengths with `state`, in one batch, that claim `version`.

    With `supported` they state the supports of their tokens, and are leased with these limits.
    """
    options = {"dtype": dtype, "device": "cpu", "enable_return_routed_experts": True}
    options["quantization"] = quantization
    asked = [
        GenerateRequest(
            prompt=tuple(b"tell me more about %d" % number),
            max_tokens=LENGTH - 7 * number,
            temperature=temperature,
            seed=1000 + number,
            stop_token_ids=(),
            top_k=top_k,
            top_p=top_p,
            supported=supported,
        )
        for number in range(12)
    ]
    engine = HfEngine(FP32.model_copy(update=options))
    await engine.start(model_dir, fingerprint="projection")
    try:
        await engine.load(version, state)
        items = await asyncio.gather(*(_play(engine, request, version) for request in asked))
    finally:
        await engine.close()
    leased = {"top_k": top_k, "top_p": top_p} if supported else {}
    return [replace(one, **leased) for one in items]


async def _play(engine: HfEngine, request: GenerateRequest, version: int) -> AuditItem:
    number = request.seed - 1000
    item = item_of(request, await engine.generate(request), version)
    if number % 4 != 3:
        return item
    question = (*item.token_ids, *b" and then?")
    request = replace(request, prompt=question, max_tokens=9, seed=2000 + number)
    return joined(item, item_of(request, await engine.generate(request), version))


def item_of(request: GenerateRequest, completion: Completion, version: int) -> AuditItem:
    """Make the branch of one reply."""
    start, count = len(request.prompt), len(completion.token_ids)
    return AuditItem(
        token_ids=[*request.prompt, *completion.token_ids],
        replies=[SampledSpan(start, start + count, request.seed)],
        logprobs=completion.logprobs,
        versions=[version] * count,
        proof=completion.proof,
        routes=completion.routes,
        support=completion.support,
        temperature=TEMPERATURE,
    )


def joined(first: AuditItem, second: AuditItem) -> AuditItem:
    """Make a branch of two replies; `second` continues where `first` ends."""
    return AuditItem(
        token_ids=second.token_ids,
        replies=[*first.replies, *second.replies],
        logprobs=[*first.logprobs, *second.logprobs],
        versions=[*first.versions, *second.versions],
        proof=first.proof + second.proof,
        routes=first.routes + second.routes,
        support=join_support([(one.support, len(one.versions)) for one in (first, second)]),
        temperature=TEMPERATURE,
    )


def with_token(item: AuditItem, place: int, token: int) -> AuditItem:
    """Replace the token of `item` at index `place`."""
    tokens = list(item.token_ids)
    tokens[place] = token
    return replace(item, token_ids=tokens)


def compared(items: Sequence[AuditItem], others: Mapping[int, Sequence[int]]) -> list[AuditItem]:
    """Items that are compared with `others`: claimed version -> versions."""
    return [replace(one, others=other_versions(one.claimed, others)) for one in items]


def measured(answers: Sequence[Measured | Unreadable]) -> list[Measured]:
    """Return the measurements; fail if one is missing."""
    found = [one for one in answers if isinstance(one, Measured)]
    assert len(found) == len(answers), answers
    return found


DEEP = SHAPE | {"num_hidden_layers": 4}
CUTS = (1, 3)
"""Three stages of a deep model: one layer, two, and one."""


def make_deep(directory: Path, seed: int) -> State:
    """Make a model of four layers."""
    return make_qwen3(directory, seed, DEEP)


def coarse(state: State, bits: int) -> State:
    """Quantize the layers' weight matrices to `bits` bits, with a scale per row."""
    most = 2 ** (bits - 1) - 1
    found = dict(state)
    for name, tensor in state.items():
        if len(tensor.shape) != 2 or "layers." not in name:
            continue
        weights = to_torch(tensor).float()
        scale = weights.abs().amax(1, keepdim=True) / most
        found[name] = from_torch(((weights / scale).round() * scale).to(torch.bfloat16))
    return found


class Sent:
    """Layer hooks that round states at stage boundaries, and record their fingerprints."""

    def __init__(self, cuts: Sequence[int], encoding: Encoding, led: torch.Tensor) -> None:
        self.layers = frozenset(cuts)
        self.led = led
        self.claims: list[BoundaryClaim] = []
        self._encoding: Encoding = encoding

    def take(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        x = rounded(x, self._encoding)
        self.claims.append(
            BoundaryClaim(layer, self._encoding, pack_projected(project(x[self.led])))
        )
        return x


def _mixed(states: Sequence[State], cuts: Sequence[int]) -> State:
    """Join the layers of each stage's state to one state."""
    found = dict(states[0])
    for name in found:
        if name.startswith("model.layers."):
            found[name] = states[sum(int(name.split(".")[2]) >= cut for cut in cuts)][name]
        elif name != "model.embed_tokens.weight":
            found[name] = states[-1][name]
    return found


_networks: dict[tuple[Path, str, bytes], LanguageModel] = {}
"""Networks, by directory, type and digest of the state: building takes longer than asking."""


def _network(case: Case, state: State) -> LanguageModel:
    dtype = case.run.proofs.dtype
    key = case.model_dir, dtype, state_digest(digests(state))
    if key not in _networks:
        _networks[key] = LanguageModel.build(case.model_dir, state, dtype=dtype, device="cpu")
    return _networks[key]


def staged(
    case: Case,
    item: AuditItem,
    states: Sequence[State],
    cuts: Sequence[int] = CUTS,
    encoding: Encoding = "raw",
) -> AuditItem:
    """Make `item` as stages with these weights would report it, with the same tokens."""
    places = [place for reply in item.replies for place in range(reply.start, reply.end)]
    network = _network(case, _mixed(states, cuts))
    sent = Sent(cuts, encoding, torch.tensor(places) - 1)
    tokens = torch.tensor(item.token_ids)
    with torch.inference_mode():
        hidden = network.packed(tokens, [len(tokens)], sent)[sent.led]
        logprobs = torch.log_softmax(network.logits(hidden).float() / TEMPERATURE, -1)
    boundaries = sent.claims
    drawn = torch.tensor([item.token_ids[place] for place in places])
    counts = [reply.end - reply.start for reply in item.replies]
    make = Projection().make
    return replace(
        item,
        logprobs=logprobs.gather(1, drawn[:, None])[:, 0].tolist(),
        proof=b"".join(make(part.float().numpy()) for part in hidden.split(counts)),
        boundaries=boundaries,
    )


def garbage(item: AuditItem, number: int) -> AuditItem:
    """Replace the fingerprints at boundary `number` by random bytes."""
    boundaries = list(item.boundaries)
    size = len(boundaries[number].proof)
    noise = np.random.default_rng(0).bytes(size)
    boundaries[number] = replace(boundaries[number], proof=noise)
    return replace(item, boundaries=boundaries)


def seen(one: Measured) -> Evidence:
    return evidence(CheckedRollout(0, 0, [], 0.0), [one])


def judged(case: Case, honest: Sequence[Measured], one: Measured) -> Judgement:
    """By the bounds that are built in for float32; in bfloat16 by such as a run makes of `honest` rollouts."""
    contract = case.run.proofs
    if contract.dtype == "float32":
        reject, suspect = BUILT_IN["float32"]
        return judge(seen(one), structs.replace(contract, reject=reject, suspect=suspect))
    return judge(seen(one), bands([seen(other) for other in honest] * 2).contract(contract))
