"""HTTP server of an engine: authentication, limits, common routes, OpenAI's error format.

- A request is checked before it is used: caller (key, Host), size, format.
- A foreign web page cannot use it through a browser: there is no CORS, and only JSON is accepted.
- Generation routes are passed in: completions.py for any engine, vllm_proxy.py for vLLM's own.
"""

import asyncio
import hmac
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ... import __version__
from ..config.serving import ApiConfig
from ..errors import BusyError, EngineError, EngineLost, UsageError
from ..inference.engine import Engine, EngineStats
from ..ops.http import hide_libraries, is_local

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0
"""Deadline for receiving a request's body."""
SHUTDOWN_S = 1.0
RETRY_AFTER_S, LOST_RETRY_S = 1, 10
"""Retry-After: while the policy loads or the server is busy; while an engine restarts."""
LONGEST_LINE = 8190
OPEN = ("/health",)
"""Routes without authentication."""
VERSION_HEADER, ID_HEADER = "X-Policy-Version", "X-Request-Id"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Body = Mapping[str, Any]
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


class ApiError(Exception):
    """An error reply: HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int = 0,
    ) -> None:
        """`param`: the request's faulty field; `retry_after_s`: value of Retry-After, 0 for none."""
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def engine_failed(error: EngineError) -> ApiError:
    """Convert an engine's error to an error reply."""
    if isinstance(error, EngineLost):
        return ApiError(503, str(error), kind="server_error", retry_after_s=LOST_RETRY_S)
    logger.error("the engine could not generate: %s", error)
    return ApiError(500, str(error), kind="server_error", code="engine_error")


@dataclass(frozen=True)
class ApiLimits:
    """Limits of one request, and of all."""

    max_inflight: int = 1024
    """Most completions at once; further requests are refused (429)."""
    max_body_mib: float = 8.0
    max_choices: int = 128
    """Most completions: n times its prompts."""
    max_stop_strings: int = 16
    """vLLM's own routes accept any number."""
    stream_tokens: int = 32
    """Most tokens of one chunk of a stream, after shorter first ones; vLLM's own routes send each token."""


@dataclass(frozen=True)
class Served:
    """The served model and its limits."""

    name: str
    vocab_size: int
    max_model_len: int
    api: ApiConfig
    limits: ApiLimits = ApiLimits()

    def check_name(self, name: Any) -> None:
        """Check a request's model name. Raises ApiError (404) for another model."""
        if name is not None and name != self.name:
            message = (
                f"The model `{str(name)[:200]}` does not exist: this server serves `{self.name}`"
            )
            raise ApiError(404, message, param="model", code="model_not_found")


class EventStream:
    """A reply as Server-Sent Events; nothing is sent before start()."""

    def __init__(self, request: "web.Request") -> None:
        self._request = request
        self._writing = asyncio.Lock()
        self.response: web.StreamResponse | None = None
        """None before start()."""

    async def start(self, headers: Mapping[str, str]) -> None:
        """Send the response headers."""
        from aiohttp import web

        self.response = web.StreamResponse(headers={**headers, "Cache-Control": "no-store"})
        self.response.content_type = "text/event-stream"
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send raw bytes of events, waiting while the client reads slowly."""
        assert self.response is not None  # start() came first
        async with self._writing:
            await self.response.write(data)

    async def send(self, event: Body) -> None:
        """Send one event."""
        await self.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def end(self, error: ApiError | None = None) -> "web.StreamResponse":
        """Send `error`, if any, and the final event."""
        if error is not None:
            await self.send(error.body)
        await self.write(b"data: [DONE]\n\n")
        assert self.response is not None
        await self.response.write_eof()
        return self.response


class Routes(Protocol):
    """Handler of POST requests on some paths. Implementations: EngineRoutes, VllmProxy."""

    paths: tuple[str, ...]

    async def answer(
        self, path: str, body: Body, raw: bytes, stream: EventStream
    ) -> "web.StreamResponse":
        """Answer a request, through `stream` if it asks for streaming. Raises ApiError, EngineError."""
        ...

    async def metrics(self) -> str:
        """Return metrics in Prometheus' text format."""
        ...


