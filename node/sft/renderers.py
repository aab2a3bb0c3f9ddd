"""Conversations to tokens with a model's renderer: the only file that imports `renderers`.

A renderer says of every token whether the model would have sampled it, which a chat template cannot.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environments.chat import ChatFormat
from ..models import huggingface
from ..ops.errors import UsageError, one_line
from .rows import BadRow, Conversation, RawText
from .template import TemplateTokenizer, Tokens

if TYPE_CHECKING:
    from renderers import Renderer

AUTO = "auto"
OPAQUE = frozenset({"default", "template", "custom"})
"""Names that know no more than the chat template, or would run code that a config names."""
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, AssertionError)


class RendererTokenizer:
    """Tokenises rows with a renderer; raw text as TemplateTokenizer does."""

    def __init__(self, renderer: "Renderer", chat: ChatFormat, roles: frozenset[str]) -> None:
        """`chat` is of the same model; `roles` are those that are learned."""
        self._renderer = renderer
        self._chat = chat
        self._roles = roles
        self._plain = TemplateTokenizer(chat, roles)

    def tokens(self, row: Conversation | RawText) -> Tokens:
        """Tokenise the row as one sequence. Raises BadRow."""
        if isinstance(row, RawText):
            return self._plain.tokens(row)
        from renderers import build_training_sample

        messages: Any = row.messages
        tools: Any = row.tools
        try:
            sample = build_training_sample(
                self._renderer,
                messages,
                role_to_mask=self._is_learned_reply,
                tools=tools,
                content_sft_roles=self._roles - {"assistant"},
                ensure_final_stop=True,
                message_loss_mask=list(row.trained),
            )
        except _FAULTS as error:
            raise BadRow("renderer", f"the renderer refuses the row: {error}") from error
        tokens = Tokens(sample.token_ids, sample.loss_mask)
        self._check_kept(row, tokens)
        return tokens

    def _check_kept(self, row: Conversation, tokens: Tokens) -> None:
        """Renderers drop the reasoning of earlier turns, as templates do of a history: to learn such a
        reply would be to learn not to reason."""
        learned = [
            str(message.get("reasoning_content", "")).strip()
            for message, trained in zip(row.messages, row.trained, strict=True)
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
