import json
from typing import Any

import pytest

from primerl.node.sft.rows import BadRow, Conversation, RawText, read_row


def talk(row: object) -> Conversation:
    read = read_row(json.dumps(row).encode())
    assert isinstance(read, Conversation)
    return read


def test_messages_are_all_up_to_their_role() -> None:
    row = talk(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    assert row.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert row.trained == [True, True]
    assert row.tools is None


def test_a_pair_of_texts_is_a_question_and_its_reply() -> None:
    row = talk({"prompt": "a", "completion": "b"})
    assert [message["role"] for message in row.messages] == ["user", "assistant"]
    assert row.trained == [False, True]


def test_replies_inside_a_prompt_are_context() -> None:
    prompt = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    completion = [{"role": "assistant", "content": "4"}]
    assert talk({"prompt": prompt, "completion": completion}).trained == [False] * 3 + [True]


def test_a_weight_of_0_makes_a_reply_context() -> None:
    replies = [{"role": "assistant", "content": "x", "weight": weight} for weight in (0, 1)]
    assert talk({"messages": replies}).trained == [False, True]


def test_raw_text_stays_text() -> None:
    row = read_row(b'{"prompt": "a", "completion": "b"}', strings="raw")
    assert row == RawText("a", "b")


def test_text_that_looks_like_json_is_still_text() -> None:
    assert talk({"prompt": "[1]", "completion": "{}"}).messages[0]["content"] == "[1]"


def test_tables_may_hold_messages_and_tools_as_json_text() -> None:
    messages = json.dumps([{"role": "assistant", "content": "b"}])
    tools = json.dumps([{"function": {"name": "f", "strict": None}}])
    row = talk({"messages": messages, "tools": tools})
    assert row.messages[0]["content"] == "b"
    assert row.tools == [{"function": {"name": "f"}}]


@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}, {"tools": "[]"}])
def test_schemas_in_tool_defs_are_used_where_tools_are_lacking(tools: dict[str, Any]) -> None:
    bare = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    row = {"messages": [{"role": "assistant", "content": "b"}], **tools}
    wrapped = [{"type": "function", "function": bare}]
    for defs in ([bare], json.dumps([bare]), wrapped):
        assert talk({**row, "tool_defs": defs}).tools == wrapped
        pair = {"prompt": "a", "completion": "b", **tools, "tool_defs": defs}
        assert talk(pair).tools == wrapped


def test_populated_tools_come_before_tool_defs() -> None:
    messages = [{"role": "assistant", "content": "b"}]
    tools, other = [{"function": {"name": "f"}}], [{"name": "g"}]
    assert talk({"messages": messages, "tools": tools, "tool_defs": other}).tools == tools
    with pytest.raises(BadRow, match="tool_defs"):
        talk({"messages": messages, "tool_defs": [1]})


def test_nulls_of_a_table_are_no_arguments_and_those_of_a_line_are() -> None:
    given = {"y": "v", "x": None, "many": [{"a": 1, "b": None}, None]}
    calls = [{"function": {"name": "f", "arguments": given}}]
    data = json.dumps({"messages": [{"role": "assistant", "tool_calls": calls}]}).encode()
    for columns, arguments in ((True, {"y": "v", "many": [{"a": 1}, None]}), (False, given)):
        row = read_row(data, columns=columns)
        assert isinstance(row, Conversation)
        assert row.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_parts_of_text_are_joined_and_nulls_are_nothing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = talk({"messages": [{"role": "user", "content": parts, "name": None, "tool_calls": None}]})
    assert row.messages == [{"role": "user", "content": "ab"}]


def test_arguments_of_tool_calls_become_objects_where_they_are_json() -> None:
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"function": {"name": "g", "arguments": "not json"}},
    ]
    row = talk({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]})
    functions = [call["function"] for call in row.messages[0]["tool_calls"]]
    assert [function["arguments"] for function in functions] == [{"a": 1}, "not json"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_known_by_several_names(name: str) -> None:
    row = talk({"messages": [{"role": "assistant", "content": "", name: "hm"}]})
    assert row.messages[0]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"[]", "not_json"),
        (b"{}", "fields"),
        (b'{"prompt": "a"}', "fields"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": 1}', "messages"),
        (b'{"messages": [1]}', "messages"),
        (b'{"messages": "nonsense"}', "not_json"),
        (b'{"messages": [{"role": "gpt", "content": "a"}]}', "role"),
        (b'{"messages": [{"role": [], "content": "a"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content"),
        (b'{"messages": [{"role": "assistant", "content": ""}]}', "empty"),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}', "tool_calls"),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}', "tool_calls"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}', "tools"),
    ],
)
def test_a_bad_row_is_named_by_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        read_row(data)
    assert caught.value.reason == reason
    assert str(caught.value)


def test_raw_text_needs_text() -> None:
    with pytest.raises(BadRow):
        read_row(b'{"prompt": [], "completion": "b"}', strings="raw")
