"""The `messages` of a request, checked, and made into what chat templates take: text, calls of tools, and what
these gave.
"""

import json
from typing import Any

from .errors import bad
from .replies import TOOL_NAME

MAX_CALLS = 128
"""Of one message."""
LONGEST_ID = 256
NOT_TEXT = "not supported (only text goes in and out)"
REASONING = ("reasoning_content", "reasoning")


def messages(value: Any) -> list[dict[str, Any]]:
    """The `messages` of a request, checked, as templates take them. Raises ApiError."""
    if not isinstance(value, list) or not value:
        raise bad("messages", "give a list of at least one message")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise bad(name, "give an object with a role and a content")
    role = value["role"]
    calls = value.get("tool_calls") if role == "assistant" else None
    content = "" if calls and value.get("content") is None else value.get("content")
    known: dict[str, Any] = {"role": role, "content": _content(content, f"{name}.content")}
    if calls:
        known["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    for field, held in value.items():
        if field in known or held is None or held == []:
            continue
        if field == "name" or (field == "tool_call_id" and role == "tool"):
            known[field] = _short(held, f"{name}.{field}")
        elif field in REASONING and role == "assistant" and isinstance(held, str):
            known["reasoning_content"] = held
        else:
            raise bad(f"{name}.{field}", NOT_TEXT)
    return known


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise bad(name, f"give a list of at most {MAX_CALLS} calls")
    return [_call(one, f"{name}[{index}]") for index, one in enumerate(value)]


def _call(value: Any, name: str) -> dict[str, Any]:
    """A call as templates take it: with arguments that are an object, and not its JSON."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise bad(name, "give an id, the type function, and a function with name and arguments")
    called = function.get("name")
    if not isinstance(called, str) or not TOOL_NAME.fullmatch(called):
        raise bad(f"{name}.function.name", "give the name of a tool")
    arguments = function.get("arguments")
    try:
        given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise bad(f"{name}.function.arguments", "give a JSON object, as a string")
    made = {"type": "function", "function": {"name": called, "arguments": given}}
    if value.get("id") is not None:
        made["id"] = _short(value["id"], f"{name}.id")
    return made


def _short(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_ID:
        raise bad(name, f"give a string of at most {LONGEST_ID} characters")
    return value


def _content(value: Any, name: str) -> str:
    """Text, or parts that are text; these are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise bad(name, "give text")
    parts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise bad(name, NOT_TEXT)
        if not isinstance(part.get("text"), str):
            raise bad(name, "a part of type text needs its text")
        parts.append(part["text"])
    return "\n".join(parts)
