"""Serve vLLM's own OpenAI routes over the AsyncLLM of this process, on a Unix socket.

The node in front of it (node/api/vllm_proxy.py) checks keys, hosts, sizes and routes; nothing here does.

1. Every request that a route sends to the engine core gets a key here, and a seed: the client's or a new one.
   The worker draws it with this package's sampler (vllm_sampling.py), and vLLM makes no generator of its own,
   which would crash on a CPU when a seeded prompt is computed in parts. vLLM applies grammars, penalties,
   biases and min_p to the logits before the draw.
2. A reply names the first and the last policy version that drew one of its tokens: in the header
   X-Policy-Version, and as `policy_version` in its JSON object or in each event that ends a choice of a stream.
   A token that was drawn beyond a stop string counts, too.
3. Only names that vLLM 0.25.1 and 0.32 share are used, apart from one import that has moved.
"""

import asyncio
import contextlib
import copy
import os
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EngineError, UsageError, named_line
from .host_messages import ApiOptions
from .vllm_arguments import GREEDY_BELOW, SAMPLING, SERVED

if TYPE_CHECKING:
    from .host import Sleeper
    from .vllm import CompletionCollector, VllmMeter

WATCH_S, START_S, STOP_S = 0.5, 60.0, 2.0
SEEDS = 1 << 63
VERSION_HEADER = b"x-policy-version"
ENDS_CHOICE = re.compile(rb'"finish_reason": ?"|"type": ?"response\.(completed|incomplete)"')

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Spans = Callable[[Sequence[int]], Awaitable[list[list[int]]]]
"""Function from request keys to the policy versions that drew their tokens."""

_current: ContextVar["Reply | None"] = ContextVar("reply", default=None)


class Reply:
    """One HTTP request, and the engine requests that it has led to."""

    def __init__(self) -> None:
        self.keys: list[int] = []


