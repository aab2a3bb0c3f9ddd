"""Metrics: one JSON object per step in `metrics.jsonl`, always written; and seconds by phase."""

import json
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends one line per step; a line is whole or absent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line: step, Unix time, and the values."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line, sort_keys=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
