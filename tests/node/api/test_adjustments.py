"""Penalties, logit_bias, min_tokens and min_p: how they come to the engine, what is refused, and which stop
strings end nothing."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_cases import VOCABULARY, Client, SayingEngine, api, chat_dir
from chat_model import IM_END

from primerl.node.api.replies import Reply
from primerl.node.api.stops import find_stop
from primerl.node.engines.adjustment import MOST_BIASES, Adjustment

ALL: dict[str, Any] = {
    "min_p": 0.1,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {"5": 100, "0": -100, "7": 1.5, "9": 0},
    "min_tokens": 3,
}
ASKED = Adjustment(
    0.1, -2.0, 0.5, 1.3, ((5, 100.0), (0, -100.0), (7, 1.5)), 3, (IM_END, 256), drawn=0
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine() -> SayingEngine:
    return SayingEngine("hello")


@pytest.fixture
async def client(engine: SayingEngine, model_dir: Path) -> AsyncIterator[Client]:
    async with api(engine, model_dir, max_body_mib=64, stream_tokens=4) as client:
        yield client


async def test_the_engine_is_told_what_each_route_is_asked_for(
    client: Client, engine: SayingEngine
) -> None:
    fields = ALL | {"stop_token_ids": [256]}
    replies = [
        await client.chat(**fields),
        await client.complete(**fields),
        await client.complete(ignore_eos=True, **fields),
        await client.generate([1], sampling_params=fields),
    ]
    assert [reply.status for reply in replies] == [200] * 4, replies[0].text
    assert [one.adjustment for one in engine.requests] == [ASKED] * 4
    assert engine.requests[2].stop_token_ids == (256,)


async def test_each_alone_is_told_and_what_asks_for_nothing_is_as_good_as_nothing(
    client: Client, engine: SayingEngine
) -> None:
    for name, value in ALL.items():
        assert (await client.chat(**{name: value})).status == 200
    assert len({one.adjustment for one in engine.requests}) == len(ALL)
    assert None not in [one.adjustment for one in engine.requests]
    engine.requests.clear()
    nothing = {name: 0 for name in ALL} | {"repetition_penalty": 1, "logit_bias": {"3": 0}}
    assert (await client.chat(**nothing)).status == 200
    assert (await client.chat(**{name: None for name in ALL})).status == 200
    assert [one.adjustment for one in engine.requests] == [None, None]


async def test_every_piece_of_a_stream_knows_how_much_was_said_before_it(
    client: Client, engine: SayingEngine
) -> None:
    engine.says = "x" * 20
    reply = await client.complete(stream=True, frequency_penalty=1)
    assert len(reply.events) > 3
    told = [one.adjustment for one in engine.requests]
    prompt = len(engine.requests[0].prompt)
    for request, adjustment in zip(engine.requests, told, strict=True):
        assert adjustment == Adjustment(frequency=1.0, drawn=len(request.prompt) - prompt)


WRONG: list[tuple[str, Any]] = [
    *(("min_p", value) for value in (-0.01, 1.01, True, "0.1", 10**400)),
    *(("presence_penalty", value) for value in (-2.01, 2.01, False, "1", [1], -(10**400))),
    *(("frequency_penalty", value) for value in (-2.01, 2.01, {})),
    *(("repetition_penalty", value) for value in (0, -1, 0.001, 101, "1.1")),
    *(("min_tokens", value) for value in (-1, 1.5, True, 100, 2**40)),
    *(("logit_bias", value) for value in ([], "5", 5, [[5, 1]])),
    *(("logit_bias", {key: 1}) for key in ("x", "", "-1", "1.0", " 1", "\u0661", "9" * 5000)),
    *(("logit_bias", {key: 1}) for key in (str(VOCABULARY), "1000000", "999")),
    *(("logit_bias", {"5": value}) for value in (100.5, -101, "1", None, True, [1], 10**400)),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {str(token): 1 for token in range(MOST_BIASES + 1)}),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda one: str(one)[:30])
async def test_what_makes_no_sense_is_refused_by_name_and_nothing_computed(
    client: Client, engine: SayingEngine, name: str, value: Any
) -> None:
    chat = await client.chat(max_tokens=99, **{name: value})
    drawing = {"max_tokens": 99, name: value}
    tokens = await client.generate([1], sampling_params=drawing)
    assert (chat.status, chat.error["param"]) == (400, name)
    assert (tokens.status, tokens.error["param"]) == (400, f"sampling_params.{name}")
    assert len(chat.text) < 500
    assert engine.requests == []


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_a_million_biases_are_refused_before_they_are_looked_at(
    client: Client, engine: SayingEngine
) -> None:
    reply = await client.complete(logit_bias={str(token): 1 for token in range(10**6)})
    assert (reply.status, reply.error["param"]) == (400, "logit_bias")
    assert f"at most {MOST_BIASES}" in reply.error["message"]
    assert len(reply.text) < 500
    assert engine.requests == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_what_is_no_number_is_no_json(
    client: Client, engine: SayingEngine, number: str
) -> None:
    for field in (f'"min_p": {number}', f'"logit_bias": {{"5": {number}}}'):
        body = f'{{"prompt": "ab", {field}}}'.encode()
        assert (await client.post("/v1/completions", body)).status == 400
    assert engine.requests == []


async def test_min_tokens_beyond_the_longest_completion_are_refused(
    client: Client, engine: SayingEngine
) -> None:
    reply = await client.post("/v1/completions", {"prompt": "ab", "min_tokens": 17})
    assert reply.error["param"] == "min_tokens"
    assert "max_tokens is 16" in reply.error["message"]
    assert (await client.complete(min_tokens=17, max_tokens=17)).status == 200


async def test_min_tokens_that_leave_no_token_to_draw_are_refused(
    client: Client, engine: SayingEngine
) -> None:
    every = list(range(VOCABULARY))
    reply = await client.complete(min_tokens=1, stop_token_ids=every)
    assert (reply.status, reply.error["param"]) == (400, "min_tokens")
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("least", "text"), [(0, "an "), (5, "an "), (6, "an END two "), (13, "an END two "), (14, None)]
)
async def test_a_stop_string_counts_if_it_is_complete_after_min_tokens(
    client: Client, engine: SayingEngine, least: int, text: str | None, stream: bool
) -> None:
    engine.says = "an END two END ."
    reply = await client.complete(stop="END", min_tokens=least, stream=stream)
    choices = [event["choices"][0] for event in (reply.events if stream else [reply.json])]
    said = "".join(choice["text"] for choice in choices)
    assert said == (engine.says if text is None else text)
    assert choices[-1]["stop_reason"] == (None if text is None else "END")


def test_a_stop_string_is_looked_for_where_its_end_is() -> None:
    assert find_stop("abcabc", ["bc"], 2) == (1, "bc")
    assert find_stop("abcabc", ["bc"], 3) == (4, "bc")
    assert find_stop("abcabc", ["abc", "c"], 3) == (3, "abc")
    assert find_stop("abcabc", ["bc"], 6) is None


def test_what_was_read_of_a_reply_ends_at_the_last_stop_string_where_others_did_not_count() -> None:
    reply = Reply("one END two END", "why END not")
    assert reply.until("END", included=False).content == "one "
    late = reply.until("END", included=True, last=True)
    assert (late.content, late.reasoning) == ("one END two END", "why END not")
    thought = Reply("", "why END not END x").until("END", included=False, last=True)
    assert thought.reasoning == "why END not "
