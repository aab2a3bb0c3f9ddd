"""HTTP seeds: any static web server will do, and none can do harm."""

import asyncio
import gzip
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.web_server import certificate, static_server

from primerl.crypto.hashing import digest
from primerl.node.config.run import NetworkConfig
from primerl.node.p2p.chunk_client import ChunkSource
from primerl.node.p2p.rpc import Refused, TooSlow
from primerl.node.p2p.seeds import PIECE, open_seeds
from primerl.node.p2p.transport import TransportError
from primerl.node.storage.chunk_store import FileStore
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.version import MAX_CHUNK

DEADLINE_S = 60.0
DATA = bytes(range(256)) * 400
CHUNK = ChunkRef(digest(DATA), len(DATA))
SECRET = "hunter2"


async def get(url: str, chunk: ChunkRef = CHUNK, **options: Any) -> bytes:
    async with open_seeds([url], **options) as (seed,):
        return await seed.get(chunk, deadline=DEADLINE_S)


async def test_the_chunks_folder_of_a_node_under_any_static_server_is_a_seed(
    tmp_path: Path,
) -> None:
    store = FileStore(tmp_path / "chunks", max_bytes=1 << 30, fsync=False)
    large = bytes(MAX_CHUNK)
    refs = [ChunkRef(store.put(data), len(data)) for data in (DATA, large, b"x")]
    with static_server(tmp_path) as port:
        for base in (f"http://127.0.0.1:{port}/chunks", f"http://127.0.0.1:{port}/chunks/"):
            assert [await get(base, ref) for ref in refs] == [DATA, large, b"x"]
        with pytest.raises(Refused) as refusal:
            await get(f"http://127.0.0.1:{port}/chunks", ChunkRef(digest(b"missing"), 7))
        assert refusal.value.reason == Reason.NOT_FOUND


