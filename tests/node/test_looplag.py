"""The loop's lateness: what blocks it is seen."""

import asyncio
import time

from swarm import until

from primerl.node.looplag import EVERY_S, LoopLag


async def test_what_blocks_the_loop_is_seen() -> None:
    lag = LoopLag()
    assert lag.read() == {}
    measuring = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(EVERY_S + 0.2)  # noqa: ASYNC251  a taskset that blocks
    await until(lambda: bool(lag.read()))
    seen = lag.read()
    measuring.cancel()
    assert seen["max"] >= 0.15
    assert seen["mean"] <= seen["max"]
