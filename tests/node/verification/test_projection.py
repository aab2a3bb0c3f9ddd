"""The projection fingerprint: the same bytes on every machine, and one encoding for each state."""

import hashlib
from itertools import product

import numpy as np
import pytest
from support.fingerprint_cases import exact, model, text

from primerl.node.inference.fingerprint import (
    FURTHEST,
    BadProof,
    Projection,
    ProofFailed,
    pack,
    signs,
)

PROOF = Projection()

SIGNS = "7282a99266c0a445fbcb296337bb22a6bcc73d6155c63d3096c3959b4ad9bf88"
FIRST = "a1c6d47c00fa3325a1c6d47c00fa3425"
WHOLE = "08469febc4391578aebc52e0a086ba409aba2ff10a51d9951b53cdc28180ce8b"


def token(scale: int, *codes: int) -> bytes:
    """Eight bytes; missing codes are 0."""
    padded = [*codes, *[0] * (7 - len(codes))]
    return bytes([scale]) + np.array(padded, np.int8).tobytes()


def states_of(proof: bytes) -> np.ndarray:
    """What a proof stands for, as the format says it."""
    packed = np.frombuffer(proof, np.int8).reshape(-1, 8).astype(np.float64)
    return packed[:, 1:] * 2 ** (((packed[:, :1] % 256) - 160) / 8)


def test_the_signs_are_the_same_everywhere() -> None:
    drawn = signs(4096)
    assert drawn.shape == (4096, 7)
    assert drawn.dtype == np.float32
    assert set(np.unique(drawn)) == {np.float32(-1 / 64), np.float32(1 / 64)}
    assert hashlib.sha256((drawn > 0).tobytes()).hexdigest() == SIGNS
    assert ((drawn[:1024] > 0) == (signs(1024) > 0)).all()


def test_the_signs_are_as_if_drawn_by_chance() -> None:
    columns = np.sign(signs(4096)).astype(np.float64)
    cosines = columns.T @ columns / 4096
    assert np.abs(cosines - np.eye(7)).max() < 0.06
    assert np.abs(columns.mean(axis=0)).max() < 0.06
    neighbours = [np.mean(columns[lag:] * columns[:-lag]) for lag in (1, 2, 3, 64, 128)]
    assert np.abs(neighbours).max() < 0.03


def test_a_proof_has_these_bytes() -> None:
    proof = PROOF.make(exact(5))
    assert proof[:16].hex() == FIRST
    assert hashlib.sha256(proof).hexdigest() == WHOLE


def test_states_that_were_projected_elsewhere_compare_the_same() -> None:
    states, other = (
        text(np.random.default_rng(seed), 40, model(np.random.default_rng(1))) for seed in (1, 2)
    )
    proof = PROOF.make(states)
    matrix = signs(states.shape[1])
    found = PROOF.compare_projected(proof, states @ matrix, [other @ matrix])
    assert found == PROOF.compare(proof, states, [other])
    with pytest.raises(ProofFailed, match="not finite"):
        PROOF.compare_projected(proof, states @ matrix * np.inf)


def test_the_parts_that_a_worker_uses_make_the_same_proof() -> None:
    states = text(np.random.default_rng(1), 40, model(np.random.default_rng(1)))
    assert pack(states @ signs(states.shape[1])) == PROOF.make(states)


def test_the_length_of_a_state_is_kept() -> None:
    states = text(np.random.default_rng(2), 400, model(np.random.default_rng(3)))
    lengths = np.mean((states @ signs(states.shape[1])) ** 2, axis=1)
    assert 0.8 < float(np.mean(lengths)) < 1.25


@pytest.mark.parametrize("power", range(-11, 16))
def test_what_is_decoded_is_within_half_a_step_at_every_size(power: int) -> None:
    random = np.random.default_rng(power + 100)
    projected = (2.0**power * random.standard_normal((200, 7))).astype(np.float32)
    proof = pack(projected)
    PROOF.check(proof, 200)
    codes = np.frombuffer(proof, np.int8).reshape(-1, 8)[:, 1:].astype(np.int64)
    assert 117 <= np.abs(codes).max() <= 127
    step = np.abs(projected).max(axis=1) / 116.9
    assert (np.abs(states_of(proof) - projected).max(axis=1) <= 0.51 * step).all()


def test_the_edges_of_every_scale_are_encoded_as_they_are_checked() -> None:
    """Where the largest number sits exactly on, or one bit beside, the border of two scales."""
    border = (127.5 * 2 ** (np.arange(-150, 94) / 8)).astype(np.float32)
    for largest in (border, np.nextafter(border, np.float32(0)), np.nextafter(border, border * 2)):
        projected = np.outer(largest, np.linspace(-0.3, 1, 7)).astype(np.float32)
        PROOF.check(pack(projected), len(projected))
        again = states_of(pack(projected)).astype(np.float32)
        assert pack(again) == pack(projected)


def test_one_state_has_one_encoding() -> None:
    """Whatever check() accepts comes back byte for byte when what it stands for is packed again."""
    accepted = 0
    for scale, largest in product(
        (*range(0, 256, 15), 1, 254), (*range(-128, -110), *range(-3, 4), *range(112, 128))
    ):
        proof = token(scale, largest, 5, -7)
        try:
            PROOF.check(proof, 1)
        except BadProof:
            continue
        accepted += 1
        assert pack(states_of(proof).astype(np.float32)) == proof
    assert accepted == 19 * 2 * 11


@pytest.mark.parametrize(
    "wrong",
    [
        token(160),
        token(160, 116, -116),
        token(160, -128),
        token(160, 120, -128),
        token(0, 1),
        token(0, 127),
        token(255, 1, 2, 3, 4, 5, 6, 7),
    ],
)
def test_another_encoding_is_refused(wrong: bytes) -> None:
    right = token(160, 127, -3)
    PROOF.check(right * 3, 3)
    with pytest.raises(BadProof, match="token 1: its codes do not fit its scale"):
        PROOF.check(right + wrong + right, 3)


def test_only_a_state_of_nothing_is_eight_zero_bytes() -> None:
    tiny = np.full((3, 7), 1e-30, np.float32)
    tiny[1] = 0
    tiny[2] = 1
    assert pack(tiny)[:16] == bytes(16)
    assert pack(tiny)[16] > 0
    PROOF.check(bytes(24), 3)
    states = text(np.random.default_rng(4), 3, model(np.random.default_rng(5)))
    assert PROOF.compare(bytes(24), states).distance == pytest.approx(1)


def test_states_beyond_the_largest_scale_are_told() -> None:
    assert pack(np.full((1, 7), 4.78e5, np.float32))[0] == 255
    with pytest.raises(ProofFailed, match="too large"):
        pack(np.full((1, 7), 4.79e5, np.float32))


def test_only_projected_states_are_packed() -> None:
    for shape in ((3, 8), (7,), (0, 7)):
        with pytest.raises(ProofFailed, match=r"\[tokens, 7\]"):
            pack(np.zeros(shape, np.float32))
    with pytest.raises(ProofFailed, match="not finite"):
        pack(np.full((2, 7), np.nan, np.float32))


def test_no_distance_is_beyond_the_furthest() -> None:
    states = text(np.random.default_rng(6), 9, model(np.random.default_rng(6)))
    assert PROOF.compare(token(255, *[127] * 7) * 9, states).distance == FURTHEST
