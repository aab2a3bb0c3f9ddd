"""What is found, of whom and how much is what the search found that looked up every window by itself."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.copies_reference import ReferenceDetector

from primerl.node.environments.environment import Branch
from primerl.node.verification.checks import CheckedRollout, Rejected
from primerl.node.verification.duplicates import SIZES, CopyDetector

Random = np.random.Generator
Text = tuple[list[int], list[float]]
"""Sampled tokens and their logprobs."""
NODES = [bytes([number]) * 32 for number in range(5)]
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 8))]


def drawn(random: Random, tokens: int) -> Text:
    """A text of its own: all tokens equally likely, or some near certain, or one logprob nonsense."""
    nats = random.choice([0.02, 0.1, 0.4, 1.27, 2.0, 2.0, 2.0, 9.0]) * np.ones(tokens)
    if random.random() < 0.4:
        nats *= random.exponential(1.0, tokens)
    if tokens and random.random() < 0.05:
        nats[random.integers(tokens)] = random.choice([np.nan, np.inf, -np.inf, -1.0])
    return random.integers(0, 150_000, tokens).tolist(), (-nats).tolist()


def cut(text: Text, start: int, end: int) -> Text:
    return text[0][start:end], text[1][start:end]


def joined(texts: Sequence[Text]) -> Text:
    return [token for text in texts for token in text[0]], [x for text in texts for x in text[1]]


def length(random: Random) -> int:
    return int(random.choice([1, 20, 31, 32, 33, 64, 100, 128, 200, 256, 300, 512, 700]))


def stretch(random: Random, text: Text) -> Text:
    """A part of a text: of the size of a window, a token more or less, or of any size."""
    size = int(random.choice([*SIZES, length(random)])) + int(random.integers(-1, 2))
    start = int(random.integers(0, max(1, len(text[0]) - size + 1)))
    return cut(text, start, start + size)


def shifted(random: Random, text: Text) -> Text:
    ends = [drawn(random, int(random.integers(0, 70))) for _ in range(2)]
    return joined([ends[0], text, ends[1]])


def beheaded(random: Random, text: Text) -> Text:
    return cut(text, int(random.integers(0, 70)), len(text[0]) - int(random.integers(0, 70)))


def edited(random: Random, text: Text) -> Text:
    tokens = list(text[0])
    for place in random.integers(0, max(1, len(tokens)), int(random.integers(0, 12))).tolist():
        tokens[place : place + 1] = random.integers(0, 150_000, int(random.integers(0, 3))).tolist()
    return tokens, (text[1] + [-1.0] * 24)[: len(tokens)]


def claimed_otherwise(random: Random, text: Text) -> Text:
    """The same words, said to be a little or much likelier than they were."""
    factor = float(random.choice([0.0, 0.02, 0.5, 0.98, 1.02, 3.0]))
    return text[0], [factor * logprob for logprob in text[1]]


def periodic(random: Random) -> Text:
    """One sentence again and again: windows at all offsets are alike."""
    sentence = drawn(random, int(random.choice([1, 2, 7, 32, 40])))
    return cut(joined([sentence] * 400), 0, length(random))


def thue_morse(random: Random) -> Text:
    """Texts that collide in polynomial hashes modulo 2^64, whatever the base."""
    words = random.integers(0, 150_000, 2)
    flip = int(random.integers(2))
    tokens = [int(words[(number.bit_count() + flip) % 2]) for number in range(700)]
    return cut((tokens, [-2.0] * len(tokens)), 0, length(random))


def patchwork(random: Random, pool: Sequence[Text]) -> Text:
    picked = [pool[int(at)] for at in random.integers(0, len(pool), int(random.integers(2, 6)))]
    return joined([stretch(random, text) for text in picked])


def next_text(random: Random, pool: Sequence[Text]) -> Text:
    if not pool or random.random() < 0.2:
        return drawn(random, length(random))
    text = pool[int(random.integers(0, len(pool)))]
    chosen = random.integers(0, 9)
    if chosen < 5:
        change = (shifted, beheaded, edited, claimed_otherwise, stretch)[chosen]
        return change(random, text)
    if chosen == 5:
        return periodic(random)
    if chosen == 6:
        return thue_morse(random)
    if chosen == 7:
        return patchwork(random, pool)
    own = drawn(random, length(random))
    return joined([own, stretch(random, text), own] if random.random() < 0.5 else [text, own])


def branch(random: Random, text: Text) -> Branch:
    """A branch of one turn, or with the words of an environment in between."""
    tokens, sampled, logprobs = [7], [False], [0.0]
    at = 0
    while at < len(text[0]):
        size = len(text[0]) if random.random() < 0.8 else int(random.integers(1, 200))
        part = cut(text, at, at + size)
        tokens += [*part[0], 8]
        sampled += [True] * len(part[0]) + [False]
        logprobs += [*part[1], 0.0]
        at += size
    return Branch(tokens, sampled, logprobs, 3, 3, "stop")


def verdict(
    detector: CopyDetector | ReferenceDetector,
    arrival: int,
    node: bytes,
    rollout: CheckedRollout,
    top_p: float,
) -> str:
    try:
        detector.check(arrival, node, rollout, top_p=top_p)
    except Rejected as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("windows", [3, 40, 200, 1 << 14])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_copies_are_found_of_the_same_senders(windows: int, seed: int) -> None:
    """Stores that are full forget the same texts, too."""
    random = np.random.default_rng([seed, windows])
    detector = CopyDetector(windows, secret=bytes([seed]))
    reference = ReferenceDetector(windows)
    pool: list[Text] = []
    calls: list[tuple[int, bytes, CheckedRollout, float]] = []
    copies = 0
    for number in range(60):
        if calls and random.random() < 0.1:  # verified again, as after a crash
            call = calls[int(random.integers(0, len(calls)))]
        else:
            texts = [next_text(random, pool) for _ in range(int(random.choice([1, 1, 1, 2, 4])))]
            pool += texts
            branches = [branch(random, text) for text in texts]
            index = int(random.integers(0, 16))
            rollout = CheckedRollout(int(random.integers(0, 3)), index, branches, 0.0)
            # an arrival may be verified after one that came later
            arrival = number // 4 + int(random.integers(0, 3))
            top_p = float(random.choice([1.0, 1.0, 0.9, 0.1]))
            call = arrival, NODES[arrival % len(NODES)], rollout, top_p
            calls.append(call)
        expected = verdict(reference, *call)
        assert verdict(detector, *call) == expected
        assert len(detector) == len(reference)
        copies += bool(expected)
    assert copies or windows < 200


@pytest.mark.parametrize("windows", [3, 40, 1 << 14])
@pytest.mark.parametrize("seed", SEEDS)
def test_rollouts_that_are_checked_together_are_found_as_one_after_the_other(
    windows: int, seed: int
) -> None:
    random = np.random.default_rng([seed, windows, 1])
    together, alone = (CopyDetector(windows, secret=bytes([seed])) for _ in range(2))
    pool: list[Text] = []
    copies = originals = 0
    for number in range(20):
        rollouts: list[CheckedRollout] = []
        for place in random.permutation(int(random.integers(0, 12))).tolist():
            texts = [next_text(random, pool) for _ in range(int(random.choice([0, 1, 1, 1, 3])))]
            pool += texts if random.random() < 0.7 else []
            branches = [branch(random, text) for text in texts]
            rollouts.append(CheckedRollout(place % 3, place, branches, 0.0))
        arrival = number + int(random.integers(0, 3))
        node, top_p = NODES[arrival % len(NODES)], float(random.choice([1.0, 1.0, 0.9, 0.1]))
        expected = [verdict(alone, arrival, node, rollout, top_p) for rollout in rollouts]
        faults = together.check_all(arrival, node, rollouts, top_p=top_p)
        assert ["" if fault is None else str(fault) for fault in faults] == expected
        assert len(together) == len(alone)
        copies += sum(map(bool, expected))
        originals += sum(not fault for fault in expected)
    assert originals
    assert copies or windows < 200


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 17])
def test_a_part_of_each_size_is_found_as_before(size: int, offset: int) -> None:
    """Nats are such that this is the smallest size of window that counts."""
    random = np.random.default_rng([size, offset])
    tokens = random.integers(0, 150_000, 4 * size).tolist()
    source = (tokens, [-41.0 / size] * len(tokens))
    own = drawn(random, size // 2)
    stolen = joined([own, cut(source, size - offset, 3 * size), own])
    detector, reference = CopyDetector(), ReferenceDetector()
    expected = ""
    for arrival, text in enumerate((source, stolen)):
        rollout = CheckedRollout(0, 0, [branch(random, text)], 0.0)
        expected = verdict(reference, arrival, NODES[arrival], rollout, 1.0)
        assert verdict(detector, arrival, NODES[arrival], rollout, 1.0) == expected
    assert "came with arrival 0" in expected
