"""A repair of iroh's Python binding: it copies `bytes` arguments one byte at a time.

That caps a stream at 5-9 MB/s; one memmove instead makes it 350 MB/s. Delete this file when
tests/node/p2p/test_iroh.py says that the binding no longer needs it.
"""

import ctypes
from typing import Any, Protocol


class _Builder(Protocol):
    """What the binding's _UniffiRustBufferBuilder offers here."""

    rbuf: Any

    def _reserve(self, num_bytes: int) -> Any: ...


def write_whole(builder: _Builder, value: bytes) -> None:
    """Append `value` to the builder's native buffer in one copy.

    Replaces a loop of the binding with the same contract: _reserve() makes room for that many bytes
    behind rbuf.len on entry and moves rbuf.len past them on exit.
    """
    size = len(value)
    with builder._reserve(size):  # pyright: ignore[reportPrivateUsage]
        start = ctypes.cast(builder.rbuf.data, ctypes.c_void_p).value
        if size and start is not None:
            ctypes.memmove(start + builder.rbuf.len, bytes(value), size)


def install(binding: Any) -> None:
    """Replace the slow copy in `binding` (the module iroh.iroh_ffi). Doing it twice is harmless.

    Raises:
        AttributeError: this release of iroh has no such class, and needs another look.
    """
    builder = binding._UniffiRustBufferBuilder
    if not hasattr(builder, "_reserve") or not hasattr(builder, "write"):
        raise AttributeError("iroh's buffer builder changed: check iroh_bytes.py against it")
    builder.write = write_whole
