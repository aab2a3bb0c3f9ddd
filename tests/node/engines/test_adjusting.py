"""Penalties, biases, min_tokens and min_p: what they do to logits, and what makes no sense."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adjusted_cases import adjusted, by_definition, changed, left

from primerl.node.engines.adjusting import Adjusted, Adjusting
from primerl.node.engines.adjustment import MOST_BIASES, Adjustment
from primerl.node.engines.engine import GenerateRequest
from primerl.node.engines.host_frames import as_draw, as_request, read_request
from primerl.node.engines.requests import check_request
from primerl.node.engines.sampling import Narrowed, draw
from primerl.node.engines.vllm_options import ADJUSTMENT, SAMPLING, sampling_arguments
from primerl.node.engines.vllm_recorder import Recorder
from primerl.node.engines.vllm_sampling import Step
from primerl.node.errors import EngineError

torch.set_num_threads(1)
VOCABULARY, LENGTH = 12, 32
CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0, -2.0, 1.0, 0.25, -0.5, 1.5, -3.0, 0.75])
REQUEST = GenerateRequest((1, 4, 4), 8, 1.0, 11, ())
SAID = [4, 6, 6]
ASKED: dict[str, Adjustment] = {
    "nothing": Adjustment(),
    "presence": Adjustment(presence=1.5),
    "negative presence": Adjustment(presence=-2.0),
    "frequency": Adjustment(frequency=0.7),
    "repetition": Adjustment(repetition=1.3),
    "repetition below 1": Adjustment(repetition=0.5),
    "bias": Adjustment(bias=((0, -100.0), (5, 100.0), (11, 0.5))),
    "min_tokens": Adjustment(min_tokens=4, ends=(4, 0)),
    "min_tokens that are there": Adjustment(min_tokens=3, ends=(4, 0)),
    "min_p": Adjustment(min_p=0.4),
    "min_p of 1": Adjustment(min_p=1.0),
    "all": Adjustment(0.1, 0.3, -0.2, 1.7, ((4, -1.0), (6, 2.0)), 9, (9, 2, 7)),
    "in pieces": Adjustment(0.0, 0.5, 0.5, 1.2, (), 6, (9,), drawn=2),
}


def of(
    asks: list[Adjustment], prompt: tuple[int, ...] = REQUEST.prompt, said: list[int] = SAID
) -> Adjusted:
    """What is done to a row of each, after each has said the same."""
    book = Adjusting(CPU, LENGTH)
    for slot, asked in enumerate(asks):
        book.start(slot, asked, prompt)
    found = book.adjusted(np.arange(len(asks)))
    for index, token in enumerate(said):
        if found.penalties is not None:
            where = torch.full((len(asks),), len(prompt) + index)
            drawn = torch.ones(len(asks), dtype=torch.bool)
            found.penalties.note(where, torch.full((len(asks),), token), drawn)
    return found


def test_every_row_of_a_batch_gets_what_its_own_request_asks_for() -> None:
    asks = list(ASKED.values())
    found, rows = of(asks), LOGITS.expand(len(asks), -1)
    positions = torch.full((len(asks),), len(REQUEST.prompt) + len(SAID))
    made = found.apply(rows, positions, slice(None))
    for row, (name, asked) in zip(made.tolist(), ASKED.items(), strict=True):
        begun = len(REQUEST.prompt) - asked.drawn
        known = [*REQUEST.prompt, *SAID]
        wanted = changed(LOGITS.tolist(), asked, known[:begun], known[begun:])
        assert row == pytest.approx(wanted, abs=1e-5), name
    kept = found.cut(made, slice(None))
    for row, logits, asked in zip(kept.tolist(), made.tolist(), asks, strict=True):
        assert row == left(logits, asked.min_p, 1.0)
    assert torch.equal(rows, LOGITS.expand(len(asks), -1))


def test_what_asks_for_nothing_leaves_every_logit_as_it_is_to_the_bit() -> None:
    found = of([Adjustment(), ASKED["all"]])
    positions = torch.tensor([6, 6])
    made = found.cut(found.apply(LOGITS.expand(2, -1), positions, slice(None)), slice(None))
    assert torch.equal(made[0], LOGITS)


def test_a_token_that_was_thrown_away_and_drawn_again_counts_once() -> None:
    found = of([Adjustment(frequency=1.0)], said=[4, 6, 6])
    assert found.penalties is not None
    found.penalties.note(torch.tensor([4]), torch.tensor([9]), torch.tensor([True]))
    made = found.apply(LOGITS[None], torch.tensor([5]), slice(None))
    assert made.tolist()[0] == changed(
        LOGITS.tolist(), Adjustment(frequency=1.0), REQUEST.prompt, [4, 9]
    )


def test_a_row_that_ended_and_is_still_computed_harms_nothing() -> None:
    found = of([Adjustment(frequency=1.0)])
    assert found.penalties is not None
    before = found.penalties.history.clone()
    found.penalties.note(torch.tensor([LENGTH + 5]), torch.tensor([9]), torch.tensor([False]))
    assert torch.equal(found.penalties.history, before)
    found.apply(LOGITS[None], torch.tensor([LENGTH + 5]), slice(None))


def test_there_is_room_for_more_requests_and_that_of_those_that_ended_is_used_again() -> None:
    book = Adjusting(CPU, LENGTH)
    for slot in range(20):
        book.start(slot, Adjustment(presence=1.0), (slot % VOCABULARY,))
    first = book.adjusted(np.arange(20)).penalties
    assert first is not None
    assert len(set(first.where.tolist())) == 20
    assert [int(first.history[row, 0]) for row in first.where] == [one % 12 for one in range(20)]
    size = len(first.history)
    for slot in range(20):
        book.leave(slot)
    assert len(book.wanted(np.arange(20))) == 0
    for slot in range(30, 50):
        book.start(slot, Adjustment(presence=1.0), (5,))
    second = book.adjusted(np.arange(30, 50)).penalties
    assert second is not None
    assert len(second.history) == size


def rows_of(one: Adjustment, count: int, *, top_k: int = 0, top_p: float = 1.0) -> Narrowed:
    ks, ps = torch.full((count,), top_k), torch.full((count,), top_p)
    return Narrowed(torch.arange(count), ks, ps, of([one] * count))


def test_min_p_counts_before_top_p_and_after_the_temperature() -> None:
    logits = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.2, 0.15, 0.1]))
    rows = 400

    def tokens(min_p: float, temperature: float = 1.0, **limits: Any) -> set[int]:
        drawn = draw(
            logits.expand(rows, -1),
            torch.full((rows,), temperature),
            torch.arange(rows),
            torch.zeros(rows, dtype=torch.int64),
            adjusted=rows_of(Adjustment(min_p), rows, **limits),
        )
        return set(drawn.tokens.tolist())

    assert tokens(0.3) == {1, 3, 4}
    assert tokens(0.3, 2.0) == {0, 1, 2, 3, 4, 5}
    assert tokens(0.3, 0.5) == {1}
    assert tokens(0.45, top_p=0.66) == {1}  # two thirds of what min_p leaves: 0.4 of 0.6
    assert tokens(0.45, top_p=0.67) == {1, 3}
    assert tokens(0.01, top_k=2) == {1, 3}


def test_rows_without_are_drawn_as_if_the_others_were_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from primerl.node.engines import sampling

    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    columns = (torch.full((6,), 0.8), torch.arange(6), torch.full((6,), 6))
    free = draw(logits, *columns)
    asks = [ASKED["all"], ASKED["bias"]]
    limits = Narrowed(torch.tensor([1, 4]), torch.zeros(2, dtype=torch.int64), torch.ones(2))
    mixed = draw(logits, *columns, None, replace(limits, adjusted=of(asks)))
    for name in ("tokens", "logprobs", "scores", "logsumexp"):
        kept = [0, 2, 3, 5]
        assert torch.equal(getattr(mixed, name)[kept], getattr(free, name)[kept]), name
    assert int(mixed.tokens[4]) == 5
    own = torch.log_softmax(logits[4] / 0.8, -1)[5]
    assert float(mixed.logprobs[4]) == pytest.approx(float(own), abs=1e-5)
    monkeypatch.setattr(sampling, "chunk", lambda device: VOCABULARY)  # pyright: ignore
    parts = draw(logits, *columns, None, replace(limits, adjusted=of(asks)))
    assert torch.equal(parts.tokens, mixed.tokens)


WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"min_p": value}, "min_p") for value in (-0.1, 1.1, nan, inf)),
    *(({"presence": value}, "presence_penalty") for value in (-2.1, 2.1, nan, inf)),
    *(({"frequency": value}, "frequency_penalty") for value in (-2.1, 2.1, nan, -inf)),
    *(({"repetition": value}, "repetition_penalty") for value in (0.0, -1.0, 1e-300, 1e9, nan)),
    *(({"bias": ((1, value),)}, "logit_bias") for value in (100.5, -101.0, nan, inf, -inf)),
    *(({"bias": ((token, 1.0),)}, "logit_bias") for token in (-1, VOCABULARY, 2**70)),
    ({"bias": ((1, 1.0), (1, 2.0))}, "twice"),
    ({"bias": tuple((token, 1.0) for token in range(10**6))}, str(MOST_BIASES)),
    *(({"min_tokens": value}, "min_tokens") for value in (-1, 2**31)),
    *(({"min_tokens": 1, "ends": (token,)}, "min_tokens") for token in (-1, VOCABULARY)),
    ({"min_tokens": 1, "ends": tuple(range(VOCABULARY))}, "no token to draw"),
    *(({"drawn": value}, "drawn") for value in (-1, 4)),
]


@pytest.mark.parametrize(("fields", "word"), WRONG, ids=lambda one: str(one)[:40])
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(EngineError, match=word):
        check_request(adjusted(REQUEST, **fields), VOCABULARY, LENGTH)


def test_what_makes_sense_is_not_refused_except_by_a_pipeline_of_several_nodes() -> None:
    for asked in ASKED.values():
        check_request(replace(REQUEST, adjustment=asked), VOCABULARY, LENGTH)
    check_request(REQUEST, VOCABULARY, LENGTH, pipeline=True)
    with pytest.raises(EngineError, match="pipeline of several nodes"):
        check_request(adjusted(REQUEST, min_p=0.1), VOCABULARY, LENGTH, pipeline=True)


def test_it_travels_to_the_process_of_the_engine_and_into_vllms_worker() -> None:
    for asked in ASKED.values():
        one = replace(REQUEST, adjustment=asked)
        body = msgspec.msgpack.encode(as_draw(3, one))
        assert as_request(read_request(body)) == one  # pyright: ignore[reportArgumentType]
        told = sampling_arguments(one, 17)["extra_args"][ADJUSTMENT]
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(told))
        assert msgspec.convert(plain, Adjustment) == asked
    assert set(sampling_arguments(REQUEST, 17)["extra_args"]) == {SAMPLING}


class Worker:
    """A recorder in vLLM's worker, and the logits that its steps draw from."""

    def __init__(self, requests: int = 1) -> None:
        self.recorder = Recorder(
            CPU, width=4, dtype=torch.float32, fingerprint="", requests=requests, length=LENGTH
        )

    def admit(self, name: str, key: int, asked: Adjustment | None) -> None:
        self.recorder.admit(name, len(REQUEST.prompt), key, REQUEST.seed, REQUEST.temperature)
        if asked is not None:
            self.recorder.adjust(name, REQUEST.prompt, msgspec.to_builtins(asked))

    def step(self, names: list[str], lengths: list[int], *, reading: int = 0) -> list[int]:
        """The tokens that these sequences of so many tokens draw; the first `reading` only read."""
        samples = np.arange(len(names)) >= reading
        hidden = torch.zeros(len(names), 4)
        self.recorder.begin(Step(names, np.array(lengths, np.int64), samples, hidden))
        tokens = self.recorder.draw(torch.stack([logits_at(one) for one in lengths])).tolist()
        self.recorder.end()
        return tokens


