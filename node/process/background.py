"""Do side work in a thread of its own, so that work which fails or hangs never holds up its caller."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundThread:
    """Runs functions in order, in a daemon thread; at most `capacity` calls wait.

    Nothing that is called here may matter to the caller: a failure is logged and counted, and a call
    that finds no room is dropped and counted. A call that never returns costs the calls after it, no more.
    """

    def __init__(self, name: str, capacity: int) -> None:
        """`name` appears in the log."""
        self._name = name
        self._capacity = capacity
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.failed = 0
        """Calls that raised."""
        self.dropped = 0
        """Calls that found no room, or were left when the deadline of close() passed."""

    def put(self, call: Callable[[], None]) -> bool:
        """Queue `call` after those before it; False if there is no room for it. Never waits."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._capacity:
                self._drop(1)
                return False
            self._waiting.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
                self._thread.start()
            self._changed.notify()
            return True

    def close(self, deadline_s: float) -> bool:
        """Wait until everything was called, or `deadline_s` seconds; returns whether everything was."""
        until = time.monotonic() + deadline_s
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return True
        thread.join(max(0.0, until - time.monotonic()))
        if not thread.is_alive():
            return True
        with self._changed:
            dropped = len(self._waiting) + 1
            self._waiting.clear()
            self._drop(dropped)
        logger.warning(
            "%s did not finish within %.0f s: %d calls are given up",
            self._name,
            deadline_s,
            dropped,
        )
        return False

    def _drop(self, count: int) -> None:
        if not self.dropped and not self._closed:
            logger.warning("%s is too slow: further calls are dropped", self._name)
        self.dropped += count

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                call = self._waiting.popleft()
            try:
                call()
            except Exception as error:  # whatever side work raises must not end the thread
                self.failed += 1
                logger.warning("%s failed: %s", self._name, error or type(error).__name__)
