"""Hostile trainers and workers, driven step by step against real nodes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
from support.bare_node import serving
from support.counting_environment import STOP, counting_task, question, right_reply
from support.memory_store import MemoryStore
from support.swarm import Swarm, at_home
from support.witness import Said, felt, now_and_then, witness_logprob

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.crypto.hashing import digest as digest_of
from primerl.crypto.keys import SecretKey
from primerl.node.config.run import RunConfig
from primerl.node.environments.environment import Task
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.p2p.connections import Handler, Router
from primerl.node.p2p.heads import HeadServer, HeadStore
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import Refused, ask, receive, receive_reply, send
from primerl.node.p2p.serve import BlobServer, ChunkArrivals
from primerl.node.p2p.transport import Connection, Stream, Transport, TransportError
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer import run_manifest
from primerl.node.weights.codec import CODEC, encode_full
from primerl.node.weights.replica import prove
from primerl.node.weights.state import State, Tensor
from primerl.protocol import messages, tickets
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, TaskRef, sample_seed
from primerl.protocol.manifests import (
    Artifact,
    ChunkRef,
    PeerRecord,
    PolicyHead,
    PolicyManifest,
    RunManifest,
    TensorInfo,
    Ticket,
    encode,
)
from primerl.protocol.rollouts import (
    BranchRecord,
    GroupRecord,
    Receipt,
    RolloutRecord,
    Submission,
    Verdict,
    pack_f32,
    pack_u32,
)
from primerl.protocol.trust import TrustedRun
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, WIRE_VERSION

AN_HOUR = 3600


def policy(seed: int, words: int = 64) -> State:
    """Some weights."""
    bits = np.random.default_rng(seed).integers(0, 2**16, words, dtype="<u2")
    return {"some.weight": Tensor("BF16", (words,), bits)}


def tensor_table(state: State) -> tuple[TensorInfo, ...]:
    """Make the manifest's tensor table of a state."""
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
        self.software = "hostile"
        """Release that it says it runs."""
        self.lie: messages.HeadNotice | None = None
        """Said on every watch, after the newest head."""
        self.leases: Callable[[bytes], tuple[bytes, ...]] = lambda node: ()
        """The sealed leases for a node, each time it asks."""
        self._heads: dict[int, bytes] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "HostileTrainer":
        config = RunConfig.model_validate(self._swarm.settings)
        model = Path(config.model.name)
        self.documents = await run_manifest.documents(
            config, self.key, self.ledger, self.store, model
        )
        self.run = self.documents.run_id
        self.book = HeadStore(TrustedRun(self.run, self.key.node_id), self.ledger)
        self._server = HeadServer(self.book)
        transport = at_home(self._swarm.network, self.key.node_id)
        now = int(time.time())
        ticket = Ticket(self.run, self.key.node_id, transport.addresses(), (), now, now + AN_HOUR)
        self._swarm.ticket = tickets.issue(self.key, ticket)
        blobs = BlobServer(self.store, ChunkArrivals(), Pacer(0))
        handlers = {ALPN_CONTROL: self._answer, ALPN_BLOBS: blobs.handle}
        await self._stack.enter_async_context(serving(transport, handlers))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()
        self.ledger.close()

    def manifest(
        self,
        version: int,
        state: State,
        chunks: Sequence[bytes] | None = None,
        tensors: Sequence[TensorInfo] | None = None,
    ) -> bytes:
        """Make the manifest of a snapshot of `state`, with any payload."""
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
        """Make a sealed head for the manifest `document`."""
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
    ) -> messages.HeadNotice:
        """Publish a version; with `chunks`, one with a wrong payload."""
        document = self.manifest(version, state, chunks, tensors)
        notice = messages.HeadNotice(self.head(version, state, document), document)
        await self.book.admit(notice)
        newest = self.book.latest()
        assert newest is not None
        self._heads[version] = newest.digest
        return notice

    async def _answer(self, peer: bytes, stream: Stream) -> None:
        request: messages.ControlRequest = await receive(stream, messages.ControlRequest)  # type: ignore[arg-type]
        await self.reply(peer, stream, request)

    async def reply(self, peer: bytes, stream: Stream, request: messages.ControlRequest) -> None:
        """Answer a worker's message."""
        reply: messages.Message = messages.Accepted()
        match request:
            case messages.WatchHeads() if self.lie is not None and (newest := self.book.latest()):
                await send(stream, messages.HeadNotice(newest.sealed))
                reply = self.lie
            case messages.WatchHeads():
                return await self._server.watch(peer, stream, request)
            case messages.GetHeads():
                return await self._server.get(stream, request)
            case messages.Hello():
                reply = messages.Welcome(self.documents.sealed, self.software, WIRE_VERSION)
            case messages.LeaseRequest():
                await asyncio.sleep(0.05)
                reply = messages.LeaseReply(self.leases(peer), (), tuple(self.upstreams), 50)
            case messages.SyncRecords():
                reply = messages.SyncRecords(tuple(self.upstreams))
            case _:
                pass
        await send(stream, reply)
        await stream.finish()


