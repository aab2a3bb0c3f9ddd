"""A bounded number of mutated payloads, manifests and messages: refused properly, or decoded properly."""

import random
import tracemalloc

import pytest
from fuzz import targets
from fuzz.mutating import SEEDS, mangled, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import weights_cases as cases

from primerl.node.weights.blocks import max_body
from primerl.node.weights.codec import decode_full
from primerl.node.weights.state import CodecError
from primerl.node.weights.state_history import state_bytes

RANDOM = st.randoms(use_true_random=False)
BOUNDED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def relative(rng: random.Random, seed: bytes) -> bytes:
    """`seed` after one to four mutations."""
    for _ in range(rng.randrange(1, 5)):
        seed = mutated(rng, seed, lambda data: mangled(rng, data))
    return seed


def test_every_seed_is_accepted() -> None:
    assert [number for number, seed in enumerate(SEEDS) if not targets.run(seed)] == []


def test_inputs_that_fuzzers_kept_are_refused_or_decoded_as_they_must() -> None:
    kept = targets.kept()
    assert kept
    for data in kept:
        targets.run(data)


@pytest.mark.parametrize("name", [target.__name__ for target in targets.TARGETS])
@BOUNDED
@given(st.data())
def test_relatives_of_valid_bytes_are_refused_or_decoded_as_they_must(
    name: str, data: st.DataObject
) -> None:
    number = [target.__name__ for target in targets.TARGETS].index(name)
    seed = data.draw(st.sampled_from([one for one in SEEDS if one[0] == number]))
    targets.run(relative(data.draw(RANDOM), seed))


@BOUNDED
@given(st.integers(0, len(targets.TARGETS) - 1), st.binary(max_size=200))
def test_noise_is_refused_or_decoded_as_it_must(number: int, noise: bytes) -> None:
    targets.run(bytes([number]) + noise)


def test_mutations_reach_behind_the_first_check() -> None:
    """Else the tests above would only ever see one refusal."""
    rng = random.Random(1)
    reasons: set[str] = set()
    accepted = 0
    for seed in (targets.STEP, targets.WHOLE):
        decoder = 1 if seed is targets.STEP else 0
        for _ in range(400):
            data = relative(rng, bytes([decoder]) + seed)[1:]
            try:
                if decoder:
                    cases.applied(targets.BASE, data, targets.INFOS)
                else:
                    decode_full(data, targets.INFOS)
                accepted += 1
            except CodecError as error:
                reasons.add("".join(c for c in str(error) if c.isalpha() or c == " "))
    assert accepted > 20
    assert len(reasons) > 20


LARGEST = max(info.shape[0] if info.shape else 1 for info in targets.INFOS)
SLACK = 1 << 17
"""Bytes: names, lists, exceptions with their frames; what python itself holds on to."""


def peak(decoder: str, data: bytes) -> int:
    """Most bytes that were allocated while decoding."""
    tracemalloc.start()
    try:
        if decoder == "full":
            decode_full(data, targets.INFOS)
        else:
            cases.applied(targets.BASE, data, targets.INFOS)
    except CodecError:
        pass
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("decoder", ["full", "step"])
@settings(BOUNDED, max_examples=100)
@given(RANDOM)
def test_whatever_comes_costs_what_the_manifest_implies_and_one_block(
    decoder: str, rng: random.Random
) -> None:
    number = [target.__name__ for target in targets.TARGETS].index(decoder)
    seed = next(one for one in SEEDS if one[0] == number)
    data = relative(rng, seed)[1:]
    block = 32 * LARGEST + max_body(LARGEST, 8)
    assert peak(decoder, data) <= state_bytes(targets.NEW) + len(data) + block + SLACK
