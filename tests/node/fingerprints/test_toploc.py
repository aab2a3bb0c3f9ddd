"""The TOPLOC fingerprint: byte for byte what the paper's algorithm gives, and every sign counts."""

import hashlib
import tracemalloc

import numpy as np
import pytest
from fingerprint_cases import exact, model, text

from primerl.node.fingerprints.fingerprint import ProofFailed
from primerl.node.fingerprints.polynomial import PRIME, evaluate, interpolate
from primerl.node.fingerprints.toploc import Toploc

PROOF = Toploc()

FIRST = "ffd9c2fe31f62452c3d1bb199aaf097a"
BLOCK = "b5cb02d048687e60c727983cb792c0fad778aa99b3e0ec958b0ea01c10410377"
WHOLE = "5bc7e50111d4ae15c479fc43084025e68a0b1378e40e1f790e21bdd7948f87b8"


def newton(points: list[int], values: list[int]) -> list[int]:
    """Coefficients by divided differences and plain whole numbers, as in the paper."""
    divided = list(values)
    for gap in range(1, len(points)):
        for at in range(len(points) - 1, gap - 1, -1):
            below = pow(points[at] - points[at - gap], -1, PRIME)
            divided[at] = (divided[at] - divided[at - 1]) * below % PRIME
    coefficients, factor = [0] * len(points), [1]
    for point, share in zip(points, divided, strict=True):
        for at, one in enumerate(factor):
            coefficients[at] = (coefficients[at] + share * one) % PRIME
        raised, kept = [0, *factor], [*factor, 0]
        factor = [(up - point * same) % PRIME for up, same in zip(raised, kept, strict=True)]
    return coefficients


def paper(block: np.ndarray) -> bytes:
    """The proof of one block, by the slowest way."""
    flat = [float(number) for number in block.ravel()]
    order = sorted(range(len(flat)), key=lambda at: (-abs(flat[at]), at))
    top = order[: 4 * len(block)]
    modulus = next(m for m in range(PRIME, 0, -1) if len({at % m for at in top}) == len(top))
    bits = np.array(flat, np.float32).view(np.uint32) >> 16
    coefficients = newton([at % modulus for at in top], [int(bits[at]) for at in top])
    return np.array([modulus, *coefficients], ">u2").tobytes()


