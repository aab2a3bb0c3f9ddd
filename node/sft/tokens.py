"""Conversations to tokens, exactly as rollouts are made of turns: by the model's chat template or its renderer.

By the template a conversation is one sequence: the prompt of its first reply, then reply, continuation, reply.
A reply is rendered as the last message, so that its reasoning is in it, and is never rendered again as history.
A renderer says of every token whether the model would have sampled it, which a chat template cannot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environments.chat import ChatFormat
from ..environments.environment import EnvironmentFailed
from ..models import huggingface
from ..ops.errors import UsageError, one_line
from .rows import BadRow, Conversation, Message, RawText, tool_names

if TYPE_CHECKING:
    from renderers import Renderer

AUTO = "auto"
OPAQUE = frozenset({"default", "template", "custom"})
"""Renderers that know no more than the chat template, or would run code that a config names."""
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
_MARK = "primerl-body-{}-is-here"
TextOf = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class Tokens:
    """A sequence and which of its tokens are trained; both lists have its length."""

    token_ids: list[int] = field(default_factory=list[int])
    mask: list[bool] = field(default_factory=list[bool])

    def add(self, token_ids: Sequence[int], mask: Sequence[bool] | bool) -> None:
        """Append, with one mask for all or one for each."""
        self.token_ids.extend(token_ids)
        self.mask.extend([mask] * len(token_ids) if isinstance(mask, bool) else mask)


class TemplateTokenizer:
    """Tokenises rows with a model's chat template."""

    def __init__(self, chat: ChatFormat, roles: frozenset[str]) -> None:
        """`roles` are those that are learned."""
        self._chat = chat
        self._roles = roles

    def tokens(self, row: Conversation | RawText) -> Tokens:
        """Tokenise the row as one sequence. Raises BadRow."""
        try:
            return self._raw(row) if isinstance(row, RawText) else self._conversation(row)
        except EnvironmentFailed as error:
            raise BadRow("template", str(error)) from error

    def _raw(self, row: RawText) -> Tokens:
        tokens = Tokens()
        tokens.add(self._chat.encode(row.prompt), mask=False)
        tokens.add([*self._chat.encode(row.completion), self._chat.stop_token_ids[0]], mask=True)
        return tokens

    def _conversation(self, talk: Conversation) -> Tokens:
        messages = talk.messages
        replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies:
            raise BadRow("no_reply", "no message is the assistant's")
        tokens = Tokens()
        first = replies[0]
        prompt = self._text_of_prompt(talk)
        self._context(tokens, messages[:first], talk.trained[:first], prompt)
        for place, index in enumerate(replies):
            reply = self._reply(talk, index)
            tokens.add(reply, mask=talk.trained[index] and "assistant" in self._roles)
            last = place + 1 == len(replies)
            end = len(messages) if last else replies[place + 1]
            between, trained = messages[index + 1 : end], talk.trained[index + 1 : end]
            if last and not self._wanted(between, trained):
                break  # messages after the last reply answer nothing

            def rest(given: Sequence[Message], stop: int = reply[-1]) -> str:
                return self._chat.continuation_text(given, stop)

            self._context(tokens, between, trained, rest)
        return tokens

    def _text_of_prompt(self, talk: Conversation) -> TextOf:
        def text_of(messages: Sequence[Message]) -> str:
            text = self._chat.render(messages, tools=talk.tools)
            if lost := [name for name in tool_names(talk.tools) if name not in text]:
                raise BadRow("template", f"the chat template leaves out the tool {lost[0]!r}")
            return text

        return text_of

    def _reply(self, talk: Conversation, index: int) -> list[int]:
        """Tokenise message `index` as the model would have sampled it, its stop token included."""
        chat, messages = self._chat, talk.messages
        before = chat.render(messages[:index], tools=talk.tools)
        whole = chat.render(messages[: index + 1], generate=False, tools=talk.tools)
        if not whole.startswith(before):
            raise BadRow(
                "template",
                "the chat template writes a reply in another way than its prompt begins one: name "
                "the model's renderer in data.renderer",
            )
        text = whole[len(before) :]
        _check_kept(messages[index], text)
        token_ids = chat.encode(text)
        stops = [n for n, token in enumerate(token_ids) if token in chat.stop_token_ids]
        if len(stops) > 1:
            raise BadRow("stop_token", f"messages[{index}] holds a stop token's text")
        return token_ids[: stops[0] + 1] if stops else [*token_ids, chat.stop_token_ids[0]]

    def _context(
        self,
        tokens: Tokens,
        messages: Sequence[Message],
        trained: Sequence[bool],
        text_of: TextOf,
    ) -> None:
        """Append context; of roles that are learned the messages' own text is trained."""
        text = text_of(messages)
        wanted = self._wanted(messages, trained)
        token_ids, starts = self._chat.encode_places(text)
        spans = bodies(messages, wanted, text, text_of) if wanted else []
        mask = [any(first <= start < end for first, end in spans) for start in starts]
        tokens.add(token_ids, mask)

    def _wanted(self, messages: Sequence[Message], trained: Sequence[bool]) -> list[int]:
        return [
            n
            for n, message in enumerate(messages)
            if trained[n] and message["role"] in self._roles and message["content"]
        ]


