"""A model in stages gives what the unsharded one gives, whatever happens to the ring meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    FP32,
    make_llama,
    make_qwen3,
    reference_logprobs,
    request,
    started,
    varied_requests,
)
from pipeline_cases import DEEP, LAYERS, LocalPipeline, Ports, plan_of, shape_of
from update_cases import blended

from primerl.node.engines.engine import Completion, Engine, GenerateRequest
from primerl.node.engines.hf import HfEngine
from primerl.node.engines.pipelined.slices import Slice
from primerl.node.errors import EngineError, EngineLost
from primerl.node.pipeline.frame import Frame, Kind
from primerl.node.pipeline.layers import names_of
from primerl.node.pipeline.place import Place
from primerl.node.weights.state import State
from primerl.protocol.pipelines import PipelinePlan

DEADLINE_S = 60.0
LONG = [request(text, seed=seed, max_tokens=60, stop=()) for seed, text in enumerate("abcabcde")]
"""Some share a prompt."""

Model = tuple[Path, State]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    shape = DEEP.model_copy(update={"tie_word_embeddings": request.param})
    return directory, make_qwen3(directory, 1, shape)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("tied")
    return directory, make_qwen3(directory, 1, DEEP)


async def together(engine: Engine, requests: list[GenerateRequest]) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(engine.generate, requests))


async def alone(model: Model, requests: list[GenerateRequest]) -> list[Completion]:
    """What the unsharded engine gives."""
    engine = await started(HfEngine(FP32), *model, fingerprint="projection")
    try:
        return await together(engine, requests)
    finally:
        await engine.close()


def same(found: list[Completion], wanted: list[Completion]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert [one.finish for one in found] == [one.finish for one in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5, rel=0)


@pytest.mark.parametrize("stages", [2, 3, 4])
async def test_tokens_logprobs_and_proofs_are_those_of_the_unsharded_engine(
    model: Model, stages: int
) -> None:
    requests = varied_requests()
    wanted = await alone(model, requests)
    plan = plan_of(stages, shape_of(fingerprint="projection"))
    engine = await started(LocalPipeline(FP32, plan), *model, fingerprint="projection")
    try:
        found = await together(engine, requests)
    finally:
        await engine.close()
    same(found, wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        # a code may fall to the other side where a sum was made in another order
        pairs = list(zip(mine.proof, theirs.proof, strict=True))
        assert sum(one != other for one, other in pairs) <= 0.01 * len(pairs) + 1
        assert [len(one) for one in mine.boundaries] == [8 * len(mine.token_ids)] * (stages - 1)


SHAPES: dict[str, dict[str, Any]] = {
    "long prompts are read in pieces": {"max_step_tokens": 8},
    "little cache makes requests wait": {"kv_tokens": 256, "max_sequences": 64},
    "one micro-batch at a time": {"micro_batches": 1},
    "many micro-batches": {"micro_batches": 16},
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_shape_of_a_plan_changes_nothing_that_is_drawn(tied: Model, shape: str) -> None:
    requests = varied_requests()
    wanted = await alone(tied, requests)
    engine = await started(LocalPipeline(FP32, plan_of(3, shape_of(**SHAPES[shape]))), *tied)
    try:
        same(await together(engine, requests), wanted)
    finally:
        await engine.close()


# -- faults ---------------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - threads change it, not tasks
            await asyncio.sleep(0.005)


@pytest.fixture
async def pipeline(tied: Model) -> AsyncIterator[LocalPipeline]:
    plan = plan_of(3, shape_of(fingerprint="projection"))
    engine = LocalPipeline(FP32, plan, Ports(3, delay_s=0.002))
    try:
        yield await started(engine, *tied, fingerprint="projection")  # type: ignore[misc]
    finally:
        await engine.close()


async def test_requests_in_flight_when_the_ring_breaks_go_on_where_they_were(
    tied: Model, pipeline: LocalPipeline
) -> None:
    """Twice, and while it is broken others come."""
    wanted = await alone(tied, [*LONG, request(seed=77), request(seed=78)])
    running = [asyncio.create_task(pipeline.generate(one)) for one in LONG]
    for at in range(2):
        before = pipeline.head.stats().generated_tokens
        await until(lambda before=before: pipeline.head.stats().generated_tokens > before + 40)
        assert not any(one.done() for one in running[: len(LONG)])
        pipeline.ports.cut()
        async with asyncio.timeout(DEADLINE_S):
            assert "closed" in await pipeline.head.broken()
        assert pipeline.head.stats().fault == ""
        running.append(asyncio.create_task(pipeline.generate(request(seed=77 + at))))
        pipeline.ports.heal()
        await again(pipeline)
    async with asyncio.timeout(DEADLINE_S):
        found = await asyncio.gather(*running)
    same(found, wanted)
    assert pipeline.head.lanes().replayed > 0  # type: ignore[union-attr]
    for one, theirs in zip(found, wanted, strict=True):
        assert len(one.proof) == len(theirs.proof)
        assert {len(part) for part in one.boundaries} == {len(theirs.proof)}


async def again(pipeline: LocalPipeline) -> None:
    """Rejoin until the ring is whole again; its ports are opened one after the other."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await pipeline.rejoin()
            except EngineLost:
                await asyncio.sleep(0.05)


