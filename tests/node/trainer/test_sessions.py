"""Sessions of keys: whose requests are answered where two programs have one key. Connections are made up."""

import asyncio
import gc
import weakref

import pytest

from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.transport import PathInfo
from primerl.node.trainer import sessions
from primerl.node.trainer.sessions import Sessions
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import PeerRecord

NODE = bytes(31) + b"n"


class Line:
    """A connection that is alive or not, and counts how often it was asked."""

    def __init__(self, remote: str = "", *, alive: bool = True, peer: bytes = NODE) -> None:
        self.peer = peer
        self.alive = alive
        self.closed = False
        self.asked = 0
        self._remote = remote

    def path(self) -> PathInfo:
        return PathInfo("direct", 1.0, 0, 0, self._remote)

    async def answers(self, within: float) -> bool:
        self.asked += 1
        await asyncio.sleep(0)
        return self.alive

    async def close(self, reason: str = "") -> None:
        self.closed = True


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers() -> PeerTable:
    return PeerTable()


@pytest.fixture
def book(peers: PeerTable, clock: Clock) -> Sessions:
    return Sessions(peers, clock)


async def refusal(book: Sessions, line: Line) -> str:
    """Return with which words a request is refused; "" if it is not."""
    try:
        await book.check(line)  # type: ignore[arg-type]
    except RemoteProtocolError as error:
        return error.detail if error.reason == Reason.KEY_IN_USE else str(error)
    return ""


async def test_the_first_connection_of_a_key_is_answered_and_never_asked_whether_it_lives(
    book: Sessions,
) -> None:
    first = Line()
    for _ in range(3):
        assert not await refusal(book, first)
    assert not first.asked


async def test_while_the_first_lives_a_second_is_refused_however_often_it_comes(
    book: Sessions,
) -> None:
    first = Line()
    assert not await refusal(book, first)
    for _ in range(20):
        assert await refusal(book, Line())
    assert not first.closed
    assert not await refusal(book, first)


async def test_a_first_that_was_closed_is_replaced_without_being_asked(book: Sessions) -> None:
    first, second = Line(), Line()
    assert not await refusal(book, first)
    await first.close()
    assert not await refusal(book, second)
    assert not first.asked


async def test_a_first_that_does_not_answer_is_closed_and_replaced_by_one_of_those_that_come(
    book: Sessions,
) -> None:
    first = Line(alive=False)
    assert not await refusal(book, first)
    others = [Line() for _ in range(4)]
    said = await asyncio.gather(*(refusal(book, line) for line in others))
    assert [not words for words in said].count(True) == 1
    assert first.closed


@pytest.mark.usefixtures("small_heap")
async def test_a_closed_connection_is_let_go_at_the_next_sweep_and_a_living_one_is_kept(
    book: Sessions,
) -> None:
    """Before, each key that ever connected held 95 KB of its connection until 4,096 had come."""
    gone, alive = Line(), Line(peer=bytes(31) + b"m")
    for line in (gone, alive):
        assert not await refusal(book, line)
    await gone.close()
    held = weakref.ref(gone)
    del gone, line
    assert held() is not None
    book.sweep()
    gc.collect()
    assert held() is None
    assert await refusal(book, Line(peer=alive.peer))


async def test_keys_do_not_concern_each_other(book: Sessions) -> None:
    assert not await refusal(book, Line())
    assert not await refusal(book, Line(peer=bytes(31) + b"m"))


@pytest.mark.parametrize(
    ("remote", "shared", "shown"),
    [
        ("5.9.16.7", True, "5.9.16.7"),
        ("5.9.16.7", False, "5.9.16.0/24"),
        ("2a01:4f8:1:2::3", False, "2a01:4f8:1::/48"),
        ("192.168.1.7", False, "192.168.1.7"),
        ("127.0.0.1", False, "127.0.0.1"),
        ("", False, "an unknown address"),
    ],
)
async def test_a_node_that_does_not_share_its_address_is_named_by_its_network(
    book: Sessions, peers: PeerTable, remote: str, shared: bool, shown: str
) -> None:
    peers.learn(PeerRecord(NODE, "inference", "1", (), (), shared), b"")
    assert not await refusal(book, Line(remote))
    assert f"in use from {shown} since " in await refusal(book, Line())


async def test_the_operator_is_told_once_and_sees_it_for_some_minutes(
    book: Sessions, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert not await refusal(book, Line("5.9.16.7"))
    assert not book.second(NODE)
    for _ in range(5):
        clock.now += 10.0
        assert await refusal(book, Line("9.9.9.9"))
    assert len(caplog.messages) == 1
    assert "9.9.9.9" in book.second(NODE)
    assert len(book.warnings()) == 1
    clock.now += sessions.SHOWN_S + 1
    assert not book.second(NODE)
    assert not book.warnings()


async def test_free_keys_do_not_fill_the_memory(
    book: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 8)
    kept = Line()
    assert not await refusal(book, kept)
    for number in range(100):
        line = Line(peer=number.to_bytes(32, "big"))
        assert not await refusal(book, line)
        assert await refusal(book, Line(peer=line.peer))
        await line.close()
    assert len(book) <= 10
    assert await refusal(book, Line())