def bfloat16(states: np.ndarray) -> np.ndarray:
    """The states without the bits that bfloat16 has not."""
    return (states.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def test_a_polynomial_goes_through_its_points() -> None:
    random = np.random.default_rng(1)
    for count in (1, 2, 3, 4, 100, 128):
        points = np.stack([random.permutation(PRIME)[:count] for _ in range(3)])
        values = random.integers(0, PRIME, (3, count))
        values[0], points[1, 0] = PRIME - 1, 0
        coefficients = interpolate(points, values)
        assert coefficients.min() >= 0
        assert coefficients.max() < PRIME
        assert (evaluate(coefficients, points) == values).all()
        for row in range(3):
            assert coefficients[row].tolist() == newton(points[row].tolist(), values[row].tolist())


def test_a_polynomial_has_its_value_anywhere() -> None:
    random = np.random.default_rng(2)
    coefficients = random.integers(0, PRIME, (2, 128))
    points = np.array([[0, 1, 2, PRIME - 1], [17, 65496, 40000, 3]])
    found = evaluate(coefficients, points)
    for row, column in np.ndindex(found.shape):
        x = int(points[row, column])
        right = sum(int(c) * pow(x, t, PRIME) for t, c in enumerate(coefficients[row])) % PRIME
        assert found[row, column] == right


@pytest.mark.parametrize("width", [4, 16, 1024, 4096])
def test_every_block_is_as_in_the_paper(width: int) -> None:
    random = np.random.default_rng(width)
    states = bfloat16(text(random, 32 + 7, model(random, width)))
    assert PROOF.make(states) == paper(states[:32]) + paper(states[32:])


def test_a_modulus_that_does_not_keep_positions_apart_is_passed_over() -> None:
    states = np.zeros((32, 4096), np.float32)
    states.ravel()[[0, PRIME, 4096, 4096 + PRIME - 1]] = 8
    states[2, :124] = 4
    proof = PROOF.make(states)
    assert int.from_bytes(proof[:2], "big") == 65495
    assert proof == paper(states)


def test_a_proof_has_these_bytes() -> None:
    """Also those of PrimeIntellect's own C++, for the first block."""
    proof = PROOF.make(exact(37))
    assert proof[:16].hex() == FIRST
    assert hashlib.sha256(proof[:258]).hexdigest() == BLOCK
    assert hashlib.sha256(proof).hexdigest() == WHOLE


def test_a_block_has_the_size_of_the_paper_and_the_last_no_more_than_it_needs() -> None:
    sizes = [PROOF.size(tokens) for tokens in (1, 31, 32, 33, 64, 65)]
    assert sizes == [10, 250, 258, 268, 516, 526]


def test_who_found_the_largest_numbers_elsewhere_makes_the_same_proof() -> None:
    random = np.random.default_rng(8)
    states = bfloat16(text(random, 64, model(random, 256)))
    flat = states.reshape(2, -1)
    index = np.argsort(-np.abs(flat), axis=1, kind="stable")[:, :128]
    patterns = (np.take_along_axis(flat, index, 1).view(np.uint32) >> 16).astype(np.uint16)
    shuffled = random.permutation(128)
    assert PROOF.make_top(index[:, shuffled], patterns[:, shuffled]) == PROOF.make(states)
    patterns[1, 5] = 0xFF80
    with pytest.raises(ProofFailed, match="not finite"):
        PROOF.make_top(index, patterns)


def test_a_long_reply_is_its_blocks_one_after_the_other_in_bounded_memory() -> None:
    random = np.random.default_rng(12)
    states = text(random, 32 * 70 + 5, model(random, 16))
    blocks = [PROOF.make(states[at : at + 32]) for at in range(0, len(states), 32)]
    tracemalloc.start()
    proof = PROOF.make(states)
    compared = PROOF.compare(proof, states, [states])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert proof == b"".join(blocks)
    assert (compared.distance, compared.samples) == (0, 70 * 128 + 20)
    assert peak < 60 << 20


def test_numbers_are_rounded_to_even() -> None:
    states, rounded = np.zeros((32, 64), np.float32), np.zeros((32, 64), np.float32)
    states[:, 0], rounded[:, 0] = 1.00390625, 1.0  # halfway to 1.0078125
    states[:, 1], rounded[:, 1] = -1.01171875, -1.015625  # halfway from -1.0078125
    states[:, 2], rounded[:, 2] = 1.9999, 2.0
    assert PROOF.make(states) == PROOF.make(rounded)


def test_half_the_signs_flipped_is_half_the_way() -> None:
    random = np.random.default_rng(10)
    states = text(random, 64, model(random))
    flipped = np.where(random.random(states.shape) < 0.5, states, -states)
    assert 0.4 < PROOF.compare(PROOF.make(flipped), states).distance < 0.6


def test_a_number_that_crosses_a_binade_is_not_taken_for_another() -> None:
    states = np.full((32, 64), 0.01, np.float32)
    states[:, :4] = 2.0
    below = states.copy()
    below[:, :4] = 1.984375
    compared = PROOF.compare(PROOF.make(below), states)
    assert compared.samples == 128
    assert compared.distance == pytest.approx(0.0078125)


def test_numbers_next_to_infinity_can_be_compared() -> None:
    states = np.full((32, 64), 3.38e38, np.float32)
    assert PROOF.compare(PROOF.make(states), states).distance == 0
    assert PROOF.compare(PROOF.make(-states), states, [-states]).distance == 1


def test_states_narrower_than_a_token_commits_to_are_told() -> None:
    with pytest.raises(ProofFailed, match="width >= 4"):
        PROOF.make(np.ones((32, 3), np.float32))
