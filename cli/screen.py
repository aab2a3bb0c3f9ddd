"""Where tables go: a terminal as it is, a pipe at a width that cuts nothing off."""

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

PIPE_WIDTH = 200
UNBOUNDED = 2000
"""Columns of a screen on which a terminal may break lines, but nothing is left out."""
REFRESH_S = 1.0
CLEAR = "\x1b[2J\x1b[H"
"""Empties a terminal."""
SCHEMA = 1
"""Of what `status --json` and `peers --json` print; another number where keys changed their meaning."""

Draw = Callable[[Any, int | None], Any]
"""(answer of a node, columns of the screen or None for as many as it takes) -> what to print."""


def console(*, wide: bool = False) -> Console:
    """Standard output."""
    width = UNBOUNDED if wide else None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False)


def write(renderable: Any) -> None:
    """Print once."""
    console().print(renderable)


def listing(
    node: Path, command: str, draw: Draw, *, as_json: bool, watch: bool, wide: bool = False
) -> None:
    """Print what a node answers to a command: once, or again and again until ctrl-C or the node's end.

    As JSON it is one object, in several lines or, when watched, in one line each time.
    """
    from ..node.ops.control import ask

    wide = wide or not sys.stdout.isatty()

    def current() -> Any:
        return draw(ask(node, command), None if wide else console().width)

    def show() -> None:
        if as_json:
            print(json.dumps(enveloped(node, command), indent=None if watch else 2), flush=True)
            return
        table = current()
        if watch:
            print(CLEAR if sys.stdout.isatty() else f"{datetime.now():%Y-%m-%d %H:%M:%S}")
        console(wide=wide).print(table, crop=False)
        sys.stdout.flush()

    if watch and not wide and not as_json:
        _redraw(current)
    show()
    while watch:
        time.sleep(REFRESH_S)
        show()


def enveloped(node: Path, command: str) -> dict[str, Any]:
    """A node's answer, with the run that it is of and the time (Unix seconds) of the answer."""
    from ..node.ops.control import ask

    answer = ask(node, command)
    status = answer if command == "status" else ask(node, "status")
    return {
        "schema": SCHEMA,
        "run": status["run"],
        "time": round(time.time(), 3),
        command: answer,
    }


def _redraw(draw: Callable[[], Any]) -> None:
    """Draw in place until ctrl-C or the node's end (a NetworkError out of `draw`)."""
    with Live(draw(), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(draw(), refresh=True)
