"""Copies are found however they are cut, and whoever sent a text first is blamed for nothing."""

from collections.abc import Sequence
from itertools import permutations

import msgspec
import numpy as np
import pytest

from primerl.node.verification.duplicates import (
    SHARE,
    SURPRISE,
    DuplicateIndex,
    KnownText,
    Owner,
    SampledText,
    SavedDuplicates,
)

VICTIM, THIEF, THIRD = b"victim", b"thief", b"third"
CLEAN = KnownText()


def drawn(seed: int, tokens: int = 200, nats: float = 2.0) -> SampledText:
    """A text of its own, every token with so much surprise."""
    random = np.random.default_rng(seed)
    return SampledText(random.integers(0, 150_000, tokens).tolist(), [-nats] * tokens)


def cut(text: SampledText, start: int, end: int) -> SampledText:
    """A part of a text."""
    return SampledText(text.tokens[start:end], text.logprobs[start:end])


def joined(*texts: SampledText) -> SampledText:
    """Texts one after the other."""
    return SampledText(
        [token for text in texts for token in text.tokens],
        [number for text in texts for number in text.logprobs],
    )


def edited(text: SampledText, places: Sequence[int]) -> SampledText:
    """A text with other tokens at these places."""
    tokens = list(text.tokens)
    for place in places:
        tokens[place] += 1
    return SampledText(tokens, text.logprobs)


def test_a_copy_is_found_and_its_source_named() -> None:
    book = DuplicateIndex()
    assert book.add(Owner(1, 0, VICTIM), [drawn(1)]) == CLEAN
    assert book.add(Owner(2, 0, VICTIM), [drawn(2)]) == CLEAN
    found = book.add(Owner(3, 7, THIEF), [drawn(1)])
    assert found == KnownText(copy_of=Owner(1, 0, VICTIM), share=1.0)


def test_repeating_oneself_is_copying_too() -> None:
    book = DuplicateIndex()
    book.add(Owner(1, 0, THIEF), [drawn(1)])
    assert book.add(Owner(1, 1, THIEF), [drawn(1)]).copy_of == Owner(1, 0, THIEF)
    assert book.add(Owner(2, 0, THIEF), [drawn(1)]).copy_of == Owner(1, 0, THIEF)


def test_who_was_received_first_is_never_blamed_though_verified_last() -> None:
    book = DuplicateIndex()
    assert book.add(Owner(9, 0, THIEF), [drawn(1)]) == CLEAN
    found = book.add(Owner(5, 0, VICTIM), [drawn(1)])
    assert found == KnownText(copied_by=Owner(9, 0, THIEF))
    assert book.add(Owner(7, 0, THIRD), [drawn(1)]).copy_of == Owner(5, 0, VICTIM)
    assert book.add(Owner(9, 0, THIEF), [drawn(1)]).copy_of == Owner(5, 0, VICTIM)


@pytest.mark.parametrize("shift", [1, 5, 31, 32, 33])
def test_the_first_is_not_blamed_when_its_copy_was_shifted_and_verified_before(shift: int) -> None:
    book = DuplicateIndex()
    text = drawn(1)
    book.add(Owner(9, 0, THIEF), [joined(drawn(2, shift), text)])
    found = book.add(Owner(5, 0, VICTIM), [text])
    assert found.copy_of is None
    assert found.share == 0
    assert found.copied_by == Owner(9, 0, THIEF)


def test_verifying_an_arrival_again_blames_nobody() -> None:
    """As after a crash: the order is the same, and so is the answer."""
    book = DuplicateIndex()
    for _ in range(3):
        assert book.add(Owner(1, 0, VICTIM), [drawn(1)]) == CLEAN
        assert book.add(Owner(1, 1, VICTIM), [drawn(2)]) == CLEAN
        assert book.add(Owner(2, 0, THIEF), [drawn(1)]).copy_of == Owner(1, 0, VICTIM)


