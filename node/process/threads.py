"""Shorten the interpreter's switch interval so that threads do not starve each other."""

import sys

SWITCH_S = 0.0001
"""Longest turn of a thread while others wait; Python's default is 5 ms.

A network thread needs the interpreter some thousand times a second, and so does one that launches kernels: most
of torch's operations release the interpreter, and get it back after a turn of the others. Beside a thread of
plain Python a step of 224 operations took 1,012 ms with the default, 76 with half a millisecond, 10 with this.
"""


def share_python() -> None:
    """Let the threads of this process take short turns."""
    sys.setswitchinterval(SWITCH_S)
