"""The services of a node that every role uses: identity, transport, peers, heads, chunks, discovery.

`node/app/services.py` builds and closes them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ... import __version__
from ...crypto.keys import SecretKey
from ...protocol.envelope import ANYBODY, Opened, Purpose, seal, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.manifests import PeerRecord, Role
from ...protocol.messages import Accepted, Goodbye, Message
from ...protocol.trust import Equivocation, EquivocationProof
from ...protocol.version import ALPN_BLOBS, ALPN_CONTROL, ALPN_PIPELINE, SPOKEN, WireRange
from ..config.run import NodeConfig
from ..errors import BusyError, NodeError, RunFailed, TicketError
from ..ops.tracing import Tracing
from ..storage.chunk_store import FileStore
from ..storage.ledger import Ledger
from .chunk_client import TcpChunks
from .connections import ConnectionPool, Gate, Handler, Router, no_gate, no_pipelines
from .discovery import Discovery
from .download import BlobFetcher
from .gossip import Gossip, HoldingsAnnouncer
from .heads import HeadFollower, HeadServer, HeadStore
from .limits import Rates
from .peers import PeerTable
from .rpc import Refused
from .serve import BlobServer, ChunkArrivals, TcpChunkServer
from .transport import Transport, TransportError
from .waiting import LogBackoff

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECORD_TTL_S = 3600
MAX_STREAMS_PER_PEER = 32
"""Most requests of one peer that are answered at a time."""
EQUIVOCATION = "equivocation"
FAREWELL_S = 0.5
"""Seconds for a proof of equivocation to be sent before the node ends."""
GOODBYE_S = 2.0
"""Longest time that a leaving node takes to say so."""
PAUSE_S, PAUSE_MAX_S = 0.3, 10.0
"""Least and longest pause of a role whose trainer did not give it what it asked for."""
REFUSED_PAUSE_S = 30.0
"""The pause of a role that the trainer does not want: its operator may name the node."""


KEY_REFUSALS = frozenset({Reason.KEY_IN_USE, Reason.KEY_RETIRED})


def key_error(refusal: Refused) -> NodeError:
    """Make the error that ends a node whose key its trainer refuses for one of KEY_REFUSALS."""
    if refusal.reason == Reason.KEY_RETIRED:
        return TicketError(
            f"the trainer refuses us: {refusal.detail}; another --data-dir gets a key of its own"
        )
    return BusyError(
        f"the trainer refuses us: {refusal.detail} (another --data-dir gets one). If nobody of yours copied "
        "this directory, the key was stolen: `primerl-node retire` ends it for good"
    )


@dataclass
class NodeServices:
    """A node in its run: its key, its network, its ledger and its chunks; every role is built on it."""

    key: SecretKey
    run_id: bytes
    role: Role
    config: NodeConfig
    ledger: Ledger
    store: FileStore
    transport: Transport
    peers: PeerTable
    links: ConnectionPool
    arrivals: ChunkArrivals
    blobs: BlobServer
    fetcher: BlobFetcher
    heads: HeadStore
    head_server: HeadServer
    discovery: Discovery | None
    holdings: HoldingsAnnouncer
    """Versions that we hold, to be gossiped if discovery is on."""
    fraud: "asyncio.Queue[RemoteProtocolError]"
    tracing: Tracing = field(default_factory=Tracing)
    wire: WireRange = SPOKEN
    """Wire versions that this node speaks."""
    rates: Rates = field(default_factory=Rates)
    tcp: tuple[TcpChunks, TcpChunkServer] | None = None
    """Both directions of chunks over TCP; None where discovery is off."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the trainer has admitted this node."""
    key_refusals: "asyncio.Queue[Refused]" = field(
        default_factory=lambda: asyncio.Queue[Refused](1)
    )
    left: bool = False
    """Whether this node has said goodbye."""
    paused: Callable[[], str] = lambda: ""
    """Returns why its owner lets it work on nothing for now; empty while it works."""
    keep_chunks: set[bytes] = field(default_factory=set[bytes])
    """Chunks that are not weights and are never collected: model files, manifests."""

    @property
    def trainer(self) -> bytes:
        """Id of the node that leads the run: ours at a trainer, else that of the newest head's signer."""
        return self.key.node_id if self.role == "trainer" else self.heads.trusted.leader

    @property
    def leaders(self) -> Leaders:
        """The nodes that may lead the run: what one of them has signed counts."""
        return self.heads.trusted.leaders

    def seal(
        self,
        purpose: Purpose,
        body: msgspec.Struct,
        *,
        expires: float,
        recipient: bytes = ANYBODY,
        sequence: int = 0,
    ) -> bytes:
        """Sign `body` for one purpose in this run. `expires` in Unix seconds."""
        return seal(
            self.key,
            purpose,
            self.run_id,
            body,
            expires=int(expires),
            recipient=recipient,
            sequence=sequence,
        )

    def unseal(
        self,
        sealed: bytes,
        purpose: Purpose,
        kind: type[T],
        *,
        now: float | None = None,
        signer: bytes | None = None,
        recipient: bytes | None = None,
    ) -> Opened[T]:
        """Open an envelope of this run, by a leader of it if no `signer` is given.

        It must not have expired, unless `now` is 0. Raises RemoteProtocolError.
        """
        at = int(time.time() if now is None else now)
        if signer is None:
            return self.leaders.unseal(sealed, purpose, kind, now=at, recipient=recipient)
        return unseal(
            sealed, purpose, kind, now=at, run=self.run_id, signer=signer, recipient=recipient
        )

    async def ask_trainer(self, message: Message, kind: type[T], *, deadline: float) -> T:
        """Ask the trainer and return its reply; see ConnectionPool.request()."""
        try:
            return await self.links.request(
                self.trainer, ALPN_CONTROL, message, kind, deadline=deadline
            )
        except Refused as refusal:
            self.report_refusal(refusal)
            raise

    def addresses(self) -> tuple[str, ...]:
        """Return host:port hints for tickets and records."""
        return tuple(self.config.network.advertise) or self.transport.addresses()

    def discovery_addresses(self) -> tuple[str, ...]:
        """libp2p multiaddrs for tickets and records."""
        return self.discovery.addresses() if self.discovery else ()

    def record(self) -> bytes:
        """Seal our peer record."""
        record = PeerRecord(
            node=self.key.node_id,
            role=self.role,
            software=__version__,
            addresses=self.addresses(),
            discovery=self.discovery_addresses(),
            share_address=self.config.network.share_address,
            name=self.config.network.name,
        )
        return self.seal(Purpose.PEER, record, expires=time.time() + RECORD_TTL_S)

    def public_record(self) -> bytes:
        """Seal our peer record for gossip: without addresses if those are not to be shared."""
        if self.config.network.share_address:
            return self.record()
        name = self.config.network.name
        record = PeerRecord(self.key.node_id, self.role, __version__, (), (), False, name)
        return self.seal(Purpose.PEER, record, expires=time.time() + RECORD_TTL_S)

    def router(
        self, control: Handler, pipeline: Handler = no_pipelines, gate: Gate = no_gate
    ) -> Router:
        """Make the accept loop: `control` answers ALPN_CONTROL behind `gate`, `pipeline` ALPN_PIPELINE."""
        network = self.config.network
        return Router(
            self.transport,
            self.peers,
            {ALPN_CONTROL: control, ALPN_BLOBS: self.blobs.handle, ALPN_PIPELINE: pipeline},
            max_streams_per_peer=MAX_STREAMS_PER_PEER,
            max_peers=network.max_peers,
            gate=gate,
        )

    def gossip(self) -> Gossip | None:
        """Make the gossip loop; None where discovery is off."""
        if self.discovery is None:
            return None
        return Gossip(
            self.discovery,
            self.heads,
            self.peers,
            record=self.public_record,
            holdings=self.holdings,
            on_fraud=self.report_fraud,
            admitted=None if self.role == "trainer" else self.admitted,
        )

    def traffic(self) -> tuple[int, int]:
        """Return the bytes (sent, received) since the start, by QUIC, TCP and from web seeds.

        Without what discovery itself sends and receives.
        """
        sent, received = self.peers.traffic()
        if self.tcp is not None:
            fetched, served = self.tcp
            sent, received = sent + served.sent, received + fetched.received
        return sent, received + sum(seed.received for seed in self.fetcher.seeds)

    async def say_goodbye(self, why: str = "") -> None:
        """Tell the trainer that this node leaves, so that its work goes to others; `why` names a failure."""
        goodbye, self.left = Goodbye(why), True
        try:
            async with asyncio.timeout(GOODBYE_S):  # a trainer that is gone cannot be connected to
                await self.ask_trainer(goodbye, Accepted, deadline=GOODBYE_S)
        except (TimeoutError, TransportError, Refused, RemoteProtocolError) as error:
            logger.debug("goodbye was not heard: %s", error)

    def follower(self, node: bytes, *, authority: bool = False) -> HeadFollower:
        """Make a watch of another node's heads; the trainer has the authority to end or refuse this node."""
        return HeadFollower(
            self.heads,
            self.links,
            node,
            authority=authority,
            on_fraud=self.report_fraud,
            on_refusal=self.report_refusal if authority else lambda _: None,
        )

    def report_refusal(self, refusal: Refused) -> None:
        """Queue the trainer's refusal of our key for watch_key(); any other refusal is ignored."""
        if refusal.reason in KEY_REFUSALS:
            with suppress(asyncio.QueueFull):
                self.key_refusals.put_nowait(refusal)

    async def watch_key(self) -> None:
        """Wait until the trainer refuses our key; then raise BusyError or TicketError."""
        raise key_error(await self.key_refusals.get())

    def report_fraud(self, error: RemoteProtocolError) -> None:
        """Queue a proof against the trainer for watch_fraud(); one is enough, more may be dropped."""
        with suppress(asyncio.QueueFull):
            self.fraud.put_nowait(error)

    async def watch_fraud(self) -> None:
        """Wait for a proof that the trainer's key signed two heads of one version; then raise RunFailed."""
        error = await self.fraud.get()
        if isinstance(error, Equivocation):
            await self._tell(error.proof)
        if self.role == "trainer":
            raise RunFailed(
                f"another process signs with this run's key ({error.detail}): stop the other trainer, "
                "or begin a new run with a new key"
            )
        raise RunFailed(
            f"the trainer contradicts itself ({error.detail}): stop trusting this run, tell its operator"
        )

    async def _tell(self, proof: EquivocationProof) -> None:
        """Keep the proof, and gossip it: anybody can check it."""
        sealed = self.seal(Purpose.EQUIVOCATION, proof, expires=time.time() + RECORD_TTL_S)
        self.ledger.set(EQUIVOCATION, sealed)
        if self.discovery is not None:
            await self.discovery.publish(sealed)
            await asyncio.sleep(FAREWELL_S)


