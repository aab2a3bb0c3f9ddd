"""One suite for every auditor of auditor_factories.py: honest work measures nothing, a cheat what it did."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from conformance.auditor_factories import AUDITORS
from support.auditor_cases import (
    FAR,
    NEAR,
    OWN,
    TEMPERATURE,
    Case,
    compared,
    generate,
    make_case,
    measured,
    with_token,
)
from support.engine_cases import SHAPE, make_qwen3

from primerl.node.errors import EngineError
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.verification.auditor import AuditItem, Auditor, Measured, Unreadable

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMERICS = {
    "float32": dict(fingerprint=0.004, sampling=1e-6, sampling_max=1e-4, logprob=1e-5),
    "bfloat16": dict(fingerprint=0.03, sampling=0.01, sampling_max=0.5, logprob=0.05),
}
"""Honest branches are below these, far below what any cheat here does."""
VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed"),
]
KINDS = [
    ("core", "float32"),
    ("child", "bfloat16"),
    pytest.param(("vllm", "float32"), marks=VLLM),
    pytest.param(("vllm", "bfloat16"), marks=[pytest.mark.nightly, *VLLM[1:]]),
]
WIDE = SHAPE | {"head_dim": 32}
"""vLLM without a GPU computes no smaller attention heads."""


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind))
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Case:
    shape = WIDE if kind[0] == "vllm" else SHAPE
    make = partial(make_qwen3, shape=shape)
    return await make_case(tmp_path_factory.mktemp("auditor"), kind[1], make)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def auditor(kind: tuple[str, str], case: Case) -> AsyncIterator[Auditor]:
    auditor = AUDITORS[kind[0]]()
    await auditor.start(case.model_dir, case.run)
    yield auditor
    await auditor.close()


_drawn: dict[tuple[Path, int, float], list[AuditItem]] = {}
"""Replies of drawn(): several tests ask for the same."""


async def replies_of(case: Case, version: int, temperature: float = TEMPERATURE) -> list[AuditItem]:
    """Replies of a policy that claim to be of OWN."""
    key = case.model_dir, version, temperature
    if key not in _drawn:
        dtype = case.run.proofs.dtype
        _drawn[key] = await generate(case.model_dir, case.states[version], dtype, temperature)
    return _drawn[key]


async def audit(
    auditor: Auditor, case: Case, *items: AuditItem, near: bool = True
) -> list[Measured]:
    chosen = compared(items, {OWN: [NEAR]} if near else {})
    return measured(await auditor.audit(chosen, case.states))


def moved(case: Case, found: Measured) -> set[str]:
    """What is measured to be beyond honest noise."""
    bounds = NUMERICS[case.run.proofs.dtype]
    return {name for name, bound in bounds.items() if not getattr(found, name) <= bound}


async def test_honest_branches_measure_next_to_nothing(auditor: Auditor, case: Case) -> None:
    found = await audit(auditor, case, *case.honest)
    print(f"\n{case.run.proofs.fingerprint} {case.run.proofs.dtype}: most of {len(found)} branches")
    for name in (*NUMERICS["float32"], "logprob_max", "other_policy"):
        print(f"{name:16} {max(getattr(one, name) for one in found):.3g}")
    for item, one in zip(case.honest, found, strict=True):
        assert moved(case, one) == set()
        assert one.tokens == len(item.logprobs)
        assert one.other_policy < 0


async def test_at_temperature_0_the_likeliest_tokens_are_honest_and_drawn_ones_are_not(
    auditor: Auditor, case: Case
) -> None:
    honest = await replies_of(case, OWN, 0.0)
    leased = [replace(one, temperature=0.0) for one in (*honest[:4], case.item)]
    *found, last = await audit(auditor, case, *leased, near=False)
    assert [moved(case, one) for one in found] == [set()] * 4
    assert {"sampling", "sampling_max"} <= moved(case, last)


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 60, "top_p": 0.8},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({"top_p": 0.9}, {"top_k": 20})),
    ],
)
async def test_draws_from_the_likeliest_tokens_are_measured_by_the_limits_of_their_lease(
    auditor: Auditor, case: Case, limits: dict[str, Any]
) -> None:
    """Those of a worker that draws from all tokens, or from fewer than it should, are not honest."""
    dtype = case.run.proofs.dtype
    honest = await generate(case.model_dir, case.states[OWN], dtype, **limits)
    closer = {name: type(value)(0.6 * value) for name, value in limits.items()}
    narrow = await generate(case.model_dir, case.states[OWN], dtype, **closer)
    leased = [replace(one, **limits) for one in (*honest, *case.honest[:4], *narrow[:4])]
    found = await audit(auditor, case, *leased, case.item, near=False)
    assert [moved(case, one) for one in (*found[:12], found[-1])] == [set()] * 13
    for one in found[12:-1]:
        assert "sampling" in moved(case, one) <= {"sampling", "sampling_max"}


async def test_an_item_measures_the_same_alone_and_in_company(auditor: Auditor, case: Case) -> None:
    together = await audit(auditor, case, *case.honest)
    for item, one in zip(case.honest[:3], together, strict=False):
        [alone] = await audit(auditor, case, item)
        assert alone.fingerprint == pytest.approx(one.fingerprint, abs=0.02)
        assert alone.logprob == pytest.approx(one.logprob, abs=0.02)


async def test_foreign_text_moves_only_the_margins(auditor: Auditor, case: Case) -> None:
    """The right model was fed the tokens: its hidden states and logprobs are true."""
    start = case.item.replies[0].start
    text = (b"a text from somewhere else, which nobody sampled. " * 4)[: len(case.item.logprobs)]
    foreign = case.forged(replace(case.item, token_ids=[*case.item.token_ids[:start], *text]))
    [found] = await audit(auditor, case, foreign)
    assert moved(case, found) == {"sampling", "sampling_max"}
    assert found.sampling > 0.5


async def test_one_edited_token_moves_only_the_margins(auditor: Auditor, case: Case) -> None:
    """The last one, for those that follow an edited token were sampled after another text."""
    edited = case.forged(with_token(case.item, -1, 7))
    [before, found] = await audit(auditor, case, case.item, edited)
    assert "sampling_max" in moved(case, found) <= {"sampling", "sampling_max"}
    assert found.sampling - before.sampling <= 1 / len(case.item.logprobs) + 1e-6


async def test_an_edited_token_whose_claims_were_left_moves_what_follows(
    auditor: Auditor, case: Case
) -> None:
    place = case.item.replies[0].start + 30
    [found] = await audit(auditor, case, with_token(case.item, place, 7))
    assert {"fingerprint", "sampling_max", "logprob"} <= moved(case, found)


async def test_another_seed_moves_only_the_margins(auditor: Auditor, case: Case) -> None:
    [reply] = case.item.replies
    other = replace(case.item, replies=[replace(reply, seed=reply.seed + 1)])
    [found] = await audit(auditor, case, other)
    assert moved(case, found) == {"sampling", "sampling_max"}


async def test_another_temperature_moves_margins_and_logprobs(auditor: Auditor, case: Case) -> None:
    hot = await replies_of(case, OWN, 1.6)
    for one in await audit(auditor, case, *hot[:4]):
        assert moved(case, one) == {"sampling", "sampling_max", "logprob"}
    for one in await audit(auditor, case, *map(case.forged, hot[:4])):
        assert moved(case, one) == {"sampling", "sampling_max"}


async def test_each_item_is_measured_at_the_temperature_of_its_lease(
    auditor: Auditor, case: Case
) -> None:
    hot = await replies_of(case, OWN, 1.6)
    leased = [replace(one, temperature=1.6) for one in hot[:4]]
    for one in await audit(auditor, case, *leased, *case.honest[:4]):
        assert moved(case, one) == set()
    cheats = [replace(one, temperature=1.6) for one in case.honest[:2]]
    for one in (await audit(auditor, case, *leased[:2], *cheats, case.item))[2:4]:
        assert moved(case, one) >= {"sampling", "sampling_max", "logprob"}
    # the same text at two temperatures: an engine that keeps prefixes must not mix them up
    both = await audit(auditor, case, case.item, replace(case.item, temperature=1.6))
    assert [bool(moved(case, one)) for one in both] == [False, True]


async def test_forged_logprobs_move_only_the_logprobs(auditor: Auditor, case: Case) -> None:
    logprobs = [value - 0.5 for value in case.item.logprobs]
    [found] = await audit(auditor, case, replace(case.item, logprobs=logprobs))
    assert moved(case, found) == {"logprob"}
    assert found.logprob == pytest.approx(0.5, abs=0.05)
    logprobs = list(case.item.logprobs)
    logprobs[3] -= 20.0
    [found] = await audit(auditor, case, replace(case.item, logprobs=logprobs))
    assert found.logprob_max == pytest.approx(20.0, abs=0.5)


async def test_another_model_moves_everything(auditor: Auditor, case: Case) -> None:
    foreign = await replies_of(case, FAR)
    for one in await audit(auditor, case, *foreign[:4]):
        assert moved(case, one) == {"fingerprint", "sampling", "sampling_max", "logprob"}


async def test_a_neighbouring_version_shows_in_the_likelihood_ratio(
    auditor: Auditor, case: Case
) -> None:
    near = await replies_of(case, NEAR)
    for one in await audit(auditor, case, *near):
        assert one.other_policy > 0
    [alone] = await audit(auditor, case, near[0], near=False)
    assert alone.other_policy == 0.0


async def test_the_proof_of_another_text_moves_only_the_fingerprint(
    auditor: Auditor, case: Case
) -> None:
    [reply] = case.item.replies
    text = [*case.item.token_ids[: reply.start], *(b"x" * (reply.end - reply.start))]
    other = case.forged(replace(case.item, token_ids=text))
    [found] = await audit(auditor, case, replace(case.item, proof=other.proof))
    assert moved(case, found) == {"fingerprint"}


async def test_tokens_are_measured_under_the_version_that_each_of_them_claims(
    auditor: Auditor, case: Case
) -> None:
    """The engine goes on under new weights, and reads what came before anew under them."""
    cut = 40
    old, new = case.prefill(case.item, OWN), case.prefill(case.item, FAR)
    hidden, logprobs = (torch.cat([a[:cut], b[cut:]]) for a, b in zip(old, new, strict=True))
    claims = case.claimed(case.item, hidden, logprobs)
    count = len(case.item.versions)
    mixed = replace(claims, versions=[OWN] * cut + [FAR] * (count - cut))
    [found] = measured(
        await auditor.audit(compared([mixed], {OWN: [FAR], FAR: [OWN]}), case.states)
    )
    assert not moved(case, found) & {"fingerprint", "logprob"}
    assert found.other_policy < 0
    for versions in ([OWN] * count, [FAR] * count, [OWN] * (cut - 9) + [FAR] * (count - cut + 9)):
        [found] = measured(await auditor.audit([replace(claims, versions=versions)], case.states))
        assert {"fingerprint", "logprob"} <= moved(case, found)


async def test_what_cannot_be_measured_costs_nobody_else(auditor: Auditor, case: Case) -> None:
    good = case.item
    [reply] = good.replies
    no_proof = [
        replace(good, proof=b""),
        replace(good, proof=good.proof[:-1]),
        replace(good, proof=good.proof * 2),
        replace(good, proof=b"\xff" * len(good.proof)),
    ]
    nobody_s = [
        with_token(good, 3, 272),
        with_token(good, 3, -1),
        replace(good, replies=[replace(reply, end=reply.end + 1)]),
        replace(good, replies=[replace(reply, start=0)]),
        replace(good, replies=[]),
        replace(good, replies=[replace(reply, seed=2**63)]),
        replace(good, versions=good.versions[:-1]),
        replace(good, versions=[NEAR, *[OWN] * (len(good.versions) - 1)]),
        replace(good, token_ids=[]),
    ]
    bad = [*no_proof, *nobody_s]
    found = await auditor.audit(compared([good, *bad, good], {OWN: [NEAR]}), case.states)
    assert found[0] == found[-1]
    assert isinstance(found[0], Measured)
    blamed = [one.proof for one in found if isinstance(one, Unreadable)]
    assert blamed == [True] * len(no_proof) + [False] * len(nobody_s)


async def test_claims_that_are_not_numbers_are_infinitely_far_off(
    auditor: Auditor, case: Case
) -> None:
    logprobs = [float("nan"), *case.item.logprobs[1:]]
    [found] = await audit(auditor, case, replace(case.item, logprobs=logprobs))
    assert found.logprob == found.logprob_max == float("inf")


async def test_audits_at_once_do_not_mix_up_their_answers(auditor: Auditor, case: Case) -> None:
    apart = [await audit(auditor, case, item) for item in case.honest[:4]]
    at_once = await asyncio.gather(*(audit(auditor, case, item) for item in case.honest[:4]))
    assert at_once == apart


async def test_nothing_to_audit_is_no_answer(auditor: Auditor, case: Case) -> None:
    assert await auditor.audit([], case.states) == []


async def test_a_version_whose_state_is_missing_is_the_caller_s_error(
    auditor: Auditor, case: Case
) -> None:
    with pytest.raises(EngineError, match="policy 5"):
        await auditor.audit([case.item], {})
    with pytest.raises(EngineError, match="policy 6"):
        await auditor.audit(compared([case.item], {OWN: [NEAR]}), {OWN: case.states[OWN]})


async def test_a_state_of_another_shape_is_the_caller_s_error(auditor: Auditor, case: Case) -> None:
    name = next(name for name, tensor in case.states[OWN].items() if len(tensor.shape) == 2)
    short = {key: tensor for key, tensor in case.states[OWN].items() if key != name}
    with pytest.raises(EngineError):
        await auditor.audit([case.item], {OWN: short})
    assert moved(case, (await audit(auditor, case, case.item))[0]) == set()


async def test_before_its_start_and_without_a_model_an_auditor_says_so(
    kind: tuple[str, str], case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    auditor = AUDITORS[kind[0]]()
    with pytest.raises(EngineError, match="start"):
        await auditor.audit([case.item], case.states)
    with pytest.raises(EngineError):
        await auditor.start(tmp_path_factory.mktemp("nothing"), case.run)
    await auditor.close()
