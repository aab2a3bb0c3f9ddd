"""Measuring by a prefill: limits change nothing, broken weights are never fine, liars among stages show."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from support.auditor_cases import (
    CUTS,
    NEAR,
    OWN,
    Case,
    coarse,
    compared,
    garbage,
    make_case,
    make_deep,
    measured,
    staged,
)
from support.engine_cases import SHAPE, make_llama, make_qwen3

from primerl.node.errors import EngineError
from primerl.node.inference.boundary_states import pack_projected, project
from primerl.node.inference.fingerprint import FURTHEST, Compared, Projection
from primerl.node.inference.model import LanguageModel
from primerl.node.models import huggingface
from primerl.node.verification.auditor import (
    AuditItem,
    BoundaryClaim,
    Measured,
    SampledSpan,
    Unreadable,
    audit_terms,
)
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.measures import (
    FLOOR,
    check_items,
    compare_replies,
    distances,
    summarize,
)
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State, Tensor


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return await make_case(tmp_path_factory.mktemp("prefill"), "float32")


def prefill_of(case: Case, **limits: int) -> PrefillAudit:
    return PrefillAudit(audit_terms(case.model_dir, case.run, "cpu"), **limits)


def alike(one: Measured, other: Measured) -> None:
    """The same but for rounding."""
    assert one.tokens == other.tokens
    assert one.fingerprint == pytest.approx(other.fingerprint, abs=1e-3)
    assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert one.sampling == pytest.approx(other.sampling, abs=1e-5)
    assert one.other_policy == pytest.approx(other.other_policy, rel=0.01)
    assert one.boundaries == pytest.approx(other.boundaries, abs=1e-3)


@pytest.mark.parametrize(
    "limits", [{"logits": 7 * 272, "batch_tokens": 200, "keep_bytes": 0}, {"batch_tokens": 1}]
)
def test_logits_and_branches_a_few_at_a_time_measure_the_same(
    case: Case, limits: dict[str, int]
) -> None:
    """A branch of two versions is summed up when the last of its passes is done, whatever came between."""
    count = len(case.item.versions)
    mixed = replace(case.item, versions=[OWN] * (count // 2) + [NEAR] * (count - count // 2))
    items = compared([mixed, *case.honest], {OWN: [NEAR]})
    whole = measured(prefill_of(case).measure(items, case.states))
    parts = measured(prefill_of(case, **limits).measure(items, case.states))
    for one, other in zip(parts, whole, strict=True):
        alike(one, other)
    assert whole[0].fingerprint > whole[1].fingerprint


def make_experts(directory: Path, seed: int) -> State:
    shape = SHAPE | {"num_experts": 4, "moe_intermediate_size": 32}
    return make_qwen3(directory, seed, shape)


@pytest.mark.parametrize("make", [make_llama, make_experts])
async def test_models_of_the_general_network_are_measured_too(
    tmp_path: Path, make: Callable[[Path, int], State]
) -> None:
    case = await make_case(tmp_path, "float32", make)
    for one in measured(
        prefill_of(case).measure(compared(case.honest, {OWN: [NEAR]}), case.states)
    ):
        assert one.fingerprint < 0.01
        assert one.sampling_max < 1e-4
        assert one.logprob_max < 1e-4
        assert one.other_policy < 0


def test_a_policy_that_is_not_numbers_makes_everything_infinitely_far_off(case: Case) -> None:
    broken = spoilt(case.states[OWN])
    [found] = measured(prefill_of(case).measure([case.item], {OWN: broken}))
    far = (found.fingerprint, found.sampling_max, found.logprob, found.logprob_max)
    assert far == (inf, inf, inf, inf)
    assert found.sampling == 1.0
    assert found.other_policy == 0.0


def test_another_policy_that_is_not_numbers_is_left_out(case: Case) -> None:
    states = {OWN: case.states[OWN], NEAR: spoilt(case.states[NEAR])}
    [found] = measured(prefill_of(case).measure(compared([case.item], {OWN: [NEAR]}), states))
    assert found.other_policy == 0.0
    assert found.fingerprint < 0.01


def test_a_state_under_a_known_version_is_looked_at(case: Case) -> None:
    prefill = prefill_of(case)
    [fine] = measured(prefill.measure([case.item], case.states))
    [found] = measured(prefill.measure([case.item], {OWN: case.states[NEAR]}))
    assert found.fingerprint > 0.02 > fine.fingerprint


@pytest.mark.usefixtures("small_heap")
def test_the_network_of_a_state_that_is_gone_is_written_anew_and_measures_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = measured(prefill_of(case).measure([case.item], case.states))
    prefill = prefill_of(case)
    copied = {
        name: Tensor(tensor.dtype, tensor.shape, tensor.data)
        for name, tensor in case.states[NEAR].items()
    }
    prefill.measure([replace(case.item, versions=[NEAR] * len(case.item.versions))], {NEAR: copied})
    del copied
    gc.collect()
    monkeypatch.setattr(LanguageModel, "build", None)
    assert measured(prefill.measure([case.item], case.states)) == [whole]


def test_where_one_network_fits_it_is_written_anew_for_each_version(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    [whole] = measured(prefill_of(case).measure([case.item], case.states))
    prefill = prefill_of(case, keep_bytes=1)
    other = replace(case.item, versions=[NEAR] * len(case.item.versions))
    prefill.measure([other], case.states)
    monkeypatch.setattr(LanguageModel, "build", None)
    for _ in range(2):
        assert measured(prefill.measure([case.item], case.states)) == [whole]
        [found] = measured(prefill.measure([other], case.states))
        assert found.fingerprint > 0.02 > whole.fingerprint


def test_a_missing_model_or_gpu_is_an_error_at_once(case: Case, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        PrefillAudit(audit_terms(tmp_path, case.run, "cpu")).prepare()
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="no cuda"):
            PrefillAudit(audit_terms(case.model_dir, case.run, "cuda")).prepare()


def spoilt(state: State) -> State:
    """`state` with a NaN in its last norm."""
    name = "model.norm.weight"
    data = state[name].data.copy()
    data[0] = 0x7FC0
    assert data.dtype == np.uint16
    return {**state, name: Tensor("BF16", state[name].shape, data)}


# -- boundaries of a pipeline ----------------------------------------------------------------------

NEAREST, BOUND = (BUILT_IN["float32"][level].fingerprint for level in (1, 0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deep(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return await make_case(tmp_path_factory.mktemp("deep"), "float32", make_deep)


def stages(deep: Case, liar: int = -1, count: int = len(CUTS) + 1, bits: int = 5) -> list[State]:
    """The weights of every stage; those of the liar are coarse."""
    own = deep.states[OWN]
    return [coarse(own, bits) if stage == liar else own for stage in range(count)]


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (1, 2, 3)], ids=str)
def test_what_honest_stages_sent_is_what_a_prefill_finds(deep: Case, cuts: tuple[int, ...]) -> None:
    count = len(cuts) + 1
    items = [staged(deep, item, stages(deep, count=count), cuts) for item in deep.honest]
    for one in measured(prefill_of(deep).measure(compared(items, {OWN: [NEAR]}), deep.states)):
        assert len(one.boundaries) == len(cuts)
        assert max(one.boundaries) < NEAREST
        assert one.fingerprint < NEAREST


@pytest.mark.parametrize("liar", [0, 1, 2])
def test_the_first_boundary_that_is_off_is_that_of_the_stage_with_other_weights(
    deep: Case, liar: int
) -> None:
    items = [staged(deep, item, stages(deep, liar)) for item in deep.honest]
    for one in measured(prefill_of(deep).measure(items, deep.states)):
        outputs = [*one.boundaries, one.fingerprint]
        assert all(output < NEAREST for output in outputs[:liar])
        assert all(output > BOUND for output in outputs[liar:])


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
def test_what_was_rounded_on_its_way_is_rounded_by_the_auditor_too(
    deep: Case, encoding: str
) -> None:
    items = [staged(deep, item, stages(deep), encoding=encoding) for item in deep.honest]  # type: ignore[arg-type]
    wrong = [
        replace(item, boundaries=[replace(one, encoding="raw") for one in item.boundaries])
        for item in items
    ]
    for one in measured(prefill_of(deep).measure(items, deep.states)):
        assert max(one.boundaries) < NEAREST
        assert one.fingerprint < NEAREST
        assert one.logprob_max < 1e-3
    for one in measured(prefill_of(deep).measure(wrong, deep.states)):
        assert one.fingerprint > BOUND


def test_bytes_that_are_no_fingerprints_are_as_far_off_as_can_be_and_nothing_else_is(
    deep: Case,
) -> None:
    honest = staged(deep, deep.item, stages(deep))
    one = measured(prefill_of(deep).measure([garbage(honest, 1)], deep.states))[0]
    assert one.boundaries[0] < NEAREST
    assert one.boundaries[1] > 0.75 * FURTHEST
    assert one.fingerprint < NEAREST


def test_branches_of_other_pipelines_and_of_none_do_not_mix(deep: Case) -> None:
    one, other, plain, lying = deep.honest[:4]
    items = [
        staged(deep, one, stages(deep)),
        staged(deep, other, stages(deep, count=2), (2,)),
        plain,
        staged(deep, lying, stages(deep, 1)),
    ]
    items = compared(items, {OWN: [NEAR]})
    found = measured(prefill_of(deep).measure(items, deep.states))
    alone = [prefill_of(deep).measure([item], deep.states)[0] for item in items]
    assert [len(answer.boundaries) for answer in found] == [2, 1, 0, 2]
    for answer, by_itself in zip(found, measured(alone), strict=True):
        alike(answer, by_itself)


def test_a_token_is_compared_under_the_version_that_it_claims(deep: Case) -> None:
    item = deep.item
    count = len(item.versions)
    old = staged(deep, item, [deep.states[OWN]] * 3)
    new = staged(deep, item, [deep.states[NEAR]] * 3)
    half = count // 2
    boundaries = [
        replace(one, proof=one.proof[: 8 * half] + other.proof[8 * half :])
        for one, other in zip(old.boundaries, new.boundaries, strict=True)
    ]
    mixed = replace(item, boundaries=boundaries, versions=[OWN] * half + [NEAR] * (count - half))
    right, wrong = measured(
        prefill_of(deep).measure([mixed, replace(mixed, versions=item.versions)], deep.states)
    )
    assert max(right.boundaries) < NEAREST
    assert min(wrong.boundaries) > NEAREST


@pytest.mark.parametrize("layers", [(3, 1), (0, 1), (1, 4), (2, 2)], ids=str)
def test_boundaries_where_the_model_has_none_spoil_their_branch_only(
    deep: Case, layers: tuple[int, int]
) -> None:
    honest = staged(deep, deep.item, stages(deep))
    boundaries = [
        replace(one, layers=layer) for one, layer in zip(honest.boundaries, layers, strict=True)
    ]
    strange, fine = prefill_of(deep).measure(
        [replace(honest, boundaries=boundaries), honest], deep.states
    )
    assert isinstance(strange, Unreadable)
    assert not strange.proof, "the plan is the trainer's: no worker is to blame"
    assert measured([fine])[0].fingerprint < NEAREST


async def test_any_architecture_can_be_looked_into(tmp_path: Path) -> None:
    deep = await make_case(tmp_path, "float32", make_llama)
    items: list[AuditItem] = []
    for item in deep.honest[:3]:
        model = huggingface.model_from_state(
            deep.model_dir, deep.states[OWN], dtype="float32", device=torch.device("cpu")
        )
        with torch.inference_mode():
            tokens = torch.tensor([item.token_ids])
            states = model(input_ids=tokens, output_hidden_states=True).hidden_states[1][0]
        led = [place - 1 for reply in item.replies for place in range(reply.start, reply.end)]
        items.append(
            replace(
                item, boundaries=[BoundaryClaim(1, "raw", pack_projected(project(states[led])))]
            )
        )
    for one in measured(prefill_of(deep).measure(items, deep.states)):
        assert one.boundaries[0] < NEAREST


def test_states_that_are_no_numbers_are_infinitely_far_off(deep: Case) -> None:
    honest = staged(deep, deep.item, stages(deep))
    own = np.full((len(honest.versions), 2, 8), np.nan, np.float32)
    assert distances(honest, own) == (inf, inf)


# -- from tokens to a branch -----------------------------------------------------------------------


def reply(
    own: float = 1.0, *others: float, tokens: int = 1, distance: float = 0.0
) -> tuple[int, Compared]:
    """The comparison of one reply, over ten samples."""
    return tokens, Compared(distance, 10, own, others, (0.0,) * 7)


def measure(
    margins: Sequence[float] = (0.0,),
    apart: Sequence[float] = (),
    compared: Sequence[tuple[int, Compared]] = (),
) -> Measured:
    off = np.array(apart or [0.0] * len(margins))
    [found] = summarize(
        [np.array(margins)], [off.tolist()], [off * 0], [compared or [reply(tokens=len(margins))]]
    )
    return found


def test_a_mean_is_over_64_tokens_at_least() -> None:
    assert measure([0.32]).sampling == pytest.approx(0.32 / 64)
    assert measure([0.5] * 128).sampling == pytest.approx(0.5)
    assert measure([0.0], apart=[-3.2]).logprob == pytest.approx(3.2 / 64)
    assert measure([0.0] * 2, apart=[-1.5, 1.5]).logprob_max == 1.5


def test_one_token_adds_at_most_a_nat_to_the_mean_margin() -> None:
    found = measure([20.0, 0.0])
    assert (found.sampling, found.sampling_max) == (1 / 64, 20.0)


@pytest.mark.parametrize("odd", [nan, inf, -inf])
def test_what_is_not_a_number_is_infinite(odd: float) -> None:
    states = np.full((2, 7), odd, np.float32)
    proof = Projection().make(np.ones((2, 8), np.float32))
    fine = np.ones((2, 7), np.float32)
    # beside a branch that is well, and stays so
    compared = compare_replies([[(proof, 2)]] * 2, [states, fine], [[], []])
    margins, apart = [np.array([0.0, odd]), np.zeros(2)], [np.array([odd, 0.0]), np.zeros(2)]
    found, well = summarize(margins, [one.tolist() for one in apart], [np.zeros(2)] * 2, compared)
    assert (len(found.means), len(well.means)) == (0, 9)
    assert (well.sampling_max, well.logprob_max, well.logprob, well.sampling) == (0, 0, 0, 0)
    assert well.fingerprint < inf
    assert (found.sampling_max, found.logprob_max, found.logprob) == (inf, inf, inf)
    assert found.sampling == 1 / 64
    assert found.fingerprint == inf
    [[(_, rest)]] = compare_replies([[(proof, 2)]], [fine], [[states]])
    assert rest.others == ()


def test_the_distance_is_the_root_mean_square_over_64_tokens_at_least() -> None:
    found = measure(
        [0.0] * 4, compared=[reply(tokens=1, distance=3.0), reply(tokens=3, distance=1.0)]
    )
    assert found.fingerprint == pytest.approx(((9 + 3) / 64) ** 0.5)
    assert measure(compared=[reply(distance=nan)]).fingerprint == inf


def line(claimed: NDArray[np.float64], own: NDArray[np.float64]) -> tuple[float, ...]:
    """The means of logprobs of a branch."""
    [found] = summarize([own * 0], [claimed.tolist()], [own], [[reply(tokens=len(own))]])
    return found.means[:2]


def test_means_of_logprobs_keep_their_sign_and_tell_a_temperature() -> None:
    own = -np.linspace(0.0, 4.0, 128)
    assert line(own, own) == (0.0, 0.0)
    assert line(own - 0.05, own) == pytest.approx((-0.05, 0.0), abs=1e-12)
    noise = 0.05 * (-1.0) ** np.arange(128)
    assert line(own + noise, own) == pytest.approx((0.0, 0.0), abs=2e-3)
    shift, trend = line(own / 1.03, own)
    assert trend == pytest.approx(-0.03, abs=1e-3)
    assert shift > 0
    few = line(own[:2], own[:2] - 3.2)
    assert few[0] == pytest.approx(2 / 64), "a token adds at most a nat, over 64 tokens at least"


def test_a_branch_of_equal_logprobs_has_no_slope() -> None:
    own = np.full(64, -0.1)
    own[0] -= 1e-6
    _, trend = line(own * 0 - 0.2, own)
    assert abs(trend) < 1e-6


def test_the_shift_of_states_is_what_does_not_scatter() -> None:
    states = np.random.default_rng(1).normal(size=(256, 64)).astype(np.float32)
    scatter = np.random.default_rng(2).normal(size=states.shape).astype(np.float32)
    steady = np.random.default_rng(3).normal(size=64).astype(np.float32)
    shifts: list[float] = []
    for off in (0 * scatter, 0.05 * scatter, 0.05 * steady):
        found = Projection().compare(Projection().make(states + off), states)
        shifts.append(float(np.linalg.norm(found.shift)) / len(states))
    nothing, noise, other_weights = shifts
    assert nothing < 1e-3
    assert noise < 0.02
    assert other_weights > 5 * noise
    far = Projection().compare(Projection().make(-1000 * states), states)
    assert np.linalg.norm(far.shift) < len(states), "a token adds at most a vector of length 1"


def test_the_likeliest_other_policy_counts_over_all_replies() -> None:
    found = measure([0.0] * 2, compared=[reply(1.0, 2.0, 0.5)] * 2)
    assert found.other_policy == pytest.approx(2 * 5 * np.log(2), rel=1e-4)
    assert measure(compared=[reply(1.0, 2.0)]).other_policy < 0
    assert measure(compared=[reply(1.0)]).other_policy == 0.0


def test_residuals_below_all_resolution_tell_no_policies_apart() -> None:
    assert measure(compared=[reply(0.0, 0.0)]).other_policy == 0.0
    assert 0 < measure(compared=[reply(FLOOR, 0.0)]).other_policy < 1
    assert measure(compared=[reply(nan, 1.0)]).other_policy == inf


def test_a_proof_has_the_lengths_of_the_replies() -> None:
    replies = [SampledSpan(1, 3, 0), SampledSpan(4, 5, 0)]
    make = Projection().make
    proof = make(np.ones((2, 8), np.float32)) + make(np.ones((1, 8), np.float32))
    good = AuditItem([0] * 5, replies, [0.0] * 3, [1] * 3, proof)

    def checked(proof: bytes) -> bool | None:
        item = AuditItem([0] * 5, replies, [0.0] * 3, [1] * 3, proof)
        [_, fault, last] = check_items([good, item, good], 1, 0)
        assert last is None, "a bad proof does not spoil others that are checked with it"
        return fault and fault.proof

    assert checked(proof) is None
    assert checked(proof[:-1])
    assert checked(b"\xff" * len(proof))
