"""Tokenize conversations like rollouts, by the model's chat template or its renderer.

With the template a conversation is one sequence: prompt, reply, continuation, reply, ... A reply is rendered as
the last message, which keeps its reasoning, and is never rendered again as history. A renderer also tells for
every token whether the model would have sampled it, which a chat template cannot.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environments.chat import ChatFormat, same_length
from ..environments.environment import EnvironmentFailed
from ..environments.marks import TemplateFault
from ..errors import UsageError, one_line
from ..models import huggingface
from .rows import BadRow, Conversation, LostPart, Message, RawText

if TYPE_CHECKING:
    from renderers import Renderer

logger = logging.getLogger(__name__)

AUTO = "auto"
OPAQUE = frozenset({"default", "template", "custom"})
"""Renderers that add nothing to the chat template, or would run code named in a config."""
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
_MARK = "primerl-body-{}-is-here"
TextOf = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class Tokens:
    """Token ids of a sequence and its training mask, of equal length."""

    token_ids: list[int] = field(default_factory=list[int])
    mask: list[bool] = field(default_factory=list[bool])

    def add(self, token_ids: Sequence[int], mask: Sequence[bool] | bool) -> None:
        """Append tokens with one mask value for all, or one for each."""
        self.token_ids.extend(token_ids)
        self.mask.extend([mask] * len(token_ids) if isinstance(mask, bool) else mask)


class TemplateTokenizer:
    """Tokenizes rows with a model's chat template."""

    def __init__(self, chat: ChatFormat, roles: frozenset[str]) -> None:
        """`roles`: the roles whose messages are trained."""
        self._chat = chat
        self._roles = roles

    def tokens(self, row: Conversation | RawText) -> Tokens:
        """Tokenize a row as one sequence. Raises BadRow."""
        try:
            return self._raw(row) if isinstance(row, RawText) else self._conversation(row)
        except TemplateFault as error:
            raise LostPart(str(error)) from error
        except EnvironmentFailed as error:
            raise BadRow("template", str(error)) from error

    def _raw(self, row: RawText) -> Tokens:
        tokens = Tokens()
        tokens.add(self._chat.encode(row.prompt), mask=False)
        reply, stops = self._chat.encode(row.completion), self._chat.stop_token_ids
        if reply[-1:] not in [[stop] for stop in stops]:  # an exported rollout has its own
            reply = [*reply, stops[0]]
        tokens.add(reply, mask=True)
        return tokens

    def _conversation(self, talk: Conversation) -> Tokens:
        messages = talk.messages
        replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not replies:
            raise BadRow("no_reply", "the conversation has no message of the assistant")
        tokens = Tokens()
        first = replies[0]

        def prompt(given: Sequence[Message]) -> str:
            return self._chat.prompt_text(given, talk.tools or ())

        self._context(tokens, messages[:first], talk.trained[:first], prompt)
        for place, index in enumerate(replies):
            reply = self._reply(talk, index)
            tokens.add(reply, mask=talk.trained[index] and "assistant" in self._roles)
            last = place + 1 == len(replies)
            end = len(messages) if last else replies[place + 1]
            between, trained = messages[index + 1 : end], talk.trained[index + 1 : end]
            if last and not self._wanted(between, trained):
                break  # untrained messages after the last reply are not needed

            def rest(given: Sequence[Message], stop: int = reply[-1]) -> str:
                return self._chat.continuation_text(given, stop)

            self._context(tokens, between, trained, rest)
        return tokens

    def _reply(self, talk: Conversation, index: int) -> list[int]:
        """Tokenize message `index` as the model would have sampled it, including its stop token."""
        chat, messages = self._chat, talk.messages
        before = chat.render(messages[:index], tools=talk.tools)
        whole = chat.render(messages[: index + 1], generate=False, tools=talk.tools)
        if not whole.startswith(before):
            raise BadRow("template", self._otherwise(talk, index, before, whole))
        text = whole[len(before) :]
        marked = chat.marked_reply(messages[: index + 1], talk.tools)
        _check_kept(messages[index], text)
        token_ids = chat.encode(text)
        stops = self._stops(token_ids)
        # the template itself may write several at the end, as Phi-3's does
        own = len(self._stops(chat.encode(marked)))
        if len(stops) > max(own, 1):
            raise BadRow("stop_token", f"messages[{index}] contains the text of a stop token")
        return token_ids[: stops[0] + 1] if stops else [*token_ids, chat.stop_token_ids[0]]

    def _stops(self, token_ids: Sequence[int]) -> list[int]:
        return [n for n, token in enumerate(token_ids) if token in self._chat.stop_token_ids]

    def _otherwise(self, talk: Conversation, index: int, before: str, whole: str) -> str:
        """Say what to do where a reply's text does not go on from its generation prompt."""
        others = [message for message in talk.messages[: index + 1] if message["role"] != "system"]
        if len(others) <= index:
            prompt = self._chat.render(others[:-1], tools=talk.tools)
            if self._chat.render(others, generate=False, tools=talk.tools).startswith(prompt):
                return (
                    "the chat template shows the system message beside the last user message only: put its "
                    "text into the first user message"
                )
        at = same_length(before, whole)
        first = max(0, at - 20)
        return (
            f"the chat template prompts for a reply by {before[first : at + 40]!r} and writes it after "
            f"{whole[first : at + 40]!r}: name the renderer of the model's family in data.renderer if it has "
            "one (docs/sft.md), else mend its chat_template.jinja"
        )

    def _context(
        self,
        tokens: Tokens,
        messages: Sequence[Message],
        trained: Sequence[bool],
        text_of: TextOf,
    ) -> None:
        """Append context; the contents of messages of trained roles are trained."""
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
    """Tokenizes conversations with a renderer."""

    def __init__(self, renderer: "Renderer", chat: ChatFormat, roles: frozenset[str]) -> None:
        """`chat` is of the same model; `roles`: the roles whose messages are trained."""
        super().__init__(chat, roles)
        self._renderer = renderer
        question: list[Any] = [{"role": "user", "content": "a"}]
        theirs = renderer.render_ids(question, add_generation_prompt=True)
        if theirs != chat.prompt(question):
            logger.warning(
                "the renderer prompts by %r, and the chat template, by which the model is run and served, "
                'by %r: set data.renderer to "template" unless you mean that',
                chat.shown(theirs, special=True),
                chat.prompt_text(question),
            )

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
        """Refuse a row if the renderer dropped a trained reply's reasoning. Raises BadRow.

        Renderers drop the reasoning of earlier turns; training on such a reply would teach the model not to
        reason.
        """
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
    """Find the contents of the messages `wanted` in `text`, as character ranges [first, end).

    Renders the messages again with marks in place of contents. The text around the marks must be equal to that
    in `text`. Raises BadRow.
    """
    marks = {n: _MARK.format(n) for n in wanted}
    marked = [
        {**message, "content": marks[n]} if n in marks else message
        for n, message in enumerate(messages)
    ]
    scaffold, place = text_of(marked), 0
    spans: list[tuple[int, int]] = []
    for n, mark in marks.items():
        before, separator, scaffold = scaffold.partition(mark)
        place += len(before)
        content: str = messages[n]["content"]
        body = next((b for b in (content, content.strip()) if text.startswith(b, place)), None)
        if not separator or body is None:
            break
        spans.append((place, place + len(body)))
        place += len(body)
    if len(spans) != len(marks) or text[place:] != scaffold:
        raise BadRow("template", "the chat template changes messages that data.loss_roles names")
    return spans


def _check_kept(message: Message, text: str) -> None:
    """Check that the template renders all parts of a reply. Raises BadRow."""
    reasoning = str(message.get("reasoning_content", "")).strip()
    content = str(message["content"]).strip()
    if reasoning not in text:
        raise BadRow("template", "the chat template leaves out reasoning_content")
    if "</think>" not in content and content not in text:
        raise BadRow("template", "the chat template leaves out a reply's content")


def open_renderer(name: str, model_name: str, model_dir: Path) -> "Renderer | None":
    """Open the renderer `name`.

    With `auto` the one that the library has for this model, else None. Raises UsageError.
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
        raise UsageError(
            f'data.renderer = "{name}" adds nothing to the chat template: set it to "template"'
        )
    tokenizer: Any = huggingface.load_tokenizer(model_dir)
    tokenizer.name_or_path = model_name  # by which it chooses whether Qwen3.5 thinks
    try:
        config: Any = config_from_name(name)
        return create_renderer(tokenizer, config)
    except _FAULTS as error:
        raise UsageError(
            f"data.renderer {name!r} does not fit the model ({one_line(error)}): use "
            '"template", or the renderer of its family'
        ) from error
