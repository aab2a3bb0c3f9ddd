"""Chunks of a payload, and the chunks and bytes of it that a node needs which holds some of the tensors."""

import random
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support import weights_cases as cases

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.weights.chain import VersionChain
from primerl.node.weights.codec import CODEC, encode_delta, encode_full
from primerl.node.weights.encoders import Encoders
from primerl.node.weights.payload import (
    CHUNK_SHARE,
    MIN_CHUNK,
    NeededChunks,
    Offsets,
    TensorShare,
    chunks_for,
    cut,
    layout_of,
    part_of,
)
from primerl.node.weights.replica import WeightReplica
from primerl.node.weights.state import (
    CodecError,
    DigestMismatch,
    State,
    WeightsError,
    digests,
    state_digest,
)
from primerl.protocol.manifests import Artifact, ChunkRef

V0 = {f"t{n}": cases.like_a_model(n, 3000 + 700 * n) for n in range(8)} | {
    "t3.empty": cases.tensor("F16", (0, 4), b""),
    "z": cases.bf16(1, 2, 3),
}
V1 = V0 | {f"t{n}": cases.stepped(V0[f"t{n}"], 20 + n, 0.1) for n in (0, 1, 4, 7)}
V2 = V1 | {f"t{n}": cases.stepped(V1[f"t{n}"], 40 + n, 0.6) for n in (1, 2)}


def only(*names: str) -> TensorShare:
    """A share of these."""
    return lambda given: frozenset(names) & frozenset(given)


class Published:
    """One artifact as a trainer makes it, and its chunks by digest."""

    def __init__(
        self, version: int, state: State, base: State | None = None, chunk: int = 512
    ) -> None:
        offsets = Offsets(layout_of(state))
        payload = encode_full(state) if base is None else encode_delta(base, state)
        self.payload = b"".join(offsets.watch(payload))
        pieces = [self.payload[at : at + chunk] for at in range(0, len(self.payload), chunk)]
        self.chunks = {digest(piece): piece for piece in pieces}
        base_state = NO_DIGEST if base is None else state_digest(digests(base))
        self.artifact = Artifact(
            kind="anchor" if base is None else "delta",
            base_version=-1 if base is None else version - 1,
            base_state=base_state,
            codec=CODEC,
            size=len(self.payload),
            chunks=tuple(ChunkRef(digest(piece), len(piece)) for piece in pieces),
            offsets=offsets.found,
        )
        self.manifest = cases.manifest(version, state, self.artifact)

    def some(self, wanted: AbstractSet[str]) -> list[bytes]:
        """What chunks_for() names."""
        needed = chunks_for(self.artifact, self.manifest.tensors, wanted)
        return [self.chunks[chunk.digest] for chunk in needed]


def part(state: State, names: Collection[str]) -> State:
    """Some tensors."""
    return {name: state[name] for name in names}


def grown(share: TensorShare, *line: Published) -> WeightReplica:
    """A replica of a share that went along `line`."""
    replica = WeightReplica(share=share)
    for one in line:
        wanted = share(list(V0))
        replica.commit(replica.prepare(one.manifest, one.artifact, one.some(wanted)))
    return replica


SNAPSHOT, FIRST, SECOND = Published(0, V0), Published(1, V1, V0), Published(2, V2, V1)


@pytest.mark.parametrize("chunk", [1, 7, 300, 5000, 1 << 20])
@pytest.mark.parametrize("names", [("t0",), ("t7", "z"), ("t1", "t3.empty", "t4"), ("t3.empty",)])
def test_a_share_becomes_what_the_whole_would_have_become(
    names: tuple[str, ...], chunk: int
) -> None:
    line = [Published(0, V0, chunk=chunk), Published(1, V1, V0, chunk), Published(2, V2, V1, chunk)]
    replica = grown(only(*names), *line)
    assert cases.same(replica.policy.state, part(V2, names))
    assert replica.policy.digests == digests(part(V2, names))
    assert replica.policy.digest == state_digest(digests(V2))
    assert replica.policy.version == 2


def test_only_chunks_that_hold_wanted_tensors_are_needed() -> None:
    for published in (SNAPSHOT, FIRST):
        artifact, tensors = published.artifact, published.manifest.tensors
        names = [name for name, _, _ in layout_of(V0)]
        edges = (*artifact.offsets, artifact.size)
        starts = [0, *accumulate(chunk.size for chunk in artifact.chunks)]
        for number, name in enumerate(names):
            low, high = edges[number], edges[number + 1]
            wanted = [
                chunk
                for chunk, at in zip(artifact.chunks, starts, strict=False)
                if at < high and low < at + chunk.size and low < high
            ]
            assert list(chunks_for(artifact, tensors, {name})) == wanted
        assert chunks_for(artifact, tensors, set(names)) == artifact.chunks
        assert chunks_for(artifact, tensors, set()) == ()


