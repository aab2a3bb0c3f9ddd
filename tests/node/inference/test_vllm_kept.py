"""vLLM for real, with keys and values that it keeps when its weights change.

Each reply is computed again by transformers with a cache that is cut at the blocks that were whole when the
weights changed: needs vLLM, and two minutes. With a GPU in bf16, else in fp32.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from msgspec import structs
from numpy.typing import NDArray
from support.auditor_cases import make_run
from support.engine_cases import sharp
from support.vllm_cases import DEADLINE_S, SHAPE, until

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface
from primerl.node.verification.auditor import AuditItem, Measured, SampledSpan
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.state import State
from primerl.protocol.manifests import KV_BLOCK

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if GPU else "float32"
BLOCK_BYTES = KV_BLOCK * 2 * 2 * 2 * 32 * (2 if GPU else 4)
"""Tokens x layers x (key and value) x heads x size x bytes."""
SEQUENCES, TOKENS = 8, 160
LONGER = 280
"""Tokens of a reply that is still drawn when a count of the first of them was read, and a version written."""
NEAR = 0.03 if GPU else 0.005
"""The furthest that one rounding more or less may take a proof; in bf16, roundings of every layer."""
SAMPLING, LOGPROB = (0.05, 0.1) if GPU else (1e-4, 1e-3)
"""The furthest that an audit of an honest reply may be from it."""


def config(blocks: int) -> EngineConfig:
    vllm = {"kv_cache_memory_bytes": blocks * BLOCK_BYTES, "max_num_batched_tokens": 64}
    if GPU:
        vllm |= {"gpu_memory_utilization": 0.1, "enforce_eager": True}
    return EngineConfig(
        type="vllm",
        dtype=DTYPE,
        max_batch=SEQUENCES,
        max_model_len=512,
        keep_kv_cache=True,
        vllm=vllm,
    )


@dataclass(frozen=True)
class Case:
    """A model directory without weights, its policies by version, and a started engine."""

    model_dir: Path
    states: Sequence[State]
    engine: HostedEngine


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[60, 30],
    ids=["with room for all", "with room for half of them"],
)
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Case]:
    torch.set_num_threads(1)
    contract = tmp_path_factory.mktemp("contract")
    states: list[State] = []
    for seed in range(4):
        full = tmp_path_factory.mktemp("full")
        huggingface.create(full, SHAPE, seed)
        states.append(sharp(huggingface.policy_state(huggingface.load_model(full))))
        for name in huggingface.contract_files(full):
            shutil.copyfile(full / name, contract / name)
    engine = HostedEngine(config(request.param))
    try:
        await engine.start(contract, fingerprint="projection")
        yield Case(contract, states, engine)
    finally:
        await engine.close()


def requests(first: int, count: int, *, prompt: int = 40) -> list[GenerateRequest]:
    """Requests of which each four have a prompt in common."""
    return [
        GenerateRequest(
            tuple((7 * (place + 13 * (seed // 4)) + 3) % 256 for place in range(prompt)),
            *(TOKENS, 0.9, 2**40 + seed, ()),
        )
        for seed in range(first, first + count)
    ]


def hidden_states(
    case: Case, one: GenerateRequest, found: Completion, *, block: int | None
) -> NDArray[Any]:
    """States that led to each token, by transformers.

    Where the weights change all whole blocks of `block` tokens are kept, and the rest is computed anew; None:
    nothing is kept.
    """
    from transformers import DynamicCache

    tokens = torch.tensor([[*one.prompt, *found.token_ids]])
    spans = found.spans or ((0, found.policy_first),)
    ends = [*(start for start, _ in spans[1:]), len(found.token_ids)]
    cache = DynamicCache()
    rows: list[NDArray[Any]] = []
    for (start, version), end in zip(spans, ends, strict=True):
        first = (
            len(one.prompt) + start - 1
        )  # position whose state leads to the first token of the span
        kept = first // block * block if block and start else 0
        cache = DynamicCache() if kept == 0 else cache
        cache.crop(kept)
        model: Any = huggingface.model_from_state(case.model_dir, case.states[version])
        upto = len(one.prompt) + end - 1
        with torch.inference_mode():
            out = model.model(input_ids=tokens[:, kept:upto], past_key_values=cache)
        rows.append(out.last_hidden_state[0, first - kept :].float().numpy())
    return np.concatenate(rows)


def distance(case: Case, one: GenerateRequest, found: Completion, *, block: int | None) -> float:
    hidden = hidden_states(case, one, found, block=block)
    return Projection().compare(found.proof, hidden).distance


async def completions_across(
    case: Case, wanted: Sequence[GenerateRequest], versions: Sequence[int], *, later: int = 0
) -> list[Completion]:
    """Draw replies while these versions are loaded; the last `later` requests begin after the first load."""
    first, then = wanted[: len(wanted) - later], wanted[len(wanted) - later :]
    before = case.engine.stats().generated_tokens
    tasks = [asyncio.create_task(case.engine.generate(one)) for one in first]
    try:
        async with asyncio.timeout(DEADLINE_S):
            for step, version in enumerate(versions, start=1):
                least = before + 20 * len(first) * step
                await until(lambda least=least: case.engine.stats().generated_tokens >= least)
                await case.engine.load(version, case.states[version])
                tasks += [asyncio.create_task(case.engine.generate(one)) for one in then]
                then = ()
            return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def test_replies_keep_the_whole_blocks_of_every_version(case: Case) -> None:
    await case.engine.load(0, case.states[0])
    wanted = requests(0, SEQUENCES + 4)
    found = await completions_across(case, wanted, [1, 2], later=4)
    crossed = [pair for pair in zip(wanted, found, strict=True) if pair[1].spans]
    assert crossed
    for one, completion in zip(wanted, found, strict=True):
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(completion.spans))
        assert distance(case, one, completion, block=KV_BLOCK) < NEAR
    others = [distance(case, *pair, block=None) for pair in crossed]
    assert max(others) > 10 * NEAR, "the same as if all were computed anew"


def play(one: GenerateRequest, *turns: Completion, question: int = 5) -> AuditItem:
    """Make the branch of a request and its replies, with `question` tokens between them."""
    tokens, spans = list(one.prompt), list[SampledSpan]()
    versions: list[int] = []
    for number, found in enumerate(turns):
        tokens += [9] * question if number else []
        spans.append(SampledSpan(len(tokens), len(tokens) + len(found.token_ids), one.seed))
        tokens += found.token_ids
        changes = [*(found.spans or ((0, found.policy_first),)), (len(found.token_ids), -1)]
        for (start, version), (end, _) in pairwise(changes):
            versions += [version] * (end - start)
    return AuditItem(
        tuple(tokens),
        tuple(spans),
        tuple(logprob for found in turns for logprob in found.logprobs),
        tuple(versions),
        b"".join(found.proof for found in turns),
        temperature=one.temperature,
    )


async def test_an_audit_reads_replies_as_they_were_drawn(case: Case) -> None:
    await case.engine.load(0, case.states[0])
    wanted = requests(100, SEQUENCES)
    first = await completions_across(case, wanted, [1, 2])
    again = [
        replace(one, prompt=(*one.prompt, *found.token_ids, *[9] * 5), max_tokens=LONGER)
        for one, found in zip(wanted[:4], first, strict=False)
    ]
    second = await completions_across(case, again, [3])
    items = [play(one, *turns) for one, *turns in zip(wanted[:4], first, second, strict=False)]
    items += [play(one, found) for one, found in zip(wanted[4:], first[4:], strict=True)]
    assert any(found.spans for found in second)
    states = dict(enumerate(case.states))
    moved = [replace(one, versions=shifted(one.versions)) for one in items]
    for one in await audited(case, items, states):
        assert one.fingerprint < NEAR
        assert one.sampling < SAMPLING
        assert one.logprob < LOGPROB
    lying = await audited(case, moved, states)
    assert all(
        one.fingerprint > NEAR
        for one, before, after in zip(lying, items, moved, strict=True)
        if before.versions != after.versions
    )


def shifted(versions: Sequence[int], tokens: int = KV_BLOCK) -> tuple[int, ...]:
    """Claim that each change of version came later."""
    return (*[versions[0]] * tokens, *versions[:-tokens])


async def audited(
    case: Case, items: Sequence[AuditItem], states: Mapping[int, State]
) -> list[Measured]:
    run = make_run(DTYPE)
    run = structs.replace(
        run,
        proofs=structs.replace(run.proofs, kv_cache="kept"),
        limits=structs.replace(run.limits, max_model_len=512),
    )
    auditor = VllmAuditor(config(60), timeout_s=120.0)
    try:
        await auditor.start(case.model_dir, run)
        found = await auditor.audit(items, states)
    finally:
        await auditor.close()
    assert all(isinstance(one, Measured) for one in found), found
    return [one for one in found if isinstance(one, Measured)]