async def recovers(pipeline: LocalPipeline, words: str) -> None:
    """The chain breaks with `words`; once nobody tampers any more it goes on and answers."""
    waiting = asyncio.create_task(pipeline.generate(request()))
    async with asyncio.timeout(DEADLINE_S):
        assert words in await pipeline.head.broken()
        pipeline.ports.tamper = None
        await pipeline.rejoin()
        assert (await waiting).token_ids


async def test_a_ring_that_gives_nothing_back_is_broken_after_a_while_and_not_for_ever(
    tied: Model,
) -> None:
    engine = LocalPipeline(FP32, plan_of(2, shape_of()), stall_s=1.5)
    try:
        await started(engine, *tied)
        engine.ports.tamper = lambda _, frame: replace(frame, epoch=0)
        await recovers(engine, "nothing came back")
    finally:
        await engine.close()


async def test_a_stage_that_sends_other_states_than_it_signed_for_is_named(
    pipeline: LocalPipeline,
) -> None:
    def lie(rank: int, frame: Frame) -> Frame:
        if frame.kind is not Kind.STEP:
            return frame
        return replace(frame, tensors=(frame.tensors[0] * 1.1,))

    pipeline.ports.tamper = lie
    await recovers(pipeline, "stage 1 sent other states")


ANSWERS: dict[str, Callable[[Frame], Frame]] = {
    "no answer at all": lambda frame: replace(frame, body=b"\xc1"),
    "for other rows": lambda frame: replace(frame, body=b"\x93\xc4\x00\xc4\x00\xc4\x00"),
    "to what was never asked": lambda frame: replace(frame, number=frame.number + 1000),
    "with half a trail": lambda frame: replace(frame, trail=frame.trail[:-1]),
    "another kind": lambda frame: replace(frame, kind=Kind.STEP),
}


@pytest.mark.parametrize("fault", ANSWERS)
async def test_an_answer_that_is_none_breaks_the_chain_and_no_request(
    pipeline: LocalPipeline, fault: str
) -> None:
    pipeline.ports.tamper = lambda _, frame: (
        ANSWERS[fault](frame) if frame.kind is Kind.DRAWN and frame.trail else frame
    )
    await recovers(pipeline, "the last stage")


# -- versions -------------------------------------------------------------------------------------


async def test_a_version_that_a_stage_has_not_ready_keeps_the_chain_from_beginning(
    tied: Model, pipeline: LocalPipeline
) -> None:
    state = tied[1]
    loading = asyncio.create_task(pipeline.head.load(1, state))
    async with asyncio.timeout(DEADLINE_S):
        assert "not 1: prepare it" in await pipeline.head.broken()
        with pytest.raises(EngineLost, match="prepare it"):
            await pipeline.rejoin()
        for stage in pipeline.stages:
            await stage.load(1, state)
            assert (stage.policy_version, stage.prepared) == (0, 1)
        assert not loading.done()
        await pipeline.rejoin()
        await loading
    assert {stage.policy_version for stage in pipeline.stages} == {1}
    assert (await pipeline.generate(request())).policy_first == 1


