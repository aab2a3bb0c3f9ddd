"""Token ids and text for the server: prompts in, replies out, piece by piece.

A reply is text only as far as its bytes are whole: half of a character is kept back until the rest has come.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..environments.chat import UNREADABLE, ChatFormat
from ..environments.environment import EnvironmentFailed
from .errors import ApiError, bad

CONTEXT = 6
"""Tokens of a prompt that a completion's text is decoded with: some tokenizers drop a first space."""


class Text:
    """The tokenizer and the chat template of the served model."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.stop_token_ids = chat.stop_token_ids

    @classmethod
    def load(cls, model_dir: Path) -> "Text":
        """Read a model's files; one without a chat template can only complete. Raises EnvironmentFailed."""
        return cls(ChatFormat.load(model_dir, needs_template=False))

    async def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation up to where the model speaks. Raises ApiError."""
        try:
            return tuple(await asyncio.to_thread(self._chat.prompt, messages))
        except EnvironmentFailed as error:
            raise bad("messages", str(error)) from error

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text; nothing is added."""
        return tuple(await asyncio.to_thread(self._chat.encode, text))

    def decode(self, token_ids: Sequence[int], *, special: bool, after: Sequence[int] = ()) -> str:
        """What tokens say, with or without special ones; `after` are the tokens before them."""
        text = self._chat.shown(token_ids, special=special)
        if not after:
            return text
        before = self._chat.shown(after, special=special)
        both = self._chat.shown([*after, *token_ids], special=special)
        return both[len(before) :] if before and both.startswith(before) else text

    def token(self, token_id: int) -> str:
        """One token as logprobs show it."""
        return self._chat.shown([token_id], special=True)


def whole(text: str) -> str:
    """`text` without the half of a character at its end."""
    return text.rstrip(UNREADABLE)


def may_begin(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `stops`."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where the first of `stops` begins in `text`, looked for from `start` on; of several there the longest."""
    places = [(place, stop) for stop in stops if (place := text.find(stop, start)) >= 0]
    return min(places, key=lambda one: (one[0], -len(one[1]))) if places else None


def messages(value: Any) -> list[dict[str, Any]]:
    """The `messages` of a request, checked, as templates take them. Raises ApiError."""
    if not isinstance(value, list) or not value:
        raise bad("messages", "give a list of at least one message")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise bad(name, "give an object with a role and a content")
    known = {"role": value["role"], "content": _content(value.get("content"), f"{name}.content")}
    for field, held in value.items():
        if field in ("role", "content") or held is None or held == []:
            continue
        if field == "name" and isinstance(held, str):
            known["name"] = held
            continue
        raise bad(f"{name}.{field}", "not supported (only text goes in and out)")
    return known


def _content(value: Any, name: str) -> str:
    """Text, or parts that are text; these are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise bad(name, "give text")
    parts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise bad(name, "not supported (only text goes in and out)")
        if not isinstance(part.get("text"), str):
            raise bad(name, "a part of type text needs its text")
        parts.append(part["text"])
    return "\n".join(parts)


def too_long(tokens: int, longest: int, param: str) -> ApiError:
    """400 for a prompt that leaves no room; the words are those that clients look for."""
    return ApiError(
        400,
        f"This model's maximum context length is {longest} tokens, and the prompt has {tokens}: "
        "shorten it, or raise engine.max_model_len of the server",
        param=param,
        code="context_length_exceeded",
    )
