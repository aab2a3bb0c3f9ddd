"""Evaluate a model behind an OpenAI-compatible API.

Errors that no retry can fix (a wrong key, a wrong URL) end the evaluation at once; an error that concerns one
conversation fails that rollout.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from ..config.evaluation import EndpointConfig, EvalSamplingConfig
from ..environments.chat import CUT, Transcript
from ..environments.chat_api import ApiUnavailable, ChatAnswer, ChatApi, open_api
from ..environments.policies import PlayFailed
from ..errors import NetworkError
from ..inference.engine import Completion
from .evaluator import SampledTurn, TurnRequest

SEED_BITS = 31
"""Size of the seeds sent: some servers store them in 32 bits."""


class EndpointPolicy:
    """A PolicyClient that calls an API. Made by open_endpoint()."""

    def __init__(
        self, config: EndpointConfig, sampling: EvalSamplingConfig, max_tokens: int, api: ChatApi
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._api = api
        self._transcript = Transcript()
        self._answered = float("-inf")
        """Time of the last reply."""

    async def reply(self, request: TurnRequest) -> SampledTurn:
        """Request a reply. Raises PlayFailed, UsageError.

        NetworkError if the API answers no request.
        """
        began = time.monotonic()
        try:
            answer = await self._api.ask(self._body(request))
        except ApiUnavailable as error:
            if self._answered > began:  # other requests succeed: only this conversation fails
                raise PlayFailed(f"the API failed: {error}") from None
            reason = str(error)
        else:
            self._answered = time.monotonic()
            turn = _turn(answer)
            if request.stops is None:
                return turn
            # not asked of the API, which would leave the string out of the reply
            return replace(turn, completion=request.stops.cut(turn.completion))
        # outside of `except`, so that no error is chained: those of the package hold the key
        raise NetworkError(
            f"the API at {self._config.url} does not work: {reason}; check that it is up, then run the same "
            "command again to continue, or raise endpoints.retries"
        )

    def text(self, ids: Sequence[int]) -> str:
        """Decode a reply."""
        return self._transcript.text(ids)

    def _body(self, request: TurnRequest) -> dict[str, Any]:
        config, sampling = self._config, self._sampling
        history = self._transcript.messages(request.prompt)
        # tool calls are plain text here, and APIs refuse a tool message without a parsed call
        messages = [
            message | {"role": "user"} if message["role"] == "tool" else message
            for message in history
        ]
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
            body["seed"] = request.seed % (1 << SEED_BITS)
        return body


def _turn(answer: ChatAnswer) -> SampledTurn:
    ids = Transcript().reply(answer.text)
    if answer.cut:
        ids[-1] = CUT
    finish = "length" if answer.cut else "stop"
    completion = Completion(ids, [0.0] * len(ids), finish, 0, 0)
    return SampledTurn(completion, answer.prompt_tokens, answer.completion_tokens)


@asynccontextmanager
async def open_endpoint(
    config: EndpointConfig, sampling: EvalSamplingConfig, max_tokens: int, key: str
) -> AsyncGenerator[EndpointPolicy]:
    """Open a client of the API for the block, with `key` if it is not empty."""
    async with open_api(config, key) as api:
        yield EndpointPolicy(config, sampling, max_tokens, api)
