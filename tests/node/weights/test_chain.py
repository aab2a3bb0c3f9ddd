"""Planning: the cheapest way, never onto another state, and collection never cuts a live chain."""

from collections.abc import Set as AbstractSet

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.weights.chain import NOTHING, VersionChain
from primerl.node.weights.codec import CODEC
from primerl.node.weights.state import NoPath, WeightsError
from primerl.protocol.manifests import Artifact, ChunkRef, PolicyManifest


def state(version: int) -> bytes:
    return digest(f"state {version}".encode())


def artifact(version: int, base: int, size: int, base_state: bytes | None = None) -> Artifact:
    chunk = ChunkRef(digest(f"chunk {base} to {version}".encode()), size)
    if base == NOTHING:
        return Artifact("anchor", -1, NO_DIGEST, CODEC, size, (chunk,))
    return Artifact("delta", base, base_state or state(base), CODEC, size, (chunk,))


def chain_of(artifacts: dict[tuple[int, int], int]) -> VersionChain:
    """A chain from (version, base version) -> size."""
    chain = VersionChain()
    for version in sorted({version for version, _ in artifacts}):
        ways = tuple(artifact(v, b, size) for (v, b), size in artifacts.items() if v == version)
        chain.add(PolicyManifest(NO_DIGEST, version, state(version), (), ways))
    return chain


def plan(
    chain: VersionChain, have: int, target: int, *, stored: AbstractSet[bytes] = frozenset()
) -> list[tuple[int, int]]:
    """The planned steps as (version, base version)."""
    held = NO_DIGEST if have == NOTHING else state(have)
    return [(v, a.base_version) for v, a in chain.plan(have, held, target, stored=stored)]


LINE = {(0, -1): 100, (1, 0): 10, (2, 1): 10, (3, 2): 10}


def test_late_joiner_takes_the_snapshot_and_the_deltas() -> None:
    assert plan(chain_of(LINE), NOTHING, 3) == [(0, -1), (1, 0), (2, 1), (3, 2)]


def test_follower_takes_only_the_deltas_it_lacks() -> None:
    assert plan(chain_of(LINE), 1, 3) == [(2, 1), (3, 2)]
    assert plan(chain_of(LINE), 3, 3) == []


def test_cheaper_of_new_snapshot_and_chain_is_taken() -> None:
    chain = chain_of(LINE | {(3, -1): 25})
    assert plan(chain, NOTHING, 3) == [(3, -1)]
    assert plan(chain, 1, 3) == [(2, 1), (3, 2)]
    assert plan(chain, 0, 3) == [(3, -1)]


def test_a_delta_over_several_versions_wins_when_it_is_shorter_and_on_equal_bytes() -> None:
    assert plan(chain_of(LINE | {(3, 1): 19}), 1, 3) == [(3, 1)]
    assert plan(chain_of(LINE | {(3, 1): 20}), 1, 3) == [(3, 1)]
    assert plan(chain_of(LINE | {(3, 1): 21}), 1, 3) == [(2, 1), (3, 2)]


def test_chunks_in_the_store_cost_nothing() -> None:
    chain = chain_of(LINE | {(3, -1): 25})
    have = artifact(0, -1, 100).chunks[0].digest
    assert plan(chain, NOTHING, 3) == [(3, -1)]
    assert plan(chain, NOTHING, 2, stored={have}) == [(0, -1), (1, 0), (2, 1)]
    stored = {a.chunks[0].digest for a in (artifact(0, -1, 100), artifact(1, 0, 10))}
    assert plan(chain, NOTHING, 3, stored=stored) == [(0, -1), (1, 0), (2, 1), (3, 2)]


def test_other_bits_of_the_held_version_start_from_a_snapshot() -> None:
    steps = chain_of(LINE).plan(1, digest(b"other bits"), 3)
    assert [v for v, _ in steps] == [0, 1, 2, 3]


def test_delta_on_another_state_or_from_the_future_is_never_planned() -> None:
    chain = VersionChain()
    ways = (artifact(5, 4, 1, digest(b"forged")), artifact(5, 6, 1), artifact(5, 5, 1))
    chain.add(PolicyManifest(NO_DIGEST, 5, state(5), (), ways))
    for have in (NOTHING, 4, 6):
        with pytest.raises(NoPath):
            plan(chain, have, 5)


def test_held_version_needs_no_manifest_of_its_own() -> None:
    assert plan(chain_of({(8, 7): 5}), 7, 8) == [(8, 7)]


def test_unknown_target_and_missing_link_have_no_path() -> None:
    gap = {key: size for key, size in LINE.items() if key != (2, 1)}
    for chain, have, target in (
        (chain_of(LINE), 0, 9),
        (chain_of(gap), 1, 3),
        (VersionChain(), 0, 0),
    ):
        with pytest.raises(NoPath, match="wait for a snapshot"):
            plan(chain, have, target)


def test_known_version_with_another_state_needs_a_rewind() -> None:
    chain = chain_of(LINE)
    other = PolicyManifest(NO_DIGEST, 2, digest(b"other"), (), (artifact(2, 1, 10),))
    with pytest.raises(WeightsError, match="another state"):
        chain.add(other)
    chain.rewind(2)
    assert chain.newest == 1
    chain.add(other)
    assert chain.get(2) == other
    assert chain.get(3) is None


