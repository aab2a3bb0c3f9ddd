"""A small random model, two policies and requests for the tests of vLLM for real."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.models import huggingface
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.weights.state import State

DEADLINE_S = 240.0
START_S = 250.0
"""For what starts vLLM; a busy machine takes a minute for it."""
TOLERANCE = 1e-4
LOADS = 30
"""Most of a test: on a slow machine nothing else would be done."""
CONFIG = EngineConfig(
    type="vllm", max_batch=8, max_model_len=512, vllm={"kv_cache_memory_bytes": 64 << 20}
)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 272,
    "tie_word_embeddings": False,
}
"""Heads of 32, which vLLM computes without a GPU, too."""


@dataclass(frozen=True)
class Case:
    """A model directory without weights, and two policies for it."""

    model_dir: Path
    states: tuple[State, State]


def make_case(directories: pytest.TempPathFactory) -> Case:
    """Make a model directory and its policies."""
    torch.set_num_threads(1)
    contract = directories.mktemp("contract")
    states: list[State] = []
    for seed in range(2):
        full = directories.mktemp("full")
        huggingface.create(full, {}, seed)
        for name in huggingface.contract_files(full):
            shutil.copyfile(full / name, contract / name)
        states.append(sharp(huggingface.policy_state(huggingface.load_model(full))))
    return Case(contract, (states[0], states[1]))


def sharp(state: State) -> State:
    """Matrices times 8: policies that differ, and a distribution that depends on its prompt."""
    return {
        name: from_torch(to_torch(tensor) * 8) if len(tensor.shape) == 2 else tensor
        for name, tensor in state.items()
    }


def request(
    length: int = 20,
    *,
    seed: int = 1,
    max_tokens: int = 12,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (),
) -> GenerateRequest:
    prompt = tuple((7 * index + 3) % 256 for index in range(length))
    return GenerateRequest(prompt, max_tokens, temperature, seed, stop)


async def generate_all(engine: Engine, requests: list[GenerateRequest]) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(engine.generate, requests))


async def until(true: Callable[[], bool]) -> None:
    """Wait until an engine's stats satisfy a condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=TOLERANCE, rel=0)


def expect_same(found: list[Completion], wanted: list[Completion]) -> None:
    """The same tokens under the same versions; how requests met in batches rounds the logprobs."""
    for one, other in zip(found, wanted, strict=True):
        assert replace(one, logprobs=[]) == replace(other, logprobs=[])
        assert one.logprobs == near(other.logprobs)
