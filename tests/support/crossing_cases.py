"""Branches as stages of a pipeline would have made them, one of them perhaps with other weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from support.auditor_cases import TEMPERATURE, Case
from support.engine_cases import SHAPE, make_qwen3

from primerl.node.inference.boundary_states import crossing
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.model import build_network
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.pipeline.activations import rounded
from primerl.node.verification.auditor import AuditItem, BoundaryClaim
from primerl.node.weights.state import State
from primerl.protocol.pipelines import Encoding

DEEP = SHAPE.model_copy(update={"num_hidden_layers": 4})
CUTS = (1, 3)
"""Three stages of a deep model: one layer, two, and one."""


def make_deep(directory: Path, seed: int) -> State:
    """A model of four layers."""
    return make_qwen3(directory, seed, DEEP)


def coarse(state: State, bits: int) -> State:
    """The same with the weights of its layers' matrices in so many bits, scaled row by row."""
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
    """Layer hooks: round the states at the cuts as stages send them, and note their fingerprints."""

    def __init__(self, cuts: Sequence[int], encoding: Encoding, led: torch.Tensor) -> None:
        self.layers = frozenset(cuts)
        self.led = led
        self.claims: list[BoundaryClaim] = []
        self._encoding: Encoding = encoding

    def take(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        x = rounded(x, self._encoding)
        self.claims.append(BoundaryClaim(layer, self._encoding, crossing(x[self.led])))
        return x


def _mixed(states: Sequence[State], cuts: Sequence[int]) -> State:
    """A state with the layers of each stage's own."""
    found = dict(states[0])
    for name in found:
        if name.startswith("model.layers."):
            found[name] = states[sum(int(name.split(".")[2]) >= cut for cut in cuts)][name]
        elif name != "model.embed_tokens.weight":
            found[name] = states[-1][name]
    return found


def staged(
    case: Case,
    item: AuditItem,
    states: Sequence[State],
    cuts: Sequence[int] = CUTS,
    encoding: Encoding = "raw",
) -> AuditItem:
    """`item` as stages with these weights, one state each, would have told of it; its tokens stay."""
    places = [place for reply in item.replies for place in range(reply.start, reply.end)]
    network = build_network(
        case.model_dir, _mixed(states, cuts), dtype=case.run.proofs.dtype, device="cpu"
    )
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
    """`item` with bytes at boundary `number` that are no fingerprints."""
    boundaries = list(item.boundaries)
    size = len(boundaries[number].proof)
    noise = np.random.default_rng(0).bytes(size)
    boundaries[number] = replace(boundaries[number], proof=noise)
    return replace(item, boundaries=boundaries)