class ApiServer:
    """vLLM's app behind uvicorn: prepare() before the first request, start(), then close()."""

    def __init__(
        self,
        llm: Any,
        options: ApiOptions,
        *,
        meter: "VllmMeter",
        keys: Iterator[int],
        spans: Spans,
        collector: "CompletionCollector",
        version: Callable[[], int],
    ) -> None:
        """`keys` number the engine's own requests, too; `version` returns the version that draws."""
        self._llm = llm
        self._options = options
        self._meter = meter
        self._keys = keys
        self._spans = spans
        self._collector = collector
        self._version = version
        self._tasks: list[asyncio.Task[Any]] = []
        self._server: Any = None

    def prepare(self) -> None:
        """Intercept every request on its way to the engine core."""
        core = self._llm.engine_core
        add = core.add_request_async

        async def added(request: Any) -> None:
            if (reply := _current.get()) is not None and request.sampling_params is not None:
                self._take(request, reply)
            await add(request)

        core.add_request_async = added

    async def start(self, sleeper: "Sleeper") -> None:
        """Serve until close(). Raises EngineError, UsageError."""
        import uvicorn

        app = await _build_app(self._llm, self._options)

        class Server(uvicorn.Server):
            """Server that leaves the signals of this process alone."""

            def capture_signals(self) -> Any:
                return contextlib.nullcontext()

        self._server = Server(
            uvicorn.Config(
                self._middleware(app, sleeper),
                uds=self._options.socket,
                log_level="error",
                access_log=False,
                loop="none",
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
        app.state.server = self._server  # vLLM's handlers stop it when the engine has died
        self._tasks = [
            asyncio.create_task(self._server.serve(), name="vLLM's server"),
            asyncio.create_task(self._end_with_engine(), name="vLLM's errors"),
        ]
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._tasks[0].done():
                    raise EngineError("vLLM's server did not start: see its log lines above")
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End the server; unfinished answers are cut off."""
        for task in self._tasks[1:]:
            task.cancel()
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)

    async def _end_with_engine(self) -> None:
        """End this process once its engine core has died, so that the node notices.

        A failed request alone would not tell the node.
        """
        while not self._llm.errored:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_S)
        print("vLLM's engine core has died", file=sys.stderr, flush=True)
        os._exit(1)

    # -- requests ----------------------------------------------------------------------------------

    def _take(self, request: Any, reply: Reply) -> None:
        """Make the worker draw a request by its seed, or by a new one."""
        params = request.sampling_params = copy.copy(request.sampling_params)
        key = next(self._keys)
        reply.keys.append(key)
        seed = secrets.randbits(63) if params.seed is None else params.seed % SEEDS
        # the logits include the temperature by then (vllm_sampling.py)
        limits = (
            (1, 1.0) if params.temperature < GREEDY_BELOW else (max(0, params.top_k), params.top_p)
        )
        own = {SAMPLING: [key, seed, 1.0, *limits], SERVED: True}
        params.seed, params.extra_args = None, {**(params.extra_args or {}), **own}
        self._meter.begin(len(request.prompt_token_ids or ()))

    def _middleware(self, app: Any, sleeper: "Sleeper") -> Any:
        async def serve(scope: Message, receive: Any, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            reply = Reply()
            token = _current.set(reply)
            try:
                await self._collector.tidy()
                async with sleeper.awake():
                    stamp = Stamp(send, lambda: self._versions(reply), self._version)
                    await app(scope, receive, stamp)
            finally:
                _current.reset(token)
                for key in reply.keys:
                    self._meter.end()
                    self._collector.forget(key)

        return serve

    async def _versions(self, reply: Reply) -> tuple[int, int] | None:
        """Return the first and last policy version of the tokens drawn so far; None without tokens."""
        versions = [version for spans in await self._spans(reply.keys) for version in spans]
        return (min(versions), max(versions)) if versions else None


class Stamp:
    """ASGI sender that adds policy versions to an app's answer."""

    def __init__(
        self,
        send: Send,
        versions: Callable[[], Awaitable[tuple[int, int] | None]],
        current: Callable[[], int],
    ) -> None:
        self._send, self._versions, self._current = send, versions, current
        self._head: Message | None = None
        self._body = b""
        self._streams = False

    async def __call__(self, message: Message) -> None:
        """Handle one ASGI message."""
        if message["type"] == "http.response.start":
            self._head = message
            self._streams = _header(message, b"content-type").startswith(b"text/event-stream")
            if self._streams:
                _set_header(message, VERSION_HEADER, b"%d" % self._current())
                await self._send(message)
        elif message["type"] == "http.response.body" and self._streams:
            body = message.get("body", b"")
            if ENDS_CHOICE.search(body):
                message["body"] = await self._stamp_events(body)
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish()
        else:
            await self._send(message)

    async def _finish(self) -> None:
        """Send an answer in one piece."""
        head, body = self._head, self._body
        assert head is not None  # ASGI: the head comes first
        versions = await self._versions() if head["status"] == 200 else None
        if versions is not None:
            first, last = versions
            _set_header(
                head, VERSION_HEADER, b"%d" % first if first == last else b"%d-%d" % versions
            )
            body = _add_versions(body, versions)
        _set_header(head, b"content-length", b"%d" % len(body))
        await self._send(head)
        await self._send({"type": "http.response.body", "body": body})

    async def _stamp_events(self, body: bytes) -> bytes:
        versions = await self._versions()
        if versions is None:
            return body
        lines = body.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(b"data: {") and ENDS_CHOICE.search(line):
                lines[number] = b"data: " + _add_versions(line[6:], versions)
        return b"\n".join(lines)


def _add_versions(body: bytes, versions: tuple[int, int]) -> bytes:
    try:
        answer = msgspec.json.decode(body)
    except ValueError:
        return body
    if isinstance(answer, dict):
        answer["policy_version"] = {"first": versions[0], "last": versions[1]}
        return msgspec.json.encode(answer)
    return body


def _header(message: Message, name: bytes) -> bytes:
    return next((value for key, value in message.get("headers", ()) if key.lower() == name), b"")


def _set_header(message: Message, name: bytes, value: bytes) -> None:
    others = [pair for pair in message.get("headers", ()) if pair[0].lower() != name]
    message["headers"] = [*others, (name, value)]


async def _build_app(llm: Any, options: ApiOptions) -> Any:
    """Build vLLM's FastAPI app with all its state. Raises EngineError, UsageError."""
    from vllm.entrypoints.openai import api_server  # pyright: ignore
    from vllm.reasoning import ReasoningParserManager  # pyright: ignore
    from vllm.tool_parsers import ToolParserManager  # pyright: ignore
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # pyright: ignore
    except ImportError:  # 0.25
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # pyright: ignore

    tools, reasoning = options.tool_call_parser, options.reasoning_parser
    _check_parser("api.tool_call_parser", tools, ToolParserManager)
    _check_parser("api.reasoning_parser", reasoning, ReasoningParserManager)
    arguments = ["--model", llm.model_config.model, "--served-model-name", options.served_name]
    arguments += ["--disable-fastapi-docs"]
    if tools:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", tools]
    try:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
        args.structured_outputs_config.reasoning_parser = reasoning
        tasks = await llm.get_supported_tasks()
        app = api_server.build_app(args, tasks, llm.model_config)
        await api_server.init_app_state(llm, app.state, args, tasks)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError, KeyError) as error:
        raise EngineError(f"vLLM's server did not start ({named_line(error)})") from error
    return app


def _check_parser(key: str, name: str, manager: Any) -> None:
    known = manager.list_registered()
    if name and name not in known:
        raise UsageError(
            f"{key} {name!r} is none of vLLM's: take one of {', '.join(sorted(known))}"
        )
