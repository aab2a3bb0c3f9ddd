"""Validation of steps: nothing outside the plan, nothing that does not follow the step before."""

import contextlib
import random
from typing import Any

import msgspec
import pytest
from support.ring_cases import SHAPE

from primerl.node.errors import EngineError
from primerl.node.pipeline import step_codec

SMALL = msgspec.structs.replace(
    SHAPE, max_model_len=64, max_sequences=2, max_step_tokens=32, block_size=8, kv_tokens=128
)
"""Blocks 1 to 16."""


def new(key: int = 1, **fields: Any) -> step_codec.NewSequence:
    given: dict[str, Any] = {
        "key": key,
        "tokens": 12,
        "computed": 0,
        "scheduled": 12,
        "blocks": (1, 2),
        "seed": 7,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    return step_codec.NewSequence(**given | fields)


def going(key: int = 1, **fields: Any) -> step_codec.ContinuedSequence:
    given: dict[str, Any] = {"key": key, "tokens": 13, "computed": 12, "scheduled": 1, "blocks": ()}
    return step_codec.ContinuedSequence(**given | fields)


def begun(*parts: step_codec.NewSequence) -> step_codec.KnownSequences:
    found = step_codec.KnownSequences(SMALL)
    found.apply(step_codec.StageStep(parts or (new(),)))
    return found


def test_what_is_encoded_is_read_again() -> None:
    step = step_codec.StageStep((new(), going(2)), (5, 6))
    assert step_codec.decode_step(step_codec.encode(step)) == step
    assert step_codec.decode_drawn(
        step_codec.encode(step_codec.DrawnTokens((3, 4)))
    ) == step_codec.DrawnTokens((3, 4))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no step",
        step_codec.encode(step_codec.StageStep((new(seed=-1),))),
        step_codec.encode(step_codec.StageStep((new(temperature=0.0),))),
        step_codec.encode(step_codec.StageStep((new(temperature=float("nan")),))),
        step_codec.encode(step_codec.StageStep((new(top_p=1.5),))),
        step_codec.encode(step_codec.StageStep((new(blocks=(-1,)),))),
    ],
)
def test_bytes_that_are_no_step_are_refused(body: bytes) -> None:
    with pytest.raises(EngineError, match="invalid step"):
        step_codec.decode_step(body)


def test_a_sequence_draws_when_its_last_token_is_computed() -> None:
    assert step_codec.draws(new())
    assert not step_codec.draws(new(scheduled=11))
    assert step_codec.draws(going())


def test_a_sequence_goes_on_under_its_name_until_it_ends() -> None:
    found = step_codec.KnownSequences(SMALL)
    ((name,), over) = found.apply(step_codec.StageStep((new(),)))
    assert over == []
    assert found.apply(step_codec.StageStep((going(),))) == ([name], [])
    assert found.apply(step_codec.StageStep((new(2),), (1,)))[1] == [name]
    with pytest.raises(EngineError, match="does not continue where it stopped"):
        found.apply(step_codec.StageStep((going(tokens=14, computed=13),)))


def test_a_sequence_that_is_computed_anew_has_another_name() -> None:
    found = step_codec.KnownSequences(SMALL)
    ((name,), _) = found.apply(step_codec.StageStep((new(),)))
    names, over = found.apply(step_codec.StageStep((new(tokens=13, scheduled=13),)))
    assert over == [name]
    assert names != [name]
    assert found.names() == names
    found.reset()
    assert found.names() == []


def test_parts_of_a_prompt_follow_each_other() -> None:
    found = begun(new(tokens=20, scheduled=8, blocks=(1,)))
    found.apply(step_codec.StageStep((going(tokens=20, computed=8, scheduled=12, blocks=(2, 3)),)))
    with pytest.raises(EngineError, match="does not continue"):
        found.apply(step_codec.StageStep((going(tokens=21, computed=19, scheduled=2, blocks=()),)))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "0 sequences"),
        ((new(1), new(2), new(3)), "3 sequences"),
        ((new(1), new(1)), "twice"),
        ((new(tokens=40, scheduled=40, blocks=(1, 2, 3, 4, 5)),), "more tokens than the plan"),
        ((new(tokens=65, scheduled=1),), "invalid token counts"),
        ((new(scheduled=0),), "invalid token counts"),
        ((new(scheduled=13),), "invalid token counts"),
        ((new(blocks=(0, 1)),), "block that does not exist"),
        ((new(blocks=(1, 17)),), "block that does not exist"),
        ((new(blocks=(1,)),), "wrong number of blocks"),
        ((new(blocks=tuple([1] * 17)),), "wrong number of blocks"),
        ((going(9),), "does not continue"),
    ],
)
def test_a_step_outside_the_plan_is_refused(parts: tuple[Any, ...], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        step_codec.KnownSequences(SMALL).apply(step_codec.StageStep(parts))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (going(computed=11, scheduled=2), "does not continue"),
        (going(tokens=11), "does not continue"),
        (going(tokens=14), "more than one sampled token"),
        (going(scheduled=2), "invalid token counts"),
    ],
)
def test_a_sequence_that_does_not_follow_is_refused(
    part: step_codec.ContinuedSequence, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        begun().apply(step_codec.StageStep((part,)))


def test_the_last_block_is_the_plans() -> None:
    found = begun(new(blocks=(16, 15)))
    for at in range(12, 16):
        found.apply(step_codec.StageStep((going(tokens=at + 1, computed=at),)))
    with pytest.raises(EngineError, match="wrong number of blocks"):
        found.apply(step_codec.StageStep((going(tokens=17, computed=16),)))


def test_an_engine_that_never_ends_a_sequence_is_stopped() -> None:
    found = step_codec.KnownSequences(SMALL)
    most = step_codec.REMEMBERED * SMALL.max_sequences
    for key in range(most):
        found.apply(step_codec.StageStep((new(key),)))
    with pytest.raises(EngineError, match="does not end"):
        found.apply(step_codec.StageStep((new(most),)))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [((1, 2), "2 tokens, not"), ((), "0 tokens, not"), ((300,), "outside the vocabulary")],
)
def test_tokens_that_were_not_asked_for_are_refused(tokens: tuple[int, ...], words: str) -> None:
    step_codec.check_drawn(step_codec.DrawnTokens((299,)), 1, 300)
    with pytest.raises(EngineError, match=words):
        step_codec.check_drawn(step_codec.DrawnTokens(tokens), 1, 300)


def test_bytes_of_whatever_kind_are_refused_in_one_way() -> None:
    """Truncated, changed and joined steps are steps within the plan, or an EngineError."""
    rng = random.Random(7)
    bodies = [
        step_codec.encode(step_codec.StageStep((new(), new(2, tokens=20, scheduled=9)), (4,))),
        step_codec.encode(step_codec.StageStep((going(),))),
    ]
    taken = 0
    for _ in range(3000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randrange(4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        body = body[: rng.randrange(1, len(body) + 1) if rng.random() < 0.2 else len(body)]
        found = begun(new(), new(9))
        with contextlib.suppress(EngineError):
            names, _ = found.apply(step_codec.decode_step(bytes(body)))
            taken += 1
            assert len(set(names)) == len(names) <= SMALL.max_sequences
    assert 100 < taken < 2900
