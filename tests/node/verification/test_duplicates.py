"""Copies are found however they are cut, and the first sender of a text is blamed for nothing."""

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest

from primerl.crypto.hashing import short
from primerl.node.environments.environment import Branch
from primerl.node.verification.checks import CheckedRollout, Rejected
from primerl.node.verification.duplicates import (
    SHARE,
    SIZES,
    SURPRISE,
    WINDOW_BYTES,
    CopyDetector,
    WindowHashes,
)
from primerl.protocol.errors import Reason

VICTIM, THIEF, THIRD = b"victim", b"thief", b"third"


class Text(NamedTuple):
    tokens: Sequence[int]
    logprobs: Sequence[float]


def drawn(seed: int, tokens: int = 200, nats: float = 2.0) -> Text:
    """A text of its own, every token with that much surprise."""
    random = np.random.default_rng(seed)
    return Text(random.integers(0, 150_000, tokens).tolist(), [-nats] * tokens)


def cut(text: Text, start: int, end: int) -> Text:
    return Text(text.tokens[start:end], text.logprobs[start:end])


def joined(*texts: Text) -> Text:
    return Text(
        [token for text in texts for token in text.tokens],
        [number for text in texts for number in text.logprobs],
    )


def edited(text: Text, places: Sequence[int]) -> Text:
    """A text with other tokens at these places."""
    tokens = list(text.tokens)
    for place in places:
        tokens[place] += 1
    return Text(tokens, text.logprobs)


def branch_of(text: Text) -> Branch:
    sampled = [False] + [True] * len(text.tokens)
    return Branch([7, *text.tokens], sampled, [0.0, *text.logprobs], 3, 3, "stop")


class Book(CopyDetector):
    """A detector that is told of texts, and says what it found."""

    def source(self, arrival: int, node: bytes, *texts: Text, index: int = 0) -> str:
        """The share that was copied, and of whose arrival; empty if it is no copy."""
        branches = [branch_of(text) for text in texts]
        try:
            self.check(arrival, node, CheckedRollout(0, index, branches, 0.0))
        except Rejected as fault:
            return fault.detail if fault.reason == Reason.DUPLICATE else "another reason"
        return ""

    def copied(self, arrival: int, node: bytes, *texts: Text, index: int = 0) -> bool:
        return bool(self.source(arrival, node, *texts, index=index))


def of(arrival: int, node: bytes, share: int = 100) -> str:
    return f"{share}% of its tokens came with arrival {arrival} of {short(node)}"


@pytest.fixture
def book() -> Book:
    return Book()


def test_a_copy_is_found_and_its_source_named(book: Book) -> None:
    assert not book.copied(1, VICTIM, drawn(1))
    assert not book.copied(2, VICTIM, drawn(2))
    assert book.source(3, THIEF, drawn(1), index=7) == of(1, VICTIM)
    # to repeat oneself is to copy, too
    assert book.source(2, VICTIM, drawn(2), index=1) == of(2, VICTIM)
    assert book.source(4, VICTIM, drawn(2)) == of(2, VICTIM)


@pytest.mark.parametrize("shift", [0, 1, 5, 31, 32, 33])
def test_the_first_is_not_blamed_when_its_copy_was_shifted_and_verified_before(
    book: Book, shift: int
) -> None:
    text = drawn(1)
    shifted = joined(drawn(2, shift), text)
    assert not book.copied(9, THIEF, shifted)
    assert not book.copied(5, VICTIM, text)
    assert book.source(7, THIRD, text) == of(5, VICTIM)
    assert book.copied(9, THIEF, shifted)


def test_an_arrival_that_is_verified_again_is_no_copy(book: Book) -> None:
    """As after a crash: the order is the same, and so is the answer."""
    for _ in range(3):
        assert not book.copied(1, VICTIM, drawn(1))
        assert not book.copied(1, VICTIM, drawn(2), index=1)
        assert book.source(2, THIEF, drawn(1)) == of(1, VICTIM)


@pytest.mark.parametrize("shift", [1, 7, 16, 31, 32, 50])
def test_shifting_a_text_hides_nothing(book: Book, shift: int) -> None:
    text = drawn(1, 300)
    assert not book.copied(1, VICTIM, text)
    assert "arrival 1 " in book.source(2, THIEF, joined(drawn(2, shift), text, drawn(3, 20)))
    assert "arrival 1 " in book.source(3, THIRD, cut(text, shift, 300))


