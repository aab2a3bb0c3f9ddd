"""Publish policy versions: prove, encode, store, sign, announce.

Invariant: a head is in the ledger before it is announced, so a killed trainer never signs a second one.
"""

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET, UnsetType, structs

from ...crypto.hashing import NO_DIGEST, digest, short
from ...protocol.envelope import Purpose
from ...protocol.manifests import (
    Artifact,
    OuterStep,
    PolicyHead,
    PolicyManifest,
    check_sizes,
    encode,
)
from ...protocol.messages import HeadNotice
from ...protocol.version import MAX_MANIFEST
from ..errors import StorageError
from ..p2p.services import NodeServices
from ..storage.chunk_store import read_chunk
from ..training.backend import Snapshot
from ..weights.artifacts import store_artifact
from ..weights.chain import VersionChain
from ..weights.codec import encode_full
from ..weights.encoders import Encoders
from ..weights.payload import LARGEST_CHUNK, layout_of
from ..weights.replica import EMPTY, Policy, WeightReplica, prove, tensor_table
from ..weights.state import Changed, State, WeightsError
from ..weights.state_history import StateHistory, state_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_THREADS = 16
"""More threads encode no faster: they wait for the one that cuts chunks."""


@dataclass(frozen=True)
class PublisherLimits:
    """Ages of what is published, seconds, and sizes of it."""

    keep_s: float = 60.0
    """A version can be fetched for so long at least, so that fetches in progress finish."""
    head_ttl_s: float = 86400.0
    """Age at which a chain head is no longer accepted."""
    snapshot_interval: int = 10
    """Most versions from one snapshot to the next; fewer once the deltas outweigh a snapshot."""
    chunk_bytes: int = LARGEST_CHUNK


def no_outer_step(_epoch: int, _version: int) -> OuterStep | UnsetType:
    """Return that a version was made by its trainer alone."""
    return UNSET


