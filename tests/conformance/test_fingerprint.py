"""What a fingerprint promises: small, repeatable, near for the same model, far for whatever else.

Distances of 64 tokens of width 1024, by `python -m fingerprint_cases` (its states have massive channels and
a part that all tokens share):

    made of                       projection
    equal                             0.0000
    noise 0.1 %                       0.0045
    noise 1 %                         0.0125
    noise 5 %                         0.0511
    noise 20 %                        0.2069
    x 1.05                            0.0507
    signs flipped                     2.0000
    tokens shuffled                   1.2923
    tokens one late                   1.2913
    another text                      1.3153
    another model                     1.4175
    zeros                             1.0000
    one state again and again         1.2009
"""

import numpy as np
import pytest
from support.fingerprint_cases import changed, measured, model, noisy, ratio, text

from primerl.node.inference.fingerprint import BadProof, Projection, ProofFailed

LENGTHS = (1, 2, 31, 32, 33, 64, 71)
HONEST = 0.02
"""No distance of 1 % noise is above this; see test_noise_moves_a_proof_by_its_size."""
FAR = 0.6


@pytest.fixture
def scheme() -> Projection:
    """The fingerprint."""
    return Projection()


@pytest.fixture
def random() -> np.random.Generator:
    """Always the same numbers."""
    return np.random.default_rng(11)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_proof_has_its_size_and_is_accepted_and_is_at_no_distance(
    scheme: Projection, random: np.random.Generator, tokens: int
) -> None:
    states = text(random, tokens, model(random, 128))
    proof = scheme.make(states)
    assert len(proof) == scheme.size(tokens)
    scheme.check(proof, tokens)
    compared = scheme.compare(proof, states, [-states])
    assert compared.distance == 0
    assert 0 <= compared.own < 0.01 * compared.samples
    assert compared.others[0] > compared.own
    assert 0 < compared.samples <= len(proof)


def test_a_proof_is_small(scheme: Projection) -> None:
    assert all(scheme.size(tokens) <= 8.1 * tokens + 2 for tokens in range(1, 5000))
    assert scheme.size(1024) <= 8.1 * 1024


def test_equal_states_have_equal_proofs_however_they_lie_in_memory(
    scheme: Projection, random: np.random.Generator
) -> None:
    states = text(random, 40, model(random, 128))
    strided = np.repeat(states, 2, axis=1)[:, ::2]
    assert scheme.make(strided) == scheme.make(np.asfortranarray(states)) == scheme.make(states)
    assert scheme.compare(scheme.make(states), strided).distance == 0


def test_noise_moves_a_proof_by_its_size(scheme: Projection, random: np.random.Generator) -> None:
    channels = model(random)
    for _ in range(8):
        states = text(random, 64, channels)
        found = [
            scheme.compare(scheme.make(noisy(random, states, noise)), states).distance
            for noise in (0.001, 0.01, 0.05, 0.2)
        ]
        assert found == sorted(found)
        assert found[1] < HONEST
        assert 0.03 < found[2] < 0.08
        assert 0.12 < found[3] < 0.3


@pytest.mark.parametrize("tokens", [8, 64])
def test_whatever_else_it_is_made_of_is_far(
    scheme: Projection, random: np.random.Generator, tokens: int
) -> None:
    channels = model(random)
    states = text(random, tokens, channels)
    cases = changed(random, states, channels)
    cheats = {name: one for name, one in cases.items() if not name.startswith(("equal", "noise"))}
    louder = scheme.compare(scheme.make(cheats.pop("x 1.05")), states).distance
    assert 2 * HONEST < louder < 0.06
    assert len(cheats) == 7
    for name, other in cheats.items():
        assert scheme.compare(scheme.make(other), states).distance > FAR, name


def test_one_foreign_token_in_a_long_reply_is_seen(
    scheme: Projection, random: np.random.Generator
) -> None:
    channels = model(random)
    states = text(random, 256, channels)
    honest = noisy(random, states, 0.01)
    edited = honest.copy()
    edited[100] = text(random, 1, channels)
    before = scheme.compare(scheme.make(honest), states).distance
    assert scheme.compare(scheme.make(edited), states).distance > before + 0.001


def test_the_proof_of_a_longer_or_shorter_text_is_refused(
    scheme: Projection, random: np.random.Generator
) -> None:
    states = text(random, 64, model(random, 128))
    for tokens in (1, 31, 32, 63):
        for proof, said in ((scheme.make(states), tokens), (scheme.make(states[:tokens]), 64)):
            with pytest.raises(BadProof, match=f"of {said} tokens"):
                scheme.check(proof, said)
            with pytest.raises(BadProof, match=f"of {said} tokens"):
                scheme.compare(proof, states[:said])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])
def test_no_proof_is_made_of_states_that_are_not_finite(
    scheme: Projection, random: np.random.Generator, value: float
) -> None:
    states = text(random, 40, model(random, 128))
    wrong = states.copy()
    wrong[39, 7] = value
    with pytest.raises(ProofFailed, match="hidden states"):
        scheme.make(wrong)
    with pytest.raises(ProofFailed, match="hidden states"):
        scheme.compare(scheme.make(states), wrong, [states])
    if not np.isfinite(value):
        with pytest.raises(ProofFailed, match="hidden states"):
            scheme.compare(scheme.make(states), states, [wrong])


def test_no_proof_is_made_of_nothing(scheme: Projection) -> None:
    for shape in ((0, 64), (64,), (3, 0), (1, 2, 64)):
        with pytest.raises(ProofFailed):
            scheme.make(np.zeros(shape, np.float32))
    with pytest.raises(BadProof):
        scheme.check(b"", 0)
    with pytest.raises(BadProof):
        scheme.check(b"", -1)


def test_a_model_that_thinks_nothing_can_be_compared(scheme: Projection) -> None:
    nothing = np.zeros((33, 64), np.float32)
    compared = scheme.compare(scheme.make(nothing), nothing, [nothing])
    assert (compared.distance, compared.own, compared.others) == (0, 0, (0,))
    something = scheme.make(np.ones((33, 64), np.float32))
    assert scheme.compare(something, nothing).distance >= 1


def test_it_tells_which_of_two_near_policies_was_at_work(scheme: Projection) -> None:
    """Policies 0.1 % apart under 1 % noise: about 2 nats for each 64 tokens."""
    honest, cheat = measured(32, 64, 0.001)
    assert honest.sum() < -10
    assert cheat.sum() > 10
    honest, cheat = measured(4, 64, 0.005)
    assert honest.sum() < -40
    assert cheat.sum() > 40


def test_a_few_absurd_tokens_do_not_hide_the_other_policy(
    scheme: Projection, random: np.random.Generator
) -> None:
    channels = model(random)
    right = text(random, 64, channels)
    wrong = noisy(random, right, 0.005)
    sent = noisy(random, wrong, 0.01)
    sent[::16] = 3 * noisy(random, sent[::16], 0.5)
    compared = scheme.compare(scheme.make(sent), right, [wrong])
    assert ratio(compared) > 5
    assert compared.distance > 2 * HONEST


def test_every_other_policy_is_measured_in_order(
    scheme: Projection, random: np.random.Generator
) -> None:
    right = text(random, 64, model(random))
    others = [noisy(random, right, far) for far in (0.05, 0.02, 0.1)]
    compared = scheme.compare(scheme.make(right), right, others)
    near = sorted((compared.own, *compared.others))
    assert near == [compared.own, compared.others[1], compared.others[0], compared.others[2]]
