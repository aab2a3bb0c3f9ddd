"""Who waits for which chunk: requests that a fetch of ours will satisfy, and watches of what we hold.

A chunk is announced here only after it was verified and is in the store.
"""

import asyncio
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager


class ChunkWatch:
    """Which of some chunks are held: bit i % 8 of byte i // 8 of `held` stands for the i-th."""

    def __init__(self, names: Sequence[bytes]) -> None:
        self._index = {name: number for number, name in enumerate(names)}
        self._size = len(names)
        self._count = 0
        self._held = bytearray((len(names) + 7) // 8)
        self.news = asyncio.Event()
        """Set when a chunk was added, or the watch is over; whoever reads clears it."""
        self.over = False
        """Nobody listens any more."""

    @property
    def held(self) -> bytes:
        """The bitmap as of now."""
        return bytes(self._held)

    @property
    def complete(self) -> bool:
        """Whether all of them are held."""
        return self._count == len(self._index)

    @property
    def size(self) -> int:
        """How many chunks are watched."""
        return self._size

    def add(self, name: bytes) -> None:
        """A chunk is held; one that is not watched changes nothing."""
        number = self._index.get(name)
        if number is None or self._held[number // 8] >> number % 8 & 1:
            return
        self._held[number // 8] |= 1 << number % 8
        self._count += 1
        self.news.set()


class ChunkArrivals:
    """Tells those who wait that a chunk is here."""

    def __init__(self) -> None:
        self._events: dict[bytes, asyncio.Event] = {}
        self._waiting: Counter[asyncio.Event] = Counter()
        self._expected: Counter[bytes] = Counter()
        self._watches: set[ChunkWatch] = set()

    @property
    def watched(self) -> int:
        """Chunks of all watches together: what they cost in memory."""
        return sum(watch.size for watch in self._watches)

    def expected(self, name: bytes) -> bool:
        """Whether we are fetching this chunk ourselves."""
        return self._expected[name] > 0

    @contextmanager
    def expecting(self, names: Iterable[bytes]) -> Generator[None]:
        """While we fetch these chunks."""
        names = tuple(names)
        self._expected.update(names)
        try:
            yield
        finally:
            for name in names:
                self._expected[name] -= 1
                if not self._expected[name]:
                    del self._expected[name]

    @contextmanager
    def watching(self, names: Sequence[bytes]) -> Generator[ChunkWatch]:
        """A watch that hears of every chunk from now on; the caller adds what is held already."""
        watch = ChunkWatch(names)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def arrived(self, name: bytes) -> None:
        """Wake all who wait for this chunk."""
        event = self._events.pop(name, None)
        if event is not None:
            event.set()
        for watch in self._watches:
            watch.add(name)

    async def wait(self, name: bytes, timeout: float) -> None:
        """Wait for a chunk; returns silently at the timeout."""
        event = self._events.setdefault(name, asyncio.Event())
        self._waiting[event] += 1
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass  # the caller looks for itself
        finally:
            self._waiting[event] -= 1
            if not self._waiting[event]:
                del self._waiting[event]
                if self._events.get(name) is event:
                    del self._events[name]
