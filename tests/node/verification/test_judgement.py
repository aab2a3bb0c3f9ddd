"""Judging: NaN is above every bound; a fault is laid to no stage whose input was wrong already."""

from math import inf, nan
from typing import Any

import pytest
from msgspec import structs
from support.protocol_cases import PROOFS

from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.judgement import REASONS, StageAttribution, blame, judge, name_stages
from primerl.protocol.rollouts import Evidence

REJECT, SUSPECT = BUILT_IN["bfloat16"]
CONTRACT = structs.replace(PROOFS, reject=REJECT, suspect=SUSPECT)
OFF, ODD, HALF, FINE = 0.2, 0.03, 0.015, 0.008
"""Above the bound to reject, above that to suspect (0.05 and 0.027), above half of that, and below."""


def laid(distances: tuple[float, ...], end: float, **other: float) -> StageAttribution:
    """Of an audited rollout with these outputs."""
    values: dict[str, Any] = {
        **{"sampling": 0.0, "sampling_max": 0.0, "logprob": 0.0, "logprob_max": 0.0},
        **{"other_policy": -1.0, "fingerprint": end, **other},
    }
    evidence = Evidence(group=1, rollout=2, tokens=64, **values)
    return blame(evidence, judge(evidence, CONTRACT), distances, CONTRACT)


@pytest.mark.parametrize(
    ("distances", "end", "stages"),
    [
        ((OFF, OFF), OFF, (0,)),
        ((FINE, OFF), OFF, (1,)),
        ((FINE, FINE), OFF, (2,)),
        ((FINE, OFF), 0.06, (1,)),
        ((ODD, OFF), OFF, (0, 1)),
        ((FINE, ODD), OFF, (1, 2)),
        ((ODD, ODD), OFF, (0, 1, 2)),
        ((nan, OFF), OFF, (0,)),
        ((FINE, inf), OFF, (1,)),
        ((FINE, FINE), nan, (2,)),
    ],
    ids=str,
)
def test_a_rejected_rollout_is_of_the_first_stage_that_is_off_unless_its_input_is_odd(
    distances: tuple[float, ...], end: float, stages: tuple[int, ...]
) -> None:
    found = laid(distances, end)
    assert (found.outcome, found.stages) == ("rejected", stages)
    assert found.named == (stages[0] if len(stages) == 1 else None)


def test_right_states_and_wrong_tokens_are_laid_to_the_stages_that_draw_or_state_them() -> None:
    for measure in ({"sampling_max": 3.0}, {"logprob": 0.5}, {"logprob_max": 3.0}):
        found = laid((FINE, FINE), FINE, **measure)
        assert (found.outcome, found.stages) == ("rejected", (0, 2))


def test_states_of_another_policy_can_be_anybodys() -> None:
    assert laid((FINE,), FINE, other_policy=200.0).stages == (0, 1)
    assert laid((FINE,), FINE, other_policy=50.0).stages == (0, 1)


@pytest.mark.parametrize(
    ("distances", "end", "stages"),
    [
        ((FINE, FINE), ODD, (2,)),
        ((FINE, HALF), ODD, (1, 2)),
        ((HALF, HALF), ODD, (0, 1, 2)),
        ((FINE, ODD), ODD, (1,)),
    ],
    ids=str,
)
def test_a_suspect_rollout_is_of_all_whose_input_is_not_surely_right(
    distances: tuple[float, ...], end: float, stages: tuple[int, ...]
) -> None:
    found = laid(distances, end)
    assert (found.outcome, found.stages) == ("suspect", stages)


def test_a_trail_that_was_changed_under_way_is_laid_to_the_stages_that_had_it_since() -> None:
    """Its end is right: no stage computed anything wrong, and no stage is named for changes by another one."""
    found = laid((FINE, OFF, FINE), FINE)
    assert (found.outcome, found.stages) == ("suspect", (0, 1, 2, 3))
    assert laid((OFF, FINE, FINE), FINE).stages == (0, 1, 2, 3)


def test_clean_is_clean() -> None:
    found = laid((FINE, 0.049), FINE)
    assert (found.outcome, found.stages, found.named) == ("clean", (), None)


def test_suspect_stages_are_named_in_words() -> None:
    nodes = [bytes([number]) * 32 for number in range(3)]
    assert name_stages(laid((FINE, OFF), OFF), nodes) == "stage 1 of 0..2 (01010101)"
    assert (
        name_stages(laid((ODD, OFF), OFF), nodes)
        == "stage 0 of 0..2 (00000000) or 1 of 0..2 (01010101)"
    )
    assert name_stages(laid((FINE, FINE), FINE), nodes) == ""


@pytest.mark.parametrize("name", REASONS)
def test_a_measurement_that_is_no_number_is_above_every_bound(name: str) -> None:
    clean = Evidence(0, 0, 64, 0.0, 0.0, 0.0, 0.0, 0.0, -10.0)
    assert judge(clean, PROOFS).reason is None
    found = judge(structs.replace(clean, **{name: float("nan")}), PROOFS)
    assert (found.reason, found.suspect) == (REASONS[name], True)
