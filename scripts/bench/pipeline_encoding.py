"""Measure how encodings of hidden states between pipeline stages change the sampled policy.

    python scripts/bench/pipeline_encoding.py [--model tiny] [--layers 8] [--stages 2,4] [--dtype float32]
        [--device cpu] [--texts 64] [--massive 0,20] [--quick] [--json FILE]

A model is trained a little (trained_model.py) and reads texts of its language twice: as a whole, and with the
states between stages rounded as on the wire. For every token: the mismatch KL(sampled || whole) over the whole
vocabulary, and the change of the log-probability of the text's own token. --massive makes one channel of the
residual stream larger than the others by that factor, as in large trained models.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from primerl.node.inference.model import LanguageModel, pick_device
from primerl.node.pipeline.activations import pack, rounded
from primerl.protocol.pipelines import Encoding
from primerl.scripts.bench.report import conclude, make_parser
from primerl.scripts.bench.trained_model import recipe, trained_model, with_massive_channel

LENGTH = 96
TEXTS_AT_ONCE = 8
ENCODINGS: tuple[Encoding, ...] = ("raw", "fp8", "int8")


class Rounding:
    """Rounds states as the next stage would receive them."""

    def __init__(self, layers: tuple[int, ...], encoding: Encoding) -> None:
        self.layers = frozenset(layers)
        self._encoding: Encoding = encoding
        self.bytes_a_token = 0.0

    def take(self, layer: int, x: Tensor) -> Tensor:
        """See LayerHooks."""
        if not self.bytes_a_token:
            arrays = pack(x, self._encoding)
            self.bytes_a_token = sum(one.nbytes for one in arrays) / len(x)
        return rounded(x, self._encoding)


def logprobs(network: LanguageModel, tokens: Tensor, taps: Rounding | None) -> Tensor:
    """Return logprobs [T, V] of texts [N, LENGTH], concatenated."""
    rows, columns = tokens.shape
    hidden = network.packed(tokens.flatten(), [columns] * rows, taps)
    return torch.log_softmax(network.logits(hidden).float(), -1)


def measure(
    network: LanguageModel, texts: Tensor, cuts: tuple[int, ...], encoding: Encoding
) -> dict[str, float]:
    """Return means over all tokens, and 99 % quantiles."""
    taps = Rounding(cuts, encoding)
    divergence: list[Tensor] = []
    moved: list[Tensor] = []
    with torch.inference_mode():
        for some in texts.split(TEXTS_AT_ONCE):
            whole, sampled = logprobs(network, some, None), logprobs(network, some, taps)
            divergence.append((sampled.exp() * (sampled - whole)).sum(-1))
            own = some.roll(-1, 1).flatten()[:, None]
            moved.append((sampled - whole).gather(1, own)[:, 0].abs())
    kl, moves = torch.cat(divergence).double(), torch.cat(moved).double()
    return {
        "bytes_a_token": taps.bytes_a_token,
        "mismatch_kl": kl.mean().item(),
        "mismatch_kl_p99": kl.quantile(0.99).item(),
        "logprob_moves": moves.mean().item(),
        "logprob_moves_p99": moves.quantile(0.99).item(),
    }


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "few texts, a model that is hardly trained")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--massive", default="0,20")
    asked = parser.parse_args()
    device = pick_device(asked.device)
    steps = None
    if asked.quick:
        asked.texts, steps = 8, 10
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = recipe(asked.model, steps=steps, num_hidden_layers=asked.layers)
    made = trained_model(model, device=device.type)
    rows = made.corpus.rows(99, asked.texts * LENGTH, LENGTH)[: asked.texts]
    texts = torch.from_numpy(rows).to(device)
    found: list[dict[str, Any]] = []
    print(f"{asked.model}, {asked.layers} layers, {asked.dtype}, {texts.numel()} tokens")
    print(
        "massive stages encoding  bytes/token/hop   mismatch KL        p99  |dlogprob|        p99"
    )
    for massive in map(float, asked.massive.split(",")):
        state = with_massive_channel(made.state, massive)
        network = LanguageModel.build(made.directory, state, dtype=asked.dtype, device=asked.device)
        for stages in map(int, asked.stages.split(",")):
            cuts = tuple(asked.layers * rank // stages for rank in range(1, stages))
            for encoding in ENCODINGS:
                one = measure(network, texts, cuts, encoding)
                found.append({"massive": massive, "stages": stages, "encoding": encoding, **one})
                print(
                    f"{massive:7g} {stages:6} {encoding:8} {one['bytes_a_token']:16.0f} "
                    f"{one['mismatch_kl']:13.2e} {one['mismatch_kl_p99']:10.2e} "
                    f"{one['logprob_moves']:11.2e} {one['logprob_moves_p99']:10.2e}"
                )
    return conclude(found, [], asked.json)


if __name__ == "__main__":
    sys.exit(main())
