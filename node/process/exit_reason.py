"""Explain why a process ended, from its exit code and last log lines. No I/O."""

import re
import signal
from collections.abc import Sequence

Causes = Sequence[tuple[str, str]]
"""Regular expressions over log lines, each with its meaning and a remedy; the first match counts.

The words may name groups of the expression, as `\\1`.
"""

CROWDED = "less GPU memory is free than vLLM was told to take"
"""Begins the meaning of a start that fails until something else leaves the GPU, or the setting is lower."""
LOOK = "look at its log lines above"


def exit_reason(
    process: str,
    code: int | None,
    lines: Sequence[str],
    *,
    causes: Causes = (),
    memory_advice: str = "free memory",
) -> str:
    """Explain the end of `process` to the operator in one sentence.

    `code` is negative for a signal and None while the process runs, as in asyncio. A cause found in `lines`
    takes precedence. `memory_advice` is the remedy if memory ran out.
    """
    if cause := known_cause(lines, causes):
        return cause
    if code is not None and code < 0:
        return f"{process} {_by_signal(-code, memory_advice)}"
    last = f" ({lines[-1]})" if lines else ""
    ended = "broke" if code is None else f"ended with exit code {code}"
    return f"{process} {ended}{last}: {LOOK}"


def known_cause(lines: Sequence[str], causes: Causes) -> str:
    """Return the meaning of the first of `causes` that matches any line, or an empty string."""
    for pattern, words in causes:
        for line in lines:
            if match := re.search(pattern, line):
                return match.expand(words)
    return ""


def signal_name(number: int) -> str:
    """Name a signal, even one unknown to this system."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _by_signal(number: int, memory_advice: str) -> str:
    match number:
        case signal.SIGKILL:
            return (
                "was killed from outside: unless you did that, the machine ran out of memory, "
                f"{memory_advice}"
            )
        case signal.SIGBUS:
            return "found no room in shared memory: give the container more (docker: --shm-size)"
        case signal.SIGTERM:
            return "was asked to end from outside"
        case _:
            return f"crashed ({signal_name(number)}): {LOOK}"
