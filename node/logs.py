"""Logging: one line per event on stderr for people, the same as JSON lines in a file for machines.

Peers' words are in these lines: nothing of them may reach a terminal as a control sequence.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from .config import LogConfig

QUIET = (
    "asyncio",
    "libp2p",
    "multiaddr",
    "verifiers",
    "renderers",
    "httpx",
    "matplotlib",
    "transformers",
    "urllib3",
)
"""Libraries whose chatter below a warning is nobody's business here."""


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
    """One line per record for a terminal: whatever is not printable is shown as an escape."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, on which a message cannot begin another."""
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """A traceback keeps its lines."""
        return "\n".join(_printable(line) for line in super().formatException(ei).split("\n"))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def configure(config: LogConfig, file: Path) -> None:
    """Send the log to stderr and, as JSON lines, to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    console = logging.StreamHandler(sys.stderr)
    plain = PlainLines("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    console.setFormatter(JsonLines() if config.json_lines else plain)
    lines = logging.FileHandler(file, encoding="utf-8")
    lines.setFormatter(JsonLines())
    logging.basicConfig(level=config.level.upper(), handlers=[console, lines], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
