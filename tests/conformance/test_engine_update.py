"""update() for every engine: what is written in place equals what is loaded whole."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conformance.engine_factories import Case
from support.engine_cases import blended, request, varied_requests

from primerl.node.errors import EngineError
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.weights.state import Changed, State, Tensor

DEADLINE_S = 240.0
SHARE = 0.05
UPDATES = 30

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


async def one_by_one(engine: Engine, requests: list[GenerateRequest]) -> list[Completion]:
    """Never in company, so that not even rounding may differ."""
    async with asyncio.timeout(DEADLINE_S):
        return [await engine.generate(one) for one in requests]


async def test_after_updates_an_engine_equals_a_fresh_one_whose_first_update_or_load_is_the_new_state(
    engine: Engine, case: Case
) -> None:
    """To the last bit of every logprob, through a chain of updates and back again."""
    states, changes = [case.states[0]], []
    for seed in range(3):
        state, changed = blended(states[-1], case.states[1], SHARE, seed)
        states.append(state)
        changes.append(changed)
    old = await one_by_one(engine, varied_requests())
    for version, (state, changed) in enumerate(zip(states[1:], changes, strict=True), 1):
        await engine.update(version, state, changed)
    updated = await one_by_one(engine, varied_requests())
    for version, (state, changed) in enumerate(zip(states[-2::-1], changes[::-1], strict=True), 4):
        await engine.update(version, state, changed)
    back = await one_by_one(engine, varied_requests())
    assert engine.policy_version == 6

    fresh = case.factory.engine()
    try:
        await fresh.start(case.model_dir)
        assert fresh.policy_version == -1
        with pytest.raises(EngineError):
            await fresh.generate(request())
        await fresh.update(3, states[-1], {})  # holds nothing yet: it loads all of it
        assert await one_by_one(fresh, varied_requests()) == updated
        await fresh.load(3, states[-1])
        assert await one_by_one(fresh, varied_requests()) == updated
    finally:
        await fresh.close()
    assert [one.token_ids for one in updated] != [one.token_ids for one in old]
    if case.factory.real:
        stamped = [replace(one, policy_first=6, policy_last=6) for one in old]
        assert back == stamped


async def test_what_changed_as_a_whole_and_what_did_not_change_at_all(
    engine: Engine, case: Case
) -> None:
    await engine.update(1, case.states[1], dict.fromkeys(case.states[1]))
    whole = await one_by_one(engine, varied_requests())
    await engine.update(2, case.states[1], {})
    again = await one_by_one(engine, varied_requests())
    await engine.load(3, case.states[1])
    loaded = await one_by_one(engine, varied_requests())
    assert {one.policy_first for one in again} == {2}
    if case.factory.real:
        assert [one.logprobs for one in whole] == [one.logprobs for one in loaded]
        assert [one.logprobs for one in again] == [one.logprobs for one in loaded]


async def test_updates_beside_generation_lose_no_request_and_keep_the_stamps_true(
    engine: Engine, case: Case
) -> None:
    """Versions only rise; odd ones are one policy and even ones the other."""
    other, changed = blended(case.states[0], case.states[1], 2 * SHARE)
    states = [case.states[0], other]
    alone: dict[int, list[int]] = {}
    for version, state in enumerate(states):
        await engine.update(version, state, changed)
        alone[version] = (await one_by_one(engine, [request()]))[0].token_ids

    seen = set[int]()

    async def generate_until_done(done: asyncio.Event) -> list[Completion]:
        found: list[Completion] = []
        while not done.is_set():
            found.append(await engine.generate(request()))
            seen.add(found[-1].policy_first)
        return found

    async with asyncio.timeout(DEADLINE_S):
        done = asyncio.Event()
        callers = [asyncio.create_task(generate_until_done(done)) for _ in range(4)]
        for version in itertools.count(2):
            await engine.update(version, states[version % 2], changed)
            assert engine.policy_version == version
            await asyncio.sleep(0.002)
            if version > UPDATES and len(seen) > 2:
                break
        done.set()
        found = await asyncio.gather(*callers)
    if case.factory.real:
        assert alone[0] != alone[1]
    for mine in found:
        for before, after in itertools.pairwise(mine):
            assert before.policy_first <= before.policy_last <= after.policy_first
    for one in itertools.chain(*found):
        assert len(one.token_ids) == len(one.logprobs) > 0
        if one.policy_first == one.policy_last:
            # A scripted engine goes by the version, not by the weights: one version, one answer.
            version = one.policy_first % 2 if case.factory.real else one.policy_first
            assert one.token_ids == alone.setdefault(version, one.token_ids)


Fault = Callable[[State], tuple[State, Changed]]
EMBEDDING = "model.embed_tokens.weight"


def at(*positions: int) -> Changed:
    return {EMBEDDING: np.array(positions)}


FAULTS: dict[str, Fault] = {
    "a name of another model": lambda state: (state, {"model.other.weight": None}),
    "a position past the end": lambda state: (state, at(0, state[EMBEDDING].data.size)),
    "a negative position": lambda state: (state, at(-1, 3)),
    "positions of another type": lambda state: (state, {EMBEDDING: np.array([0.0, 1.0])}),
    "positions of another shape": lambda state: (state, {EMBEDDING: np.array([[0, 1]])}),
}
MISFITS: dict[str, Fault] = {
    "a tensor missing": lambda state: (without(state, "model.norm.weight"), {EMBEDDING: None}),
    "another shape": lambda state: (transposed(state), {EMBEDDING: None}),
}


def without(state: State, name: str) -> State:
    return {other: tensor for other, tensor in state.items() if other != name}


def transposed(state: State) -> State:
    tensor = state[EMBEDDING]
    return {**state, EMBEDDING: Tensor(tensor.dtype, tensor.shape[::-1], tensor.data)}


async def test_an_update_that_does_not_fit_is_refused_and_changes_nothing(
    engine: Engine, case: Case
) -> None:
    before = await one_by_one(engine, varied_requests())
    for name, fault in (FAULTS | MISFITS if case.factory.real else FAULTS).items():
        state, changed = fault(case.states[1])
        with pytest.raises(EngineError):
            await engine.update(1, state, changed)
        assert engine.policy_version == 0, name
        assert await one_by_one(engine, varied_requests()[:1]) == before[:1], name
    assert await one_by_one(engine, varied_requests()) == before
    await engine.update(1, case.states[1], dict.fromkeys(case.states[1]))
    assert engine.policy_version == 1


async def test_an_engine_that_is_not_started_updates_nothing(case: Case) -> None:
    with pytest.raises(EngineError):
        await case.factory.engine().update(0, case.states[0], {})
