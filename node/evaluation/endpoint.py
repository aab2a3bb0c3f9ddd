"""A model behind an OpenAI-compatible API as the policy of an evaluation.

What no attempt can mend (a wrong key, a wrong URL) ends the evaluation at once; what concerns one conversation
alone fails that rollout.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..config.evaluation import EndpointConfig, EvalSamplingConfig
from ..environments.chat import CUT, Transcript
from ..environments.chat_api import ApiUnavailable, ChatAnswer, ChatApi, open_api
from ..environments.policies import PlayFailed
from ..inference.engine import Completion
from ..ops.errors import NetworkError
from .evaluator import SampledTurn, TurnRequest

SEED_BITS = 31
"""Of seeds that are sent: some servers keep them in 32 bits."""


class EndpointPolicy:
    """A PolicyClient that asks an API. Made by open_endpoint()."""

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

    async def reply(self, asked: TurnRequest) -> SampledTurn:
        """Ask for a reply. Raises PlayFailed; UsageError, or NetworkError when the API answers no request."""
        began = time.monotonic()
        try:
            answer = await self._api.ask(self._body(asked))
        except ApiUnavailable as error:
            if self._answered > began:  # it works for others: not the API, but this conversation
                raise PlayFailed(f"the API failed: {error}") from None
            trouble = str(error)
        else:
            self._answered = time.monotonic()
            return _turn(answer)
        raise NetworkError(
            f"the API at {self._config.url} does not work: {trouble}; is it up? Run the same command again to "
            "go on, or raise endpoints.retries"
        )

    def text(self, ids: Sequence[int]) -> str:
        """Decode a reply."""
        return self._transcript.text(ids)

    def _body(self, asked: TurnRequest) -> dict[str, Any]:
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
    """Open a client of the API with `key`, or without one if it is empty; close it after the block."""
    async with open_api(config, key) as api:
        yield EndpointPolicy(config, sampling, max_tokens, api)
