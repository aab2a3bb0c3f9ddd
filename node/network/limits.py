"""Token buckets: how much of something a peer may use, and how fast we let bytes out. Time is an argument."""

import asyncio
import time
from dataclasses import dataclass


@dataclass
class TokenBucket:
    """`rate` tokens per second, at most `burst` saved up."""

    rate: float
    burst: float
    tokens: float = -1.0
    updated: float = 0.0

    def take(self, amount: float, now: float) -> float:
        """Take `amount` tokens; the result is how many seconds to wait before using them (0 = now)."""
        if self.tokens < 0 and self.updated == 0.0:
            self.tokens = self.burst
        else:
            self.tokens = min(self.burst, self.tokens + (now - self.updated) * self.rate)
        self.updated = now
        self.tokens -= amount
        return 0.0 if self.tokens >= 0 else -self.tokens / self.rate

    def allows(self, amount: float, now: float) -> bool:
        """Take `amount` tokens only if they are there now."""
        wait = self.take(amount, now)
        if wait > 0:
            self.tokens += amount
        return wait == 0.0


class Pacer:
    """Spreads uploads over time; without a rate it never waits."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bucket = TokenBucket(bytes_per_second, bytes_per_second) if bytes_per_second else None

    async def pace(self, size: int) -> None:
        """Wait until `size` bytes may go out."""
        if self._bucket is not None:
            await asyncio.sleep(self._bucket.take(size, time.monotonic()))
