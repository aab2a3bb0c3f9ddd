"""The fingerprint: small, repeatable, one encoding for each state; near for the same model, far for others."""

import hashlib
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from support.fingerprint_cases import changed, exact, measured, model, noisy, ratio, text

from primerl.node.inference.fingerprint import (
    FURTHEST,
    BadProof,
    Compared,
    Projection,
    ProofFailed,
    Replayed,
    pack,
    signs,
    sums,
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
    assert pack(states @ matrix) == proof, "a worker makes it of parts"
    found = PROOF.compare_projected([Replayed(proof, states @ matrix, [other @ matrix])])
    assert found == [PROOF.compare(proof, states, [other])]
    with pytest.raises(ProofFailed, match="not finite"):
        PROOF.compare_projected([Replayed(proof, states @ matrix * np.inf)])


def made_up(random: np.random.Generator, tokens: int, others: int) -> Replayed:
    """States of all sizes, some of nothing, some of which are stated as they are."""
    size = (tokens, 7)
    own = random.standard_normal(size) * np.exp2(random.integers(-9, 9, (tokens, 1)))
    own[random.random(tokens) < 0.1] = 0
    stated = own * (1 + 0.1 * random.standard_normal(size) * random.integers(0, 2, (tokens, 1)))
    rest = [(own + random.standard_normal(size)).astype(np.float32) for _ in range(others)]
    return Replayed(pack(stated.astype(np.float32)), own.astype(np.float32), rest)


def alone(reply: Replayed) -> Compared:
    """The comparison as it is defined, of one reply."""
    own = reply.projected.astype(np.float64)
    decoded, expected = states_of(reply.proof), states_of(pack(reply.projected))
    power = np.mean(own**2, axis=1)
    power[power == 0] = 1
    squares = np.stack([((decoded - one) ** 2).sum(axis=1) / power for one in (own, *reply.others)])
    short = np.sqrt(power) * np.maximum(1.0, np.sqrt(squares[0]))
    shift = [float(np.sum(column)) for column in ((decoded - own) / short[:, None]).T]
    explained = (decoded == expected).all(axis=1)
    squares[:, explained] = np.maximum(squares[:, explained], squares[0, explained])
    mean = squares.mean(axis=0)
    typical = max(float(np.median(mean)), 1e-9)
    first, *rest = np.sum(squares * (2 * typical / (typical + mean)), axis=1).tolist()
    apart, length = np.sum((decoded - expected) ** 2), np.sum(expected**2)
    distance = min(FURTHEST, float(np.sqrt(apart / length))) if length else FURTHEST * (apart > 0)
    return Compared(distance, decoded.size, first, tuple(rest), tuple(shift))


@pytest.mark.parametrize("seed", range(8))
def test_a_reply_compares_to_the_last_bit_as_it_would_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = [1, 2, 8, 9, 127, 128, 129, 3001, *random.integers(1, 300, 60).tolist()]
    replies = [made_up(random, tokens, int(random.integers(0, 4))) for tokens in lengths]
    assert PROOF.compare_projected(replies) == [alone(one) for one in replies]


def test_one_bad_proof_among_many_is_found_at_its_own_token() -> None:
    replies = [made_up(np.random.default_rng(tokens), tokens, 0) for tokens in (3, 4, 5)]
    bad = replies[1].proof[:16] + token(160) + replies[1].proof[24:]
    with pytest.raises(BadProof, match="token 2: its codes do not fit its scale"):
        PROOF.compare_projected([replies[0], replace(replies[1], proof=bad), replies[2]])
    with pytest.raises(BadProof, match="of 4 tokens"):
        PROOF.compare_projected([replies[0], replace(replies[1], proof=bad[8:]), replies[2]])
    assert PROOF.compare_projected([]) == []


def test_parts_are_summed_as_numpy_sums_each() -> None:
    random = np.random.default_rng(7)
    lengths = [*range(1, 140), 1000, 20000, 3]
    values = random.standard_normal((2, sum(lengths))) ** 2
    parts = np.split(values, np.cumsum(lengths)[:-1], axis=1)
    whole = sums(values, lengths)
    assert (whole == np.stack([part.sum(axis=1) for part in parts], axis=1)).all()
    assert (sums(values[0], lengths) == whole[0]).all()


def test_the_length_of_a_state_is_kept() -> None:
    states = text(np.random.default_rng(2), 400, model(np.random.default_rng(3)))
    lengths = np.mean((states @ signs(states.shape[1])) ** 2, axis=1)
    assert 0.8 < float(np.mean(lengths)) < 1.25


def test_what_is_decoded_is_within_half_a_step_at_every_size() -> None:
    for power in range(-11, 16):
        random = np.random.default_rng(power + 100)
        projected = (2.0**power * random.standard_normal((200, 7))).astype(np.float32)
        proof = pack(projected)
        PROOF.check(proof, 200)
        codes = np.frombuffer(proof, np.int8).reshape(-1, 8)[:, 1:].astype(np.int64)
        assert 117 <= np.abs(codes).max() <= 127, power
        step = np.abs(projected).max(axis=1) / 116.9
        assert (np.abs(states_of(proof) - projected).max(axis=1) <= 0.51 * step).all(), power


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


def test_states_beyond_the_largest_scale_are_recognized() -> None:
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


LENGTHS = (1, 2, 31, 32, 33, 64, 71)
HONEST = 0.02
"""No distance of 1 % noise is above this; see test_noise_moves_a_proof_by_its_size."""
FAR = 0.6


@pytest.fixture
def random() -> np.random.Generator:
    """Always the same numbers."""
    return np.random.default_rng(11)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_proof_has_its_size_and_is_accepted_and_is_at_no_distance(
    random: np.random.Generator, tokens: int
) -> None:
    states = text(random, tokens, model(random, 128))
    proof = PROOF.make(states)
    assert len(proof) == PROOF.size(tokens)
    PROOF.check(proof, tokens)
    compared = PROOF.compare(proof, states, [-states])
    assert compared.distance == 0
    assert 0 <= compared.own < 0.01 * compared.samples
    assert compared.others[0] > compared.own
    assert 0 < compared.samples <= len(proof)


def test_equal_states_have_equal_proofs_however_they_lie_in_memory(
    random: np.random.Generator,
) -> None:
    states = text(random, 40, model(random, 128))
    strided = np.repeat(states, 2, axis=1)[:, ::2]
    assert PROOF.make(strided) == PROOF.make(np.asfortranarray(states)) == PROOF.make(states)
    assert PROOF.compare(PROOF.make(states), strided).distance == 0


def test_noise_moves_a_proof_by_its_size(random: np.random.Generator) -> None:
    channels = model(random)
    for _ in range(8):
        states = text(random, 64, channels)
        found = [
            PROOF.compare(PROOF.make(noisy(random, states, noise)), states).distance
            for noise in (0.001, 0.01, 0.05, 0.2)
        ]
        assert found == sorted(found)
        assert found[1] < HONEST
        assert 0.03 < found[2] < 0.08
        assert 0.12 < found[3] < 0.3


@pytest.mark.parametrize("tokens", [8, 64])
def test_whatever_else_it_is_made_of_is_far(random: np.random.Generator, tokens: int) -> None:
    channels = model(random)
    states = text(random, tokens, channels)
    cases = changed(random, states, channels)
    cheats = {name: one for name, one in cases.items() if not name.startswith(("equal", "noise"))}
    louder = PROOF.compare(PROOF.make(cheats.pop("x 1.05")), states).distance
    assert 2 * HONEST < louder < 0.06
    assert len(cheats) == 7
    for name, other in cheats.items():
        assert PROOF.compare(PROOF.make(other), states).distance > FAR, name


def test_one_foreign_token_in_a_long_reply_is_seen(random: np.random.Generator) -> None:
    channels = model(random)
    states = text(random, 256, channels)
    honest = noisy(random, states, 0.01)
    edited = honest.copy()
    edited[100] = text(random, 1, channels)
    before = PROOF.compare(PROOF.make(honest), states).distance
    assert PROOF.compare(PROOF.make(edited), states).distance > before + 0.001


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_no_proof_is_made_of_states_that_are_not_finite(
    random: np.random.Generator, value: float
) -> None:
    states = text(random, 40, model(random, 128))
    wrong = states.copy()
    wrong[39, 7] = value
    with pytest.raises(ProofFailed, match="hidden states"):
        PROOF.make(wrong)
    with pytest.raises(ProofFailed, match="hidden states"):
        PROOF.compare(PROOF.make(states), wrong, [states])
    if not np.isfinite(value):
        with pytest.raises(ProofFailed, match="hidden states"):
            PROOF.compare(PROOF.make(states), states, [wrong])


def test_no_proof_is_made_of_nothing() -> None:
    for shape in ((0, 64), (64,), (3, 0), (1, 2, 64)):
        with pytest.raises(ProofFailed):
            PROOF.make(np.zeros(shape, np.float32))
    with pytest.raises(BadProof):
        PROOF.check(b"", 0)
    with pytest.raises(BadProof):
        PROOF.check(b"", -1)


def test_a_model_that_thinks_nothing_can_be_compared() -> None:
    nothing = np.zeros((33, 64), np.float32)
    compared = PROOF.compare(PROOF.make(nothing), nothing, [nothing])
    assert (compared.distance, compared.own, compared.others) == (0, 0, (0,))
    something = PROOF.make(np.ones((33, 64), np.float32))
    assert PROOF.compare(something, nothing).distance >= 1


def test_it_tells_which_of_two_near_policies_was_at_work() -> None:
    """Policies 0.1 % apart under 1 % noise: about 2 nats for each 64 tokens."""
    honest, cheat = measured(32, 64, 0.001)
    assert honest.sum() < -10
    assert cheat.sum() > 10
    honest, cheat = measured(4, 64, 0.005)
    assert honest.sum() < -40
    assert cheat.sum() > 40


def test_rounding_speaks_for_no_other_policy_where_all_tokens_have_the_same_state(
    random: np.random.Generator,
) -> None:
    right = np.repeat(text(random, 1, model(random)), 64, axis=0)
    drifted = [noisy(random, right[:1], 1e-3).repeat(64, axis=0) for _ in range(32)]
    compared = PROOF.compare(PROOF.make(right), right, drifted)
    assert all(compared.own <= other for other in compared.others)


def test_a_few_absurd_tokens_do_not_hide_the_other_policy(random: np.random.Generator) -> None:
    channels = model(random)
    right = text(random, 64, channels)
    wrong = noisy(random, right, 0.005)
    sent = noisy(random, wrong, 0.01)
    sent[::16] = 3 * noisy(random, sent[::16], 0.5)
    compared = PROOF.compare(PROOF.make(sent), right, [wrong])
    assert ratio(compared) > 5
    assert compared.distance > 2 * HONEST


def test_every_other_policy_is_measured_in_order(random: np.random.Generator) -> None:
    right = text(random, 64, model(random))
    others = [noisy(random, right, far) for far in (0.05, 0.02, 0.1)]
    compared = PROOF.compare(PROOF.make(right), right, others)
    near = sorted((compared.own, *compared.others))
    assert near == [compared.own, compared.others[1], compared.others[0], compared.others[2]]
