"""The tools that a chat may call, read from a request. They are shown to the model by its template, and nothing
here runs one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import bad
from .fields import Fields
from .replies import TOOL_NAME, Tool

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
"""Of all tools together, as JSON."""
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
FORCED = "a call cannot be forced, as output is not constrained: use auto, or none"
UNREADABLE_FORM = (
    "it is not known how this model writes a call of a tool (api.reply_form of the server): describe tools in "
    "the messages, and read the reply"
)


def read_tools(fields: Fields, *, readable: bool) -> tuple[Tool, ...]:
    """Take the fields of tools; none with tool_choice `none`. `readable`: the server can read calls.

    Raises ApiError.
    """
    tools = _tools(fields.take("tools"))
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad("tool_choice", f"not supported ({FORCED})", code="unsupported_parameter")
    if choice == "none":
        return ()
    if tools and not readable:
        raise bad("tools", f"not supported ({UNREADABLE_FORM})", code="unsupported_parameter")
    return tools


def _tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise bad("tools", f"give a list of at most {MAX_TOOLS} tools")
    tools = tuple(_tool(one, f"tools[{index}]") for index, one in enumerate(value))
    try:
        size = len(msgspec.json.encode(tools))
    except RecursionError as error:
        raise bad("tools", "the schemas are nested too deep: flatten them") from error
    if size > MAX_TOOLS_BYTES:
        raise bad("tools", f"all tools together have {size} bytes, at most {MAX_TOOLS_BYTES} fit")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise bad("tools", "two tools have the same name")
    return tools


def _tool(value: Any, name: str) -> Tool:
    """One tool, as templates take it: type and function, of this its name, description and parameters."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type") != "function":
        raise bad(name, "give the type function, and a function with a name")
    if set(value) - {"type", "function"} or set(function) - FUNCTION_FIELDS:
        raise bad(name, f"only a function is known, with {', '.join(sorted(FUNCTION_FIELDS))}")
    if function.get("strict"):
        raise bad(f"{name}.function.strict", "not supported (output is not constrained)")
    named = function.get("name")
    if not isinstance(named, str) or not TOOL_NAME.fullmatch(named):
        raise bad(f"{name}.function.name", "give 1 to 128 letters, digits or any of _ . : -")
    kinds = {"description": str, "parameters": Mapping}
    for field, kind in kinds.items():
        if not isinstance(function.get(field), kind | None):
            raise bad(f"{name}.function.{field}", "give a text, or the JSON schema of an object")
    kept = {field: function[field] for field in kinds if function.get(field) is not None}
    return {"type": "function", "function": {"name": named, **kept}}
