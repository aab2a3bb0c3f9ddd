"""Query the judge model of an environment; only the trainer and `eval` have one.

Invariants:
- requests wait for a judge that is down: each gets an answer, or JudgeRefused if the judge fails on its
  conversation while it answers others;
- equal requests get equal answers, across restarts too: an answer is stored before it is returned;
- the environment's code sets the messages, the response format and stop strings, and may lower the token limit;
  model, temperature and limits are the config's.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec

from ...crypto.hashing import digest
from ..config.chat_api import JudgeConfig
from ..config.run import EnvironmentConfig
from ..errors import StorageError, UsageError
from ..storage.judge_answers import JudgeAnswers
from ..tasks import end_tasks
from .chat_api import ApiUnavailable, ChatApi, open_api, read_key
from .policies import JudgeRefused, PlayFailed

logger = logging.getLogger(__name__)

ANSWERS = "judge.db"
"""Name of the file of answers in the directory of a run or an evaluation."""
MAX_REQUEST = 4 << 20
"""Largest request of the environment's code, bytes."""
TRIES = 3
"""Attempts at a conversation while the judge answers others."""
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses between two attempts at a judge that is down; the last one repeats."""
PROBE = [{"role": "user", "content": "Say yes."}]
PASSED_ON = ("messages", "response_format", "stop")
"""Fields of a request that are taken from the environment's code."""
LIMITS = ("max_tokens", "max_completion_tokens")


