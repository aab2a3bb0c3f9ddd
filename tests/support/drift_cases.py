"""Versions of weights that drift as training does, and a trainer that publishes them."""

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
from msgspec import structs
from support import weights_cases as cases
from support.hostile import HostileTrainer
from support.swarm import Swarm

from primerl.crypto.hashing import NO_DIGEST
from primerl.node.p2p.transport import Stream
from primerl.node.storage.chunk_store import Store
from primerl.node.weights.chain import VersionChain
from primerl.node.weights.codec import CODEC, encode_delta, encode_full
from primerl.node.weights.payload import cut
from primerl.node.weights.replica import prove
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import Artifact, ChunkRef, PolicyManifest, encode
from primerl.protocol.messages import ControlRequest, HeadNotice, Hello

CHUNK = 1 << 22


class Line:
    """A chain of versions of bf16 weights in `store`: deltas, and snapshots of 0 and `snapshots`.

    As a trainer does, the manifest of the next version has a snapshot, but for that of version 0.
    """

    def __init__(
        self,
        words: int,
        share: float,
        store: Store,
        run: bytes = cases.RUN,
        snapshots: Collection[int] = (),
    ) -> None:
        self.store = store
        self.chain = VersionChain()
        self.states: list[State] = []
        self.manifests: list[PolicyManifest] = []
        self._words = words
        self._share = share
        self._run = run
        self._snapshots = snapshots

    def grow(self, count: int = 1, state: State | None = None) -> None:
        """Append versions; `state`, if given, is the next one."""
        for _ in range(count):
            new = state if state is not None else self._next()
            self.states.append(new)
            proved = prove(len(self.states) - 1, new)
            manifest = PolicyManifest(
                self._run, proved.version, proved.digest, cases.infos(new), self._artifacts()
            )
            self.manifests.append(manifest)
            self.chain.add(manifest)

    def state(self, version: int) -> bytes:
        """Return the digest of a version."""
        return self.manifests[version].state

    def single_bytes(self, base: int, target: int) -> int:
        """Return the bytes of all single deltas between two versions."""
        return sum(self.manifests[v].artifacts[0].size for v in range(base + 1, target + 1))

    def delta(self, base: int, target: int) -> bytes:
        """The payload between two versions."""
        as_drifted = all(
            self.states[version] is drifted(self._words, self._share, version)
            for version in (base, target)
        )
        if as_drifted:
            return between(self._words, self._share, base, target)
        return b"".join(encode_delta(self.states[base], self.states[target]))

    def put(
        self, payload: Sequence[bytes], base: int, state: bytes | None = None, kind: str = "delta"
    ) -> Artifact:
        """Put an artifact of these chunks into the store."""
        return Artifact(
            kind="anchor" if kind == "anchor" else "delta",
            base_version=base,
            base_state=self.state(base) if state is None else state,
            codec=CODEC,
            size=sum(map(len, payload)),
            chunks=tuple(ChunkRef(self.store.put(piece), len(piece)) for piece in payload),
        )

    def _next(self) -> State:
        return drifted(self._words, self._share, len(self.states))

    def _artifacts(self) -> tuple[Artifact, ...]:
        version = len(self.states) - 1
        made: list[Artifact] = []
        if version:
            payload = self.delta(version - 1, version)
            made.append(self.put(list(cut(iter([payload]), CHUNK)), version - 1))
            if version - 1 in self._snapshots:
                made.append(structs.replace(self._snapshot(version - 1), version=version - 1))
        else:
            made.append(self._snapshot(0))
        return tuple(made)

    def _snapshot(self, version: int) -> Artifact:
        whole = encode_full(self.states[version])
        return self.put(list(cut(whole, CHUNK)), -1, NO_DIGEST, "anchor")


@cache
def drifted(words: int, share: float, version: int) -> State:
    """Move a share of the previous version's weights by one unit in the last place."""
    if not version:
        return {"w": cases.like_a_model(1, words)}
    chance = np.random.default_rng(version)
    data = drifted(words, share, version - 1)["w"].data.copy()
    chosen = chance.random(words) < share
    data[chosen] += chance.choice(np.array([1, 0xFFFF], "<u2"), int(chosen.sum()))
    return {"w": Tensor("BF16", (words,), data)}


@cache
def between(words: int, share: float, base: int, target: int) -> bytes:
    """Return the delta between two versions."""
    return b"".join(
        encode_delta(drifted(words, share, base), drifted(words, share, target)),
    )


class LineTrainer(HostileTrainer):
    """A trainer that publishes a Line."""

    def __init__(
        self,
        swarm: Swarm,
        *,
        words: int = 2_000_000,
        share: float = 0.12,
        snapshots: Collection[int] = (),
    ) -> None:
        super().__init__(swarm)
        self._words = words
        self._share = share
        self._snapshots = snapshots
        self.records: dict[bytes, bytes] = {}
        """What workers said of themselves."""

    async def __aenter__(self) -> "LineTrainer":
        await super().__aenter__()
        self.line = Line(self._words, self._share, self.store, self.run, self._snapshots)
        return self

    async def tell(self, count: int = 1) -> None:
        """Publish the next versions without delay."""
        self.recall(count)
        for manifest in self.line.manifests[-count:]:
            document = encode(manifest)
            head = self.head(manifest.version, self.line.states[manifest.version], document)
            await self.book.admit(HeadNotice(head, document))
            newest = self.book.latest()
            assert newest is not None
            self._heads[manifest.version] = newest.digest

    def recall(self, count: int) -> None:
        """Restore the next versions' chunks, which the trainer published before it was killed."""
        self.line.grow(count)
        for manifest in self.line.manifests[-count:]:
            self.store.put(encode(manifest))

    async def reply(self, peer: bytes, stream: Stream, request: ControlRequest) -> None:
        """Answer a worker's message."""
        if isinstance(request, Hello):
            self.records[peer] = request.record
        await super().reply(peer, stream, request)
