"""Exact numerics on vLLM for real: honest work is never rejected, and small cheats are in their first rollout.

Needs vLLM, and about two minutes. Worker and auditor are two engines in processes of their own; a model of four
layers whose distributions are not flat; 64 tokens a rollout, eight rollouts to a prompt.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs
from support import exact_cases
from support.auditor_cases import compared, make_run, measured
from support.engine_cases import make_qwen3
from support.protocol_cases import played_otherwise

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.numerics import config_for_run
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.models.routers import route_shape
from primerl.node.models.routes import pack_routes, unpack_routes
from primerl.node.verification.auditor import AuditItem, evidence
from primerl.node.verification.bounds import proof_contract
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judgement import Judgement, judge
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.adapters import changes
from primerl.node.weights.state import State
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import ProofContract, RunManifest
from primerl.protocol.rollouts import MEASURES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
MIXTURE = SHAPE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HONEST, CROSSED, CHEATED = 192, 64, 32
"""Rollouts."""
ROUNDS = 8
"""Times at most that a version is written while rollouts are drawn, until it meets enough of them."""
OWN, NEXT, OTHER = 1, 2, 9
PROMPT = 40


@dataclass(frozen=True)
class ExactRun:
    """A worker's engine, an auditor, and the bounds of an exact run."""

    contract: ProofContract
    run: RunManifest
    model_dir: Path
    states: Mapping[int, State]
    engine: HostedEngine
    auditor: VllmAuditor

    @property
    def wanted(self) -> list[GenerateRequest]:
        return exact_cases.requests(HONEST, PROMPT, 64, SHAPE["vocab_size"])

    async def judged(self, items: Sequence[AuditItem], *, beside: bool = True) -> list[Judgement]:
        """Audit and judge each as a rollout of its own."""
        items = compared(items, {OWN: [NEXT], NEXT: [OWN]} if beside else {})
        found = measured(await self.auditor.audit(items, self.states))
        for name in MEASURES:
            values = [getattr(one, name) for one in found]
            print(f"{name:14} {min(values):.3g} to {max(values):.3g}")
        rollout = CheckedRollout(0, 0, [], 0.0)
        return [judge(evidence(rollout, [one]), self.contract) for one in found]

    async def cheated(self, state: State) -> list[Judgement]:
        """Work by other weights, which claims to be of OWN."""
        await self.engine.load(OTHER, state)
        try:
            items = exact_cases.claiming(
                await exact_cases.play(self.engine, self.wanted[:CHEATED]), OWN
            )
        finally:
            await self.engine.load(OWN, self.states[OWN])
        return await self.judged(items)


