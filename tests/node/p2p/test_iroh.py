"""What is particular to iroh. What every transport owes is in tests/conformance/test_transport.py."""

import ast
import asyncio
import ctypes
import gc
import importlib.util
import secrets
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from primerl.crypto.keys import SecretKey
from primerl.node.p2p import iroh
from primerl.node.p2p.iroh import IrohConnection, IrohTransport, cause
from primerl.node.p2p.transport import (
    AddressInUse,
    ConnectionLost,
    StreamClosed,
    TransportError,
    Unreachable,
)

ALPN = b"primerl-test/1"
DEADLINE_S = 60.0


def build(host: str = "127.0.0.1", port: int = 0, **options: Any) -> IrohTransport:
    key = SecretKey.generate()
    return IrohTransport(key, host=host, port=port, alpns=[ALPN], **options)


@asynccontextmanager
async def running(**options: Any) -> AsyncGenerator[IrohTransport, None]:
    transport = build(**options)
    try:
        await transport.start()
        yield transport
    finally:
        await transport.close()


def port_of(transport: IrohTransport) -> int:
    return int(transport.addresses()[0].rpartition(":")[2])


async def connect(source: IrohTransport, target: IrohTransport) -> IrohConnection:
    return await source.connect(target.node_id, target.addresses(), ALPN, deadline=DEADLINE_S)


async def test_the_node_key_is_the_transport_identity() -> None:
    key = SecretKey.from_seed(bytes(range(32)))
    server = IrohTransport(key, host="127.0.0.1", port=0, alpns=[ALPN])
    await server.start()
    async with running() as client:
        near = await client.connect(key.node_id, server.addresses(), ALPN, deadline=DEADLINE_S)
        far = await server.accept()
        assert near.peer == server.node_id == key.node_id
        assert far.peer == client.node_id
    await server.close()


async def test_a_busy_port_is_named_together_with_what_to_change() -> None:
    async with running() as first:
        second = build(port=port_of(first))
        with pytest.raises(AddressInUse, match=r"127\.0\.0\.1:\d+ is taken.*network\.port"):
            await second.start()
        await second.close()


async def test_a_port_taken_by_another_program_on_one_interface_is_busy_for_all() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(AddressInUse):
            await build(host="0.0.0.0", port=other.getsockname()[1]).start()


async def test_a_port_is_free_again_after_close() -> None:
    async with running() as first:
        port = port_of(first)
    async with asyncio.timeout(DEADLINE_S):
        # iroh lets go of it a few milliseconds after close()
        while not await binds(port):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def binds(port: int) -> bool:
    try:
        async with running(port=port) as second:
            return port_of(second) == port
    except AddressInUse:
        return False


@pytest.mark.parametrize("host", ["localhost", "", "198.51.100.1"])
async def test_a_host_that_is_no_address_of_ours_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match=r"network\.host"):
        await build(host=host).start()


async def test_a_loopback_node_listens_on_no_other_interface() -> None:
    async with running() as transport:
        endpoint = transport._endpoint  # pyright: ignore[reportPrivateUsage]
        assert endpoint is not None
        for bound in endpoint.bound_sockets():
            assert bound.startswith(("127.0.0.1:", "[::1]:"))
        assert [hint.rpartition(":")[0] for hint in transport.addresses()] == ["127.0.0.1"]


async def test_a_node_on_all_interfaces_gives_addresses_that_others_can_use() -> None:
    async with running(host="0.0.0.0") as server, running(host="0.0.0.0") as client:
        for hint in server.addresses():
            host, _, port = hint.rpartition(":")
            assert host not in ("0.0.0.0", "[::]")
            assert int(port) > 0
        connection = await connect(client, server)
        assert connection.peer == server.node_id


async def test_a_host_name_among_the_hints_is_looked_up() -> None:
    async with running() as server, running() as client:
        hint = f"localhost:{port_of(server)}"
        near = await client.connect(server.node_id, [hint], ALPN, deadline=DEADLINE_S)
        assert near.peer == server.node_id


async def test_an_endpoint_starts_once() -> None:
    async with running() as transport:
        with pytest.raises(TransportError):
            await transport.start()
    with pytest.raises(TransportError):
        await transport.start()


async def test_an_endpoint_that_was_not_started_says_so() -> None:
    transport = build()
    with pytest.raises(TransportError, match="start"):
        transport.addresses()
    with pytest.raises(TransportError, match="start"):
        await transport.connect(bytes(32), (), ALPN, deadline=1.0)
    await transport.close()


NO_RELAY = "http://127.0.0.1:9"


