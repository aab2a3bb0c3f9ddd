"""libp2p discovery and gossip: the only file that imports libp2p, which runs on trio in one thread.

Nothing here is believed and nothing depends on it: libp2p failing costs speed, never the node.
Kademlia is asked with a deadline and may fail; whatever must arrive goes by the transport.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from ...crypto.keys import NODE_ID_BYTES, SecretKey
from ...protocol.errors import LocalProtocolError
from ...protocol.version import KIB, MAX_GOSSIP
from .discovery import Fact
from .gossip_limits import Gate
from .transport import TransportError
from .trio_thread import EventQueue, TrioStopped, TrioThread

if TYPE_CHECKING:
    import trio

logger = logging.getLogger(__name__)

PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash of a protobuf PublicKey{Ed25519, 32 bytes}: peer id = prefix + node id."""

FACT_QUEUE = 256
MAX_FRAME = 256 * KIB
"""One pubsub frame; an honest one carries a few facts or a list of message names."""
MAX_BOOTSTRAP = 16
WANTED_NEIGHBOURS = 4
"""Below this, bootstrap peers are dialled again."""
HIGH_WATER = 24
MAX_CONNECTIONS = 64
DIAL_SECONDS = 10.0
RETRY_SECONDS = (1.0, 30.0)
LOOKUP_SECONDS = 20.0
LOOKUP_EVERY_SECONDS = (30.0, 600.0)
DIALS_PER_LOOKUP = 3
RESTART_SECONDS = (1.0, 60.0)

T = TypeVar("T")
Args = TypeVarTuple("Args")


def peer_id_of(node_id: bytes) -> bytes:
    """The libp2p peer id (38 bytes) of a node id."""
    if len(node_id) != NODE_ID_BYTES:
        raise ValueError(f"a node id has {NODE_ID_BYTES} bytes, not {len(node_id)}")
    return PEER_ID_PREFIX + node_id


def node_id_of(peer_id: bytes) -> bytes:
    """The node id inside a libp2p peer id. Raises ValueError for ids of other key types."""
    if len(peer_id) != len(PEER_ID_PREFIX) + NODE_ID_BYTES or not peer_id.startswith(
        PEER_ID_PREFIX
    ):
        raise ValueError("not the peer id of an Ed25519 key: such a peer is none of ours")
    return peer_id[len(PEER_ID_PREFIX) :]


class Libp2pDiscovery:
    """Discovery by libp2p: bootstrap peers, Kademlia providers of the run, GossipSub, mDNS."""

    def __init__(
        self, key: SecretKey, *, run_id: bytes, host: str, port: int, mdns: bool = False
    ) -> None:
        self.gate = Gate()
        self._seed = key.seed()
        self._run = run_id.hex()
        self._host = host
        self._port = port
        self._mdns = mdns
        self._facts: EventQueue[Fact] = EventQueue(FACT_QUEUE)
        self._thread = TrioThread("libp2p")
        self._life: _Life | None = None
        self._addresses: tuple[str, ...] = ()

    @property
    def dropped_facts(self) -> int:
        """Facts that nobody took from facts() in time."""
        return self._facts.dropped

    def addresses(self) -> tuple[str, ...]:
        """Our multiaddrs with /p2p/PEERID; empty before start()."""
        return self._addresses

    async def start(self, bootstrap: Sequence[str]) -> None:
        """Listen, then connect to `bootstrap` in the background.

        Raises:
            AddressInUse: another program has the TCP port.
            TransportError: the address is not one of this machine's.
        """
        self._facts.bind(asyncio.get_running_loop())
        try:
            await self._thread.start()
            await self._thread.call(self._open, tuple(bootstrap))
        except BaseException:
            await self.close()
            raise

    async def publish(self, sealed: bytes) -> None:
        """Gossip a sealed fact; while libp2p is down it goes nowhere.

        Raises:
            LocalProtocolError: the fact is larger than MAX_GOSSIP.
        """
        if len(sealed) > MAX_GOSSIP:
            raise LocalProtocolError(
                f"a fact of {len(sealed)} bytes cannot be gossiped (at most {MAX_GOSSIP}):"
                " send a digest of it, and the bytes by the transport"
            )
        life = self._life
        if life is None:
            return
        try:
            await self._thread.call(life.publish, sealed)
        except TrioStopped:
            logger.debug("a fact was not gossiped: discovery is closed")

    def facts(self) -> AsyncIterator[Fact]:
        """Facts from others as they come; ends with close()."""
        return self._facts

    def neighbours(self) -> int:
        """How many connected peers listen to this run's topic."""
        life = self._life
        return 0 if life is None else life.neighbours()

    async def close(self) -> None:
        """Leave, and join the thread. Never raises; closing twice is fine."""
        await self._thread.stop()
        self._life = None
        self._facts.close()

    async def _open(self, bootstrap: tuple[str, ...]) -> None:
        await self._thread.nursery.start(self._supervise, bootstrap)

    async def _supervise(
        self, bootstrap: tuple[str, ...], *, task_status: "trio.TaskStatus[None]"
    ) -> None:
        """Start libp2p again whenever it dies; only the first start may fail for good."""
        import trio

        _quiet()
        peers = _parse_bootstrap(bootstrap)
        started, pause = False, RESTART_SECONDS[0]
        while True:
            try:
                _check_free(self._host, self._port)
                async with _open_life(self._seed, self._run, self._listen(), self._receive) as life:
                    self._enter(life)
                    if not started:
                        task_status.started()
                    started, pause = True, RESTART_SECONDS[0]
                    await life.keep_connected(peers, mdns=self._mdns)
            except TransportError:
                if not started:
                    raise
                logger.warning("TCP port %d was taken while libp2p was down", self._port)
            except Exception as error:
                # Foreign code that died of foreign bytes: that must not end the node.
                if not started:
                    raise TransportError(
                        "libp2p did not start: set network.libp2p = false to go on without it"
                    ) from error
                logger.warning("libp2p died and starts again in %.0f s: %r", pause, error)
            self._life = None
            await trio.sleep(pause)
            pause = min(2 * pause, RESTART_SECONDS[1])
