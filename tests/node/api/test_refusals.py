"""Bodies that are refused: with OpenAI's error object, the name of the field, and nothing computed."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from api_cases import MAX_LENGTH, Client, SayingEngine, api, chat_dir
from chat_model import COMPACT


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def engine() -> SayingEngine:
    return SayingEngine()


@pytest.fixture
async def client(engine: SayingEngine, model_dir: Path) -> AsyncIterator[Client]:
    async with api(engine, model_dir, max_choices=8, max_inflight=6) as client:
        yield client
    assert engine.requests == []


UNABLE: list[tuple[str, Any]] = [
    ("length_penalty", 1.1),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("guided_json", {}),
    ("structured_outputs", {"regex": "a"}),
    ("prompt_logprobs", 0),
    ("bad_words", ["x"]),
    ("allowed_token_ids", []),
    ("use_beam_search", True),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("continue_final_message", True),
    ("truncate_prompt_tokens", 5),
    ("cache_salt", "1"),
    ("priority", 1),
    ("reasoning_effort", "high"),
    ("echo", True),
    ("store", True),
]


@pytest.mark.parametrize(("name", "value"), UNABLE, ids=lambda one: str(one)[:20])
async def test_what_cannot_be_done_is_said_and_never_left_out(
    client: Client, name: str, value: Any
) -> None:
    reply = await client.chat(**{name: value})
    assert reply.status == 400
    assert reply.error["param"] == name
    assert reply.error["code"] == "unsupported_parameter"
    assert reply.error["type"] == "invalid_request_error"


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
    ("max_tokens", -5),
    ("max_completion_tokens", 2.0),
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
    ("logprobs", 1),
    ("top_logprobs", 3),  # without logprobs
    ("top_logprobs", 21),
    ("top_logprobs", True),
    ("ignore_eos", 1),
    ("stream_options", [1]),
    ("stream_options.include_usage", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda one: str(one)[:20])
async def test_a_value_of_the_wrong_kind_or_size_is_refused_by_name(
    client: Client, name: str, value: Any
) -> None:
    fields = {name: value}
    if "." in name:
        fields = {"stream_options": {"include_usage": "x"}}
    reply = await client.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == name


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [{}],
        ["hi"],
        [{"role": "user"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": "x", "audio": {"id": "1"}}],
    ],
    ids=str,
)
async def test_messages_are_text_with_a_role(client: Client, messages: Any) -> None:
    reply = await client.chat(messages=messages)
    assert reply.status == 400
    assert reply.error["param"].startswith("messages")


@pytest.mark.parametrize(
    "prompt", [None, 5, "", [], [1, "a"], ["a", 1], [[]], [300], [-1], [True], [[1], [2.5]], [None]]
)
async def test_prompts_are_text_or_ids_that_the_model_has(client: Client, prompt: Any) -> None:
    reply = await client.complete(prompt=prompt)
    assert reply.status == 400
    assert reply.error["param"] == "prompt"


@pytest.mark.parametrize("name", ["a\r\nX-Evil: 1", "\u00e9", "x" * 300, 5])
async def test_a_request_id_that_no_header_can_hold_is_refused(client: Client, name: Any) -> None:
    reply = await client.generate([1], request_id=name)
    assert (reply.status, reply.error["param"]) == (400, "request_id")


async def test_an_unknown_field_is_named(client: Client) -> None:
    reply = await client.generate([1], sampling_params={"max_tokenz": 5})
    assert reply.error["param"] == "sampling_params.max_tokenz"
    assert reply.error["code"] == "unknown_parameter"
    reply = await client.chat(temprature=1)
    assert reply.error["param"] == "temprature"


async def test_fields_of_generate_are_named_with_where_they_are(client: Client) -> None:
    for drawing, name in (({"logprobs": 21}, "logprobs"), ({"echo": True}, "echo")):
        reply = await client.generate([1], sampling_params=drawing)
        assert reply.error["param"] == f"sampling_params.{name}"
    assert (await client.generate([1], features={"x": 1})).error["param"] == "features"
    assert (
        await client.generate(
            [],
        )
    ).error["param"] == "token_ids"


async def test_a_prompt_without_room_for_an_answer_is_refused_in_the_words_clients_look_for(
    client: Client,
) -> None:
    for reply in (
        await client.complete(prompt="x" * MAX_LENGTH),
        await client.generate([1] * MAX_LENGTH),
        await client.chat(messages=[{"role": "user", "content": "x" * MAX_LENGTH}]),
    ):
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_LENGTH} tokens" in reply.error["message"]


async def test_another_model_is_not_there(client: Client) -> None:
    reply = await client.chat(model="gpt-5")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert "`tiny`" in reply.error["message"]


async def test_more_completions_than_a_request_may_have(client: Client) -> None:
    reply = await client.complete(prompt=["a", "b", "c"], n=3)
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    reply = await client.complete(n=8)  # allowed, but more than this server makes at once
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
