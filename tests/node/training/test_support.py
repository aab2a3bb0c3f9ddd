"""Training over the supports of truncated draws: the trained policy is the one that drew."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from support.engine_cases import FP32
from support.training_cases import FAST

from primerl.node.config.run import RunConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.hf import HfEngine
from primerl.node.models import huggingface
from primerl.node.models.support import unpack_support
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.packing import pack

ASKED = [
    GenerateRequest(tuple(range(3, 9)), 12 + n, 0.7, n, (), top_p=0.5 + 0.1 * n, supported=True)
    for n in range(4)
]


@pytest.fixture(scope="module")
def completions(model_dir: Path) -> list[Completion]:
    async def draw() -> list[Completion]:
        engine = HfEngine(FP32)
        await engine.start(model_dir)
        try:
            await engine.load(0, huggingface.policy_state(huggingface.load_model(model_dir)))
            return await asyncio.gather(*map(engine.generate, ASKED))
        finally:
            await engine.close()

    return asyncio.run(draw())


def samples(completions: list[Completion], *, supported: bool = True) -> list[Sample]:
    return [
        Sample(
            [*asked.prompt, *reply.token_ids],
            [False] * len(asked.prompt) + [True] * len(reply.token_ids),
            [0.0] * len(asked.prompt) + reply.logprobs,
            (-1.0) ** asked.seed,
            support=reply.support if supported else b"",
        )
        for asked, reply in zip(ASKED, completions, strict=True)
    ]


def trained(model_dir: Path, some: list[Sample]) -> dict[str, float]:
    from primerl.node.training.learner import Learner

    learner = Learner.build(model_dir, FAST, max_steps=9, seed=1, temperature=0.7)
    try:
        return dict(learner.step(TrainBatch(1, some)).values)
    finally:
        learner.close()


def test_the_first_step_after_a_truncated_draw_has_ratios_of_1(
    model_dir: Path, completions: list[Completion]
) -> None:
    over = trained(model_dir, samples(completions))
    assert over["importance_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert over["mismatch_kl/all/mean"] < 1e-6
    assert over["samples/malformed"] == 0
    # the sampler's logprobs over its supports, the trainer's over all tokens
    mixed = trained(model_dir, samples(completions, supported=False))
    assert mixed["mismatch_kl/all/mean"] > 0.01
    assert mixed["importance_ratio/mean"] < 0.9


def test_only_tokens_of_a_support_are_pushed_and_pulled(
    model_dir: Path, completions: list[Completion]
) -> None:
    """A token that was left alone teaches nothing: whatever its advantage, its probability stays 1."""
    alone = samples(completions)
    for one in alone:
        tokens = sum(one.mask)
        one.logprobs[-tokens:] = [0.0] * tokens
    single = [replace(one, support=bytes(sum(one.mask))) for one in alone]
    figures = trained(model_dir, single)
    assert figures["optim/grad_norm"] == 0.0
    assert figures["importance_ratio/mean"] == 1.0
    assert trained(model_dir, samples(completions))["optim/grad_norm"] > 0.0


def test_a_row_has_the_supports_of_its_sampled_tokens_alone(completions: list[Completion]) -> None:
    """Beside samples without any, and tokens of the environment that are trained, too."""
    [one, other, *_] = samples(completions)
    echo = [False] * 2 + [True] * 2 + [False] * (len(one.token_ids) - 4)
    bare = replace(other, support=b"", mask=[False] * 8 + [True] * (len(other.mask) - 8))
    [row] = pack([replace(one, echo=echo), bare], 64).rank(0)
    assert row.support is not None
    stated = unpack_support(one.support, completions[0].token_ids)
    own = row.support[(row.sequences == row.sequences[row.echo][0]) & ~row.echo]
    assert np.array_equal(own[:, : stated.shape[1]], stated)
    assert (row.support[row.echo] == -1).all()
    assert (row.support[row.sequences != row.sequences[row.echo][0]] == -1).all()
    halves = [row.part(at, 2) for at in range(2)] if len(row.token_ids) % 2 == 0 else [row]
    joined = np.concatenate([half.support for half in halves if half.support is not None])
    assert np.array_equal(joined, row.support)
    [plain] = pack([bare], 64).rank(0)
    assert plain.support is None


@pytest.mark.parametrize(
    "support", [b"\1", bytes(3), bytes([1] + [0] * 11) + b"\xff\xff\0\0", bytes(13)]
)
def test_a_sample_whose_supports_do_not_fit_is_left_out(
    model_dir: Path, completions: list[Completion], support: bytes
) -> None:
    some = samples(completions)
    some[0] = replace(some[0], support=support)
    assert trained(model_dir, some)["samples/malformed"] == 1


@pytest.mark.parametrize("limits", [{"top_p": 0.9}, {"top_k": 20}])
def test_a_teacher_behind_an_endpoint_is_refused_where_draws_are_truncated(
    limits: dict[str, Any],
) -> None:
    endpoint = {"url": "http://127.0.0.1:1", "model": "t"}
    loss = {"type": "reverse_kl", "endpoint": endpoint}
    RunConfig.model_validate({"training": {"loss": loss}})
    with pytest.raises(ValidationError, match="over all tokens"):
        RunConfig.model_validate({"training": {"loss": loss}, "sampling": limits})
