"""Models behind an OpenAI-compatible API: the only client of /chat/completions, by aiohttp.

What another attempt may mend is tried again, later and later; what none can mend (a wrong key, a wrong URL)
ends the evaluation at once; what concerns one conversation alone fails that rollout. The key goes nowhere but
into its header: not into an error, a log or a result.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ..engines.engine import Completion
from ..environments.replay import PlayFailed
from ..environments.transcript import CUT, Transcript
from ..errors import NetworkError, UsageError
from ..eval_config import EndpointConfig, EvalSamplingConfig
from .rollouts import Asked, Said

if TYPE_CHECKING:
    from aiohttp import ClientSession

CONNECT_S = 10.0
LONGEST_WAIT_S = 60.0
MAX_BODY = 16 << 20
MAX_SHOWN = 300
OK, FORBIDDEN, NOT_FOUND, BUSY = 200, (401, 403), (404, 405), (408, 409, 425, 429)
SEED_BITS = 31
"""Of seeds that are sent: some servers keep them in 32 bits."""


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


class _Trouble(Exception):
    """Something that another attempt may mend; `wait_s` is what the server asked for."""

    def __init__(self, what: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.what = what
        self.wait_s = wait_s


class ApiPlayer:
    """A Player that asks an API. Made by open_endpoint()."""

    def __init__(
        self,
        config: EndpointConfig,
        sampling: EvalSamplingConfig,
        max_tokens: int,
        session: "ClientSession",
        *,
        key: str = "",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._session = session
        self._key = key
        self._sleep = sleep
        self._now = now
        self._transcript = Transcript()
        self._answered = float("-inf")
        """When it last answered anything that was of use."""

    async def reply(self, asked: Asked) -> Said:
        """See Player. Raises UsageError, or NetworkError when the API answers nobody any more."""
        body, began = self._body(asked), self._now()
        trouble = _Trouble("it was not asked")
        for attempt in range(self._config.retries + 1):
            if attempt:
                await self._sleep(max(trouble.wait_s, min(2.0 ** (attempt - 1), LONGEST_WAIT_S)))
            try:
                said = await self._ask(body)
            except _Trouble as found:
                trouble = found
                continue
            self._answered = self._now()
            return said
        what = f"{trouble.what}, {self._config.retries + 1} times"
        if self._answered > began:  # it works for others: not the API, but this conversation
            raise PlayFailed(f"the API failed: {what}")
        raise NetworkError(
            f"the API at {self._config.url} does not work: {what}; is it up? Run the same command again to "
            "go on, or raise endpoints.retries"
        )

    def text(self, ids: Any) -> str:
        """See Player."""
        return self._transcript.text(ids)

    def _body(self, asked: Asked) -> dict[str, Any]:
        config, sampling = self._config, self._sampling
        body: dict[str, Any] = {
            "model": config.model,
            "messages": self._transcript.messages(asked.prompt),
            "temperature": sampling.temperature,
            config.max_tokens_field: self._max_tokens,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if config.send_seed:
            body["seed"] = asked.seed % (1 << SEED_BITS)
        return {**body, **config.options}

    async def _ask(self, body: Mapping[str, Any]) -> Said:
        """One attempt. Raises _Trouble, PlayFailed, UsageError."""
        from aiohttp import ClientError

        where = f"{self._config.url}/chat/completions"
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._session.post(where, json=body, allow_redirects=False) as response,
            ):
                data = await _read(response.content)
                self._check(response.status, data, response.headers.get("Retry-After", ""))
        except TimeoutError:
            raise _Trouble(f"no answer within {self._config.timeout_s:g} s") from None
        except (ClientError, OSError) as error:
            # `from None`: the library's errors may hold headers
            raise _Trouble(f"it cannot be reached ({type(error).__name__})") from None
        return _said(data)

    def _check(self, status: int, data: bytes, wait: str) -> None:
        config = self._config
        if status == OK:
            return
        told = f"{status}: {_shown(data, self._key)}"
        if status in FORBIDDEN:
            how = (
                f"the key in {config.key_variable}"
                if config.key_variable
                else "requests without a key"
            )
            raise UsageError(
                f"the API at {config.url} refuses {how} ({told}): set endpoints.key_variable to the variable "
                "that holds its key"
            )
        if status in NOT_FOUND or 300 <= status < 400:
            raise UsageError(
                f"the API at {config.url} knows no chat completions of the model {config.model!r} ({told}): "
                "endpoints.url usually ends with /v1; check it and endpoints.model"
            )
        if status in BUSY or status >= 500:
            raise _Trouble(f"it answers {told}", _seconds(wait))
        raise PlayFailed(f"the API refuses the conversation, {told}")


async def _read(content: Any) -> bytes:
    held = bytearray()
    async for piece in content.iter_any():
        held += piece
        if len(held) > MAX_BODY:
            raise PlayFailed(f"the API sends more than {MAX_BODY} bytes")
    return bytes(held)


def _said(data: bytes) -> Said:
    """The first choice as a completion. Raises PlayFailed."""
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
    return Said(completion, usage.prompt_tokens, usage.completion_tokens)


def _seconds(text: str) -> float:
    """Of a Retry-After header; 0 where it is a date, or none."""
    return min(float(text), LONGEST_WAIT_S) if text.isascii() and text.isdigit() else 0.0


def _shown(data: bytes, key: str) -> str:
    """What a server says of an error, short and without the key that it may repeat."""
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
) -> AsyncGenerator[ApiPlayer]:
    """Somebody who asks the API with `key`, or without one if it is empty, while the block lasts."""
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

    headers = {"User-Agent": "primerl-node"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    async with ClientSession(
        connector=TCPConnector(limit=config.concurrency),
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers=headers,
        cookie_jar=DummyCookieJar(),
        trust_env=config.proxy,
    ) as session:
        yield ApiPlayer(config, sampling, max_tokens, session, key=key)
