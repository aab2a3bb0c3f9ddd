"""Serve completions, chat completions and token-in generation on any engine.

Without tools and output formats. With vLLM only /inference/v1/generate is served here, with the sampler's own
logprobs and the policy version of each token; the other routes are vLLM's (vllm_proxy.py).

- A completion is generated in one request to the engine, or in several consecutive ones: for streams, and for
  stop strings, which engines do not support. A token's noise depends on seed and position only, so the tokens
  are the same either way.
- Unsupported options are refused by name, never ignored. Unknown fields with a neutral value (null, 0, false,
  empty) are accepted, as clients send defaults.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ..environments.chat import UNREADABLE, ChatFormat
from ..environments.environment import EnvironmentFailed
from ..errors import first_cause
from ..inference.engine import Engine, GenerateRequest
from .server import ID_HEADER, VERSION_HEADER, ApiError, Body, EventStream, Served, metric_family

if TYPE_CHECKING:
    from aiohttp import web

CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
KINDS = {
    CHAT: ("chat.completion", "chatcmpl"),
    TEXT: ("text_completion", "cmpl"),
    TOKENS: ("", "gen"),
}
DEFAULT_TOKENS = 16
"""Default max_tokens of a completion; chats are bounded by the context length only."""
FIRST_CHUNK, FIRST_STOP_CHUNK, LAST_STOP_CHUNK = 4, 32, 256
"""Tokens of the first request of a stream; of the first and the longest one for stop strings without a stream.
Each request is twice as long as the one before."""
CONTEXT = 6
"""Prompt tokens decoded together with a completion: some tokenizers drop a leading space."""
LOWEST_TEMPERATURE = 0.01
"""vLLM draws what is asked for between 0 and this at this; 0 takes the likeliest token."""
SEEDS = 1 << 63
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "service_tier": ("auto", "default"),
    **{name: () for name in ("user", "metadata", "safety_identifier", "prompt_cache_key")},
    **{name: () for name in ("parallel_tool_calls", "cache_salt", "routed_experts_prompt_start")},
}
"""Fields that are accepted and ignored if they have one of these values; an empty tuple allows any."""
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0)]
B = TypeVar("B")


class StreamOptions(msgspec.Struct):
    """Extra events of a stream."""

    include_usage: bool | None = None


class SharedBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request; None is the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    seed: Annotated[int, Meta(ge=-SEEDS, le=SEEDS - 1)] | None = None
    stop: str | list[Annotated[str, Meta(min_length=1, max_length=1024)]] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: bool | Annotated[int, Meta(ge=0, le=1)] | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Convert the message for chat templates."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": self.role, "content": text, **({"name": self.name} if self.name else {})}


class ChatBody(SharedBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None


class TextBody(SharedBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[TokenId]]


class TokensBody(SharedBody, kw_only=True):
    """POST /inference/v1/generate, with the fields of its `sampling_params` merged in."""

    token_ids: list[TokenId]
    request_id: Annotated[str, Meta(pattern="^[!-~]{1,256}$")] | None = None


@dataclass
class Choice:
    """A completion in progress."""

    index: int
    prompt: tuple[int, ...]
    most: int
    seed: int
    group: bytes
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(index of the first token, policy version)."""
    text: str = ""
    finish: str = ""
    """`stop` or `length`; empty while unfinished."""
    stop_reason: int | str | None = None
    sent_tokens: int = 0
    sent_text: int = 0
    """Characters already streamed."""


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request."""

    path: str
    id: str
    body: SharedBody
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    choices: list[Choice]


class EngineRoutes:
    """Routes over any engine."""

    paths: tuple[str, ...] = (CHAT, TEXT, TOKENS)

    def __init__(self, engine: Engine, chat: ChatFormat, served: Served) -> None:
        self._engine, self._chat, self._served = engine, chat, served
        self._finished: Counter[str] = Counter()
        self._prompt = self._generated = 0

    async def answer(
        self, path: str, body: Body, raw: bytes, stream: EventStream
    ) -> "web.StreamResponse":
        """See Routes."""
        from aiohttp import web

        request = await asyncio.to_thread(self._read, path, body)
        if not request.body.stream:
            await self._generate_all(request, None)
            parts = [self._choice(request, choice, 0, choice.text) for choice in request.choices]
            reply = self._head(request, "") | {"choices": parts, "usage": self._usage(request)}
            versions = _versions(request.choices)
            reply["policy_version"] = versions
            if request.body.return_token_ids:
                reply["prompt_token_ids"] = list(request.choices[0].prompt)
            first, last = versions.values()
            version = str(first) if first == last else f"{first}-{last}"
            headers = {VERSION_HEADER: version, ID_HEADER: request.id}
            return web.json_response(body=msgspec.json.encode(reply), headers=headers)
        await stream.start(
            {VERSION_HEADER: str(self._engine.policy_version), ID_HEADER: request.id}
        )
        if path == CHAT:
            for choice in request.choices:
                delta = {"role": "assistant", "content": ""}
                part = {"index": choice.index, "delta": delta, "finish_reason": None}
                await stream.send(self._head(request, ".chunk") | {"choices": [part]})
        await self._generate_all(request, stream)
        options = request.body.stream_options
        if options is not None and options.include_usage:
            usage = {"choices": [], "usage": self._usage(request)}
            await stream.send(self._head(request, ".chunk") | usage)
        return await stream.end()

    async def metrics(self) -> str:
        """See Routes; metrics have vLLM's names where the meaning is the same."""
        stats, name = self._engine.stats(), self._served.name
        ended = {f'finished_reason="{why}"': count for why, count in self._finished.items()}
        families: list[tuple[str, str, float | Mapping[str, float]]] = [
            ("vllm:num_requests_running", "gauge", stats.running),
            ("vllm:num_requests_waiting", "gauge", stats.waiting),
            ("vllm:kv_cache_usage_perc", "gauge", stats.kv_use),
            ("vllm:num_preemptions_total", "counter", stats.preemptions),
            ("vllm:prompt_tokens_total", "counter", self._prompt),
            ("vllm:generation_tokens_total", "counter", self._generated),
            ("vllm:spec_decode_num_draft_tokens_total", "counter", stats.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens_total", "counter", stats.accepted_tokens),
            ("vllm:request_success_total", "counter", ended),
        ]
        return "".join(metric_family(name, *family) for family in families)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, path: str, body: Body) -> CompletionRequest:
        """Check and convert a request body. Raises ApiError."""
        if path == TOKENS:
            rest = dict(body)
            sampling = rest.pop("sampling_params", None)
            if not isinstance(sampling, dict):
                raise _bad("sampling_params", "give an object")
            given = convert(rest | sampling, TokensBody)
            prompts, most = [tuple(given.token_ids)], given.max_tokens or DEFAULT_TOKENS
            request_id = given.request_id or ""
        elif path == CHAT:
            given = convert(body, ChatBody)
            prompts = [self._render(given)]
            most, request_id = given.max_completion_tokens or given.max_tokens, ""
        else:
            given = convert(body, TextBody)
            prompts = self._prompts(given.prompt)
            most, request_id = given.max_tokens or DEFAULT_TOKENS, ""
        for prompt in prompts:
            self._check_prompt(prompt)
        stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
        if len(stops) > self._served.api.max_stop_strings or "" in stops:
            most_stops = self._served.api.max_stop_strings
            raise _bad("stop", f"give up to {most_stops} non-empty strings")
        own = () if given.ignore_eos else self._chat.stop_token_ids
        ends = tuple(dict.fromkeys((*own, *(given.stop_token_ids or ()))))
        if any(token >= self._served.vocab_size for token in ends):
            raise _bad("stop_token_ids", f"token ids are 0 to {self._served.vocab_size - 1}")
        seed = secrets.randbits(63) if given.seed is None else given.seed
        choices: list[Choice] = []
        for prompt in prompts:
            room = self._served.max_model_len - len(prompt)
            group = secrets.token_bytes(8) if (given.n or 1) > 1 else b""
            for number in range(given.n or 1):  # seeds as in vLLM
                choice = Choice(
                    len(choices), prompt, min(room, most or room), (seed + number) % SEEDS, group
                )
                choices.append(choice)
        request_id = request_id or f"{KINDS[path][1]}-{secrets.token_hex(12)}"
        return CompletionRequest(path, request_id, given, tuple(stops), ends, choices)

    def _render(self, body: ChatBody) -> tuple[int, ...]:
        options = {k: v for k, v in (body.chat_template_kwargs or {}).items() if v is not None}
        for name in options.keys() - self._chat.options:
            has = ", ".join(sorted(self._chat.options)) or "nothing"
            raise _bad("chat_template_kwargs", f"the chat template uses {has}, not {name[:100]}")
        try:
            text = self._chat.render(
                [message.plain() for message in body.messages], options=options
            )
        except EnvironmentFailed as error:
            raise _bad("messages", str(error)) from error
        return tuple(self._chat.encode(text))

    def _prompts(self, prompt: str | Sequence[Any]) -> list[tuple[int, ...]]:
        """Convert a string, token ids, or a list of either to token ids. Raises ApiError."""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        kinds = {type(element) for element in prompt}
        if kinds not in ({str}, {list}):
            raise _bad("prompt", "give a string, token ids, or a list of either")
        prompts = [
            tuple(self._chat.encode(element) if isinstance(element, str) else element)
            for element in prompt
        ]
        if any(type(token) is not int for ids in prompts for token in ids):
            raise _bad("prompt", "do not mix token ids and text: give a list of either")
        return prompts

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        longest, size = self._served.max_model_len, self._served.vocab_size
        if not prompt:
            raise _bad("prompt", "the prompt is empty: give at least one token")
        if len(prompt) >= longest:  # clients look for OpenAI's wording
            raise ApiError(
                400,
                f"This model's maximum context length is {longest} tokens, and the prompt has {len(prompt)}: "
                "shorten it, or raise the server's engine.max_model_len",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(prompt) < 0 or max(prompt) >= size:
            raise _bad("prompt", f"token ids are 0 to {size - 1}")

    # -- generating --------------------------------------------------------------------------------

    async def _generate_all(self, request: CompletionRequest, stream: EventStream | None) -> None:
        """Generate all choices concurrently; if one fails, cancel the others. Raises EngineError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in request.choices:
                    tasks.create_task(self._generate(request, choice, stream))
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        self._finished.update(choice.finish for choice in request.choices)
        self._prompt += self._usage(request)["prompt_tokens"]
        self._generated += sum(len(choice.token_ids) for choice in request.choices)

    async def _generate(
        self, request: CompletionRequest, choice: Choice, stream: EventStream | None
    ) -> None:
        for tokens in self._chunk_sizes(request, choice, streams=stream is not None):
            await self._extend(request, choice, tokens)
            first = choice.sent_tokens
            text = self._unsent_text(request, choice)
            if stream is not None and (text or choice.finish or len(choice.token_ids) > first):
                part = self._choice(request, choice, first, text, chunk=True)
                await stream.send(self._head(request, ".chunk") | {"choices": [part]})

    def _chunk_sizes(
        self, request: CompletionRequest, choice: Choice, *, streams: bool
    ) -> Iterator[int]:
        """Yield the number of tokens to generate next, until the choice is finished."""
        size = longest = choice.most
        if streams:
            size, longest = FIRST_CHUNK, max(FIRST_CHUNK, self._served.api.stream_tokens)
        elif request.stops:
            size, longest = FIRST_STOP_CHUNK, LAST_STOP_CHUNK
        while not choice.finish:
            yield min(size, choice.most - len(choice.token_ids))
            size = min(2 * size, longest)

    async def _extend(self, request: CompletionRequest, choice: Choice, tokens: int) -> None:
        """Generate up to `tokens` more tokens of a choice. Raises EngineError."""
        given = request.body
        completion = await self._engine.generate(
            GenerateRequest(
                prompt=(*choice.prompt, *choice.token_ids),
                max_tokens=tokens,
                temperature=served_temperature(given.temperature),
                seed=choice.seed,
                stop_token_ids=request.stop_token_ids,
                group=choice.group,
                top_k=max(0, given.top_k or 0),
                top_p=given.top_p or 1.0,
            )
        )
        before = len(choice.token_ids)
        choice.token_ids += completion.token_ids
        choice.logprobs += completion.logprobs
        for start, version in completion.spans or ((0, completion.policy_first),):
            if not choice.spans or choice.spans[-1][1] != version:
                choice.spans.append((before + start, version))
        if completion.finish == "stop":
            last = choice.token_ids[-1]
            choice.finish = "stop"
            choice.stop_reason = None if last in self._chat.stop_token_ids else last
        elif len(completion.token_ids) < tokens or len(choice.token_ids) >= choice.most:
            choice.finish = "length"
        choice.text = self._decode(request, choice, len(choice.token_ids))
        if find_stop(choice.text, request.stops) is not None:
            self._truncate(request, choice, before)

    def _truncate(self, request: CompletionRequest, choice: Choice, before: int) -> None:
        """End a choice at the first stop string, which a token at index `before` or later completes."""
        for tokens in range(before + 1, len(choice.token_ids) + 1):
            text = self._decode(request, choice, tokens)
            if (match := find_stop(text, request.stops)) is not None:
                place, stop = match
                del choice.token_ids[tokens:], choice.logprobs[tokens:]
                choice.spans = [span for span in choice.spans if span[0] < tokens]
                choice.finish, choice.stop_reason = "stop", stop
                included = request.body.include_stop_str_in_output
                choice.text = text[: place + len(stop)] if included else text[:place]
                return

    def _decode(self, request: CompletionRequest, choice: Choice, tokens: int) -> str:
        """Decode the first `tokens` tokens, without a final stop token."""
        given = request.body
        ended = choice.finish == "stop" and tokens == len(choice.token_ids)
        if ended and not given.include_stop_str_in_output:
            tokens -= 1
        special = given.skip_special_tokens is False
        shown = choice.token_ids[:tokens]
        text = self._chat.shown(shown, special=special)
        if request.path == CHAT:
            return text
        after = choice.prompt[-CONTEXT:]
        before = self._chat.shown(after, special=special)
        both = self._chat.shown([*after, *shown], special=special)
        return both[len(before) :] if before and both.startswith(before) else text

    def _unsent_text(self, request: CompletionRequest, choice: Choice) -> str:
        """Return new text that is final: without an incomplete character or a possible stop string."""
        end = len(choice.text)
        if not choice.finish:
            complete = choice.text.rstrip(UNREADABLE)
            end = len(complete) - may_begin(complete, request.stops)
        first = choice.sent_text
        choice.sent_text, choice.sent_tokens = max(first, end), len(choice.token_ids)
        return choice.text[first : choice.sent_text]

    # -- replies -----------------------------------------------------------------------------------

    def _head(self, request: CompletionRequest, suffix: str) -> dict[str, Any]:
        head: dict[str, Any] = {"created": int(time.time()), "model": self._served.name}
        if request.path == TOKENS:
            return {"request_id": request.id, "output_mode": "tokens", **head}
        kind = KINDS[request.path][0] + (suffix if request.path == CHAT else "")
        return {"id": request.id, "object": kind, **head}

    def _choice(
        self,
        request: CompletionRequest,
        choice: Choice,
        first: int,
        text: str,
        *,
        chunk: bool = False,
    ) -> dict[str, Any]:
        """Format a choice of a reply, or of a chunk with the tokens from `first` on."""
        entry: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish or None}
        if choice.finish:
            entry |= {"stop_reason": choice.stop_reason, "policy_version": _versions([choice])}
        tokens, logprobs = choice.token_ids[first:], choice.logprobs[first:]
        entry["logprobs"] = None
        if request.path == CHAT and chunk:
            entry["delta"] = {"content": text} if text or not choice.finish else {}
        elif request.path == CHAT:
            entry["message"] = {"role": "assistant", "content": text, "refusal": None}
        elif request.path == TEXT:
            entry["text"] = text
        elif choice.finish:
            entry["weight_versions"] = _spans(choice)
        wanted = request.body.logprobs
        if wanted is not None and wanted is not False:
            entry["logprobs"] = self._logprobs(request.path, tokens, logprobs)
        if request.body.return_token_ids or request.path == TOKENS:
            entry["token_ids"] = tokens
        if request.body.return_token_ids and first == 0 and request.path == TEXT:
            entry["prompt_token_ids"] = list(choice.prompt)
        return entry

    def _logprobs(self, path: str, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        as_ids = [f"token_id:{token}" for token in tokens]  # the form that `renderers` expects
        names = as_ids if path == TOKENS else [self._chat.shown([t], special=True) for t in tokens]
        if path == TEXT:
            return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None}
        spelled = [
            name.encode() if path == TOKENS else self._chat.spelled(token)
            for name, token in zip(names, tokens, strict=True)
        ]
        rows = zip(names, logprobs, spelled, strict=True)
        content = [
            {"token": name, "logprob": logprob, "bytes": list(data), "top_logprobs": []}
            for name, logprob, data in rows
        ]
        return {"content": content}

    def _usage(self, request: CompletionRequest) -> dict[str, int]:
        """Count prompt and completion tokens; a prompt counts once, however many choices it has."""
        choices, n = request.choices, request.body.n or 1
        prompt = sum(len(choice.prompt) for choice in choices[::n])
        completion = sum(len(choice.token_ids) for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def convert(body: Body, kind: type[B]) -> B:
    """Convert a body. Raises ApiError for fields that are unknown or out of range."""
    known: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    fields = {n: value for n, value in body.items() if n in known or not _is_neutral(n, value)}
    if isinstance(messages := fields.get("messages"), list):
        # clients send replies back unchanged, with absent fields as null
        fields["messages"] = [
            {k: v for k, v in message.items() if v not in (None, [])}
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        if "unknown field" in message:
            name = message.split("`")[1]
            message = f"{name}: not supported by this engine (engine.type = vllm serves vLLM's own routes)"
            raise ApiError(400, message, param=name, code="unsupported_parameter") from error
        param = message.rpartition("$.")[2].rstrip("`").split(".")[-1] if "$." in message else None
        raise ApiError(400, message, param=param) from error


def served_temperature(temperature: float | None) -> float:
    """Return the temperature at which a served request is drawn, the same with either engine."""
    if temperature is None:
        return 1.0
    return max(temperature, LOWEST_TEMPERATURE) if temperature else 0.0


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether an unknown field can be ignored: it is empty, or allowed by NEUTRAL."""
    if value is None or name not in NEUTRAL:
        return not value
    return not NEUTRAL[name] or value in NEUTRAL[name]


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param)


def _versions(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the first and last policy version of any token of these choices."""
    versions = [version for choice in choices for _, version in choice.spans]
    return {"first": min(versions, default=-1), "last": max(versions, default=-1)}


def _spans(choice: Choice) -> list[dict[str, Any]]:
    """List the token ranges of each policy version: start <= index < end."""
    starts = [start for start, _ in choice.spans] + [len(choice.token_ids)]
    return [
        {"version": str(version), "start": start, "end": end}
        for (start, version), end in zip(choice.spans, starts[1:], strict=True)
    ]


def may_begin(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that begins one of `stops`."""
    lengths = {n for stop in stops for n in range(1, min(len(stop), len(text) + 1))}
    return max((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), default=0)


def find_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Find the first stop string in `text`, the longest if several begin there: (index, stop)."""
    places = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(places, key=lambda place: (place[0], -len(place[1]))) if places else None
