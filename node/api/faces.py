"""What the three ways of asking have in common: a body becomes an Asked, choices become an answer.

A face is plain: it computes nothing and waits for nothing but the tokenizer.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .asked import Asked, Served
from .choice import Choice, News
from .text import Text

Body = Mapping[str, Any]

LEAST = -9999.0
"""Of a token that is as good as impossible: JSON has no infinity. OpenAI's."""


class Face(Protocol):
    """One route: chat.py, completions.py, generate.py."""

    @property
    def route(self) -> str:
        """The path that it answers."""
        ...

    @property
    def chat(self) -> bool:
        """Whether a reply begins a text of its own."""
        ...

    async def read(self, body: Body, served: Served, text: Text) -> Asked:
        """What `body` asks for. Raises ApiError."""
        ...

    def whole(
        self, asked: Asked, choices: Sequence[Choice], served: Served, text: Text
    ) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def opening(self, asked: Asked, choice: Choice, served: Served) -> dict[str, Any] | None:
        """What a stream says of a choice before its first token; None for nothing."""
        ...

    def chunk(
        self, asked: Asked, choice: Choice, news: News, served: Served, text: Text
    ) -> dict[str, Any]:
        """One event of a stream."""
        ...

    def closing(self, asked: Asked, choices: Sequence[Choice], served: Served) -> dict[str, Any]:
        """The event with the usage, at the end of a stream."""
        ...


def usage(asked: Asked, choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens in and out; a prompt counts once however many choices it has."""
    prompt = sum(map(len, asked.prompts))
    made = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def policy(choices: Sequence[Choice]) -> dict[str, int]:
    """The first and last policy version that drew any of these tokens."""
    versions = [choice.versions() for choice in choices if choice.spans]
    return {
        "first": min((first for first, _ in versions), default=-1),
        "last": max((last for _, last in versions), default=-1),
    }


def head(asked: Asked, kind: str, served: Served) -> dict[str, Any]:
    """What every answer and every event begins with."""
    return {
        "id": asked.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
    }


class Named(NamedTuple):
    """A token as logprobs show it."""

    name: str
    data: bytes
    """Its own bytes, which may be a part of a character; those of the name where that is an id."""


def names(token_ids: Sequence[int], text: Text, *, as_ids: bool) -> list[Named]:
    """Tokens as logprobs name them."""
    if as_ids:
        written = [f"token_id:{one}" for one in token_ids]
        return [Named(one, one.encode()) for one in written]
    return [Named(text.token(one), text.spelled(one)) for one in token_ids]


def logprob_rows(
    tokens: Sequence[Named],
    logprobs: Sequence[float],
    beside: Sequence[Sequence[tuple[Named, float]]] = (),
) -> dict[str, Any]:
    """Logprobs as chats have them; `beside` are the likeliest tokens of each place."""
    rows = [_row(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
    for index, row in enumerate(rows):
        row["top_logprobs"] = [_row(*one) for one in beside[index]] if beside else []
    return {"content": rows}


def _row(token: Named, logprob: float) -> dict[str, Any]:
    return {"token": token.name, "logprob": logprob, "bytes": list(token.data)}


def named_beside(news: News, text: Text, *, as_ids: bool) -> list[list[tuple[Named, float]]]:
    """The likeliest tokens beside those of `news`, as logprobs name them; empty where none are told."""
    found: list[list[tuple[Named, float]]] = []
    for row in news.likeliest:
        named = names([token for token, _ in row], text, as_ids=as_ids)
        found.append([(name, max(told, LEAST)) for name, (_, told) in zip(named, row, strict=True)])
    return found


def ending(choice: Choice) -> dict[str, Any]:
    """Why a choice ended, and which policies drew it; all None while it grows."""
    if not choice.finish:
        return {"finish_reason": None}
    return {
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        "policy_version": policy([choice]),
    }
