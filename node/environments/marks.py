"""Put marks in place of all that a conversation says, to find what a chat template leaves out or repeats.

Invariant: a marked conversation has the shape of the original, so a template treats both alike.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .environment import EnvironmentFailed

Message = Mapping[str, Any]
"""`role` and `content`, in the form of chat templates."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, as transformers reads them."""
PROBE = "primerl_probe"
"""Name of a tool or an argument that no conversation has."""


class TemplateFault(EnvironmentFailed):
    """The chat template leaves out a part of a conversation, or repeats it."""


# -- forms of messages -----------------------------------------------------------------------------


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of a message; none, if it has none."""
    return message.get("tool_calls") or ()


def make_call(name: str, value: object, number: object = None) -> dict[str, Any]:
    """Make a call with one argument; some templates take ids of nine letters and digits only."""
    function = {"name": name, "arguments": {PROBE: value}}
    return {"id": number or "primerl01", "type": "function", "function": function}


def reply_with_call(name: str, value: object) -> dict[str, Any]:
    """Make a reply that is one call."""
    return {"role": "assistant", "content": "", "tool_calls": [make_call(name, value)]}


def template_message(message: Message, *, text: bool) -> Message:
    """Return a message as templates take it: reasoning by all of its names, arguments as `text` or objects."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if not text:
        return message
    calls: list[Mapping[str, Any]] = []
    for call in calls_of(message):
        function: Mapping[str, Any] = call.get("function", call)
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


# -- what a template leaves out --------------------------------------------------------------------

_CONTENTS = {
    "system": "the system message",
    "user": "a user's message",
    "assistant": "a reply",
    "tool": "a tool's result",
}
_REMEDIES = {
    "the system message": "leave it out, or put its text into the first user message",
    "a reply's reasoning_content": "train replies without it, or use a model whose template shows it",
}


@dataclass(frozen=True)
class _Part:
    """A part of a conversation, and the mark in its place."""

    mark: str
    what: str
    once: bool
    """Whether a template has to show it once; names may stand in several places."""
    reply: bool
    """Whether it is a part of the last message."""
    needed: bool = True


def mark_text(number: int) -> str:
    """Return a mark that no template writes by itself."""
    return f"primerl{number:05d}mark"


def shape_of(messages: Sequence[Message]) -> tuple[object, ...]:
    """Return what a template's treatment of messages depends on, but their words."""
    return tuple(
        (
            message["role"],
            bool(message.get("content")),
            any(message.get(name) for name in REASONING),
            len(calls_of(message)),
        )
        for message in messages
    )


class MarkedConversation:
    """A conversation of the same shape with a mark in place of each part, to find the parts in its text."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        self._parts: list[_Part] = []
        self._last = False
        self._names: dict[str, str] = {}
        """Name of a called tool -> mark."""
        self.messages: list[Message] = []
        for number, message in enumerate(messages):
            self._last = number + 1 == len(messages)
            self.messages.append(self._message(message))
        self._last = False
        self.tools = [self._tool(tools)] if tools else None

    def check(self, text: str, *, reply: bool = False) -> None:
        """Raise TemplateFault unless `text` has all parts once, or those of the last message (`reply`)."""
        folded = text.casefold()
        for part in self._parts:
            count = folded.count(part.mark)
            wanted = part.needed if not reply else part.reply
            if wanted and not count:
                raise TemplateFault(
                    f"the chat template leaves out {part.what}: {_remedy(part.what)}"
                )
            if (wanted or not reply) and part.once and count > 1:
                raise TemplateFault(
                    f"the chat template shows {part.what} {count} times: mend its chat_template.jinja, or "
                    "use another model"
                )

    def _mark(self, what: str, *, once: bool = True, needed: bool = True) -> str:
        mark = mark_text(len(self._parts))
        self._parts.append(_Part(mark, what, once, self._last, needed))
        return mark

    def _message(self, message: Message) -> Message:
        marked = dict(message)
        if message.get("content") and isinstance(message["content"], str):
            marked["content"] = self._mark(_CONTENTS.get(message["role"], "a message"))
        if any(message.get(name) for name in REASONING):
            # templates may drop that of earlier replies
            mark = self._mark("a reply's reasoning_content", needed=False)
            marked |= {name: mark for name in REASONING if message.get(name)}
        if calls := calls_of(message):
            marked["tool_calls"] = [self._call(call) for call in calls]
        if message["role"] == "tool" and message.get("name") in self._names:
            marked["name"] = self._names[message["name"]]
        return marked

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function: Mapping[str, Any] = call.get("function", call)
        name = str(function.get("name"))
        if name not in self._names:
            self._names[name] = self._mark(f"the tool call {name!r}", once=False)
        argument = self._mark(f"an argument of the tool call {name!r}")
        value = self._mark(f"an argument of the tool call {name!r}")
        function = {**function, "name": self._names[name], "arguments": {argument: value}}
        return {**call, "function": function}

    def _tool(self, tools: Sequence[Message]) -> Message:
        """Make a schema; the template is assumed to treat all alike."""
        shown = ", ".join(repr(name) for name in _tool_names(tools))
        what = f"the schema of a tool ({shown[:200]})"
        return {
            "type": "function",
            "function": {
                "name": self._mark(what, once=False),
                "description": self._mark(what),
                "parameters": make_schema(self._mark(what, once=False)),
            },
        }


def make_schema(field: str) -> dict[str, Any]:
    """Make the schema of one argument."""
    fields = {field: {"type": "string", "description": "a"}}
    return {"type": "object", "properties": fields, "required": [field]}


def _remedy(what: str) -> str:
    return _REMEDIES.get(what, "use a model whose template shows it")


def _tool_names(tools: Sequence[Message]) -> Iterator[str]:
    for tool in tools:
        inner = tool.get("function", tool)
        yield str(inner.get("name")) if isinstance(inner, Mapping) else "?"
