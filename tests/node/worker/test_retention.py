"""Whatever was published and collected: what a trainer keeps leads to all that it promises."""

import asyncio
import tempfile
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import weights_cases as cases
from support.bare_node import bare_services
from support.drift_cases import drifted
from support.memory_store import MemoryStore

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.config.run import WeightsConfig
from primerl.node.p2p.heads import HeadStore
from primerl.node.p2p.serve import ChunkArrivals
from primerl.node.storage.chunk_store import QuotaExceeded
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.publisher import Publisher, PublisherLimits
from primerl.node.training.backend import Snapshot
from primerl.node.weights.chain import VersionChain
from primerl.node.weights.replica import EMPTY, Policy, WeightReplica
from primerl.protocol.trust import TrustedRun

KEY = SecretKey.from_seed(b"k" * 32)
RUN = digest(b"run")
WORDS = 3000


class Kept:
    """A publisher, and what a worker would find with it: heads, manifests, chunks."""

    def __init__(
        self,
        directory: Path,
        config: WeightsConfig,
        max_bytes: int = 1 << 30,
        *,
        is_slow: bool = False,
        store: MemoryStore | None = None,
        **limits: int,
    ) -> None:
        """`is_slow`: versions are published without waiting for snapshots; `limits`: of PublisherLimits."""
        self._is_slow = is_slow
        self.ledger = Ledger(directory / "ledger.db", fsync=False)
        self.book = HeadStore(TrustedRun(RUN, KEY.node_id), self.ledger)
        self.store = store or MemoryStore(max_bytes=max_bytes)
        self.pinned: set[bytes] = set()
        self.publisher = Publisher(
            bare_services(
                KEY,
                run_id=RUN,
                heads=self.book,
                store=self.store,
                arrivals=ChunkArrivals(),
                config=SimpleNamespace(weights=config),
                keep_chunks=self.pinned,
            ),
            keep_states=2,
            limits=PublisherLimits(keep_s=0.0, **limits),
        )

    async def publish(self, version: int, share: float) -> None:
        """The next version."""
        await self.publisher.publish(version, Snapshot(drifted(WORDS, share, version)))
        if not self._is_slow:
            await self.publisher.wait_for_snapshot()

    def reach(self, target: int, held: Policy = EMPTY) -> Policy:
        """Go from what is held to a version by what is kept; proves every step."""
        chain = VersionChain()
        for head in self.book.held():
            manifest = self.book.manifest(head)
            assert manifest is not None
            chain.add(manifest)
        mirror = WeightReplica(held)
        for version, artifact in chain.plan(held.version, held.digest, target):
            payload = [self.store.get(chunk.digest) for chunk in artifact.chunks]
            assert None not in payload
            manifest = chain.get(version)
            assert manifest is not None
            prepared = mirror.prepare(manifest, artifact, (part for part in payload if part))
            mirror.commit(prepared)
        return mirror.policy


@settings(max_examples=30, deadline=None)
@given(
    keep=st.integers(1, 5),
    interval=st.integers(1, 7),
    share=st.sampled_from([0.01, 0.3, 0.9]),
    versions=st.integers(1, 16),
    is_slow=st.booleans(),
)
def test_every_version_that_is_promised_can_be_reached_from_nothing_and_from_any_other(
    keep: int, interval: int, share: float, versions: int, is_slow: bool
) -> None:
    """Dense deltas outweigh snapshots, sparse ones do not."""

    async def live(directory: Path) -> None:
        config = WeightsConfig(keep_versions=keep)
        kept = Kept(directory, config, is_slow=is_slow, snapshot_interval=interval)
        for version in range(versions):
            await kept.publish(version, share)
            promised = range(max(0, version - keep + 1), version + 1)
            policies = {one: kept.reach(one) for one in promised}
            for one in promised:
                assert cases.same(policies[one].state, drifted(WORDS, share, one))
            for one in promised:
                assert kept.reach(version, policies[one]).digest == policies[version].digest
        kept.ledger.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(live(Path(directory)))


class WaitsForTheNext(MemoryStore):
    """A disk that is not done with the first chunk before the next one comes."""

    def __init__(self) -> None:
        super().__init__(max_bytes=1 << 30)
        self._puts = count()
        self._second = Event()

    def put(self, data: bytes) -> bytes:
        """Keep `data`."""
        if next(self._puts):
            self._second.set()
        else:
            assert self._second.wait(30.0), "chunks are stored one by one"
        return super().put(data)


async def test_chunks_are_stored_side_by_side_and_listed_in_their_order(tmp_path: Path) -> None:
    kept = Kept(tmp_path, WeightsConfig(), store=WaitsForTheNext(), chunk_bytes=1000)
    await kept.publish(0, 0.1)
    head = kept.book.latest()
    assert head is not None
    manifest = kept.book.manifest(head)
    assert manifest is not None
    assert len(manifest.artifacts[0].chunks) > 2
    assert cases.same(kept.reach(0).state, drifted(WORDS, 0.1, 0))
    kept.ledger.close()


async def test_only_the_newest_states_stay_in_memory(tmp_path: Path) -> None:
    kept = Kept(tmp_path, WeightsConfig())
    for version in range(5):
        await kept.publish(version, 0.1)
    await kept.publisher.close()
    assert list(kept.publisher.states) == [3, 4]
    kept.ledger.close()


async def test_snapshots_come_by_interval_and_when_the_deltas_outweigh_the_last(
    tmp_path: Path,
) -> None:
    snapshots: dict[float, list[int]] = {}
    for share, interval in ((0.01, 8), (0.9, 100)):
        config = WeightsConfig(keep_versions=100)
        kept = Kept(tmp_path / str(share), config, snapshot_interval=interval)
        for version in range(17):
            await kept.publish(version, share)
        manifests = [kept.book.manifest(head) for head in kept.book.held()]
        snapshots[share] = [
            one.reaches(manifest.version)
            for manifest in manifests
            if manifest
            for one in manifest.artifacts
            if one.kind == "anchor"
        ]
        kept.ledger.close()
    assert snapshots[0.01] == [0, 8]  # that of 16 is announced with the next version
    assert len(snapshots[0.9]) > 1


async def test_a_long_run_needs_no_more_room_than_what_it_keeps(tmp_path: Path) -> None:
    kept = Kept(tmp_path, WeightsConfig(keep_versions=4), snapshot_interval=5)
    sizes: list[int] = []
    for version in range(60):
        await kept.publish(version, 0.05)
        sizes.append(kept.store.total_bytes())
    snapshot = sizes[0]
    assert max(sizes) < 5 * snapshot
    assert max(sizes[40:]) <= 1.2 * max(sizes[10:30])
    kept.ledger.close()


async def test_a_quota_that_is_reached_publishes_nothing_and_leaves_the_rest_whole(
    tmp_path: Path,
) -> None:
    config = WeightsConfig(keep_versions=50)
    kept = Kept(tmp_path, config, max_bytes=20_000, snapshot_interval=50)

    async def fill() -> None:
        for version in range(100):
            await kept.publish(version, 0.9)

    with pytest.raises(QuotaExceeded, match=r"raise weights\.max_disk_gib"):
        await fill()
    last = kept.publisher.version
    assert last > 0
    assert kept.book.order() == (0, last)
    assert cases.same(kept.reach(last).state, drifted(WORDS, 0.9, last))
    kept.ledger.close()
