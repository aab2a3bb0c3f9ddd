"""How the threads of one process share Python."""

import sys

SWITCH_S = 0.0005
"""How long a thread may keep Python while others want it; by itself 5 ms. A network's single thread wants it
some thousand times a second: beside threads that compute in Python, chunks would hardly move for waiting."""


def share_python() -> None:
    """Have the threads of this process take turns quickly."""
    sys.setswitchinterval(SWITCH_S)
