"""Requests to an engine, and what it says made into answers; knows no HTTP.

Whoever is cancelled here cancels the engine's work for it: nothing is generated for a client that has gone.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..engines.engine import Engine, EngineStats
from ..errors import EngineError, EngineLost, first_cause
from ..serve_config import ApiConfig
from .asked import Asked, Served, seed_of
from .choice import Choice, Wanted
from .errors import ApiError
from .faces import Face, policy
from .meters import Meters
from .text import Text

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
LOST_RETRY_S = 10
"""An engine that died takes some seconds to start again."""

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends one event of a stream; waits while the client reads slower than we write."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, or a stream that is told event by event once its head is on the wire."""

    body: dict[str, Any] | None
    stream: Callable[[Send], Awaitable[None]] | None
    policy: str
    """The policy versions of the answer (of a stream: of its beginning), `3` or `3-4`."""
    request_id: str


class Service:
    """One engine behind all routes."""

    def __init__(self, engine: Engine, text: Text, served: Served) -> None:
        self._engine = engine
        self._text = text
        self.served = served
        self.meters = Meters(served.name)
        self._inflight = 0

    @property
    def policy_version(self) -> int:
        """The version that the engine holds; -1 before the first."""
        return self._engine.policy_version

    @property
    def inflight(self) -> int:
        """Completions being made."""
        return self._inflight

    def stats(self) -> EngineStats:
        """The engine's; one that was given up says why in `fault`."""
        try:
            return self._engine.stats()
        except EngineError as error:
            return EngineStats(fault=str(error))

    async def answer(self, face: Face, body: Mapping[str, Any]) -> Answer:
        """Read a request and, unless it is to be streamed, do it. Raises ApiError."""
        asked = await face.read(body, self.served, self._text)
        choices = self._choices(face, asked)
        self._check_ready()
        if asked.stream:

            async def stream(send: Send) -> None:
                with self._admitted(len(choices)):
                    await self._stream(face, asked, choices, send)

            self._check_room(len(choices))
            return Answer(None, stream, str(self.policy_version), asked.request_id)
        with self._admitted(len(choices)):
            await self._all([self._grow(choice) for choice in choices])
        self._count(asked, choices)
        whole = face.whole(asked, choices, self.served, self._text)
        return Answer(whole, None, _versions(choices), asked.request_id)

    def _choices(self, face: Face, asked: Asked) -> list[Choice]:
        made: list[Choice] = []
        sampling = asked.sampling
        for prompt in asked.prompts:
            room = self.served.max_model_len - len(prompt)
            group = secrets.token_bytes(8) if sampling.n > 1 else b""
            for number in range(sampling.n):
                wanted = Wanted(
                    index=len(made),
                    prompt=prompt,
                    most=min(room, sampling.max_tokens or room),
                    seed=seed_of(sampling.seed, number),
                    sampling=sampling,
                    group=group,
                    chat=face.chat,
                )
                made.append(Choice(wanted))
        return made

    def _check_ready(self) -> None:
        if self._engine.policy_version < 0:
            raise ApiError(
                503,
                "the policy is still being loaded: come back",
                kind="server_error",
                retry_after_s=RETRY_AFTER_S,
            )

    def _check_room(self, count: int) -> None:
        most = self.served.api.max_inflight
        if count > most:
            raise ApiError(
                400, f"this server makes at most {most} completions at once: ask for less"
            )
        if self._inflight + count > most:
            raise ApiError(
                429,
                f"{self._inflight} completions are being made, at most {most} at once: come back",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=RETRY_AFTER_S,
            )

    @contextmanager
    def _admitted(self, count: int) -> Generator[None]:
        """Room for so many completions. Raises ApiError (429)."""
        self._check_room(count)
        self._inflight += count
        try:
            yield
        finally:
            self._inflight -= count

    # -- generating --------------------------------------------------------------------------------

    async def _grow(
        self, choice: Choice, told: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Make one choice; `told` is called after each piece of a stream."""
        longest = self.served.api.stream_tokens if told else 0
        began = time.monotonic()
        for tokens in choice.pieces(longest):
            await choice.grow(self._engine, self._text, tokens, self.served.stop_token_ids)
            if told is not None:
                await told()
        self.meters.made(choice.finish, time.monotonic() - began)

    async def _stream(
        self, face: Face, asked: Asked, choices: Sequence[Choice], send: Send
    ) -> None:
        for choice in choices:
            if (opening := face.opening(asked, choice, self.served)) is not None:
                await send(opening)

        async def grow(choice: Choice) -> None:
            async def tell() -> None:
                news = choice.news()
                if news.text or news.token_ids or choice.finish:
                    await send(face.chunk(asked, choice, news, self.served, self._text))

            await self._grow(choice, tell)

        await self._all([grow(choice) for choice in choices])
        self._count(asked, choices)
        if asked.usage_in_stream:
            await send(face.closing(asked, choices, self.served))

    async def _all(self, work: Sequence[Any]) -> None:
        """Do all of it at once; when one falls the others are cancelled. Raises ApiError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in work:
                    tasks.create_task(one)
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            if isinstance(cause, EngineError):
                raise engine_failed(cause) from group
            raise cause from group

    def _count(self, asked: Asked, choices: Sequence[Choice]) -> None:
        self.meters.tokens(
            sum(map(len, asked.prompts)), sum(len(choice.token_ids) for choice in choices)
        )


def engine_failed(error: EngineError) -> ApiError:
    """What a client is told when the engine could not."""
    if isinstance(error, EngineLost):
        return ApiError(503, str(error), kind="server_error", retry_after_s=LOST_RETRY_S)
    logger.error("the engine could not generate: %s", error)
    return ApiError(500, str(error), kind="server_error", code="engine_error")


def make_served(
    name: str, *, vocab_size: int, max_model_len: int, text: Text, api: ApiConfig
) -> Served:
    """The model as requests see it."""
    return Served(name, vocab_size, max_model_len, text.stop_token_ids, api)


def _versions(choices: Sequence[Choice]) -> str:
    first, last = policy(choices).values()
    return str(first) if first == last else f"{first}-{last}"
