"""Look at a run from outside, before joining it: is its trainer reached, and what would work for it take?

Everything is asked under a key that is made for it and thrown away: a trial hello uses up no ticket, and the
node's own key is never seen. Bytes and times are bounded (ProbeLimits). What was not measured is None.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

from ... import __version__
from ...crypto.hashing import DIGEST_BYTES, digest
from ...crypto.keys import SecretKey
from ...protocol import tickets
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.manifests import (
    Artifact,
    ChunkRef,
    PolicyManifest,
    RunManifest,
    Ticket,
)
from ...protocol.messages import (
    MAX_WATCHED,
    ChunkFollows,
    GetChunk,
    GetHeads,
    HaveChunks,
    HeadNotice,
    Heads,
    Hello,
    InLine,
    WatchChunks,
    Welcome,
)
from ...protocol.session import decode
from ...protocol.trust import AdmittedHead, TrustedRun, leaders_of, read_documents
from ...protocol.version import (
    ALPN_BLOBS,
    ALPN_CONTROL,
    CLOCK_SKEW_S,
    KIB,
    MAX_CHUNK,
    MAX_NAME,
    MIB,
    SPOKEN,
)
from ..config.run import NetworkConfig
from ..errors import TicketError, printable
from ..p2p.discovery import Discovery
from ..p2p.rpc import Refused, ask, receive_reply, send
from ..p2p.transport import Connection, Stream, Transport, TransportError
from .factories import MakeTransport, start_iroh, start_libp2p

MakeDiscovery = Callable[
    [NetworkConfig, SecretKey, bytes, Sequence[str]], Awaitable[Discovery | None]
]
TRIES = 3
"""Round trips that are timed; the shortest counts."""
MAX_PORTS = 4
"""TCP ports that are tried, one after the other."""
NEWEST = 20
"""Versions whose pace and size are looked at."""
MAX_ROUNDS = 4
"""Most requests for versions, each from the last one on."""
TOKEN_BYTES = 64
"""Most bytes of a token in a submission: id, mask, logprob, proof, framing (trainer/scheduler.py)."""


@dataclass(frozen=True)
class ProbeLimits:
    """Bounds of one look."""

    connect_s: float = 10.0
    reply_s: float = 10.0
    speed_s: float = 6.0
    """Longest time of each measurement of speed."""
    download: int = 16 * MIB
    """Most bytes that are fetched to measure; the run's config.json and manifests come on top."""
    whole_s: float = 90.0
    lanes: int = 4
    """Connections side by side, as a worker has them."""


@dataclass
class Way:
    """One way to the trainer."""

    answers: bool = False
    rtt_ms: float | None = None
    why: str = ""
    """Why it does not answer, or what is not known of it."""


@dataclass(frozen=True)
class Speed:
    """A measured transfer."""

    nbytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Bytes per second."""
        return self.nbytes / max(self.seconds, 1e-6)


@dataclass
class Reach:
    """A run, and the way to it, as seen from outside."""

    trainer: str
    run: str
    ticket: str = "not known"
    """`valid`, or why it admits no node; the trainer's own answer where it gives one."""
    may_join: bool | None = None
    """None: the trainer did not say."""
    busy: bool = False
    """Whether the trainer admits no new node at the moment."""
    udp: Way = field(default_factory=Way)
    tcp: Way = field(default_factory=Way)
    path: str = ""
    """direct or relayed; empty without a connection."""
    relay: str = ""
    """Relay of our own that answers; empty for none."""
    relays: tuple[str, ...] = ()
    """Relays that are configured here."""
    seen_from: str = ""
    """Our address and port, as the trainer sees them."""
    nat: str = "not known"
    mtu: int | None = None
    clock_ahead_s: int | None = None
    """Our clock less the trainer's, whole seconds."""
    clock_limit_s: int = CLOCK_SKEW_S
    download: Speed | None = None
    upload: Speed | None = None
    run_name: str = ""
    environments: tuple[str, ...] = ()
    version: int | None = None
    """Newest policy version."""
    versions_per_hour: float | None = None
    version_bytes: float | None = None
    """Mean bytes of the newest versions, as a worker that keeps up fetches them."""
    first_bytes: int | None = None
    """Bytes until the first rollout: files of the model, its base if policies are adapters, the policy."""
    workers: int | None = None
    """Workers that work for the run now; None where the trainer does not say, as one of before this field."""
    worker_rollouts_per_hour: float | None = None
    """Of the median of them; None where nobody works."""
    rollout_tokens: float | None = None
    """Mean sampled tokens of a rollout lately; None where that is not known."""
    rollout_bytes: int | None = None
    """Most bytes of the longest rollout, on its way to the trainer."""