async def test_a_relay_that_only_a_peer_names_is_not_contacted() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        hint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with running(relay_urls=[NO_RELAY], relay_wait_s=0.1) as client:
            with pytest.raises(Unreachable):
                await client.connect(SecretKey.generate().node_id, [hint], ALPN, deadline=0.5)
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_our_own_relay_is_contacted() -> None:
    contacted = asyncio.Event()

    async def see(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        contacted.set()
        writer.close()

    async with await asyncio.start_server(see, "127.0.0.1", 0) as relay:
        url = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        async with running(relay_urls=[url], relay_wait_s=0.1), asyncio.timeout(DEADLINE_S):
            await contacted.wait()


async def test_a_relay_that_does_not_answer_does_not_stop_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        running(relay_urls=[NO_RELAY], relay_wait_s=0.1) as server,
        running() as client,
    ):
        assert "relay_urls" in caplog.text
        assert (await connect(client, server)).peer == server.node_id


async def test_random_datagrams_do_not_disturb_accepting() -> None:
    async with running() as server, running() as client:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as garbage:
            for size in (1, 20, 200, 1200, 1472):
                for _ in range(20):
                    garbage.sendto(secrets.token_bytes(size), ("127.0.0.1", port_of(server)))
            near, far = await asyncio.gather(connect(client, server), server.accept())
        assert (near.peer, far.peer) == (server.node_id, client.node_id)


async def first_packets(target: IrohTransport) -> list[bytes]:
    """What a client says first to a server that never answers: a handshake left half-way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.setblocking(False)
        hint = f"127.0.0.1:{silent.getsockname()[1]}"
        async with running() as client:
            connecting = client.connect(target.node_id, [hint], ALPN, deadline=DEADLINE_S)
            attempt = asyncio.ensure_future(connecting)
            await asyncio.wait([attempt], timeout=0.2)
            said = drain(silent)  # before it says that it gives up
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            return said


def drain(silent: socket.socket) -> list[bytes]:
    packets: list[bytes] = []
    while True:
        try:
            packets.append(silent.recv(2048))
        except BlockingIOError:
            return packets


@contextmanager
def replay(packets: Sequence[bytes], target: IrohTransport) -> Generator[None, None, None]:
    """Send them from a socket that answers nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for packet in packets:
            sender.sendto(packet, ("127.0.0.1", port_of(target)))
        yield