@pytest.mark.parametrize("shift", [1, 7, 16, 31, 32, 50])
def test_shifting_a_text_hides_nothing(shift: int) -> None:
    book = DuplicateIndex()
    text = drawn(1, 300)
    book.add(Owner(1, 0, VICTIM), [text])
    longer = book.add(Owner(2, 0, THIEF), [joined(drawn(2, shift), text, drawn(3, 20))])
    shorter = book.add(Owner(3, 0, THIRD), [cut(text, shift, 300)])
    assert longer.copy_of == shorter.copy_of == Owner(1, 0, VICTIM)


def test_a_patchwork_frames_none_of_its_sources_in_any_order_of_verification() -> None:
    texts = [drawn(seed, 160) for seed in range(3)]
    rollouts = [(Owner(at, 0, VICTIM), text) for at, text in enumerate(texts)]
    rollouts.append((Owner(3, 0, THIEF), joined(drawn(9, 5), *texts)))
    for order in permutations(rollouts):
        book = DuplicateIndex()
        found = {owner: book.add(owner, [text]) for owner, text in order}
        assert all(one.copy_of is None for owner, one in found.items() if owner.node == VICTIM)


def test_a_few_edits_hide_nothing_and_many_do() -> None:
    """With an edit in every window no 32 tokens are alike; seeds and logprobs tell on such a text."""
    book = DuplicateIndex()
    text = drawn(1, 320)
    book.add(Owner(1, 0, VICTIM), [text])
    few = book.add(Owner(2, 0, THIEF), [edited(text, (10, 100, 101))])
    assert few.copy_of == Owner(1, 0, VICTIM)
    assert few.share == pytest.approx(0.8)
    many = book.add(Owner(3, 0, THIRD), [edited(text, range(0, 320, 25))])
    assert many.copy_of is None


def test_tokens_inserted_between_are_no_hiding_place() -> None:
    book = DuplicateIndex()
    text = drawn(1, 320)
    book.add(Owner(1, 0, VICTIM), [text])
    pieces = [piece for at in range(0, 320, 80) for piece in (drawn(at, 3), cut(text, at, at + 80))]
    assert book.add(Owner(2, 0, THIEF), [joined(*pieces)]).copy_of == Owner(1, 0, VICTIM)


def test_half_a_text_is_the_bar() -> None:
    for own, copied in ((126, True), (130, False)):
        book = DuplicateIndex()
        book.add(Owner(1, 0, VICTIM), [drawn(1, 128)])
        found = book.add(Owner(2, 0, THIEF), [joined(drawn(2, own), drawn(1, 128))])
        assert (found.copy_of is not None) is copied
        assert (found.share >= SHARE) is copied


def test_a_patchwork_of_many_texts_is_a_copy_of_the_one_that_gave_most() -> None:
    book = DuplicateIndex()
    sources = [drawn(seed, 96) for seed in range(4)]
    for number, text in enumerate(sources):
        book.add(Owner(number, 0, VICTIM), [text])
    patchwork = joined(cut(sources[1], 0, 32), sources[2], cut(sources[3], 32, 96))
    found = book.add(Owner(9, 0, THIEF), [patchwork])
    assert found == KnownText(copy_of=Owner(2, 0, VICTIM), share=1.0)


def test_the_branches_of_a_rollout_count_together_and_not_against_each_other() -> None:
    book = DuplicateIndex()
    assert book.add(Owner(1, 0, VICTIM), [drawn(1), drawn(1), drawn(2)]) == CLEAN
    spread = book.add(Owner(2, 0, THIEF), [drawn(3), drawn(2), drawn(1)])
    assert spread.copy_of is not None
    assert spread.share == pytest.approx(2 / 3)
    assert book.add(Owner(3, 0, THIRD), [drawn(2), drawn(4), drawn(5)]).copy_of is None


@pytest.mark.parametrize(
    ("tokens", "nats"), [(200, 0.0), (200, 0.1), (19, 2.0), (1, 1000.0), (3, np.inf), (0, 1.0)]
)
def test_short_and_near_certain_replies_are_copies_of_nobody(tokens: int, nats: float) -> None:
    book = DuplicateIndex()
    for arrival in range(3):
        assert book.add(Owner(arrival, 0, b"%d" % arrival), [drawn(1, tokens, nats)]) == CLEAN
    assert len(book) == 0


