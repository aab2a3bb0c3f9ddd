"""Discovery in a thread of its own: one life after the other, and what start() tells."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import trio
from support.waiting import until

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.discovery import GossipFact
from primerl.node.p2p.libp2p import FACT_QUEUE, Libp2pDiscovery
from primerl.node.p2p.transport import AddressInUse, Stream, TransportError, Unreachable

T = TypeVar("T")

DEADLINE_S = 60.0


class FakeLife:
    """A life that dies of b"poison", and hears whatever else it publishes."""

    port = 4001

    def __init__(self, born: int, receive: Callable[[GossipFact], None]) -> None:
        self.addresses = (f"/life/{born}",)
        self._dying = trio.Event()
        self.ended = False
        self._receive = receive

    def neighbours(self) -> int:
        return 3

    async def publish(self, sealed: bytes) -> None:
        if sealed == b"poison":
            self._dying.set()
        self._receive(GossipFact(sealed, b""))

    async def converse(
        self, peer: bytes, addresses: Sequence[str], talk: Callable[[Stream], Awaitable[T]]
    ) -> T:
        raise Unreachable(f"{peer!r} is at none of {addresses}")

    async def keep_connected(self, bootstrap: Sequence[str]) -> None:
        await self._dying.wait()
        raise RuntimeError(f"died with {len(bootstrap)} bootstrap peers")


class Lives:
    """Begins fake lives; `faults` are raised instead, in order, None being a life."""

    def __init__(self, *faults: Exception | None) -> None:
        self.ports: list[int] = []
        self.lives: list[FakeLife] = []
        self._faults = list(faults)

    @asynccontextmanager
    async def begin(
        self, port: int, receive: Callable[[GossipFact], None]
    ) -> AsyncGenerator[FakeLife]:
        self.ports.append(port)
        fault = self._faults.pop(0) if self._faults else None
        if fault is not None:
            raise fault
        life = FakeLife(len(self.ports), receive)
        self.lives.append(life)
        try:
            yield life
        finally:
            await trio.lowlevel.checkpoint()  # would raise if it were cut off
            life.ended = True


def discovery_of(lives: Lives, *, port: int) -> Libp2pDiscovery:
    discovery = Libp2pDiscovery(SecretKey.generate(), run_id=b"r" * 32, host="127.0.0.1", port=port)
    discovery.open_session = lives.begin  # type: ignore[assignment]
    return discovery


async def test_after_a_death_the_next_life_takes_the_same_port(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives = Lives(None, AddressInUse("still in use"))
    discovery = discovery_of(lives, port=0)
    await discovery.start(["one"])
    assert discovery.addresses() == ("/life/1",)
    await discovery.publish(b"poison")
    await until(lambda: len(lives.lives) == 2 and discovery.neighbours())
    assert lives.ports == [0, 4001, 4001]
    assert discovery.addresses() == ("/life/3",)
    assert "died with 1 bootstrap peers" in caplog.text
    await discovery.close()
    assert all(life.ended for life in lives.lives)


async def test_between_two_lives_publishing_goes_nowhere_and_hurts_nobody() -> None:
    lives = Lives(None, *[RuntimeError("no")] * 9)
    discovery = discovery_of(lives, port=0)
    await discovery.start([])
    assert discovery.neighbours() == 3
    await discovery.publish(b"poison")
    await until(lambda: not discovery.neighbours())
    await discovery.publish(b"nowhere")
    await discovery.close()
    assert [fact.sealed async for fact in discovery.facts()] == [b"poison"]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (AddressInUse("port 1 is in use"), AddressInUse),
        (ExceptionGroup("a nursery", [AddressInUse("port 1 is in use")]), AddressInUse),
        (RuntimeError("port 1 is in use"), TransportError),
    ],
)
async def test_a_first_life_that_cannot_begin_fails_the_start(
    fault: Exception, told: type[Exception]
) -> None:
    lives = Lives(fault)
    discovery = discovery_of(lives, port=1)
    with pytest.raises(told, match="port 1 is in use"):
        await discovery.start([])
    assert lives.ports == [1]
    await discovery.close()


async def test_facts_that_nobody_takes_push_out_the_oldest() -> None:
    lives = Lives()
    discovery = discovery_of(lives, port=0)
    await discovery.start([])
    for i in range(FACT_QUEUE + 5):
        await discovery.publish(b"%d" % i)
    await discovery.close()
    left = [fact.sealed async for fact in discovery.facts()]
    assert left == [b"%d" % i for i in range(5, FACT_QUEUE + 5)]


async def talk(stream: Stream) -> bytes:
    return await stream.read_exact(1)


async def test_a_call_is_refused_at_once_when_nothing_runs() -> None:
    lives = Lives(None, *[RuntimeError("no")] * 9)
    discovery = discovery_of(lives, port=0)
    with pytest.raises(Unreachable, match="not running"):
        await discovery.converse(b"peer", [], talk)
    await discovery.start([])
    with pytest.raises(Unreachable, match="none of"):
        await discovery.converse(b"peer", ["/there"], talk)
    await discovery.publish(b"poison")
    await until(lambda: not discovery.neighbours())
    with pytest.raises(Unreachable, match="between two sessions"):
        await discovery.converse(b"peer", [], talk)
    await discovery.close()
    with pytest.raises(Unreachable, match="not running"):
        await discovery.converse(b"peer", [], talk)
    assert [caller async for caller in discovery.callers()] == []
