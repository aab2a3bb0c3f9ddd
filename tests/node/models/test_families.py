"""Every family that is trained generates, is updated in place, audited and adapted, or the table says not."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.auditor_cases import item_of, make_run, measured
from support.engine_cases import FP32, reference_logprobs
from support.family_cases import FAMILIES, ON_CPUS, PROMPT, SINCE_32, make_family, stepped, table
from support.prefill_core import PrefillCore
from support.weights_cases import applied, infos

from primerl.node.config.run import EngineConfig, TrainingConfig
from primerl.node.config.training import LoraConfig
from primerl.node.errors import EngineError
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface
from primerl.node.models.architectures import ARCHITECTURES
from primerl.node.models.tensors import bf16_state
from primerl.node.training import lora
from primerl.node.training.model import TrainedModel, check_context
from primerl.node.training.world import World
from primerl.node.verification.auditor import Measured
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.adapters import merge
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.state import Changed, State, digests

TEMPERATURE = 0.8
NATS = {"hf": 1e-4, "vllm": 2e-3, "bf16": 0.1}
"""vLLM rounds Gemma 2's soft caps to a few decimals. In bf16, as its linear attention on a CPU, a mean: another
expert may read a token."""
DOCS = Path(__file__).parents[3] / "docs" / "models.md"
VLLM = EngineConfig(
    type="vllm", max_batch=8, max_model_len=256, vllm={"kv_cache_memory_bytes": 64 << 20}
)
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
EVERY_TIME = ("gemma3_text", "qwen3_5_text")
"""Windows, positions by kind of layer; linear attention: in every CI run, the others before a release."""
STAND_IN = Path(__file__).parents[2] / "support" / "without_images"


Replies = list[tuple[GenerateRequest, Completion]]


async def replies_of(engine: Engine, seed: int) -> Replies:
    """Generate concurrent replies of various lengths to prompts of various lengths."""
    sizes = ((0, 9), (9, 7), (20, 4))
    requests = [
        GenerateRequest(PROMPT[cut:], most, TEMPERATURE, seed + cut, ()) for cut, most in sizes
    ]
    completions = await asyncio.gather(*map(engine.generate, requests))
    return list(zip(requests, completions, strict=True))


def apart(directory: Path, state: State, found: Replies, of: Callable[..., Any] = np.max) -> float:
    """The farthest that a logprob is from transformers', in nats; or what `of` says of all distances."""
    distances: list[float] = []
    for request, completion in found:
        tokens = [*request.prompt, *completion.token_ids]
        wanted = reference_logprobs(directory, state, tokens, TEMPERATURE)[len(request.prompt) :]
        distances += np.abs(np.subtract(wanted, completion.logprobs)).tolist()
    return float(of(distances))


@asynccontextmanager
async def running(engine: Engine, directory: Path) -> AsyncGenerator[Engine]:
    await engine.start(directory, fingerprint="projection")
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class Policies:
    """Two policies of a family, and where the second one differs."""

    family: str
    directory: Path
    """Of the first one."""
    first: State
    second: State
    changed: Changed


def make_policies(family: str, directory: Path) -> Policies:
    first = make_family(family, directory)
    other = {name: replace(one, data=np.roll(one.data, 1)) for name, one in first.items()}
    return Policies(family, directory, first, *stepped(first, other))


FIRST = {family.what: name for name, family in reversed(FAMILIES.items())}
"""The first family with layers of each kind."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in FIRST.values() else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def policies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Of each family in turn."""
    return make_policies(request.param, tmp_path_factory.mktemp(request.param))


async def audited(
    auditor: PrefillCore | VllmAuditor, dtype: str, policies: Policies, found: Replies
) -> list[tuple[Measured, Measured]]:
    """What an audit says of each reply of the second policy, and of the same claimed to be the first one's."""
    await auditor.start(policies.directory, make_run(dtype))
    try:
        items = [item_of(*one, version) for version in (2, 1) for one in found]
        states = {1: policies.first, 2: policies.second}
        told = measured(await auditor.audit(items, states))
    finally:
        await auditor.close()
    return list(zip(told[: len(found)], told[len(found) :], strict=True))


