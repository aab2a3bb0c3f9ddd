"""Convert chat messages to token ids and back, by a model's own tokenizer and chat template.

Invariants: every machine gets the same ids, so nothing depends on the clock, the locale or the network; the
template came with the model, so it runs in jinja's sandbox.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date as Date
from datetime import datetime, time
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...protocol.recent import RecentDict
from ..errors import BAD_FILE, EngineError, one_line
from ..models.tokenizer_files import (
    DEFAULT,
    SPECIAL_NAMES,
    WITH_TOOLS,
    TokenizerFiles,
    read_tokenizer_files,
)
from ..models.tokenizer_files import FILES as TOKENIZER_FILES
from .environment import EnvironmentFailed
from .marks import (
    PROBE,
    MarkedConversation,
    Message,
    TemplateFault,
    calls_of,
    make_call,
    make_schema,
    mark_text,
    reply_with_call,
    shape_of,
    template_message,
)

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer


UNREADABLE = "\ufffd"
NO_TEMPLATE = "{{ raise_exception('the model has none') }}"
CHAT_FILES = ("tokenizer.json", *TOKENIZER_FILES, "generation_config.json", "config.json")
"""Files of a model's directory that ChatFormat.load() reads."""
_MARK = "primerl-reply-ends-here"
_ASKED: Message = {"role": "user", "content": "a"}
DATE = "strftime_now"
"""Function of templates that writes the date: the value of this name in chat_template_kwargs."""
THINK = ("<think>", "</think>")
"""Marks of reasoning where the template does not tell others."""
_MOST_SHAPES = 4096
"""Shapes of conversations that are remembered as checked."""
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
    {"messages", "tools", "documents", "add_generation_prompt", DATE, *SPECIAL_NAMES}
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

    def without_reasoning(self, text: str) -> str:
        """Return the text of a reply without its reasoning, as a server gives it to a client."""
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
        self._checked = RecentDict[object, bool](_MOST_SHAPES)
        """Shapes of conversations that the template keeps; for continuations, whether with the call."""
        self._marked_replies = RecentDict[object, str](_MOST_SHAPES)

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
        values of options that the template must have; that of DATE is the date that it writes, as 2026-11-29.
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
        files = _read_files(model_dir)
        values = dict(defaults or {})
        day = _day(values.get(DATE))
        template, template_names = _compile(
            _template_text(model_dir, files, needed=needs_template), day
        )
        options = template_names - _GIVEN - files.special.keys()
        known = options | (template_names & {DATE})
        if unknown := sorted(values.keys() - known):
            has = ", ".join(sorted(known)) or "nothing"
            raise EnvironmentFailed(
                f"chat_template_kwargs: the model's chat template uses {has}, not {', '.join(unknown)}"
            )
        return cls(
            tokenizer,
            template,
            variables=files.special,
            options=options,
            defaults={name: value for name, value in values.items() if name != DATE},
            stop_token_ids=_stop_token_ids(
                model_dir, tokenizer, files.special.get("eos_token", "")
            ),
            has_tool_template=files.templates.get(WITH_TOOLS, files.templates.get(DEFAULT))
            != files.templates.get(DEFAULT),
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the token ids of a conversation up to the model's turn.

        Raises EnvironmentFailed if the template refuses it, TemplateFault if it would lose a part of it.
        """
        return self.encode(self.prompt_text(messages, tools))

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """Return the text of prompt()."""
        text = self.render(messages, tools=tools)
        shape = (shape_of(messages), bool(tools))
        if shape not in self._checked:
            marked = MarkedConversation(messages, tools)
            marked.check(self.render(marked.messages, tools=marked.tools))
            self._checked[shape] = False
        return text

    def marked_reply(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> str:
        """Render the reply that ends a conversation, with marks in place of all that it says.

        Raises TemplateFault if a part of the reply is left out or repeated.
        """
        shape = (shape_of(messages), bool(tools))
        if shape not in self._marked_replies:
            marked = MarkedConversation(messages, tools or ())
            text = self.render(marked.messages, tools=marked.tools, generate=False)
            marked.check(text, reply=True)
            before = self.render(marked.messages[:-1], tools=marked.tools)
            self._marked_replies[shape] = text.removeprefix(before)
        return self._marked_replies[shape]

    def left_out(self) -> list[str]:
        """Render all parts that conversations may have; return the names of those that the template loses.

        Raises EnvironmentFailed if it cannot write a user's message.
        """
        self.prompt([_ASKED])
        system: Message = {"role": "system", "content": "a"}
        result: Message = {
            "role": "tool",
            "content": "a",
            "tool_call_id": "primerl01",
            "name": PROBE,
        }
        call, stop = reply_with_call(PROBE, 1), self.stop_token_ids[0]
        schema = {"name": PROBE, "description": "a", "parameters": make_schema(PROBE)}
        tools: list[Message] = [{"type": "function", "function": schema}]
        thought: Message = {"role": "assistant", "content": "a", "reasoning_content": "b"}
        parts: dict[str, Callable[[], object]] = {
            "a system message": lambda: self.prompt([system, _ASKED]),
            "a second turn": lambda: self.continuation([_ASKED], stop),
            "reasoning": lambda: self.marked_reply([_ASKED, thought]),
            "schemas of tools": lambda: self.prompt([_ASKED], tools),
            "calls": lambda: self.marked_reply([_ASKED, call]),
            "results": lambda: self.continuation([result], stop),
        }
        lost: list[str] = []
        for name, render in parts.items():
            try:
                render()
            except EnvironmentFailed:
                lost.append(name)
        return lost

    @property
    def call_form(self) -> str:
        """See Chat; found in the template's output."""
        return self.parsers[0]

    @cached_property
    def parsers(self) -> tuple[str, str]:
        """Return vLLM's parsers of tool calls and of reasoning for the template's output; "" if unknown."""
        reply = reply_with_call(PROBE, 1)
        try:
            text = self.render([_ASKED, reply], generate=False)
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
        shape = ("continuation", shape_of(messages))
        if shape not in self._checked:
            self._check_continuation(messages, shape)
        rest = self._after_reply(messages, with_call=self._checked[shape])
        if last_token not in self.stop_token_ids:
            return rest
        closed = self._tokenizer.id_to_token(last_token) or ""
        if not rest.startswith(
            closed
        ):  # by another token than the template closes earlier replies with
            closed = self._history_close
        return rest.removeprefix(closed)

    @cached_property
    def _history_close(self) -> str:
        """Return the token that the template ends every reply with, also the last; "" if there is none."""
        reply: Message = {"role": "assistant", "content": _MARK}
        user: Message = {"role": "user", "content": _MARK}
        last = self.render([_ASKED, reply], generate=False).partition(_MARK)[2]
        earlier = self.render([_ASKED, reply, _ASKED]).partition(_MARK)[2]
        if not earlier or not set(self.encode(last)[:1]) & set(self.stop_token_ids):
            return ""
        close = self._tokenizer.id_to_token(self.encode(earlier)[0]) or ""
        # gpt-oss's closes earlier replies as all messages, and the last one by a token of its own
        closes_all = self.render([user], generate=False).partition(_MARK)[2].startswith(close)
        return close if last.startswith(close) or closes_all else ""

    def _check_continuation(self, messages: Sequence[Message], shape: object) -> None:
        """Find out whether results are shown beside their calls only. Raises TemplateFault if never."""
        marked = MarkedConversation(messages, ())
        try:
            marked.check(self._after_reply(marked.messages, with_call=False))
            with_call = False
        except EnvironmentFailed:
            if not messages or messages[0]["role"] != "tool":
                raise
            marked.check(self._after_reply(marked.messages, with_call=True))
            with_call = True
        self._checked[shape] = with_call

    def _after_reply(self, messages: Sequence[Message], *, with_call: bool) -> str:
        """Return what the template writes after a reply, up to the next one.

        `with_call`: the reply makes the calls that the first messages answer, for templates that show results
        beside their calls only.
        """
        reply: Message = {"role": "assistant", "content": _MARK}
        if with_call:
            results = list(takewhile(lambda message: message["role"] == "tool", messages))
            calls = [
                make_call(result.get("name") or PROBE, _MARK, result.get("tool_call_id"))
                for result in results
            ]
            reply = {"role": "assistant", "content": "", "tool_calls": calls}
        _, mark, rest = self.render([_ASKED, reply, *messages]).rpartition(_MARK)
        if not mark:
            raise TemplateFault(
                "the chat template drops replies: use a model whose template keeps them"
            )
        if with_call:
            # what closes the call is the reply's own; a stop token ends it
            ends = [
                rest.find(self._tokenizer.id_to_token(stop) or _MARK)
                for stop in self.stop_token_ids
            ]
            rest = rest[min((end for end in ends if end >= 0), default=len(rest)) :]
        return rest

    def text(self, reply: Sequence[int]) -> str:
        """Return the text of a reply without its final stop token.

        Other special tokens stay visible, and ids that no token has show as U+FFFD: neither may hide in a
        correct answer.
        """
        ended = reply and reply[-1] in self.stop_token_ids
        return self.shown(reply[:-1] if ended else reply, special=True)

    def without_reasoning(self, text: str) -> str:
        """Return the text of a reply without its reasoning; empty if that does not end."""
        opening, closing = self._thought_marks
        _, closed, answer = text.rpartition(closing)
        if closed:
            return answer.lstrip("\n")
        return "" if opening in text else text  # an empty opening: the prompt has it

    @cached_property
    def _thought_marks(self) -> tuple[str, str]:
        """Return what the template writes before the reasoning of a reply, without its prompt, and after it."""
        thought, answer = (mark_text(number) for number in range(2))
        reply: Message = {"role": "assistant", "content": answer, "reasoning_content": thought}
        try:
            prompt, text = self.render([_ASKED]), self.render([_ASKED, reply], generate=False)
        except EnvironmentFailed:
            return THINK
        before, _, after = text.partition(thought)
        closing, separator, _ = after.partition(answer)
        if not separator or not closing.strip():
            return THINK
        return before[same_length(prompt, before) :].strip(), closing.strip()

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
        if match := _BYTE_FALLBACK.fullmatch(name):
            return bytes.fromhex(match[1])
        if all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        return text.encode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one token after another one: with its space, where that stands before words."""
        if token_id not in self._pieces:
            before = self.shown([self._letter], special=True)
            text = self.shown([self._letter, token_id], special=True)
            alone = UNREADABLE in text or not text.startswith(before)
            spelling = self.spelled(token_id) if alone else text[len(before) :].encode()
            self._pieces[token_id] = spelling
        return self._pieces[token_id]

    @cached_property
    def _letter(self) -> int:
        """Return a token that is followed by others."""
        return self.encode("a")[-1]

    def reply(self, text: str) -> list[int]:
        """Return the token ids of a reply with this `text`, stop token included."""
        return [*self.encode(text), self._closing_token]

    @cached_property
    def _closing_token(self) -> int:
        """Stop token that the template writes after a reply; else the first stop token."""
        opening = [_ASKED, {"role": "assistant", "content": _MARK}]
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
        if tools and self._has_tool_template:
            raise EnvironmentFailed(
                f"the model has another chat template for tools ({WITH_TOOLS}), and a conversation has one "
                "here: make that the chat_template.jinja of a copy, and leave the others out"
            )
        chosen = {k: v for k, v in (options or {}).items() if k in self.options}
        try:
            return self._render(messages, generate, tools, chosen)
        except _refusals() as error:
            raise EnvironmentFailed(
                f"the model's chat template refuses the conversation ({one_line(error)}): "
                f"{self._advice(messages, generate, tools, chosen, error)}"
            ) from error

    def _render(
        self,
        messages: Sequence[Message],
        generate: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Render messages in the forms that this template takes."""
        return self._template.render(
            messages=[
                template_message(message, text=bool(calls_of(message)) and self._text_calls)
                for message in messages
            ],
            add_generation_prompt=generate,
            tools=list(tools) if tools else None,
            documents=None,
            **{**self._defaults, **options},
            **self._variables,
        )

    @cached_property
    def _text_calls(self) -> bool:
        """Return whether the template takes the arguments of calls as JSON text, not as an object."""
        reply = reply_with_call(PROBE, 1)
        for text in (False, True):
            messages = [_ASKED, template_message(reply, text=text)]
            try:
                shown = self._template.render(
                    messages=messages, tools=None, **self._defaults, **self._variables
                )
            except _refusals():
                continue
            # an object that is written as it is has the quotes of Python
            if text or repr(reply["tool_calls"][0]["function"]["arguments"]) not in shown:
                return text
        return False

    def _advice(
        self,
        messages: Sequence[Message],
        generate: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        error: Exception,
    ) -> str:
        """Say what to do about a conversation that the template refuses."""
        if DATE in str(error):
            return f"set {DATE} in environment.chat_template_kwargs to the date that it shall write"
        others = [message for message in messages if message["role"] != "system"]
        if len(others) < len(messages):
            try:
                self._render(others, generate, tools, options)
            except _refusals():
                pass
            else:
                return "it takes no system message there: put that text into the first user message"
        return "use a model whose template takes these messages"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text; no special tokens are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_places(self, text: str) -> tuple[list[int], list[int]]:
        """Return token ids, and the index in `text` of each token's first character."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]


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


def _read_files(model_dir: Path) -> TokenizerFiles:
    """Read the files of a tokenizer. Raises EnvironmentFailed."""
    try:
        return read_tokenizer_files(model_dir)
    except EngineError as error:
        raise EnvironmentFailed(str(error)) from error


def _template_text(model_dir: Path, files: TokenizerFiles, *, needed: bool) -> str:
    template = files.templates.get(DEFAULT)
    if template is None and needed:
        others = f" but {', '.join(files.templates)}" if files.templates else ""
        raise EnvironmentFailed(
            f"{model_dir} has no chat template{others}: add chat_template.jinja, or use an instruct model"
        )
    return NO_TEMPLATE if template is None else template


def same_length(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))


def reads_date(model_dir: Path) -> bool:
    """Return whether the chat template of a model writes the date. Raises EnvironmentFailed."""
    files = _read_files(model_dir)
    return DATE in _compile(_template_text(model_dir, files, needed=False), None)[1]


def dated(
    variables: Mapping[str, bool | int | float | str], model_dir: Path, date: str
) -> dict[str, bool | int | float | str]:
    """Return `variables` of the chat template with the `date` that it writes, if it does and none is given."""
    if not date or DATE in variables or not reads_date(model_dir):
        return dict(variables)
    return {**variables, DATE: date}


def _day(value: object) -> datetime | None:
    if value is None:
        return None
    try:
        return datetime.combine(Date.fromisoformat(str(value)), time())
    except ValueError as error:
        raise EnvironmentFailed(
            f"chat_template_kwargs: {DATE} is {value!r}: give the date as 2026-11-29"
        ) from error


def _compile(text: str, day: datetime | None) -> tuple["jinja2.Template", frozenset[str]]:
    """Compile a template as transformers does, but with `day` for today; without one `strftime_now` is missing.

    Returns also the names that the template reads and does not set itself. With today's date in it a prompt
    would be another one on the validator tomorrow.
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
        names = meta.find_undeclared_variables(environment.parse(text))
        names -= environment.globals.keys()
        if day is not None:
            environment.globals[DATE] = day.strftime  # pyright: ignore[reportArgumentType]
        return environment.from_string(text), frozenset(names)
    except TemplateError as error:
        raise EnvironmentFailed(
            f"the model's chat template does not compile ({error}): fetch the model again"
        ) from error


def _stop_token_ids(model_dir: Path, tokenizer: "Tokenizer", end: str) -> tuple[int, ...]:
    """Collect the end tokens of generation_config.json, else config.json, and the tokenizer's."""
    ids_found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if not ids_found and (model_dir / name).is_file():
            ids = _read_json(model_dir / name).get("eos_token_id")
            ids_found = ids if isinstance(ids, list) else [ids]
    ids_found.append(tokenizer.token_to_id(end) if end else None)
    stops = tuple(sorted({token for token in ids_found if isinstance(token, int)}))
    if not stops:
        raise EnvironmentFailed(
            f"{model_dir} names no end-of-sequence token: add eos_token_id to its "
            "generation_config.json"
        )
    return stops


def _refusals() -> tuple[type[Exception], ...]:
    from jinja2 import TemplateError

    return (TemplateError, *_TEMPLATE_FAULTS)


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
        return [*(token for message in messages for token in _ids(message)), ASSISTANT]

    def continuation(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """See Chat."""
        return [*([] if last_token in (END, CUT) else [CUT]), *self.prompt(messages)]

    def text(self, reply: Sequence[int]) -> str:
        """See Chat."""
        return "".join(chr(token) for token in reply if token < CHARACTERS)

    def without_reasoning(self, text: str) -> str:
        """See Chat."""
        _, closed, answer = text.rpartition(THINK[1])
        return answer.lstrip("\n") if closed else text

    def reply(self, text: str) -> list[int]:
        """See Chat."""
        return [*map(ord, text), END]

    def piece(self, token_id: int) -> bytes:
        """See Chat."""
        return chr(token_id).encode() if token_id < CHARACTERS else b""

    def messages(self, prompt: Sequence[int]) -> list[dict[str, str]]:
        """Return the conversation before the next reply, in the form that APIs take."""
        turns: list[tuple[str, list[int]]] = []
        for token in prompt:
            if token > CUT:
                turns.append((ROLES[token - CUT - 1], []))
            elif token < CHARACTERS:
                turns[-1][1].append(token)
        return [{"role": role, "content": self.text(ids)} for role, ids in turns[:-1]]


_TOOLS = (
    "You may call these functions, whose JSON schemas are:\n<tools>\n{}</tools>\nTo call one, write "
    '<tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call>, and read its result in the next message.'
)


def _ids(message: Message) -> list[int]:
    role, content = message["role"], message.get("content") or ""
    if isinstance(content, str):
        for call in calls_of(message):
            content += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
    if role not in ROLES or not isinstance(content, str):
        raise EnvironmentFailed(
            f"a message of role {role!r} cannot be sent to an API: use a taskset of text messages"
        )
    return [CUT + 1 + ROLES.index(role), *map(ord, content), END]
