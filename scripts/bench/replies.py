"""Replies of an engine, as samples of a trainer and items of an auditor: of routes.py and supports.py."""

import argparse
import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from primerl.node.config.run import EngineConfig, TrainingConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.models import huggingface, model_files
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.training.backend import Sample
from primerl.node.training.learner import Learner
from primerl.node.verification.auditor import AuditItem, SampledSpan
from primerl.node.weights.state import State
from primerl.scripts.bench.report import make_parser


@dataclass(frozen=True)
class Replies:
    """Requests, and what an engine replied to them."""

    requests: Sequence[GenerateRequest]
    completions: Sequence[Completion]

    @classmethod
    async def of(cls, engine: Engine, requests: Sequence[GenerateRequest]) -> "Replies":
        """Let an engine reply to all requests at once."""
        return cls(requests, await asyncio.gather(*map(engine.generate, requests)))

    def samples(self, *, routed: bool = False, supported: bool = False) -> list[Sample]:
        """Make the trainer's samples, with the routes or the supports that were recorded."""
        return [
            Sample(
                [*request.prompt, *reply.token_ids],
                [False] * len(request.prompt) + [True] * len(reply.token_ids),
                [0.0] * len(request.prompt) + reply.logprobs,
                1.0,
                routes=reply.routes if routed else b"",
                support=reply.support if supported else b"",
            )
            for request, reply in zip(self.requests, self.completions, strict=True)
        ]

    def items(self) -> list[AuditItem]:
        """Make the auditor's items."""
        items: list[AuditItem] = []
        for request, reply in zip(self.requests, self.completions, strict=True):
            start, end = len(request.prompt), len(request.prompt) + len(reply.token_ids)
            items.append(
                AuditItem(
                    token_ids=[*request.prompt, *reply.token_ids],
                    replies=[SampledSpan(start, end, request.seed)],
                    logprobs=reply.logprobs,
                    versions=[0] * len(reply.token_ids),
                    proof=reply.proof,
                    routes=reply.routes,
                    support=reply.support,
                    top_p=request.top_p,
                )
            )
        return items


def make_sampling_parser(
    doc: str | None, *, sequences: int, tokens: int, sharp: float, trainer_dtype: str
) -> argparse.ArgumentParser:
    """Make a parser of the options that both benchmarks have."""
    parser = make_parser(doc, "a tiny model and few tokens")
    parser.add_argument("--model", type=Path, help="directory of a model in bf16")
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--sharp", type=float, default=sharp)
    parser.add_argument("--seed", type=int, default=3)
    dtypes = ("bfloat16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16")
    parser.add_argument("--trainer-dtype", choices=dtypes, default=trainer_dtype)
    parser.add_argument("--threads", type=int, default=0)
    return parser


def make_sharp_model(directory: Path, shape: Mapping[str, Any], sharp: float, seed: int) -> State:
    """Make a random model whose matrices are `sharp` times as large as usual."""
    huggingface.create(directory, shape, seed)
    state = huggingface.policy_state(huggingface.load_model(directory))
    state = {
        name: from_torch(to_torch(tensor) * sharp) if len(tensor.shape) == 2 else tensor
        for name, tensor in state.items()
    }
    model_files.export(state, directory, directory)
    return state


@asynccontextmanager
async def running(config: EngineConfig, directory: Path, state: State) -> AsyncGenerator[Engine]:
    """Run an engine that holds `state` and proves what it draws."""
    engine = build_engine(config)
    try:
        await engine.start(directory, fingerprint="projection")
        await engine.load(0, state)
        yield engine
    finally:
        await engine.close()


def mismatch(
    options: argparse.Namespace,
    directory: Path,
    samples: Mapping[str, Sequence[Sample]],
    longest: int,
) -> dict[str, dict[str, float]]:
    """Compare the trainer's logprobs of samples of several kinds with the engine's."""
    config = TrainingConfig(
        dtype=options.trainer_dtype,
        device=options.device,
        seq_len=longest,
        compile=False,
        threads=options.threads,
    )
    learner = Learner.build(directory, config, max_steps=1, seed=0, temperature=1.0)
    rows: dict[str, dict[str, float]] = {}
    for name, some in samples.items():
        values = np.concatenate([np.array(learner.packed_logprobs([one])) for one in some])
        drawn = np.concatenate([np.array(one.logprobs)[np.array(one.mask)] for one in some])
        apart = values - drawn
        rows[name] = {
            "mismatch_kl": float((np.expm1(apart) - apart).mean()),
            "mean": float(np.abs(apart).mean()),
            "most": float(np.abs(apart).max()),
        }
    learner.close()
    return rows
