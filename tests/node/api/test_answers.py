"""What the three routes answer, whole and streamed."""

from pathlib import Path

import pytest
from api_cases import NAME, SayingEngine, api, chat_dir
from chat_model import ASSISTANT, IM_END, USER

PROMPT = [USER, 104, 105, IM_END, ASSISTANT]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_dir(tmp_path_factory.mktemp("model"))


async def test_a_chat_is_answered_with_text_usage_and_the_policy_that_said_it(
    model_dir: Path,
) -> None:
    engine = SayingEngine("hello")
    async with api(engine, model_dir) as client:
        reply = await client.chat(model=NAME, max_completion_tokens=20, seed=5)
    body = reply.json
    assert reply.status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == NAME
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["logprobs"] is None
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert body["policy_version"] == choice["policy_version"] == {"first": 7, "last": 7}
    assert reply.headers["X-Policy-Version"] == "7"
    assert reply.headers["X-Request-Id"] == body["id"]
    [asked] = engine.requests
    assert (asked.prompt, asked.max_tokens, asked.seed) == (tuple(PROMPT), 20, 5)
    assert asked.stop_token_ids == (IM_END,)
    assert (asked.temperature, asked.top_p, asked.top_k) == (1.0, 1.0, 0)


async def test_ids_and_logprobs_are_given_where_they_are_asked_for(model_dir: Path) -> None:
    async with api(SayingEngine("ok"), model_dir) as client:
        body = (await client.chat(logprobs=True, return_token_ids=True)).json
        named = (await client.chat(logprobs=True, return_tokens_as_token_ids=True)).json
        old = (await client.complete(logprobs=0, return_token_ids=True, prompt=[97, 98])).json
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == [111, 107, IM_END]
    rows = choice["logprobs"]["content"]
    assert [row["token"] for row in rows] == ["o", "k", "<|im_end|>"]
    assert [row["logprob"] for row in rows] == [-(token % 7) / 8 for token in choice["token_ids"]]
    assert rows[0]["bytes"] == [111]
    rows = named["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in rows] == ["token_id:111", "token_id:107", f"token_id:{IM_END}"]
    choice = old["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["logprobs"]["tokens"] == ["o", "k", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert len(choice["logprobs"]["token_logprobs"]) == 3


async def test_logprobs_have_the_bytes_of_tokens_that_are_parts_of_a_character(
    model_dir: Path,
) -> None:
    said = "a\u20ac\ufffd"
    async with api(SayingEngine(said), model_dir) as client:
        body = (await client.chat(logprobs=True, top_logprobs=2)).json
    rows = body["choices"][0]["logprobs"]["content"]
    assert [row["bytes"] for row in rows[:-1]] == [[byte] for byte in said.encode()]
    assert [row["token"] for row in rows[:2]] == ["a", "\ufffd"]
    assert bytes(rows[-1]["bytes"]) == b"<|im_end|>"
    # the likeliest ones beside them too: the engine tells this byte, and this byte with its last bit turned
    assert [one["bytes"] for one in rows[1]["top_logprobs"]] == [[0xE2], [0xE3]]


async def test_n_choices_have_seeds_of_their_own_and_the_first_the_requests(
    model_dir: Path,
) -> None:
    engine = SayingEngine("x")
    async with api(engine, model_dir) as client:
        body = (await client.complete(prompt=["ab", "cd"], n=3, seed=9)).json
    assert [one["index"] for one in body["choices"]] == list(range(6))
    seeds = [one.seed for one in engine.requests]
    assert seeds[:3] == seeds[3:]  # each prompt as if it had been asked alone
    assert seeds[0] == 9
    assert len(set(seeds)) == 3
    assert {one.prompt for one in engine.requests[:3]} == {(97, 98)}
    groups = [one.group for one in engine.requests]
    assert len(set(groups)) == 2
    assert groups[0] == groups[1] != groups[3]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


async def test_without_a_seed_every_request_has_another(model_dir: Path) -> None:
    engine = SayingEngine("x")
    async with api(engine, model_dir) as client:
        await client.complete()
        await client.complete()
        await client.complete(seed=-1)
    seeds = [one.seed for one in engine.requests]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[2] == 2**63 - 1


async def test_a_completion_that_is_cut_says_so(model_dir: Path) -> None:
    async with api(SayingEngine("hello"), model_dir) as client:
        body = (await client.complete(max_tokens=2)).json
    assert body["choices"][0]["text"] == "he"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_chat_may_go_on_to_the_end_of_the_context(model_dir: Path) -> None:
    engine = SayingEngine("x")
    async with api(engine, model_dir) as client:
        await client.chat()
        await client.complete(max_tokens=1 << 20)
    assert [one.max_tokens for one in engine.requests] == [256 - 5, 256 - 2]


async def test_token_ids_go_in_and_out_as_renderers_want_them(model_dir: Path) -> None:
    engine = SayingEngine("ok")
    drawing = {"max_tokens": 9, "logprobs": 1, "stop_token_ids": [256], "temperature": 0.5}
    drawing |= {"skip_special_tokens": False, "top_p": 0.9, "top_k": 4, "n": 1, "min_p": 0.0}
    async with api(engine, model_dir) as client:
        reply = await client.generate(
            [1, 2, 3], model=NAME, sampling_params=drawing, request_id="mine"
        )
    body, [choice] = reply.json, reply.json["choices"]
    assert body["request_id"] == "mine"
    assert choice["token_ids"] == [111, 107, IM_END]
    assert choice["finish_reason"] == "stop"
    assert [row["token"] for row in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]
    [asked] = engine.requests
    assert asked.stop_token_ids == (IM_END, 256)
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.5, 0.9, 4)


async def test_ignore_eos_leaves_only_the_callers_stops(model_dir: Path) -> None:
    engine = SayingEngine("abc")
    async with api(engine, model_dir) as client:
        body = (await client.complete(ignore_eos=True, stop_token_ids=[98])).json
        kept = await client.complete(
            ignore_eos=True, stop_token_ids=[98], include_stop_str_in_output=True
        )
    assert engine.requests[0].stop_token_ids == (98,)
    choice = body["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("a", 98)
    assert kept.json["choices"][0]["text"] == "ab"


async def test_special_tokens_are_shown_where_they_are_wanted(model_dir: Path) -> None:
    async with api(SayingEngine("ab"), model_dir) as client:
        fields = {"ignore_eos": True, "max_tokens": 3}
        hidden = (await client.complete(**fields)).json
        shown = (await client.complete(**fields, skip_special_tokens=False)).json
    assert hidden["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "ab<|im_end|>"


# -- streams -----------------------------------------------------------------------------------------


async def test_a_streamed_chat_adds_up_to_the_whole_one(model_dir: Path) -> None:
    said = "hello there, this is one sentence of some length"
    engine = SayingEngine(said)
    async with api(engine, model_dir, stream_tokens=8) as client:
        reply = await client.chat(
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            return_token_ids=True,
            seed=3,
        )
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert reply.headers["X-Policy-Version"] == "7"
    opening, *chunks, closing = reply.events
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["prompt_token_ids"] == PROMPT
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    made = [chunk["choices"][0] for chunk in chunks]
    assert "".join(one["delta"].get("content", "") for one in made) == said
    assert [token for one in made for token in one["token_ids"]] == [*said.encode(), IM_END]
    assert sum(len(one["logprobs"]["content"]) for one in made) == len(said) + 1
    assert [one["finish_reason"] for one in made] == [None] * (len(made) - 1) + ["stop"]
    assert made[-1]["policy_version"] == {"first": 7, "last": 7}
    assert closing["choices"] == []
    assert closing["usage"]["completion_tokens"] == len(said) + 1
    assert [one.max_tokens for one in engine.requests] == [4, 8, 8, 8, 8, 8, 8]
    assert {one.seed for one in engine.requests} == {3}


async def test_a_streamed_completion_of_several_choices_tells_them_apart(model_dir: Path) -> None:
    async with api(SayingEngine("one two three four"), model_dir, stream_tokens=4) as client:
        events = (await client.complete(stream=True, n=2)).events
        plain = (await client.complete(stream=True)).events
    texts = ["", ""]
    for event in events:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["one two three four"] * 2
    assert all("usage" not in event for event in plain)


async def test_a_stream_of_token_ids(model_dir: Path) -> None:
    async with api(SayingEngine("abcdefgh"), model_dir) as client:
        events = (await client.generate([5, 6], stream=True, return_token_ids=True)).events
    assert events[0]["prompt_token_ids"] == [5, 6]
    made = [event["choices"][0] for event in events[1:]]
    assert [token for one in made for token in one["token_ids"]] == [*b"abcdefgh", IM_END]
    assert made[-1]["weight_versions"] == [{"version": "7", "start": 0, "end": 9}]


async def test_a_policy_that_changes_in_the_middle_is_in_the_stamp(model_dir: Path) -> None:
    def next_version(engine: SayingEngine) -> None:
        engine.version = 7 + len(engine.requests) // 2

    engine = SayingEngine("abcdefghijkl", on_request=next_version)
    async with api(engine, model_dir, stream_tokens=4) as client:
        events = (await client.generate([5, 6], stream=True)).events
    last = events[-1]["choices"][0]
    assert last["policy_version"] == {"first": 7, "last": 9}
    assert last["weight_versions"] == [
        {"version": "7", "start": 0, "end": 4},
        {"version": "8", "start": 4, "end": 12},
        {"version": "9", "start": 12, "end": 13},
    ]
