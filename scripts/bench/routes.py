"""Measure the effect of replaying expert routes in training, and audits of false routes.

    bash scripts/bench/gpu.sh routes [--model DIR] [--engine hf|vllm] [--sequences N] [--tokens N] [--sharp F]
        [--layers N] [--dtype D] [--trainer-dtype D] [--threads N] [--quick] [--json FILE]

An engine draws replies and records their routes. The trainer computes their logprobs with its own choice of
experts and with the recorded one: mismatch KL, mean and largest difference of logprobs, nats. The embedded
auditor then measures honest routes and forged ones: random for every token, always the same, and random in one
layer. Without --model it makes a random Qwen3-MoE whose matrices are --sharp times as large as usual.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from primerl.node.config.run import EngineConfig, ModelCreateConfig, TrainingConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.models import huggingface, model_files
from primerl.node.models.routers import route_shape
from primerl.node.models.routes import pack_routes, unpack_routes
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.training.backend import Sample
from primerl.node.training.learner import Learner
from primerl.node.verification.auditor import AuditItem, AuditTerms, Measured, SampledSpan
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State
from primerl.protocol.manifests import RouteShape
from primerl.scripts.bench.report import at_least, conclude, make_parser

LESS = 4.0
"""Goal: the mismatch KL with routes is this many times smaller."""
PROMPT = 64
Routes = NDArray[np.int16]


@dataclass(frozen=True)
class Case:
    """A model, and replies that an engine drew from it."""

    directory: Path
    state: State
    shape: RouteShape
    requests: Sequence[GenerateRequest]
    replies: Sequence[Completion]

    def samples(self, *, routed: bool) -> list[Sample]:
        """Make the trainer's samples."""
        return [
            Sample(
                [*asked.prompt, *reply.token_ids],
                [False] * len(asked.prompt) + [True] * len(reply.token_ids),
                [0.0] * len(asked.prompt) + reply.logprobs,
                1.0,
                routes=reply.routes if routed else b"",
            )
            for asked, reply in zip(self.requests, self.replies, strict=True)
        ]

    def items(self, forge: Callable[[int, Routes], Routes]) -> list[AuditItem]:
        """Make the auditor's items, with forged routes."""
        found: list[AuditItem] = []
        for number, (asked, reply) in enumerate(zip(self.requests, self.replies, strict=True)):
            start = len(asked.prompt)
            end = start + len(reply.token_ids)
            routes = forge(number, unpack_routes(reply.routes, self.shape))
            found.append(
                AuditItem(
                    token_ids=[*asked.prompt, *reply.token_ids],
                    replies=[SampledSpan(start, end, asked.seed)],
                    logprobs=reply.logprobs,
                    versions=[0] * (end - start),
                    proof=reply.proof,
                    routes=pack_routes(routes, self.shape),
                )
            )
        return found


def make_model(options: argparse.Namespace, directory: Path) -> State:
    """Make a random mixture of experts in `directory`."""
    shape = ModelCreateConfig(
        hidden_size=128,
        num_hidden_layers=options.layers,
        intermediate_size=256,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        vocab_size=272,
    )
    huggingface.create(directory, shape, options.seed)
    state = huggingface.policy_state(huggingface.load_model(directory))
    state = {
        name: from_torch(to_torch(one) * options.sharp) if len(one.shape) == 2 else one
        for name, one in state.items()
    }
    model_files.export(state, directory, directory)
    return state


async def draw(options: argparse.Namespace, directory: Path, state: State) -> Case:
    """Let an engine reply to random prompts."""
    shape = route_shape(directory)
    if shape is None:
        raise SystemExit(f"{directory} has no experts")
    config = EngineConfig(
        type=options.engine,
        dtype=options.dtype,
        device=options.device,
        max_model_len=PROMPT + options.tokens,
        max_batch=options.sequences,
        enable_return_routed_experts=True,
        vllm={"gpu_memory_utilization": 0.4} if options.engine == "vllm" else {},
    )
    rng = np.random.default_rng(options.seed)
    vocabulary = huggingface.vocab_size(directory)
    asked = [
        GenerateRequest(
            tuple(rng.integers(0, min(256, vocabulary), PROMPT).tolist()),
            options.tokens,
            1.0,
            int(rng.integers(2**60)),
            (),
        )
        for _ in range(options.sequences)
    ]
    engine: Engine = build_engine(config)
    try:
        await engine.start(directory, fingerprint="projection")
        await engine.load(0, state)
        replies = await asyncio.gather(*map(engine.generate, asked))
    finally:
        await engine.close()
    return Case(directory, state, shape, asked, replies)


# -- training --------------------------------------------------------------------------------------


