"""A pipeline of vLLM for real, three stages in processes of their own: needs vLLM, and about a minute."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from support.engine_cases import FP32, MADE, SHAPE, blended, make_qwen3, request
from support.vllm_pipeline_cases import Pipeline, joined, pipeline, plan_of, shape_of

from primerl.node.errors import EngineError
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hf import HfEngine
from primerl.node.models import huggingface
from primerl.node.weights.state import Changed, State

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DEADLINE_S = 240.0
TOKENS = 40
CUTS = [1, 3, 4]
NARROW = shape_of(
    MADE["hidden_size"],
    kv_tokens=256,
    max_step_tokens=48,
    micro_batches=6,
    fingerprint="projection",
)
"""Room for about half of the requests, so that some are preempted, and prompts come in parts."""


@dataclass
class PipelineCase:
    """A pipeline with policy 0, and a single engine's completions under both policies."""

    model_dir: Path
    states: list[State]
    changed: Changed
    wanted: list[list[Completion]]
    made: Pipeline


def requests() -> list[GenerateRequest]:
    """Eight that share a beginning; together longer than the cache. Every third draws from few tokens."""
    asked = [
        request(
            "the same beginning of all of them " + "abcdefgh"[index] * (1 + 4 * index),
            seed=200 + index,
            max_tokens=TOKENS,
            temperature=0.7 + 0.1 * index,
            stop=(),
        )
        for index in range(8)
    ]
    return [
        replace(one, top_k=9, top_p=0.8) if index % 3 == 2 else one
        for index, one in enumerate(asked)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PipelineCase]:
    """Each test leaves the newest policy and a healthy ring."""
    torch.set_num_threads(1)
    shape = SHAPE | {"head_dim": 32, "num_hidden_layers": 4}
    model_dir = tmp_path_factory.mktemp("model")
    states = [make_qwen3(model_dir, 0, shape)]
    other = make_qwen3(tmp_path_factory.mktemp("other"), 1, shape)
    new, changed = blended(states[0], other, 0.05)
    states.append(new)
    engine, wanted = HfEngine(FP32), list[list[Completion]]()
    await engine.start(model_dir)
    for version, state in enumerate(states):
        await engine.load(version, state)
        wanted.append(await asyncio.gather(*map(engine.generate, requests())))
    await engine.close()
    plan = plan_of(NARROW, CUTS)
    async with pipeline(model_dir, plan, fingerprint="projection", delay_s=0.01) as made:
        await made.load(0, states[0])
        await made.join()
        yield PipelineCase(model_dir, states, changed, wanted, made)


async def all_of(made: Pipeline) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(made.head.generate, requests()))


async def begun(made: Pipeline) -> "list[asyncio.Task[Completion]]":
    """All requests, of which some have drawn a few tokens and none has them all."""
    before = made.ring.frames[0]
    tasks = [asyncio.create_task(made.head.generate(one)) for one in requests()]
    async with asyncio.timeout(DEADLINE_S):
        while made.ring.frames[0] < before + TOKENS // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return tasks


def expect_same(found: list[Completion], wanted: list[Completion]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def states_at(
    world: PipelineCase, version: int, layer: int, found: Completion, prompt: Any
) -> torch.Tensor:
    """Return the states [tokens, width] after `layer` layers, by a plain forward pass."""
    model: Any = huggingface.model_from_state(world.model_dir, world.states[version])
    tokens = torch.tensor([[*prompt, *found.token_ids]])
    with torch.inference_mode():
        hidden = model.model(input_ids=tokens, output_hidden_states=True).hidden_states
    return hidden[layer][0, len(prompt) - 1 : -1]


async def test_three_stages_draw_what_one_piece_draws_however_tight_the_cache(
    world: PipelineCase,
) -> None:
    drawing, lanes = asyncio.create_task(all_of(world.made)), 0
    while not drawing.done():
        await asyncio.wait([drawing], timeout=0.05)
        lanes = max(lanes, world.made.head.lanes().lanes)
    expect_same(await drawing, world.wanted[0])
    assert lanes > 1
    assert world.made.head.stats().preemptions > 0
    assert world.made.ring.most_at_once > 1  # micro-batches under way together
    frames = world.made.ring.frames
    assert max(frames) - min(frames) <= 8  # every one passes every stage


async def test_proofs_and_boundaries_are_those_of_the_states_in_one_piece(
    world: PipelineCase,
) -> None:
    prompt = requests()[3]
    found = await world.made.head.generate(prompt)
    hidden = states_at(world, 0, CUTS[-1], found, prompt.prompt)
    assert Projection().compare(found.proof, hidden.numpy()).distance < 0.01
    assert [len(one) for one in found.boundaries] == [8 * TOKENS] * (len(CUTS) - 1)
    from primerl.node.inference.boundary_states import agrees, project

    for layer, claimed in zip(CUTS[:-1], found.boundaries, strict=True):
        own = project(states_at(world, 0, layer, found, prompt.prompt)).numpy()
        assert agrees(claimed, own)
        assert not agrees(claimed, own[::-1])


async def test_a_ring_that_breaks_delays_and_changes_nothing(world: PipelineCase) -> None:
    made = world.made
    tasks = await begun(made)
    made.ring.break_now()
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in tasks)
    with pytest.raises(EngineError, match="is over"):
        await made.head.rejoin(1)
    await made.join()
    async with asyncio.timeout(DEADLINE_S):
        expect_same(await asyncio.gather(*tasks), world.wanted[0])


async def test_an_update_is_one_moment_for_all_stages(world: PipelineCase) -> None:
    made = world.made
    tasks = await begun(made)
    async with asyncio.timeout(DEADLINE_S):
        await made.update(1, world.states[1], world.changed)
        crossing = await asyncio.gather(*tasks)
    assert any(one.spans for one in crossing)
    assert {one.policy_last for one in crossing} <= {0, 1}  # the first may have ended before it
    found = await all_of(made)
    expect_same(found, world.wanted[1])
    assert {one.policy_first for one in found} == {1}


async def test_a_stage_that_dies_is_started_again_and_nothing_is_lost(world: PipelineCase) -> None:
    made = world.made
    tasks = await begun(made)
    os.killpg(made.stages[0].pids[0], signal.SIGKILL)
    before = made.ring.connections[1]
    async with asyncio.timeout(2 * DEADLINE_S):
        await made.ring.back(1, before)
        await joined(made)
        expect_same(await asyncio.gather(*tasks), world.wanted[1])