DEADLINE = 60.0

T = TypeVar("T")


def soon(seconds: int = AN_HOUR) -> int:
    """An expiry, Unix seconds."""
    return int(time.time()) + seconds


class Rogue:
    """One key and its connections to the trainer of a swarm."""

    def __init__(self, swarm: Swarm, name: str = "rogue", key: SecretKey | None = None) -> None:
        self.swarm = swarm
        self.key = key or SecretKey.from_seed(digest_of(name.encode()))
        self.ticket = swarm.read_ticket()
        self.run = self.ticket.run
        self.trainer = self.ticket.trainer
        self.transport: Transport = at_home(swarm.network, self.key.node_id)
        self._control: Connection | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        with suppress(Refused, TransportError):
            await self.goodbye()
        await self.transport.close()

    def serve(self, *, control: Handler, blobs: Handler) -> None:
        """Serve requests of other workers."""
        router = Router(
            self.transport,
            PeerTable(),
            {ALPN_CONTROL: control, ALPN_BLOBS: blobs},
            max_streams_per_peer=32,
            max_peers=32,
        )
        self._serving = asyncio.create_task(router.run())

    # -- saying things ---------------------------------------------------------------------------

    async def connect(self, alpn: bytes = ALPN_CONTROL) -> Connection:
        """A fresh connection to the trainer."""
        return await self.transport.connect(
            self.trainer, self.ticket.addresses, alpn, deadline=DEADLINE
        )

    async def control(self) -> Connection:
        """The connection for requests, dialled when needed."""
        if self._control is None or self._control.closed:
            self._control = await self.connect()
        return self._control

    async def ask(self, request: messages.Message, kind: type[T]) -> T:
        """One request and its reply. Raises Refused."""
        return await ask(await self.control(), request, kind, deadline=DEADLINE)

    def record(self, key: SecretKey | None = None, run: bytes | None = None) -> bytes:
        """Return our sealed peer record."""
        key = key or self.key
        body = PeerRecord(key.node_id, "inference", "rogue", self.transport.addresses(), (), True)
        return seal(key, Purpose.PEER, run or self.run, body, expires=soon())

    def hello_message(self) -> messages.Hello:
        """The hello of an honest node."""
        ticket = tickets.sealed_bytes(self.swarm.ticket)
        return messages.Hello(WIRE_VERSION, "inference", "rogue", ticket, self.record())

    async def hello(
        self,
        *,
        ticket: bytes | None = None,
        record: bytes | None = None,
        wire_version: int = WIRE_VERSION,
    ) -> RunManifest:
        """Request admission."""
        hello = self.hello_message()
        changes = {"wire_version": wire_version, "ticket": ticket, "record": record}
        given = {name: value for name, value in changes.items() if value is not None}
        welcome = await self.ask(msgspec.structs.replace(hello, **given), messages.Welcome)
        return unseal(welcome.manifest, Purpose.RUN, RunManifest, now=0, signer=self.trainer).body

    async def goodbye(self) -> None:
        """Say goodbye, returning open leases."""
        await self.ask(messages.Goodbye(), messages.Accepted)

    async def head(self) -> PolicyHead:
        """The newest head."""
        reply = await self.ask(messages.GetHeads(-1), messages.Heads)
        return unseal(
            reply.notices[-1].head, Purpose.HEAD, PolicyHead, now=0, signer=self.trainer
        ).body

    # -- leases ----------------------------------------------------------------------------------

    async def poll(
        self, wanted: int, version: int = 0, holding: tuple[int, ...] | None = None
    ) -> messages.LeaseReply:
        """Send one lease request."""
        return await self.ask(
            messages.LeaseRequest(wanted, messages.WorkerStats(version), holding),
            messages.LeaseReply,
        )

    async def lease(self) -> tuple[Lease, bytes]:
        """Return the next lease, decoded and sealed."""
        async with asyncio.timeout(DEADLINE):
            reply = await self.poll(1)
            while not reply.leases:
                await asyncio.sleep(0.02)
                reply = await self.poll(1)
        sealed = reply.leases[0]
        lease = unseal(
            sealed, Purpose.LEASE, Lease, now=0, signer=self.trainer, recipient=self.key.node_id
        ).body
        return lease, sealed

    # -- rollouts --------------------------------------------------------------------------------

    async def play(self, lease: Lease) -> tuple[GroupRecord, ...]:
        """Do a lease's work honestly, with the newest policy."""
        head = await self.head()
        return tuple(self.group(lease, task, head) for task in lease.tasks)

    def group(
        self, lease: Lease, reference: TaskRef, head: PolicyHead, reply: Said = now_and_then
    ) -> GroupRecord:
        """Make honest rollouts of one task under one policy, with the replies of `reply`."""
        task = counting_task(reference.index)
        rollouts = [
            self._rollout(lease, task, index, head, reply) for index in range(lease.group_size)
        ]
        return GroupRecord(reference.index, reference.digest, tuple(rollouts))

    def _rollout(
        self, lease: Lease, task: Task, index: int, head: PolicyHead, reply: Said
    ) -> RolloutRecord:
        prompt = question(task)
        seed = sample_seed(self.run, lease, self.key.node_id, task.digest, index)
        said = list(reply(GenerateRequest(tuple(prompt), 4, 1.0, seed, (STOP,))))
        reward = float(said == right_reply(task))
        return RolloutRecord((say(prompt, said, head),), reward, "")

    def bundle(
        self,
        lease: bytes,
        groups: Iterable[GroupRecord],
        *,
        key: SecretKey | None = None,
        run: bytes | None = None,
        recipient: bytes | None = None,
        purpose: Purpose = Purpose.SUBMISSION,
        expires: int | None = None,
        engine: str = "rogue",
    ) -> bytes:
        """A sealed submission."""
        return seal(
            key or self.key,
            purpose,
            run or self.run,
            Submission(lease, tuple(groups), engine),
            recipient=recipient or self.trainer,
            expires=soon() if expires is None else expires,
        )

    async def submit(
        self,
        bundle: bytes,
        lease_id: int,
        *,
        digest: bytes | None = None,
        size: int | None = None,
    ) -> Receipt:
        """Offer and upload a bundle. Raises Refused."""
        stream = await (await self.control()).open_stream()
        try:
            async with asyncio.timeout(DEADLINE):
                offer = messages.SubmitOffer(
                    digest or digest_of(bundle), size or len(bundle), lease_id
                )
                await send(stream, offer)
                reply = await receive_reply(stream, messages.SubmitFrom | messages.Submitted)  # type: ignore[arg-type]
                if isinstance(reply, messages.SubmitFrom):
                    await stream.write(bundle[reply.offset :])
                    reply = await receive_reply(stream, messages.Submitted)
        finally:
            await stream.abort()
        return unseal(
            reply.receipt,
            Purpose.RECEIPT,
            Receipt,
            now=0,
            run=self.run,
            signer=self.trainer,
            recipient=self.key.node_id,
        ).body

    async def work(self) -> Receipt:
        """Get one lease, work honestly, and submit."""
        lease, sealed = await self.lease()
        return await self.submit(self.bundle(sealed, await self.play(lease)), lease.lease_id)

    async def earn(self) -> None:
        """Work honestly until two leases at a time are granted."""
        for _ in range(2):
            await self.verdict((await self.work()).lease_id)

    async def verdict(self, lease_id: int) -> Verdict:
        """Return the verdict of a submission; banned nodes get it, too."""
        after = 0
        async with asyncio.timeout(DEADLINE):
            while True:
                reply = await self.ask(messages.GetVerdicts(after), messages.Verdicts)
                after = reply.next
                for sealed in reply.verdicts:
                    verdict = unseal(
                        sealed, Purpose.VERDICT, Verdict, now=0, run=self.run, signer=self.trainer
                    ).body
                    if verdict.lease_id == lease_id:
                        return verdict
                await asyncio.sleep(0.01)


