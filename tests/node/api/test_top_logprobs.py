"""The likeliest tokens beside those that were drawn, where a client asks for them."""

from pathlib import Path
from typing import Any

import pytest
from api_cases import Client, SayingEngine, api, chat_dir
from chat_model import IM_END

from primerl.node.api.choice import News
from primerl.node.api.faces import Named, named_beside
from primerl.node.api.text import Text


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_dir(tmp_path_factory.mktemp("model"))


def beside(row: dict[str, Any]) -> list[tuple[str, float]]:
    for one in row["top_logprobs"]:
        assert bytes(one["bytes"]) == one["token"].encode()
    return [(one["token"], one["logprob"]) for one in row["top_logprobs"]]


async def test_a_chat_is_told_as_many_as_it_asks_for_whole_and_streamed(model_dir: Path) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    engine = SayingEngine("abcdefgh")
    async with api(engine, model_dir) as client:
        whole = (await client.chat(**fields)).json["choices"][0]["logprobs"]["content"]
        events = (await client.chat(stream=True, **fields)).events[1:]
        plain = (await client.chat(logprobs=True)).json["choices"][0]["logprobs"]["content"]
        named = (await client.chat(return_tokens_as_token_ids=True, **fields)).json
    rows = [row for event in events for row in event["choices"][0]["logprobs"]["content"]]
    assert rows == whole
    assert [row["token"] for row in rows] == [*"abcdefgh", "<|im_end|>"]
    assert beside(rows[0]) == [("a", 0.0), ("`", -0.5), ("c", -1.0)]
    assert {one.top for one in engine.requests[:-2]} == {3}
    assert [row["top_logprobs"] for row in plain] == [[]] * 9
    [first, *_] = named["choices"][0]["logprobs"]["content"]
    assert [token for token, _ in beside(first)] == ["token_id:97", "token_id:96", "token_id:99"]


async def test_a_completion_is_told_them_with_the_drawn_token_among_them(model_dir: Path) -> None:
    async with api(SayingEngine("ab"), model_dir) as client:
        made = (await client.complete(logprobs=2)).json["choices"][0]["logprobs"]
        none = (await client.complete(logprobs=0)).json["choices"][0]["logprobs"]
    assert made["tokens"] == ["a", "b", "<|im_end|>"]
    assert [list(row) for row in made["top_logprobs"][:2]] == [["a", "`"], ["b", "c"]]
    # its own logprob is the sampler's
    assert made["top_logprobs"][1] == {"b": made["token_logprobs"][1], "c": -0.5}
    assert none["top_logprobs"] is None


async def test_token_ids_come_with_them_from_two_on(model_dir: Path) -> None:
    async def rows(client: Client, count: int) -> list[list[str]]:
        drawing = {"max_tokens": 9, "logprobs": count}
        [choice] = (await client.generate([1], sampling_params=drawing)).json["choices"]
        return [
            [one["token"] for one in row["top_logprobs"]] for row in choice["logprobs"]["content"]
        ]

    async with api(SayingEngine("a"), model_dir) as client:
        assert await rows(client, 2) == [
            ["token_id:97", "token_id:96"],
            [f"token_id:{IM_END}", f"token_id:{IM_END ^ 1}"],
        ]
        assert await rows(client, 1) == [[], []]


async def test_a_stop_string_cuts_them_with_the_tokens(model_dir: Path) -> None:
    async with api(SayingEngine("one END two"), model_dir) as client:
        made = (await client.complete(logprobs=1, stop="END")).json["choices"][0]["logprobs"]
    assert len(made["tokens"]) == len(made["top_logprobs"]) == 7


def test_what_is_as_good_as_impossible_has_a_number_in_json(model_dir: Path) -> None:
    news = News([97], [0.0], "a", 0, [[(97, 0.0), (98, float("-inf"))]])
    found = named_beside(news, Text.load(model_dir), as_ids=False)
    assert found == [[(Named("a", b"a"), 0.0), (Named("b", b"b"), -9999.0)]]
