"""Query models behind OpenAI-compatible APIs. Only this file imports `openai`, lazily.

- The package retries requests after transient errors.
- The key is only sent in its header; it is in no error, log or result. No other environment variable and no
  data about this machine are sent.
- A response body is limited to MAX_BODY_BYTES, and a request to a deadline, even if the server sends slowly.
"""

import asyncio
import math
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..config.chat_api import ChatApiConfig
from ..errors import UsageError
from .policies import PlayFailed

if TYPE_CHECKING:
    from httpx import Request, Response
    from openai import APIStatusError, AsyncOpenAI

CONNECT_S = 10.0
LONGEST_WAIT_S = 120.0
"""Longest wait between two attempts; a server may request one by Retry-After."""
MAX_BODY_BYTES = 16 << 20
MAX_SHOWN = 300
TINY = 1e-3
"""A logprob is below this: rounding may lift one above 0."""
FORBIDDEN, NOT_FOUND, BUSY = (401, 403), (404, 405), (408, 409, 429)
SLOW = ("ReadTimeout", "WriteTimeout", "PoolTimeout")
HEADERS = {"accept", "connection", "content-length", "content-type", "host"}
"""Headers that are sent as the package sets them; all others are removed or set here."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _ScoredToken(msgspec.Struct):
    logprob: float
    decoded_token: str | None = None


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _ScoredToken] | None] | None = None


class _Scored(msgspec.Struct):
    choices: list[_ScoredChoice]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class TokenScore(NamedTuple):
    """A token's logprob given those before it, and its text as the server decodes it."""

    logprob: float
    text: str


@dataclass(frozen=True)
class ChatAnswer:
    """First choice of an answer, with its token counts."""

    text: str
    cut: bool
    """Whether the token limit ended the text."""
    prompt_tokens: int
    completion_tokens: int


class ApiUnavailable(Exception):
    """The API answered none of the attempts; the text has the reason."""

    def __init__(self, trouble: str, *, busy: bool = False) -> None:
        """Take the reason; `busy`: the API is overloaded or limits the rate."""
        super().__init__(trouble)
        self.busy = busy