def test_a_gap_is_where_known_versions_break_off_below_a_version() -> None:
    chain = chain_of({key: size for key, size in LINE.items() if key[0] < 2} | {(9, -1): 5})
    assert chain.gap(NOTHING, 9) == 1
    assert chain.gap(4, 9) == 4
    assert chain.gap(8, 9) == 1  # what is held leads on, but there is more to learn before it
    assert chain.gap(NOTHING, 0) is None
    assert chain_of(LINE).gap(NOTHING, 3) is None
    assert chain_of({(9, -1): 5}).gap(NOTHING, 9) is None


def test_snapshot_is_due_at_first_by_age_and_by_weight() -> None:
    assert VersionChain().needs_snapshot(0, 10)
    chain = chain_of(LINE)
    assert not chain.needs_snapshot(0, 10)
    assert not chain.needs_snapshot(3, 10)
    assert chain.needs_snapshot(3, 3)
    assert not chain.needs_snapshot(3, 10, outweigh=0.3)
    assert chain.needs_snapshot(3, 10, outweigh=0.29)
    assert chain_of(LINE | {(3, 2): 81}).needs_snapshot(3, 10)
    assert chain.needs_snapshot(9, 10)  # it is unknown


def with_earlier(chain: VersionChain, version: int, snapshot_of: int, size: int) -> VersionChain:
    """Let the manifest of `version` also have a snapshot of an earlier version."""
    known = chain.get(version)
    assert known is not None
    late = structs.replace(artifact(snapshot_of, NOTHING, size), version=snapshot_of)
    chain.add(structs.replace(known, artifacts=(*known.artifacts, late)))
    return chain


def test_a_later_manifest_may_have_the_snapshot_of_an_earlier_version() -> None:
    chain = with_earlier(chain_of(LINE), 3, snapshot_of=2, size=20)
    assert plan(chain, NOTHING, 3) == [(2, -1), (3, 2)]
    assert plan(chain, NOTHING, 2) == [(2, -1)]
    assert plan(chain, 1, 3) == [(2, 1), (3, 2)]
    assert not chain.needs_snapshot(3, 3)
    assert chain.forget(1) == 2
    assert plan(chain, NOTHING, 3) == [(2, -1), (3, 2)]


def test_a_snapshot_of_a_version_that_is_not_known_or_is_later_is_no_way() -> None:
    for version in (4, 7):
        chain = with_earlier(chain_of({(5, 4): 10, (6, 5): 10}), 6, snapshot_of=version, size=1)
        with pytest.raises(NoPath):
            plan(chain, NOTHING, 6)
        assert {v for v, _ in chain.live(2)} == {5, 6}


def test_old_snapshots_go_when_a_new_one_carries_every_kept_version() -> None:
    chain = chain_of(LINE | {(3, -1): 90, (4, 3): 10, (5, 4): 10})
    live = [(v, a.base_version) for v, a in chain.live(2)]
    assert live == [(3, -1), (4, 3), (5, 4)]
    assert (0, -1) in [(v, a.base_version) for v, a in chain.live(4)]


def test_deltas_without_a_known_snapshot_are_kept_for_followers() -> None:
    chain = chain_of({(7, 6): 5, (8, 7): 5, (9, 8): 5})
    assert [(v, a.base_version) for v, a in chain.live(2)] == [(8, 7), (9, 8)]


def test_keeping_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="newest"):
        chain_of(LINE).live(0)


@st.composite
def histories(draw: st.DrawFn) -> dict[tuple[int, int], int]:
    """Draw a history of versions: a delta for each, snapshots now and then, deltas over several versions."""
    sizes = st.integers(1, 200)
    artifacts: dict[tuple[int, int], int] = {(0, -1): draw(sizes)}
    for version in range(1, draw(st.integers(1, 12))):
        artifacts[version, version - 1] = draw(sizes)
        if draw(st.integers(0, 3)) == 0:
            artifacts[version, -1] = draw(sizes)
        if version > 2 and draw(st.booleans()):
            artifacts[version, version - draw(st.integers(2, version))] = draw(sizes)
    return artifacts


@given(histories(), st.integers(1, 5))
def test_collection_never_breaks_a_kept_version(
    history: dict[tuple[int, int], int], keep: int
) -> None:
    chain = chain_of(history)
    newest = chain.newest
    live = chain.live_chunks(keep)
    chain.forget(keep)
    assert chain.live_chunks(keep) == live
    left = chain_of({k: s for k, s in history.items() if artifact(*k, s).chunks[0].digest in live})
    for version in range(max(0, newest - keep + 1), newest + 1):
        assert plan(left, NOTHING, version)
        assert plan(chain, NOTHING, version)
        if version < newest:
            assert plan(left, version, version + 1)


@given(histories(), st.integers(-1, 11))
def test_plan_is_the_cheapest_of_all_ways(history: dict[tuple[int, int], int], have: int) -> None:
    chain = chain_of(history)
    target = chain.newest
    have = min(have, target)

    def cheapest(version: int) -> float:
        if version == have:
            return 0
        ways = [(b, size) for (v, b), size in history.items() if v == version]
        return min(size + (0 if b == -1 else cheapest(b)) for b, size in ways)

    steps = chain.plan(have, NO_DIGEST if have == NOTHING else state(have), target)
    assert sum(a.size for _, a in steps) == cheapest(target)
