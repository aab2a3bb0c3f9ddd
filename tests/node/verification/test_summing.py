"""From tokens to a branch: means that forgive one near tie, ratios and infinities that stay what they are."""

from collections.abc import Sequence
from math import inf, nan

import numpy as np
import pytest

from primerl.node.inference.fingerprint import BadProof, Compared, Hidden, Projection
from primerl.node.verification.auditor import AuditItem, Measured, SampledSpan
from primerl.node.verification.reading import check_item, split_proof
from primerl.node.verification.summing import FLOOR, summarize


class Fixed(Projection):
    """A fingerprint of one byte a token: the byte is the distance, own and others are what was set."""

    def __init__(self, own: float = 1.0, others: tuple[float, ...] = ()) -> None:
        self.own = own
        self.others = others

    def size(self, tokens: int) -> int:
        return tokens

    def make(self, hidden: Hidden) -> bytes:
        return bytes(len(hidden))

    def check(self, proof: bytes, tokens: int) -> None:
        if 255 in proof:
            raise BadProof("255 is no distance")

    def compare_projected(
        self, proof: bytes, projected: Hidden, others: Sequence[Hidden] = ()
    ) -> Compared:
        assert len(proof) == len(projected)
        return Compared(float(proof[0]), 10, self.own, self.others[: len(others)])


def measure(
    margins: Sequence[float] = (0.0,),
    apart: Sequence[float] | None = None,
    proofs: Sequence[tuple[bytes, int]] | None = None,
    fingerprint: Fixed | None = None,
    others: int = 0,
    hidden: float = 1.0,
) -> Measured:
    count = len(margins)
    return summarize(
        margins=np.array(margins, np.float64),
        apart=np.array(apart or [0.0] * count, np.float64),
        fingerprint=fingerprint or Fixed(),
        proofs=proofs or [(bytes(count), count)],
        projected=np.full((count, 4), hidden, np.float32),
        others=[np.ones((count, 4), np.float32)] * others,
    )


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
    found = measure([0.0, odd], apart=[odd, 0.0], hidden=odd)
    assert (found.sampling_max, found.logprob_max, found.logprob) == (inf, inf, inf)
    assert found.sampling == 1 / 64
    assert found.fingerprint == inf


def test_the_distance_is_the_root_mean_square_over_64_tokens_at_least() -> None:
    found = measure([0.0] * 4, proofs=[(b"\x03", 1), (b"\x01\x01\x01", 3)])
    assert found.fingerprint == pytest.approx(((9 + 3) / 64) ** 0.5)


def test_the_likeliest_other_policy_counts_over_all_replies() -> None:
    two = [(b"\0", 1), (b"\0", 1)]
    found = measure([0.0] * 2, proofs=two, fingerprint=Fixed(1.0, (2.0, 0.5)), others=2)
    assert found.other_policy == pytest.approx(2 * 5 * np.log(2), rel=1e-4)
    assert measure(fingerprint=Fixed(1.0, (2.0,)), others=1).other_policy < 0
    assert measure(fingerprint=Fixed(1.0)).other_policy == 0.0


def test_residuals_below_all_resolution_tell_no_policies_apart() -> None:
    assert measure(fingerprint=Fixed(0.0, (0.0,)), others=1).other_policy == 0.0
    tiny = measure(fingerprint=Fixed(FLOOR, (0.0,)), others=1).other_policy
    assert 0 < tiny < 1
    assert measure(fingerprint=Fixed(nan, (1.0,)), others=1).other_policy == inf


def test_proofs_are_cut_by_the_lengths_of_the_replies() -> None:
    replies = [SampledSpan(1, 3, 0), SampledSpan(4, 5, 0)]
    item = AuditItem([0] * 5, replies, [0.0] * 3, [1] * 3, b"abc")
    assert split_proof(item, Fixed()) == [(b"ab", 2), (b"c", 1)]
    assert check_item(item, 1, 0, Fixed()) is None
    refused = check_item(AuditItem([0] * 5, replies, [0.0] * 3, [1] * 3, b"ab\xff"), 1, 0, Fixed())
    assert refused is not None
    assert refused.proof