async def test_a_seed_over_tls_is_asked_when_its_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "chunks", max_bytes=1 << 30, fsync=False)
    store.put(DATA)
    public, tls = certificate(tmp_path)
    with static_server(tmp_path / "chunks", tls) as port:
        with pytest.raises(TransportError):
            await get(f"https://127.0.0.1:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(public))
        assert await get(f"https://127.0.0.1:{port}") == DATA
        with pytest.raises(TransportError):  # the certificate is for an address, not for this name
            await get(f"https://localhost:{port}")


async def test_without_seeds_nothing_is_opened() -> None:
    async with open_seeds([]) as seeds:
        assert seeds == ()


async def test_every_seed_has_a_name_of_its_own() -> None:
    urls = ["http://a/x", "https://me:pw@a/y", "http://b:81", "http://A:7", f"http://{'c' * 250}"]
    async with open_seeds(urls) as seeds:
        names = [seed.name for seed in seeds]
    assert names == ["seed:a", "seed:a#2", "seed:b", "seed:a#3", "seed:" + "c" * 200]


Say = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """A web server that says what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.sent = 0
        self.say: Say = self.tell(b"")
        self.port = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def tell(self, *parts: bytes) -> Say:
        """Say these and end the connection."""

        async def say(writer: asyncio.StreamWriter) -> None:
            for part in parts:
                await self.send(writer, part)
            writer.close()

        return say

    async def send(self, writer: asyncio.StreamWriter, part: bytes) -> None:
        """Write something down that fits into the socket."""
        writer.write(part)
        await writer.drain()
        self.sent += len(part)

    async def __aenter__(self) -> "Scripted":
        self._listening = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                await self.say(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Scripted]:
    async with Scripted() as scripted:
        yield scripted


@pytest_asyncio.fixture
async def seed(server: Scripted) -> AsyncIterator[ChunkSource]:
    async with open_seeds([server.url]) as (one,):
        yield one


def reply(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


LENGTH = f"Content-Length: {len(DATA)}"


async def test_connections_are_kept_between_chunks(server: Scripted, seed: ChunkSource) -> None:
    async def say(writer: asyncio.StreamWriter) -> None:
        await server.send(writer, reply(DATA, LENGTH))

    server.say = say
    for _ in range(5):
        assert await seed.get(CHUNK, deadline=DEADLINE_S) == DATA
    assert server.connections == 1


async def test_a_body_in_http_chunks_is_fine(server: Scripted, seed: ChunkSource) -> None:
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (DATA[:10], DATA[10:]))
    server.say = server.tell(reply(pieces + b"0\r\n\r\n", "Transfer-Encoding: chunked"))
    assert await seed.get(CHUNK, deadline=DEADLINE_S) == DATA


async def test_a_secret_in_the_url_is_used_and_never_shown(server: Scripted) -> None:
    server.say = server.tell(reply(DATA, LENGTH))
    url = f"http://me:{SECRET}@127.0.0.1:{server.port}/a%2Fb/?sig={SECRET}%2B1"
    async with open_seeds([url]) as (seed,):
        assert await seed.get(CHUNK, deadline=DEADLINE_S) == DATA
        assert seed.name == "seed:127.0.0.1"
    name = CHUNK.digest.hex()
    wanted = f"GET /a%2Fb/{name[:2]}/{name[2:4]}/{name}?sig={SECRET}%2B1 HTTP/1.1\r\n"
    assert server.requests[0].startswith(wanted.encode())
    assert b64encode(f"me:{SECRET}".encode()) in server.requests[0]
    assert b"accept-encoding: identity\r\n" in server.requests[0].lower()


BAD_REPLIES = [
    reply(b"", "Content-Length: 0", status="403 Forbidden"),
    reply(b"", "Content-Length: 0", status="500 Oh"),
    reply(b"", "Content-Length: 0", status="204 None"),
    reply(DATA, LENGTH, status="206 Partial Content"),
    reply(DATA, LENGTH, "Content-Encoding: gzip"),
    reply(DATA, LENGTH, "Content-Encoding: identity, gzip"),
    reply(b"", "Content-Length: 99999999999999"),
    reply(b"", "Content-Length: -5"),
    reply(b"", "Content-Length: 5", "Content-Length: 6"),
    reply(b"zzz\r\n", "Transfer-Encoding: chunked"),
    reply(b"", "X: " + "y" * 100_000),
    reply(b"", *[f"X-{i}: y" for i in range(20_000)]),
    b"",
    b"SSH-2.0-OpenSSH\r\n",
    b"HTTP/1.1 999999 What\r\n\r\n",
    b"\x16\x03\x01" * 50,
]


@pytest.mark.parametrize("said", BAD_REPLIES, ids=range(len(BAD_REPLIES)))
async def test_every_other_answer_is_an_error_that_tells_no_secret(
    server: Scripted, said: bytes
) -> None:
    server.say = server.tell(said)
    async with open_seeds([f"{server.url}/?sig={SECRET}"]) as (seed,):
        with pytest.raises(TransportError) as error:
            await seed.get(CHUNK, deadline=DEADLINE_S)
        assert "seed:127.0.0.1" in str(error.value)
        assert SECRET not in repr(error.value)
        assert error.value.__suppress_context__ or error.value.__context__ is None


async def test_a_redirect_is_not_followed(server: Scripted, seed: ChunkSource) -> None:
    async with Scripted() as elsewhere:
        for status in ("301 Moved", "302 Found", "307 There", "308 There"):
            where = f"Location: {elsewhere.url}/secret"
            server.say = server.tell(reply(b"", where, "Content-Length: 0", status=status))
            with pytest.raises(TransportError, match=status[:3]):
                await seed.get(CHUNK, deadline=DEADLINE_S)
        assert elsewhere.connections == 0


async def test_a_bomb_is_not_unpacked(server: Scripted, seed: ChunkSource) -> None:
    bomb = gzip.compress(bytes(1 << 26))
    chunk = ChunkRef(digest(bomb), len(bomb))
    length = f"Content-Length: {len(bomb)}"
    server.say = server.tell(reply(bomb, length, "Content-Encoding: gzip"))
    with pytest.raises(TransportError, match="compresses"):
        await seed.get(chunk, deadline=DEADLINE_S)
    server.say = server.tell(reply(bomb, length))
    assert await seed.get(chunk, deadline=DEADLINE_S) == bomb


async def test_a_body_without_end_is_cut_off(server: Scripted, seed: ChunkSource) -> None:
    async def say(writer: asyncio.StreamWriter) -> None:
        await server.send(writer, reply(b""))
        while server.sent < 1 << 30:
            await server.send(writer, bytes(PIECE))

    server.say = say
    with pytest.raises(TransportError, match="more than"):
        await seed.get(CHUNK, deadline=DEADLINE_S)
    await asyncio.sleep(0.1)
    assert server.sent < 1 << 25  # what sockets hold


@pytest.mark.parametrize("body", [b"", b"drip"])
async def test_a_seed_that_drips_costs_the_deadline(
    server: Scripted, seed: ChunkSource, body: bytes
) -> None:
    async def say(writer: asyncio.StreamWriter) -> None:
        await server.send(writer, reply(b"", LENGTH) if body else b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            await server.send(writer, b"X: y\r\n")
            await asyncio.sleep(0.02)

    server.say = say
    with pytest.raises(TooSlow):
        await seed.get(CHUNK, deadline=0.3)


@pytest.mark.parametrize(
    "url",
    [
        *("http://h", "https://h:8443/a/b/?sig=%2B", "http://u:p@[::1]:80/chunks"),
        "file:///srv/a%20b/chunks",
    ],
)
def test_a_base_url_is_a_seed(url: str) -> None:
    assert NetworkConfig(seeds=[url]).seeds == [url]


@pytest.mark.parametrize(
    "url",
    [
        *("", "h/chunks", "ftp://h/", "http://", "http:///a", "http://h/#a", "http://h:0/"),
        *("http://h:99999/", "http://h/a b", "http://h/\r\nX: y", "http://[::1/"),
        *("file:etc", "file://h/etc", "file:///a?b", "file:///a b", "file:///a#b"),
    ],
)
def test_anything_else_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="a seed is http"):
        NetworkConfig(seeds=[url])
