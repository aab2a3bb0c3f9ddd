"""What stages say of the states that they sent, against a prefill: the first that is off is the liar's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from support.auditor_cases import NEAR, OWN, Case, make_case, measured
from support.crossing_cases import CUTS, coarse, garbage, make_deep, staged
from support.engine_cases import make_llama
from support.prefill_core import PrefillCore

from primerl.node.config.run import EngineConfig
from primerl.node.inference.boundary_states import crossing
from primerl.node.inference.fingerprint import FURTHEST
from primerl.node.verification.auditor import AuditItem, BoundaryClaim, Unreadable, audit_terms
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.replay import Replay
from primerl.node.weights.state import State

pytestmark = pytest.mark.asyncio(loop_scope="module")
NEAREST, BOUND = (BUILT_IN["float32"][level].fingerprint for level in (1, 0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return await make_case(tmp_path_factory.mktemp("deep"), "float32", make_deep)


def replay_of(case: Case) -> Replay:
    return Replay(audit_terms(case.model_dir, case.run, "cpu"))


def stages(case: Case, liar: int = -1, count: int = len(CUTS) + 1, bits: int = 5) -> list[State]:
    """The weights of every stage; those of the liar are coarse."""
    own = case.states[OWN]
    return [coarse(own, bits) if stage == liar else own for stage in range(count)]


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (1, 2, 3)], ids=str)
async def test_what_honest_stages_sent_is_what_a_prefill_finds(
    case: Case, cuts: tuple[int, ...]
) -> None:
    count = len(cuts) + 1
    items = [staged(case, item, stages(case, count=count), cuts) for item in case.honest]
    for one in measured(replay_of(case).measure(items, case.states, {OWN: [NEAR]})):
        assert len(one.boundaries) == len(cuts)
        assert max(one.boundaries) < NEAREST
        assert one.fingerprint < NEAREST


@pytest.mark.parametrize("liar", [0, 1, 2])
async def test_the_first_boundary_that_is_off_is_that_of_the_stage_with_other_weights(
    case: Case, liar: int
) -> None:
    items = [staged(case, item, stages(case, liar)) for item in case.honest]
    for one in measured(replay_of(case).measure(items, case.states, {})):
        outputs = [*one.boundaries, one.fingerprint]
        assert all(output < NEAREST for output in outputs[:liar])
        assert all(output > BOUND for output in outputs[liar:])


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
async def test_what_was_rounded_on_its_way_is_rounded_by_the_auditor_too(
    case: Case, encoding: str
) -> None:
    items = [staged(case, item, stages(case), encoding=encoding) for item in case.honest]  # type: ignore[arg-type]
    wrong = [
        replace(item, boundaries=[replace(one, encoding="raw") for one in item.boundaries])
        for item in items
    ]
    for one in measured(replay_of(case).measure(items, case.states, {})):
        assert max(one.boundaries) < NEAREST
        assert one.fingerprint < NEAREST
        assert one.logprob_max < 1e-3
    for one in measured(replay_of(case).measure(wrong, case.states, {})):
        assert one.fingerprint > BOUND


async def test_bytes_that_are_no_fingerprints_are_as_far_off_as_can_be_and_nothing_else_is(
    case: Case,
) -> None:
    honest = staged(case, case.item, stages(case))
    one = measured(replay_of(case).measure([garbage(honest, 1)], case.states, {}))[0]
    assert one.boundaries[0] < NEAREST
    assert one.boundaries[1] > 0.75 * FURTHEST
    assert one.fingerprint < NEAREST


async def test_branches_of_other_pipelines_and_of_none_do_not_mix(case: Case) -> None:
    one, other, plain, lying = case.honest[:4]
    items = [
        staged(case, one, stages(case)),
        staged(case, other, stages(case, count=2), (2,)),
        plain,
        staged(case, lying, stages(case, 1)),
    ]
    found = measured(replay_of(case).measure(items, case.states, {OWN: [NEAR]}))
    alone = [replay_of(case).measure([item], case.states, {OWN: [NEAR]})[0] for item in items]
    assert [len(answer.boundaries) for answer in found] == [2, 1, 0, 2]
    for answer, by_itself in zip(found, measured(alone), strict=True):
        assert answer.boundaries == pytest.approx(by_itself.boundaries, abs=1e-3)
        assert answer.fingerprint == pytest.approx(by_itself.fingerprint, abs=1e-3)


async def test_a_token_is_compared_under_the_version_that_it_claims(case: Case) -> None:
    item = case.item
    count = len(item.versions)
    old = staged(case, item, [case.states[OWN]] * 3)
    new = staged(case, item, [case.states[NEAR]] * 3)
    half = count // 2
    boundaries = [
        replace(one, proof=one.proof[: 8 * half] + other.proof[8 * half :])
        for one, other in zip(old.boundaries, new.boundaries, strict=True)
    ]
    mixed = replace(item, boundaries=boundaries, versions=[OWN] * half + [NEAR] * (count - half))
    right, wrong = measured(
        replay_of(case).measure([mixed, replace(mixed, versions=item.versions)], case.states, {})
    )
    assert max(right.boundaries) < NEAREST
    assert min(wrong.boundaries) > NEAREST


@pytest.mark.parametrize("layers", [(3, 1), (0, 1), (1, 4), (2, 2)], ids=str)
async def test_boundaries_where_the_model_has_none_spoil_their_branch_only(
    case: Case, layers: tuple[int, int]
) -> None:
    honest = staged(case, case.item, stages(case))
    boundaries = [
        replace(one, layers=layer) for one, layer in zip(honest.boundaries, layers, strict=True)
    ]
    strange, fine = replay_of(case).measure(
        [replace(honest, boundaries=boundaries), honest], case.states, {}
    )
    assert isinstance(strange, Unreadable)
    assert not strange.proof, "the plan is the trainer's: nobody is to blame"
    assert measured([fine])[0].fingerprint < NEAREST


async def test_any_architecture_can_be_looked_into(tmp_path: Path) -> None:
    case = await make_case(tmp_path, "float32", make_llama)
    config = EngineConfig(device="cpu")
    from primerl.node.models import huggingface

    items: list[AuditItem] = []
    for item in case.honest[:3]:
        model = huggingface.model_from_state(
            case.model_dir, case.states[OWN], dtype="float32", device=torch.device("cpu")
        )
        with torch.inference_mode():
            tokens = torch.tensor([item.token_ids])
            states = model(input_ids=tokens, output_hidden_states=True).hidden_states[1][0]
        led = [place - 1 for reply in item.replies for place in range(reply.start, reply.end)]
        items.append(replace(item, boundaries=[BoundaryClaim(1, "raw", crossing(states[led]))]))
    core = PrefillCore(config)
    await core.start(case.model_dir, case.run)
    try:
        for one in measured(await core.audit(items, case.states, {})):
            assert one.boundaries[0] < NEAREST
    finally:
        await core.close()


async def test_states_that_are_no_numbers_are_infinitely_far_off(case: Case) -> None:
    from primerl.node.verification.replay import distances

    honest = staged(case, case.item, stages(case))
    own = np.full((len(honest.versions), 2, 8), np.nan, np.float32)
    assert distances(honest, own) == (np.inf, np.inf)
