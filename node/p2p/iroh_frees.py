"""A repair of iroh's Python binding: its objects are given back to Rust wherever Python drops them, and that
can be a place where two threads then wait for each other for ever.

Python's garbage collector runs in the middle of anything, also while the binding holds the lock of its table of
callbacks. What it frees there, a stream say, waits for the connection's lock in Rust; and the thread that has
that one may be about to tell Python that a future is done, for which it needs the table. Seen on 2026-11-22:
a trainer whose event loop stood still in SendStream.__del__, under _UniffiHandleMap.remove.

So nothing is freed where it is dropped: one thread that holds no lock does it for all. Delete this file when
tests/node/p2p/test_iroh.py says that the binding no longer needs it.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

NAME = "iroh frees"

_dropped: "SimpleQueue[tuple[Callable[[Any], None], Any]]" = SimpleQueue()
"""(what frees it, the object). put() takes no lock of Python: it is made for destructors."""


def install(binding: Any) -> None:
    """Have one thread free the objects of `binding` (the module iroh.iroh_ffi). Doing it twice is harmless.

    Raises:
        AttributeError: this release of iroh frees in another way, and needs another look.
    """
    if hasattr(binding, "_primerl_frees"):
        return
    owned = [one for one in vars(binding).values() if _is_owned(one)]
    if not owned:
        raise AttributeError("iroh's objects changed: check iroh_frees.py against them")
    for kind in owned:
        kind.__del__ = _deferred(kind.__del__)
    binding._primerl_frees = threading.Thread(target=_free_all, name=NAME, daemon=True)
    binding._primerl_frees.start()


def _is_owned(kind: Any) -> bool:
    """Whether instances stand for something in Rust. Errors do too, but wait for nobody when they go."""
    return isinstance(kind, type) and "__del__" in vars(kind) and not issubclass(kind, Exception)


def _deferred(free: Callable[[Any], None]) -> Callable[[Any], None]:
    def __del__(self: Any) -> None:
        _dropped.put(
            (free, self)
        )  # Python calls this once: the object goes as soon as it is out of the queue

    return __del__


def _free_all() -> None:
    while True:
        free, dropped = _dropped.get()
        free(dropped)
        del free, dropped  # not kept until the next one comes
