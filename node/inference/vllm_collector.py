"""The node's side of vllm_recorder.py: what was drawn, asked for in batches, and made into completions.

One question is under way at a time and names everything that is wanted by then, so that the engine's
loop is bothered once a step at most. What came is confirmed with the next question, and only then
freed by the worker: a caller that goes away in the middle loses nothing of the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops.errors import EngineError
from .fingerprint import ProofFailed

GATHER_S = 0.002
"""How long a question waits for company."""
AGAIN_S = 0.005
"""Before what had not come is asked for again."""
PATIENCE_S = 60.0
MOST_FORGOTTEN = 64
"""Requests that were given up, before the worker is told."""

Ask = Callable[[list[list[int]], list[int]], Awaitable[list[list[Any]]]]
"""Recorder.collect in the worker."""


@dataclass(frozen=True)
class CollectedTokens:
    """What was drawn for one request."""

    logprobs: list[float]
    spans: tuple[tuple[int, int], ...]
    """(index of a token, version that drew from it on); the first is (0, ...)."""
    proof: bytes
    boundaries: tuple[bytes, ...] = ()
    """Of a pipeline: the fingerprints at each boundary between stages."""


class CompletionCollector:
    """Asks for what many concurrent callers want."""

    def __init__(self, ask: Ask, fingerprint: str) -> None:
        self._ask = ask
        self._fingerprint = fingerprint
        self._wanted: dict[int, int] = {}
        self._came: dict[int, list[Any]] = {}
        self._forgotten: list[int] = []
        self._asking = asyncio.Lock()

    async def collect(self, key: int, tokens: int) -> CollectedTokens:
        """What was drawn for the request `key`, which ended after `tokens` tokens. Raises EngineError."""
        self._wanted[key] = tokens
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._come(key)
        except TimeoutError as error:
            raise EngineError("vLLM's worker keeps its logprobs: restart the engine") from error
        finally:
            self._wanted.pop(key, None)
            came = self._came.pop(key, None)
            self._forgotten.append(key)
        assert came is not None  # else _come() had not returned
        return self._made(came, tokens)

    def forget(self, key: int) -> None:
        """The request `key` was given up; the worker is told with the next question, or by tidy()."""
        self._forgotten.append(key)

    async def tidy(self) -> None:
        """Tell the worker what was given up, if that is much."""
        if len(self._forgotten) >= MOST_FORGOTTEN and not self._asking.locked():
            async with self._asking:
                await self._question({})

    async def _come(self, key: int) -> None:
        pause = GATHER_S
        while key not in self._came:
            async with self._asking:
                if key in self._came:
                    return
                await asyncio.sleep(pause)
                await self._question(self._wanted)
            pause = AGAIN_S

    async def _question(self, wanted: Mapping[int, int]) -> None:
        """Ask once. If it is interrupted nothing is lost: the worker is told once more."""
        forgotten = list(self._forgotten)
        missing = [[key, count] for key, count in wanted.items() if key not in self._came]
        answer = await self._ask(missing, forgotten)
        del self._forgotten[: len(forgotten)]
        self._came |= {one[0]: one for one in answer if one[0] in self._wanted}

    def _made(self, came: list[Any], tokens: int) -> CollectedTokens:
        _, rows, spans, *crossed = came
        numbers = np.frombuffer(rows, np.float32).reshape(tokens, -1)
        logprobs = numbers[:, 0]
        if not np.isfinite(logprobs).all():
            raise EngineError("vLLM gave no finite logprob for a token: are the weights finite?")
        try:
            proof = projection_proof(numbers[:, 1:]) if self._fingerprint else b""
        except ProofFailed as error:
            raise EngineError(f"no proof can be made of what vLLM drew ({error})") from error
        versions = tuple((row, version) for row, version in spans)
        return CollectedTokens(logprobs.tolist(), versions, proof, tuple(*crossed))


def projection_proof(projected: NDArray[np.float32]) -> bytes:
    """The proof of projected hidden states [tokens, 7]. Raises ProofFailed."""
    from .fingerprint import pack

    return pack(projected)
