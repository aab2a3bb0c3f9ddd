"""Honest noise as it was measured, to draw rollouts from, and the classes that workers claim."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from primerl.protocol.numerics import NumericsClass
from primerl.protocol.rollouts import MEASURES, Evidence

H100 = NumericsClass("vllm", "0.25.1", "H100", 1, "bfloat16")
RTX = NumericsClass("vllm", "0.25.1", "RTX 4090", 1, "bfloat16")
TOKENS = 64


def honest_4b(chance: np.random.Generator, count: int, scale: float = 1.0) -> list[Evidence]:
    """Rollouts of a 4B model in bfloat16, vLLM's decoding against its own prefill, one H200.

    Measured over 128 rollouts of 64 tokens: distance 0.0306 a token, largest of a rollout 0.0351; |dlogp|
    0.0223 a token, largest of a rollout 0.0275, of a token 0.125; 98.2 % of tokens without a margin, largest
    mean of a rollout 0.0026. The tails here are heavy (Student's t, 6 degrees of freedom), and the distances
    and logprobs of a rollout move together.
    """
    tail = chance.standard_t(6, count)
    own = chance.standard_t(6, (4, count))
    measures: Mapping[str, np.ndarray] = {
        "fingerprint": 0.0306 * (1 + 0.03 * tail + 0.03 * own[0]),
        "sampling": chance.exponential(0.0006, count),
        "sampling_max": chance.exponential(0.04, count),
        "logprob": 0.0223 * (1 + 0.05 * tail + 0.05 * own[1]),
        "logprob_max": 0.085 * (1 + 0.15 * own[2]),
        "other_policy": -25.0 + 12.0 * own[3],
    }
    columns = {name: scale * values for name, values in measures.items()}
    rows: list[dict[str, Any]] = [
        {name: float(of[number]) for name, of in columns.items()} for number in range(count)
    ]
    return [Evidence(0, number, TOKENS, **row) for number, row in enumerate(rows)]


def rollout(number: int, **measures: float) -> Evidence:
    values: dict[str, Any] = dict.fromkeys(MEASURES, 0.0) | measures
    return Evidence(group=0, rollout=number, tokens=64, **values)


def noise(count: int, seed: int, scale: float = 0.01) -> list[Evidence]:
    """Rollouts whose measures are independent and exponential."""
    drawn = np.random.default_rng(seed).exponential(scale, (count, len(MEASURES)))
    return [
        rollout(number, **dict(zip(MEASURES, map(float, row), strict=True)))
        for number, row in enumerate(drawn)
    ]
