"""A fake engine: tokens are a pure function of prompt, seed and version. No model, no torch.

It meets the interface, except that no distribution is behind its log-probabilities, and
a network behind its hidden states.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from primerl.node.errors import EngineError
from primerl.node.inference import engine
from primerl.node.inference.fingerprint import Hidden, Projection, find_fingerprint
from primerl.node.weights.state import Changed, State, check_update

WIDTH = 256
"""Of scripted hidden states."""

Script = Callable[[engine.GenerateRequest, int], Sequence[int]]
"""(request, policy version) -> the tokens that it would say if nothing cut it short."""


class ScriptedEngine:
    """An Engine that generates what `script` returns, else hashed tokens and sometimes a stop.

    Every generate() takes `delay_s`, during which a test can act.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocab_size: int = 256,
        max_model_len: int = 1024,
        delay_s: float = 0.0,
    ) -> None:
        self._script = script or self._hashed
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._delay_s = delay_s
        self._version = -1
        self._fingerprint: Projection | None = None
        self._started = False
        self._closed = asyncio.Event()

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine. The model is not read; see scripted_hidden() for what is proved."""
        if fingerprint:
            self._fingerprint = find_fingerprint(fingerprint)
        self._started = True

    async def load(self, version: int, state: State) -> None:
        """See Engine. The weights are not kept."""
        self._check_running()
        self._version = version

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine. There is nothing to write, but what no engine takes is refused."""
        check_update(state, changed)
        await self.load(version, state)

    async def generate(self, request: engine.GenerateRequest) -> engine.Completion:
        """See Engine. A load during the delay shows in `policy_last`."""
        self._check_running()
        if self._version < 0:
            raise EngineError("the engine holds no weights: load a policy version first")
        engine.check_request(request, self._vocab_size, self._max_model_len)
        first = self._version
        try:
            await asyncio.wait_for(self._closed.wait(), self._delay_s)
        except TimeoutError:
            script = self._script(request, first)[: self._max_model_len - len(request.prompt)]
            completion = _cut(request, script, first, self._version)
            if self._fingerprint is None:
                return completion
            hidden = scripted_hidden(first, completion.token_ids)
            return replace(completion, proof=self._fingerprint.make(hidden))
        raise EngineError("the engine is closed: start another one")

    def stats(self) -> engine.EngineStats:
        """See Engine. It is never busy."""
        return engine.EngineStats()

    async def close(self) -> None:
        """See Engine."""
        self._closed.set()

    def _check_running(self) -> None:
        if self._closed.is_set():
            raise EngineError("the engine is closed: start another one")
        if not self._started:
            raise EngineError("the engine is not started: call start() first")

    def _hashed(self, request: engine.GenerateRequest, version: int) -> list[int]:
        stops = request.stop_token_ids
        drawn: list[int] = []
        for index in range(request.max_tokens):
            number = _number(request, version, index)
            ends = stops and number % 8 == 0
            drawn.append(stops[number // 8 % len(stops)] if ends else number % self._vocab_size)
        return drawn


def _cut(
    request: engine.GenerateRequest, script: Sequence[int], first: int, last: int
) -> engine.Completion:
    """Cut the script at its first stop token or at max_tokens."""
    said = list(script[: request.max_tokens])
    ends = [index for index, token in enumerate(said) if token in request.stop_token_ids]
    if ends:
        said = said[: ends[0] + 1]
    logprobs = [-1.0 - _number(request, first, index) % 1000 / 1000 for index in range(len(said))]
    finish = "stop" if ends else "length"
    return engine.Completion(said, logprobs, finish, first, last)


def scripted_hidden(version: int, token_ids: Sequence[int]) -> Hidden:
    """The hidden states [tokens, WIDTH] behind a completion, which any fake auditor can make again.

    Each is a hash of the version and of its token's index and id.
    """
    rows = [
        hashlib.shake_128(repr((version, index, token)).encode()).digest(WIDTH)
        for index, token in enumerate(token_ids)
    ]
    return np.frombuffer(b"".join(rows), dtype=np.int8).reshape(-1, WIDTH).astype(np.float32)


def _number(request: engine.GenerateRequest, version: int, index: int) -> int:
    """Hash everything that a token may depend on to 48 bits."""
    words = (request.seed, version, request.temperature, index, *request.prompt)
    digest = hashlib.blake2b(repr(words).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")