class HttpServer:
    """The aiohttp application of one engine: checks and routes. Run by serving()."""

    def __init__(self, engine: Engine, served: Served, routes: tuple[Routes, ...]) -> None:
        """If several of `routes` have the same path, the first one handles it."""
        self.served = served
        self._engine = engine
        self._routes = {
            path: served_routes
            for served_routes in reversed(routes)
            for path in served_routes.paths
        }
        self._all = routes
        self._key = read_key(served.api).encode()
        self._begun = int(time.time())
        self._answered: Counter[tuple[str, int]] = Counter()
        self.inflight = 0
        """Completions in progress."""

    @property
    def policy_version(self) -> int:
        """The engine's policy version; -1 before the first."""
        return self._engine.policy_version

    def stats(self) -> EngineStats:
        """Return the engine's stats; if it was given up, the reason in `fault`."""
        try:
            return self._engine.stats()
        except EngineError as error:
            return EngineStats(fault=str(error))

    def application(self) -> "web.Application":
        """Make the aiohttp application."""
        from aiohttp import web

        @web.middleware
        async def guard(request: "web.Request", handler: Handler) -> "web.StreamResponse":
            return await self._guarded(request, handler)

        size = int(self.served.limits.max_body_mib * 2**20)
        app = web.Application(client_max_size=size, middlewares=[guard])
        app.on_response_prepare.append(hide_libraries)
        for path in self._routes:
            app.router.add_post(path, self._post)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)  # an id of the hub has slashes
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        return app

    # -- before and after every request ------------------------------------------------------------

    async def _guarded(self, request: "web.Request", handler: Handler) -> "web.StreamResponse":
        """Check the caller and run the handler; convert errors to OpenAI's format."""
        from aiohttp import web

        try:
            self._check_caller(request)
            response = await handler(request)
        except ApiError as error:
            response = _refusal(error)
        except web.HTTPRequestEntityTooLarge:
            most = f"the request is too large: send at most {self.served.limits.max_body_mib:g} MiB"
            response = _refusal(ApiError(413, most, code="request_too_large"))
        except web.HTTPException as error:
            response = _refusal(ApiError(error.status, f"{request.path}: {error.reason}"))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError:
            raise  # the client disconnected
        except Exception:  # a bug of ours: the client gets an error reply, the log the traceback
            logger.exception("a request to %s failed", request.path)
            response = _refusal(_failed(500, "internal error: see the server's log"))
        known = request.match_info.route.resource
        self._answered[known.canonical if known else "other", response.status] += 1
        return response

    def _check_caller(self, request: "web.Request") -> None:
        if request.path in OPEN:
            return
        if self._key:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            sent = given.strip().encode("utf-8", "replace")
            if not hmac.compare_digest(sent, self._key) or scheme.lower() != "bearer":
                message = "Incorrect API key provided: send Authorization: Bearer KEY"
                kind = "authentication_error"
                raise ApiError(401, message, code="invalid_api_key", kind=kind)
            return
        # without a key only local clients are allowed, under a local name (against DNS rebinding)
        if not is_local(request.host):
            message = (
                f"{request.host[:200]} is not this server's host name: use 127.0.0.1, or set a key"
            )
            raise ApiError(403, message)

    # -- routes ------------------------------------------------------------------------------------

    async def _post(self, request: "web.Request") -> "web.StreamResponse":
        body, raw = await _read_json(request)
        self.served.check_name(body.get("model"))
        if self.policy_version < 0:
            message = "the policy is still loading: try again later"
            raise ApiError(503, message, kind="server_error", retry_after_s=RETRY_AFTER_S)
        limit_s, stream = self.served.api.timeout_s, EventStream(request)
        failed: ApiError
        with self._admitted(count_choices(body, self.served.limits.max_choices)):
            try:
                async with asyncio.timeout(limit_s):
                    routes = self._routes[request.path]
                    return await routes.answer(request.path, body, raw, stream)
            except TimeoutError:
                failed = _failed(504, f"not finished in {limit_s:g} s: request fewer tokens")
            except EngineError as error:
                failed = engine_failed(error)
            except ApiError as error:
                failed = error
        if stream.response is None:
            raise failed
        return await stream.end(failed)

    @contextmanager
    def _admitted(self, count: int) -> Generator[None]:
        """Count completions while they are in progress. Raises ApiError (400, 429)."""
        most = self.served.limits.max_inflight
        if count > most:
            message = f"at most {most} completions run at once: request fewer"
            raise ApiError(400, message)
        if self.inflight + count > most:
            raise ApiError(
                429,
                f"{self.inflight} completions are in progress, at most {most} run at once: try again later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=RETRY_AFTER_S,
            )
        self.inflight += count
        try:
            yield
        finally:
            self.inflight -= count

    async def _models(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        self.served.check_name(request.match_info["id"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        """Describe the served model."""
        return {
            "id": self.served.name,
            "object": "model",
            "created": self._begun,
            "owned_by": "primerl",
            "root": self.served.name,
            "parent": None,
            "max_model_len": self.served.max_model_len,
            "policy_version": self.policy_version,
        }

    async def _health(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        version, fault = self.policy_version, self.stats().fault
        state = "loading" if version < 0 else "failed" if fault else "ok"
        health = {"status": state, "policy_version": version}
        return web.json_response(health, status=200 if state == "ok" else 503)

    async def _metrics(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        stats = self.stats()
        answers = {
            f'route="{path}",code="{code}"': count for (path, code), count in self._answered.items()
        }
        text = "".join(
            (
                self.family("primerl_inflight", "gauge", self.inflight),
                self.family("primerl_policy_version", "gauge", self.policy_version),
                self.family("primerl_engine_up", "gauge", int(not stats.fault)),
                self.family("primerl_engine_restarts_total", "counter", stats.restarts),
                self.family("primerl_http_requests_total", "counter", answers),
                await self._all[0].metrics(),
            )
        )
        return web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})

    def family(self, name: str, kind: str, values: float | Mapping[str, float]) -> str:
        """Format a metric labelled with the served model's name."""
        return metric_family(self.served.name, name, kind, values)

    async def _version(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        return web.json_response({"version": __version__})


def metric_family(model: str, name: str, kind: str, values: float | Mapping[str, float]) -> str:
    """Format a metric for Prometheus; `values` is a number, or a mapping from further labels."""
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    rows = values if isinstance(values, Mapping) else {"": values}
    lines = (
        f'{name}{{model_name="{escaped}"{labels and "," + labels}}} {value}\n'
        for labels, value in rows.items()
    )
    return f"# TYPE {name} {kind}\n" + "".join(lines)


def count_choices(body: Body, most: int) -> int:
    """Count the completions of a request, n times its prompts. Raises ApiError above `most`."""
    sampling = body.get("sampling_params")
    n = (sampling if isinstance(sampling, dict) else body).get("n")
    n = n if isinstance(n, int) and n > 1 else 1  # the routes refuse other types
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        count = n * len(prompt)
    else:
        count = n
    if count > most:
        raise ApiError(400, f"n: n times the prompts exceeds {most}", param="n")
    return count


def read_key(config: ApiConfig) -> str:
    """Read the API key from the environment; "" if none is configured. Raises UsageError."""
    if not config.key_variable:
        return ""
    key = os.environ.get(config.key_variable, "")
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise UsageError(
            f"api.key_variable names {config.key_variable}, which holds no key: set that environment "
            "variable to printable ASCII"
        )
    return key


async def _read_json(request: "web.Request") -> tuple[Body, bytes]:
    """Read a request's body; return it decoded and raw. Raises ApiError."""
    if request.content_type != "application/json":
        raise ApiError(415, "send the request as JSON, with Content-Type: application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the request uncompressed")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
        body = msgspec.json.decode(raw)
    except TimeoutError as error:
        raise ApiError(408, "the request was not received completely in time") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request is not valid JSON ({error})") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the request must be a JSON object")
    return body, raw


def _refusal(error: ApiError) -> "web.Response":
    from aiohttp import web

    response = web.json_response(error.body, status=error.status)
    if error.retry_after_s:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _failed(status: int, message: str) -> ApiError:
    return ApiError(status, message, kind="server_error")


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncGenerator[str]:
    """Serve during the block; yields the base URL. Raises BusyError if the port is taken."""
    from aiohttp import web

    config = server.served.api
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_S,
        max_line_size=LONGEST_LINE,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        try:
            await site.start()
        except OSError as error:
            raise BusyError(
                f"cannot listen on {config.host} port {config.port} ({error.strerror}): choose another "
                "--api.port or --api.host"
            ) from error
        host = f"[{config.host}]" if ":" in config.host else config.host
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