async def test_after_a_switch_a_completion_goes_on_with_its_whole_context_of_the_new_version(
    tied: Model, pipeline: LocalPipeline, tmp_path: Path
) -> None:
    directory, state = tied
    other, changed = blended(state, make_qwen3(tmp_path, 2, DEEP), 0.1)
    running = [asyncio.create_task(pipeline.generate(one)) for one in LONG]
    await until(lambda: pipeline.head.stats().generated_tokens > 40)
    async with asyncio.timeout(DEADLINE_S):
        await pipeline.update(1, other, changed)
        done = await asyncio.gather(*running)
    for asked, one in zip(LONG, done, strict=True):
        assert (one.policy_first, one.policy_last) == (0, 1)
        (first, zero), (later, version) = one.spans
        assert (first, zero, version) == (0, 0, 1)
        assert 0 < later < len(one.token_ids)
        tokens, prompt = [*asked.prompt, *one.token_ids], len(asked.prompt)
        old, new = (reference_logprobs(directory, by, tokens, 1.0) for by in (state, other))
        wanted = old[prompt : prompt + later] + new[prompt + later :]
        assert one.logprobs == pytest.approx(wanted, abs=2e-5, rel=0)


async def test_several_versions_can_be_ready_and_the_switch_passes_through_all(
    tied: Model, pipeline: LocalPipeline
) -> None:
    directory, state = tied
    states = [state]
    for version in range(1, 6):
        other, changed = blended(states[-1], states[-1], 0.0, version)
        states.append(other)
        for stage in pipeline.stages:
            await stage.update(version, other, changed)
    await pipeline.head.load(5, states[5])
    found = await together(pipeline, varied_requests())
    assert {stage.policy_version for stage in pipeline.stages} == {5}
    wanted = await alone((directory, states[5]), varied_requests())
    same(found, wanted)


async def test_a_policy_that_gives_no_numbers_fails_its_requests_and_not_the_chain(
    tied: Model, pipeline: LocalPipeline
) -> None:
    from primerl.node.tensors import from_torch

    name = "model.layers.0.input_layernorm.weight"
    poisoned = {**tied[1], name: from_torch(torch.full((32,), torch.nan), "BF16")}
    await pipeline.load(1, poisoned)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError, match="not numbers"):
            await pipeline.generate(request())
    await pipeline.load(2, tied[1])
    assert (await together(pipeline, [request()]))[0].policy_first == 2


# -- what does not fit together -------------------------------------------------------------------


async def test_a_model_that_only_vllm_can_share_is_refused_with_that_advice(tmp_path: Path) -> None:
    make_llama(tmp_path, 1)
    engine = LocalPipeline(FP32, plan_of(2, shape_of(), layers=2))
    with pytest.raises(EngineError, match="vllm"):
        await engine.start(tmp_path)
    await engine.close()


PLANS: dict[str, tuple[PipelinePlan, str, str]] = {
    "of another depth": (plan_of(2, shape_of(), layers=4), "", "5 layers|has 5"),
    "of another width": (plan_of(2, shape_of(hidden_size=64)), "", "width 64"),
    "without the fingerprint": (plan_of(2, shape_of()), "projection", "makes none"),
}


@pytest.mark.parametrize("case", PLANS)
async def test_a_plan_for_something_else_is_refused(tied: Model, case: str) -> None:
    plan, fingerprint, words = PLANS[case]
    engine = LocalPipeline(FP32, plan)
    with pytest.raises(EngineError, match=words):
        await engine.start(tied[0], fingerprint=fingerprint)
    await engine.close()


def test_a_stage_holds_what_the_layers_of_its_plan_say_and_needs_nothing_else(model: Model) -> None:
    directory, state = model
    for stages in (2, 3):
        plan = plan_of(stages, shape_of())
        for rank in range(stages):
            held = Slice(Place(plan, rank, ""), "cpu")
            held.open(directory)
            share = names_of(plan.stages[rank], LAYERS, state.keys())
            held.write(held.prepare_load(0, {name: state[name] for name in share}))
            assert set(held.network.places) == share