@dataclass
class Outside:
    """A look at a run: what is shown, and the documents that it was made of."""

    reach: Reach
    manifest: RunManifest | None = None
    """None where the trainer did not hand it out."""
    model: dict[str, Any] | None = None
    """The model's config.json."""
    leaders: Leaders | None = None
    """Those that may lead the run; None where the trainer did not say."""


async def look(
    text: str,
    network: NetworkConfig,
    *,
    transport: MakeTransport = start_iroh,
    discovery: MakeDiscovery = start_libp2p,
    limits: ProbeLimits = ProbeLimits(),
    clock: Callable[[], float] = time.time,
) -> Outside:
    """Look at the run of a ticket.

    Raises TicketError for what cannot be read as one, TransportError if `network` cannot be bound.
    """
    try:
        ticket = tickets.read(text, now=0)
    except RemoteProtocolError as error:
        detail = (
            error.detail if error.reason == Reason.WRONG_VERSION else "it is damaged: copy it again"
        )
        raise TicketError(f"the ticket cannot be read: {detail}") from error
    key = SecretKey.generate()
    outside = Outside(
        Reach(ticket.trainer.hex(), ticket.run.hex(), relays=tuple(network.relay_urls))
    )
    end = await transport(network, key, 0)
    try:
        tcp = asyncio.create_task(_tcp(ticket, network, key, discovery, limits))
        try:
            async with asyncio.timeout(limits.whole_s):
                await _ask(outside, ticket, text, end, limits, clock)
        except TimeoutError:
            outside.reach.udp.why = f"not all was answered in {limits.whole_s:.0f} s"
        finally:
            outside.reach.tcp = await tcp
    finally:
        await end.close()
    return outside


async def _ask(
    outside: Outside,
    ticket: Ticket,
    text: str,
    end: Transport,
    limits: ProbeLimits,
    clock: Callable[[], float],
) -> None:
    """Ask all that is asked over QUIC."""
    reach = outside.reach
    reach.relay = next((hint for hint in end.addresses() if "://" in hint), "")
    dial = partial(end.connect, ticket.trainer, ticket.addresses, deadline=limits.connect_s)
    try:
        control = await dial(alpn=ALPN_CONTROL)
    except TransportError as error:
        reach.udp = Way(why=_unused_relay(ticket, reach) or printable(str(error), MAX_NAME))
        with suppress(RemoteProtocolError):  # says what it can without the trainer
            reach.ticket = _own_word(ticket, int(clock()))
        return
    try:
        await _time(reach.udp, control, limits)
        await _hello(outside, ticket, text, control, limits, clock)
        reach.nat = nat_of(reach.seen_from, end.addresses())
        leaders = outside.leaders or Leaders(ticket.run, ticket.trainer)
        trusted = TrustedRun(ticket.run, ticket.trainer, leaders=leaders)
        async with _connected(dial, limits.lanes) as lanes:
            if lanes:
                outside.model = await _read_model(outside.manifest, lanes[0], limits)
                await _weigh(outside, trusted, control, lanes, limits)
                reach.upload = await _upload(lanes, limits)
        path = control.path()
        reach.path, reach.mtu = path.kind, path.mtu or None
    except (TransportError, TimeoutError, Refused, RemoteProtocolError) as error:
        reach.udp.why = printable(str(error), MAX_NAME) or "the trainer fell silent"
    finally:
        await control.close()


def _unused_relay(ticket: Ticket, reach: Reach) -> str:
    """Say that a ticket leads to its trainer by relays alone, and this node uses none of them; else ""."""
    used = {url.rstrip("/") for url in reach.relays}
    if all("://" in hint and hint.rstrip("/") not in used for hint in ticket.addresses):
        hint = printable("".join(ticket.addresses[:1]), MAX_NAME)
        return f"the ticket has no address but the relay {hint or '(none)'}, which network.relay_urls lacks"
    return ""


