"""Seeds: chunks from a copy of a node's `chunks` folder, on a static web server or a disk of this machine.

Nothing that a seed says is believed: headers, lengths, redirects. No URL is ever logged or shown, as it may
contain a password. The text of a ticket behind a link is fetched by the same rules.
"""

import asyncio
import errno
import os
import ssl
import stat
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from ...protocol.errors import Reason
from ...protocol.manifests import ChunkRef
from ...protocol.version import KIB
from ..errors import TicketError
from .chunk_client import ChunkSource
from .limits import Pacer
from .rpc import Refused, TooSlow
from .transport import StreamClosed, TransportError, Unreachable

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

CONNECT_S = 5.0
"""Seconds for the TCP handshake with one address."""
SILENCE_S = 10.0
"""A seed that sends nothing for this long, before the first byte or later, is given up."""
CONNECTIONS_PER_SEED = 8
PIECE = 256 * KIB
MAX_SHOWN = 200
"""Characters of a host in a name: one that fits into every message."""
OK, NOT_FOUND, GONE = 200, 404, 410
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "primerl-node"}


class HttpSeed:
    """One base URL; a ChunkSource. Made by open_seeds()."""

    def __init__(self, base: str, name: str, session: "ClientSession", pacer: Pacer) -> None:
        """`base`: an http(s) URL, perhaps with a user, a password or a query that it wants to be asked with."""
        self._base = urlsplit(base)
        self._name = name
        self._session = session
        self._pacer = pacer
        self.received = 0
        """Bytes of the chunks that came, also of those that broke off."""

    @property
    def name(self) -> str:
        """`seed:` and the host, numbered if one host has several: all that others may see."""
        return self._name

    async def get(self, chunk: ChunkRef, *, deadline: float) -> bytes:
        """Fetch exactly `chunk.size` bytes that claim to be this chunk, within `deadline` seconds.

        Raises:
            Refused: the seed has no such file (NOT_FOUND).
            TransportError: it cannot be reached, is too slow (TooSlow), or answers with anything but 200
                and that many plain bytes.
        """
        from aiohttp import ClientError, ClientPayloadError

        try:
            async with asyncio.timeout(deadline):
                return await self._ask(chunk)
        except TimeoutError:  # ours, or the library's, whose words name the URL
            raise TooSlow(f"{self.name} did not send a chunk in time") from None
        except ClientPayloadError:
            raise StreamClosed(f"{self.name} broke off in the middle of a chunk") from None
        except (ClientError, OSError, ValueError) as error:
            # `from None`: the library's errors name the URL, which may hold a secret in its query.
            kind = type(error).__name__
            raise Unreachable(f"{self.name} could not be asked ({kind}): is it up?") from None

    async def _ask(self, chunk: ChunkRef) -> bytes:
        from yarl import URL

        where = URL(self._url(chunk.digest.hex()), encoded=True)
        async with self._session.get(where, allow_redirects=False) as response:
            try:
                self._check(response, chunk.size)
                return await self._read(response, chunk.size)
            finally:
                response.close()  # a body that was read to its end has left its connection already

    def _check(self, response: "ClientResponse", size: int) -> None:
        """Refuse, by its headers alone, a response that cannot be the chunk."""
        if response.status in (NOT_FOUND, GONE):
            raise Refused(Reason.NOT_FOUND, self.name)
        if response.status != OK:
            raise TransportError(
                f"{self.name} answers {response.status}: it has to serve plain files"
            )
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise TransportError(f"{self.name} compresses its replies: switch that off there")
        if response.content_length not in (None, size):
            raise TransportError(
                f"{self.name} has {response.content_length} bytes instead of {size}"
            )

    async def _read(self, response: "ClientResponse", size: int) -> bytes:
        data = bytearray()
        while piece := await response.content.read(min(PIECE, size + 1 - len(data))):
            data += piece
            self.received += len(piece)
            await self._pacer.pace(len(piece))
            if len(data) > size:
                raise TransportError(
                    f"{self.name} sends more than the {size} bytes that were signed"
                )
        if len(data) < size:
            raise StreamClosed(f"{self.name} ended after {len(data)} of {size} bytes")
        return bytes(data)

    def _url(self, name: str) -> str:
        """Return the URL of a chunk, below the base with its query."""
        return urlunsplit(self._base._replace(path=_place(self._base, name)))


