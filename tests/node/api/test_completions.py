"""Routes on any engine: replies, streams, stop conditions, refusals."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.api_cases import MAX_LENGTH, NAME, Client, SayingEngine, api, chat_dir
from support.chat_model import ASSISTANT, COMPACT, IM_END, USER

from primerl.node.api.completions import find_stop, may_begin
from primerl.node.api.server import ApiLimits

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
        old = (await client.complete(logprobs=0, return_token_ids=True, prompt=[97, 98])).json
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == [111, 107, IM_END]
    rows = choice["logprobs"]["content"]
    assert [row["token"] for row in rows] == ["o", "k", "<|im_end|>"]
    assert [row["logprob"] for row in rows] == [-(token % 7) / 8 for token in choice["token_ids"]]
    assert rows[0]["bytes"] == [111]
    choice = old["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["logprobs"]["tokens"] == ["o", "k", "<|im_end|>"]
    assert len(choice["logprobs"]["token_logprobs"]) == 3


async def test_logprobs_have_the_bytes_of_tokens_that_are_parts_of_a_character(
    model_dir: Path,
) -> None:
    said = "a\u20ac\ufffd"
    async with api(SayingEngine(said), model_dir) as client:
        body = (await client.chat(logprobs=True)).json
    rows = body["choices"][0]["logprobs"]["content"]
    assert [row["bytes"] for row in rows[:-1]] == [[byte] for byte in said.encode()]
    assert [row["token"] for row in rows[:2]] == ["a", "\ufffd"]
    assert bytes(rows[-1]["bytes"]) == b"<|im_end|>"


async def test_n_choices_have_seeds_of_their_own_and_the_first_the_requests(
    model_dir: Path,
) -> None:
    engine = SayingEngine("x")
    async with api(engine, model_dir) as client:
        body = (await client.complete(prompt=["ab", "cd"], n=3, seed=9)).json
    assert [one["index"] for one in body["choices"]] == list(range(6))
    seeds = [one.seed for one in engine.requests]
    assert seeds[:3] == seeds[3:]  # each prompt as if it had been asked alone
    assert seeds[:3] == [9, 10, 11]  # as in vLLM
    assert {one.prompt for one in engine.requests[:3]} == {(97, 98)}
    groups = [one.group for one in engine.requests]
    assert len(set(groups)) == 2
    assert groups[0] == groups[1] != groups[3]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


async def test_without_a_seed_every_request_has_another_one(model_dir: Path) -> None:
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


@pytest.mark.parametrize(
    ("asked", "drawn"), [(0, 0.0), (1e-6, 0.01), (0.005, 0.01), (0.01, 0.01), (0.011, 0.011)]
)
async def test_a_temperature_next_to_zero_is_drawn_as_vllm_draws_it(
    model_dir: Path, asked: float, drawn: float
) -> None:
    engine = SayingEngine("abc")
    async with api(engine, model_dir) as client:
        await client.complete(temperature=asked)
    assert [one.temperature for one in engine.requests] == [drawn]


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
    async with api(engine, model_dir, limits=ApiLimits(stream_tokens=8)) as client:
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
    async with api(
        SayingEngine("one two three four"), model_dir, limits=ApiLimits(stream_tokens=4)
    ) as client:
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
        events = (await client.generate([5, 6], stream=True)).events
    made = [event["choices"][0] for event in events]
    assert [token for one in made for token in one["token_ids"]] == [*b"abcdefgh", IM_END]
    assert made[-1]["weight_versions"] == [{"version": "7", "start": 0, "end": 9}]


async def test_a_policy_that_changes_in_the_middle_is_in_the_stamp(model_dir: Path) -> None:
    def next_version(engine: SayingEngine) -> None:
        engine.version = 7 + len(engine.requests) // 2

    engine = SayingEngine("abcdefghijkl", on_request=next_version)
    async with api(engine, model_dir, limits=ApiLimits(stream_tokens=4)) as client:
        events = (await client.generate([5, 6], stream=True)).events
    last = events[-1]["choices"][0]
    assert last["policy_version"] == {"first": 7, "last": 9}
    assert last["weight_versions"] == [
        {"version": "7", "start": 0, "end": 4},
        {"version": "8", "start": 4, "end": 12},
        {"version": "9", "start": 12, "end": 13},
    ]


# -- where texts end ----------------------------------------------------------------------------------


async def complete_saying(model_dir: Path, text: str, **fields: Any) -> dict[str, Any]:
    async with api(SayingEngine(text), model_dir) as client:
        reply = await client.complete(return_token_ids=True, logprobs=0, **fields)
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]


async def streamed(model_dir: Path, text: str, **fields: Any) -> list[dict[str, Any]]:
    async with api(SayingEngine(text), model_dir, limits=ApiLimits(stream_tokens=4)) as client:
        reply = await client.complete(stream=True, return_token_ids=True, **fields)
    return [event["choices"][0] for event in reply.events]


async def test_a_completion_ends_before_its_stop_string_and_with_the_token_that_completes_it(
    model_dir: Path,
) -> None:
    choice = await complete_saying(model_dir, "one END two", stop="END")
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["stop_reason"] == "END"
    assert bytes(choice["token_ids"]) == b"one END"
    assert len(choice["logprobs"]["token_logprobs"]) == 7


async def test_the_stop_string_is_kept_where_that_is_asked_for(model_dir: Path) -> None:
    choice = await complete_saying(
        model_dir, "one END", stop=["zzz", "END"], include_stop_str_in_output=True
    )
    assert choice["text"] == "one END"


async def test_the_stop_string_that_is_complete_first_counts(model_dir: Path) -> None:
    choice = await complete_saying(model_dir, "a cat sat", stop=["cat sat", "sat", "at"])
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


async def test_bytes_that_are_no_text_are_emitted_at_the_end(model_dir: Path) -> None:
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


# -- what is refused ---------------------------------------------------------------------------------

THINKING = (
    COMPACT
    + "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif -%}"
)


@pytest.fixture
async def idle(model_dir: Path) -> AsyncIterator[Client]:
    """A client of an idle engine."""
    engine = SayingEngine()
    async with api(engine, model_dir, limits=ApiLimits(max_inflight=6, max_choices=8)) as client:
        yield client
    assert engine.requests == []


UNABLE: list[tuple[str, Any]] = [
    ("temprature", 1),
    ("presence_penalty", 0.5),
    ("min_p", 0.1),
    ("logit_bias", {"65": 1}),
    ("min_tokens", 3),
    ("top_logprobs", 3),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}),
    ("chat_template", "{{ 1 }}"),
    ("reasoning_effort", "high"),
    ("echo", True),
    ("store", True),
]


@pytest.mark.parametrize(("name", "value"), UNABLE, ids=lambda one: str(one)[:20])
async def test_unsupported_options_are_refused_by_name(idle: Client, name: str, value: Any) -> None:
    for reply in (
        await idle.chat(**{name: value}),
        await idle.generate([1], sampling_params={name: value}),
    ):
        assert reply.status == 400
        assert reply.error["param"] == name
        assert reply.error["code"] == "unsupported_parameter"


WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", True),
    ("temperature", "1"),
    ("temperature", 1e9),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("n", 0),
    ("n", 9),
    ("n", True),
    ("max_tokens", 0),
    ("max_completion_tokens", 2.5),
    ("seed", 2**65),
    ("seed", "x"),
    ("stop", ["a"] * 17),
    ("stop", [""]),
    ("stop", 5),
    ("stop", ["x" * 2000]),
    ("stop_token_ids", [288]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "1"),
    ("stream", "yes"),
    ("logprobs", 2),
    ("ignore_eos", 1),
    ("stream_options", [1]),
    ("stream_options", {"include_usage": "x"}),
    ("chat_template_kwargs", {"enable_thinking": []}),
    ("chat_template_kwargs", {"messages": "others"}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    *[
        ("messages", messages)
        for messages in (
            None,
            [],
            "hi",
            [{}],
            ["hi"],
            [{"role": "user"}],
            [{"role": 5, "content": "x"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
            [{"role": "user", "content": "x" * MAX_LENGTH}],
        )
    ],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda one: str(one)[:20])
async def test_a_value_of_the_wrong_kind_or_size_is_refused_by_name(
    idle: Client, name: str, value: Any
) -> None:
    reply = await idle.chat(**{name: value})
    assert reply.status == 400
    told = reply.error
    assert name in (told["param"] or "") or name in told["message"] or name == "messages"


@pytest.mark.parametrize(
    "prompt", [None, 5, "", [], [1, "a"], ["a", 1], [[]], [300], [-1], [True], [[1], [2.5]], [None]]
)
async def test_prompts_are_text_or_ids_that_the_model_has(idle: Client, prompt: Any) -> None:
    assert (await idle.complete(prompt=prompt)).status == 400
    if not isinstance(prompt, str):
        assert (await idle.generate(prompt)).status == 400


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "\u00e9", "x" * 300, 5])
async def test_a_request_id_that_no_header_can_hold_is_refused(idle: Client, name: Any) -> None:
    reply = await idle.generate([1], request_id=name)
    assert (reply.status, reply.error["param"]) == (400, "request_id")


async def test_a_prompt_without_room_for_an_answer_is_refused_in_the_words_clients_look_for(
    idle: Client,
) -> None:
    for reply in (
        await idle.complete(prompt="x" * MAX_LENGTH),
        await idle.generate([1] * MAX_LENGTH),
        await idle.chat(messages=[{"role": "user", "content": "x" * MAX_LENGTH}]),
    ):
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_LENGTH} tokens" in reply.error["message"]


async def test_another_model_is_not_there(idle: Client) -> None:
    reply = await idle.chat(model="gpt-5")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert "`tiny`" in reply.error["message"]


async def test_more_completions_than_a_request_may_have(idle: Client) -> None:
    assert (await idle.complete(prompt=["a", "b", "c"], n=3)).status == 400
    assert (await idle.generate([1], sampling_params={"n": 9})).status == 400
    reply = await idle.complete(n=8)  # allowed, but more than this server makes at once
    assert reply.status == 400
    assert "at most 6" in reply.error["message"]


async def test_a_template_that_refuses_a_role_is_a_mistake_of_the_request(tmp_path: Path) -> None:
    template = "{%- if messages[0].role != 'user' -%}{{ raise_exception('no') }}{%- endif -%}"
    model = chat_dir(tmp_path, template=template + COMPACT)
    async with api(SayingEngine(), model) as client:
        reply = await client.chat(messages=[{"role": "system", "content": "x"}])
    assert (reply.status, reply.error["param"]) == (400, "messages")


async def test_a_model_without_a_chat_template_completes_and_cannot_chat(tmp_path: Path) -> None:
    model = chat_dir(tmp_path)
    (model / "chat_template.jinja").unlink()
    async with api(SayingEngine("ok"), model) as client:
        chat, plain = await client.chat(), await client.complete()
    assert (chat.status, chat.error["param"]) == (400, "messages")
    assert plain.json["choices"][0]["text"] == "ok"


async def test_a_template_gets_the_variables_that_it_reads(tmp_path: Path) -> None:
    engine = SayingEngine()
    async with api(engine, chat_dir(tmp_path, template=THINKING)) as client:
        for value in (True, None, False):
            reply = await client.chat(chat_template_kwargs={"enable_thinking": value})
            assert reply.status == 200, reply.text
    prompts = [bytes(one for one in asked.prompt if one < 256) for asked in engine.requests]
    assert prompts == [b"hi", b"hi", b"hi<think></think>"]


async def test_values_that_ask_for_nothing_are_what_clients_fill_in(model_dir: Path) -> None:
    async with api(SayingEngine("ok"), model_dir) as client:
        reply = await client.chat(
            presence_penalty=0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias={},
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            top_logprobs=0,
            user="me",
            metadata={"a": "b"},
            stop=[],
            seed=None,
            stream_options=None,
            echo=False,
            top_k=-1,
        )
    assert reply.status == 200, reply.text