async def until_handshakes(server: IrohTransport, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while server._handshakes < count:  # pyright: ignore[reportPrivateUsage]  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_handshake_that_hangs_blocks_nobody_until_the_limit_is_reached() -> None:
    async with running(max_handshakes=2) as server, running() as client:
        hung = await asyncio.gather(first_packets(server), first_packets(server))
        with replay(hung[0], server):
            await until_handshakes(server, 1)
            near, far = await asyncio.gather(connect(client, server), server.accept())
            assert (near.peer, far.peer) == (server.node_id, client.node_id)
            with replay(hung[1], server):
                await until_handshakes(server, 2)
                with pytest.raises(Unreachable, match="refused"):
                    await connect(client, server)
        assert not near.closed


async def test_those_that_were_here_before_are_let_in_while_others_use_up_all_handshakes() -> None:
    async with running(max_handshakes=1) as server, running() as client, running() as other:
        near, far = await asyncio.gather(connect(client, server), server.accept())
        server.prefer(far)
        await near.close()
        with replay(await first_packets(server), server):
            await until_handshakes(server, 1)
            with pytest.raises(Unreachable, match="refused"):
                await connect(other, server)
            again, _ = await asyncio.gather(connect(client, server), server.accept())
        assert not again.closed


async def test_handshakes_do_not_keep_the_event_loop() -> None:
    """iroh computes in the thread that asks for a handshake."""
    async with running() as server, running() as client:
        threads = {one.name for one in threading.enumerate()}
        await asyncio.gather(connect(client, server), server.accept())
        assert "handshakes" in threads


@pytest.mark.usefixtures("small_heap")
async def test_a_forgotten_stream_is_reset_and_not_ended_in_order() -> None:
    async with running() as server, running() as client:
        near, far = await asyncio.gather(connect(client, server), server.accept())
        stream = await near.open_stream()
        await stream.write(b"half a messa")
        incoming = await far.accept_stream()
        del stream
        gc.collect()
        with pytest.raises(StreamClosed, match="Reset"):
            await incoming.read_exact(100)


async def test_two_endpoints_of_one_key_do_not_mix_up_their_connections() -> None:
    key = SecretKey.generate()
    first, second = (IrohTransport(key, host="127.0.0.1", port=0, alpns=[ALPN]) for _ in "12")
    async with running() as server:
        try:
            await first.start()
            await second.start()
            pairs: list[tuple[IrohConnection, IrohConnection]] = []
            for transport in (first, second):
                near, far = await asyncio.gather(connect(transport, server), server.accept())
                pairs.append((near, far))
            for _ in range(20):
                for number, (near, far) in enumerate(pairs):
                    stream = await near.open_stream()
                    await stream.write(b"request %d" % number)
                    incoming = await far.accept_stream()
                    assert await incoming.read_exact(9) == b"request %d" % number
                    await incoming.write(b"reply %d" % number)
                    assert await stream.read_exact(7) == b"reply %d" % number
            assert all(far.path().remote for _, far in pairs)
            await first.close()
            assert not await pairs[0][1].answers(5.0)
            assert await pairs[1][1].answers(DEADLINE_S)
        finally:
            await first.close()
            await second.close()


CHILD = """
import asyncio, sys
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.iroh import IrohTransport

async def main():
    transport = IrohTransport(SecretKey.generate(), host="127.0.0.1", port=0, alpns=[])
    await transport.start()
    peer, hint, alpn = bytes.fromhex(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
    connection = await transport.connect(peer, [hint], alpn, deadline=20)
    stream = await connection.open_stream()
    await stream.write(b"!")
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_peer_that_was_killed_is_noticed_without_a_word_from_it() -> None:
    async with running(silence_s=1.0) as server:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, server.node_id.hex(), server.addresses()[0], ALPN.hex()
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                connection = await server.accept()
                stream = await connection.accept_stream()
                assert await stream.read_exact(1) == b"!"
                assert await connection.answers(DEADLINE_S)
                child.kill()
                await child.wait()
                assert not await connection.answers(0.5)
                with pytest.raises(ConnectionLost):
                    await stream.read_exact(1)
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


@pytest.mark.nightly
async def test_a_living_peer_with_nothing_to_say_is_kept() -> None:
    async with running() as server, running() as client:
        near, far = await asyncio.gather(connect(client, server), server.accept())
        await asyncio.sleep(40)
        assert not near.closed
        assert not far.closed


class SilentForeign:
    """An iroh.Connection of which only the counter of received datagrams matters."""

    def __init__(self) -> None:
        self.received = 3

    def remote_id(self) -> Any:
        return SimpleNamespace(to_bytes=lambda: bytes(32))

    def alpn(self) -> bytes:
        return ALPN

    def set_max_concurrent_uni_streams(self, count: int) -> None:
        assert count == 0

    def stats(self) -> Any:
        return SimpleNamespace(udp_rx_datagrams=self.received)


async def test_silence_counts_from_the_last_datagram_that_came() -> None:
    foreign = SilentForeign()
    connection = IrohConnection(
        cast("Any", foreign), foreign_error=TransportError, spawn=asyncio.ensure_future
    )
    assert connection.silent_s(100.0) == 0
    assert connection.silent_s(104.0) == 4
    foreign.received += 1
    assert connection.silent_s(111.0) == 0
    assert connection.silent_s(120.0) == 9


def shipped_binding() -> ast.Module:
    spec = importlib.util.find_spec("iroh")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).with_name("iroh_ffi.py").read_text())


def test_the_shipped_binding_still_copies_one_byte_at_a_time() -> None:
    methods = [
        method
        for part in shipped_binding().body
        if isinstance(part, ast.ClassDef) and part.name == "_UniffiRustBufferBuilder"
        for method in part.body
        if isinstance(method, ast.FunctionDef) and method.name == "write"
    ]
    loops = [node for method in methods for node in ast.walk(method) if isinstance(node, ast.For)]
    assert loops, (
        "this release of iroh copies bytes in another way: measure a stream without "
        "node/p2p/iroh.py, and if it is fast remove the patch and this test"
    )


@pytest.mark.parametrize("size", [0, 1, 11, 12, 13, 255, 256, 65536, 1 << 20])
def test_the_repaired_copy_writes_what_the_shipped_one_would(size: int) -> None:
    from iroh import iroh_ffi

    data = secrets.token_bytes(size)
    builder: Any = iroh_ffi._UniffiRustBufferBuilder()  # pyright: ignore[reportPrivateUsage]
    builder.write_i32(size)
    iroh.write_whole(builder, data)
    iroh.write_whole(builder, b"behind")
    buffer = builder.finalize()
    try:
        assert (
            ctypes.string_at(buffer.data, buffer.len) == size.to_bytes(4, "big") + data + b"behind"
        )
    finally:
        buffer.free()


async def test_starting_an_endpoint_puts_the_repair_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from iroh import iroh_ffi

    builder = iroh_ffi._UniffiRustBufferBuilder  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(builder, "write", None)
    for _ in range(2):
        async with running():
            assert builder.write is iroh.write_whole


def test_a_binding_that_changed_is_not_patched_blindly() -> None:
    with pytest.raises(AttributeError):
        iroh.install_fast_bytes(SimpleNamespace())
    with pytest.raises(AttributeError, match=r"iroh\.py"):
        iroh.install_fast_bytes(SimpleNamespace(_UniffiRustBufferBuilder=object))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ConnectionLost(LocallyClosed)", "this node closed it"),
        ("ConnectionLost(TimedOut)", "it fell silent"),
        (
            'ConnectionLost(ApplicationClosed(ApplicationClose { error_code: 0, reason: b"" }))',
            "the other side closed it",
        ),
        (
            'ConnectionLost(ApplicationClosed(ApplicationClose { error_code: 0, reason: b"too many" }))',
            "too many",
        ),
        ("sending failed", "sending failed"),
    ],
)
def test_the_end_of_a_connection_has_a_reason_in_words(said: str, shown: str) -> None:
    assert cause(RuntimeError(said)) == shown
