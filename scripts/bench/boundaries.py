"""Measure honest distances at pipeline boundaries, and the attribution of cheats to stages.

    python scripts/bench/boundaries.py [--model tiny] [--layers 8] [--stages 4] [--dtype bfloat16]
        [--rollouts 192] [--batch 32] [--device cpu] [--massive 0] [--vllm [--bits 4]] [--quick] [--json FILE]

A model is trained a little (trained_model.py) and decoded token by token as the stages of a pipeline compute
it; one stage may hold wrong weights. Then each rollout is measured by a prefill and attributed to stages by the
rules of a run. `built in` are the bounds of verification/bounds.py; `calibrated` are 1.2 times the largest
distance of half of the honest rollouts to reject, and their 99 % quantile to suspect. --massive makes one
channel of the residual stream larger than the others by that factor, as in trained models.

--vllm does the same with three stages of vLLM in separate processes, of 2, 3 and 3 layers: first all are
honest, then one after the other holds its matrices in --bits bits. Bounds are the largest honest distance to
suspect, and 1.2 times that to reject.
"""

import argparse
import asyncio
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from primerl.node.inference.boundary_states import pack_projected, project
from primerl.node.inference.decoding import decode
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import signs
from primerl.node.inference.model import LanguageModel, pick_device
from primerl.node.models import huggingface
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.verification.auditor import (
    AuditItem,
    AuditTerms,
    BoundaryClaim,
    Measured,
    SampledSpan,
)
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.judgement import StageAttribution, blame, judge
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State
from primerl.protocol.manifests import ProofContract
from primerl.protocol.rollouts import Evidence
from primerl.scripts.bench.report import conclude, make_parser
from primerl.scripts.bench.trained_model import (
    Corpus,
    Trained,
    recipe,
    trained_model,
    with_massive_channel,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # for --vllm

PROMPT, REPLY = 24, 64
TEMPERATURE = 1.0
OWN = 1
ENDS = [2, 5, 8]
"""End layers of the stages of vLLM."""


@dataclass(frozen=True)
class Setting:
    """Model and settings of a measurement."""

    model_dir: Path
    state: State
    corpus: Corpus
    cuts: tuple[int, ...]
    dtype: str
    device: str
    rollouts: int
    batch: int


class Watch:
    """Records the projected states of each forward pass."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = frozenset(layers)
        self.passes: list[dict[int, Tensor]] = []

    def take(self, layer: int, x: Tensor) -> None:
        """Project the states [T, d] after `layer` layers."""
        if layer == min(self.layers):
            self.passes.append({})
        self.passes[-1][layer] = project(x)


class Watched(LanguageModel):
    """The whole model of a pipeline's stages, observed at the boundaries."""

    watch: Watch

    def __init__(self, model: Any, state: State, cuts: Sequence[int]) -> None:
        super().__init__(model, state)
        blocks = huggingface.layers_of(model)
        for cut in cuts:
            blocks[cut - 1].register_forward_hook(functools.partial(self._see, cut))

    def _see(self, cut: int, _: Any, __: Any, output: Any) -> None:
        self.watch.take(cut, output.flatten(0, 1))


def coarse(state: State, layers: range, bits: int) -> State:
    """Return `state` with the matrices of these layers quantised to `bits` bits, row by row."""
    most = 2 ** (bits - 1) - 1
    names = tuple(f"model.layers.{layer}." for layer in layers)
    found = dict(state)
    for name, tensor in state.items():
        if name.startswith(names) and len(tensor.shape) == 2:
            weights = to_torch(tensor).float()
            scale = weights.abs().amax(1, keepdim=True) / most
            found[name] = from_torch(((weights / scale).round() * scale).to(torch.bfloat16))
    return found


def shifted(state: State, layers: range, size: float) -> State:
    """Return `state` with random noise in the matrices of these layers: another version.

    The noise has `size` times their standard deviation.
    """
    generator = torch.Generator().manual_seed(1)
    names = tuple(f"model.layers.{layer}." for layer in layers)
    found = dict(state)
    for name, tensor in state.items():
        if name.startswith(names) and len(tensor.shape) == 2:
            weights = to_torch(tensor).float()
            noise = torch.randn(weights.shape, generator=generator) * weights.std() * size
            found[name] = from_torch((weights + noise).to(torch.bfloat16))
    return found


def requests(corpus: Corpus, count: int) -> list[GenerateRequest]:
    """Make the requests to the pipeline."""
    return [
        GenerateRequest(
            prompt=tuple(corpus.text([3, number], PROMPT)),
            max_tokens=REPLY,
            temperature=TEMPERATURE,
            seed=1000 + number,
            stop_token_ids=(),
        )
        for number in range(count)
    ]


def play(setting: Setting, state: State) -> list[AuditItem]:
    """Draw rollouts by stages that together hold `state`."""
    device = pick_device(setting.device)
    model = huggingface.model_from_state(
        setting.model_dir, state, dtype=setting.dtype, device=device
    )
    network = Watched(model, state, setting.cuts)
    todo = requests(setting.corpus, setting.rollouts)
    items: list[AuditItem] = []
    for start in range(0, len(todo), setting.batch):
        items += _play(network, todo[start : start + setting.batch], setting)
    return items


def _play(network: Watched, asked: Sequence[GenerateRequest], setting: Setting) -> list[AuditItem]:
    network.watch = watch = Watch(setting.cuts)
    with torch.inference_mode():
        replies = decode(
            network,
            asked,
            max_length=PROMPT + REPLY,
            cancelled=lambda: False,
            keep_hidden=True,
        )
    prefill, *steps = watch.passes
    found: list[AuditItem] = []
    for row, (request, reply) in enumerate(zip(asked, replies, strict=True)):
        boundaries: list[BoundaryClaim] = []
        for cut in setting.cuts:
            first = prefill[cut].unflatten(0, (len(asked), -1))[row, -1:]
            later = [step[cut][row : row + 1] for step in steps]
            boundaries.append(BoundaryClaim(cut, "raw", pack_projected(torch.cat([first, *later]))))
        assert reply.hidden is not None
        matrix = torch.from_numpy(signs(reply.hidden.shape[1])).to(reply.hidden.device)
        proof = pack_projected(reply.hidden @ matrix)
        tokens = [*request.prompt, *reply.token_ids]
        found.append(
            AuditItem(
                token_ids=tokens,
                replies=[SampledSpan(PROMPT, len(tokens), request.seed)],
                logprobs=reply.logprobs,
                versions=[OWN] * len(reply.token_ids),
                proof=proof,
                boundaries=boundaries,
                temperature=TEMPERATURE,
            )
        )
    return found


def measure(setting: Setting, items: Sequence[AuditItem]) -> list[Measured]:
    """Measure rollouts as the trainer does."""
    prefill = PrefillAudit(AuditTerms(str(setting.model_dir), setting.dtype, setting.device))
    found = prefill.measure(items, {OWN: setting.state})
    return [one for one in found if isinstance(one, Measured)]


def outputs(found: Sequence[Measured]) -> Any:
    """Return [rollouts, stages]: the distance of each stage's output."""
    return np.array([[*one.boundaries, one.fingerprint] for one in found])


def contract(
    dtype: str, reject: float | None = None, suspect: float | None = None
) -> ProofContract:
    """Return the built-in contract, or one with other bounds on distances."""
    bounds = list(BUILT_IN[dtype])
    if reject is not None and suspect is not None:
        bounds[0] = msgspec.structs.replace(bounds[0], fingerprint=reject)
        bounds[1] = msgspec.structs.replace(bounds[1], fingerprint=suspect)
    return ProofContract(
        fingerprint="projection",
        dtype=dtype,  # type: ignore[arg-type]
        reject=bounds[0],
        suspect=bounds[1],
        other_scale=0.0,
        audit_rate=1.0,
        false_bans=0.01,
        honest_rollouts=0,
        honest_tokens=0,
        source="bench",
    )


def laid(found: Sequence[Measured], bounds: ProofContract) -> list[StageAttribution]:
    """Attribute each rollout by distances alone; drawing and logprobs have other bounds."""
    blames: list[StageAttribution] = []
    for number, one in enumerate(found):
        evidence = Evidence(0, number, one.tokens, one.fingerprint, 0.0, 0.0, 0.0, 0.0, -1.0)
        blames.append(blame(evidence, judge(evidence, bounds), one.boundaries, bounds))
    return blames


def shares(blames: Sequence[StageAttribution], liar: int) -> dict[str, float]:
    """Return shares of rollouts by outcome and by attribution.

    The liar may be named alone, be among several stages, or be missed in favour of others.
    """
    count = len(blames)
    loud = [one for one in blames if one.outcome != "clean"]
    return {
        "rejected": sum(one.outcome == "rejected" for one in blames) / count,
        "suspect": sum(one.outcome == "suspect" for one in blames) / count,
        "named": sum(one.named == liar for one in loud) / count,
        "among": sum(liar in one.stages and len(one.stages) > 1 for one in loud) / count,
        "wrong": sum(liar not in one.stages for one in loud) / count,
    }


def cheats(setting: Setting, quick: bool) -> dict[str, Callable[[range], State]]:
    """Return, by name, functions from the cheating stage's layers to the whole state."""
    state = setting.state
    found: dict[str, Callable[[range], State]] = {
        "int4 weights": lambda layers: coarse(state, layers, 4),
        "int6 weights": lambda layers: coarse(state, layers, 6),
        "int8 weights": lambda layers: coarse(state, layers, 8),
        "another version": lambda layers: shifted(state, layers, 0.02),
    }
    return dict(list(found.items())[:1]) if quick else found


def report(setting: Setting, quick: bool) -> dict[str, Any]:
    """Measure and print everything."""
    honest = measure(setting, play(setting, setting.state))
    table = outputs(honest)
    half = table[: len(table) // 2]
    bounds = {
        "built in": contract(setting.dtype),
        "calibrated": contract(
            setting.dtype, float(half.max()) * 1.2, float(np.quantile(half.max(1), 0.99))
        ),
    }
    rows: dict[str, Any] = {
        "honest": {
            "median": np.median(table, 0).tolist(),
            "q99": np.quantile(table, 0.99, axis=0).tolist(),
            "largest": table.max(0).tolist(),
        }
    }
    for name, values in rows["honest"].items():
        print(f"honest {name:8}", " ".join(f"{value:8.5f}" for value in values))
    for name, one in bounds.items():
        print(f"{name}: reject {one.reject.fingerprint:.4f}, suspect {one.suspect.fingerprint:.4f}")
        late = honest[len(honest) // 2 :]
        rows[f"honest by {name}"] = shares(laid(late, one), -1)
        print("  honest", rows[f"honest by {name}"])
    edges = (0, *setting.cuts, huggingface.load_config(setting.model_dir).num_hidden_layers)
    for cheat, make in cheats(setting, quick).items():
        for liar in range(len(edges) - 1):
            found = measure(setting, play(setting, make(range(edges[liar], edges[liar + 1]))))
            middle = np.median(outputs(found), 0)
            print(f"{cheat:16} stage {liar}:", " ".join(f"{value:8.5f}" for value in middle))
            for name, one in bounds.items():
                row = shares(laid(found, one), liar)
                rows[f"{cheat}, stage {liar}, {name}"] = {**row, "median": middle.tolist()}
                print("   ", name, {key: round(value, 3) for key, value in row.items()})
    return rows


# -- stages of vLLM ---------------------------------------------------------------------------------


def item(request: GenerateRequest, said: Completion) -> AuditItem:
    """Make the audit item of a completion; all claim version 0."""
    start, count = len(request.prompt), len(said.token_ids)
    return AuditItem(
        token_ids=[*request.prompt, *said.token_ids],
        replies=[SampledSpan(start, start + count, request.seed)],
        logprobs=said.logprobs,
        versions=[0] * count,
        proof=said.proof,
        boundaries=[
            BoundaryClaim(end, "raw", part)
            for end, part in zip(ENDS, said.boundaries, strict=False)
        ],
        temperature=TEMPERATURE,
    )


async def report_vllm(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print everything, with stages of vLLM."""
    from support.vllm_pipeline_cases import pipeline, plan_of, shape_of

    made = trained(asked, ENDS[-1])
    shape = shape_of(96, dtype=asked.dtype, fingerprint="projection")
    prefill = PrefillAudit(AuditTerms(str(made.directory), asked.dtype, "cpu"))
    bounds = contract(asked.dtype)
    todo = requests(made.corpus, asked.rollouts)
    rows: list[dict[str, Any]] = []
    async with pipeline(
        made.directory, plan_of(shape, ENDS), fingerprint="projection", dtype=asked.dtype
    ) as stages:
        for version, liar in enumerate((-1, *range(len(ENDS)))):
            for rank, one in reversed(list(enumerate(stages.all))):
                first = ENDS[rank - 1] if rank else 0
                layers = range(first, ENDS[rank]) if rank == liar else range(0)
                whole = coarse(made.state, layers, asked.bits)
                await one.load(version, stages.share(rank, whole))
            if not version:
                await stages.join()
            said = await asyncio.gather(*map(stages.head.generate, todo))
            items = [item(*pair) for pair in zip(todo, said, strict=True)]
            answers = prefill.measure(items, {0: made.state})
            found = [one for one in answers if isinstance(one, Measured)]
            table = outputs(found)
            if liar < 0:
                most = float(table.max())
                bounds = contract(asked.dtype, 1.2 * most, most)
            name = "honest" if liar < 0 else f"int{asked.bits} in stage {liar}"
            print(name, "median", np.median(table, 0).round(4), "largest", table.max(0).round(4))
            row = shares(laid(found, bounds), liar)
            print("  ", {key: round(value, 3) for key, value in row.items()})
            rows.append({"what": name, **row, "median": np.median(table, 0).tolist()})
    return rows


# -- models and reports ---------------------------------------------------------------------------


def trained(asked: argparse.Namespace, layers: int) -> Trained:
    """Return the model; with --quick trained for only a few steps."""
    steps = 10 if asked.quick else None
    model = recipe(asked.model, steps=steps, num_hidden_layers=layers)
    return trained_model(model, device=asked.device)


def report_all(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print everything, with stages in this process."""
    made = trained(asked, asked.layers)
    cuts = tuple(asked.layers * rank // asked.stages for rank in range(1, asked.stages))
    state = with_massive_channel(made.state, asked.massive)
    run = (asked.dtype, asked.device, asked.rollouts, asked.batch)
    print(
        f"{asked.model}, {asked.layers} layers cut at {cuts}, {asked.dtype}, loss {made.loss:.3f}"
    )
    setting = Setting(made.directory, state, made.corpus, cuts, *run)
    found = report(setting, asked.quick)
    return [{"what": name, **row} for name, row in found.items()]


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__, "one cheat, few rollouts of a model that is hardly trained")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rollouts", type=int, help="192; 32 with --vllm")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--massive", type=float, default=0.0)
    parser.add_argument("--vllm", action="store_true", help="stages of vLLM")
    parser.add_argument("--bits", type=int, default=4, help="of the cheat's matrices, with --vllm")
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.device == "cpu":
        torch.set_num_threads(1)
    asked.rollouts = asked.rollouts or (16 if asked.quick else 32 if asked.vllm else 192)
    rows = asyncio.run(report_vllm(asked)) if asked.vllm else report_all(asked)
    return conclude(rows, [], asked.json)


if __name__ == "__main__":
    sys.exit(main())
