"""An engine with weights, as somebody who plays: pinned to what was loaded into it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..engines.engine import Completion, Engine, GenerateRequest
from ..environments.replay import PlayFailed
from ..errors import EngineError, EngineLost
from .rollouts import Asked, Said

LOST_WAITS_S = (1.0, 3.0, 9.0, *[20.0] * 27)
"""Before a turn is asked for again of an engine that is being started again: ten minutes in all."""


class EnginePlayer:
    """A Player for the weights that `engine` holds as `version`, and for no others."""

    def __init__(
        self,
        engine: Engine,
        version: int,
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: tuple[int, ...],
        top_p: float = 1.0,
        top_k: int = 0,
        max_model_len: int = 0,
        decode: Callable[[Sequence[int]], str] = lambda _: "",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """A conversation of `max_model_len` tokens fails; 0 leaves that to the engine."""
        self._engine = engine
        self._version = version
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._stops = stop_token_ids
        self._top_p = top_p
        self._top_k = top_k
        self._max_model_len = max_model_len
        self._decode = decode
        self._sleep = sleep

    async def reply(self, asked: Asked) -> Said:
        """See Player. Raises EngineError."""
        if 0 < self._max_model_len <= len(asked.prompt):
            raise PlayFailed(
                f"the conversation has {len(asked.prompt)} tokens: raise engine.max_model_len "
                f"({self._max_model_len})"
            )
        completion = await self._generate(
            GenerateRequest(
                asked.prompt,
                self._max_tokens,
                self._temperature,
                asked.seed,
                self._stops,
                group=asked.group,
                top_k=self._top_k,
                top_p=self._top_p,
            )
        )
        if not completion.policy_first == completion.policy_last == self._version:
            raise EngineError(
                f"the engine changed its weights while load {self._version} was evaluated: evaluate again"
            )
        return Said(completion, len(asked.prompt), len(completion.token_ids))

    def text(self, ids: Sequence[int]) -> str:
        """See Player."""
        return self._decode(ids)

    async def _generate(self, request: GenerateRequest) -> Completion:
        for wait_s in LOST_WAITS_S:
            try:
                return await self._engine.generate(request)
            except EngineLost:
                await self._sleep(wait_s)
        return await self._engine.generate(request)
