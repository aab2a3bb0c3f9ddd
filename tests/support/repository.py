"""Find the files of the repository, and names in their source."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"build", "dist", "outputs", "__pycache__"}


def walk(*suffixes: str) -> Iterator[Path]:
    """Yield the files with one of these suffixes, without hidden and generated folders."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = sorted(
            name
            for name in inner
            if name not in GENERATED and not name.startswith(".") and not name.endswith(".egg-info")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in suffixes and not name.startswith("."):
                yield path


def dotted(node: ast.expr) -> str:
    """`a.b` of such an expression; only the end of one whose start is no name: ast.unparse() takes seconds."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