@pytest.mark.parametrize(("tokens", "nats"), [(20, 2.0), (31, 1.5), (300, 0.15), (700, 0.07)])
def test_a_whole_reply_with_enough_surprise_is_found_at_any_length(
    tokens: int, nats: float
) -> None:
    assert tokens * nats >= SURPRISE
    book = DuplicateIndex()
    book.add(Owner(1, 0, VICTIM), [drawn(1, tokens, nats)])
    found = book.add(Owner(2, 0, THIEF), [drawn(1, tokens, nats)])
    assert found == KnownText(copy_of=Owner(1, 0, VICTIM), share=1.0)


def test_nobody_is_framed_by_what_another_claims() -> None:
    """A forger says that a certain text was a surprise; who honestly draws it says that it was not."""
    book = DuplicateIndex()
    certain = drawn(1, 200, 0.01)
    book.add(Owner(1, 0, THIEF), [SampledText(certain.tokens, [-9.0] * 200)])
    assert book.add(Owner(2, 0, VICTIM), [certain]) == CLEAN


def test_claiming_a_little_less_surprise_hides_nothing() -> None:
    """40.6 nats in 32 tokens become 39.9: the same text is also remembered by larger windows."""
    book = DuplicateIndex()
    text = drawn(1, 320, 1.27)
    book.add(Owner(1, 0, VICTIM), [text])
    found = book.add(Owner(2, 0, THIEF), [SampledText(text.tokens, [-1.245] * 320)])
    assert found.copy_of == Owner(1, 0, VICTIM)


def test_what_is_no_number_is_no_surprise() -> None:
    book = DuplicateIndex()
    text = SampledText(drawn(1).tokens, [float("nan")] * 200)
    assert book.add(Owner(1, 0, VICTIM), [text]) == CLEAN
    assert book.add(Owner(2, 0, THIEF), [text]) == CLEAN


def test_a_common_beginning_is_no_copy() -> None:
    book = DuplicateIndex()
    opening = drawn(0, 64)
    for arrival in range(1, 50):
        found = book.add(Owner(arrival, 0, VICTIM), [joined(opening, drawn(arrival, 136))])
        assert found.copy_of is None


def test_unequal_texts_are_never_mistaken() -> None:
    book = DuplicateIndex()
    found = {
        book.add(Owner(arrival, 0, VICTIM), [drawn(arrival, 20 + 13 * (arrival % 60))])
        for arrival in range(180)
    }
    assert found == {CLEAN}


def test_memory_is_bounded_and_the_longest_unmet_go_first() -> None:
    book = DuplicateIndex(max_windows=100)
    book.add(Owner(0, 0, VICTIM), [drawn(0)])
    book.add(Owner(1, 0, VICTIM), [drawn(1)])
    for arrival in range(2, 40):
        book.add(Owner(arrival, 0, THIRD), [drawn(arrival)])
        assert book.add(Owner(arrival, 1, THIEF), [drawn(0)]).copy_of == Owner(0, 0, VICTIM)
        assert len(book) <= 100
    assert len(book) == 100
    assert book.add(Owner(50, 0, THIEF), [drawn(1)]).copy_of is None
    huge = DuplicateIndex(max_windows=10)
    huge.add(Owner(0, 0, VICTIM), [drawn(0, 5000)])
    assert len(huge) == 10


def test_what_was_saved_is_known_after_a_restart() -> None:
    book = DuplicateIndex()
    for arrival in range(5):
        book.add(Owner(arrival, 3, VICTIM), [drawn(arrival)])
    stored = msgspec.msgpack.encode(book.snapshot())
    again = DuplicateIndex()
    again.add(Owner(77, 0, THIRD), [drawn(77)])
    again.restore(msgspec.msgpack.decode(stored, type=SavedDuplicates))
    assert again.snapshot() == book.snapshot()
    assert again.add(Owner(9, 0, THIEF), [drawn(2)]).copy_of == Owner(2, 3, VICTIM)
    assert again.add(Owner(99, 0, THIEF), [drawn(77)]).copy_of is None
    small = DuplicateIndex(max_windows=7)
    small.restore(book.snapshot())
    assert len(small) == 7
    assert len(again) > 7
