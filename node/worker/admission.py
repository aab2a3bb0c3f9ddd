"""The way into the engine: as many sequences at once as the cap allows, the oldest work first.

A sequence that is stopped here is asked for again with the same seed, so nothing can be gained by stopping it;
whoever waits holds no permit, and a permit is given back however its holder ends.
"""

import asyncio
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from ..inference.concurrency import Concurrency
from ..inference.engine import Completion, Engine, GenerateRequest
from ..ops.errors import EngineLost

logger = logging.getLogger(__name__)

POLL_S = 1.0
RATE_POLLS = 60
"""Polls over which tokens per second are taken."""
MAX_LOSSES = 3
"""Times that one sequence is asked for again after its engine died while others went on."""

Order = tuple[int, int]
"""(number of the lease, place of the task in it): the smaller goes first, and a group stays together."""
Waiting = tuple[Order, int, "asyncio.Future[None]"]


class Admission:
    """Gives permits to generate."""

    def __init__(
        self,
        engine: Engine,
        concurrency: Concurrency,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._concurrency = concurrency
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: list[Waiting] = []
        self._inflight: dict[int, asyncio.Timeout | None] = {}
        """What stops each that holds a permit, the oldest first; None where it has not begun yet."""
        self._turnstile = Turnstile()
        self._generated = 0
        self._counted = deque[tuple[float, int]](maxlen=RATE_POLLS)
        self.taken_back = 0
        """Sequences that were stopped for want of room, since the start."""

    @property
    def cap(self) -> int:
        """Sequences that may be in flight."""
        return self._concurrency.cap

    @property
    def inflight(self) -> int:
        """Sequences in flight."""
        return len(self._inflight)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second, over the last minute."""
        if len(self._counted) < 2:
            return 0.0
        (begun, before), (now, after) = self._counted[0], self._counted[-1]
        return (after - before) / max(now - begun, POLL_S)

    def groups_of(self, size: int) -> None:
        """Sequences come in groups of so many."""
        self._concurrency.groups_of(size)

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Look at the engine once, and do what follows from it."""
        before = self.cap
        self._counted.append((self._clock(), self._generated))
        decision = self._concurrency.observe(
            self._engine.stats(),
            inflight=self.inflight,
            version=self._engine.policy_version,
            now=self._clock(),
        )
        if decision.why:
            logger.info(
                "%d sequences in flight at most, not %d: %s", self.cap, before, decision.why
            )
        self._take_back(decision.take_back)
        self._admit()

    async def generate(self, request: GenerateRequest, order: Order) -> Completion:
        """Sample one completion when it is its turn.

        Raises EngineError; EngineLost only where no engine is left that could do it now.
        """
        losses, number = 0, next(self._numbers)
        while True:
            try:
                async with self._permit(order, number):
                    completion = await self._engine.generate(request)
            except _TakenBack:
                self.taken_back += 1
            except EngineLost:
                losses += 1
                if self._engine.stats().fault or losses > MAX_LOSSES:
                    raise
            else:
                self._generated += len(completion.token_ids)
                await self._turnstile.pass_through()
                return completion

    @asynccontextmanager
    async def _permit(self, order: Order, number: int) -> AsyncGenerator[None]:
        """Wait for a permit, and hold it until the end of the block or until it is taken back.

        `number` says when it was asked for first: a sequence that was stopped goes before those of its group
        that have not begun (checks.late_samples).
        """
        stop = asyncio.timeout(None)
        try:
            await self._enter(order, number)
            async with stop:
                self._inflight[number] = stop
                yield
            self._concurrency.finished()
        except TimeoutError:
            if stop.expired():
                raise _TakenBack from None
            raise
        finally:
            if number in self._inflight:
                del self._inflight[number]
                self._admit()

    async def _enter(self, order: Order, number: int) -> None:
        entrance: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, number, entrance))
        self._admit()
        await entrance

    def _admit(self) -> None:
        """Let in as many as there is room for. Who gave up waiting is passed over."""
        room = self._concurrency.room(len(self._inflight), self._clock())
        while room > 0 and self._waiting:
            _, number, entrance = heapq.heappop(self._waiting)
            if not entrance.done():
                # It counts from now on, though its task has not come to run yet.
                self._inflight[number] = None
                entrance.set_result(None)
                room -= 1

    def _take_back(self, count: int) -> None:
        """Stop the youngest."""
        now = asyncio.get_running_loop().time()
        running = [stop for stop in self._inflight.values() if stop and not stop.expired()]
        for stop in running[len(running) - min(count, len(running)) :]:
            stop.reschedule(now)


class Turnstile:
    """Lets one through in every turn of the event loop.

    Scoring a rollout takes a millisecond or more. When hundreds end in one step of the engine, those that are
    to take their places do not wait until all of these are scored.
    """

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def pass_through(self) -> None:
        """Return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._queue.append(turn)
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._queue and self._queue[0].done():  # it was cancelled
            self._queue.popleft()
        self._turning = bool(self._queue)
        if self._queue:
            self._queue.popleft().set_result(None)
            loop.call_soon(self._turn, loop)


class _TakenBack(Exception):
    """A permit was taken back."""
