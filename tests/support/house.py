"""The package as test_house.py sees it: its files, and who imports what and when. Nothing is imported to know.

What git ignores is not part of the house; folders are walked, so that a test needs no git.
"""

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"build", "dist", "outputs", "__pycache__"}
ROOMS = ("cli", "configs", "crypto", "node", "protocol")
TEXT = {".py", ".toml", ".md", ".txt", ".sh", ".json", ".cfg", ".yaml", ".yml"}


@dataclass(frozen=True)
class Import:
    """One import: what is named, from the root where it is relative, and when it happens."""

    module: str
    relative: bool
    line: int
    lazy: bool
    """Inside a function: it happens when that is called."""
    checking: bool
    """Under TYPE_CHECKING: it never happens."""


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """From the root, with slashes."""
    text: str

    @property
    def module(self) -> str:
        """Dotted name without `primerl.`; a folder for its __init__."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of the file."""
        return list(_imports(self.tree, self._package(), lazy=False, checking=False))

    def _package(self) -> list[str]:
        return self.path.split("/")[:-1]


def walk(*suffixes: str) -> Iterator[Path]:
    """Files of the repository with one of these suffixes."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = sorted(
            name
            for name in inner
            if name not in NOT_OURS and not name.startswith(".") and not name.endswith(".egg-info")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in suffixes and not name.startswith("."):
                yield path


def sources(*rooms: str) -> list[Source]:
    """Python files below some top folders; without any, all of the repository."""
    found = [(path.relative_to(ROOT).as_posix(), path) for path in walk(".py")]
    return [
        Source(name, path.read_text())
        for name, path in found
        if not rooms or name.partition("/")[0] in rooms
    ]


def _imports(node: ast.AST, package: list[str], *, lazy: bool, checking: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, False, child.lineno, lazy, checking)
        elif isinstance(child, ast.ImportFrom):
            for module in _from(child, package):
                yield Import(module, bool(child.level), child.lineno, lazy, checking)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from _imports(child, package, lazy=lazy, checking=True)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, lazy=lazy or inside, checking=checking)


def _from(statement: ast.ImportFrom, package: list[str]) -> list[str]:
    module = statement.module or ""
    if not statement.level:
        return [module]
    base = [*package[: len(package) - statement.level + 1], *(module.split(".") if module else [])]
    # `from . import x` may name a file: whoever resolves it tries the longer name first.
    return [".".join([*base, alias.name]) for alias in statement.names]


class House:
    """The package's modules and the arrows between them."""

    def __init__(self, files: list[Source]) -> None:
        self.files = {source.module: source for source in files}

    def target(self, module: str) -> str | None:
        """The file that an import of ours names: a module, or one that defines the name."""
        while module and module not in self.files:
            module = module.rpartition(".")[0]
        return module or None

    def arrows(
        self, *, lazy: bool = True, checking: bool = False
    ) -> Iterator[tuple[str, str, Import]]:
        """(importer, imported, how) within the house."""
        for name, source in self.files.items():
            for one in source.imports:
                if one.relative and (lazy or not one.lazy) and (checking or not one.checking):
                    target = self.target(one.module)
                    if target is not None and target != name:
                        yield name, target, one

    def eager(self, module: str) -> set[str]:
        """Outside top-level packages that importing `module` loads, through whatever it imports."""
        return self._eager[module]

    @cached_property
    def _eager(self) -> dict[str, set[str]]:
        graph = {name: set[str]() for name in self.files}
        for name, target, _ in self.arrows(lazy=False):
            graph[name].add(target)
        return {name: set(self._loads(reachable(graph, name))) for name in graph}

    def _loads(self, modules: set[str]) -> Iterator[str]:
        for name in modules:
            for one in self.files[name].imports:
                top = one.module.partition(".")[0]
                if not (one.relative or one.lazy or one.checking or top in sys.stdlib_module_names):
                    yield top


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """`start` and everything that arrows lead to from it."""
    seen: set[str] = set()
    left = [start]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left.extend(graph[name])
    return seen


def calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file, with the dotted name of what is called."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


def switches(source: Source, name: str) -> Iterator[tuple[int, ast.expr]]:
    """Every value that a file gives to an argument, key or variable of this name."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg == name:
            yield node.value.lineno, node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    yield value.lineno, value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if ast.unparse(target).rpartition(".")[2] == name:
                    yield node.lineno, node.value
