"""Token buckets: how much of something a peer may use, and how fast we let bytes out. Time is an argument."""

import asyncio
import time
from collections import OrderedDict
from ipaddress import ip_address


class TokenBuckets:
    """One token bucket per id, `rate` tokens a second up to `burst`; at most `limit` ids are kept.

    A forgotten id starts again with a full bucket, so `limit` has to exceed the ids that can be
    active within `burst / rate` seconds.
    """

    def __init__(self, rate: float, burst: float, limit: int) -> None:
        self._rate = rate
        self._burst = burst
        self._limit = limit
        self._levels: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def take(self, key: bytes, now: float) -> bool:
        """Spend one token of `key` at `now` (seconds, monotonic) if it has one."""
        level = self._level(key, now)
        self._keep(key, level - 1 if level >= 1 else level, now)
        return level >= 1

    def debt(self, key: bytes, now: float, tokens: float) -> float:
        """Spend `tokens` whatever is there; the seconds until the bucket is out of debt again."""
        level = self._level(key, now) - tokens
        self._keep(key, level, now)
        return max(0.0, -level / self._rate)

    def _level(self, key: bytes, now: float) -> float:
        level, since = self._levels.get(key, (self._burst, now))
        return min(self._burst, level + (now - since) * self._rate)

    def _keep(self, key: bytes, level: float, now: float) -> None:
        self._levels[key] = (level, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self._limit:
            self._levels.popitem(last=False)


class Pacer:
    """Spreads uploads over time; without a rate it never waits."""

    def __init__(self, bytes_per_second: float) -> None:
        rate = bytes_per_second
        self._bucket = TokenBuckets(rate, rate, limit=1) if rate else None

    async def pace(self, size: int) -> None:
        """Wait until `size` bytes may go out."""
        if self._bucket is not None:
            await asyncio.sleep(self._bucket.debt(b"", time.monotonic(), size))


def network_of(address: str) -> str:
    """The part of an IP address that one customer of a provider has: /24, or /48 of IPv6.

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
