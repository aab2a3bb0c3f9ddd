"""Tools of an environment: toolsets of `verifiers`, called in process, and calls in replies.

The library serves every toolset over HTTP, from a process of its own. A node starts no such process for a
stranger, so the same MCP server is called directly. Invariant: one reply has the same calls on every node. So
for every engine, calls are read by the parsers of `renderers`, which need no engine.
"""

import json
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from renderers.base import ParsedToolCall
from renderers.parsers import get_tool_parser
from verifiers.v1.harnesses.utils.compaction import truncate_tool_output
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

from .chat import CHARACTERS
from .environment import EnvironmentFailed
from .policies import PlayFailed

PARSERS = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3.5",
    "qwen3_xml": "qwen3.5",
    "glm45": "glm",
    "glm47": "glm",
    "deepseek_v3": "deepseek-v3",
}
"""Form of calls, by vLLM's name -> the parser of `renderers` that reads it."""
DETERMINISTIC = "DETERMINISTIC"
"""Attribute of a toolset; False means that equal calls may have different results."""

# The library's classes are generic over types that only a taskset knows.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false


# -- calls in replies ------------------------------------------------------------------------------


class CallParser:
    """Parser of the tool calls in a reply's text, in one of the forms of PARSERS."""

    def __init__(self, form: str) -> None:
        """Choose the parser of `form`. Raises EnvironmentFailed for an unknown form."""
        if form not in PARSERS:
            raise EnvironmentFailed(
                f"tool calls of the form {form[:80]!r} cannot be read: set environment.tool_call_parser "
                f"to one of {', '.join(sorted(PARSERS))}"
            )
        self._marks = _MarkedText()
        self._parser = get_tool_parser(PARSERS[form], self._marks)

    def read(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Return a reply's text without its calls, and the calls.

        Thoughts hold no calls; text that cannot be read as a call with a name is not a call.
        """
        thoughts, close, rest = text.rpartition("</think>")
        if not close and "<think>" in text:
            return text, []
        try:
            ids, calls = self._parser.extract(self._marks.encode(rest))
        except (ValueError, RecursionError):  # numbers too long, or brackets too deep, for JSON
            return text, []
        named = [call for call in calls if isinstance(call.name, str)]
        for call in named:
            encoded = json.dumps([call.name, call.arguments], ensure_ascii=False)
            call.name, call.arguments = json.loads(_printable(encoded))
        return thoughts + close + self._marks.decode(ids), named


class _MarkedText:
    """Tokenizer for the parsers: their marks are tokens, and so is every other character."""

    unk_token_id = None

    def __init__(self) -> None:
        self._marks: list[str] = []

    def convert_tokens_to_ids(self, token: str) -> int:
        """Return the id of a mark; register a new one."""
        if token not in self._marks:
            self._marks.append(token)
        return CHARACTERS + self._marks.index(token)

    def encode(self, text: str) -> list[int]:
        pattern = "|".join(re.escape(mark) for mark in sorted(self._marks, key=len, reverse=True))
        ids: list[int] = []
        for number, piece in enumerate(re.split(f"({pattern})", text)):
            ids += [self.convert_tokens_to_ids(piece)] if number % 2 else map(ord, piece)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(token) if token < CHARACTERS else self._marks[token - CHARACTERS] for token in ids
        )


# -- toolsets --------------------------------------------------------------------------------------


def check_toolsets(toolsets: Sequence[vf.Toolset], *, deterministic: bool) -> None:
    """Raise EnvironmentFailed for toolsets that cannot be called in this process.

    If they have to be `deterministic`, also for toolsets that declare that they are not.
    """
    for toolset in toolsets:
        name = type(toolset).__name__
        if getattr(toolset.config, "url", None):
            raise EnvironmentFailed(
                f"the toolset {name} is a server somewhere else, which nodes do not call: use another"
            )
        if getattr(toolset.config.runtime, "type", "subprocess") != "subprocess":
            raise EnvironmentFailed(
                f"the toolset {name} needs a container, which nodes do not start: use another"
            )
        if deterministic and not getattr(toolset, DETERMINISTIC, True):
            raise EnvironmentFailed(
                f"the toolset {name} says that equal calls may have other results, so its rollouts cannot be "
                "recomputed: to train on what workers claim, set environment.deterministic_tools = false"
            )


_calling: ContextVar[vf.Trace] = ContextVar("_calling")
"""Trace of the rollout whose call is in progress."""


class Toolbox:
    """Open toolsets and the schemas of their tools."""

    def __init__(self) -> None:
        self.schemas: list[vf.Tool] = []
        self._servers: dict[str, tuple[MCPServer, str]] = {}
        """Name of a tool -> its server and its name there."""

    async def call(self, trace: vf.Trace, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool in a rollout. An exception of the tool becomes its result, as text."""
        if name not in self._servers:
            return f"error: unknown tool {name!r}"
        server, raw = self._servers[name]
        token = _calling.set(trace)
        try:
            result: Any = await server.call_tool(raw, arguments)
        except MCPError:
            raise
        except Exception as error:  # a tool's own code may raise anything
            return _printable(_told(error))
        finally:
            _calling.reset(token)
        content = mcp_content_to_chat_content(result.content)
        if not isinstance(content, str):
            raise PlayFailed(f"the tool {name!r} answers with something else than text")
        return _printable(truncate_tool_output(content))

    async def add(self, toolset: vf.Toolset) -> None:
        """Add a toolset. Raises EnvironmentFailed if two tools have the same name."""
        server = _server(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            if name in self._servers:
                raise EnvironmentFailed(f"two tools have the name {name!r}: rename one")
            self._servers[name] = server, tool.name
            schema = vf.Tool(
                name=name, description=tool.description or "", parameters=tool.input_schema
            )
            self.schemas.append(schema)

    def shared(self) -> "Toolbox":
        """Return a new toolbox with these tools."""
        other = Toolbox()
        other.schemas, other._servers = list(self.schemas), dict(self._servers)
        return other


@asynccontextmanager
async def opened(
    toolsets: Sequence[vf.Toolset],
    *,
    beside: Toolbox | None = None,
    task: vf.TaskData | None = None,
) -> AsyncGenerator[Toolbox]:
    """Set up toolsets, for one `task` or for all; close them at the end.

    The toolbox also has the tools of `beside`.
    """
    box = Toolbox() if beside is None else beside.shared()
    async with AsyncExitStack() as stack:
        for toolset in toolsets:
            _bind_state(toolset)
            await stack.enter_async_context(toolset._exit_stack)  # pyright: ignore[reportPrivateUsage]
            await toolset.setup()
            if task is not None:
                await toolset.setup_task(task)
            await box.add(toolset)
        yield box


def _server(name: str) -> MCPServer:
    """Make a server; prevent it from configuring the process's logging."""
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        return MCPServer(name)
    finally:
        logging.root.removeHandler(handler)


def _bind_state(toolset: Any) -> None:
    """Keep a toolset's state in the calling trace, copied both ways as over the library's HTTP."""

    async def pull() -> vf.State:
        return toolset._state_adapter.validate_json(_calling.get().state.model_dump_json())

    async def push(before: bytes) -> None:
        after, trace = toolset._state_adapter.dump_json(toolset.state), _calling.get()
        if after != before:
            trace.state = type(trace.state).model_validate_json(after)

    toolset._pull_state, toolset._push_state = pull, push


def _told(error: Exception) -> str:
    """Describe a failed call to the model.

    Pydantic's own text is not used: it names its release, which differs.
    """
    cause = error.__cause__
    if isinstance(error, ToolError) and isinstance(cause, ValidationError):
        parts = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in cause.errors()]
        return f"error: the arguments do not fit: {'; '.join(parts)}"
    return str(error)


def _printable(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()
