"""A trainer that may say anything under its own key, for tests of what workers believe.

It is made of the real parts of a trainer, without learning; what it publishes is up to the test.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from support.memory_store import MemoryStore
from support.swarm import Swarm, at_home

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.app import rundir
from primerl.node.config.run import RunConfig
from primerl.node.p2p.connections import Router
from primerl.node.p2p.heads import HeadServer, HeadStore
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.serve import BlobServer, ChunkArrivals
from primerl.node.p2p.transport import Stream
from primerl.node.storage.ledger import Ledger
from primerl.node.weights.codec import CODEC, encode_full
from primerl.node.weights.replica import prove
from primerl.node.weights.state import State, Tensor
from primerl.protocol import tickets
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.manifests import (
    Artifact,
    ChunkRef,
    PolicyHead,
    PolicyManifest,
    TensorInfo,
    Ticket,
    encode,
)
from primerl.protocol.messages import (
    Accepted,
    ControlRequest,
    GetHeads,
    HeadNotice,
    Hello,
    LeaseReply,
    LeaseRequest,
    Message,
    SyncRecords,
    WatchHeads,
    Welcome,
)
from primerl.protocol.trust import TrustedRun
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, WIRE_VERSION

AN_HOUR = 3600


def policy(seed: int, words: int = 64) -> State:
    """Some weights."""
    bits = np.random.default_rng(seed).integers(0, 2**16, words, dtype="<u2")
    return {"some.weight": Tensor("BF16", (words,), bits)}


def tensor_table(state: State) -> tuple[TensorInfo, ...]:
    """What a manifest says of a state's tensors."""
    digests = prove(0, state).digests
    return tuple(
        TensorInfo(name, tensor.dtype, tensor.shape, digests[name])
        for name, tensor in sorted(state.items())
    )


class HostileTrainer:
    """Holds the trainer key of a swarm whose trainer is not started."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.key = swarm.trainer.key
        self.store = MemoryStore(max_bytes=1 << 30)
        self.ledger = Ledger(swarm.directory / "hostile.db")
        self.upstreams: list[bytes] = []
        self.lie: HeadNotice | None = None
        """Said on every watch, after the newest head."""
        self._heads: dict[int, bytes] = {}

    async def __aenter__(self) -> "HostileTrainer":
        config = RunConfig.model_validate(self._swarm.settings)
        model = Path(config.model.name)
        self.documents = await rundir.documents(config, self.key, self.ledger, self.store, model)
        self.run = self.documents.run_id
        self.book = HeadStore(TrustedRun(self.run, self.key.node_id), self.ledger)
        self._server = HeadServer(self.book)
        transport = at_home(self._swarm.network, self.key.node_id)
        now = int(time.time())
        ticket = Ticket(self.run, self.key.node_id, transport.addresses(), (), now, now + AN_HOUR)
        self._swarm.ticket = tickets.issue(self.key, ticket)
        blobs = BlobServer(self.store, ChunkArrivals(), Pacer(0))
        router = Router(
            transport,
            PeerTable(),
            {ALPN_CONTROL: self._answer, ALPN_BLOBS: blobs.handle},
            max_streams_per_peer=32,
            max_peers=32,
        )
        self._transport = transport
        self._serving = asyncio.create_task(router.run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        await self._transport.close()
        self.ledger.close()

    def manifest(
        self,
        version: int,
        state: State,
        chunks: Sequence[bytes] | None = None,
        tensors: Sequence[TensorInfo] | None = None,
    ) -> bytes:
        """The document of a snapshot of `state`, whose payload may be anything."""
        pieces = [b"".join(encode_full(state))] if chunks is None else chunks
        artifact = Artifact(
            kind="anchor",
            base_version=-1,
            base_state=NO_DIGEST,
            codec=CODEC,
            size=sum(map(len, pieces)),
            chunks=tuple(ChunkRef(self.store.put(piece), len(piece)) for piece in pieces),
        )
        table = tensor_table(state) if tensors is None else tuple(tensors)
        whole = prove(version, state).digest
        return encode(PolicyManifest(self.run, version, whole, table, (artifact,)))

    def head(self, version: int, state: State, document: bytes, **changes: int) -> bytes:
        """A sealed head that names `document`."""
        now = int(time.time())
        head = PolicyHead(
            term=changes.get("term", 0),
            version=version,
            previous=self._heads.get(version - 1, NO_DIGEST),
            state=prove(version, state).digest,
            manifest=digest(document),
            manifest_size=len(document),
            created=now,
            expires=now + changes.get("lasts_s", AN_HOUR),
        )
        return seal(self.key, Purpose.HEAD, self.run, head, expires=head.expires)

    async def publish(
        self,
        version: int,
        state: State,
        chunks: Sequence[bytes] | None = None,
        tensors: Sequence[TensorInfo] | None = None,
    ) -> HeadNotice:
        """Tell of a version; with `chunks`, of one whose payload is not what it should be."""
        document = self.manifest(version, state, chunks, tensors)
        notice = HeadNotice(self.head(version, state, document), document)
        await self.book.admit(notice)
        newest = self.book.latest()
        assert newest is not None
        self._heads[version] = newest.digest
        return notice

    async def _answer(self, peer: bytes, stream: Stream) -> None:
        request: ControlRequest = await receive(stream, ControlRequest)  # type: ignore[arg-type]
        await self.reply(peer, stream, request)

    async def reply(self, peer: bytes, stream: Stream, request: ControlRequest) -> None:
        """Answer what a worker says."""
        reply: Message = Accepted()
        match request:
            case WatchHeads() if self.lie is not None and (newest := self.book.latest()):
                await send(stream, HeadNotice(newest.sealed))
                reply = self.lie
            case WatchHeads():
                return await self._server.watch(peer, stream, request)
            case GetHeads():
                return await self._server.get(stream, request)
            case Hello():
                reply = Welcome(self.documents.sealed, "hostile", WIRE_VERSION)
            case LeaseRequest():
                await asyncio.sleep(0.05)
                reply = LeaseReply((), (), tuple(self.upstreams), 50)
            case SyncRecords():
                reply = SyncRecords(tuple(self.upstreams))
            case _:
                pass
        await send(stream, reply)
        await stream.finish()