def test_changes_are_reported_for_the_own_share_only() -> None:
    replica = grown(only("t1", "t4", "z"), SNAPSHOT)
    wanted = frozenset({"t1", "t4", "z"})
    prepared = replica.prepare(FIRST.manifest, FIRST.artifact, FIRST.some(wanted))
    assert prepared.changed is not None
    assert set(prepared.changed) == {"t1", "t4"}
    assert prepared.policy.state["z"] is replica.policy.state["z"]


def test_without_offsets_everything_is_needed_and_the_share_is_held_all_the_same() -> None:
    share = only("t1", "t6")
    replica = WeightReplica(share=share)
    for one in (SNAPSHOT, FIRST, SECOND):
        plain = structs.replace(one.artifact, offsets=())
        assert chunks_for(plain, one.manifest.tensors, share(list(V0))) == plain.chunks
        pieces = [one.chunks[chunk.digest] for chunk in plain.chunks]
        replica.commit(replica.prepare(one.manifest, plain, pieces))
    assert cases.same(replica.policy.state, part(V2, ["t1", "t6"]))


def test_a_tensor_that_differs_from_the_manifest_is_refused() -> None:
    """Also where the payload is right and another tensor is meant."""
    replica = grown(only("t1", "t4"), SNAPSHOT)
    forged = Published(1, V1 | {"t4": cases.stepped(V0["t4"], 99, 0.1)}, V0)
    with pytest.raises(DigestMismatch, match="tensor t4"):
        replica.prepare(FIRST.manifest, forged.artifact, forged.some({"t1", "t4"}))
    unseen = structs.replace(FIRST.manifest, state=digest(b"other"))
    with pytest.raises(DigestMismatch, match="state is"):
        replica.prepare(unseen, FIRST.artifact, FIRST.some({"t1", "t4"}))
    assert replica.policy.version == 0


def test_a_lie_about_a_tensor_that_is_not_held_cannot_change_the_state_digest() -> None:
    """The digests in the manifest have to lead to the head's, whether their tensors are held or not."""
    tensors = tuple(
        structs.replace(info, digest=digest(b"lie")) if info.name == "t6" else info
        for info in FIRST.manifest.tensors
    )
    lying = structs.replace(FIRST.manifest, tensors=tensors)
    with pytest.raises(DigestMismatch, match="state is"):
        grown(only("t1"), SNAPSHOT).prepare(lying, FIRST.artifact, FIRST.some({"t1"}))


@pytest.mark.parametrize(
    "offsets",
    [
        FIRST.artifact.offsets[:-1],
        (*FIRST.artifact.offsets, FIRST.artifact.size),
        (0, *FIRST.artifact.offsets[1:]),
        tuple(reversed(FIRST.artifact.offsets)),
        (*FIRST.artifact.offsets[:-1], FIRST.artifact.size + 1),
    ],
)
def test_offsets_that_make_no_sense_are_refused(offsets: tuple[int, ...]) -> None:
    wrong = structs.replace(FIRST.artifact, offsets=offsets)
    with pytest.raises(CodecError, match="offsets"):
        chunks_for(wrong, FIRST.manifest.tensors, {"t1"})
    with pytest.raises(CodecError, match="offsets"):
        list(part_of(wrong, FIRST.manifest.tensors, {"t1"}, []))


def test_chunks_that_are_not_as_large_as_the_whole_are_refused() -> None:
    wrong = structs.replace(FIRST.artifact, chunks=FIRST.artifact.chunks[1:])
    with pytest.raises(CodecError, match="chunks"):
        chunks_for(wrong, FIRST.manifest.tensors, {"t1"})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_offsets_that_lie_end_in_a_refusal_and_leave_what_is_held(data: st.DataObject) -> None:
    size = FIRST.artifact.size
    inner = st.lists(
        st.integers(FIRST.artifact.offsets[0], size), min_size=len(V0) - 1, max_size=len(V0) - 1
    )
    offsets = (FIRST.artifact.offsets[0], *sorted(data.draw(inner)))
    wanted = frozenset(data.draw(st.lists(st.sampled_from(sorted(V0)), min_size=1, max_size=3)))
    lying = structs.replace(FIRST.artifact, offsets=offsets)
    replica = grown(only(*wanted), SNAPSHOT)
    pieces = [FIRST.chunks[c.digest] for c in chunks_for(lying, FIRST.manifest.tensors, wanted)]
    try:
        policy = replica.prepare(FIRST.manifest, lying, pieces).policy
    except WeightsError:
        assert cases.same(replica.policy.state, part(V0, wanted))
    else:
        assert cases.same(policy.state, part(V1, wanted))