def mismatch(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Compare the trainer's logprobs with the engine's, without and with routes."""
    config = TrainingConfig(
        dtype=options.trainer_dtype,
        device=options.device,
        seq_len=PROMPT + options.tokens,
        compile=False,
        threads=options.threads,
    )
    learner = Learner.build(case.directory, config, max_steps=1, seed=0, temperature=1.0)
    sampled = np.concatenate([np.array(reply.logprobs) for reply in case.replies])
    found: dict[str, Any] = {}
    for name, routed in (("without", False), ("with", True)):
        samples = case.samples(routed=routed)
        values = [np.array(learner.packed_logprobs([one])) for one in samples]
        apart = np.concatenate(values) - sampled
        found[name] = {
            "mismatch_kl": float((np.expm1(apart) - apart).mean()),
            "mean": float(np.abs(apart).mean()),
            "most": float(np.abs(apart).max()),
        }
    learner.close()
    return found


# -- audits ----------------------------------------------------------------------------------------


def audited(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Return an auditor's measures of honest and of forged routes."""
    terms = AuditTerms(str(case.directory), options.dtype, options.device, routes=case.shape)
    auditor = PrefillAudit(terms)
    auditor.prepare(threads=options.threads)
    rng = np.random.default_rng(options.seed)
    shape = case.shape

    def honest(_: int, routes: Routes) -> Routes:
        return routes

    def anyone(_: int, routes: Routes) -> Routes:
        every = rng.random((*routes.shape[:2], shape.experts)).argsort(axis=2)
        return every[..., : shape.top_k].astype(np.int16)

    def always(_: int, routes: Routes) -> Routes:
        return np.broadcast_to(np.arange(shape.top_k, dtype=np.int16), routes.shape)

    def one_layer(number: int, routes: Routes) -> Routes:
        forged = routes.copy()
        forged[:, 0] = anyone(number, routes)[:, 0]
        return forged

    forgers = {
        "honest": honest,
        "random": anyone,
        "always the same": always,
        "random in one layer": one_layer,
    }
    found: dict[str, Any] = {}
    for name, forge in forgers.items():
        measured = auditor.measure(case.items(forge), {0: case.state})
        rows = [one for one in measured if isinstance(one, Measured)]
        if len(rows) < len(measured):
            raise SystemExit(f"some of the {name} routes cannot be measured: {measured}")
        found[name] = {
            field: [
                float(np.quantile([getattr(one, field) for one in rows], q)) for q in (0, 0.5, 1)
            ]
            for field in ("routing", "routing_max")
        }
    return found


def parse() -> argparse.Namespace:
    """Parse the options; defaults depend on this machine's hardware."""
    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__, "a tiny model and few tokens")
    parser.add_argument("--model", type=Path, help="directory of a mixture of experts in bf16")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="vllm" if cuda else "hf")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sharp", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--trainer-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    options.device = "cuda" if cuda else "cpu"
    if options.quick:
        options.sequences, options.tokens, options.layers = 4, 24, 2
    return options


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Draw, train and audit."""
    with tempfile.TemporaryDirectory() as name:
        directory = options.model or Path(name)
        state = (
            huggingface.read_state(directory) if options.model else make_model(options, directory)
        )
        case = await draw(options, directory, state)
        tokens = sum(len(one.token_ids) for one in case.replies)
        found: dict[str, Any] = {
            "tokens": tokens,
            "bytes_a_token": sum(len(one.routes) for one in case.replies) / tokens,
            "shape": [case.shape.layers, case.shape.experts, case.shape.top_k],
            "entropy": -float(np.mean([np.mean(one.logprobs) for one in case.replies])),
            "mismatch": mismatch(options, case),
            "audit": audited(options, case),
        }
    return found


def show(found: dict[str, Any]) -> None:
    """Print two tables."""
    layers, experts, top_k = found["shape"]
    print(
        f"{found['tokens']} tokens, {layers} layers of {experts} experts, {top_k} a token: "
        f"{found['bytes_a_token']:g} bytes a token; {found['entropy']:.2f} nats a token are drawn"
    )
    print("routes     mismatch KL   mean |difference|   largest")
    for name, row in found["mismatch"].items():
        print(f"{name:8} {row['mismatch_kl']:13.3g} {row['mean']:19.3g} {row['most']:9.3g}")
    print("routes                 share not chosen (least, median, most)   largest margin")
    for name, row in found["audit"].items():
        share, margin = ((" ".join(f"{v:9.3g}" for v in row[one])) for one in row)
        print(f"{name:20} {share:>41} {margin:>30}")


def main() -> int:
    """Measure, print, and return exit code 0 if the goal was met."""
    logging.basicConfig(level=logging.WARNING)
    options = parse()
    found = asyncio.run(run(options))
    show(found)
    pair = found["mismatch"]
    less = pair["without"]["mismatch_kl"] / max(pair["with"]["mismatch_kl"], 1e-12)
    goals = [at_least("mismatch KL is smaller by", less, LESS, "x")]
    rows = [{"routes": name, **row} for name, row in (pair | found["audit"]).items()]
    return conclude(rows, goals, options.json, **found)


if __name__ == "__main__":
    sys.exit(main())
