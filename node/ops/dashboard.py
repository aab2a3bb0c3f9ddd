"""The page of a node in the browser, and its /metrics: on loopback, read-only, from the figures of the node.

- A request is checked before anything is done for it: Host, Origin, method, and for all but the empty page and
  /metrics the token, which is in the link alone: no cookie holds it, so no other page can use it.
- Served to the world (node/app/public_page.py) it has no token, no /metrics, and PublicFigures alone.
- Strings of peers are sent as JSON; page.js shows them as text. The content security policy runs no other code.
- While nobody looks it costs a socket: aiohttp is loaded by the first connection, and figures are made for
  viewers, one set for all of them. Connections and viewers are bounded, in number and in the time for which one
  asks nothing or does not read; where all places are taken, the address that has most of them loses one.
"""

import asyncio
import hmac
import inspect
import logging
import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..config.run import DashboardPort
from ..errors import BusyError, NodeError
from ..process.unix_sockets import ACCEPTS_AT_ONCE, BACKLOG
from ..tasks import end_tasks
from .figures import Curves, NodeFigures, PublicFigures
from .http import Connections, caller_address, hide_libraries, is_local

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
SHUTDOWN_S = 1.0
MAX_BODY = 1024
SEND_BUFFER = 2**16
"""Bytes of a connection that the kernel may keep while they are not read; Linux takes twice as many."""
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/uplot.js": ("uplot.js", "text/javascript"),
    "/uplot.css": ("uplot.css", "text/css"),
}
"""What holds nothing of the node, and needs no token."""
OPEN = (*FILES, "/metrics")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class DashboardLimits:
    """Pace and bounds of a page."""

    every_s: float = 2.0
    """Between two sets of figures, at least."""
    share: float = 0.05
    """Of its time that the node makes figures, at most: with many peers they come more rarely."""
    viewers: int = 16
    read_s: float = 20.0
    """Time for a viewer to read what was sent."""
    answer_s: float = 10.0
    """Time for the answer to a question."""
    connections: int = 128
    """More than viewers: each of them has one, too."""
    idle_s: float = 20.0
    """Time for a whole request, from its connection's start or the answer to the one before."""


Query = Callable[..., Awaitable[Any]]
"""A question that changes nothing, called with the parameters of its URL as strings."""


class Shown(Protocol):
    """The node that the page shows."""

    queries: Mapping[str, Query]

    async def figures(self) -> NodeFigures | PublicFigures:
        """Make the figures of now. Raises NodeError if there are none at present."""
        ...

    def curves(self) -> Curves:
        """Return the curves of the run so far."""
        ...


