"""The engines that the suite of the engine seam runs on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.engine_cases import FP32, MAX_LENGTH, SHAPE, make_llama, make_qwen3
from support.scripted_engine import ScriptedEngine

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Engine
from primerl.node.inference.hf import HfEngine
from primerl.node.weights.state import State


@dataclass(frozen=True)
class Factory:
    """How to make one engine and a model for it.

    `real`: log-probabilities come from the model. `within`: how near a plain forward pass they are.
    """

    engine: Callable[[], Engine]
    model: Callable[[Path, int], State]
    real: bool = True
    within: float = 1e-5
    proofs: tuple[str, ...] = ()


def _wide_qwen3(directory: Path, seed: int) -> State:
    """vLLM without a GPU has no attention for heads smaller than 32."""
    return make_qwen3(directory, seed, SHAPE | {"head_dim": 32})


def _vllm() -> Engine:
    pytest.importorskip("vllm")
    from primerl.node.inference.hosted import HostedEngine

    return HostedEngine(EngineConfig(type="vllm", max_model_len=MAX_LENGTH, max_batch=32))


FACTORIES: dict[str, Factory] = {
    "scripted": Factory(
        lambda: ScriptedEngine(max_model_len=MAX_LENGTH, delay_s=0.01), make_qwen3, real=False
    ),
    "hf": Factory(lambda: HfEngine(FP32), make_qwen3),
    "hf-general": Factory(lambda: HfEngine(FP32), make_llama),
    "vllm": Factory(_vllm, _wide_qwen3, within=1e-4),
}


PARAMS = [
    pytest.param(name, marks=pytest.mark.slow) if name == "vllm" else name for name in FACTORIES
]
"""What tests are parametrised with: vLLM only where it is installed and slow tests are asked for."""
DRAWING_PARAMS = [name for name in PARAMS if name not in ("scripted", "hf-general")]
"""Those whose tokens a definition tells."""


@dataclass(frozen=True)
class Case:
    """An engine to make, a model directory for it, and two policies."""

    factory: Factory
    model_dir: Path
    states: list[State]


def make_case(name: str, directories: pytest.TempPathFactory) -> Case:
    """The case of the factory `name`."""
    torch.set_num_threads(1)
    factory = FACTORIES[name]
    made = [directories.mktemp(f"model{seed}") for seed in range(2)]
    states = [factory.model(directory, seed) for seed, directory in enumerate(made)]
    return Case(factory, made[0], states)
