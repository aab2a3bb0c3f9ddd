"""Where replies end, and the order of a group's samples: one that began first is never behind."""

import itertools
import random
from contextlib import nullcontext
from typing import Literal

import pytest
from support.protocol_cases import MANIFEST, played_otherwise

from primerl.node.environments.environment import Branch
from primerl.node.verification.checks import (
    ORDER_SLACK,
    Rejected,
    check_termination,
    late_samples,
)
from primerl.protocol.manifests import RunManifest


def sample(*drawn: tuple[int, int], later: int = 0) -> list[Branch]:
    """A sample whose first reply was drawn by (version, tokens) in order; `later`: tokens of a second turn."""
    tokens = sum(count for _, count in drawn)
    starts = itertools.accumulate((count for _, count in drawn), initial=0)
    spans = [(at, version) for at, (version, count) in zip(starts, drawn, strict=False) if count]
    if later:
        spans.append((tokens, drawn[-1][0] + 1))
    flags = [False, *[True] * tokens, *([False, *[True] * later] if later else [])]
    return [
        Branch(
            token_ids=[7] * len(flags),
            sampled=flags,
            logprobs=[-1.0] * len(flags),
            policy_first=spans[0][1],
            policy_last=spans[-1][1],
            finish="length",
            spans=tuple(spans) if len(spans) > 1 else (),
        )
    ]


def late(*samples: list[Branch]) -> set[int]:
    return set(late_samples(dict(enumerate(samples))))


OLD, NEW, NEWEST = 4, 5, 6
IN_ORDER = {
    "one version": [sample((OLD, 9)), sample((OLD, 3)), sample((OLD, 20))],
    "begun before and after": [sample((OLD, 9)), sample((NEW, 9))],
    "a short one ended before": [sample((OLD, 2)), sample((OLD, 9), (NEW, 3)), sample((NEW, 1))],
    "one went on while a later one had ended": [sample((OLD, 9), (NEW, 1)), sample((OLD, 8))],
    "micro-batches that take turns": [
        sample((OLD, 5), (NEW, 5)),
        sample((OLD, 5 + ORDER_SLACK), (NEW, 5)),
    ],
    "two changes": [
        sample((OLD, 9), (NEW, 4), (NEWEST, 2)),
        sample((OLD, 6), (NEW, 4), (NEWEST, 2)),
        sample((NEW, 3), (NEWEST, 2)),
    ],
    "later turns": [sample((OLD, 3), later=2), sample((OLD, 9), later=5)],
    "a failed one": [sample((OLD, 9)), [], sample((NEW, 9))],
}
OUT_OF_ORDER = {
    "begun before a later one that an older version drew": (
        [sample((NEW, 9)), sample((OLD, 9))],
        {0},
    ),
    "even where that one is short": ([sample((NEW, 9)), sample((OLD, 1))], {0}),
    "gone on from the first token": (
        [sample((OLD, 1), (NEW, 9)), sample((OLD, 9)), sample((OLD, 1), (NEW, 2))],
        {0},
    ),
    "overtaken": ([sample((OLD, 5), (NEW, 5)), sample((OLD, 8), (NEW, 2))], {0}),
    "one of two changes": (
        [sample((OLD, 9), (NEW, 4), (NEWEST, 2)), sample((OLD, 9), (NEW, 9))],
        {0},
    ),
    "begun anew": ([sample((OLD, 9)), sample((NEW, 4)), sample((OLD, 9)), sample((OLD, 4))], {1}),
}


@pytest.mark.parametrize("samples", IN_ORDER.values(), ids=list(IN_ORDER))
def test_what_one_engine_draws_in_step_is_in_order(samples: list[list[Branch]]) -> None:
    assert late(*samples) == set()


@pytest.mark.parametrize(("samples", "found"), OUT_OF_ORDER.values(), ids=list(OUT_OF_ORDER))
def test_a_sample_that_is_behind_a_later_one_is_found(
    samples: list[list[Branch]], found: set[int]
) -> None:
    assert late(*samples) == found


def test_the_evidence_names_tokens_and_policy() -> None:
    (why,) = late_samples({3: sample((OLD, 2), (NEW, 9)), 5: sample((OLD, 9))}).values()
    assert why == "had drawn 2 tokens when policy 5 came, the later sample 5 9"


def stepped(chance: random.Random, size: int) -> list[list[Branch]]:
    """A group as an engine with some slots draws it: a token of each that runs in every step."""
    lengths = [chance.randrange(1, 40) for _ in range(size)]
    drawn: list[list[int]] = [[] for _ in range(size)]
    version, slots = 0, chance.randrange(1, size + 1)
    while any(len(one) < length for one, length in zip(drawn, lengths, strict=True)):
        running = [i for i in range(size) if len(drawn[i]) < lengths[i]][:slots]
        for index in running:
            drawn[index].append(version)
        version += chance.random() < 0.1
    return [
        sample(*((v, len(list(run))) for v, run in itertools.groupby(versions)))
        for versions in drawn
    ]


def test_whatever_policies_come_an_engine_in_step_keeps_the_order() -> None:
    chance = random.Random(1)
    for _ in range(300):
        assert late(*stepped(chance, 8)) == set()


def test_what_is_left_without_those_that_were_found_is_in_order() -> None:
    chance = random.Random(2)
    found = 0
    for _ in range(300):
        samples = dict(enumerate(stepped(chance, 8)))
        chance.shuffle(order := list(samples))
        mixed = {index: samples[other] for index, other in enumerate(order)}
        gone = late_samples(mixed)
        found += len(gone)
        rest = {index: one for index, one in mixed.items() if index not in gone}
        assert late_samples(rest) == {}
    assert found > 300


STOPPED = played_otherwise(MANIFEST, max_tokens=4, stop=("!",))


def ending(finish: Literal["stop", "length"], *replies: list[int]) -> Branch:
    """A branch of these replies, each to a prompt of one token."""
    turns = [[7, *reply] for reply in replies]
    count = sum(map(len, turns))
    sampled = [place > 0 for turn in turns for place in range(len(turn))]
    return Branch([token for turn in turns for token in turn], sampled, [0.0] * count, 3, 3, finish)


@pytest.mark.parametrize(
    ("branch", "run", "ends"),
    [
        (ending("stop", [5, 1]), STOPPED, True),
        (ending("length", [5, 1]), STOPPED, False),
        (ending("length", [5, 6, 7, 8]), STOPPED, True),
        (ending("stop", [5, 6, 7, 8]), STOPPED, True),  # if the last one completes the string
        (ending("stop", [5, 6, 7, 8]), MANIFEST, False),
        (ending("stop", [5, 6]), STOPPED, True),
        (ending("stop", [5, 6]), MANIFEST, False),
        (ending("length", [5, 6]), STOPPED, False),
        (ending("stop", [5, 1, 6]), STOPPED, False),
        (ending("stop", [5, 6, 7, 8, 9]), STOPPED, False),
    ],
)
def test_a_reply_may_say_that_a_string_ended_it_only_where_strings_do(
    branch: Branch, run: RunManifest, ends: bool
) -> None:
    """Whether it is there, the environment finds out."""
    with nullcontext() if ends else pytest.raises(Rejected, match="bad_termination"):
        check_termination(branch, run, run.environments[0])


def test_between_turns_strings_may_end_replies_too() -> None:
    two = ending("stop", [5, 6], [5, 1])
    turns = played_otherwise(STOPPED, max_turns=2)
    check_termination(two, turns, turns.environments[0])
    without = played_otherwise(turns, stop=())
    with pytest.raises(Rejected, match="cut short"):
        check_termination(two, without, without.environments[0])
