"""Proofs that are no proofs: refused before anything is read, or measured as far away; never a crash.

A sketch in use accepts all zeros; another public verifier ends with a signal at two zero bytes.
"""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from support.fingerprint_cases import model, text

from primerl.node.inference.fingerprint import FURTHEST, BadProof, Projection

TOKENS = 40
FAR = 0.5
CHANNELS = model(np.random.default_rng(20), 256)
STATES = text(np.random.default_rng(21), TOKENS, CHANNELS)
OTHER = text(np.random.default_rng(22), TOKENS, CHANNELS)


@pytest.fixture
def scheme() -> Projection:
    """The fingerprint."""
    return Projection()


def far_or_refused(scheme: Projection, proof: bytes) -> bool:
    """True if refused; else it must be far, in finite numbers, and blame neither policy."""
    try:
        compared = scheme.compare(proof, STATES, [OTHER])
    except BadProof:
        with pytest.raises(BadProof):
            scheme.check(proof, TOKENS)
        return True
    scheme.check(proof, TOKENS)
    assert FAR < compared.distance <= FURTHEST
    assert np.isfinite([compared.own, *compared.others]).all()
    return False


def refused(scheme: Projection, proof: bytes) -> bool:
    """Whether both check() and compare() raise BadProof."""
    with pytest.raises(BadProof):
        scheme.check(proof, TOKENS)
    with pytest.raises(BadProof):
        scheme.compare(proof, STATES, [OTHER])
    return True


def test_every_other_length_is_refused(scheme: Projection) -> None:
    proof = scheme.make(STATES)
    for size in (*range(len(proof)), *range(len(proof) + 1, len(proof) + 300)):
        forged = proof[:size].ljust(size, b"\x81")
        with pytest.raises(BadProof, match=f"{size} bytes"):
            scheme.check(forged, TOKENS)
    assert refused(scheme, b"")
    assert refused(scheme, proof[:-1])
    assert refused(scheme, proof * 2)


def test_a_length_is_refused_whatever_the_number_of_tokens_is_said_to_be(
    scheme: Projection,
) -> None:
    proof = scheme.make(STATES)
    for tokens in (-(10**30), -1, 0, 1, TOKENS - 1, TOKENS + 1, 10**9, 10**30):
        with pytest.raises(BadProof):
            scheme.check(proof, tokens)


@pytest.mark.parametrize("byte", [0, 1, 0x7F, 0x80, 0x81, 0xAA, 0xFE, 0xFF])
def test_one_byte_again_and_again_is_refused_or_far(scheme: Projection, byte: int) -> None:
    far_or_refused(scheme, bytes([byte]) * scheme.size(TOKENS))


def test_random_bytes_are_refused_or_far(scheme: Projection) -> None:
    random = np.random.default_rng(23)
    cases = [random.bytes(scheme.size(TOKENS)) for _ in range(50)]
    assert sum(far_or_refused(scheme, proof) for proof in cases) > 10


def test_random_numbers_in_the_right_form_are_far(scheme: Projection) -> None:
    random = np.random.default_rng(24)
    for _ in range(50):
        packed = random.integers(-127, 128, (TOKENS, 8), np.int8)
        packed[:, 0], packed[:, 1] = random.integers(-96, -90, TOKENS), 127
        assert not far_or_refused(scheme, packed.tobytes())


def test_the_proof_of_another_text_in_pieces_is_far(scheme: Projection) -> None:
    """Also where every piece is a valid proof: bytes of one text for tokens of the other."""
    mine, theirs = scheme.make(STATES), scheme.make(OTHER)
    assert not far_or_refused(scheme, theirs)
    half = len(mine) // 2
    mixed = scheme.compare(mine[:half] + theirs[half:], STATES).distance
    assert mixed > 0.1


def test_a_proof_of_a_longer_text_cut_to_size_is_far(scheme: Projection) -> None:
    """The end of a longer proof; its start is a proof of the start."""
    longer = np.concatenate([OTHER[:24], STATES])
    proof = scheme.make(longer)
    far_or_refused(scheme, proof[: len(scheme.make(STATES))])


def test_a_token_of_the_largest_scale_is_bounded(scheme: Projection) -> None:
    """It makes the distance as large as it gets, and leaves the sums of the others as they were."""
    proof = bytearray(scheme.make(STATES))
    before = scheme.compare(bytes(proof), STATES, [OTHER])
    proof[80:88] = b"\xff" + b"\x7f" * 7
    after = scheme.compare(bytes(proof), STATES, [OTHER])
    assert after.distance == FURTHEST
    assert after.others[0] == pytest.approx(before.others[0], rel=0.1)


def test_nothing_that_a_proof_says_makes_memory_grow(scheme: Projection) -> None:
    random = np.random.default_rng(27)
    forged = [random.bytes(scheme.size(TOKENS)) for _ in range(5)]
    forged += [b"\xff" * 10_000, scheme.make(OTHER)]
    # what is imported on the way is not counted
    scheme.compare(scheme.make(STATES), STATES, [OTHER])
    honest = peak(lambda: scheme.compare(scheme.make(STATES), STATES, [OTHER]))
    for proof in forged:
        assert peak(lambda proof=proof: far_or_refused(scheme, proof)) < 1.2 * honest + 50_000


def peak(action: Callable[[], object]) -> int:
    """Most bytes that were allocated meanwhile."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
