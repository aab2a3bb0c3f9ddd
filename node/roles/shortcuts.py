"""Shortcuts: one merged delta in place of the single ones that are missing, from a peer that makes it.

Nothing of an answer is believed: it is bounded before a byte is fetched and proved by the digest in the
signed head. Whatever is wrong with it, the single deltas are still there.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import Artifact, ChunkRef
from ...protocol.messages import MAX_WATCHED, GetMerged, Merged
from ...protocol.version import ALPN_CONTROL, MIB
from ..errors import NetworkError
from ..network.links import Links
from ..network.peers import PeerTable
from ..network.rpc import Refused
from ..network.transport import TransportError
from ..store import Store
from ..weights.chain import Step
from ..weights.chunking import SMALLEST
from ..weights.codec import CODEC
from ..weights.errors import CodecError, DigestMismatch, WeightsError
from ..weights.merge import MAX_MERGED
from .merging import MergeDesk

logger = logging.getLogger(__name__)

WORTH_BYTES = 1 * MIB
"""What is missing in single deltas before it pays to ask: below, a round trip costs more than it saves."""
GAIN = 0.9
"""A merged delta of more than this share of what is missing is not taken."""
ASKED_PEERS = 2
"""Upstream peers asked before the trainer."""
FAST = 64 * MIB
"""Bytes per second. No longer than the single deltas would take at this rate do we wait for a merge."""
ASK_S = (2.0, 30.0)
"""The shortest and the longest wait for all answers together."""
SLOW = 1 * MIB
"""Bytes per second expected of a network of which nothing is known."""
FETCH_S = 5.0
"""A merged delta may take this long, or twice as long as the single ones would take."""
PAUSE_S = 60.0
"""So long we do not ask a peer again that was of no use."""
DISTRUST_S = 3600.0
"""So long we do not ask a peer again whose answer was wrong."""

Apply = Callable[[int, Artifact], Awaitable[None]]
"""Prove and hold (version, artifact), whose chunks are in the store. Raises WeightsError, StorageError."""
Needed = Callable[[Sequence[Step]], Sequence[ChunkRef]]
"""The chunks that we need of some steps, in order. Raises CodecError."""
Fetch = Callable[[Sequence[ChunkRef], Sequence[bytes], bytes], Awaitable[None]]
"""Bring chunks into the store, from peers that may have them or one that must."""


class Shortcuts:
    """Asks for merged deltas, and takes them where they pay."""

    def __init__(
        self,
        *,
        links: Links,
        fetch: Fetch,
        store: Store,
        peers: PeerTable,
        desk: MergeDesk,
        trainer: bytes,
        upstreams: Callable[[], Sequence[bytes]],
        needed: Needed,
    ) -> None:
        self._needed = needed
        self._links = links
        self._bring = fetch
        self._store = store
        self._peers = peers
        self._desk = desk
        self._trainer = trainer
        self._upstreams = upstreams
        self._avoided: dict[bytes, float] = {}
        """Monotonic seconds until which a peer is not asked."""
        self.taken = 0
        """Merged deltas applied."""

    async def begin(self, steps: Sequence[Step]) -> int:
        """How many of `steps` come before those that one merged delta may replace; all, if it cannot pay."""
        lacking = [await self._missing([step]) for step in steps]
        first = next(
            (i for i, (_, one) in enumerate(steps) if one.kind == "delta" and lacking[i]),
            len(steps),
        )
        count = len(steps) - first
        pays = 2 <= count <= MAX_MERGED and sum(lacking[first:]) >= WORTH_BYTES
        return first if pays else len(steps)

    async def take(self, steps: Sequence[Step], state: bytes, apply: Apply) -> bool:
        """Do all of `steps`, deltas that lead to `state`, by one merged delta; False if none was any good.

        Raises StorageError.
        """
        base, (version, _) = steps[0][1], steps[-1]
        request = GetMerged(base.base_version, base.base_state, version, state)
        missing = await self._missing(steps)
        sources = self._sources()
        patience = min(max(missing / FAST, ASK_S[0]), ASK_S[1])
        for number, source in enumerate(sources):
            asked = time.monotonic()
            artifact = await self._ask(source, request, patience / (len(sources) - number))
            patience -= time.monotonic() - asked
            chunks = [] if artifact is None else self._part(source, artifact, version)
            size = sum(chunk.size for chunk in chunks)
            if artifact is None or not chunks or size > GAIN * missing:
                continue
            if await self._fetch(source, chunks, missing) and await self._prove(
                source, artifact, version, apply
            ):
                if len(chunks) == len(artifact.chunks):
                    self._desk.learn(artifact, version, state)
                self.taken += 1
                logger.info(
                    "%d deltas came as one from %s: %d B in place of %d",
                    len(steps),
                    short(source),
                    size,
                    missing,
                )
                return True
        return False

    def _part(self, source: bytes, artifact: Artifact, version: int) -> Sequence[ChunkRef]:
        """What we need of an artifact that `source` offers; nothing of one that makes no sense."""
        try:
            return self._needed([(version, artifact)])
        except CodecError as error:
            self._distrust(source, Reason.MALFORMED, error)
            return ()

    async def _missing(self, steps: Sequence[Step]) -> int:
        """Bytes that we need of the steps, and the store lacks."""
        chunks = self._needed(steps)
        return await asyncio.to_thread(
            lambda: sum(chunk.size for chunk in chunks if not self._store.has(chunk.digest))
        )

    def _sources(self) -> list[bytes]:
        now = time.monotonic()
        self._avoided = {peer: until for peer, until in self._avoided.items() if until > now}
        peers = [peer for peer in self._upstreams() if peer not in self._avoided]
        trainer = [] if self._trainer in self._avoided else [self._trainer]
        return [*peers[:ASKED_PEERS], *trainer]

    def _avoid(self, peer: bytes, seconds: float) -> None:
        self._avoided[peer] = time.monotonic() + seconds

    async def _ask(self, source: bytes, request: GetMerged, patience: float) -> Artifact | None:
        """What one peer offers, if it is well-formed."""
        try:
            async with asyncio.timeout(patience):
                reply = await self._links.request(
                    source, ALPN_CONTROL, request, Merged, deadline=patience
                )
            _check(reply.artifact, request)
        except Refused as refusal:
            logger.debug("no merged delta from %s: %s", short(source), refusal)
        except (TransportError, TimeoutError) as error:
            logger.debug("%s does not say whether it merges: %s", short(source), error)
            self._avoid(source, PAUSE_S)
        except RemoteProtocolError as error:
            self._distrust(source, error.reason, error)
        else:
            return reply.artifact
        return None

    async def _fetch(self, source: bytes, chunks: Sequence[ChunkRef], missing: int) -> bool:
        """Bring `chunks` into the store; False if that takes longer than it is worth."""
        known = max((peer.bandwidth for peer in self._peers.rows()), default=0.0) or SLOW
        try:
            async with asyncio.timeout(max(FETCH_S, 2 * missing / known)):
                await self._bring(chunks, self._upstreams(), source)
        except (NetworkError, TransportError, Refused, TimeoutError) as error:
            logger.info("the merged delta of %s cannot be had: %s", short(source), error)
            self._peers.failed(source)
            self._avoid(source, PAUSE_S)
            return False
        return True

    async def _prove(self, source: bytes, artifact: Artifact, version: int, apply: Apply) -> bool:
        try:
            await apply(version, artifact)
        except WeightsError as error:
            wrong = isinstance(error, DigestMismatch)
            self._distrust(source, Reason.WRONG_DIGEST if wrong else Reason.MALFORMED, error)
            return False
        return True

    def _distrust(self, source: bytes, reason: Reason, error: Exception) -> None:
        logger.warning("bad merged delta from %s: %s", short(source), error)
        self._peers.blame(source, reason)
        self._avoid(source, DISTRUST_S)


def _check(artifact: Artifact, request: GetMerged) -> None:
    """What can be seen before anything is fetched. Raises RemoteProtocolError."""
    told = (artifact.kind, artifact.codec, artifact.base_version, artifact.base_state)
    if told != ("delta", CODEC, request.base_version, request.base_state):
        raise RemoteProtocolError(Reason.WRONG_BASE, "not the merged delta that was asked for")
    most = min(MAX_WATCHED, artifact.size // SMALLEST + 1)
    if not 0 < len(artifact.chunks) <= most:
        raise RemoteProtocolError(Reason.TOO_LARGE, f"{len(artifact.chunks)} chunks")
    if sum(chunk.size for chunk in artifact.chunks) != artifact.size:
        raise RemoteProtocolError(Reason.MALFORMED, "the chunks are not as large as the whole")