def test_a_patchwork_frames_none_of_its_sources_in_any_order_of_verification() -> None:
    texts = [drawn(seed, 160) for seed in range(3)]
    rollouts = [(at, VICTIM, text) for at, text in enumerate(texts)]
    rollouts.append((3, THIEF, joined(drawn(9, 5), *texts)))
    for order in permutations(rollouts):
        book = Book()
        found = [(node, book.copied(at, node, text)) for at, node, text in order]
        assert not any(copied for node, copied in found if node == VICTIM)


def test_a_few_edits_hide_nothing_and_many_do(book: Book) -> None:
    """With an edit in every window no 32 tokens are alike; seeds and logprobs tell on such a text."""
    text = drawn(1, 320)
    book.copied(1, VICTIM, text)
    assert book.source(2, THIEF, edited(text, (10, 100, 101))) == of(1, VICTIM, 80)
    assert not book.copied(3, THIRD, edited(text, range(0, 320, 25)))


def test_tokens_inserted_between_are_no_hiding_place(book: Book) -> None:
    text = drawn(1, 320)
    book.copied(1, VICTIM, text)
    pieces = [piece for at in range(0, 320, 80) for piece in (drawn(at, 3), cut(text, at, at + 80))]
    assert "arrival 1 " in book.source(2, THIEF, joined(*pieces))


@pytest.mark.parametrize(("own", "copied"), [(126, True), (130, False)])
def test_half_a_text_is_the_bar(book: Book, own: int, copied: bool) -> None:
    assert (128 / (128 + own) >= SHARE) is copied
    book.copied(1, VICTIM, drawn(1, 128))
    assert book.copied(2, THIEF, joined(drawn(2, own), drawn(1, 128))) is copied


def test_a_patchwork_of_many_texts_is_a_copy_of_the_one_that_gave_most(book: Book) -> None:
    sources = [drawn(seed, 96) for seed in range(4)]
    for number, text in enumerate(sources):
        book.copied(number, VICTIM, text)
    patchwork = joined(cut(sources[1], 0, 32), sources[2], cut(sources[3], 32, 96))
    assert book.source(9, THIEF, patchwork) == of(2, VICTIM)


def test_the_branches_of_a_rollout_count_together_and_not_against_each_other(book: Book) -> None:
    assert not book.copied(1, VICTIM, drawn(1), drawn(1), drawn(2))
    assert book.source(2, THIEF, drawn(3), drawn(2), drawn(1)) == of(1, VICTIM, 67)
    assert not book.copied(3, THIRD, drawn(2), drawn(4), drawn(5))


@pytest.mark.parametrize(
    ("tokens", "nats"), [(200, 0.0), (200, 0.1), (19, 2.0), (1, 1000.0), (3, np.inf), (200, np.nan)]
)
def test_short_and_near_certain_replies_are_no_copies(book: Book, tokens: int, nats: float) -> None:
    assert not any(book.copied(arrival, VICTIM, drawn(1, tokens, nats)) for arrival in range(3))
    assert len(book) == 0


@pytest.mark.parametrize(("tokens", "nats"), [(20, 2.0), (31, 1.5), (300, 0.15), (700, 0.07)])
def test_a_whole_reply_with_enough_surprise_is_found_at_any_length(
    book: Book, tokens: int, nats: float
) -> None:
    assert tokens * nats >= SURPRISE
    book.copied(1, VICTIM, drawn(1, tokens, nats))
    assert book.source(2, THIEF, drawn(1, tokens, nats)) == of(1, VICTIM)


def test_what_top_p_makes_likely_is_no_surprise() -> None:
    """Of two equal replies under a top-p of 0.1 each token may be ten times as likely as its logprob says."""
    for top_p, is_copy in ((1.0, True), (0.5, True), (0.1, False)):
        detector, text = CopyDetector(), drawn(1, 100)
        rollout = CheckedRollout(0, 0, [branch_of(text)], 0.0)
        detector.check(1, VICTIM, rollout, top_p=top_p)
        with pytest.raises(Rejected) if is_copy else nullcontext():
            detector.check(2, THIRD, rollout, top_p=top_p)


def test_no_worker_is_framed_by_the_claims_of_another(book: Book) -> None:
    """A forger claims that a certain text was unlikely; an honest worker that draws it claims otherwise."""
    certain = drawn(1, 200, 0.01)
    book.copied(1, THIEF, Text(certain.tokens, [-9.0] * 200))
    assert not book.copied(2, VICTIM, certain)