def test_chunks_that_are_missing_or_too_short_are_refused() -> None:
    pieces = FIRST.some({"t1", "t4"})
    replica = grown(only("t1", "t4"), SNAPSHOT)
    for wrong in ([], pieces[:-1], [piece[:-1] for piece in pieces], pieces[1:]):
        with pytest.raises(WeightsError):
            replica.prepare(FIRST.manifest, FIRST.artifact, wrong)


def test_every_way_to_make_a_delta_finds_the_same_places() -> None:
    layout = layout_of(V0)
    found: set[tuple[int, ...]] = set()
    with Encoders(2) as encoders:
        for payload in (
            encode_delta(V0, V1),
            encode_delta(V0, V1, threads=2),
            encoders.encode_delta(V0, V1),
        ):
            offsets = Offsets(layout)
            assert b"".join(offsets.watch(payload)) == FIRST.payload
            found.add(offsets.found)
    assert found == {FIRST.artifact.offsets}


def test_offsets_count_empty_and_large_tensors() -> None:
    state = {"a": cases.like_a_model(1, 200_000), "b": cases.tensor("F16", (0,), b"")} | {
        "c": cases.bf16(4)
    }
    published = Published(0, state, chunk=1 << 16)
    a, b, c = published.artifact.offsets
    assert a < b == c < published.artifact.size
    assert len(chunks_for(published.artifact, published.manifest.tensors, {"c"})) == 1


def noisy(seed: int) -> State:
    """As V0 where `t3` is concerned, and nowhere else."""
    chance = random.Random(seed)
    return {
        name: tensor
        if name == "t3"
        else cases.tensor(tensor.dtype, tensor.shape, chance.randbytes(tensor.data.nbytes))
        for name, tensor in V0.items()
    }


def test_planning_counts_what_the_share_needs() -> None:
    """For everybody else the snapshot is the shorter way; of `t3` the deltas say next to nothing."""
    middle, last = noisy(5), noisy(6)
    first, step, snapshot = Published(1, middle, V0), Published(2, last, middle), Published(2, last)
    chain = VersionChain()
    chain.add(SNAPSHOT.manifest)
    chain.add(first.manifest)
    chain.add(structs.replace(step.manifest, artifacts=(step.artifact, snapshot.artifact)))
    held = (0, SNAPSHOT.manifest.state)
    assert [artifact.kind for _, artifact in chain.plan(*held, 2)] == ["anchor"]
    steps = chain.plan(*held, 2, needs=NeededChunks(only("t3")))
    assert [artifact.kind for _, artifact in steps] == ["delta", "delta"]


def test_what_is_needed_is_remembered_for_one_artifact_and_not_for_another() -> None:
    calls: list[int] = []

    def share(names: Collection[str]) -> AbstractSet[str]:
        calls.append(len(names))
        return {"t1"}

    needs = NeededChunks(share)
    first = needs(FIRST.manifest, FIRST.artifact)
    assert needs(FIRST.manifest, FIRST.artifact) == first
    assert len(calls) == 1
    assert needs(SNAPSHOT.manifest, SNAPSHOT.artifact) != first
    assert len(calls) == 2


def test_a_share_may_name_what_a_manifest_does_not_have() -> None:
    replica = grown(lambda _: frozenset({"t1", "lm_head.weight"}), SNAPSHOT)
    assert set(replica.policy.state) == {"t1"}


# -- chunks ----------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40)), st.integers(1, 17))
def test_cut_loses_nothing_and_fills_every_chunk_but_the_last(
    parts: list[bytes], size: int
) -> None:
    pieces = list(cut(iter(parts), size))
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(0 < len(piece) <= size for piece in pieces)


@pytest.mark.parametrize("size", [0, -1, 2**24 + 1])
def test_cut_refuses_chunks_that_no_peer_would_take(size: int) -> None:
    with pytest.raises(ValueError, match="chunk size"):
        next(cut(iter([b"x"]), size))


def test_chunks_grow_with_what_came_before_up_to_the_largest() -> None:
    mib = b"\0" * 2**20
    sizes = [len(piece) for piece in cut(iter([mib] * 96), 2**20)]
    assert sizes[:CHUNK_SHARE] == [MIN_CHUNK] * CHUNK_SHARE
    assert all(a <= b for a, b in pairwise(sizes[:-1]))
    assert max(sizes) == 2**20
    assert sum(sizes) == 96 * 2**20


@given(st.lists(st.integers(0, 3 * MIN_CHUNK), max_size=8))
def test_equal_payloads_give_equal_chunks_however_they_were_split(splits: list[int]) -> None:
    whole = bytes(1000) * (sum(splits) // 1000 + 1)
    at = 0
    parts: list[bytes] = []
    for size in splits:
        parts.append(whole[at : at + size])
        at += size
    joined = b"".join(parts)
    assert list(cut(iter(parts), 2**20)) == list(cut(iter([joined]), 2**20))
