"""Families that vLLM serves on GPUs only, and mixtures, in bf16: generation, and a version written in place."""

from pathlib import Path

import pytest
import torch
from support.engine_cases import reference_logprobs
from support.family_cases import FAMILIES, NOT_RUN, ON_GPUS, PROMPT, make_family, stepped

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.vllm_arguments import check_family, read_shape
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of vLLM, torch and CUDA, in versions that vary
]

CONFIG = EngineConfig(
    type="vllm",
    dtype="bfloat16",
    max_batch=8,
    max_model_len=256,
    vllm={"gpu_memory_utilization": 0.2, "enforce_eager": True},
)
TOLERANCE = 0.1
"""Mean absolute difference of a completion's logprobs: bf16 kernels against an fp32 forward pass."""


def apart(directory: Path, state: State, completion: Completion) -> float:
    tokens = [*PROMPT, *completion.token_ids]
    wanted = reference_logprobs(directory, state, tokens, 1.0)[len(PROMPT) :]
    return sum(abs(a - b) for a, b in zip(wanted, completion.logprobs, strict=True)) / len(wanted)


@pytest.mark.parametrize(
    "family",
    [
        name
        for name, one in FAMILIES.items()
        if one.vllm in (ON_GPUS, NOT_RUN) or "experts" in one.what or "linear" in one.what
    ],
)
async def test_vllm_generates_and_is_updated_in_place(family: str, tmp_path: Path) -> None:
    first, other = (make_family(family, tmp_path / name, seed) for seed, name in enumerate("ab"))
    second, changed = stepped(first, other)
    directory = tmp_path / "a"
    try:
        check_family(CONFIG, read_shape(directory), cpu=False)
    except EngineError as error:
        pytest.skip(str(error))  # of older releases
    engine = HostedEngine(CONFIG)
    await engine.start(directory, fingerprint="projection")
    try:
        await engine.load(1, first)
        completion = await engine.generate(GenerateRequest(PROMPT, 20, 1.0, 1, ()))
        assert apart(directory, first, completion) < TOLERANCE
        await engine.update(2, second, changed)
        completion = await engine.generate(GenerateRequest(PROMPT, 20, 1.0, 2, ()))
        assert apart(directory, second, completion) < TOLERANCE
        assert apart(directory, first, completion) > TOLERANCE
    finally:
        await engine.close()
