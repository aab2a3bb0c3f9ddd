"""vLLM for real: the tokens of the hf engine, and proofs of the hidden states that led to them.

Needs vLLM, and about six minutes: everything holds with speculative decoding as it does without. Its worker
reads prompts in parts of 128 tokens, shares prefixes and has so little room for keys and values that it
preempts.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from support.engine_cases import repeating, sharp, write_draft_head
from support.family_cases import make_family
from support.vllm_cases import DEADLINE_S, LOADS, SHAPE, until

from primerl.node.config.run import EngineConfig
from primerl.node.environments.environment import Branch
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface
from primerl.node.verification.checks import late_samples
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROOM = 10
"""Blocks of 128 tokens for the keys and values of all requests."""
BLOCK_BYTES = 128 * 2 * 2 * 2 * 32 * 4
"""Tokens x layers x (key and value) x heads x size x bytes."""
CONFIG = EngineConfig(
    type="vllm",
    max_batch=8,
    max_model_len=512,
    vllm={"kv_cache_memory_bytes": ROOM * BLOCK_BYTES, "max_num_batched_tokens": 128},
)
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
MTP = "mtp"
"""Drafts of a mixture of experts by its own head; its routes are recorded, too."""
MTP_BLOCK_BYTES = BLOCK_BYTES * 3 // 4
"""Three layers, one of them the head's, and one head of keys and values."""
NEAR = 0.005
"""The furthest that one rounding more or less may take a proof."""