def logits_at(position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(position)
    return torch.randn(VOCABULARY, generator=generator)


def wanted(asked: Adjustment | None, count: int, drawn: list[int]) -> list[int]:
    first = len(REQUEST.prompt)
    logits = torch.stack([logits_at(first + index) for index in range(count)])
    return by_definition(logits, replace(REQUEST, adjustment=asked), drawn)[0]


def test_vllms_worker_draws_them_by_definition_as_requests_come_and_go() -> None:
    worker = Worker()  # the slots grow
    asks: list[Adjustment | None] = [None, ASKED["all"], Adjustment(frequency=2.0)]
    names = ["plain", "all", "often"]
    for key, (name, asked) in enumerate(zip(names, asks, strict=True)):
        worker.admit(name, key, asked)
    said: list[list[int]] = [[], [], []]
    for index in range(6):
        tokens = worker.step(names, [3 + index] * 3)
        for one, token in zip(said, tokens, strict=True):
            one.append(token)
    for asked, drawn in zip(asks, said, strict=True):
        assert drawn == wanted(asked, 6, drawn)
    assert said[0] != said[1]
    worker.recorder.collect([], [0, 1, 2])
    worker.admit("all", 3, None)  # another request with an old one's id, and slot
    assert [worker.step(["all"], [3 + index])[0] for index in range(6)] == said[0]


def test_vllms_worker_goes_on_after_a_preemption_and_with_prompts_in_parts() -> None:
    worker, asked = Worker(), Adjustment(frequency=2.0, presence=1.0)
    worker.admit("a", 1, asked)
    worker.step(["a"], [2], reading=1)  # what is drawn from a part of a prompt is nobody's
    drawn = [worker.step(["a"], [3 + index])[0] for index in range(4)]
    worker.admit("a", 1, asked)  # it goes on: what it said is read again, in two parts
    worker.step(["a"], [5], reading=1)
    drawn += [worker.step(["a"], [7 + index])[0] for index in range(3)]
    assert drawn == wanted(asked, 7, drawn)
    again = [worker.step(["a"], [8 + index])[0] for index in range(2)]  # vLLM threw two away
    assert again == drawn[5:]


def test_a_batch_without_them_computes_nothing_for_them() -> None:
    worker = Worker(2)
    worker.admit("a", 1, None)
    worker.step(["a"], [3])
    batch = worker.recorder._batch  # pyright: ignore[reportPrivateUsage]
    assert batch is not None
    assert batch.adjusted is None