@asynccontextmanager
async def _connected(
    dial: Callable[..., Awaitable[Connection]], count: int
) -> AsyncGenerator[list[Connection]]:
    """Yield up to `count` connections for chunks."""
    attempts = [dial(alpn=ALPN_BLOBS) for _ in range(count)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    lanes = [lane for lane in results if not isinstance(lane, BaseException)]
    try:
        yield lanes
    finally:
        for lane in lanes:
            await lane.close()


# -- the ways --------------------------------------------------------------------------------------


async def _time(way: Way, control: Connection, limits: ProbeLimits) -> None:
    """Time replies over a connection."""
    for _ in range(TRIES):
        begun = time.perf_counter()
        with suppress(Refused):
            await ask(control, GetHeads(after=2**53), Heads, deadline=limits.reply_s)
        took = 1000 * (time.perf_counter() - begun)
        way.rtt_ms = took if way.rtt_ms is None else min(way.rtt_ms, took)
    way.answers = True


async def _tcp(
    ticket: Ticket, network: NetworkConfig, key: SecretKey, make: MakeDiscovery, limits: ProbeLimits
) -> Way:
    """Try the trainer's TCP ports: time a handshake, then prove its key by libp2p."""
    ports = [port for address in ticket.discovery if (port := tcp_port(address)) is not None]
    if not ports:
        return Way(why="the trainer takes no TCP (it runs without libp2p)")
    way = Way()
    for host, port in ports[:MAX_PORTS]:
        try:
            for _ in range(TRIES):
                begun = time.perf_counter()
                async with asyncio.timeout(limits.connect_s / 2):
                    _, writer = await asyncio.open_connection(host, port)
                took = 1000 * (time.perf_counter() - begun)
                writer.close()
                way.rtt_ms = took if way.rtt_ms is None else min(way.rtt_ms, took)
            break
        except (OSError, TimeoutError) as error:
            way.why = f"{host}:{port}: {getattr(error, 'strerror', None) or 'no answer'}"
    if way.rtt_ms is None:
        return way
    way.why = ""
    try:
        libp2p = await make(network.model_copy(update={"port": 0}), key, ticket.run, ())
    except TransportError as error:
        way.why = printable(str(error), MAX_NAME)
        return way
    if libp2p is None:
        way.why = (
            "the port answers; libp2p is off or not installed here, so whose it is was not asked"
        )
        return way
    try:
        async with asyncio.timeout(limits.reply_s):
            await libp2p.converse(ticket.trainer, ticket.discovery, _watch_one)
        way.answers = True
    except (TransportError, TimeoutError, Refused, RemoteProtocolError) as error:
        way.why = f"the port answers, the trainer does not: {printable(str(error), MAX_NAME)}"
    finally:
        await libp2p.close()
    return way


async def _watch_one(stream: Stream) -> HaveChunks:
    """Ask over TCP for a chunk that does not exist: the shortest exchange over TCP."""
    await send(stream, WatchChunks((secrets.token_bytes(DIGEST_BYTES),)))
    return await receive_reply(stream, HaveChunks)


def tcp_port(address: str) -> tuple[str, int] | None:
    """Read host and port of a multiaddr /ip4/HOST/tcp/PORT...; None for any other."""
    parts = address.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6", "dns4", "dns6", "dns") or parts[3] != "tcp":
        return None
    return (parts[2], int(parts[4])) if parts[4].isdecimal() and int(parts[4]) < 2**16 else None


def nat_of(seen_from: str, own: Sequence[str]) -> str:
    """Infer address translation from the address that the trainer sees; `own` are this node's hints."""
    host, _, port = seen_from.rpartition(":")
    if not host:
        return "not known"
    if ip_address(host.strip("[]")).is_loopback:
        return "none: the trainer is on this machine"
    mine = [hint.rpartition(":") for hint in own if "://" not in hint]
    if host in [address for address, _, _ in mine]:
        near = "" if ip_address(host.strip("[]")).is_global else ", in a network that they share"
        return f"none on the way to the trainer{near}"
    keeps_port = port in [bound for _, _, bound in mine]
    how = "keeps the port" if keeps_port else "changes the port"
    return f"one that {how}; whether it shows other peers the same port takes a second observer"


# -- the ticket and the run ------------------------------------------------------------------------


def _own_word(ticket: Ticket, now: int) -> str:
    """Describe the validity that the ticket itself states."""
    if ticket.expires + CLOCK_SKEW_S < now:
        return "expired by our clock"
    return "signed and not expired; only the trainer knows whether it was revoked or used up"


async def _hello(
    outside: Outside,
    ticket: Ticket,
    text: str,
    control: Connection,
    limits: ProbeLimits,
    clock: Callable[[], float],
) -> None:
    """Try the ticket, and read the run's manifest."""
    reach = outside.reach
    sealed = tickets.sealed_bytes(text)
    hello = Hello(
        SPOKEN.newest,
        "inference",
        __version__,
        sealed,
        b"",
        oldest_wire_version=SPOKEN.stated_oldest(),
        trial=True,
    )
    try:
        welcome = await ask(control, hello, Welcome, deadline=limits.reply_s)
    except Refused as refusal:
        if refusal.reason == Reason.MALFORMED:
            reach.ticket = f"{_own_word(ticket, int(clock()))} (a trainer of an older release)"
            return
        reach.busy = refusal.reason in (Reason.BUSY, Reason.RATE_LIMITED)
        reach.may_join = None if reach.busy else False
        reach.ticket = printable(refusal.detail or refusal.reason.value, MAX_NAME)
        return
    now = int(clock())
    reach.ticket, reach.may_join = "valid", True
    reach.seen_from = printable(welcome.seen_from)
    if welcome.unix_time:
        reach.clock_ahead_s = now - welcome.unix_time
    reach.workers = welcome.workers if isinstance(welcome.workers, int) else None
    reach.rollout_tokens = welcome.tokens_per_rollout or None
    reach.worker_rollouts_per_hour = welcome.rollouts_per_hour or None
    documents = read_documents(welcome.manifest, ticket.run, now=0)
    outside.leaders, run = leaders_of(documents, welcome.leaders), documents.manifest
    outside.manifest = run
    reach.run_name = printable(run.name)
    reach.environments = tuple(printable(environment.id) for environment in run.environments)
    routes = run.routes.token_bytes if run.routes else 0
    reach.rollout_bytes = run.limits.max_model_len * (TOKEN_BYTES + routes)


async def _read_model(
    run: RunManifest | None, lane: Connection, limits: ProbeLimits
) -> dict[str, Any] | None:
    """Fetch the config.json of the run's model; None where there is none, or nonsense in it."""
    files = run.model.files if run is not None else ()
    config = next((file for file in files if file.name == "config.json"), None)
    if config is None:
        return None
    try:
        model: object = json.loads(await _fetch(lane, config.chunk, limits=limits))
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], model) if isinstance(model, dict) else None


