"""Return freed memory to the system."""

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Return memory that was freed, as by the transport for keys that left, or in a start.

    The C library keeps it otherwise; one without malloc_trim (macOS, musl) always does. It takes milliseconds.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