class Dashboard:
    """The page of one node, from open() to close()."""

    def __init__(
        self,
        shown: Shown,
        port: DashboardPort,
        limits: DashboardLimits = DashboardLimits(),
        public_host: str = "",
    ) -> None:
        """With a `public_host` everybody who reaches that address may see what `shown` shows."""
        self._shown = shown
        self._port = port
        self._limits = limits
        self._public = bool(public_host)
        self._host = public_host or HOST
        self._socket: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._token = secrets.token_urlsafe(24)
        self._making = asyncio.Lock()
        self._made = -math.inf
        self._pause_s = limits.every_s
        self._figures = self._curves = b""
        """Events with the newest of both."""
        self._viewers: dict[asyncio.Task[Any], str] = {}
        """The address of each, the oldest first."""
        self._connections = Connections(limits.connections, limits.idle_s)

    @property
    def url(self) -> str:
        """Address of the page; empty while there is none."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}/" if self._socket else ""

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    @property
    def link(self) -> str:
        """Address with the token. Raises NodeError while there is no page."""
        if not self.url:
            raise NodeError(
                "this node serves no page: start it with --dashboard.port 0 (any free port)"
            )
        return f"{self.url}#token={self._token}"

    def open(self) -> None:
        """Listen, unless the port is "off". Raises BusyError."""
        if self._port == "off":
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER
            )  # of each connection
            self._socket.bind((self._host, self._port))
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            self._socket = None
            other = "address" if self._public else "--dashboard.port, 0 for any, or off"
            raise BusyError(
                f"cannot listen on {self._host} port {self._port} ({error.strerror}): choose another {other}"
            ) from error
        asyncio.get_running_loop().add_reader(self._socket, self._begin)

    def _begin(self) -> None:
        """Serve: somebody connects for the first time."""
        assert self._socket is not None  # it is readable
        asyncio.get_running_loop().remove_reader(self._socket)
        self._starting = asyncio.create_task(self._serve(self._socket), name="dashboard")

    async def _serve(self, listening: socket.socket) -> None:
        await asyncio.to_thread(_load)
        from aiohttp import web

        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        server, bounded = self._runner.server, self._connections.bounded
        assert server is not None  # it is set up
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: bounded(server()), sock=listening, backlog=ACCEPTS_AT_ONCE
        )
        listening.listen(BACKLOG)

    async def close(self) -> None:
        """Stop listening and hang up on viewers."""
        if self._socket is None:
            return
        if self._starting is None:
            asyncio.get_running_loop().remove_reader(self._socket)
        else:
            await end_tasks(self._starting)
        if self._server is not None:
            self._server.close()
        for viewer in list(self._viewers):
            viewer.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        self._socket.close()
        self._socket = None

    # -- every request -----------------------------------------------------------------------------

    def _application(self) -> "web.Application":
        from aiohttp import web

        @web.middleware
        async def guard(request: "web.Request", handler: "Handler") -> "web.StreamResponse":
            with self._connections.request(request.transport):
                return await self._guarded(request, handler)

        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard])
        app.on_response_prepare.append(hide_libraries)
        for path in FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/events", self._follow, allow_head=False)
        if not self._public:
            app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/api/{query}", self._answer, allow_head=False)
        return app

    async def _guarded(self, request: "web.Request", handler: "Handler") -> "web.StreamResponse":
        """Check the caller, run the handler, and send errors as a line of text."""
        from aiohttp import web

        try:
            self._check_caller(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.text or error.reason}\n")
        except ConnectionError:
            raise  # the viewer has gone
        except NodeError as error:
            response = web.Response(status=503, text=f"{error}\n")
        except Exception:  # a bug of ours: the viewer gets an error, the log the traceback
            logger.exception("a request to %s failed", request.path)
            response = web.Response(status=500, text="internal error: see the node's log\n")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _check_caller(self, request: "web.Request") -> None:
        """Raise HTTPForbidden or HTTPUnauthorized."""
        from aiohttp import web

        if self._public:
            return
        if not is_local(request.host):
            raise web.HTTPForbidden(text=f"the page is at {self.url}, under no other name")
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
        if origin not in (None, f"http://{request.host}") or site not in ("none", "same-origin"):
            raise web.HTTPForbidden(text="this node answers no other page")
        if request.path in OPEN:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.encode("utf-8", "replace")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._token.encode()):
            raise web.HTTPUnauthorized(text="`primerl-node dashboard` prints the link of now")

    # -- routes ------------------------------------------------------------------------------------

    async def _file(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        name, kind = FILES[request.path]
        body = await asyncio.to_thread((Path(__file__).parent / "page" / name).read_bytes)
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _metrics(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        from .prometheus import CONTENT_TYPE, exposition

        figures = await self._shown.figures()
        assert isinstance(figures, NodeFigures)  # the world is served no /metrics
        text = exposition(figures)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _answer(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        query = self._shown.queries.get(request.match_info["query"])
        if query is None:
            raise web.HTTPNotFound(text="this node answers no such question")
        try:
            inspect.signature(query).bind(**request.query)
        except TypeError as error:
            raise web.HTTPBadRequest(text=str(error)[:400]) from error
        try:
            async with asyncio.timeout(self._limits.answer_s):
                answer = await query(**request.query)
        except TimeoutError as error:
            raise web.HTTPServiceUnavailable(text="not answered in time") from error
        except (NodeError, ValueError) as error:
            raise web.HTTPBadRequest(text=str(error)[:400]) from error
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _follow(self, request: "web.Request") -> "web.StreamResponse":
        """Send figures and curves as events until the viewer leaves, or does not read."""
        from aiohttp import web

        viewer, transport = asyncio.current_task(), request.transport
        assert viewer is not None  # each connection has one
        if transport is None:
            raise ConnectionError("the viewer has gone")
        address = caller_address(transport)
        if len(self._viewers) >= self._limits.viewers:
            counts = Counter(self._viewers.values())
            oldest = max(self._viewers, key=lambda each: counts[self._viewers[each]])
            if counts[self._viewers[oldest]] <= counts[address] + 1:
                raise web.HTTPServiceUnavailable(
                    text=f"{len(self._viewers)} viewers are here: close one"
                )
            del self._viewers[oldest]
            oldest.cancel()
        self._viewers[viewer] = address
        # else much may wait to be sent before a viewer that does not read is noticed
        transport.set_write_buffer_limits(high=0)
        try:
            await self._make()
            # else a web server before this one may keep events until it has many
            response = web.StreamResponse(headers={**HEADERS, "X-Accel-Buffering": "no"})
            response.content_type = "text/event-stream"
            await response.prepare(request)
            curves: bytes = b""
            while True:
                events = self._figures + self._curves * (self._curves is not curves)
                curves = self._curves
                async with asyncio.timeout(self._limits.read_s):
                    await response.write(events)
                await asyncio.sleep(self._pause_s)
                try:
                    await self._make()
                except NodeError:
                    return response  # its viewer comes again, and is told why there is nothing
        except TimeoutError:
            transport.abort()
            raise ConnectionError("a viewer does not read") from None
        finally:
            self._viewers.pop(viewer, None)

    async def _make(self) -> None:
        """Make the events, unless another viewer's are new."""
        async with self._making:
            began = time.monotonic()
            if began - self._made < self._pause_s / 2:
                return
            self._figures = _event("figures", await self._shown.figures())
            curves = _event("curves", self._shown.curves())
            if curves != self._curves:
                self._curves = curves
            self._made = time.monotonic()
            took_s = self._made - began
            self._pause_s = max(self._limits.every_s, took_s / self._limits.share)


def _event(name: str, value: msgspec.Struct) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


def _load() -> None:
    """Import aiohttp, which takes a while: in a thread."""
