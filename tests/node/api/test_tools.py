"""Tools that a chat may call: shown to the model, its calls read, and everything else still text."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_cases import NAME, Client, Reply, SayingEngine, api
from openai.lib.streaming.chat import ChatCompletionStreamState
from tool_cases import CALL, WEATHER, ids_of, tool_dir

QUESTION: dict[str, Any] = {"role": "user", "content": "Oslo?"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine() -> SayingEngine:
    return SayingEngine()


@pytest.fixture
async def client(engine: SayingEngine, model_dir: Path) -> AsyncIterator[Client]:
    async with api(engine, model_dir, max_length=1024, stream_tokens=4) as client:
        yield client


@pytest.fixture
def say(engine: SayingEngine, model_dir: Path) -> Any:
    def say(text: str) -> None:
        engine.token_ids, engine.after = ids_of(model_dir, text), None
        engine.requests.clear()

    return say


def message(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]["message"]


def called(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]


def joined(events: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that the deltas of a stream add up to, and how it ended."""
    told: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        [choice] = event["choices"]
        delta = choice["delta"]
        for field in ("content", "reasoning_content"):
            told[field] += delta.get(field) or ""
        for call in delta.get("tool_calls", []):
            assert call["index"] == len(told["tool_calls"])
            told["tool_calls"].append(call)
    return told, events[-1]["choices"][0]["finish_reason"]


async def test_a_call_is_read_and_the_tools_were_shown_to_the_model(
    client: Client, engine: SayingEngine, say: Any
) -> None:
    say("One moment." + CALL)
    reply = await client.chat(messages=[QUESTION], tools=[WEATHER], tool_choice="auto")
    said = message(reply)
    assert said["content"] == "One moment."
    assert called(said["tool_calls"]) == [("weather", {"city": "Oslo"})]
    assert reply.json["choices"][0]["finish_reason"] == "tool_calls"
    [asked] = engine.requests
    assert json.dumps(WEATHER).encode() in bytes(one for one in asked.prompt if one < 256)


async def test_what_a_tool_gave_goes_back_to_the_model_through_its_template(
    client: Client, engine: SayingEngine, model_dir: Path, say: Any
) -> None:
    say("Rain.")
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "Oslo"}'}  # type: ignore[assignment]
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "8 degrees"},
    ]
    said = message(await client.chat(messages=messages))
    assert (said["content"], "tool_calls" in said) == ("Rain.", False)
    text = (
        '<|user|>Oslo?<|im_end|><|assistant|><think>hm</think><tool_call>{"name": "weather", "arguments": '
        '{"city": "Oslo"}}</tool_call><|im_end|><|tool|>8 degrees<|im_end|><|assistant|>'
    )
    assert list(engine.requests[0].prompt) == ids_of(model_dir, text)[:-1]


@pytest.mark.parametrize("reasoning", ["", "Where is\nthat <tool_call> ?"])
async def test_a_stream_adds_up_to_the_answer_in_one_piece(
    client: Client, say: Any, reasoning: str
) -> None:
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    say(f"{thought}Two caf\u00e9s, say.\n{CALL}\n{CALL.replace('Oslo', 'Bergen')}")
    fields = {"messages": [QUESTION], "tools": [WEATHER]}
    said = message(await client.chat(**fields))
    told, finish = joined((await client.chat(stream=True, **fields)).events[1:])
    assert said["content"] == told["content"] == "Two caf\u00e9s, say."
    assert said.get("reasoning_content", "") == told["reasoning_content"] == reasoning
    assert said.get("reasoning", "") == reasoning
    cities = [("weather", {"city": "Oslo"}), ("weather", {"city": "Bergen"})]
    assert called(said["tool_calls"]) == called(told["tool_calls"]) == cities
    assert finish == "tool_calls"


async def test_a_call_is_streamed_when_it_is_whole_and_no_text_of_it_before(
    client: Client, say: Any
) -> None:
    say(f"Yes.{CALL}{CALL}")
    events = (await client.chat(messages=[QUESTION], tools=[WEATHER], stream=True)).events[1:]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert sum("tool_calls" in delta for delta in deltas) == 2
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    first = next(index for index, delta in enumerate(deltas) if "tool_calls" in delta)
    assert first < len(deltas) - 5


NO_CALLS = {
    "no JSON": "<tool_call>weather(Oslo)</tool_call>",
    "cut": '<tool_call>{"name": "weather", "arguments": {"city"',
    "nameless": '<tool_call>{"arguments": {}}</tool_call>',
    "a name that is none": '<tool_call>{"name": ["x"], "arguments": {}}</tool_call>',
    "arguments that are none": '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    "no number": '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>',
    "too deep": "<tool_call>" + "[" * 20_000 + "</tool_call>",
    "too long a number": '<tool_call>{"name": "f", "arguments": ' + "9" * 5000 + "}</tool_call>",
}


@pytest.mark.parametrize("text", NO_CALLS.values(), ids=NO_CALLS)
async def test_what_is_no_call_stays_text(model_dir: Path, text: str) -> None:
    from primerl.node.api.text import Text

    reader = Text.load(model_dir).reader
    assert reader is not None
    ids = ids_of(model_dir, "Hm. " + text)[:-1]
    reply = reader.read(ids, prompt=(1,), tools=[WEATHER], done=True)
    assert reply.calls == ()
    assert reply.content.startswith("Hm.")
    assert reply.content.endswith(text)


