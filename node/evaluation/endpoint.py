"""Models behind an OpenAI-compatible API. `openai` is imported here alone, lazily.

- The package tries again what another attempt may mend. What none can mend (a wrong key, a wrong URL) ends the
  evaluation at once; what concerns one conversation alone fails that rollout.
- The key goes nowhere but into its header: not into an error, a log or a result. No other variable of the
  environment, and nothing about this machine, is sent.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ..config.evaluation import EndpointConfig, EvalSamplingConfig
from ..environments.chat import CUT, Transcript
from ..environments.policies import PlayFailed
from ..inference.engine import Completion
from ..ops.errors import NetworkError, UsageError
from .evaluator import SampledTurn, TurnRequest

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
SEED_BITS = 31
"""Of seeds that are sent: some servers keep them in 32 bits."""
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


class EndpointPolicy:
    """A PolicyClient that asks an API. Made by open_endpoint()."""

    def __init__(
        self,
        config: EndpointConfig,
        sampling: EvalSamplingConfig,
        max_tokens: int,
        client: "AsyncOpenAI",
        key: str,
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._client = client
        self._key = key
        self._transcript = Transcript()
        self._answered = float("-inf")
        """Time of the last reply."""

    async def reply(self, asked: TurnRequest) -> SampledTurn:
        """Ask for a reply. Raises PlayFailed; UsageError, or NetworkError when the API answers no request."""
        from openai import APIConnectionError, APIStatusError, OpenAIError

        config, began = self._config, time.monotonic()
        attempts = config.retries + 1
        try:
            async with asyncio.timeout(attempts * (config.timeout_s + LONGEST_WAIT_S)):
                turn = _turn(await self._ask(asked))
        except APIStatusError as error:
            trouble = self._refusal(error)
        except APIConnectionError as error:
            what = type(error.__cause__ or error).__name__
            trouble = f"it cannot be reached ({what})"
            if what in SLOW:
                trouble = f"no answer within {config.timeout_s:g} s"
        except TimeoutError:
            trouble = f"no answer within {config.timeout_s:g} s"
        except OpenAIError as error:
            raise PlayFailed(f"the API failed: {error}") from None
        else:
            self._answered = time.monotonic()
            return turn
        # outside of `except`: the package's errors hold headers
        trouble = f"{trouble}, {attempts} times"
        if self._answered > began:  # it works for others: not the API, but this conversation
            raise PlayFailed(f"the API failed: {trouble}")
        raise NetworkError(
            f"the API at {config.url} does not work: {trouble}; is it up? Run the same command again to go "
            "on, or raise endpoints.retries"
        )

    def text(self, ids: Sequence[int]) -> str:
        """Decode a reply."""
        return self._transcript.text(ids)

    async def _ask(self, asked: TurnRequest) -> bytes:
        """Post the conversation and return the body of the answer. Raises OpenAIError."""
        from httpx import Response

        config, sampling = self._config, self._sampling
        said = self._transcript.messages(asked.prompt)
        # calls are text here, and APIs refuse the result of a call that they have not parsed
        messages = [it | {"role": "user"} if it["role"] == "tool" else it for it in said]
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "temperature": sampling.temperature,
            config.max_tokens_field: self._max_tokens,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if config.send_seed:
            body["seed"] = asked.seed % (1 << SEED_BITS)
        body |= config.options
        answer = await self._client.post("/chat/completions", cast_to=Response, body=body)
        return answer.content

    def _refusal(self, error: "APIStatusError") -> str:
        """Describe trouble that another attempt may mend. Raises UsageError, PlayFailed for other refusals."""
        config, status = self._config, error.status_code
        told = f"{status}: {_shown(error.response.content, self._key)}"
        if status in FORBIDDEN:
            variable = config.key_variable
            how = f"the key in {variable}" if variable else "requests without a key"
            raise UsageError(
                f"the API at {config.url} refuses {how} ({told}): set endpoints.key_variable to the variable "
                "that holds its key"
            ) from None
        if status in NOT_FOUND or 300 <= status < 400:
            raise UsageError(
                f"the API at {config.url} knows no chat completions of the model {config.model!r} ({told}): "
                "endpoints.url usually ends with /v1; check it and endpoints.model"
            ) from None
        if status in BUSY or status >= 500:
            return f"it answers {told}"
        raise PlayFailed(f"the API refuses the conversation, {told}") from None


def _turn(data: bytes) -> SampledTurn:
    """Read the first choice as a completion. Raises PlayFailed."""
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
    ids = Transcript().reply(text)
    cut = choice.finish_reason == "length"
    if cut:
        ids[-1] = CUT
    completion = Completion(ids, [0.0] * len(ids), "length" if cut else "stop", 0, 0)
    return SampledTurn(completion, usage.prompt_tokens, usage.completion_tokens)


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


@asynccontextmanager
async def open_endpoint(
    config: EndpointConfig, sampling: EvalSamplingConfig, max_tokens: int, key: str
) -> AsyncGenerator[EndpointPolicy]:
    """Open a client of the API with `key`, or without one if it is empty; close it after the block."""
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
        yield EndpointPolicy(config, sampling, max_tokens, client, key)


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