@dataclass(frozen=True)
class Case:
    """A model directory without weights, two policies for it, and a started engine."""

    model_dir: Path
    states: tuple[State, State]
    engine: HostedEngine
    fingerprint: Projection
    drafts: bool
    """It decodes speculatively."""
    routed: bool
    """It is a mixture of experts, whose routes are recorded and whose own head drafts."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        {},
        pytest.param(NGRAM, marks=pytest.mark.nightly),  # other drafts, and the same proofs of them
        MTP,
    ],
    ids=["plain", "ngram", "mtp"],
)
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Case]:
    torch.set_num_threads(1)
    contract = tmp_path_factory.mktemp("contract")
    states: list[State] = []
    headed = request.param == MTP
    for seed in range(2):
        full = tmp_path_factory.mktemp("full")
        if headed:
            states.append(make_family("glm4_moe", full, seed))
        else:
            huggingface.create(full, SHAPE, seed)
            states.append(sharp(huggingface.policy_state(huggingface.load_model(full))))
        for name in huggingface.contract_files(full):
            shutil.copyfile(full / name, contract / name)
    vllm = CONFIG.vllm | ({} if headed else request.param)
    if headed:
        base = tmp_path_factory.mktemp("base") / "model"
        write_draft_head(base, contract, repeating(states[0], 64, 0.9))
        mtp = {"method": "mtp", "model": str(base), "num_speculative_tokens": 3}
        vllm = vllm | {"speculative_config": mtp, "kv_cache_memory_bytes": ROOM * MTP_BLOCK_BYTES}
    engine = HostedEngine(
        CONFIG.model_copy(update={"vllm": vllm, "enable_return_routed_experts": headed})
    )
    try:
        await engine.start(contract, fingerprint="projection")
        yield Case(
            contract, (states[0], states[1]), engine, Projection(), bool(request.param), headed
        )
    finally:
        await engine.close()


def requests(count: int, *, prompt: int, tokens: int) -> list[GenerateRequest]:
    """Prompts of which each pair begins with the same 3/4."""
    shared = 3 * prompt // 4
    return [
        GenerateRequest(
            tuple((7 * (place + (seed // 2 if place < shared else 11 * seed)) + 3) % 256
                  for place in range(prompt)),
            tokens,
            0.7 + 0.1 * (seed % 4),
            2**62 + seed,
            (),
        )
        for seed in range(count)
    ]  # fmt: skip


async def generate_all(case: Case, wanted: list[GenerateRequest]) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(case.engine.generate, wanted))


def hidden_states(case: Case, which: int, one: GenerateRequest, found: Completion) -> NDArray[Any]:
    """That led to each of the tokens, by one plain forward pass of transformers."""
    model: Any = huggingface.model_from_state(case.model_dir, case.states[which])
    tokens = torch.tensor([[*one.prompt, *found.token_ids]])
    with torch.inference_mode():
        hidden = model.model(input_ids=tokens).last_hidden_state[0]
    return hidden[len(one.prompt) - 1 : -1].float().numpy()


def expect_proved(case: Case, which: int, one: GenerateRequest, found: Completion) -> None:
    hidden = hidden_states(case, which, one, found)
    other = hidden_states(case, 1 - which, one, found)
    case.fingerprint.check(found.proof, len(found.token_ids))
    assert case.fingerprint.compare(found.proof, hidden).distance < NEAR
    assert case.fingerprint.compare(found.proof, other).distance > 10 * NEAR
    assert found.spans == ()


async def expect_tokens_of_the_hf_engine(
    case: Case, state: State, wanted: list[GenerateRequest], found: list[Completion]
) -> None:
    hf = HfEngine(
        EngineConfig(device="cpu", max_model_len=512, enable_return_routed_experts=case.routed)
    )
    try:
        await hf.start(case.model_dir)
        await hf.load(0, state)
        theirs = await asyncio.gather(*map(hf.generate, wanted))
    finally:
        await hf.close()
    for one, other in zip(found, theirs, strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        assert one.routes == other.routes
        assert bool(one.routes) == case.routed
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_a_seed_gives_the_tokens_of_the_hf_engine(case: Case) -> None:
    await case.engine.load(0, case.states[0])
    wanted = [
        one
        for number, prompt in enumerate((1, 9, 40, 130))
        for one in requests(16, prompt=prompt, tokens=8 + 11 * number)
    ]
    found = await generate_all(case, wanted)
    await expect_tokens_of_the_hf_engine(case, case.states[0], wanted, found)


async def test_replies_that_repeat_themselves_end_where_they_should(
    case: Case,
) -> None:
    """Stop tokens and limits come in the midst of what is drafted."""
    state = repeating(case.states[0], 64, 0.9)
    await case.engine.load(5, state)
    before = case.engine.stats()
    circle = tuple(range(16))
    wanted = [
        GenerateRequest(circle + circle[: 1 + seed % 16], 40 + seed, 1.0, seed, stop)
        for seed in range(24)
        for stop in ((), (9, 30))
    ]
    wanted.append(GenerateRequest(circle * 31, 512 - 31 * 16, 1.0, 1, ()))  # to the very end
    found = await generate_all(case, wanted)
    await expect_tokens_of_the_hf_engine(case, state, wanted, found)
    assert {one.finish for one in found} == {"stop", "length"}
    model: Any = huggingface.model_from_state(case.model_dir, state)
    for one, completion in zip(wanted, found, strict=True):
        tokens = torch.tensor([[*one.prompt, *completion.token_ids]])
        with torch.inference_mode():
            hidden = model.model(input_ids=tokens).last_hidden_state[0, len(one.prompt) - 1 : -1]
        assert case.fingerprint.compare(completion.proof, hidden.float().numpy()).distance < NEAR
    told = before.generated_tokens + sum(len(one.token_ids) for one in found)
    await until(lambda: case.engine.stats().generated_tokens >= told)
    after = case.engine.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    assert (drafted > 0) == case.drafts
    # a head that draws with the noise of the position is right where it predicts what the model does
    least = 0.97 if case.routed else 0.3
    assert after.accepted_tokens - before.accepted_tokens >= least * drafted


async def test_proofs_hold_for_prompts_in_parts_shared_prefixes_and_short_replies(
    case: Case,
) -> None:
    await case.engine.load(10, case.states[0])
    wanted = [
        *requests(4, prompt=400, tokens=40),
        *requests(4, prompt=20, tokens=33),
        *requests(2, prompt=1, tokens=1),
    ]
    for _ in range(2):  # the second time with the prompts of the first in the cache
        for one, found in zip(wanted, await generate_all(case, wanted), strict=True):
            expect_proved(case, 0, one, found)


async def test_proofs_hold_for_requests_that_were_preempted(case: Case) -> None:
    """All eight begin, and there is not the room for each of them to end."""
    await case.engine.load(20, case.states[1])
    wanted = requests(8, prompt=20, tokens=300)
    assert 8 <= ROOM < 8 * (320 // 128)
    for one, found in zip(wanted, await generate_all(case, wanted), strict=True):
        assert len(found.token_ids) == 300
        expect_proved(case, 1, one, found)


async def test_spans_say_which_weights_led_to_every_token(case: Case) -> None:
    """Versions alternate between two policies."""
    await case.engine.load(100, case.states[0])
    wanted = requests(4, prompt=20, tokens=250)
    tasks = [asyncio.create_task(case.engine.generate(one)) for one in wanted]
    version = 100
    async with asyncio.timeout(DEADLINE_S):
        while not tasks[0].done() and version < 100 + LOADS:
            version += 1
            state = case.states[version % 2]
            if version % 3:
                await case.engine.update(version, state, dict.fromkeys(state))
            else:
                await case.engine.load(version, state)
        completions = await asyncio.gather(*tasks)
    for one, found in zip(wanted, completions, strict=True):
        assert len(found.spans) > 1
        assert found.spans[0][0] == 0
        assert (found.policy_first, found.policy_last) == (found.spans[0][1], found.spans[-1][1])
        hidden = [hidden_states(case, which, one, found) for which in range(2)]
        ends = [start for start, _ in found.spans[1:]] + [len(found.token_ids)]
        for (start, span_version), end in zip(found.spans, ends, strict=True):
            assert start < end
            proof = found.proof[8 * start : 8 * end]
            own, other = (
                case.fingerprint.compare(proof, hidden[which][start:end]).distance
                for which in (span_version % 2, 1 - span_version % 2)
            )
            assert own < NEAR < 0.1 < other


async def test_samples_of_a_group_are_in_order_at_every_update(case: Case) -> None:
    """As trainers check it: however unequal the replies repeat themselves, none runs ahead."""
    states = [repeating(case.states[0], 64, chance) for chance in (0.8, 0.9)]
    await case.engine.load(400, states[0])
    wanted = [
        GenerateRequest(tuple(range(48)), 300, 1.0, seed, (), b"g%d" % (seed // 4))
        for seed in range(8)
    ]
    tasks = [asyncio.create_task(case.engine.generate(one)) for one in wanted]
    version = 400
    async with asyncio.timeout(DEADLINE_S):
        while not any(task.done() for task in tasks) and version < 400 + LOADS:
            version += 1
            await case.engine.load(version, states[version % 2])
            await asyncio.sleep(0.05)
        found = await asyncio.gather(*tasks)
    seen: set[int] = set()
    for four in (found[:4], found[4:]):
        branches = [
            Branch.of_turns(one.token_ids, [True] * len(one.token_ids), one.logprobs, [one])
            for one in four
        ]
        assert late_samples({at: [branch] for at, branch in enumerate(branches)}) == {}
        seen |= {at for one in four for at, _ in one.spans}
    assert len(seen) > 2


async def test_what_others_gave_up_spoils_no_proof(case: Case) -> None:
    await case.engine.load(1000, case.states[0])
    for one in requests(80, prompt=20, tokens=300):
        task = asyncio.create_task(case.engine.generate(one))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    wanted = requests(8, prompt=20, tokens=40)
    for one, found in zip(wanted, await generate_all(case, wanted), strict=True):
        expect_proved(case, 0, one, found)


async def test_weights_that_give_no_numbers_give_no_proof_but_an_error(case: Case) -> None:
    from primerl.node.errors import EngineError
    from primerl.node.weights.state import Tensor

    name = "model.norm.weight"
    broken = dict(case.states[0])
    norm = broken[name]
    broken[name] = Tensor(norm.dtype, norm.shape, np.full_like(norm.data, 0x7FC0))
    await case.engine.load(2000, broken)
    with pytest.raises(EngineError, match="finite"):
        await generate_all(case, requests(1, prompt=5, tokens=3))
    await case.engine.load(2001, case.states[0])
    [one] = requests(1, prompt=5, tokens=3)
    expect_proved(case, 0, one, (await generate_all(case, [one]))[0])