COURTS = {"mixture in bfloat16": ("bfloat16", MIXTURE), "dense in float32": ("float32", SHAPE)}
"""Two engines each, which take a minute to start."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=COURTS)
async def court(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ExactRun]:
    async with opened(tmp_path_factory.mktemp("model"), *COURTS[request.param]) as court:
        yield court


@asynccontextmanager
async def opened(directory: Path, dtype: str, shape: Mapping[str, Any]) -> AsyncGenerator[ExactRun]:
    """In a run that replays the routes of a mixture of experts."""
    first = make_qwen3(directory, 0, shape)
    states = {OWN: first, NEXT: exact_cases.altered(first, exact_cases.stepped(1e-5))}
    config = EngineConfig(type="vllm", dtype=dtype, device="cpu", max_batch=64, max_model_len=256)  # pyright: ignore[reportArgumentType]
    told = RunConfig.model_validate(
        {"engine": config.model_dump(), "verification": {"numerics": "exact"}}
    )
    contract = proof_contract(told)
    run = structs.replace(make_run(dtype), proofs=contract, routes=route_shape(directory))
    run = played_otherwise(run, temperature=1.0)
    engine = HostedEngine(config_for_run(config, run))
    auditor = VllmAuditor(config, timeout_s=240.0)
    try:
        await asyncio.gather(
            engine.start(directory, fingerprint="projection"), auditor.start(directory, run)
        )
        await engine.load(OWN, first)
        yield ExactRun(contract, run, directory, states, engine, auditor)
    finally:
        await engine.close()
        await auditor.close()


async def test_honest_rollouts_are_equal_to_the_last_bit(court: ExactRun) -> None:
    items = await exact_cases.play(court.engine, court.wanted)
    found = await court.judged(items)
    assert [one for one in found if one.reason or one.suspect] == []
    measures = measured(await court.auditor.audit(items, court.states))
    assert {(one.fingerprint, one.sampling_max) for one in measures} == {(0.0, 0.0)}
    # two units in the last place of a logit of 64: in fp32 the head's sums depend on how many rows a step has
    assert max(one.logprob_max for one in measures) < 1.6e-5


async def test_honest_rollouts_that_cross_a_version_are_equal_too(court: ExactRun) -> None:
    first, second = court.states[OWN], court.states[NEXT]
    crossed, items = 0, []
    for _ in range(ROUNDS):  # a busy machine may be told of the tokens when all rollouts have ended
        before = court.engine.stats().generated_tokens
        under_way = asyncio.create_task(exact_cases.play(court.engine, court.wanted[:CROSSED]))
        while not under_way.done() and court.engine.stats().generated_tokens == before:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await court.engine.update(NEXT, second, changes(first, second))
        items = await under_way
        await court.engine.load(OWN, first)
        crossed = sum(len(set(item.versions)) == 2 for item in items)
        if crossed >= CROSSED // 4:
            break
    assert crossed >= CROSSED // 4
    found = await court.judged(items)
    assert [one for one in found if one.reason or one.suspect] == []


async def test_a_temperature_3_percent_higher_is_rejected_at_once(court: ExactRun) -> None:
    hot = [replace(one, temperature=1.03) for one in court.wanted[:CHEATED]]
    found = await court.judged(await exact_cases.play(court.engine, hot))
    assert {one.reason for one in found} <= {Reason.BAD_SAMPLING, Reason.BAD_LOGPROBS}


async def test_weights_one_step_of_a_small_rate_away_are_rejected_at_once(court: ExactRun) -> None:
    found = await court.cheated(exact_cases.altered(court.states[OWN], exact_cases.stepped(1e-6)))
    assert {one.reason for one in found} == {Reason.WRONG_MODEL}


async def test_weights_with_a_low_rank_change_of_a_percent_are_rejected_at_once(
    court: ExactRun,
) -> None:
    found = await court.cheated(exact_cases.altered(court.states[OWN], exact_cases.low_rank(0.01)))
    assert {one.reason for one in found} == {Reason.WRONG_MODEL}


async def test_work_of_the_next_version_is_not_that_of_this_one(court: ExactRun) -> None:
    found = await court.cheated(court.states[NEXT])
    assert {one.reason for one in found} <= {Reason.WRONG_MODEL, Reason.WRONG_POLICY}


async def test_logprobs_off_by_a_thousandth_are_rejected_at_once(court: ExactRun) -> None:
    items = await exact_cases.play(court.engine, court.wanted[:CHEATED])
    found = await court.judged(exact_cases.shifted(items, 0.001))
    assert {one.reason for one in found} == {Reason.BAD_LOGPROBS}


@pytest.mark.parametrize("court", ["dense in float32"], indirect=True, scope="module")
async def test_the_second_best_of_a_near_tie_is_rejected_at_once(court: ExactRun) -> None:
    """One token a rollout, the nearest tie of 64: margins of 0.0002 to 0.05 nats; all else is true."""
    items = await exact_cases.play(court.engine, court.wanted[:CHEATED])
    tied = await exact_cases.near_ties(
        court.auditor, items, court.model_dir, court.states[OWN], dtype=court.contract.dtype
    )
    found = await court.judged(tied, beside=False)
    assert {one.reason for one in found} == {Reason.BAD_SAMPLING}


@pytest.mark.parametrize("court", ["mixture in bfloat16"], indirect=True, scope="module")
async def test_routes_are_equal_to_the_last_bit_and_one_other_expert_is_rejected(
    court: ExactRun,
) -> None:
    shape = court.run.routes
    assert shape is not None
    items = await exact_cases.play(court.engine, court.wanted)
    assert all(len(one.routes) == 64 * shape.token_bytes for one in items)
    measures = measured(await court.auditor.audit(items, court.states))
    assert {(one.routing, one.routing_max) for one in measures} == {(0, 0)}

    def other(number: int, item: AuditItem) -> AuditItem:
        """The last expert of one token in one layer is another one."""
        routes = unpack_routes(item.routes, shape)
        token, layer = number % len(routes), number % shape.layers
        taken = set(routes[token, layer].tolist())
        routes[token, layer, -1] = next(one for one in range(shape.experts) if one not in taken)
        return replace(item, routes=pack_routes(routes, shape))

    forged = [other(number, item) for number, item in enumerate(items[:CHEATED])]
    found = await court.judged(forged)
    assert {one.reason for one in found} == {Reason.BAD_ROUTES}