class JudgeModel:
    """A judge model: start() first, close() last. Calls of ask() may overlap."""

    def __init__(
        self,
        config: JudgeConfig,
        key: str,
        answers: Path,
        *,
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:
        """Use `key`, unless it is empty; store answers in the file `answers`."""
        self._config = config
        self._key = key
        self._path = answers
        self._pauses_s = pauses_s
        self._room = asyncio.Semaphore(config.concurrency)
        self._open = AsyncExitStack()
        self._api: ChatApi | None = None
        self._answers: JudgeAnswers | None = None
        self._asked: dict[bytes, asyncio.Task[tuple[str, bool]]] = {}
        """Requests in flight, by digest: equal ones share an answer."""
        self._waiting = asyncio.Lock()
        """Held by the task that probes a judge that is down."""
        self._answered = float("-inf")
        """Monotonic time at which the newest answered request was sent."""
        self.fault = ""
        """Reason why requests wait for the judge; empty while it answers."""

    async def start(self) -> None:
        """Open the client and the file; send no request. Raises StorageError."""
        self._answers = JudgeAnswers(self._path)
        self._open.callback(self._answers.close)
        self._api = await self._open.enter_async_context(open_api(self._config, self._key))

    async def close(self) -> None:
        """Cancel requests in flight; close the client and the file."""
        await end_tasks(*self._asked.values())
        await self._open.aclose()

    async def ask(self, request: bytes) -> bytes:
        """Answer a request to /chat/completions with a completion, both in JSON.

        Raises JudgeRefused; StorageError if the answer cannot be stored.
        """
        body = self._body(request)
        encoded = msgspec.json.encode(body, order="deterministic")
        name = digest(encoded)
        answer = self._kept.get(name)
        if answer is None:
            task = self._asked.get(name)
            if task is None:
                task = asyncio.create_task(self._answer(name, body), name="judge")
                self._asked[name] = task
                task.add_done_callback(lambda done: self._ended(name, done))
            # if this caller is cancelled, the other waiters and the file still get the answer
            answer = await asyncio.shield(task)
        return self._completion(*answer)

    def _ended(self, name: bytes, task: "asyncio.Task[tuple[str, bool]]") -> None:
        self._asked.pop(name, None)
        if not task.cancelled():
            task.exception()  # all waiters may have been cancelled

    async def _answer(self, name: bytes, body: dict[str, Any]) -> tuple[str, bool]:
        """Retry until there is an answer, and store it. Raises JudgeRefused."""
        failures = tries = 0
        while True:
            began = time.monotonic()
            try:
                text, cut = await self._send(body)
                question = msgspec.json.encode(body["messages"]).decode()
                self._kept.add(name, self._config.model, question, text, cut=cut)
                return text, cut
            except ApiUnavailable as error:
                trouble, tries = str(error), tries + (not error.busy)
            except (PlayFailed, UsageError, StorageError) as error:
                trouble, tries = str(error), tries + (not isinstance(error, StorageError))
            await self._wait_for_judge(trouble, began)
            if tries >= TRIES:
                raise JudgeRefused(
                    f"the judge answers others, and failed {tries} times on this conversation: {trouble}"
                )
            await self._pause(failures)
            failures += 1

    async def _wait_for_judge(self, trouble: str, since: float) -> None:
        """Wait until the judge has answered any request that was sent after `since`."""
        async with self._waiting:
            looks = 0
            while self._answered < since:
                fault = f"the judge at {self._config.url} does not answer, rollouts wait for it: {trouble}"
                if fault != self.fault:
                    logger.warning("%s", fault)
                self.fault = fault
                try:
                    await self._send(self._request(PROBE))
                except (ApiUnavailable, PlayFailed, UsageError) as error:
                    trouble = str(error)
                    await self._pause(looks)
                    looks += 1

    async def _pause(self, before: int) -> None:
        """Sleep for the next of the pauses; `before` is the number of earlier ones."""
        await asyncio.sleep(self._pauses_s[min(before, len(self._pauses_s) - 1)])

    async def _send(self, body: Mapping[str, Any]) -> tuple[str, bool]:
        """Send one request. Raises the errors of ChatApi.ask()."""
        assert self._api is not None  # start() opened it
        async with self._room:
            began = time.monotonic()
            answer = await self._api.ask(body)
        self._answered = max(self._answered, began)
        if self.fault:
            logger.warning("the judge at %s answers again", self._config.url)
        self.fault = ""
        return answer.text, answer.cut

    def _body(self, request: bytes) -> dict[str, Any]:
        """Convert a request of the environment's code to the one to send. Raises JudgeRefused."""
        if len(request) > MAX_REQUEST:
            raise JudgeRefused(f"a request of {len(request)} bytes: send at most {MAX_REQUEST}")
        try:
            decoded = msgspec.json.decode(request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise JudgeRefused(f"a request that is no JSON: {error}") from error
        if not isinstance(decoded, dict):
            raise JudgeRefused("a request that is no JSON object")
        given = cast(dict[str, Any], decoded)
        if not isinstance(given.get("messages"), list) or given.get("stream"):
            raise JudgeRefused("only chat completions, not streamed, are answered")
        body = self._request(given["messages"])
        body |= {name: given[name] for name in PASSED_ON if given.get(name) is not None}
        stated_limits = [given[name] for name in LIMITS if isinstance(given.get(name), int)]
        limits = [limit for limit in stated_limits if limit > 0]
        body[self._config.max_tokens_field] = min([*limits, self._config.max_tokens])
        return body

    def _request(self, messages: list[Any]) -> dict[str, Any]:
        config = self._config
        return {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            config.max_tokens_field: config.max_tokens,
        }

    def _completion(self, text: str, cut: bool) -> bytes:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
        return msgspec.json.encode(
            {
                "id": "judge",
                "object": "chat.completion",
                "created": 0,
                "model": self._config.model,
                "choices": [choice],
            }
        )

    @property
    def _kept(self) -> JudgeAnswers:
        if self._answers is None:
            raise StorageError("the judge was not started: call start() first")
        return self._answers


class Judges:
    """Factory of environments' judges; no environment sees the keys, which are read once."""

    def __init__(
        self,
        environments: Sequence[EnvironmentConfig],
        directory: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Read the keys; answers will be stored in `directory`.

        Raises UsageError if `environ` lacks a key.
        """
        variables = os.environ if environ is None else environ
        judges = [
            environment.judge for environment in environments if environment.judge is not None
        ]
        self._keys = {judge.key_variable: read_key(judge, variables) for judge in judges}
        self._directory = directory

    @property
    def variables(self) -> frozenset[str]:
        """Names of the environment variables that hold the keys."""
        return frozenset(self._keys) - {""}

    def judge(self, config: EnvironmentConfig) -> JudgeModel | None:
        """Make the judge of an environment, not started; None if it has none."""
        judge_config = config.judge
        if judge_config is None:
            return None
        return JudgeModel(
            judge_config, self._keys[judge_config.key_variable], self._directory / ANSWERS
        )