class Obstacle:
    """Why the trainer does not give a role what it asks for, and when to ask again."""

    def __init__(self, services: NodeServices, work: str, cure: str) -> None:
        """`work` is what is asked for, as "audits"; `cure` names those who get it, at the trainer."""
        self._services = services
        self._work = work
        self._cure = cure
        self.end()

    def end(self, reason: str = "") -> None:
        """The trainer answered; `reason` says why there is nothing to do all the same."""
        self.reason = reason
        self._pause_s = PAUSE_S
        self._lines = LogBackoff()

    def explain(self, error: Exception) -> float:
        """Report an error of a question; return the seconds to wait before the next one."""
        self.reason = f"the trainer gives no {self._work}: {error}"
        pause = self._pause_s
        self._pause_s = min(1.6 * pause, PAUSE_MAX_S)
        refused = error.reason if isinstance(error, Refused) else None
        if isinstance(error, Refused):
            self._services.report_refusal(error)
        if refused in (Reason.NOT_ADMITTED, Reason.BANNED):
            pause = REFUSED_PAUSE_S
            node = self._services.key.node_id.hex()
            self.reason += f"; {self._cure} has to name this node, {node}"
            logger.error("%s. Asking again in %.0f s", self.reason, pause)
        elif self._lines.due():
            logger.info("%s", self.reason)
        return pause
