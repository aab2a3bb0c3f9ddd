"""Forward checked requests (server.py) to vLLM's OpenAI routes, on engines' Unix sockets.

Only the routes of PATHS are forwarded: vLLM has others that load adapters, sleep, or reset caches.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..config.serving import ApiConfig
from ..environments.chat import ChatFormat
from ..errors import EngineLost
from ..inference.host_messages import ApiOptions
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
    """An engine whose processes serve vLLM's routes: HostedEngine, and a scripted one in tests."""

    def serve_api(self, options: ApiOptions) -> bool:
        """Have the processes serve vLLM's routes from start() on; False if the engine cannot."""
        ...

    def upstream(self) -> AbstractContextManager[str]:
        """Choose the socket path for one request. Raises EngineError, EngineLost."""
        ...

    def upstreams(self) -> list[str]:
        """List the socket paths of all running engines."""
        ...


class VllmProxy:
    """Routes that are forwarded to an engine's processes."""

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
            raise EngineLost("vLLM ended while it was answering: send the request again") from error
        assert stream.response is not None
        await stream.response.write_eof()
        return stream.response

    async def metrics(self) -> str:
        """Return vLLM's metrics; with several engines, labelled with the engine's number."""
        import aiohttp

        texts: list[str] = []
        for socket in self._upstreams.upstreams():
            try:
                async with _session(socket) as session, session.get("/metrics") as reply:
                    texts.append(await reply.text())
            except (aiohttp.ClientError, OSError):
                continue  # the engine is restarting
        return texts[0] if len(texts) == 1 else merge_metrics(texts)


def _session(socket: str) -> "aiohttp.ClientSession":
    import aiohttp

    # no keep-alive: the process at the other end may be replaced
    connector = aiohttp.UnixConnector(socket, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession("http://vllm", connector=connector, timeout=timeout)


def merge_metrics(texts: list[str]) -> str:
    """Merge metrics texts family by family; each row gets the label `replica`."""
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
    """Make the options of vLLM's server: model name, parsers of tool calls and reasoning."""
    tools, reasoning = chat.parsers

    def chosen(configured: str, detected: str) -> str:
        return {AUTO: detected, NONE: ""}.get(configured, configured)

    return ApiOptions(
        served_name=name,
        tool_call_parser=chosen(config.tool_call_parser, tools),
        reasoning_parser=chosen(config.reasoning_parser, reasoning),
    )
