"""Where tables go: a terminal as it is, a pipe at a width that cuts nothing off."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live

PIPE_WIDTH = 200
REFRESH_S = 1.0


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def write(renderable: Any) -> None:
    """Print once."""
    console().print(renderable)


def refresh(draw: Callable[[], Any]) -> None:
    """Draw again and again until ctrl-C or the node's end (a NetworkError out of `draw`)."""
    screen = console()
    with Live(draw(), console=screen, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(draw(), refresh=True)
