"""Publishing policy versions: prove, encode, store, sign; then, and only then, tell.

A head is written to the ledger before anybody hears of it, so a killed trainer never signs a second one.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator

from ...crypto.hashing import NO_DIGEST, digest, short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal
from ...protocol.manifests import (
    Artifact,
    ChunkRef,
    PolicyHead,
    PolicyManifest,
    TensorInfo,
    check_sizes,
    encode,
)
from ...protocol.messages import HeadNotice
from ...protocol.version import MAX_MANIFEST
from ..config.run import WeightsConfig
from ..ops.errors import StorageError
from ..p2p.heads import HeadStore
from ..p2p.serve import ChunkArrivals
from ..storage.chunk_store import Store, read_chunk
from ..training.backend import Snapshot
from ..weights.chain import VersionChain
from ..weights.codec import CODEC, encode_full
from ..weights.encoders import Encoders
from ..weights.payload import Offsets, cut, layout_of
from ..weights.replica import EMPTY, Policy, WeightReplica, prove
from ..weights.state import State, WeightsError, state_bytes

logger = logging.getLogger(__name__)

MAX_THREADS = 16
"""More threads encode no faster: they wait for the one that stores."""


class Publisher:
    """Turns states into published versions, and keeps the chain that late joiners need."""

    def __init__(
        self,
        *,
        key: SecretKey,
        run: bytes,
        book: HeadStore,
        store: Store,
        arrivals: ChunkArrivals,
        config: WeightsConfig,
        keep_states: int,
        keep_chunks: set[bytes],
        encoders: Encoders | None = None,
    ) -> None:
        """`keep_states` newest states stay in memory for audits; `keep_chunks` are never collected.

        Large deltas are coded by `encoders`, which the caller closes; without them by one thread.
        """
        self._key = key
        self._run = run
        self._book = book
        self._store = store
        self._arrivals = arrivals
        self._config = config
        self._keep_states = keep_states
        self._keep_chunks = keep_chunks
        self._encoders = encoders or Encoders(1)
        self._chain = VersionChain()
        self._policy: Policy = EMPTY
        self._term = 0
        self.states: OrderedDict[int, State] = OrderedDict()
        self.delta_bytes = 0
        self.full_bytes = 0
        """What the deltas would have been as plain bf16 checkpoints."""
        self.last_delta_bytes = 0

    @property
    def version(self) -> int:
        """The newest published version; -1 before the first."""
        return self._policy.version

    @property
    def order(self) -> tuple[int, int]:
        """(term, version) of the newest published head; the version is -1 before the first."""
        return (self._term, self._policy.version)

    async def resume(self, version: int, snapshot: Snapshot) -> None:
        """Go on from a checkpoint: in the same term if the last head is this one, else in a new term."""
        policy = await self._prove(version, snapshot.state)
        newest = self._book.latest()
        self._term = newest.head.term if newest else 0
        for head in self._book.held():
            manifest = self._book.manifest(head)
            if manifest is not None:
                self._chain.add(manifest)
        await self._rebuild(version)
        if newest is None or newest.head.version < version:
            held = self._chain.get(version - 1)
            if newest is not None and (held is None or newest.head.version != version - 1):
                self._begin_term(version)
            await self.publish(version, snapshot)
        elif newest.head.version == version and newest.head.state == policy.digest:
            self._hold(policy)
        else:
            self._begin_term(version)
            await self.publish(version, snapshot)

    async def publish(
        self,
        version: int,
        snapshot: Snapshot,
        *,
        before_telling: Callable[[], Awaitable[None]] | None = None,
    ) -> PolicyHead:
        """Publish `snapshot` as `version`, once `before_telling` has returned.

        Raises StorageError when the disk is full, and what `before_telling` raises: nothing was told then.
        """
        policy = await self._prove(version, snapshot.state)
        artifacts = await asyncio.to_thread(self._encode, policy, snapshot)
        manifest = PolicyManifest(
            self._run, version, policy.digest, _tensor_table(policy), tuple(artifacts)
        )
        document = check_sizes(encode(manifest), MAX_MANIFEST)
        await asyncio.to_thread(self._store.put, document)
        if before_telling is not None:
            await before_telling()
        sealed, head = self._sign(policy, document)
        self._chain.add(manifest)
        self._hold(policy)
        for artifact in artifacts:
            for chunk in artifact.chunks:
                self._arrivals.arrived(chunk.digest)
        await self._book.admit(HeadNotice(sealed, document))
        await self._retain()
        logger.info(
            "policy %d published: %s, %d B", version, short(policy.digest), self.last_delta_bytes
        )
        return head

    async def _rebuild(self, version: int) -> None:
        """Hold the versions before `version` again that may still be claimed: work on them can be audited then.

        Those that the store does not lead to are left out.
        """
        mirror = WeightReplica(threads=_threads())
        for wanted in range(max(0, version - self._keep_states + 1), version):
            if self._chain.get(wanted) is None:
                continue
            try:
                await asyncio.to_thread(self._climb, mirror, wanted)
            except (WeightsError, StorageError) as error:
                logger.warning("work on version %d cannot be audited any more: %s", wanted, error)
            else:
                self.states[wanted] = mirror.policy.state

    def _climb(self, mirror: WeightReplica, version: int) -> None:
        """Bring `mirror` to `version`, each step proved against its manifest.

        Raises WeightsError, StorageError.
        """
        held = mirror.policy
        for reached, artifact in self._chain.plan(held.version, held.digest, version):
            manifest = self._chain.get(reached)
            assert manifest is not None
            chunks = (read_chunk(self._store, chunk.digest) for chunk in artifact.chunks)
            mirror.commit(mirror.prepare(manifest, artifact, chunks))

    async def _prove(self, version: int, state: State) -> Policy:
        return await asyncio.to_thread(prove, version, state, held=self._policy, threads=_threads())

    def _begin_term(self, version: int) -> None:
        """The chain went further than the checkpoint: a new term starts here, with an anchor."""
        self._term += 1
        self._chain = VersionChain()
        self._policy = EMPTY
        logger.warning(
            "resuming version %d in term %d: later versions are void", version, self._term
        )

    def _hold(self, policy: Policy) -> None:
        self._policy = policy
        self.states[policy.version] = policy.state
        while len(self.states) > self._keep_states:
            self.states.popitem(last=False)

    def _encode(self, policy: Policy, snapshot: Snapshot) -> list[Artifact]:
        artifacts: list[Artifact] = []
        held = self._policy
        if held.version == policy.version - 1 and held.version >= 0:
            changed = snapshot.changed_since(held.state)
            payload = self._encoders.encode_delta(held.state, policy.state, changed)
            artifacts.append(self._artifact("delta", policy, payload, held.version, held.digest))
            self.last_delta_bytes = artifacts[0].size
            self.delta_bytes += artifacts[0].size
            self.full_bytes += state_bytes(policy.state)
        if not artifacts or self._chain.needs_snapshot(
            policy.version, self._config.anchor_interval
        ):
            whole = encode_full(policy.state, threads=_threads())
            artifacts.append(self._artifact("anchor", policy, whole, -1, NO_DIGEST))
        return artifacts

    def _artifact(
        self,
        kind: str,
        policy: Policy,
        payload: Iterator[bytes],
        base_version: int,
        base_state: bytes,
    ) -> Artifact:
        offsets = Offsets(layout_of(policy.state))
        chunks = [
            ChunkRef(self._store.put(piece), len(piece))
            for piece in cut(offsets.watch(payload), int(self._config.chunk_mib * 2**20))
        ]
        return Artifact(
            kind="anchor" if kind == "anchor" else "delta",
            base_version=base_version,
            base_state=base_state,
            codec=CODEC,
            size=sum(chunk.size for chunk in chunks),
            chunks=tuple(chunks),
            offsets=offsets.found,
        )

    def _sign(self, policy: Policy, document: bytes) -> tuple[bytes, PolicyHead]:
        before = self._book.trusted.heads.get((self._term, policy.version - 1))
        now = int(time.time())
        head = PolicyHead(
            term=self._term,
            version=policy.version,
            previous=before.digest if before else NO_DIGEST,
            state=policy.digest,
            manifest=digest(document),
            manifest_size=len(document),
            created=now,
            expires=now + int(self._config.head_ttl_s),
        )
        return seal(self._key, Purpose.HEAD, self._run, head, expires=head.expires), head

    async def _retain(self) -> None:
        """Collect what no live chain needs; a version lives for some time however fast others follow."""
        if self._policy.version % self._config.keep_versions:
            return
        since = time.time() - self._config.keep_s
        young = sum(1 for head in self._book.held() if head.head.created >= since)
        keep = max(self._config.keep_versions, young)
        live = self._chain.live_chunks(keep) | self._keep_chunks
        await self._book.retain(self._store, self._chain.forget(keep), live)


def _threads() -> int:
    """Threads that encode; the bytes do not depend on it."""
    return min(MAX_THREADS, os.cpu_count() or 1)


def _tensor_table(policy: Policy) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name, tensor.dtype, tensor.shape, policy.digests[name])
        for name, tensor in sorted(policy.state.items())
    )