class RendererTokenizer(TemplateTokenizer):
    """Tokenises conversations with a renderer."""

    def __init__(self, renderer: "Renderer", chat: ChatFormat, roles: frozenset[str]) -> None:
        """`chat` is of the same model; `roles` are those that are learned."""
        super().__init__(chat, roles)
        self._renderer = renderer

    def _conversation(self, talk: Conversation) -> Tokens:
        from renderers import build_training_sample

        messages: Any = talk.messages
        tools: Any = talk.tools
        try:
            sample = build_training_sample(
                self._renderer,
                messages,
                role_to_mask=self._is_learned_reply,
                tools=tools,
                content_sft_roles=self._roles - {"assistant"},
                ensure_final_stop=True,
                message_loss_mask=list(talk.trained),
            )
        except _FAULTS as error:
            raise BadRow("renderer", f"the renderer refuses the row: {error}") from error
        tokens = Tokens(sample.token_ids, sample.loss_mask)
        self._check_reasoning(talk, tokens)
        return tokens

    def _check_reasoning(self, talk: Conversation, tokens: Tokens) -> None:
        """Renderers drop the reasoning of earlier turns, as templates do of a history: to learn such a
        reply would be to learn not to reason."""
        learned = [
            str(message.get("reasoning_content", "")).strip()
            for message, trained in zip(talk.messages, talk.trained, strict=True)
            if trained and self._is_learned_reply(message)
        ]
        if not any(learned):
            return
        pairs = zip(tokens.token_ids, tokens.mask, strict=True)
        text = self._chat.text([token for token, trained in pairs if trained])
        if any(reasoning not in text for reasoning in learned):
            raise BadRow(
                "renderer",
                'the renderer drops the reasoning of an earlier reply: use data.renderer "template"',
            )

    def _is_learned_reply(self, message: Any) -> bool:
        return message["role"] == "assistant" and "assistant" in self._roles


def bodies(
    messages: Sequence[Message], wanted: Sequence[int], text: str, text_of: TextOf
) -> list[tuple[int, int]]:
    """Find the contents of the messages `wanted` in `text`, as [first, end) of characters.

    The template is asked twice, the second time with marks for contents: the text around the marks must
    stand in `text` too, or the row is refused.
    """
    marks = {n: _MARK.format(n) for n in wanted}
    marked = [
        {**message, "content": marks[n]} if n in marks else message
        for n, message in enumerate(messages)
    ]
    scaffold, place = text_of(marked), 0
    spans: list[tuple[int, int]] = []
    for n, mark in marks.items():
        before, found, scaffold = scaffold.partition(mark)
        place += len(before)
        content: str = messages[n]["content"]
        body = next((b for b in (content, content.strip()) if text.startswith(b, place)), None)
        if not found or body is None:
            break
        spans.append((place, place + len(body)))
        place += len(body)
    if len(spans) != len(marks) or text[place:] != scaffold:
        raise BadRow("template", "the chat template changes messages that data.loss_roles names")
    return spans


def _check_kept(message: Message, text: str) -> None:
    """Check that the template leaves out nothing of the reply. Raises BadRow."""
    reasoning = str(message.get("reasoning_content", "")).strip()
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    content = str(message["content"]).strip()
    if reasoning not in text:
        raise BadRow("template", "the chat template leaves out reasoning_content")
    if lost := [name for name in calls if name not in text]:
        raise BadRow("template", f"the chat template leaves out the tool call {lost[0]!r}")
    if "</think>" not in content and content not in text:
        raise BadRow("template", "the chat template leaves out a reply's content")


def open_renderer(name: str, model_name: str, model_dir: Path) -> "Renderer | None":
    """Open the renderer `name`; with `auto` that of a model that the library knows by name, else None.

    Raises UsageError.
    """
    from renderers import create_renderer
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import config_from_name

    if name == AUTO:
        known = MODEL_RENDERER_MAP.get(model_name)
        if known is None or known in OPAQUE:
            return None
        name = known
    if name in OPAQUE:
        raise UsageError(f'data.renderer = "{name}" masks no better than "template": use that')
    tokenizer: Any = huggingface.load_tokenizer(model_dir)
    try:
        config: Any = config_from_name(name)
        return create_renderer(tokenizer, config)
    except _FAULTS as error:
        raise UsageError(
            f"data.renderer {name!r} does not fit the model ({one_line(error)}): use "
            '"template", or the renderer of its family'
        ) from error
