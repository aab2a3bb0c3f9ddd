"""The measuring itself: its limits change nothing of what is found, and broken weights are never fine."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from support.auditor_cases import NEAR, OWN, Case, make_case, measured
from support.engine_cases import SHAPE, make_llama, make_qwen3

from primerl.node.ops.errors import EngineError
from primerl.node.verification.auditor import AuditTerms, audit_terms
from primerl.node.verification.replay import Replay
from primerl.node.weights.state import State, Tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return await make_case(tmp_path_factory.mktemp("replay"), "float32")


def replay_of(case: Case) -> AuditTerms:
    return audit_terms(case.model_dir, case.run, "cpu")


async def test_logits_and_branches_a_few_at_a_time_measure_the_same(case: Case) -> None:
    others = {OWN: [NEAR]}
    whole = measured(Replay(replay_of(case)).measure(case.honest, case.states, others))
    small = Replay(replay_of(case), logits=7 * 272, batch_tokens=200, keep_bytes=0)
    for one, other in zip(
        measured(small.measure(case.honest, case.states, others)), whole, strict=True
    ):
        assert one.tokens == other.tokens
        assert one.fingerprint == pytest.approx(other.fingerprint, abs=1e-3)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.sampling == pytest.approx(other.sampling, abs=1e-5)
        assert one.other_policy == pytest.approx(other.other_policy, rel=0.01)


async def test_batches_overlap_without_mixing_versions(case: Case) -> None:
    """A branch of two versions is summed up when the last of its passes is done, whatever came between."""
    count = len(case.item.versions)
    mixed = replace(case.item, versions=[OWN] * (count // 2) + [NEAR] * (count - count // 2))
    items = [mixed, *case.honest]
    whole = Replay(replay_of(case)).measure(items, case.states, {OWN: [NEAR]})
    single = Replay(replay_of(case), batch_tokens=1)
    apart = [single.measure([item], case.states, {OWN: [NEAR]})[0] for item in items]
    for one, other in zip(measured(whole), measured(apart), strict=True):
        assert one.tokens == other.tokens
        assert one.fingerprint == pytest.approx(other.fingerprint, abs=1e-3)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert one.other_policy == pytest.approx(other.other_policy, rel=0.01)
    assert measured(whole)[0].fingerprint > measured(whole)[1].fingerprint


def make_experts(directory: Path, seed: int) -> State:
    shape = SHAPE.model_copy(update={"num_experts": 4, "moe_intermediate_size": 32})
    return make_qwen3(directory, seed, shape)


@pytest.mark.parametrize("make", [make_llama, make_experts])
async def test_models_of_the_general_network_are_measured_too(
    tmp_path: Path, make: Callable[[Path, int], State]
) -> None:
    case = await make_case(tmp_path, "float32", make)
    for one in measured(Replay(replay_of(case)).measure(case.honest, case.states, {OWN: [NEAR]})):
        assert one.fingerprint < 0.01
        assert one.sampling_max < 1e-4
        assert one.logprob_max < 1e-4
        assert one.other_policy < 0


async def test_a_policy_that_is_not_numbers_makes_everything_infinitely_far_off(case: Case) -> None:
    broken = spoilt(case.states[OWN])
    [found] = measured(Replay(replay_of(case)).measure([case.item], {OWN: broken}, {}))
    far = (found.fingerprint, found.sampling_max, found.logprob, found.logprob_max)
    assert far == (inf, inf, inf, inf)
    assert found.sampling == 1.0
    assert found.other_policy == 0.0


async def test_another_policy_that_is_not_numbers_is_left_out(case: Case) -> None:
    states = {OWN: case.states[OWN], NEAR: spoilt(case.states[NEAR])}
    [found] = measured(Replay(replay_of(case)).measure([case.item], states, {OWN: [NEAR]}))
    assert found.other_policy == 0.0
    assert found.fingerprint < 0.01


async def test_a_state_under_a_known_version_is_looked_at(case: Case) -> None:
    replay = Replay(replay_of(case))
    [fine] = measured(replay.measure([case.item], case.states, {}))
    [found] = measured(replay.measure([case.item], {OWN: case.states[NEAR]}, {}))
    assert found.fingerprint > 0.02 > fine.fingerprint


async def test_what_is_not_there_is_said_at_once(case: Case, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        Replay(audit_terms(tmp_path, case.run, "cpu")).prepare()
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="no cuda"):
            Replay(audit_terms(case.model_dir, case.run, "cuda")).prepare()


def spoilt(state: State) -> State:
    """`state` with a NaN in its last norm."""
    name = "model.norm.weight"
    data = state[name].data.copy()
    data[0] = 0x7FC0
    assert data.dtype == np.uint16
    return {**state, name: Tensor("BF16", state[name].shape, data)}
