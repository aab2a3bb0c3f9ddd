"""Shorten the interpreter's switch interval so that a network thread is not starved."""

import sys

SWITCH_S = 0.0005
"""Longest turn of a thread while others wait; Python's default is 5 ms. A network thread needs the interpreter
some thousand times a second: beside threads that compute, chunks would hardly move with the default."""


def share_python() -> None:
    """Let the threads of this process take short turns."""
    sys.setswitchinterval(SWITCH_S)
