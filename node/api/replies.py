"""What a reply says: text, reasoning, calls of tools. How a model writes these is its reader's business
(rendered.py); here is what is made of it, whole and piece by piece. What cannot be read stays text.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .stops import may_begin, whole

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Where a tokenizer spells them in several tokens, half of one is not told as text."""
AGAIN = 32
"""A stream tells of a reply when a 32nd of it is new."""

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool that the model calls; `arguments` is a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """What tokens say; no text but the reasoning's and the content's own, without blanks around it."""

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def until(self, stop: str, *, included: bool, last: bool = False) -> "Reply":
        """The same up to the string that ended it. `last`: those before the last one did not."""

        def cut(text: str) -> str:
            place = text.rfind(stop) if last else text.find(stop)
            return text if place < 0 else text[: place + included * len(stop)]

        if last and stop in self.content:
            return Reply(cut(self.content), self.reasoning, self.calls)
        return Reply(cut(self.content), cut(self.reasoning), self.calls)


class Reader(Protocol):
    """Knows how a model writes calls and reasoning. Implementation: rendered.py."""

    @property
    def flows(self) -> bool:
        """Whether what was read of a part stays true of the whole, so that streams may tell it."""
        ...

    def read(
        self, token_ids: Sequence[int], *, prompt: Sequence[int], tools: Sequence[Tool], done: bool
    ) -> Reply:
        """What a reply (without its stop token) to `prompt` says. Without `tools` calls are text; and so is,
        when the reply is `done`, what should have been a call and is none."""
        ...


def read_call(name: object, arguments: object) -> Call | None:
    """A call that can be handed on; None if a part of it is missing or not of its kind."""
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        return None
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(given, dict):
            return None
        return Call(name, json.dumps(given, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return None


def call_rows(calls: Sequence[Call], first: int | None = None) -> list[dict[str, Any]]:
    """Calls as messages have them; as deltas, which are numbered, from `first` on."""
    rows: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        function = {"name": call.name, "arguments": call.arguments}
        row = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        rows.append(row if first is None else {"index": first + number} | row)
    return rows


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """Under both names that clients look for: vLLM's, and the one that was before."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


@dataclass
class Telling:
    """How much of a reply a stream has told. What is told is never taken back."""

    reasoning: str = ""
    content: str = ""
    calls: int = 0
    tokens: int = 0
    """That were read."""

    def early(self, tokens: int) -> bool:
        """Whether to wait for more than so many: a reply is read from its beginning each time, so that a long
        one, read for each of its pieces, would keep the server busy."""
        if tokens - self.tokens < tokens // AGAIN:
            return True
        self.tokens = tokens
        return False

    def delta(self, reply: Reply, *, stops: Sequence[str], done: bool) -> dict[str, Any]:
        """What `reply` says beyond that; the rest of a character, of a mark or of a stop string comes later."""

        def sure(text: str) -> str:
            if done:
                return text
            text = whole(text)
            return text[: len(text) - may_begin(text, (*stops, *MARKS))]

        reasoning, self.reasoning = _more(self.reasoning, sure(reply.reasoning))
        content, self.content = _more(self.content, sure(reply.content))
        made: dict[str, Any] = reasoning_fields(reasoning)
        if content:
            made["content"] = content
        if calls := reply.calls[self.calls :]:
            made["tool_calls"] = call_rows(calls, self.calls)
            self.calls = len(reply.calls)
        return made


def _more(told: str, now: str) -> tuple[str, str]:
    """(what `now` adds, what is told then)."""
    return (now[len(told) :], now) if now.startswith(told) else ("", told)
