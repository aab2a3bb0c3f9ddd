"""The asyncio face of a discovery that lives in a trio thread, one life after the other.

A life may die at any time, of foreign bytes or of its library: the next one starts in its place,
on the same port. Only the first may fail for good, and it fails start().
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ...protocol.errors import LocalProtocolError
from ...protocol.version import MAX_GOSSIP
from .discovery import Fact
from .transport import Stream, TransportError, Unreachable
from .trio_streams import Callers
from .trio_thread import EventQueue, TrioStopped, TrioThread

if TYPE_CHECKING:
    import trio

logger = logging.getLogger(__name__)

T = TypeVar("T")

FACT_QUEUE = 256
"""Facts that wait for a reader; a newer one pushes out the oldest."""
LEAVE_SECONDS = 3.0
"""How long close() lets a life say goodbye before it is cut off."""
RESTART_SECONDS = (1.0, 60.0)
"""First and longest pause before the next life."""


class Life(Protocol):
    """What discovery is made of between a start and a death. All but neighbours() in trio."""

    port: int
    addresses: tuple[str, ...]

    def neighbours(self) -> int:
        """How many peers would get our facts. Called from any thread."""
        ...

    async def publish(self, sealed: bytes) -> None:
        """Gossip one fact of a proper size."""
        ...

    async def keep_connected(self, bootstrap: Sequence[str]) -> None:
        """Find peers until cancelled."""
        ...

    async def converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        """As Discovery.converse(); `talk` runs in trio."""
        ...


class _Started(Protocol):
    def started(self) -> None: ...


class TrioDiscovery:
    """Discovery in a thread of its own."""

    def __init__(
        self,
        begin: Callable[[int, Callable[[Fact], None]], AbstractAsyncContextManager[Life]],
        *,
        port: int,
    ) -> None:
        """`begin(port, receive)` opens a life that listens and calls `receive` with every fact."""
        self._begin = begin
        self._port = port
        self._facts: EventQueue[Fact] = EventQueue(FACT_QUEUE)
        self._thread = TrioThread("libp2p")
        self.incoming = Callers(self._thread)
        """Where a life brings the streams that peers open."""
        self._life: Life | None = None
        self._addresses: tuple[str, ...] = ()
        self._leaving: trio.Event | None = None
        self._left: trio.Event | None = None

    @property
    def dropped_facts(self) -> int:
        """Facts that nobody took from facts() in time."""
        return self._facts.dropped

    def addresses(self) -> tuple[str, ...]:
        """Our multiaddrs with /p2p/PEERID; empty before start()."""
        return self._addresses

    async def start(self, bootstrap: Sequence[str]) -> None:
        """Listen, then connect to `bootstrap` in the background. Once only.

        Raises:
            AddressInUse: another program has the TCP port.
            TransportError: the address is not this machine's, or the library does not start.
        """
        self._facts.bind(asyncio.get_running_loop())
        self.incoming.bind(asyncio.get_running_loop())
        try:
            await self._thread.start()
            await self._thread.call(self._open, tuple(bootstrap))
        except BaseException:
            await self.close()
            raise

    async def publish(self, sealed: bytes) -> None:
        """Gossip a sealed fact; between two lives it goes nowhere.

        Raises:
            LocalProtocolError: the fact is larger than MAX_GOSSIP.
        """
        if len(sealed) > MAX_GOSSIP:
            raise LocalProtocolError(
                f"a fact of {len(sealed)} bytes cannot be gossiped (at most {MAX_GOSSIP}):"
                " gossip its digest and send the bytes by the transport"
            )
        try:
            await self._thread.call(self._publish, sealed)
        except TrioStopped:
            logger.debug("a fact was not gossiped: discovery is not running")

    def facts(self) -> AsyncIterator[Fact]:
        """Facts from others as they come; ends with close(). All callers share one queue."""
        return self._facts

    async def converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        """Reach `peer`, open a stream and return what `talk` makes of it, in the trio thread.

        Raises:
            Unreachable: also between two lives. StreamClosed, and whatever `talk` raises.
        """
        try:
            return await self._thread.call(self._converse, peer, addresses, talk)
        except TrioStopped as error:
            raise Unreachable("libp2p is not running: nothing goes over TCP") from error

    def callers(self) -> AsyncIterator[tuple[bytes, Stream]]:
        """(NodeId, stream) of peers that want to converse; ends with close()."""
        return self.incoming.listen()

    def neighbours(self) -> int:
        """How many connected peers listen to this run's topic."""
        life = self._life
        return 0 if life is None else life.neighbours()

    async def close(self) -> None:
        """Leave, and join the thread. Never raises; closing twice is fine."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._thread.call(self._leave)
        except (TrioStopped, TimeoutError):
            logger.debug("discovery is not running, or would not take its leave")
        await self._thread.stop()
        self._facts.close()
        self.incoming.close()

    async def _leave(self) -> None:
        # Leaving by an event and not by cancelling: a cancelled library drops its sockets open.
        if self._leaving is not None and self._left is not None:
            self._leaving.set()
            await self._left.wait()

    async def _publish(self, sealed: bytes) -> None:
        if self._life is not None:
            await self._life.publish(sealed)

    async def _converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        if self._life is None:
            raise Unreachable("libp2p is between two lives: nothing goes over TCP")
        return await self._life.converse(peer, addresses, talk)

    async def _open(self, bootstrap: tuple[str, ...]) -> None:
        import trio

        self._leaving, self._left = trio.Event(), trio.Event()
        # Stubs that libp2p brings along know nothing of keyword task_status: hence the cast.
        supervise = cast(Any, self._supervise)
        await self._thread.nursery.start(supervise, bootstrap, self._leaving, self._left)

    async def _supervise(
        self,
        bootstrap: tuple[str, ...],
        leaving: "trio.Event",
        left: "trio.Event",
        *,
        task_status: _Started,
    ) -> None:
        """One life after the other until `leaving`."""
        import trio

        started, pause, born = False, RESTART_SECONDS[0], trio.current_time()
        try:
            while not leaving.is_set():
                try:
                    async with self._living() as life:
                        if not started:
                            task_status.started()
                        started, born = True, trio.current_time()
                        await _stay(life, bootstrap, leaving)
                except Exception as error:
                    # A library that died of foreign bytes, or lost its port: the node goes on.
                    if not started:
                        raise _start_error(error) from error
                    if trio.current_time() - born > RESTART_SECONDS[1]:
                        pause = RESTART_SECONDS[0]
                    logger.warning("discovery died and starts again in %.0f s: %r", pause, error)
                    with trio.move_on_after(pause):
                        await leaving.wait()
                    pause = min(2 * pause, RESTART_SECONDS[1])
        finally:
            left.set()

    @asynccontextmanager
    async def _living(self) -> AsyncGenerator[Life]:
        async with self._begin(self._port, self._facts.put) as life:
            self._port, self._addresses, self._life = life.port, life.addresses, life
            try:
                yield life
            finally:
                self._life = None


async def _stay(life: Life, bootstrap: Sequence[str], leaving: "trio.Event") -> None:
    import trio

    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.keep_connected, bootstrap)
        await leaving.wait()
        nursery.cancel_scope.cancel()


def _start_error(error: Exception) -> TransportError:
    """`error` as a TransportError, whatever number of nurseries have wrapped it."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, TransportError):
        return error
    return TransportError(f"discovery did not start ({error!r}): network.libp2p = false skips it")
