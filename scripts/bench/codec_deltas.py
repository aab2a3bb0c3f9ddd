"""Pairs of states for codec.py: synthetic ones of a wanted density, and real optimizer steps.

Every pair is what a trainer would publish: bf16 bits before and after one step.
"""

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from primerl.node.config.run import ModelCreateConfig, TrainingConfig
from primerl.node.models.huggingface import create, load_model, policy_state
from primerl.node.weights.state import State, Tensor

DEVIATION = 0.02
"""Of synthetic weights, as of a model that was just made."""
TENSOR = 4 << 20
"""Elements of a synthetic tensor."""
SHARES = (0.001, 0.01, 0.015, 0.05, 0.30, 1.0)

DEMO = ModelCreateConfig(hidden_size=96, num_hidden_layers=2)
"""As in configs/demo.toml."""
DEMO_LR = 8e-4
MIDDLE = ModelCreateConfig(
    hidden_size=512,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=8192,
)
"""54.5M parameters."""
RATES = (1e-6, 3e-6, 1e-5)


@dataclass(frozen=True)
class Pair:
    """A model before and after a step."""

    name: str
    base: State
    new: State
    share: float | None = None
    """The share of elements that a synthetic step was made to change."""


@dataclass(frozen=True)
class Training:
    """How a model is trained: fp32 masters, cross-entropy."""

    shape: ModelCreateConfig
    length: int
    batch: int
    warm_steps: int
    """At `warm_rate`, so that the weights are no longer as they were drawn."""
    warm_rate: float
    steps: int
    """At each of the rates, with a fresh optimizer; the last one is the delta."""


def synthetic(elements: int) -> Iterator[Pair]:
    """Normal weights, each moved by a normal step of the size that changes the wanted share."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, DEVIATION, elements).astype(np.float32)
    base = _as_state(to_bf16(weights))
    for share in SHARES:
        yield Pair(f"synthetic {share:.1%}", base, _as_state(moved(weights, share, rng)), share)


def optimizer_steps(quick: bool) -> Iterator[Pair]:
    """The demo's model at the demo's rate, and one of 54.5M parameters at rates of real runs, at the first
    by Muon too."""
    demo = Training(DEMO, 24, 64, 20 if quick else 60, 3e-3, 5 if quick else 10)
    middle = Training(MIDDLE, 64, 6, 1 if quick else 12, 5e-4, 2 if quick else 8)
    yield from _trained("demo", demo, [DEMO_LR])
    yield from _trained("54.5M", middle, RATES)
    yield from _trained("54.5M muon", middle, RATES[:1], "muon")


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, as a trainer's cast does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def moved(
    weights: NDArray[np.float32], share: float, rng: np.random.Generator
) -> NDArray[np.uint16]:
    """The bf16 bits of `weights` after a step that changes `share` of them."""
    before = to_bf16(weights)
    direction = rng.standard_normal(weights.size, dtype=np.float32)
    sample = slice(0, 1 << 20)

    def step(part: slice, size: float) -> NDArray[np.uint16]:
        return to_bf16((weights[part] + size * direction[part]).astype(np.float32))

    if share == 1:
        # No step changes every bit pattern: take a large one and nudge the rest.
        after = step(slice(None), 1e-3)
        after[after == before] ^= 1
        return after
    low, high = 1e-9, 1e-2
    for _ in range(30):
        size = (low * high) ** 0.5
        few = np.mean(step(sample, size) != before[sample]) < share
        low, high = (size, high) if few else (low, size)
    return step(slice(None), high)


def _as_state(bits: NDArray[np.uint16]) -> State:
    """`bits` as a model of a few matrices."""
    parts = [bits[at : at + TENSOR] for at in range(0, bits.size, TENSOR)]
    return {
        f"layers.{at:02}.weight": Tensor("BF16", (part.size,), part)
        for at, part in enumerate(parts)
    }


# -- real steps ------------------------------------------------------------------------------------


def _trained(
    name: str,
    training: Training,
    rates: tuple[float, ...] | list[float],
    kind: Literal["adamw", "muon"] = "adamw",
) -> Iterator[Pair]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        create(Path(directory), training.shape, seed=0)
        model = load_model(Path(directory), dtype="float32", device="cpu")
    model.train()
    rng = np.random.default_rng(1)
    _steps(model, training, training.warm_rate, training.warm_steps, rng, kind)
    warm = {key: value.detach().clone() for key, value in model.named_parameters()}
    for rate in rates:
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.copy_(warm[key])
        optimizer = _steps(model, training, rate, training.steps - 1, rng, kind)
        base = policy_state(model)
        _step(model, optimizer, training, rate, rng)
        del optimizer  # the peak of memory that is measured next is the codec's own
        gc.collect()
        yield Pair(f"{name} lr {rate:g}", base, policy_state(model))


def _steps(
    model: Any, training: Training, rate: float, count: int, rng: np.random.Generator, kind: str
) -> Any:
    """Train so many steps with a fresh optimizer, which is returned."""
    from primerl.node.training.optimizer import Optimizer

    config = TrainingConfig.model_validate({"optimizer": kind, "betas": (0.9, 0.95)})
    optimizer = Optimizer(dict(model.named_parameters()), config)
    for _ in range(count):
        _step(model, optimizer, training, rate, rng)
    return optimizer


def _step(
    model: Any, optimizer: Any, training: Training, rate: float, rng: np.random.Generator
) -> None:
    """One step on sequences whose second half is the first one backwards."""
    import torch

    half = rng.integers(0, training.shape.vocab_size, (training.batch, training.length // 2))
    tokens = torch.from_numpy(np.concatenate([half, half[:, ::-1]], axis=1))
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.clip()
    optimizer.step(rate)
