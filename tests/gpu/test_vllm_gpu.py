"""vLLM on a GPU: bf16, a small random Qwen3, updated in place. The CPU tests hold the details."""

import asyncio
import itertools
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from support.engine_cases import blended, repeating, write_draft_head
from support.family_cases import make_family

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # of vLLM, torch and CUDA, in versions that vary
]

DEADLINE_S = 120.0
TOLERANCE = 0.05
"""Mean absolute difference of a completion's logprobs: bf16 kernels against an fp32 forward pass."""
DISTANCE = 0.03
"""Of a proof made in bf16 to hidden states in fp32."""
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 320,
}
CONFIG = EngineConfig(
    type="vllm",
    dtype="bfloat16",
    max_batch=32,
    max_model_len=512,
    # eager: what is compiled or captured is vLLM's affair, and takes it a minute
    vllm={"gpu_memory_utilization": 0.2, "enforce_eager": True},
)


@dataclass(frozen=True)
class Case:
    """A model directory without weights, and two policies for it."""

    model_dir: Path
    states: tuple[State, State]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    contract = tmp_path_factory.mktemp("contract")
    states: list[State] = []
    for seed in range(2):
        full = tmp_path_factory.mktemp("full")
        huggingface.create(full, SHAPE, seed)
        for name in huggingface.contract_files(full):
            shutil.copyfile(full / name, contract / name)
        states.append(huggingface.policy_state(huggingface.load_model(full)))
    return Case(contract, (states[0], states[1]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(case: Case) -> AsyncIterator[HostedEngine]:
    engine = HostedEngine(CONFIG)
    try:
        await engine.start(case.model_dir, fingerprint="projection")
        yield engine
    finally:
        await engine.close()


def requests(max_tokens: int = 32) -> list[GenerateRequest]:
    prompts = [tuple((7 * index + 3) % 256 for index in range(length)) for length in (1, 40, 300)]
    return [
        GenerateRequest(prompt, max_tokens, temperature, seed, ())
        for seed, prompt in enumerate(prompts)
        for temperature in (0.7, 1.0)
    ]


async def generate_all(engine: HostedEngine, wanted: list[GenerateRequest]) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(engine.generate, wanted))


def differences(case: Case, which: int, one: GenerateRequest, completion: Completion) -> Any:
    """|logprob of vLLM - logprob of transformers| of every token."""
    model: Any = huggingface.model_from_state(case.model_dir, case.states[which], device="cuda")
    tokens = torch.tensor([[*one.prompt, *completion.token_ids]], device="cuda")
    with torch.inference_mode():
        logits = model(input_ids=tokens).logits[0].float() / one.temperature
    logprobs = torch.log_softmax(logits, -1)[len(one.prompt) - 1 : -1].cpu()
    chosen = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (chosen - torch.tensor(completion.logprobs)).abs()


async def test_logprobs_follow_the_weights_through_updates_in_place(
    engine: HostedEngine, case: Case
) -> None:
    for version, which in ((0, 0), (1, 1), (2, 0)):
        await engine.load(version, case.states[which])
        for one, completion in zip(requests(), await generate_all(engine, requests()), strict=True):
            assert float(differences(case, which, one, completion).mean()) < TOLERANCE
            assert float(differences(case, 1 - which, one, completion).mean()) > TOLERANCE
            assert (completion.policy_first, completion.policy_last) == (version, version)


async def test_proofs_are_of_the_hidden_states_that_led_to_the_tokens(
    engine: HostedEngine, case: Case
) -> None:
    await engine.load(5, case.states[0])
    found = await generate_all(engine, requests())
    for which in range(2):
        model: Any = huggingface.model_from_state(case.model_dir, case.states[which], device="cuda")
        for one, completion in zip(requests(), found, strict=True):
            tokens = torch.tensor([[*one.prompt, *completion.token_ids]], device="cuda")
            with torch.inference_mode():
                hidden = model.model(input_ids=tokens).last_hidden_state[0]
            own = hidden[len(one.prompt) - 1 : -1].float().cpu().numpy()
            distance = Projection().compare(completion.proof, own).distance
            assert distance < DISTANCE if which == 0 else distance > 10 * DISTANCE


async def test_after_updates_in_place_logprobs_are_those_of_a_whole_load(
    engine: HostedEngine, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """To the last bit, request by request; nothing fell back to a load."""
    await engine.load(100, case.states[0])
    state = case.states[0]
    before = [await engine.generate(one) for one in requests()]
    with caplog.at_level(logging.INFO, "primerl.node.inference.handover"):
        for seed in range(4):
            state, changed = blended(state, case.states[1], 0.05, seed)
            await engine.update(104, state, changed)
    updated = [await engine.generate(one) for one in requests()]
    assert "whole" not in caplog.text
    await engine.load(104, state)
    assert [await engine.generate(one) for one in requests()] == updated
    assert [one.token_ids for one in updated] != [one.token_ids for one in before]


async def test_a_hundred_updates_beside_generation_lose_no_request(
    engine: HostedEngine, case: Case
) -> None:
    other, changed = blended(case.states[0], case.states[1], 0.1)
    states = [case.states[0], other]
    await engine.load(200, states[0])
    done = asyncio.Event()

    async def generate_until_done(seed: int) -> list[Completion]:
        found: list[Completion] = []
        while not done.is_set():
            found.append(await engine.generate(GenerateRequest((1, 2, 3), 150, 1.0, seed, ())))
        return found

    async with asyncio.timeout(DEADLINE_S):
        callers = [asyncio.create_task(generate_until_done(seed)) for seed in range(16)]
        for version in range(201, 301):
            await engine.update(version, states[version % 2], changed)
        done.set()
        found = await asyncio.gather(*callers)
    for mine in found:
        assert {len(one.token_ids) for one in mine} == {150}
        for one, after in itertools.pairwise(mine):
            assert one.policy_first <= one.policy_last <= after.policy_first
    assert any(one.policy_first < one.policy_last for one in itertools.chain(*found))


@pytest.mark.parametrize("method", ["ngram", "mtp"])
async def test_with_drafts_tokens_logprobs_and_proofs_are_those_without(
    tmp_path: Path, method: str
) -> None:
    """To the last bit with n-grams and batch-invariant kernels, most replies with an MTP head and others.

    And after an update in place.
    """
    # other head sizes than 128: FlashAttention-3 takes keys in other blocks for one row than for several
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    vllm = dict(CONFIG.vllm)
    if method == "mtp":
        random = make_family("glm4_moe", tmp_path, head_dim=128)
        drafts["model"] = str(tmp_path / "base")
        del vllm["enforce_eager"]  # the head is compiled by our doing
        write_draft_head(tmp_path / "base", tmp_path, repeating(random, 64, 0.9))
    else:
        shape = SHAPE | {"tie_word_embeddings": False, "head_dim": 128}
        huggingface.create(tmp_path, shape, 0)
        random = huggingface.policy_state(huggingface.load_model(tmp_path))
        drafts["prompt_lookup_min"] = 1
    states = [random, repeating(random, 64, 0.9)]
    found: list[list[Completion]] = []
    for more in ({}, {"speculative_config": drafts}):
        config = CONFIG.model_copy(
            update={
                "batch_invariant": method == "ngram",
                "vllm": vllm | more,
                "max_batch": 8,
            }
        )
        drafting = HostedEngine(config)
        try:
            await drafting.start(tmp_path, fingerprint="projection")
            await drafting.load(0, states[0])
            first = await generate_all(drafting, requests())
            await drafting.update(1, states[1], dict.fromkeys(states[1]))
            wanted = [
                GenerateRequest(tuple(range(48)), 200, 1.0, seed, (), b"g" * (seed % 2))
                for seed in range(16)
            ]
            found.append(first + await generate_all(drafting, wanted))
            await asyncio.sleep(1)  # statistics come a little later
            stats = drafting.stats()
        finally:
            await drafting.close()
        assert (stats.accepted_tokens > 1000) == bool(more)
    if method == "mtp":
        assert (
            stats.accepted_tokens >= 0.6 * stats.drafted_tokens
        )  # the first state is not the head's
        same = [one.token_ids == other.token_ids for one, other in zip(*found, strict=True)]
        assert sum(same) >= 0.8 * len(same)
        return
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one == other
