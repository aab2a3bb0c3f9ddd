"""One environment x one model: its results on the disk, by what was measured: no cell is measured twice.

The key covers everything that the rollouts follow from: a cell that is found is the cell that was wanted.
"""

import re
from pathlib import Path
from typing import Any

import msgspec

from ...crypto.hashing import derive
from ..errors import StorageError
from .figures import Figures
from .rollouts import Rollout

UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
FORM = 1
"""Of the key: another meaning of the same settings takes the next number."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says of a model."""

    key: str
    environment: str
    model: str
    kind: str
    """`local` or `api`."""
    identity: str
    """Of the model: what its files hold, or how it is asked."""
    step: int | None = None
    seed: int
    seconds: float
    rollouts: str
    """The file with every rollout, in the directory of the results."""
    figures: Figures

    @property
    def counts(self) -> bool:
        """Whether anything was measured: a cell that failed all over is measured again next time."""
        return self.figures.failed < 1


def cell_key(**settings: Any) -> str:
    """Hex digest of what a cell follows from; JSON values."""
    encoded = msgspec.json.encode({"form": FORM, **settings}, order="deterministic")
    return derive("evaluation cell", encoded).hex()[:32]


class CellStore:
    """The cells of one directory of results."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, key: str) -> Cell | None:
        """The finished cell of that key. Raises StorageError if it is there but unreadable."""
        path = self._path(key)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Cell)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise StorageError(f"{path} cannot be read ({error}): delete it") from error

    def rollouts_file(self, model: str, environment: str, key: str) -> str:
        """Where the rollouts of a cell go, from the directory of the results."""
        name = "--".join(
            UNSAFE.sub("-", one)[:80].strip("-.") or "x" for one in (model, environment)
        )
        return f"rollouts/{name}--{key[:8]}.jsonl"

    def write_rollouts(self, file: str, rollouts: list[Rollout]) -> None:
        """All rollouts of a cell, in their order. Raises StorageError."""
        lines = b"".join(msgspec.json.encode(one) + b"\n" for one in rollouts)
        self._write(self._directory / file, lines)

    def keep(self, cell: Cell) -> None:
        """Remember a finished cell; its rollouts are there. Raises StorageError."""
        self._write(self._path(cell.key), msgspec.json.encode(cell))

    def write_results(self, cells: list[Cell]) -> Path:
        """results.json: these cells. Raises StorageError."""
        path = self._directory / "results.json"
        encoded = msgspec.json.encode({"cells": cells})
        self._write(path, msgspec.json.format(encoded, indent=2) + b"\n")
        return path

    def _path(self, key: str) -> Path:
        return self._directory / "cells" / f"{key}.json"

    def _write(self, path: Path, data: bytes) -> None:
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            partial.replace(path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