async def test_the_embedded_engine_generates_is_updated_in_place_and_its_work_audited(
    policies: Policies,
) -> None:
    torch.set_num_threads(1)
    directory, first, second = policies.directory, policies.first, policies.second
    async with running(HfEngine(FP32), directory) as engine:
        await engine.load(1, first)
        assert apart(directory, first, await replies_of(engine, 1)) < NATS["hf"]
        await engine.update(2, second, policies.changed)
        found = await replies_of(engine, 2)
        assert apart(directory, second, found) < NATS["hf"]
    for honest, behind in await audited(PrefillCore(FP32), "float32", policies, found):
        assert honest.logprob_max < NATS["hf"]
        assert honest.sampling_max < NATS["hf"]
        assert honest.fingerprint < 0.01 < behind.fingerprint


def test_a_delta_between_two_policies_gives_every_bit_of_the_second(policies: Policies) -> None:
    payload = list(encode_delta(policies.first, policies.second, changed=policies.changed))
    found = applied(policies.first, payload, infos(policies.second))
    assert digests(found) == digests(policies.second)


def test_adapters_merged_into_the_base_compute_what_is_trained(policies: Policies) -> None:
    base, directory = policies.first, policies.directory
    config = LoraConfig(rank=4, alpha=8.0, target_modules=FAMILIES[policies.family].adapters)
    training = TrainingConfig(threads=1, device="cpu", seq_len=64, lora=config)
    attach = partial(lora.attach, config=config, seed=1)
    model = TrainedModel.build(directory, training, World.alone(torch.device("cpu")), attach=attach)
    adapters = lora.adapter_tensors(model.causal)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in adapters.values():
            values = torch.randn(tensor.shape, generator=generator) * 0.1
            tensor.copy_(values.bfloat16().float())
    merged = merge(base, bf16_state(adapters.items()), config)
    assert digests(merged) != digests(base)
    tokens = list(PROMPT)
    wanted = reference_logprobs(directory, merged, tokens, 1.0)[1:]
    causal: Any = model.causal
    ends = torch.tensor([len(tokens)], dtype=torch.int32)
    with torch.no_grad():
        logits = causal(
            input_ids=torch.tensor([tokens]),
            use_cache=False,
            sequence_ends=ends,
            sequence_offsets=torch.tensor([0, len(tokens)], dtype=torch.int32),
        ).logits[0, :-1]
    targets = torch.tensor(tokens[1:])[:, None]
    found = logits.log_softmax(-1).gather(1, targets)[:, 0]
    plain = reference_logprobs(directory, base, tokens, 1.0)[1:]
    # merged weights are rounded to bf16, those that are trained are not: another expert may read a token
    assert float((found - torch.tensor(wanted)).abs().mean()) < 0.03
    assert float((found - torch.tensor(plain)).abs().mean()) > 0.1


@NEEDS_VLLM
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in EVERY_TIME else pytest.mark.nightly)
        for name, family in FAMILIES.items()
        if family.vllm in (ON_CPUS, SINCE_32)
    ],
)
async def test_vllm_generates_is_updated_in_place_and_its_work_audited(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_policies(family, tmp_path)
    directory, first, second = made.directory, made.first, made.second
    config, nats, of = VLLM, NATS["vllm"], np.max
    if "linear" in FAMILIES[family].what:
        config, nats, of = VLLM.model_copy(update={"dtype": "bfloat16"}), NATS["bf16"], np.mean
        if not torch.cpu.get_capabilities().get("avx512_bf16"):
            pytest.skip("vLLM computes linear attention with bf16 instructions")
    if family.startswith("qwen3_5"):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), *sys.path]))
        monkeypatch.syspath_prepend(str(STAND_IN))
    async with running(HostedEngine(config), directory) as engine:
        await engine.load(1, first)
        assert apart(directory, first, await replies_of(engine, 1), of) < nats
        await engine.update(2, second, made.changed)
        found = await replies_of(engine, 2)
        assert apart(directory, second, found, of) < nats < apart(directory, first, found, of)
    auditor = VllmAuditor(config, timeout_s=60.0)
    for honest, behind in await audited(auditor, config.dtype, made, found):
        assert honest.fingerprint < 0.05 < behind.fingerprint


def test_the_table_in_the_docs_is_of_the_families_that_are_trained() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()
    assert table() in DOCS.read_text(), "print it: python -m support.family_cases"


def test_linear_attention_and_context_parallel_are_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    make_family("qwen3_next", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    training = TrainingConfig(device="cpu", seq_len=64, context_parallel=1)
    config = huggingface.load_config(tmp_path)
    check_context(config, training)
    config.num_key_value_heads = 2
    with pytest.raises(EngineError, match=r"set training\.context_parallel to 1"):
        check_context(config, training.model_copy(update={"context_parallel": 2}))
