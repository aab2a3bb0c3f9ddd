"""What the threads of a process share: short turns, so that none starves, and one turn at importing."""

import sys
import threading

SWITCH_S = 0.0001
"""Longest turn of a thread while others wait; Python's default is 5 ms.

A network thread needs the interpreter some thousand times a second, and so does one that launches kernels: most
of torch's operations release the interpreter, and get it back after a turn of the others. Beside a thread of
plain Python a step of 224 operations took 1,012 ms with the default, 76 with half a millisecond, 10 with this.
"""

importing = threading.RLock()
"""Held by a thread while it imports a part of torch or transformers.

Two threads of which each begins with another module of a library fail: who imports a module does not wait for a
package that another thread is importing, and importlib takes that out of sys.modules for a moment in the end
(KeyError: 'transformers.models').
"""


def share_python() -> None:
    """Let the threads of this process take short turns."""
    sys.setswitchinterval(SWITCH_S)