def say(prompt: Sequence[int], said: Sequence[int], head: PolicyHead) -> BranchRecord:
    """Make a branch with the logprobs of the policy of `head`."""
    tokens = [*prompt, *said]
    logprobs = [
        witness_logprob(head.state, head.version, 1.0, tokens[:i], tokens[i])
        for i in range(len(prompt), len(tokens))
    ]
    return BranchRecord(
        tokens=pack_u32(tokens),
        sampled=bytes([0] * len(prompt) + [1] * len(said)),
        logprobs=pack_f32(logprobs),
        policy_first=head.version,
        policy_last=head.version,
        finish="stop" if tokens[-1] == STOP else "length",
        proof=proof_of(head.state, tokens, len(prompt)),
    )


def proof_of(state: bytes, tokens: Sequence[int], start: int) -> bytes:
    """Make the proof of the tokens from `start` on, for the state with this digest."""
    if start == len(tokens):
        return b""
    rows = [felt(state, tokens[:i]) for i in range(start, len(tokens))]
    return Projection().make(np.stack(rows))


def altered(group: GroupRecord, index: int, **changes: object) -> GroupRecord:
    """Change one rollout of a group."""
    rollouts = list(group.rollouts)
    rollouts[index] = msgspec.structs.replace(rollouts[index], **changes)
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def altered_branch(group: GroupRecord, index: int, **changes: object) -> GroupRecord:
    """Change the only branch of one rollout of a group."""
    branch = msgspec.structs.replace(group.rollouts[index].branches[0], **changes)
    return altered(group, index, branches=(branch,))


async def reason_of(attempt: Awaitable[object]) -> Reason:
    """Return the reason of the refusal that the awaitable raises."""
    try:
        await attempt
    except Refused as refusal:
        return refusal.reason
    raise AssertionError("it was not refused")
