"""The HTTP server: sockets, keys, limits, and Server-Sent Events. The only file that imports aiohttp.web.

Nothing of a request is believed before it was checked: who asks (key, Host), how much comes, and in what form.
A browser that a foreign page talks through gets nothing: there is no CORS, and only JSON is read.
"""

import asyncio
import hmac
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from ... import __version__
from ..errors import BusyError, UsageError
from ..serve_config import ApiConfig, is_loopback
from .asked import check_name
from .chat import ChatFace
from .completions import CompletionFace
from .errors import ApiError
from .faces import Face
from .generate import GenerateFace
from .meters import CONTENT_TYPE
from .service import Answer, Service

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0
"""For a request's body to come."""
SHUTDOWN_S = 1.0
LONGEST_LINE = 8190
OPEN = ("/health",)
"""Routes that need no key."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
VERSION_HEADER, ID_HEADER = "X-Policy-Version", "X-Request-Id"
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


def read_key(config: ApiConfig) -> str:
    """The key that requests have to bring; "" if none is wanted. Raises UsageError."""
    if not config.key_variable:
        return ""
    key = os.environ.get(config.key_variable, "")
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise UsageError(
            f"api.key_variable names {config.key_variable}, which holds no key: set that environment "
            "variable to printable ASCII"
        )
    return key


class HttpServer:
    """The routes over one Service. Made by serving()."""

    def __init__(self, config: ApiConfig, service: Service, key: str) -> None:
        self._config = config
        self._service = service
        self._key = key.encode()
        self._faces: dict[str, Face] = {
            face.route: face for face in (ChatFace(), CompletionFace(), GenerateFace())
        }
        self._begun = int(time.time())

    def application(self) -> "web.Application":
        """All routes, behind the checks."""
        from aiohttp import web

        @web.middleware
        async def guard(request: "web.Request", handler: Handler) -> "web.StreamResponse":
            return await self._guarded(request, handler)

        app = web.Application(
            client_max_size=int(self._config.max_body_mib * 2**20), middlewares=[guard]
        )
        app.on_response_prepare.append(_nameless)
        for route in self._faces:
            app.router.add_post(route, self._generate)
        app.router.add_get("/v1/models", self._models)
        # an id may have slashes, as those of the hub
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        return app

    # -- before and after every request ------------------------------------------------------------

    async def _guarded(self, request: "web.Request", handler: Handler) -> "web.StreamResponse":
        """Check who asks; turn whatever goes wrong into OpenAI's error body."""
        from aiohttp import web

        try:
            self._check_caller(request)
            response = await handler(request)
        except ApiError as error:
            response = _refusal(error)
        except web.HTTPRequestEntityTooLarge:
            most = f"a request has at most {self._config.max_body_mib:g} MiB"
            response = _refusal(ApiError(413, most, code="request_too_large"))
        except web.HTTPException as error:
            response = _refusal(ApiError(error.status, f"{request.path}: {error.reason}"))
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError:
            raise  # the client has gone: there is nobody to answer
        except Exception:  # a bug of ours: the client gets a proper answer, the log the trace
            logger.exception("a request to %s failed", request.path)
            response = _refusal(_failed(500, "the server failed: its log says why"))
        self._count(request, response.status)
        return response

    def _check_caller(self, request: "web.Request") -> None:
        if request.path in OPEN:
            return
        if self._key:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            sent = given.strip().encode("utf-8", "replace")
            if not hmac.compare_digest(sent, self._key) or scheme.lower() != "bearer":
                raise ApiError(
                    401,
                    "Incorrect API key provided: send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    kind="authentication_error",
                )
            return
        # without a key only the machine itself may ask, and no name that a web page made point to it
        name = urlsplit(f"//{request.host}").hostname or ""
        if name not in LOCAL_NAMES and not is_loopback(name) and name != self._config.host:
            raise ApiError(
                403, f"{name[:200]} is not this server's name: use 127.0.0.1, or set a key"
            )

    def _count(self, request: "web.Request", status: int) -> None:
        known = request.match_info.route.resource
        self._service.meters.answered(known.canonical if known else "other", status)

    # -- routes ------------------------------------------------------------------------------------

    async def _generate(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import web

        body = await self._body(request)
        limit = self._config.timeout_s
        try:
            async with asyncio.timeout(limit):
                answer = await self._service.answer(self._faces[request.path], body)
        except TimeoutError as error:
            raise too_slow(limit) from error
        headers = {VERSION_HEADER: answer.policy, ID_HEADER: answer.request_id}
        if answer.stream is None:
            return web.json_response(body=msgspec.json.encode(answer.body), headers=headers)
        return await _streamed(request, answer, headers, limit)

    async def _body(self, request: "web.Request") -> Mapping[str, Any]:
        if request.content_type != "application/json":
            raise ApiError(415, "send the request as JSON, with Content-Type: application/json")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "send the request uncompressed")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = msgspec.json.decode(await request.read())
        except TimeoutError as error:
            raise ApiError(408, "the request did not come to its end in time") from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ApiError(400, f"the request is no JSON ({error})") from error
        if not isinstance(body, dict):
            raise ApiError(400, "the request is to be a JSON object")
        return body

    async def _models(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        check_name(request.match_info["id"], self._service.served)
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        """What is told of the one model that is served."""
        served = self._service.served
        return {
            "id": served.name,
            "object": "model",
            "created": self._begun,
            "owned_by": "primerl",
            "root": served.name,
            "parent": None,
            "max_model_len": served.max_model_len,
            "policy_version": self._service.policy_version,
        }

    async def _health(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        version, fault = self._service.policy_version, self._service.stats().fault
        state = "loading" if version < 0 else "failed" if fault else "ok"
        said = {"status": state, "policy_version": version}
        return web.json_response(said, status=200 if state == "ok" else 503)

    async def _metrics(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        service = self._service
        text = service.meters.text(
            service.stats(), inflight=service.inflight, version=service.policy_version
        )
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _version(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        return web.json_response({"version": __version__})


async def _nameless(request: "web.Request", response: "web.StreamResponse") -> None:
    """Which versions of what libraries are here is nobody's business."""
    response.headers["Server"] = "primerl-node"


async def _streamed(
    request: "web.Request", answer: Answer, headers: Mapping[str, str], limit_s: float
) -> "web.StreamResponse":
    """Send events as they come; what goes wrong now can only be said in an event."""
    from aiohttp import web

    response = web.StreamResponse(headers={**headers, "Cache-Control": "no-store"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    writing = asyncio.Lock()

    async def send(event: Mapping[str, Any]) -> None:
        async with writing:
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    assert answer.stream is not None
    try:
        async with asyncio.timeout(limit_s):
            await answer.stream(send)
    except ApiError as error:
        await send(error.body())
    except TimeoutError:
        await send(too_slow(limit_s).body())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _refusal(error: ApiError) -> "web.Response":
    from aiohttp import web

    response = web.json_response(error.body(), status=error.status)
    if error.retry_after_s:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _failed(status: int, message: str) -> ApiError:
    return ApiError(status, message, kind="server_error")


def too_slow(limit_s: float) -> ApiError:
    """504 for what took longer than api.timeout_s."""
    return _failed(504, f"not done in {limit_s:g} s: ask for less")


@asynccontextmanager
async def serving(config: ApiConfig, service: Service) -> AsyncGenerator[str]:
    """Serve until the block ends; gives the base URL. Raises UsageError (no key), BusyError (port taken)."""
    from aiohttp import web

    key = read_key(config)
    runner = web.AppRunner(
        HttpServer(config, service, key).application(),
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