class FolderSeed:
    """A `chunks` folder on a disk, perhaps that of another node of this machine; a ChunkSource."""

    def __init__(self, base: str, name: str) -> None:
        """`base`: a file URL."""
        self._base = urlsplit(base)
        self.name = name
        self.received = 0
        """Bytes that came over a network: none."""

    async def get(self, chunk: ChunkRef, *, deadline: float) -> bytes:
        """Fetch exactly `chunk.size` bytes that claim to be this chunk, within `deadline` seconds.

        Raises:
            Refused: there is no such file (NOT_FOUND).
            TransportError: it cannot be read, in time (TooSlow), or is not that long.
        """
        path = Path(unquote(_place(self._base, chunk.digest.hex())))
        try:
            async with asyncio.timeout(deadline):
                data = await asyncio.to_thread(read_most, path, chunk.size + 1)
        except TimeoutError:
            raise TooSlow(f"{self.name} was not read in time") from None
        except FileNotFoundError:
            raise Refused(Reason.NOT_FOUND, self.name) from None
        except OSError as error:
            raise Unreachable(f"{self.name} could not be read ({error.strerror})") from error
        if len(data) > chunk.size:
            raise TransportError(
                f"{self.name} has more than the {chunk.size} bytes that were signed"
            )
        if len(data) < chunk.size:
            raise StreamClosed(f"{self.name} has {len(data)} of {chunk.size} bytes")
        return data


def _place(base: SplitResult, name: str) -> str:
    """Return the path of a chunk: the layout of FileStore below the base."""
    return f"{base.path.rstrip('/')}/{name[:2]}/{name[2:4]}/{name}"


def read_most(path: Path, size: int) -> bytes:
    """Read a plain file up to a limit; anything else is an OSError, at once."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no plain file")
        return file.read(size)


@asynccontextmanager
async def open_seeds(
    urls: Sequence[str], *, pacer: Pacer | None = None
) -> AsyncGenerator[tuple[ChunkSource, ...]]:
    """Open one seed for each base URL; those on the web share a session that ends with the block, and `pacer`.

    Their certificates are those that OpenSSL trusts; SSL_CERT_FILE names others.
    """
    named = list(zip(urls, _names(urls), strict=True))
    if all(_is_folder(url) for url in urls):
        yield tuple(FolderSeed(url, name) for url, name in named)
        return
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

    connector = TCPConnector(limit_per_host=CONNECTIONS_PER_SEED, ssl=ssl.create_default_context())
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    async with ClientSession(
        connector=connector,
        timeout=timeout,
        headers=HEADERS,
        auto_decompress=False,
        cookie_jar=DummyCookieJar(),
        trust_env=False,  # no proxy and no .netrc of the environment
    ) as session:
        yield tuple(
            FolderSeed(url, name)
            if _is_folder(url)
            else HttpSeed(url, name, session, pacer or Pacer())
            for url, name in named
        )


async def fetch_text(link: str, most: int, *, deadline_s: float) -> str:
    """Fetch the first `most` bytes of the text at an https link, within `deadline_s` seconds.

    The server's certificate must be one that this system trusts. Redirects are not followed: they could lead
    anywhere. Raises TicketError.
    """
    try:
        parts = urlsplit(link)
        host = _host(link)
    except ValueError as error:
        raise TicketError(f"the link to a ticket cannot be read: {error}") from error
    if parts.scheme.lower() != "https" or not host:
        raise TicketError(
            "a ticket is fetched over https alone, as it is a secret: give an https link, or the ticket"
        )
    from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout
    from yarl import URL

    trusted = ssl.create_default_context()
    try:
        async with (
            ClientSession(
                timeout=ClientTimeout(total=deadline_s, sock_connect=CONNECT_S),
                headers=HEADERS,
                auto_decompress=False,
                trust_env=True,  # a worker's owner may be behind a proxy
            ) as session,
            session.get(URL(link, encoded=True), ssl=trusted, allow_redirects=False) as response,
        ):
            try:
                return await _text_of(response, host, most)
            finally:
                if (unread := response.connection) is not None and unread.transport is not None:
                    unread.transport.abort()  # else the loop ends before TLS has said goodbye
    except TimeoutError as error:
        raise TicketError(f"{host} did not send a ticket within {deadline_s:.0f} s") from error
    except (ClientError, OSError, ValueError) as error:
        # the other errors of the library name the link, which may be a secret
        why = error if isinstance(error, ClientConnectorError) else type(error).__name__
        raise TicketError(f"no ticket can be fetched from {host}: {why}") from None


async def _text_of(response: "ClientResponse", host: str, most: int) -> str:
    if response.status != OK:
        moved = " (a redirect: give the link that it leads to)"
        raise TicketError(
            f"{host} answers {response.status}{moved * (300 <= response.status < 400)}: ask the trainer's "
            "operator for the link"
        )
    data = b""
    while len(data) < most and (piece := await response.content.read(most - len(data))):
        data += piece
    return data.decode("utf-8", "replace")


def _names(urls: Sequence[str]) -> list[str]:
    hosts = ["folder" if _is_folder(url) else _host(url) for url in urls]
    counts = [hosts[: number + 1].count(host) for number, host in enumerate(hosts)]
    return [
        f"seed:{host}" if count == 1 else f"seed:{host}#{count}"
        for host, count in zip(hosts, counts, strict=True)
    ]


def _host(url: str) -> str:
    return (urlsplit(url).hostname or "")[:MAX_SHOWN]


def _is_folder(url: str) -> bool:
    return urlsplit(url).scheme == "file"
