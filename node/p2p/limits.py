"""Token buckets: how much of something a peer may use, and how fast we send bytes. Time is an argument."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from ipaddress import ip_address

from ...crypto.hashing import digest
from ...protocol.recent import RecentDict
from ...protocol.version import KIB, MAX_GOSSIP

BYTES_PER_MEGABIT = 125_000


class TokenBuckets:
    """One token bucket per id, `rate` tokens a second up to `burst`; at most `limit` ids are kept.

    A forgotten id starts again with a full bucket, so `limit` has to exceed the ids that can be
    active within `burst / rate` seconds.
    """

    def __init__(self, rate: float, burst: float, limit: int) -> None:
        self._rate = rate
        self._burst = burst
        self._levels = RecentDict[bytes, tuple[float, float]](limit)

    def take(self, key: bytes, now: float) -> bool:
        """Spend one token of `key` at `now` (seconds, monotonic) if it has one."""
        level = self._level(key, now)
        self._keep(key, level - 1 if level >= 1 else level, now)
        return level >= 1

    def debt(self, key: bytes, now: float, tokens: float) -> float:
        """Spend `tokens` without a check; return the seconds until the bucket is out of debt again."""
        level = self._level(key, now) - tokens
        self._keep(key, level, now)
        return max(0.0, -level / self._rate)

    def _level(self, key: bytes, now: float) -> float:
        level, since = self._levels.get(key, (self._burst, now))
        return min(self._burst, level + (now - since) * self._rate)

    def _keep(self, key: bytes, level: float, now: float) -> None:
        self._levels[key] = (level, now)


class Pacer:
    """Spread bytes in one direction over time; without a rate, never wait.

    What goes out of our own (submissions) has the line first: while some of it goes, no chunk upload begins.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._turn = asyncio.Lock()
        self._own = 0
        self.set_rate(bytes_per_second)

    def set_rate(self, bytes_per_second: float) -> None:
        """Change the rate from now on; 0: none."""
        rate = self.rate = bytes_per_second
        self._bucket = TokenBuckets(rate, rate, limit=1) if rate else None

    async def pace(self, size: int) -> None:
        """Wait until `size` bytes may go."""
        await asyncio.sleep(self.charge(size))

    def charge(self, size: int) -> float:
        """Count `size` bytes that go or went; return the seconds until all that was counted had its time."""
        return self._bucket.debt(b"", time.monotonic(), size) if self._bucket else 0.0

    @property
    def exhausted(self) -> bool:
        """Whether more bytes went than the rate allows until now."""
        return self.charge(0) > 0.0

    def sharers(self, least: float, most: int) -> int:
        """Count the transfers that may share the rate, with `least` bytes a second for each: 1 to `most`."""
        return max(1, min(most, int(self.rate / least))) if self.rate else most

    @asynccontextmanager
    async def own(self) -> AsyncGenerator[None]:
        """Have the line first during the block; where there is a rate, one such block at a time."""
        if not self.rate:
            yield
            return
        self._own += 1
        try:
            async with self._turn:
                yield
        finally:
            self._own -= 1

    @property
    def is_taken(self) -> bool:
        """Whether an own() block has the line, or waits for it."""
        return self._own > 0


class Rates:
    """The two directions of a node's line, as its owner limits them."""

    def __init__(self, upload_mbps: float = 0.0, download_mbps: float = 0.0) -> None:
        """Megabits/s; 0: no limit."""
        self.up, self.down = Pacer(), Pacer()
        self.set(upload_mbps, download_mbps)

    def set(self, upload_mbps: float, download_mbps: float) -> None:
        """Change both from now on."""
        self.up.set_rate(upload_mbps * BYTES_PER_MEGABIT)
        self.down.set_rate(download_mbps * BYTES_PER_MEGABIT)


def network_of(address: str) -> str:
    """Return the part of an IP address that one customer of a provider has: /24, or /48 of IPv6.

    Empty for loopback, and where there is no address.
    """
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:
        return ""
    return f"{ip.version}:{ip.packed[: 3 if ip.version == 4 else 6].hex()}"


NEIGHBOUR_RATE = 16.0
"""Facts per second that one neighbour may send us, its own and relayed ones together."""
NEIGHBOUR_BURST = 64.0
ORIGIN_RATE = 4.0
"""Facts per second that one signer may spread: a flood must not use up the allowance of its relay."""
ORIGIN_BURST = 32.0
BYTE_RATE = 128.0 * KIB
"""Bytes per second that are read from one neighbour; the rest waits in its own send buffer."""
BYTE_BURST = 512.0 * KIB
KNOWN_IDS = 1024
KNOWN_FACTS = 4096


class RecentSet:
    """The last `limit` different keys; looking one up does not refresh it, so repetition cannot pin a key."""

    def __init__(self, limit: int) -> None:
        self._keys = RecentDict[bytes, None](limit)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """Remember `key`, and forget the oldest beyond the limit."""
        if key not in self._keys:
            self._keys[key] = None


class GossipFilter:
    """Decide which gossiped contents come in; `dropped` counts the others by reason."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._bytes = TokenBuckets(BYTE_RATE, BYTE_BURST, KNOWN_IDS)
        self._neighbours = TokenBuckets(NEIGHBOUR_RATE, NEIGHBOUR_BURST, KNOWN_IDS)
        self._origins = TokenBuckets(ORIGIN_RATE, ORIGIN_BURST, KNOWN_IDS)
        self._seen = RecentSet(KNOWN_FACTS)

    def pause(self, neighbour: bytes, size: int, now: float) -> float:
        """Return the seconds to leave `neighbour` unread after a frame of `size` bytes."""
        return self._bytes.debt(neighbour, now, size)

    def admits(self, neighbour: bytes, data: bytes, now: float) -> bool:
        """Do the cheap checks, before a signature is verified. A repeat uses up allowance too."""
        if not self._neighbours.take(neighbour, now):
            return self._drop("neighbour_rate")
        if len(data) > MAX_GOSSIP:
            return self._drop("too_large")
        return digest(data) not in self._seen or self._drop("repeated")

    def accepts(self, origin: bytes, data: bytes, now: float) -> bool:
        """Do the last check, once `origin` is known to have signed `data`; True if it is accepted."""
        if len(data) > MAX_GOSSIP:
            return self._drop("too_large")
        if not self._origins.take(origin, now):
            return self._drop("origin_rate")
        self._seen.add(digest(data))
        return True

    def knows(self, data: bytes) -> None:
        """Remember our own fact, so that it is not news when it comes back."""
        self._seen.add(digest(data))

    def _drop(self, reason: str) -> bool:
        self.dropped[reason] += 1
        return False
