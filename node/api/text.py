"""Token ids and text for the server: prompts in, replies out, piece by piece.

What a reply says beyond text is read by `reader`, if there is one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..environments.chat import ChatFormat
from ..environments.environment import EnvironmentFailed
from .errors import bad
from .rendered import AUTO, open_reader
from .replies import Reader, Tool

CONTEXT = 6
"""Tokens of a prompt that a completion's text is decoded with: some tokenizers drop a first space."""


class Text:
    """The tokenizer and the chat template of the served model."""

    def __init__(self, chat: ChatFormat, reader: Reader | None = None) -> None:
        """Without a `reader` replies are text and nothing else."""
        self._chat = chat
        self.reader = reader
        self.stop_token_ids = chat.stop_token_ids

    @classmethod
    def load(cls, model_dir: Path, *, form: str = AUTO, model_name: str = "") -> "Text":
        """Read a model's files; one without a chat template can only complete. Raises EnvironmentFailed,
        UsageError for a `form` (api.reply_form) that does not fit. See open_reader() for the others."""
        chat = ChatFormat.load(model_dir, needs_template=False)
        return cls(chat, open_reader(form, model_name, model_dir, chat))

    @property
    def options(self) -> frozenset[str]:
        """See ChatFormat."""
        return self._chat.options

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation up to where the model speaks; `options` are the template's.

        Raises ApiError.
        """
        try:
            return tuple(await asyncio.to_thread(self._prompt, messages, tools, options or {}))
        except EnvironmentFailed as error:
            raise bad("messages", str(error)) from error

    def _prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
    ) -> list[int]:
        text = self._chat.render(messages, tools=tools, options=options)
        if tools and text == self._chat.render(messages, options=options):
            raise bad(
                "tools",
                "not supported (this model's chat template shows no tools): describe them in the messages",
                code="unsupported_parameter",
            )
        return self._chat.encode(text)

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

    def spelled(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        return self._chat.spelled(token_id)
