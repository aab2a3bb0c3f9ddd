"""Logging: one line per event on stderr for people, the same as JSON lines in a file for machines.

Lines may hold text from peers: none of it may reach a terminal as a control sequence.
"""

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ..config.run import LogConfig
from ..errors import file_error

QUIET = (
    "asyncio",
    "libp2p",
    "multiaddr",
    "verifiers",
    "renderers",
    "httpx",
    "openai",
    "datasets",
    "fsspec",
    "filelock",
    "matplotlib",
    "transformers",
    "urllib3",
)
"""Libraries that are logged from warnings on."""


@dataclass(frozen=True)
class LogLimits:
    """Size of a log."""

    max_bytes: int = 16 * 2**20
    """A log file that would grow beyond this is renamed to NAME.1, and a new one begins."""
    keep: int = 4
    """Rotated log files that are kept."""


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Time (Unix seconds), level, logger and message; a traceback where there is one."""
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("primerl.node."),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class PlainLines(logging.Formatter):
    """One line per record for a terminal; unprintable characters are shown as escapes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line; a message cannot begin a new one."""
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Format a traceback, which keeps its lines."""
        return "\n".join(_printable(line) for line in super().formatException(ei).split("\n"))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConsoleLines(logging.StreamHandler[Any]):
    """The log on stderr. A failure to write there can be reported nowhere else."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a line that could not be written; show a mistake in our own call."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class FileLines(RotatingFileHandler):
    """The log in a file, rotated by size. On a full disk lines are lost, and one line on stderr says so."""

    def __init__(self, file: Path, limits: LogLimits) -> None:
        super().__init__(file, maxBytes=limits.max_bytes, backupCount=limits.keep, encoding="utf-8")
        self._failed = False
        """Report that the current line could not be written."""
        self._failing = False

    def _open(self) -> TextIOWrapper:
        """Open a file that its owner alone can read: addresses of peers are in it."""
        file = open(self.baseFilename, "a", encoding=self.encoding, opener=_private)
        return file

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, in a new file if this one is full."""
        self._failed = False
        super().emit(record)
        if self._failing and not self._failed:
            self._failing = False
            _say(f"the log is written to {self.baseFilename} again")

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that the file cannot be written; the next line opens it anew."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._failed = True
        # its buffer would be written again with the next line, and fail again
        stream, self.stream = self.stream, None  # pyright: ignore[reportAttributeAccessIssue]
        if stream:
            with suppress(OSError):
                stream.close()
        if not self._failing:
            self._failing = True
            why = error.strerror or error
            _say(f"the log cannot be written to {self.baseFilename} ({why}): its lines are lost")

    def close(self) -> None:
        """Close the file; its last lines may be lost."""
        with suppress(OSError):
            super().close()


def newest_lines(count: int = 200, most: int = 1 << 18) -> list[object]:
    """Return the newest lines of this process's log file, oldest first, decoded; of its last `most` bytes."""
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, FileLines)]
    if not files:
        return []
    try:
        lines = read_newest(Path(files[0].baseFilename), most).splitlines()[-count:]
    except OSError:
        return []  # rotated just now
    decoded: list[object] = []
    for line in lines:
        with suppress(ValueError):  # the last may not be written whole yet
            decoded.append(json.loads(line))
    return decoded


def read_newest(path: Path, most: int) -> bytes:
    """Read the last `most` bytes of a file, whole lines of a longer one. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        data = file.read(most)
    return data.partition(b"\n")[2] if size > most else data


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _say(line: str) -> None:
    with suppress(OSError):
        print(f"primerl-node: {line}", file=sys.stderr, flush=True)


def configure(config: LogConfig, file: Path, limits: LogLimits = LogLimits()) -> None:
    """Send the log to stderr and, as JSON lines, to `file`. Raises StorageError."""
    console = ConsoleLines(sys.stderr)
    plain = PlainLines("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    console.setFormatter(JsonLines() if config.json_lines else plain)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = FileLines(file, limits)
    except OSError as error:
        raise file_error(error) from error
    lines.setFormatter(JsonLines())
    logging.basicConfig(handlers=[console, lines], force=True)
    set_level(config)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def set_level(config: LogConfig) -> None:
    """Log from the level of `config` on."""
    logging.getLogger().setLevel(config.level.upper())