class Publisher:
    """Publishes states as versions, and keeps the chain that late joiners need."""

    def __init__(
        self,
        services: NodeServices,
        *,
        keep_states: int,
        encoders: Encoders | None = None,
        limits: PublisherLimits = PublisherLimits(),
        outer_step: Callable[[int, int], OuterStep | UnsetType] = no_outer_step,
    ) -> None:
        """`keep_states` newest states stay in memory for audits, the older ones as differences.

        `outer_step` returns how the outer state of a version was made, by epoch and version.
        Large deltas are coded by `encoders`, which the caller closes; without them by one thread.
        """
        self._services = services
        self._book = services.heads
        self._store = services.store
        self._config = services.config.weights
        self._limits = limits
        self._keep_states = keep_states
        self._encoders = encoders or Encoders(1)
        self._outer_step = outer_step
        self._chain = VersionChain()
        self._policy: Policy = EMPTY
        self._epoch = 0
        self.states = StateHistory(keep_states)
        self.delta_bytes = 0
        self.full_bytes = 0
        """Size of plain bf16 checkpoints in place of the deltas, in bytes."""
        self.last_delta_bytes = 0
        self.phases: dict[str, float] = {}
        """Seconds that each phase of the newest publication took; `prove` and `encode` run side by side."""
        self._snapshot: asyncio.Task[Artifact] | None = None
        """Snapshot that is encoded while later versions are published; one of them announces it."""
        self._compacting: asyncio.Future[None] | None = None
        """Older states become differences beside the next step, not before a version is announced."""
        self._closed = threading.Event()
        self._collected = 0
        """Version at which the store was collected last."""

    async def close(self) -> None:
        """Give up the snapshot that is being encoded; wait for other work."""
        await self._compacted()
        given_up = self._snapshot is not None and not self._snapshot.done()
        self._closed.set()
        await self.wait_for_snapshot()
        if self._snapshot is not None:
            error = self._snapshot.exception()
            if error is not None and not given_up:
                logger.warning("the last snapshot was not encoded: %s", error)
            self._snapshot = None

    async def wait_for_snapshot(self) -> None:
        """Wait until the next version can announce the snapshot that is being encoded, if there is one."""
        if self._snapshot is not None:
            await asyncio.wait([self._snapshot])

    @property
    def version(self) -> int:
        """Newest published version; -1 before the first."""
        return self._policy.version

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, version) of the newest published head; the version is -1 before the first."""
        return (self._epoch, self._policy.version)

    async def resume(self, version: int, snapshot: Snapshot, *, copied: bool = False) -> None:
        """Continue from a checkpoint: in the same epoch if the last head matches, else in a new one.

        The last head matches if it is of this state, or of the version before. None does where ledger and
        checkpoint are `copied` from another disk: later heads may have been signed there. That of another
        leader does not match either: each has epochs of its own.
        """
        policy = await self._prove(version, snapshot.state)
        newest = self._book.latest()
        self._epoch = newest.head.term if newest else 0
        succeeds = newest is not None and newest.signer != self._services.key.node_id
        self._read_chain()
        await self._rebuild(version)
        if copied or succeeds:
            self._begin_epoch(version)
            await self.publish(version, snapshot)
        elif newest is None or newest.head.version < version:
            previous = self._chain.get(version - 1)
            if newest is not None and (previous is None or newest.head.version != version - 1):
                self._begin_epoch(version)
            await self.publish(version, snapshot)
        elif newest.head.version == version and newest.head.state == policy.digest:
            await asyncio.to_thread(self.states.add, version, policy.state)
            self._policy = policy
        else:
            self._begin_epoch(version)
            await self.publish(version, snapshot)

    async def announced(self, version: int) -> State | None:
        """Return the state of a version that was announced; None if it was not, or its chunks are gone."""
        self._read_chain()
        if self._chain.get(version) is None:
            return None
        replica = WeightReplica(threads=_threads())
        try:
            await asyncio.to_thread(self._advance, replica, version)
        except (WeightsError, StorageError) as error:
            logger.warning("version %d cannot be rebuilt: %s", version, error)
            return None
        return replica.policy.state

    def _read_chain(self) -> None:
        for head in self._book.held():
            manifest = self._book.manifest(head)
            if manifest is not None:
                self._chain.add(manifest)

    async def publish(
        self,
        version: int,
        snapshot: Snapshot,
        *,
        before_announcing: Callable[[], Awaitable[None]] | None = None,
    ) -> PolicyHead:
        """Publish `snapshot` as `version`, once `before_announcing` has returned.

        Raises StorageError when the disk is full, and the errors of `before_announcing`.
        """
        state, changed = snapshot.state, snapshot.changed_since(self._policy.state)
        await self._compacted()
        self.states.hold(version, state, changed)
        policy, artifacts = await asyncio.gather(
            self._timed("prove", lambda: self._prove(version, state)),
            self._timed("encode", lambda: asyncio.to_thread(self._encode, version, state, changed)),
        )
        if self._snapshot is not None and self._snapshot.done():
            done, self._snapshot = self._snapshot, None
            artifacts.append(done.result())
        manifest = PolicyManifest(
            self._services.run_id,
            version,
            policy.digest,
            tensor_table(policy),
            tuple(artifacts),
            self._outer_step(self._epoch, version),
        )
        document = check_sizes(encode(manifest), MAX_MANIFEST)
        await self._timed("store", lambda: asyncio.to_thread(self._store.put, document))
        if before_announcing is not None:
            await self._timed("durable", before_announcing)
        began = time.monotonic()
        sealed, head = self._sign(policy, document)
        self._chain.add(manifest)
        self._policy = policy
        for artifact in artifacts:
            for chunk in artifact.chunks:
                self._services.arrivals.arrived(chunk.digest)
        await self._book.admit(HeadNotice(sealed, document))
        await self._retain()
        self._begin_snapshot()
        loop = asyncio.get_running_loop()
        self._compacting = loop.run_in_executor(None, self.states.compact)
        self.phases["announce"] = time.monotonic() - began
        logger.info(
            "policy %d published: %s, %d B", version, short(policy.digest), self.last_delta_bytes
        )
        return head

    async def _compacted(self) -> None:
        """Wait until the states before the newest version are differences."""
        if self._compacting is not None:
            compacting, self._compacting = self._compacting, None
            await compacting

    async def _timed(self, phase: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`, which begins in here: a publication may be cancelled before."""
        began = time.monotonic()
        result = await work()
        self.phases[phase] = time.monotonic() - began
        return result

    async def _rebuild(self, version: int) -> None:
        """Rebuild the versions before `version` from the store, for audits of their rollouts.

        Versions that cannot be rebuilt from the store are left out.
        """
        replica = WeightReplica(threads=_threads())
        for wanted in range(max(0, version - self._keep_states + 1), version):
            if self._chain.get(wanted) is None:
                continue
            try:
                await asyncio.to_thread(self._advance, replica, wanted)
            except (WeightsError, StorageError) as error:
                logger.warning("work on version %d can no longer be audited: %s", wanted, error)
            else:
                await asyncio.to_thread(self.states.add, wanted, replica.policy.state)

    def _advance(self, replica: WeightReplica, version: int) -> None:
        """Bring `replica` to `version`, proving each step against its manifest.

        Raises WeightsError, StorageError.
        """
        policy = replica.policy
        for reached, artifact in self._chain.plan(policy.version, policy.digest, version):
            manifest = self._chain.get(reached)
            assert manifest is not None
            chunks = (read_chunk(self._store, chunk.digest) for chunk in artifact.chunks)
            replica.commit(replica.prepare(manifest, artifact, chunks))

    async def _prove(self, version: int, state: State) -> Policy:
        return await asyncio.to_thread(
            prove, version, state, known=self._policy, threads=_threads()
        )

    def _begin_epoch(self, version: int) -> None:
        """Start a new epoch with a full snapshot: the chain went further than the checkpoint."""
        services = self._services
        self._epoch = services.leaders.next_epoch(services.key.node_id, self._epoch)
        self._chain = VersionChain()
        self._policy = EMPTY
        logger.warning(
            "resuming version %d in epoch %d: later versions are void", version, self._epoch
        )

    def _encode(self, version: int, state: State, changed: Changed | None) -> list[Artifact]:
        artifacts: list[Artifact] = []
        previous = self._policy
        if previous.version == version - 1 and previous.version >= 0:
            payload = self._encoders.encode_delta(previous.state, state, changed)
            artifacts.append(self._artifact(state, payload, previous.version, previous.digest))
            self.last_delta_bytes = artifacts[0].size
            self.delta_bytes += artifacts[0].size
            self.full_bytes += state_bytes(state)
        if not artifacts or not self._chain.is_reachable(version - 1):
            artifacts.append(self._encode_snapshot(state))
        return artifacts

    def _begin_snapshot(self) -> None:
        """Encode a snapshot of the newest version, if one is due, while later versions are published."""
        policy, interval = self._policy, self._limits.snapshot_interval
        if self._snapshot is None and self._chain.needs_snapshot(policy.version, interval):
            self._snapshot = asyncio.create_task(asyncio.to_thread(self._encode_earlier, policy))

    def _encode_earlier(self, policy: Policy) -> Artifact:
        """Encode a snapshot for the manifest of a later version."""
        return structs.replace(self._encode_snapshot(policy.state), version=policy.version)

    def _encode_snapshot(self, state: State) -> Artifact:
        payload = encode_full(state, threads=_threads())
        return self._artifact(state, itertools.takewhile(self._is_open, payload), -1, NO_DIGEST)

    def _is_open(self, _piece: bytes) -> bool:
        return not self._closed.is_set()

    def _artifact(
        self, state: State, payload: Iterator[bytes], base_version: int, base_state: bytes
    ) -> Artifact:
        return store_artifact(
            self._store,
            payload,
            base_version=base_version,
            base_state=base_state,
            layout=layout_of(state),
            largest=self._limits.chunk_bytes,
        )

    def _sign(self, policy: Policy, document: bytes) -> tuple[bytes, PolicyHead]:
        before = self._book.trusted.heads.get((self._epoch, policy.version - 1))
        now = int(time.time())
        head = PolicyHead(
            term=self._epoch,
            version=policy.version,
            previous=before.digest if before else NO_DIGEST,
            state=policy.digest,
            manifest=digest(document),
            manifest_size=len(document),
            created=now,
            expires=now + int(self._limits.head_ttl_s),
        )
        return self._services.seal(Purpose.HEAD, head, expires=head.expires), head

    async def _retain(self) -> None:
        """Delete chunks that no live chain needs; every version is kept for a minimum time.

        Not while a snapshot is encoded, whose chunks no chain needs yet.
        """
        if self._policy.version - self._collected < self._config.keep_versions or self._snapshot:
            return
        self._collected = self._policy.version
        since = time.time() - self._limits.keep_s
        young = sum(1 for head in self._book.held() if head.head.created >= since)
        keep = max(self._config.keep_versions, young)
        live = self._chain.live_chunks(keep) | self._services.keep_chunks
        await self._book.retain(self._store, self._chain.forget(keep), live)


def _threads() -> int:
    """Return the number of encoder threads, which does not affect the bytes."""
    return min(MAX_THREADS, os.cpu_count() or 1)
