"""Pass checked requests (server.py) on to vLLM's own OpenAI routes, on the engines' sockets.

Only the routes of PATHS are passed on: vLLM has others that load adapters, sleep, or reset caches.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..config.serving import ApiConfig
from ..environments.chat import ChatFormat
from ..inference.host_messages import ApiOptions
from ..ops.errors import EngineLost
from .server import ID_HEADER, VERSION_HEADER, Body, EventStream

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
)
AUTO, NONE = "auto", "none"


@runtime_checkable
class ProxyTargets(Protocol):
    """An engine whose processes can serve vLLM's routes: HostedEngine, and a scripted one in tests."""

    def serve_api(self, options: ApiOptions) -> bool:
        """Serve them from start() on; False where that is not possible."""
        ...

    def upstream(self) -> AbstractContextManager[str]:
        """Choose the socket for one request. Raises EngineError, EngineLost."""
        ...

    def upstreams(self) -> list[str]:
        """List the sockets of all working engines."""
        ...


class VllmProxy:
    """Routes over the sockets of an engine."""

    paths: tuple[str, ...] = PATHS

    def __init__(self, upstreams: ProxyTargets) -> None:
        self._upstreams = upstreams

    async def answer(
        self, path: str, body: Body, raw: bytes, stream: EventStream
    ) -> "web.StreamResponse":
        """See Routes."""
        import aiohttp
        from aiohttp import web

        try:
            with self._upstreams.upstream() as socket:
                async with (
                    _session(socket) as session,
                    session.post(
                        path, data=raw, headers={"Content-Type": "application/json"}
                    ) as reply,
                ):
                    known = (VERSION_HEADER, ID_HEADER)
                    headers = {name: reply.headers[name] for name in known if name in reply.headers}
                    if reply.content_type != "text/event-stream":
                        return web.Response(
                            body=await reply.read(),
                            status=reply.status,
                            content_type=reply.content_type,
                            headers=headers,
                        )
                    await stream.start(headers)
                    async for part in reply.content.iter_any():
                        await stream.write(part)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost("vLLM has ended while it answered: ask again") from error
        assert stream.response is not None
        await stream.response.write_eof()
        return stream.response

    async def metrics(self) -> str:
        """Return vLLM's metrics, labelled by the number of the engine where there are several."""
        import aiohttp

        told: list[str] = []
        for socket in self._upstreams.upstreams():
            try:
                async with _session(socket) as session, session.get("/metrics") as reply:
                    told.append(await reply.text())
            except (aiohttp.ClientError, OSError):
                continue  # it is being started again
        return told[0] if len(told) == 1 else merge_metrics(told)


def _session(socket: str) -> "aiohttp.ClientSession":
    import aiohttp

    # no connection is kept: its other end may be a process that has gone
    connector = aiohttp.UnixConnector(socket, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession("http://vllm", connector=connector, timeout=timeout)


def merge_metrics(texts: list[str]) -> str:
    """Merge several texts of metrics: families together, each row with the label `replica`."""
    families: dict[str, list[str]] = {}
    for number, text in enumerate(texts):
        rows: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                rows = families.setdefault(line.split(" ", 3)[2], [])
            if not line.startswith("#") and line:
                rows.append(_labelled(line, f'replica="{number}"'))
            elif line not in rows:
                rows.append(line)
    return "".join(f"{line}\n" for rows in families.values() for line in rows)


def _labelled(row: str, label: str) -> str:
    name, brace, rest = row.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = row.partition(" ")
    return f"{name}{{{label}}} {value}"


def api_options(config: ApiConfig, chat: ChatFormat, name: str) -> ApiOptions:
    """Make the options of vLLM's server: the model's name, and its parsers of calls and reasoning."""
    tools, reasoning = chat.parsers
    asked: Mapping[str, str] = {AUTO: tools, NONE: ""}
    thought: Mapping[str, str] = {AUTO: reasoning, NONE: ""}
    return ApiOptions(
        served_name=name,
        tool_call_parser=asked.get(config.tool_call_parser, config.tool_call_parser),
        reasoning_parser=thought.get(config.reasoning_parser, config.reasoning_parser),
    )
