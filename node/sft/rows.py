"""Parse a row of a data set as a conversation, or as a prompt with its completion.

Rows are untrusted: every field is checked here, once, and an invalid row raises BadRow with a reason.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Message = dict[str, Any]
"""role and content (text); optional: reasoning_content, tool_calls, name, tool_call_id."""

ROLES = frozenset({"system", "user", "assistant", "tool"})
ALIASES = {"developer": "system", "function": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CARRIED = ("name", "tool_call_id")
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
TOOLS = ("tools", "tool_defs")
"""Fields of tool schemas, the first that has any is read; verifiers writes `tool_defs`."""
FIELDS = frozenset({"messages", "prompt", "completion", *TOOLS})
"""Fields of a row that are read."""


class BadRow(Exception):
    """An invalid row, counted by `reason`; the message has the details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class LostPart(BadRow):
    """A row of which the chat template would lose a part: so would it of all rows like that."""

    def __init__(self, detail: str) -> None:
        super().__init__("template", detail)


@dataclass(frozen=True)
class Conversation:
    """Messages in order; `trained[i]` is false where message i is context whatever its role."""

    messages: list[Message]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class RawText:
    """Text without a chat template; the completion is trained."""

    prompt: str
    completion: str


def read_row(
    data: bytes, *, strings: Literal["chat", "raw"] = "chat", columns: bool = False
) -> Conversation | RawText:
    """Parse a row from one line of JSON. Raises BadRow.

    With `columns` it comes from a table with types, whose objects have the fields of all others as nulls: these
    are absent.
    """
    try:
        row: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRow("not_json", f"invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRow("not_json", "a row must be a JSON object")
    fields = cast(dict[str, Any], row)
    if columns:
        fields = _without_none(fields)
    if "messages" in fields:
        messages, trained = _messages(fields["messages"], "messages", trained=True)
        return Conversation(messages, trained, _tools(fields))
    if "prompt" not in fields or "completion" not in fields:
        raise BadRow("fields", "a row needs `messages`, or `prompt` and `completion`")
    return _pair(fields, strings)


def _pair(row: Mapping[str, Any], strings: Literal["chat", "raw"]) -> Conversation | RawText:
    prompt, completion = row["prompt"], row["completion"]
    if strings == "raw":
        if isinstance(prompt, str) and isinstance(completion, str):
            return RawText(prompt, completion)
        raise BadRow("fields", 'data.strings = "raw" needs prompt and completion to be text')
    before, context = _messages(_as_messages("user", prompt), "prompt", trained=False)
    after, trained = _messages(_as_messages("assistant", completion), "completion", trained=True)
    return Conversation([*before, *after], [*context, *trained], _tools(row))


def _as_messages(role: str, value: Any) -> Any:
    """Wrap text as one message of `role`, even if it looks like a JSON list.

    Return other values as they are.
    """
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _messages(value: Any, field: str, *, trained: bool) -> tuple[list[Message], list[bool]]:
    value = _decoded(value, field)
    if not isinstance(value, list) or not value:
        raise BadRow("messages", f"`{field}` must be a non-empty list of messages")
    messages = [
        _message(message, f"{field}[{n}]") for n, message in enumerate(cast(list[Any], value))
    ]
    # data for other trainers mark a reply as context by a `weight` of 0
    weights = [
        cast(Mapping[str, Any], message).get("weight") != 0 for message in cast(list[Any], value)
    ]
    return messages, [trained and weight for weight in weights]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow("messages", f"{where} is not a message with role and content")
    fields = cast(dict[str, Any], value)
    role = fields.get("role")
    role = ALIASES.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        raise BadRow(
            "role", f"{where} has role {fields.get('role')!r}: use {', '.join(sorted(ROLES))}"
        )
    message: Message = {"role": role, "content": _content(fields.get("content"), where)}
    for name in _REASONING:
        if isinstance(text := fields.get(name), str) and text:
            message["reasoning_content"] = text
            break
    if calls := _calls(fields.get("tool_calls"), where):
        message["tool_calls"] = calls
    message |= {name: text for name in _CARRIED if isinstance(text := fields.get(name), str)}
    if role == "assistant" and message.keys() == {"role", "content"} and not message["content"]:
        raise BadRow("empty", f"{where} is empty")
    return message


def _content(value: Any, where: str) -> str:
    """Parse content as text; None (a reply of tool calls only) is empty text."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise BadRow("content", f"{where}.content must be text or a list of text parts")
    parts: list[str] = []
    for part in cast(list[Any], value):
        fields = cast(dict[str, Any], part) if isinstance(part, dict) else {}
        text = fields.get("text")
        if fields.get("type") not in TEXT_PARTS or not isinstance(text, str):
            raise BadRow("content", f"{where}.content has a part that is not text")
        parts.append(text)
    return "".join(parts)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Parse tool calls; arguments in JSON become objects, as templates iterate over them."""
    calls: list[dict[str, Any]] = []
    given = _decoded(value, f"{where}.tool_calls") or []
    if not isinstance(given, list):
        raise BadRow("tool_calls", f"{where}.tool_calls must be a list")
    for entry in cast(list[Any], given):
        call = cast(dict[str, Any], entry) if isinstance(entry, dict) else {}
        inner = call.get("function", call)
        function = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise BadRow("tool_calls", f"{where} has a tool call without a function name")
        known: dict[str, Any] = {"type": "function"}
        if isinstance(call.get("id"), str):
            known["id"] = call["id"]
        calls.append(known | {"function": {"name": name, "arguments": _arguments(function)}})
    return calls


def _arguments(function: Mapping[str, Any]) -> Any:
    value = function.get("arguments") or {}
    if not isinstance(value, str):
        return value
    try:
        decoded: Any = json.loads(value)
    except ValueError:
        return value  # a model may generate invalid JSON, and a template may print it
    return decoded if isinstance(decoded, dict) else value


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Parse the row's tool schemas, also from JSON text, as columnar formats store them."""
    for field in TOOLS:
        value = row.get(field)
        tools = _decoded(value, field) if value else None
        if not tools:
            continue
        if not isinstance(tools, list) or not all(
            isinstance(tool, dict) for tool in cast(list[Any], tools)
        ):
            raise BadRow("tools", f"`{field}` must be a list of objects")
        given = map(_without_none, cast(list[dict[str, Any]], tools))
        return list(given if field == "tools" else map(_as_function, given))
    return None


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Wrap a bare definition (name, description, parameters), as templates expect it."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls: in columnar formats every object has the fields of all others as nulls."""
    return {key: _inner(value) for key, value in fields.items() if value is not None}


def _inner(value: Any) -> Any:
    """Remove nulls from the objects in a value; those that stand in a list stay."""
    if isinstance(value, dict):
        return _without_none(cast(Mapping[str, Any], value))
    return [_inner(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def _decoded(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("not_json", f"`{where}` is text, but not valid JSON ({error})") from error
