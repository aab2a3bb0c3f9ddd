"""What a gossiping node lets strangers spend: facts and bytes by id, and which contents it has seen.

Everything here is bounded in memory whatever ids or contents are made up; time is an argument.
"""

from collections import Counter, OrderedDict

from ...crypto.hashing import digest
from ...protocol.version import KIB, MAX_GOSSIP
from .limits import TokenBuckets

NEIGHBOUR_RATE = 16.0
"""Facts a second that one neighbour may hand us, its own and relayed ones alike."""
NEIGHBOUR_BURST = 64.0
ORIGIN_RATE = 4.0
"""Facts a second that one signer may spread: a flood must not use up its relay's allowance."""
ORIGIN_BURST = 32.0
BYTE_RATE = 128.0 * KIB
"""Bytes a second that are read from one neighbour; the rest waits in its own send buffer."""
BYTE_BURST = 512.0 * KIB
KNOWN_IDS = 1024
KNOWN_FACTS = 4096


class RecentSet:
    """The last `limit` different keys; asking refreshes nothing, so repetition cannot pin a key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember `key`, and forget the oldest beyond the limit."""
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)


class Gate:
    """Decides which gossiped contents come in; `dropped` counts the others by reason."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._bytes = TokenBuckets(BYTE_RATE, BYTE_BURST, KNOWN_IDS)
        self._neighbours = TokenBuckets(NEIGHBOUR_RATE, NEIGHBOUR_BURST, KNOWN_IDS)
        self._origins = TokenBuckets(ORIGIN_RATE, ORIGIN_BURST, KNOWN_IDS)
        self._seen = RecentSet(KNOWN_FACTS)

    def pause(self, neighbour: bytes, size: int, now: float) -> float:
        """Seconds to leave `neighbour` unread after a frame of `size` bytes."""
        return self._bytes.debt(neighbour, now, size)

    def admits(self, neighbour: bytes, data: bytes, now: float) -> bool:
        """The cheap checks, before a signature is verified. A repeat spends an allowance too."""
        if not self._neighbours.take(neighbour, now):
            return self._drop("neighbour_rate")
        if len(data) > MAX_GOSSIP:
            return self._drop("too_large")
        return digest(data) not in self._seen or self._drop("repeated")

    def accepts(self, origin: bytes, data: bytes, now: float) -> bool:
        """The last check, once `origin` is known to have signed `data`; True takes it in."""
        if len(data) > MAX_GOSSIP:
            return self._drop("too_large")
        if not self._origins.take(origin, now):
            return self._drop("origin_rate")
        self._seen.add(digest(data))
        return True

    def knows(self, data: bytes) -> None:
        """Our own fact: it is not news when it comes back."""
        self._seen.add(digest(data))

    def _drop(self, reason: str) -> bool:
        self.dropped[reason] += 1
        return False
