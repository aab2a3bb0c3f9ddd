"""Ask models behind OpenAI-compatible APIs. `openai` is imported here alone, lazily.

- The package tries again what another attempt may mend.
- The key goes nowhere but into its header: not into an error, a log or a result. No other variable of the
  environment, and nothing about this machine, is sent.
- A body is read up to MAX_BODY_BYTES, and an answer is waited for up to a deadline, however slowly it drips.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from ..config.chat_api import ChatApiConfig
from ..ops.errors import UsageError
from .policies import PlayFailed

if TYPE_CHECKING:
    from httpx import Request, Response
    from openai import APIStatusError, AsyncOpenAI

CONNECT_S = 10.0
LONGEST_WAIT_S = 120.0
"""Between two attempts; a server may ask for it by Retry-After."""
MAX_BODY_BYTES = 16 << 20
MAX_SHOWN = 300
FORBIDDEN, NOT_FOUND, BUSY = (401, 403), (404, 405), (408, 409, 429)
SLOW = ("ReadTimeout", "WriteTimeout", "PoolTimeout")
HEADERS = {"accept", "connection", "content-length", "content-type", "host"}
"""Sent as the package sets them; all others are ours."""


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


@dataclass(frozen=True)
class ChatAnswer:
    """The first choice of an answer, and its tokens."""

    text: str
    cut: bool
    """The limit of tokens ended it."""
    prompt_tokens: int
    completion_tokens: int


class ApiUnavailable(Exception):
    """The API gave no answer, however often it was asked; the text says why."""

    def __init__(self, trouble: str, *, busy: bool = False) -> None:
        """`busy`: it asks to be left alone for a while."""
        super().__init__(trouble)
        self.busy = busy


class ChatApi:
    """A client of one API. Made by open_api()."""

    def __init__(self, config: ChatApiConfig, client: "AsyncOpenAI", key: str) -> None:
        self._config = config
        self._client = client
        self._key = key

    async def ask(self, body: Mapping[str, Any]) -> ChatAnswer:
        """Ask for one completion.

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
                answer = await self._client.post(
                    "/chat/completions", cast_to=Response, body={**body, **config.options}
                )
                return _read(answer.content)
        except APIStatusError as error:
            trouble, busy = self._refusal(error), error.status_code in (*BUSY, 503)
        except APIConnectionError as error:
            what = type(error.__cause__ or error).__name__
            trouble = f"it cannot be reached ({what})"
            if what in SLOW:
                trouble = f"no answer within {config.timeout_s:g} s"
        except TimeoutError:
            trouble = f"no answer within {config.timeout_s:g} s"
        except OpenAIError as error:
            raise PlayFailed(f"the API failed: {error}") from None
        # outside of `except`: the package's errors hold headers
        raise ApiUnavailable(f"{trouble}, {attempts} times", busy=busy)

    def _refusal(self, error: "APIStatusError") -> str:
        """Describe trouble that another attempt may mend. Raises UsageError, PlayFailed for other refusals."""
        config, status = self._config, error.status_code
        told = f"{status}: {_shown(error.response.content, self._key)}"
        if status in FORBIDDEN:
            variable = config.key_variable
            how = f"the key in {variable}" if variable else "requests without a key"
            raise UsageError(
                f"the API at {config.url} refuses {how} ({told}): set key_variable to the variable that holds "
                "its key"
            ) from None
        if status in NOT_FOUND or 300 <= status < 400:
            raise UsageError(
                f"the API at {config.url} knows no chat completions of the model {config.model!r} ({told}): "
                "its url usually ends with /v1; check url and model"
            ) from None
        if status in BUSY or status >= 500:
            return f"it answers {told}"
        raise PlayFailed(f"the API refuses the conversation, {told}") from None


def _read(data: bytes) -> ChatAnswer:
    """Read the first choice. Raises PlayFailed."""
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


def _shown(data: bytes, key: str) -> str:
    """Shorten a server's error, without the key that it may repeat."""
    text = data.decode("utf-8", "replace")
    try:
        error = msgspec.json.decode(data)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        pass  # no error of OpenAI's form: what it says is shown as it is
    text = text.replace(key, "(key)") if key else text
    return "".join(one if one.isprintable() else " " for one in text[:MAX_SHOWN]) or "no words"


def read_key(config: ChatApiConfig, environ: Mapping[str, str]) -> str:
    """Read the key of an API; empty where it needs none. Raises UsageError."""
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
    """Open a client of the API with `key`, or without one if it is empty; close it after the block."""
    await asyncio.to_thread(import_module, "openai")  # seconds
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
    """Let the body end with an error at MAX_BODY_BYTES, before it takes more memory."""
    from httpx import AsyncByteStream
    from openai import OpenAIError

    inner = response.stream
    assert isinstance(inner, AsyncByteStream)

    class Bounded(AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            count = 0
            async for piece in inner:
                count += len(piece)
                if count > MAX_BODY_BYTES:  # an error of the package's own is not tried again
                    raise OpenAIError(f"it sends more than {MAX_BODY_BYTES} bytes")
                yield piece

        async def aclose(self) -> None:
            await inner.aclose()

    response.stream = Bounded()
