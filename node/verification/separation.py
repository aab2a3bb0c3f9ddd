"""Other models that a worker might run, and whether bounds tell their rollouts from honest ones.

A state that is made here is one that a cheat generates with; none is ever published.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import ProofContract
from ...protocol.rollouts import Evidence
from ..weights.state import State, Tensor
from .bands import SUSPECT, at_least
from .judge import judge

UNTOUCHED = ("embed", "lm_head")
"""Parts of names of matrices that quantised models keep as they are."""
INT4_GROUP = 128
"""Weights that share a scale in the usual int4 formats (GPTQ, AWQ)."""

BATCH = 16
"""Audited rollouts within which another model has to be caught."""
WANTED = 0.99
"""With this probability."""
COINCIDENCE = 1e-5
"""So improbable a number of suspects in an honest batch is as good as a rejection."""
DRAWS = 2000


@dataclass(frozen=True)
class Separated:
    """How a cheat's rollouts were judged."""

    name: str
    rollouts: int
    rejected: int
    suspected: int
    """The rejected included."""
    batches: float
    """Share of batches of BATCH rollouts that are caught."""
    required: bool
    """Whether bounds that let it pass are worth nothing."""

    @property
    def separates(self) -> bool:
        """Whether it is caught as often as wanted."""
        return self.batches >= WANTED


def quantised(state: State, bits: int, group: int = 0) -> State:
    """`state` with its BF16 matrices rounded to `bits` bits and back, embeddings and head apart.

    Symmetric, to nearest, one scale for `group` inputs of an output (0, or where the width is no
    multiple: for all of them): what weight-only int8 and int4 inference computes with.
    """
    return {
        name: _rounded(tensor, bits, group) if _is_matrix(name, tensor) else tensor
        for name, tensor in state.items()
    }


def int8(state: State) -> State:
    """Weight-only int8, one scale an output channel."""
    return quantised(state, 8)


def int4(state: State) -> State:
    """Weight-only int4, one scale for INT4_GROUP inputs."""
    return quantised(state, 4, INT4_GROUP)


def nudged(state: State, step: float, seed: int) -> State:
    """`state` one version on: every BF16 weight moved by `step`, up or down at random.

    So moves Adam, where nearly every element takes a step of about the learning rate. Rounding is
    stochastic: weights are kept in fp32 by the trainer, anywhere within the reach of their bf16 value,
    and a step that is small beside it flips a few of them.
    """
    chance = np.random.default_rng(seed)

    def moved(tensor: Tensor) -> Tensor:
        signs = chance.integers(0, 2, tensor.data.size, np.int8) * np.float32(2) - 1
        bits = (_floats(tensor) + signs * np.float32(step)).view(np.uint32)
        bits = bits + chance.integers(0, 1 << 16, bits.size, np.uint32)
        return Tensor("BF16", tensor.shape, (bits >> 16).astype("<u2"))

    return {
        name: moved(tensor) if tensor.dtype == "BF16" else tensor for name, tensor in state.items()
    }


def separate(
    name: str,
    found: Sequence[Evidence],
    contract: ProofContract,
    *,
    chance: random.Random,
    required: bool = True,
) -> Separated:
    """Judge the rollouts of one cheat."""
    judged = [judge(one, contract) for one in found]
    rejected = [one.reason is not None for one in judged]
    suspected = [one.suspect for one in judged]
    share = batches_caught(rejected, suspected, chance=chance)
    return Separated(name, len(found), sum(rejected), sum(suspected), share, required)


def batches_caught(
    rejected: Sequence[bool], suspected: Sequence[bool], *, chance: random.Random, size: int = BATCH
) -> float:
    """Share of batches of `size` rollouts, drawn with replacement, that hold a rejected rollout or more
    suspects than honest batches do."""
    limit = most_suspects(size)
    caught = 0
    if not rejected:
        return 0.0
    for _ in range(DRAWS):
        batch = chance.choices(range(len(rejected)), k=size)
        caught += (
            any(rejected[row] for row in batch) or sum(suspected[row] for row in batch) > limit
        )
    return caught / DRAWS


def most_suspects(size: int, share: float = SUSPECT, coincidence: float = COINCIDENCE) -> int:
    """More suspects than this among `size` honest rollouts are rarer than `coincidence`."""
    limit = 0
    while at_least(limit + 1, size, share) > coincidence:
        limit += 1
    return limit


Variant = Callable[[State], State]
VARIANTS: dict[str, Variant] = {"int8 weights": int8, "int4 weights": int4}
"""Other models that are made of the right one."""


def _is_matrix(name: str, tensor: Tensor) -> bool:
    kept = any(part in name for part in UNTOUCHED)
    return len(tensor.shape) >= 2 and not kept and tensor.dtype == "BF16"


def _rounded(tensor: Tensor, bits: int, group: int) -> Tensor:
    width = tensor.shape[-1]
    size = group if group and width % group == 0 else width
    blocks = _floats(tensor).reshape(-1, size)
    largest = 2 ** (bits - 1) - 1
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-30) / largest
    rounded = np.rint(blocks / scales).clip(-largest, largest) * scales
    found = np.ascontiguousarray(rounded, np.float32).reshape(-1).view(np.uint32)
    to_even = ((found >> 16) & 1) + 0x7FFF
    return Tensor("BF16", tensor.shape, ((found + to_even) >> 16).astype("<u2"))


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    """The numbers of a BF16 tensor, flat."""
    return (tensor.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
