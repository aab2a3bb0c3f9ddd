"""Where a completion ends by a string that no engine knows, and what a stream may tell before that is sure."""

from pathlib import Path
from typing import Any

import pytest
from api_cases import SayingEngine, api, chat_dir

from primerl.node.api.stops import find_stop, may_begin, whole


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_dir(tmp_path_factory.mktemp("model"))


async def said(model_dir: Path, text: str, **fields: Any) -> dict[str, Any]:
    async with api(SayingEngine(text), model_dir) as client:
        reply = await client.complete(return_token_ids=True, logprobs=0, **fields)
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]


async def streamed(model_dir: Path, text: str, **fields: Any) -> list[dict[str, Any]]:
    async with api(SayingEngine(text), model_dir, stream_tokens=4) as client:
        reply = await client.complete(stream=True, return_token_ids=True, **fields)
    return [event["choices"][0] for event in reply.events]


async def test_a_completion_ends_before_its_stop_string_and_with_the_token_that_completes_it(
    model_dir: Path,
) -> None:
    choice = await said(model_dir, "one END two", stop="END")
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["stop_reason"] == "END"
    assert bytes(choice["token_ids"]) == b"one END"
    assert len(choice["logprobs"]["token_logprobs"]) == 7


async def test_the_stop_string_is_kept_where_that_is_asked_for(model_dir: Path) -> None:
    choice = await said(model_dir, "one END", stop=["zzz", "END"], include_stop_str_in_output=True)
    assert choice["text"] == "one END"


async def test_the_stop_string_that_is_complete_first_counts(model_dir: Path) -> None:
    choice = await said(model_dir, "a cat sat", stop=["cat sat", "sat", "at"])
    assert (choice["text"], choice["stop_reason"]) == ("a c", "at")


async def test_a_stop_string_is_found_across_the_pieces_that_a_long_text_comes_in(
    model_dir: Path,
) -> None:
    text = "x" * 30 + "STOP" + "y" * 30
    engine = SayingEngine(text)
    async with api(engine, model_dir) as client:
        body = (await client.complete(stop=["STOP"])).json
    assert body["choices"][0]["text"] == "x" * 30
    assert [one.max_tokens for one in engine.requests] == [32, 64]
    assert body["usage"]["completion_tokens"] == 34


async def test_without_a_stop_string_everything_is_asked_for_at_once(model_dir: Path) -> None:
    engine = SayingEngine("x" * 60)
    async with api(engine, model_dir) as client:
        await client.complete()
    assert len(engine.requests) == 1


async def test_nothing_of_a_stop_string_is_streamed_before_it_is_known_to_be_none(
    model_dir: Path,
) -> None:
    chunks = await streamed(model_dir, "one EN two END three", stop="END")
    texts = [chunk["text"] for chunk in chunks]
    assert "".join(texts) == "one EN two "
    assert all("END" not in text for text in texts)
    assert chunks[-1]["stop_reason"] == "END"
    assert b"".join(bytes(chunk["token_ids"]) for chunk in chunks) == b"one EN two END"


async def test_a_character_is_streamed_when_all_of_its_bytes_are_here(model_dir: Path) -> None:
    text = "abc\u00e9def\u20ac\U0001f600 end"  # the fourth token is half of the accented one
    chunks = await streamed(model_dir, text)
    texts = [chunk["text"] for chunk in chunks]
    assert texts[0] == "abc"
    assert "".join(texts) == text
    assert all("\ufffd" not in one for one in texts)


async def test_bytes_that_are_no_text_are_told_in_the_end(model_dir: Path) -> None:
    async with api(SayingEngine("abcd\u00e9"), model_dir) as client:
        reply = await client.complete(stream=True, max_tokens=5)
    texts = [event["choices"][0]["text"] for event in reply.events]
    assert "".join(texts) == "abcd\ufffd"


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [
        ("abc", ["END"], 0),
        ("abE", ["END"], 1),
        ("abEN", ["END"], 2),
        ("abEND", ["END"], 0),  # that is a stop, and no beginning of one
        ("EEN", ["ENE", "EENX"], 3),
        ("", ["a"], 0),
        ("aaa", ["aab"], 2),
    ],
)
def test_how_much_may_be_the_beginning_of_a_stop_string(
    text: str, stops: list[str], length: int
) -> None:
    assert may_begin(text, stops) == length


def test_the_first_stop_string_is_found_and_of_several_there_the_longest() -> None:
    assert find_stop("abcabc", ["c", "bca", "bc"]) == (1, "bca")
    assert find_stop("abc", ["x"]) is None
    assert whole("ab\ufffd\ufffd") == "ab"