class ChatApi:
    """Client of one API, made by open_api()."""

    def __init__(self, config: ChatApiConfig, client: "AsyncOpenAI", key: str) -> None:
        self._config = config
        self._client = client
        self._key = key

    async def ask(self, body: Mapping[str, Any]) -> ChatAnswer:
        """Ask for one completion of a chat. Raises like _request()."""
        return _read(await self._request("/chat/completions", body))

    async def score(self, token_ids: Sequence[int]) -> list[TokenScore]:
        """Return the scores of all T tokens but the first, T - 1. Raises like _request().

        The logprobs are at temperature 1. They are vLLM's `prompt_logprobs`, which other servers do not have.
        """
        body = {
            "model": self._config.model,
            "prompt": list(token_ids),
            "prompt_logprobs": 0,
            "max_tokens": 1,
        }
        return _scores(await self._request("/completions", body), token_ids)

    async def models(self) -> list[str]:
        """List the ids of the models that the API serves. Raises like _request()."""
        data = await self._request("/models", None)
        try:
            return [served.id for served in msgspec.json.decode(data, type=_Models).data]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PlayFailed(
                f"the API lists its models in another form than OpenAI's: {error}"
            ) from error

    async def _request(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        """Send a request with its retries, a GET where it has no body, and return the body of the answer.

        Raises:
            PlayFailed: this conversation is refused, or answered in another form than OpenAI's.
            ApiUnavailable: no attempt was answered.
            UsageError: none ever will be: a wrong key, a wrong URL, an unknown model.
        """
        from httpx import Response
        from openai import APIConnectionError, APIStatusError, OpenAIError

        config, busy = self._config, False
        attempts = config.retries + 1
        try:
            async with asyncio.timeout(attempts * (config.timeout_s + LONGEST_WAIT_S)):
                if body is None:
                    answer = await self._client.get(path, cast_to=Response)
                else:
                    answer = await self._client.post(
                        path, cast_to=Response, body={**body, **config.options}
                    )
                return answer.content
        except APIStatusError as error:
            what = path.strip("/").replace("/", " ")
            trouble, busy = self._refusal(error, what), error.status_code in (*BUSY, 503)
        except APIConnectionError as error:
            what = type(error.__cause__ or error).__name__
            trouble = f"it cannot be reached ({what})"
            if what in SLOW:
                trouble = f"no answer within {config.timeout_s:g} s"
        except TimeoutError:
            trouble = f"no answer within {config.timeout_s:g} s"
        except OpenAIError as error:
            raise PlayFailed(f"the API failed: {error}") from None
        # outside of `except`, as the package's errors, which hold headers, must not be chained
        raise ApiUnavailable(f"{trouble}, {attempts} times", busy=busy)

    def _refusal(self, error: "APIStatusError", what: str) -> str:
        """Describe a transient error. Raises UsageError or PlayFailed for a permanent one."""
        config, status = self._config, error.status_code
        reason = f"{status}: {_shown(error.response.content, self._key)}"
        if status in FORBIDDEN:
            variable = config.key_variable
            how = f"the key in {variable}" if variable else "requests without a key"
            raise UsageError(
                f"the API at {config.url} refuses {how} ({reason}): set key_variable to the variable that "
                "holds its key"
            ) from None
        if status in NOT_FOUND or 300 <= status < 400:
            raise UsageError(
                f"the API at {config.url} knows no {what} of the model {config.model!r} ({reason}): "
                "its url usually ends with /v1; check url and model"
            ) from None
        if status in BUSY or status >= 500:
            return f"it answers {reason}"
        raise PlayFailed(f"the API refuses the conversation, {reason}") from None


def _read(data: bytes) -> ChatAnswer:
    """Decode the first choice of an answer. Raises PlayFailed."""
    try:
        answer = msgspec.json.decode(data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlayFailed(f"the API answers in another form than OpenAI's: {error}") from error
    if not answer.choices:
        raise PlayFailed("the API answers without a choice")
    choice, usage = answer.choices[0], answer.usage or _Usage()
    if choice.finish_reason not in ("stop", "length", None):
        raise PlayFailed(f"the API ended the reply with {choice.finish_reason!r:.80}")
    text = (choice.message.content or "").encode("utf-8", "replace").decode()
    cut = choice.finish_reason == "length"
    return ChatAnswer(text, cut, usage.prompt_tokens, usage.completion_tokens)


def _scores(data: bytes, token_ids: Sequence[int]) -> list[TokenScore]:
    """Decode the scores of a prompt. Raises PlayFailed."""
    try:
        answer = msgspec.json.decode(data, type=_Scored)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlayFailed(f"the API answers in another form than vLLM's: {error}") from error
    prompt_scores = answer.choices[0].prompt_logprobs if answer.choices else None
    if prompt_scores is None:
        raise PlayFailed("the API gives no prompt_logprobs: serve the model by vLLM")
    if len(prompt_scores) != len(token_ids):
        raise PlayFailed(f"the API scores {len(prompt_scores)} tokens of {len(token_ids)}")
    scores: list[TokenScore] = []
    for token, entry in zip(token_ids[1:], prompt_scores[1:], strict=True):
        score = (entry or {}).get(str(token))
        if score is None or not -math.inf < score.logprob < TINY:
            raise PlayFailed(f"the API gives no valid logprob of token {token}")
        scores.append(TokenScore(min(score.logprob, 0.0), score.decoded_token or ""))
    return scores


def _shown(data: bytes, key: str) -> str:
    """Return a server's error as short printable text, with the key masked."""
    text = data.decode("utf-8", "replace")
    try:
        error = msgspec.json.decode(data)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        pass  # not an error of OpenAI's form: its text is shown as it is
    text = text.replace(key, "(key)") if key else text
    return (
        "".join(character if character.isprintable() else " " for character in text[:MAX_SHOWN])
        or "no words"
    )


def read_key(config: ChatApiConfig, environ: Mapping[str, str]) -> str:
    """Read the key of an API; return an empty string if it needs none. Raises UsageError."""
    name = config.key_variable
    key = environ.get(name, "").strip() if name else ""
    if name and not (key and key.isascii() and key.isprintable()):
        raise UsageError(
            f"the key for {config.url} is to be in the environment variable {name}, which holds none: "
            f"export {name}=..."
        )
    return key


@asynccontextmanager
async def open_api(config: ChatApiConfig, key: str) -> AsyncGenerator[ChatApi]:
    """Open a client of the API with `key`, if not empty; close it after the block."""
    await asyncio.to_thread(import_module, "openai")  # takes seconds
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

    async def only_ours(request: "Request") -> None:
        for name in set(request.headers) - HEADERS:
            del request.headers[name]
        request.headers.update({"accept-encoding": "identity", "user-agent": "primerl-node"})
        if key:
            request.headers["authorization"] = f"Bearer {key}"

    http = DefaultAsyncHttpxClient(
        verify=ssl.create_default_context(),  # the system's certificates
        trust_env=config.proxy,
        follow_redirects=False,
        event_hooks={"request": [only_ours], "response": [_bound]},
    )
    async with AsyncOpenAI(
        base_url=config.url,
        api_key="set by only_ours",
        timeout=Timeout(config.timeout_s, connect=CONNECT_S),
        max_retries=config.retries,
        http_client=http,
    ) as client:
        yield ChatApi(config, client, key)


async def _bound(response: "Response") -> None:
    """Raise an error while reading a body of more than MAX_BODY_BYTES."""
    from httpx import AsyncByteStream
    from openai import OpenAIError

    inner = response.stream
    assert isinstance(inner, AsyncByteStream)

    class Bounded(AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            count = 0
            async for piece in inner:
                count += len(piece)
                if count > MAX_BODY_BYTES:  # the package does not retry its own errors
                    raise OpenAIError(f"it sends more than {MAX_BODY_BYTES} bytes")
                yield piece

        async def aclose(self) -> None:
            await inner.aclose()

    response.stream = Bounded()