async def _weigh(
    outside: Outside,
    trusted: TrustedRun,
    control: Connection,
    lanes: Sequence[Connection],
    limits: ProbeLimits,
) -> None:
    """Read the newest versions, and fetch chunks of a snapshot to measure the speed."""
    reach, run = outside.reach, outside.manifest
    notices = await _heads(trusted, control, limits)
    if not notices:
        return
    newest = max(notices, key=lambda pair: pair[0].order)[0]
    reach.version = newest.head.version
    reach.versions_per_hour = pace(
        [head for head, _ in notices if head.head.term == newest.head.term]
    )
    fetch = partial(_fetch, lanes[0], limits=limits)
    manifests: list[PolicyManifest] = []
    for head, notice in notices:
        document = notice.manifest
        if not document and (head is newest or not manifests):
            size = head.head.manifest_size
            document = await fetch(ChunkRef(head.head.manifest, size)) if size <= MAX_CHUNK else b""
        if document:
            manifests.append(trusted.check_manifest(head, document))
    snapshot = next(
        (a for m in reversed(manifests) for a in m.artifacts if a.kind == "anchor"), None
    )
    steps = [step.size for m in manifests[1:][-NEWEST:] if (step := smallest(m)) is not None]
    reach.version_bytes = sum(steps) / len(steps) if steps else None
    if run is not None:
        begin = sum(file.chunk.size for file in run.model.files)
        if run.adapters is not None:
            base = decode(await fetch(run.adapters.base), PolicyManifest)
            begin += base.artifacts[0].size
        reach.first_bytes = begin + (snapshot.size if snapshot else 0)
    chunks = list(snapshot.chunks) if snapshot else []
    reach.download = await _download(lanes, chunks, limits)


async def _heads(
    trusted: TrustedRun, control: Connection, limits: ProbeLimits
) -> list[tuple[AdmittedHead, HeadNotice]]:
    """Return the newest versions, and those from the newest snapshot on, oldest first."""
    heads: dict[tuple[int, int], tuple[AdmittedHead, HeadNotice]] = {}

    async def ask_after(version: int) -> int:
        reply = await ask(control, GetHeads(version), Heads, deadline=limits.reply_s)
        own = TrustedRun(trusted.run, trusted.trainer, leaders=trusted.leaders)
        for notice in reply.notices:
            head, _ = own.admit(notice.head, now=0)
            heads[head.order] = head, notice
        return len(reply.notices)

    after = -1
    for _ in range(MAX_ROUNDS):
        if not await ask_after(after):
            break
        after = max(heads)[1]
    if 0 < len(heads) < NEWEST:
        await ask_after(max(-1, after - NEWEST))
    return [heads[order] for order in sorted(heads)]


