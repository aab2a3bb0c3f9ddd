"""The keys of a config as help text: flag, kind, meaning, default.

The docstring below a field in node/config/run.py is its meaning; there is no second place to keep in step.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

WIDTH = 100
INDENT = 8

Docs = Mapping[tuple[str, str], str]


def keys_help(cls: type[BaseModel]) -> str:
    """Every key of `cls`, section by section, as `--section.key KIND`."""
    docs: dict[tuple[str, str], str] = {}
    for source in sorted(_sources(cls)):
        docs |= field_docs(source)
    return "\n".join(_section(cls, "", docs)).strip("\n")


def _sources(cls: type[BaseModel]) -> set[Path]:
    """The files that `cls`, its sections and what they inherit from are written in."""
    package = __name__.partition(".")[0] + "."
    ours = [base for base in cls.__mro__ if base.__module__.startswith(package)]
    found = {Path(inspect.getfile(base)) for base in ours}
    for field in cls.model_fields.values():
        inner = model_in(field.annotation)
        if inner is not None:
            found |= _sources(inner)
    return found


def field_docs(source: Path) -> Docs:
    """Docstrings of fields, by class and field name."""
    docs: dict[tuple[str, str], str] = {}
    classes = [
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    for node in classes:
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[node.name, field.target.id] = " ".join(text.split())
                case _:
                    pass
    return docs


def _section(cls: type[BaseModel], prefix: str, docs: Docs, *, flag: str = "--") -> Iterator[str]:
    sections: list[tuple[str, type[BaseModel], bool]] = []
    tables: list[tuple[str, type[BaseModel]]] = []
    for name, field in cls.model_fields.items():
        path = f"{prefix}{name.replace('_', '-') if flag else name}"
        inner = model_in(field.annotation)
        if inner is not None and get_origin(field.annotation) is not list:
            sections.append((path, inner, field.default is None))
            continue
        if inner is not None:
            tables.append((path, inner))
        meaning = _doc(cls, name, docs)
        default = _default(field.get_default(call_default_factory=True))
        yield f"  {flag}{path} {'JSON' if inner else kind(field.annotation)}"
        text = f"{meaning} {default}".strip()
        yield textwrap.fill(
            text, WIDTH, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT
        )
    for path, inner, optional in sections:
        about = (inner.__doc__ or "").strip().partition("\n")[0]
        off = f" Off unless set; --no-{path} switches it off." if optional else ""
        yield f"\n{path}: {about}{off}"
        yield from _section(inner, f"{path}.", docs)
    for path, inner in tables:
        about = (inner.__doc__ or "").strip().partition("\n")[0]
        yield f"\n[[{path}]]: {about} A table of a TOML file for each, with these keys:"
        yield from _section(inner, "", docs, flag="")


def _doc(cls: type[BaseModel], name: str, docs: Docs) -> str:
    return next((docs[key] for base in cls.__mro__ if (key := (base.__name__, name)) in docs), "")


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is None:
        return "[not set]"
    if isinstance(value, bool):
        return f"[{str(value).lower()}]"
    return f"[{value}]" if value != "" else "[empty]"


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also an optional one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def kind(annotation: Any) -> str:
    """What to write for a value of this type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(arg) for arg in args)
    if origin is list:
        return f"{kind(args[0])}..."
    if origin is tuple:
        return "JSON"
    if origin is dict:
        return "JSON, or --key.NAME VALUE"
    if args:  # Annotated or Optional
        return kind(next(arg for arg in args if arg is not NoneType))
    names = {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}
    return names.get(annotation, "VALUE")
