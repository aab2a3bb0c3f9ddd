"""Metrics: one JSON object per step in `metrics.jsonl`, always written; and seconds by phase."""

import json
import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import file_error


class MetricsLog:
    """Appends one line per step; a line is whole or absent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line: step, Unix time (if `values` have none), and the values. Raises StorageError."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        try:
            self._file.write(json.dumps(line, sort_keys=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise file_error(error, self._path) from error

    def go_back(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the lines of steps up to `step`, from where the run goes on: what came later is made again.

        `values` are those of `step` as its checkpoint has them, written if the process was gone before it had
        written the line itself; none are, if there are none.
        """
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            self._replace(kept)
        there = (json.loads(line) for line in kept if _step_of(line) == step)
        if values and not any(values.keys() <= line.keys() for line in there):
            self.write(step, values)

    def _replace(self, lines: list[str]) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        partial.replace(self._path)
        self._file.close()
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what could not be written was told when it could not
            self._file.close()


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a torn line is of no step


class PhaseClock:
    """Seconds spent by phase; phases may nest and repeat."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time inside to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