def test_claiming_a_little_less_surprise_hides_nothing(book: Book) -> None:
    """40.6 nats in 32 tokens become 39.9: the same text is also remembered by larger windows."""
    text = drawn(1, 320, 1.27)
    book.copied(1, VICTIM, text)
    assert "arrival 1 " in book.source(2, THIEF, Text(text.tokens, [-1.245] * 320))


def test_a_common_beginning_is_no_copy(book: Book) -> None:
    opening = drawn(0, 64)
    for arrival in range(1, 50):
        assert not book.copied(arrival, VICTIM, joined(opening, drawn(arrival, 136)))


def test_unequal_texts_are_never_mistaken(book: Book) -> None:
    lengths = [20 + 13 * (arrival % 60) for arrival in range(180)]
    assert not any(book.copied(at, VICTIM, drawn(at, length)) for at, length in enumerate(lengths))


def test_memory_is_bounded_and_the_longest_unmet_go_first() -> None:
    book = Book(max_windows=100)
    book.copied(0, VICTIM, drawn(0))
    book.copied(1, VICTIM, drawn(1))
    for arrival in range(2, 40):
        book.copied(arrival, THIRD, drawn(arrival))
        assert book.source(arrival, THIEF, drawn(0), index=1) == of(0, VICTIM)
        assert len(book) <= 100
    assert len(book) == 100
    assert not book.copied(50, THIEF, drawn(1))
    huge = Book(max_windows=10)
    huge.copied(0, VICTIM, drawn(0, 5000))
    assert len(huge) == 10


def test_a_full_store_takes_the_bytes_that_are_stated() -> None:
    Book().copied(0, VICTIM, drawn(0))  # what is imported at the first use is not the store's
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        book = Book(1 << 14)
        for arrival in range(9):
            book.copied(arrival, bytes([arrival]) * 32, drawn(arrival, 1 << 15))
        taken = tracemalloc.get_traced_memory()[0] - before
        text, twice = same_words(1 << 15), [branch_of(same_words(1 << 15))] * 2
        book.copied(20, VICTIM, text)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with pytest.raises(Rejected):
            book.check(21, THIEF, CheckedRollout(0, 0, twice, 0.0))
        beside = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(book) == 1 << 14
    assert book.nbytes == WINDOW_BYTES * (1 << 14)
    assert taken <= book.nbytes + (1 << 16)  # besides: the keys of the hashes, and the objects
    assert beside <= 200 * (1 << 16)


def steps(work: Callable[[], object]) -> int:
    """Calls of Python and C functions."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def same_words(tokens: int) -> Text:
    """Every window is like every other."""
    return Text([5] * tokens, [-2.0] * tokens)


def other_words(tokens: int) -> Text:
    return drawn(1, tokens)


@pytest.mark.parametrize("make", [other_words, same_words])
def test_a_text_eight_times_as_long_takes_no_more_steps(make: Callable[[int], Text]) -> None:
    """New or copied: numpy goes over all windows of a size at once, also if all of them are found."""
    counts: list[list[int]] = []
    for tokens in (2048, 8 * 2048):
        book, text = Book(), make(tokens)
        counts.append([steps(partial(book.source, at, VICTIM, text)) for at in range(2)])
        assert book.source(2, THIEF, text) == of(0, VICTIM)
    (new, copied), (long_new, long_copied) = counts
    assert long_new < 1.5 * new
    assert long_copied < 1.5 * copied


def test_who_does_not_know_the_secret_cannot_say_which_texts_share_a_hash() -> None:
    """Windows that are equal have equal hashes, at any offset; those of another secret have others."""
    tokens = np.array(drawn(1, 600).tokens, np.uint32)
    mine, same, other = (
        dict(WindowHashes(secret).sliding(tokens)) for secret in (b"a", b"a", b"b")
    )
    moved = dict(WindowHashes(b"a").sliding(np.concatenate([tokens[:5], tokens])))
    assert tuple(mine) == SIZES
    for size in SIZES:
        assert len(mine[size]) == 600 - size + 1
        assert np.array_equal(mine[size], same[size])
        assert np.array_equal(mine[size], moved[size][5:])
        assert not np.isin(mine[size], other[size]).any()
        assert len(np.unique(mine[size])) == len(mine[size])
    assert WindowHashes(b"a").whole(tokens) != WindowHashes(b"b").whole(tokens)


def test_each_detector_draws_a_secret_of_its_own() -> None:
    tokens = np.array(drawn(1, 40).tokens, np.uint32)
    drawn_twice = [CopyDetector(16).hashes.whole(tokens) for _ in range(2)]
    assert drawn_twice[0] != drawn_twice[1]
