"""Convert chat messages to token ids and back, by a model's own tokenizer and chat template.

Invariants: every machine gets the same ids, so nothing depends on the clock, the locale or the network; the
template came with the model, so it runs in jinja's sandbox.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..models.tokenizer_files import (
    DEFAULT,
    SPECIAL_NAMES,
    WITH_TOOLS,
    TokenizerFiles,
    read_tokenizer_files,
)
from ..models.tokenizer_files import FILES as TOKENIZER_FILES
from ..ops.errors import BAD_FILE, EngineError, one_line
from .environment import EnvironmentFailed

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
"""`role` and `content`, in the form of chat templates."""

UNREADABLE = "\ufffd"
NO_TEMPLATE = "{{ raise_exception('the model has none') }}"
CHAT_FILES = ("tokenizer.json", *TOKENIZER_FILES, "generation_config.json", "config.json")
"""Files of a model's directory that ChatFormat.load() reads."""
_MARK = "primerl-reply-ends-here"
PROBE = "primerl_probe"
FORMS = (
    (r"<tool_call>\s*<function=", "qwen3_coder", "qwen3"),
    (rf"<tool_call>\s*{PROBE}", "glm45", "glm45"),
    ("<\uff5ctool\u2581call\u2581begin\uff5c>", "deepseek_v3", "deepseek_v3"),
    (r"<tool_call>\s*\{", "hermes", "qwen3"),
)
"""(pattern of a call in the template's output, vLLM's tool parser, vLLM's reasoning parser)."""
_TEMPLATE_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that mistakes in a model's template raise, besides jinja's errors."""
_GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "strftime_now", *SPECIAL_NAMES}
)
"""Variables of templates that are not options: set on all nodes alike, or on none."""


class Chat(Protocol):
    """Conversion between chat messages and the token ids of prompts and replies."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply, ascending."""
        ...

    @property
    def call_form(self) -> str:
        """Form of tool calls, as the name of vLLM's parser for it; empty if unknown."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the ids of a conversation up to the model's turn.

        Includes the schemas of the `tools` that the model may call. Raises EnvironmentFailed.
        """
        ...

    def continuation(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the ids between a reply that ended with `last_token` and the next reply.

        Raises EnvironmentFailed.
        """
        ...

    def text(self, reply: Sequence[int]) -> str:
        """Return the text of a reply."""
        ...

    def reply(self, text: str) -> list[int]:
        """Return the ids of a reply with this `text`, stop token included."""
        ...

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token in the middle of a text."""
        ...


class ChatFormat:
    """A tokenizer, a compiled template and the tokens that end a reply."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        template: "jinja2.Template",
        *,
        variables: Mapping[str, str],
        stop_token_ids: tuple[int, ...],
        options: frozenset[str] = frozenset(),
        defaults: Mapping[str, Any] | None = None,
        has_tool_template: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._has_tool_template = has_tool_template
        self._template = template
        self._variables = dict(variables)
        self._known = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        self.stop_token_ids: tuple[int, ...] = stop_token_ids
        """Ids that end a reply, ascending; those of models.stop_token_ids()."""
        self.options = options
        """Variables of the template besides the conversation, such as `enable_thinking`."""
        self._defaults = dict(defaults or {})
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        needs_template: bool = True,
        defaults: Mapping[str, Any] | None = None,
    ) -> "ChatFormat":
        """Read tokenizer.json, the chat template and the stop tokens. Raises EnvironmentFailed.

        Without `needs_template` a model may lack a template; prompt() then raises instead. `defaults` are
        values of options that the template must have.
        """
        from tokenizers import Tokenizer

        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise EnvironmentFailed(
                f"{model_dir} has no tokenizer.json: save its fast tokenizer there, as `primerl-node model "
                f"import {model_dir} OUT` does"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises Exception itself
            raise EnvironmentFailed(
                f"{path} cannot be read ({one_line(error)}): fetch the model again"
            ) from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        try:
            files = read_tokenizer_files(model_dir)
        except EngineError as error:
            raise EnvironmentFailed(str(error)) from error
        template, asked = _compile(_template_text(model_dir, files, needed=needs_template))
        options = asked - _GIVEN - files.special.keys()
        if unknown := sorted(set(defaults or ()) - options):
            has = ", ".join(sorted(options)) or "nothing"
            raise EnvironmentFailed(
                f"chat_template_kwargs: the model's chat template uses {has}, not {', '.join(unknown)}"
            )
        return cls(
            tokenizer,
            template,
            variables=files.special,
            options=options,
            defaults=defaults,
            stop_token_ids=_stop_token_ids(
                model_dir, tokenizer, files.special.get("eos_token", "")
            ),
            has_tool_template=files.templates.get(WITH_TOOLS, files.templates.get(DEFAULT))
            != files.templates.get(DEFAULT),
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the token ids of a conversation up to the model's turn.

        Raises EnvironmentFailed if the template refuses it.
        """
        return self.encode(self.render(messages, tools=tools))

    @property
    def call_form(self) -> str:
        """See Chat; found in the template's output."""
        return self.parsers[0]

    @cached_property
    def parsers(self) -> tuple[str, str]:
        """vLLM's parsers of tool calls and of reasoning for the template's output; "" if unknown."""
        call = {"name": PROBE, "arguments": {PROBE: 1}}
        calls = [{"id": "call_0", "type": "function", "function": call}]
        asked = {"role": "user", "content": "a"}
        reply = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            text = self.render([asked, reply], generate=False)
        except EnvironmentFailed:
            return "", ""
        for mark, tools, reasoning in FORMS:
            if re.search(mark, text):
                # vLLM finds the mark by its token id
                return tools, reasoning if len(self.encode("<think>")) == 1 else ""
        return "", ""

    def continuation(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Return the token ids between a reply that ended with `last_token` and the next reply.

        They are the end of the reply, then `messages`, then the generation prompt. A reply is never tokenised
        again (its text may not lead back to the same ids, and templates rewrite old replies), so that a
        conversation stays one sequence.
        """
        return self.encode(self.continuation_text(messages, last_token))

    def continuation_text(self, messages: Sequence[Message], last_token: int) -> str:
        """Return the text of continuation()."""
        opening = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        _, mark, rest = self.render([*opening, *messages]).partition(_MARK)
        if not mark:
            raise EnvironmentFailed(
                "the chat template drops replies: use a model whose template keeps them"
            )
        if last_token in self.stop_token_ids:
            rest = rest.removeprefix(self._tokenizer.id_to_token(last_token) or "")
        return rest

    def text(self, reply: Sequence[int]) -> str:
        """Return the text of a reply without its final stop token.

        Other special tokens stay visible, and ids that no token has show as U+FFFD: neither may hide in a
        correct answer.
        """
        ended = reply and reply[-1] in self.stop_token_ids
        return self.shown(reply[:-1] if ended else reply, special=True)

    def shown(self, token_ids: Sequence[int], *, special: bool) -> str:
        """Return the text of tokens, with or without `special` ones; U+FFFD for unknown ids."""
        parts = [
            self._tokenizer.decode(list(run), skip_special_tokens=not special)
            if known
            else UNREADABLE * len(list(run))
            for known, run in groupby(token_ids, self._known.__contains__)
        ]
        return "".join(parts)

    def spelled(self, token_id: int) -> bytes:
        """Return the bytes of one token, also if it is only part of a character."""
        text = self.shown([token_id], special=True)
        name = self._tokenizer.id_to_token(token_id)
        if UNREADABLE not in text or name is None:
            return text.encode("utf-8", "replace")
        if found := _BYTE_FALLBACK.fullmatch(name):
            return bytes.fromhex(found[1])
        if all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        return text.encode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one token after another one: with its space, where that stands before words."""
        if token_id not in self._pieces:
            before = self.shown([self._letter], special=True)
            text = self.shown([self._letter, token_id], special=True)
            alone = UNREADABLE in text or not text.startswith(before)
            found = self.spelled(token_id) if alone else text[len(before) :].encode()
            self._pieces[token_id] = found
        return self._pieces[token_id]

    @cached_property
    def _letter(self) -> int:
        """A token that is followed by others."""
        return self.encode("a")[-1]

    def reply(self, text: str) -> list[int]:
        """Return the token ids of a reply with this `text`, stop token included."""
        return [*self.encode(text), self._closing_token]

    @cached_property
    def _closing_token(self) -> int:
        """Stop token that the template writes after a reply; else the first stop token."""
        opening = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        closing = self.encode(self.render(opening, generate=False).partition(_MARK)[2])
        stop = next((token for token in closing if token in self.stop_token_ids), None)
        return self.stop_token_ids[0] if stop is None else stop

    def render(
        self,
        messages: Sequence[Message],
        *,
        generate: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation, with the generation prompt if `generate`.

        `options` outside of self.options are ignored; they go before the defaults. Raises EnvironmentFailed.
        """
        from jinja2 import TemplateError

        if tools and self._has_tool_template:
            raise EnvironmentFailed(
                f"the model has another chat template for tools ({WITH_TOOLS}), and a conversation has one "
                "here: make that the chat_template.jinja of a copy, and leave the others out"
            )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=generate,
                tools=list(tools) if tools else None,
                documents=None,
                **self._defaults | {k: v for k, v in (options or {}).items() if k in self.options},
                **self._variables,
            )
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            raise EnvironmentFailed(
                f"the model's chat template refuses the conversation ({error}): "
                "use a model whose template knows these roles"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text; no special tokens are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_places(self, text: str) -> tuple[list[int], list[int]]:
        """Return token ids, and the index in `text` of each token's first character."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, [start for start, _ in found.offsets]


def _byte_level() -> dict[str, int]:
    """Map the characters of a byte-level vocabulary to bytes (GPT-2's bytes_to_unicode).

    Printable bytes are their own characters; the characters from 256 on stand for the other bytes, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_level()
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""Name of a byte token in a vocabulary with byte fallback, as SentencePiece's."""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_bytes())
    except BAD_FILE as error:
        raise EnvironmentFailed(f"{path} is no JSON ({error}): fetch the model again") from error
    return loaded if isinstance(loaded, dict) else {}


def _template_text(model_dir: Path, files: TokenizerFiles, *, needed: bool) -> str:
    template = files.templates.get(DEFAULT)
    if template is None and needed:
        others = f" but {', '.join(files.templates)}" if files.templates else ""
        raise EnvironmentFailed(
            f"{model_dir} has no chat template{others}: add chat_template.jinja, or use an instruct model"
        )
    return NO_TEMPLATE if template is None else template


def _compile(text: str) -> tuple["jinja2.Template", frozenset[str]]:
    """Compile a template as transformers does, but without `strftime_now`.

    Returns also the names that the template reads and does not set itself. With today's date in it a prompt
    would be another one on the validator tomorrow; templates have a fixed date to fall back on.
    """
    from jinja2 import TemplateError, meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Tag `{% generation %}`, which marks replies for loss masks; it changes no tokens."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse)  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        asked = meta.find_undeclared_variables(environment.parse(text))
        return environment.from_string(text), frozenset(asked) - frozenset(environment.globals)
    except TemplateError as error:
        raise EnvironmentFailed(
            f"the model's chat template does not compile ({error}): fetch the model again"
        ) from error


def _stop_token_ids(model_dir: Path, tokenizer: "Tokenizer", end: str) -> tuple[int, ...]:
    """Collect the end tokens of generation_config.json, else config.json, and the tokenizer's."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if not found and (model_dir / name).is_file():
            ids = _read_json(model_dir / name).get("eos_token_id")
            found = ids if isinstance(ids, list) else [ids]
    found.append(tokenizer.token_to_id(end) if end else None)
    stops = tuple(sorted({token for token in found if isinstance(token, int)}))
    if not stops:
        raise EnvironmentFailed(
            f"{model_dir} names no end-of-sequence token: add eos_token_id to its "
            "generation_config.json"
        )
    return stops


# -- models behind an API --------------------------------------------------------------------------

CHARACTERS = 0x110000
"""Ids below this one are Unicode code points."""
END, CUT = CHARACTERS, CHARACTERS + 1
"""Ids that end a message: complete, or cut off by a limit."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages; the ids from CUT + 1 on begin a message, one for each role in order."""
ASSISTANT = CUT + 1 + ROLES.index("assistant")


class Transcript:
    """Chat for models behind an API, without a tokenizer: every character is a token.

    Lengths are characters, never the model's tokens.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See Chat."""
        return (END,)

    call_form: str = "hermes"
    """See Chat."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """See Chat. Tools are described in a separate system message, which any model can read."""
        if tools:
            shown = "".join(f"{json.dumps(tool)}\n" for tool in tools)
            messages = [{"role": "system", "content": _TOOLS.format(shown)}, *messages]
        return [*(one for message in messages for one in _ids(message)), ASSISTANT]

    def continuation(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """See Chat."""
        return [*([] if last_token in (END, CUT) else [CUT]), *self.prompt(messages)]

    def text(self, reply: Sequence[int]) -> str:
        """See Chat."""
        return "".join(chr(one) for one in reply if one < CHARACTERS)

    def reply(self, text: str) -> list[int]:
        """See Chat."""
        return [*map(ord, text), END]

    def piece(self, token_id: int) -> bytes:
        """See Chat."""
        return chr(token_id).encode() if token_id < CHARACTERS else b""

    def messages(self, prompt: Sequence[int]) -> list[dict[str, str]]:
        """Return the conversation before the next reply, in the form that APIs take."""
        found: list[tuple[str, list[int]]] = []
        for one in prompt:
            if one > CUT:
                found.append((ROLES[one - CUT - 1], []))
            elif one < CHARACTERS:
                found[-1][1].append(one)
        return [{"role": role, "content": self.text(ids)} for role, ids in found[:-1]]


_TOOLS = (
    "You may call these functions, whose JSON schemas are:\n<tools>\n{}</tools>\nTo call one, write "
    '<tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call>, and read its result in the next message.'
)


def _ids(message: Message) -> list[int]:
    role, content = message["role"], message.get("content") or ""
    if isinstance(content, str):
        for call in message.get("tool_calls") or ():
            content += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
    if role not in ROLES or not isinstance(content, str):
        raise EnvironmentFailed(
            f"a message of role {role!r} cannot be sent to an API: use a taskset of text messages"
        )
    return [CUT + 1 + ROLES.index(role), *map(ord, content), END]