async def test_a_good_call_beside_a_bad_one_counts_and_the_bad_one_is_text(
    client: Client, say: Any
) -> None:
    bad = "<tool_call>nothing</tool_call>"
    say(f"Hm.{CALL}{bad}{CALL}")
    fields = {"messages": [QUESTION], "tools": [WEATHER]}
    said = message(await client.chat(**fields))
    told, finish = joined((await client.chat(stream=True, **fields)).events[1:])
    assert said["content"] == told["content"] == f"Hm.\n{bad}"
    assert len(said["tool_calls"]) == len(told["tool_calls"]) == 2
    assert finish == "tool_calls"
    alone = message(await client.chat(parallel_tool_calls=False, **fields))
    assert called(alone["tool_calls"]) == [("weather", {"city": "Oslo"})]


async def test_a_call_that_is_cut_by_length_is_text_and_the_end_is_length(
    client: Client, say: Any
) -> None:
    say(CALL + CALL)
    reply = await client.chat(messages=[QUESTION], tools=[WEATHER], max_tokens=90)
    said = message(reply)
    assert len(said["tool_calls"]) == 1
    assert said["content"].startswith("<tool_call>")
    assert reply.json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_nothing_is_a_call_and_the_model_is_shown_none(
    client: Client, engine: SayingEngine, say: Any, asked: dict[str, Any]
) -> None:
    say("So: " + CALL)
    reply = await client.chat(messages=[QUESTION], **asked)
    assert message(reply)["content"].endswith(CALL)
    assert "tool_calls" not in message(reply)
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert b"degrees" not in bytes(one for one in engine.requests[0].prompt if one < 256)
    assert reply.json["usage"]["prompt_tokens"] == 8


async def test_a_stop_string_ends_text_and_reasoning(client: Client, say: Any) -> None:
    say("<think>one END two</think>three")
    for stream in (False, True):
        reply = await client.chat(messages=[QUESTION], stop="END", stream=stream)
        said = joined(reply.events[1:])[0] if stream else message(reply)
        assert (said["reasoning_content"].strip(), said["content"]) == ("one", "")


FUNCTION: dict[str, Any] = WEATHER["function"]
WRONG: list[tuple[str, Any, str]] = [
    ("tools", {}, "tools"),
    ("tools", ["x"], "tools[0]"),
    ("tools", [{"type": "web_search"}], "tools[0]"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": FUNCTION | {"code": "x"}}], "tools[0]"),
    ("tools", [WEATHER, WEATHER], "tools"),
    ("tools", [WEATHER] * 200, "tools"),
    (
        "tools",
        [{"type": "function", "function": FUNCTION | {"strict": True}}],
        "tools[0].function.strict",
    ),
    (
        "tools",
        [{"type": "function", "function": FUNCTION | {"parameters": "x"}}],
        "tools[0].function.parameters",
    ),
    (
        "tools",
        [{"type": "function", "function": FUNCTION | {"description": "x" * 300_000}}],
        "tools",
    ),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "weather"}}, "tool_choice"),
    ("parallel_tool_calls", 1, "parallel_tool_calls"),
    ("functions", [FUNCTION], "functions"),
]


@pytest.mark.parametrize(("name", "value", "param"), WRONG, ids=lambda one: str(one)[:30])
async def test_tools_that_cannot_be_had_are_refused_by_name(
    client: Client, engine: SayingEngine, name: str, value: Any, param: str
) -> None:
    reply = await client.chat(**{"tools": [WEATHER], name: value})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert engine.requests == []


BAD_CALLS: list[Any] = [
    "x",
    [5],
    [{"id": "1"}],
    [{"function": {"name": "f", "arguments": "{"}}],
    [{"function": {"name": "f", "arguments": "[1]"}}],
    [{"function": {"name": "f g", "arguments": "{}"}}],
    [{"id": "x" * 300, "function": {"name": "f", "arguments": "{}"}}],
    [{"id": "1", "type": "custom", "function": {"name": "f", "arguments": "{}"}}],
    [{"function": {"name": "f", "arguments": "[" * 20_000}}],
]


@pytest.mark.parametrize("calls", BAD_CALLS, ids=lambda one: str(one)[:30])
async def test_calls_in_messages_are_checked(client: Client, calls: Any) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    reply = await client.chat(messages=[QUESTION, said])
    assert reply.status == 400
    assert reply.error["param"].startswith("messages[1].tool_calls")


async def test_a_template_that_shows_no_tools_or_fails_on_them_is_a_mistake_of_the_request(
    model_dir: Path, tmp_path: Path
) -> None:
    kept = (model_dir / "chat_template.jinja").read_text()
    blind = kept.replace("{%- if tools %}", "{%- if False %}")
    failing = kept.replace("{{ t | tojson }}", "{{ t.function.nothing.here }}")
    for name, template in (("blind", blind), ("failing", failing)):
        engine = SayingEngine()
        async with api(engine, tool_dir(tmp_path / name, template)) as client:
            reply = await client.chat(messages=[QUESTION], tools=[WEATHER])
        assert reply.status == 400
        assert "template" in reply.error["message"]
        assert engine.requests == []


async def test_openais_client_gets_calls_whole_and_streamed(client: Client, say: Any) -> None:
    say("Wait." + CALL)
    asked: dict[str, Any] = {"model": NAME, "messages": [QUESTION], "tools": [WEATHER]}
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="x") as theirs:
        whole = await theirs.chat.completions.create(**asked)
        state = ChatCompletionStreamState()
        async for chunk in await theirs.chat.completions.create(**asked, stream=True):
            state.handle_chunk(chunk)
    for made in (whole, state.get_final_completion()):
        [choice] = made.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Wait."
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather",
            {"city": "Oslo"},
        )
