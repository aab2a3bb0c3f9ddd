"""How late the event loop runs what is due: what blocks it delays everything that a node does.

Figures are seconds over the last WINDOW looks, about ten seconds.
"""

import asyncio
import time
from collections import deque

EVERY_S = 0.1
WINDOW = 100


class LoopLag:
    """Measures the loop that it runs on."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=WINDOW)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._late.append(max(0.0, time.monotonic() - due))

    def read(self) -> dict[str, float]:
        """mean, p90 and max in seconds; empty before the first look."""
        late = sorted(self._late)
        if not late:
            return {}
        return {
            "mean": round(sum(late) / len(late), 5),
            "p90": round(late[int(0.9 * (len(late) - 1))], 5),
            "max": round(late[-1], 5),
        }
