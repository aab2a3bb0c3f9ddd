"""From tokens to a branch: means that forgive one near tie, ratios and infinities that stay what they are."""

from collections.abc import Sequence
from math import inf, nan

import numpy as np
import pytest

from primerl.node.inference.fingerprint import Compared, Projection
from primerl.node.verification.auditor import AuditItem, Measured, SampledSpan
from primerl.node.verification.replay import FLOOR, check_item, compare_replies, summarize


def reply(
    own: float = 1.0, *others: float, tokens: int = 1, distance: float = 0.0
) -> tuple[int, Compared]:
    """The comparison of one reply, over ten samples."""
    return tokens, Compared(distance, 10, own, others)


def measure(
    margins: Sequence[float] = (0.0,),
    apart: Sequence[float] = (),
    compared: Sequence[tuple[int, Compared]] = (),
) -> Measured:
    off = np.array(apart or [0.0] * len(margins))
    return summarize(np.array(margins), off, compared or [reply(tokens=len(margins))])


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
    compared = compare_replies([(proof, 2)], states, [])
    found = summarize(np.array([0.0, odd]), np.array([odd, 0.0]), compared)
    assert (found.sampling_max, found.logprob_max, found.logprob) == (inf, inf, inf)
    assert found.sampling == 1 / 64
    assert found.fingerprint == inf
    [(_, rest)] = compare_replies([(proof, 2)], np.ones((2, 7), np.float32), [states])
    assert rest.others == ()


def test_the_distance_is_the_root_mean_square_over_64_tokens_at_least() -> None:
    found = measure(
        [0.0] * 4, compared=[reply(tokens=1, distance=3.0), reply(tokens=3, distance=1.0)]
    )
    assert found.fingerprint == pytest.approx(((9 + 3) / 64) ** 0.5)
    assert measure(compared=[reply(distance=nan)]).fingerprint == inf


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

    def checked(proof: bytes) -> bool | None:
        fault = check_item(AuditItem([0] * 5, replies, [0.0] * 3, [1] * 3, proof), 1, 0)
        return fault and fault.proof

    assert checked(proof) is None
    assert checked(proof[:-1])
    assert checked(b"\xff" * len(proof))
