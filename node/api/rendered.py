"""Replies read by the `renderers` library, which knows how models write calls of tools and reasoning. The only
file of this room that imports it.

Which of its parsers fits is found by the model's name, or by what the model's own template makes of a call.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import models
from ..environments.chat import ChatFormat
from ..environments.environment import EnvironmentFailed
from ..errors import UsageError, one_line
from .replies import Call, Reader, Reply, Tool, read_call

if TYPE_CHECKING:
    from renderers import ParsedResponse, Renderer

logger = logging.getLogger(__name__)

AUTO, NONE, HERMES = "auto", "none", "hermes"
BY_TEMPLATE = "by template"
"""The library's reader of a form, for a model that it has no name of."""
OPAQUE = frozenset({"default", "template", "custom"})
"""Names of the library that say nothing of a form, or would run code that a config names."""
FLOWING = ("qwen", "prime-qwen", "glm", BY_TEMPLATE)
"""Renderers whose marks are one token each begin with these."""
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
PROBE = "primerl_probe"
FORMS = (
    ("qwen3.5", r"<tool_call>\s*<function="),
    ("glm", rf"<tool_call>\s*{PROBE}"),
    ("deepseek-v3", "<\uff5ctool\u2581call\u2581begin\uff5c>"),
    ("qwen3", r"<tool_call>\s*\{"),
)
"""The library's parsers, and what a template of their form writes when the probe is called. The last is JSON,
as Hermes and Qwen write it."""


class RenderedReader:
    """Implements Reader."""

    def __init__(self, renderer: "Renderer", chat: ChatFormat, *, flows: bool) -> None:
        self._renderer = renderer
        self._chat = chat
        self._flows = flows

    @property
    def flows(self) -> bool:
        """See Reader."""
        return self._flows

    def read(
        self, token_ids: Sequence[int], *, prompt: Sequence[int], tools: Sequence[Tool], done: bool
    ) -> Reply:
        """See Reader."""
        given: Any = [dict(tool) for tool in tools] or None
        try:
            parsed = self._renderer.parse_response(
                list(token_ids), tools=given, prompt_ids=list(prompt)
            )
        except FAULTS as error:  # of JSON that is too deep, say: a model may write anything
            logger.debug("a reply cannot be read: %r", error)
            return Reply(self._chat.shown(token_ids, special=True).strip())
        calls, text = self._calls(parsed, token_ids, readable=bool(tools), done=done)
        content = "\n".join(filter(None, (parsed.content.strip(), *text)))
        return Reply(content, (parsed.reasoning_content or "").strip(), tuple(calls))

    def _calls(
        self, parsed: "ParsedResponse", token_ids: Sequence[int], *, readable: bool, done: bool
    ) -> tuple[list[Call], list[str]]:
        """The calls, and the text of those that are none."""
        calls: list[Call] = []
        text: list[str] = []
        for tried in parsed.tool_calls:
            good = readable and tried.status == "ok"
            call = read_call(tried.name, tried.arguments) if good else None
            if call is not None:
                calls.append(call)
            elif done or tried.status != "unclosed_block":
                start, end = tried.token_span or (0, 0)
                text.append(self._chat.shown(token_ids[start:end], special=True) or tried.raw)
        return calls, text


def open_reader(form: str, model_name: str, model_dir: Path, chat: ChatFormat) -> Reader | None:
    """The reader of `form` (api.reply_form); None where replies are text and nothing else. Raises UsageError.

    With `auto` it is found by `model_name` (a hub id, else empty), then by the template. Takes seconds where
    there is one.
    """
    found, parser = form, ""
    if form == AUTO:
        found = _by_name(model_name)
    elif form == HERMES:
        found, parser = BY_TEMPLATE, "qwen3"
    if not found and (parser := form_of(chat)):
        found = BY_TEMPLATE
    if not found or found == NONE:
        return None
    try:
        renderer = _make(found, parser, model_dir)
    except (*FAULTS, RuntimeError, OSError) as error:
        if form == AUTO:
            logger.warning("calls of tools are not read: %s", one_line(error))
            return None
        raise UsageError(
            f"api.reply_form {form!r} does not fit this model ({one_line(error)}): name the renderer "
            "of its family, or none"
        ) from error
    if renderer is None:
        return None
    return RenderedReader(renderer, chat, flows=found.startswith(FLOWING))


def form_of(chat: ChatFormat) -> str:
    """The library's parser of the form in which the template writes calls; "" if it is none that is known."""
    call = {"name": PROBE, "arguments": {PROBE: 1}}
    asked = {"role": "user", "content": "a"}
    reply = {"role": "assistant", "content": "", "tool_calls": [_as_call(call)]}
    try:
        text = chat.render([asked, reply], generate=False)
    except EnvironmentFailed:
        return ""
    return next((parser for parser, mark in FORMS if re.search(mark, text)), "")


def _as_call(function: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": function}


def _by_name(model_name: str) -> str:
    if not model_name or Path(model_name).expanduser().exists():
        return ""
    from renderers.base import MODEL_RENDERER_MAP

    found = MODEL_RENDERER_MAP.get(model_name, "")
    return "" if found in OPAQUE else found


def _make(name: str, parser: str, model_dir: Path) -> "Renderer | None":
    """A renderer of the library; None for a form whose marks this tokenizer does not know as tokens."""
    from renderers import DefaultRendererConfig, create_renderer
    from renderers.configs import config_from_name

    tokenizer: Any = models.load_tokenizer(model_dir)
    if name != BY_TEMPLATE:
        if name in OPAQUE:
            raise UsageError(f"api.reply_form {name!r} says nothing of a form: use auto")
        config: Any = config_from_name(name)
        return create_renderer(tokenizer, config)
    deepseek = parser == "deepseek-v3"
    opening = "<\uff5ctool\u2581calls\u2581begin\uff5c>" if deepseek else "<tool_call>"
    if opening not in tokenizer.get_vocab():
        logger.warning("this tokenizer has no token %s: calls of tools are not read", opening)
        return None
    return create_renderer(
        tokenizer, DefaultRendererConfig(tool_parser=parser, reasoning_parser="think")
    )
