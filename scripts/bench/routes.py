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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import GenerateRequest
from primerl.node.models import huggingface
from primerl.node.models.routers import route_shape
from primerl.node.models.routes import pack_routes, unpack_routes
from primerl.node.verification.auditor import AuditItem, AuditTerms, Measured
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State
from primerl.protocol.manifests import RouteShape
from primerl.scripts.bench.replies import (
    Replies,
    make_sampling_parser,
    make_sharp_model,
    mismatch,
    running,
)
from primerl.scripts.bench.report import at_least, conclude

LESS = 4.0
"""Goal: the mismatch KL with routes is this many times smaller."""
PROMPT = 64
Routes = NDArray[np.int16]


def forge_routes(
    replies: Replies, shape: RouteShape, forge: Callable[[int, Routes], Routes]
) -> list[AuditItem]:
    """Make the auditor's items, with forged routes."""
    return [
        replace(item, routes=pack_routes(forge(number, unpack_routes(item.routes, shape)), shape))
        for number, item in enumerate(replies.items())
    ]


def make_model(options: argparse.Namespace, directory: Path) -> State:
    """Make a random mixture of experts in `directory`."""
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": options.layers,
        "intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "vocab_size": 272,
    }
    return make_sharp_model(directory, shape, options.sharp, options.seed)


async def draw(options: argparse.Namespace, directory: Path, state: State) -> Replies:
    """Let an engine reply to random prompts."""
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
    requests = [
        GenerateRequest(
            tuple(rng.integers(0, min(256, vocabulary), PROMPT).tolist()),
            options.tokens,
            1.0,
            int(rng.integers(2**60)),
            (),
        )
        for _ in range(options.sequences)
    ]
    async with running(config, directory, state) as engine:
        return await Replies.of(engine, requests)


# -- audits ----------------------------------------------------------------------------------------


def audited(
    options: argparse.Namespace,
    directory: Path,
    state: State,
    shape: RouteShape,
    replies: Replies,
) -> dict[str, Any]:
    """Return an auditor's measures of honest and of forged routes."""
    terms = AuditTerms(str(directory), options.dtype, options.device, routes=shape)
    auditor = PrefillAudit(terms)
    auditor.prepare(threads=options.threads)
    rng = np.random.default_rng(options.seed)

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
        measured = auditor.measure(forge_routes(replies, shape, forge), {0: state})
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
    parser = make_sampling_parser(
        __doc__, sequences=64, tokens=256, sharp=4.0, trainer_dtype="bfloat16"
    )
    parser.add_argument("--engine", choices=("hf", "vllm"), default="vllm" if cuda else "hf")
    parser.add_argument("--layers", type=int, default=8)
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
        shape = route_shape(directory)
        if shape is None:
            raise SystemExit(f"{directory} has no experts")
        replies = await draw(options, directory, state)
        tokens = sum(len(reply.token_ids) for reply in replies.completions)
        entropy = -float(np.mean([np.mean(reply.logprobs) for reply in replies.completions]))
        samples = {"without": replies.samples(), "with": replies.samples(routed=True)}
        found: dict[str, Any] = {
            "tokens": tokens,
            "bytes_a_token": sum(len(reply.routes) for reply in replies.completions) / tokens,
            "shape": [shape.layers, shape.experts, shape.top_k],
            "entropy": entropy,
            "mismatch": mismatch(options, directory, samples, PROMPT + options.tokens),
            "audit": audited(options, directory, state, shape, replies),
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