def pace(heads: Sequence[AdmittedHead]) -> float | None:
    """Compute versions per hour of heads in order; None of fewer than two, or within a second."""
    if len(heads) < 2:
        return None
    first, last = heads[0].head, heads[-1].head
    seconds = last.created - first.created
    return (last.version - first.version) * 3600 / seconds if seconds > 0 else None


def smallest(manifest: PolicyManifest) -> Artifact | None:
    """Return the cheapest way to a version for a worker that has the one before."""
    usable = [
        a
        for a in manifest.artifacts
        if a.kind == "anchor" or a.base_version == manifest.version - 1
    ]
    return min((a for a in usable if a.version < 0), key=lambda a: a.size, default=None)


# -- speed -----------------------------------------------------------------------------------------


async def _fetch(lane: Connection, chunk: ChunkRef, *, limits: ProbeLimits) -> bytes:
    """Fetch one small chunk whole. Raises RemoteProtocolError for other bytes."""
    pieces: list[bytes] = []
    async with asyncio.timeout(2 * limits.reply_s):
        async for piece in _pieces(lane, chunk):
            pieces.append(piece)
    data = b"".join(pieces)
    if digest(data) != chunk.digest:
        raise RemoteProtocolError(
            Reason.WRONG_DIGEST, "the trainer sent other bytes than it signed"
        )
    return data


async def _pieces(lane: Connection, chunk: ChunkRef) -> AsyncGenerator[bytes]:
    """Yield a chunk as it comes, in pieces of up to 64 KiB, the first of them empty."""
    stream = await lane.open_stream()
    try:
        await send(stream, GetChunk(chunk.digest))
        while isinstance(reply := await receive_reply(stream, ChunkFollows | InLine), InLine):  # type: ignore[arg-type]
            pass
        if reply.size != chunk.size:
            raise RemoteProtocolError(
                Reason.WRONG_DIGEST, "a chunk of another size than was signed"
            )
        yield b""
        left = reply.size
        while left:
            piece = await stream.read_exact(min(left, 64 * KIB))
            left -= len(piece)
            yield piece
    finally:
        await stream.abort()


async def _download(
    lanes: Sequence[Connection], chunks: Sequence[ChunkRef], limits: ProbeLimits
) -> Speed | None:
    """Measure how fast chunks come, side by side; None if none did."""
    waiting, got, begun = list(chunks), 0, 0.0

    async def work(lane: Connection) -> None:
        nonlocal got, begun
        while waiting and got < limits.download:
            async for piece in _pieces(lane, waiting.pop(0)):
                begun = begun or time.perf_counter()
                got += len(piece)
                if got >= limits.download:
                    return

    with suppress(TimeoutError, TransportError, Refused, RemoteProtocolError):
        async with asyncio.timeout(limits.speed_s):
            await asyncio.gather(*map(work, lanes))
    return Speed(got, time.perf_counter() - begun) if got else None


async def _upload(lanes: Sequence[Connection], limits: ProbeLimits) -> Speed | None:
    """Measure how fast requests go out; None if they are not answered.

    Each asks for chunks that nobody has, by 128 KiB of names. They are few and short, so that the real speed
    is at least this.
    """
    size = MAX_WATCHED * DIGEST_BYTES
    names = [secrets.token_bytes(DIGEST_BYTES) for _ in range(MAX_WATCHED)]

    async def work(lane: Connection) -> None:
        stream = await lane.open_stream()
        try:
            await send(stream, WatchChunks(tuple(names)))
            await receive_reply(stream, HaveChunks)
        finally:
            await stream.abort()

    begun = time.perf_counter()
    try:
        async with asyncio.timeout(limits.speed_s):
            await asyncio.gather(*map(work, lanes))
    except (TimeoutError, TransportError, Refused, RemoteProtocolError):
        return None
    return Speed(size * len(lanes), time.perf_counter() - begun)


def last_pace(data_dir: Path) -> float | None:
    """Return the tokens per second of the last worker in a data directory; None if none was noted."""
    try:
        last = json.loads((data_dir / "last_status.json").read_text(encoding="utf-8"))
        return float(last["engine"]["tokens_per_s"]) or None
    except (OSError, ValueError, LookupError, TypeError):
        return None
