"""The node's end of an engine's socket: permissions, and misbehaving engines."""

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.ring_cases import LIMITS, fields_of, soon, step

from primerl.node.errors import NodeError
from primerl.node.p2p.waiting import Notifier
from primerl.node.pipeline.frames import PREFIX_BYTES, Packet, decode, packet
from primerl.node.pipeline.links import LocalLink
from primerl.node.pipeline.ports import PortClosed, SocketPort


class Listener:
    """Records its calls."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.changes: list[str] = []
        self.signal = Notifier()

    async def from_local(self, packet: Packet) -> None:
        self.packets.append(packet)
        self.signal.fire()

    def local_changed(self, words: str) -> None:
        self.changes.append(words)
        self.signal.fire()

    async def changed(self, times: int) -> None:
        while len(self.changes) < times:
            await soon(self.signal.wait())


@pytest.fixture
async def end(tmp_path: Path) -> AsyncIterator[LocalLink]:
    async with LocalLink(tmp_path / "run" / "stage.sock", LIMITS) as end:
        end.listener = Listener()
        yield end


def listener(end: LocalLink) -> Listener:
    assert isinstance(end.listener, Listener)
    return end.listener


async def connect(end: LocalLink) -> SocketPort:
    return await asyncio.to_thread(SocketPort, str(end.path), LIMITS)


async def test_frames_go_both_ways(end: LocalLink) -> None:
    port = await connect(end)
    await listener(end).changed(1)
    await end.box.put(packet(step(1, 5), LIMITS))
    assert fields_of(await asyncio.to_thread(port.receive, 5.0)) == fields_of(step(1, 5))
    port.send(step(1, 6))
    while not listener(end).packets:
        await soon(listener(end).signal.wait())
    found = listener(end).packets[0]
    assert fields_of(decode(found.head, found.contents)) == fields_of(step(1, 6))
    assert found.start[PREFIX_BYTES:]
    await asyncio.to_thread(port.close)
    await listener(end).changed(2)
    assert not end.connected


async def test_the_socket_is_its_owners_alone_and_goes_with_the_end(tmp_path: Path) -> None:
    path = tmp_path / "stage.sock"
    async with LocalLink(path, LIMITS):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_a_socket_that_a_dead_node_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "stage.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    async with LocalLink(path, LIMITS) as end:
        port = await connect(end)
        await asyncio.to_thread(port.close)


@pytest.mark.parametrize("turns", range(5))
async def test_a_process_that_connects_while_the_end_closes_is_let_go(
    tmp_path: Path, turns: int
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        async with LocalLink(tmp_path / "stage.sock", LIMITS) as end:
            other.connect(str(end.path))
            for _ in range(turns):
                await asyncio.sleep(0)
        other.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(other.recv, 1) == b""


async def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="shorter"):
        async with LocalLink(tmp_path / ("x" * 120), LIMITS):
            pass


async def test_another_process_takes_the_place_of_the_one_before(end: LocalLink) -> None:
    first = await connect(end)
    await listener(end).changed(1)
    second = await connect(end)
    await listener(end).changed(3)
    assert [bool(words) for words in listener(end).changes] == [False, True, False]
    with pytest.raises(PortClosed):
        await asyncio.to_thread(first.receive, 5.0)
    await end.box.put(packet(step(1, 5), LIMITS))
    assert (await asyncio.to_thread(second.receive, 5.0)).number == 5
    for port in (first, second):
        await asyncio.to_thread(port.close)


async def test_what_is_no_frame_ends_the_connection_and_another_may_come(end: LocalLink) -> None:
    reader, writer = await asyncio.open_unix_connection(end.path)
    writer.write(b"\x00\x00\x00\x05hello")
    assert await soon(reader.read()) == b""
    writer.close()
    await listener(end).changed(2)
    assert "invalid frame" in listener(end).changes[1]
    port = await connect(end)
    await listener(end).changed(3)
    assert end.connected
    await asyncio.to_thread(port.close)


async def test_closing_ends_open_connections(tmp_path: Path) -> None:
    async with LocalLink(tmp_path / "stage.sock", LIMITS) as end:
        end.listener = Listener()
        port = await connect(end)
        await listener(end).changed(1)
    with pytest.raises(PortClosed):
        await asyncio.to_thread(port.receive, 5.0)
    await asyncio.to_thread(port.close)


async def test_where_no_node_listens_an_engine_says_so(tmp_path: Path) -> None:
    with pytest.raises(PortClosed, match="no node listens"):
        await asyncio.to_thread(SocketPort, str(tmp_path / "none.sock"), LIMITS, connect_s=0.1)
