"""The replica holds what was proved, and nothing that was refused leaves a trace in it."""

import numpy as np
import pytest
from support import weights_cases as cases

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.weights.codec import encode_delta, encode_full
from primerl.node.weights.replica import EMPTY, WeightReplica, prove
from primerl.node.weights.state import (
    CodecError,
    DigestMismatch,
    State,
    Tensor,
    WrongBase,
    digests,
    state_digest,
)
from primerl.protocol.manifests import Artifact, PolicyManifest, TensorInfo

V0 = {"a": cases.like_a_model(1, 5000), "b": cases.like_a_model(2, 3000), "c": cases.bf16(1, 2)}
V1 = V0 | {"a": cases.stepped(V0["a"], 3, 0.02)}
V2 = V1 | {"b": cases.stepped(V1["b"], 4, 0.5)}


def published(
    version: int, state: State, base: State | None = None
) -> tuple[PolicyManifest, Artifact, bytes]:
    """What a trainer publishes: manifest, artifact, payload."""
    if base is None:
        payload = b"".join(encode_full(state))
        artifact = cases.snapshot(payload)
    else:
        payload = b"".join(encode_delta(base, state))
        artifact = cases.delta(version - 1, state_digest(digests(base)), payload)
    return cases.manifest(version, state, artifact), artifact, payload


def at_v0() -> WeightReplica:
    replica = WeightReplica()
    replica.commit(replica.prepare(*published(0, V0)))
    return replica


@pytest.mark.parametrize("threads", [1, 2])
def test_replica_follows_snapshot_and_deltas(threads: int) -> None:
    replica = WeightReplica(threads=threads)
    assert replica.policy is EMPTY
    for version, state, base in ((0, V0, None), (1, V1, V0), (2, V2, V1)):
        policy = replica.commit(replica.prepare(*published(version, state, base)))
        assert policy.version == version
        assert policy == replica.policy
        assert cases.same(policy.state, state)
        assert policy.digests == digests(state)
        assert policy.digest == state_digest(digests(state))


def test_prepare_changes_nothing_until_commit() -> None:
    replica = at_v0()
    before = replica.policy
    bits = {name: t.data.tobytes() for name, t in before.state.items()}
    prepared = replica.prepare(*published(1, V1, V0))
    assert replica.policy is before
    replica.commit(prepared)
    assert {name: t.data.tobytes() for name, t in before.state.items()} == bits
    assert replica.policy.state["c"] is before.state["c"]


def test_trainer_proves_its_own_state() -> None:
    policy = prove(4, V1)
    assert WeightReplica(policy).policy.digest == cases.manifest(4, V1, cases.snapshot(b"x")).state


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_any_tensor_that_differs_from_the_manifest_is_refused(name: str) -> None:
    replica = at_v0()
    forged = dict(V1)
    data = forged[name].data.copy()
    data[0] ^= 1
    forged[name] = Tensor("BF16", forged[name].shape, data)
    manifest, _, _ = published(1, V1, V0)
    _, artifact, payload = published(1, forged, V0)
    with pytest.raises(DigestMismatch, match=f"tensor {name}"):
        replica.prepare(manifest, artifact, payload)
    with pytest.raises(DigestMismatch, match=f"tensor {name}"):
        replica.prepare(manifest, *published(1, forged)[1:])
    assert replica.policy.version == 0


def test_unchanged_tensor_counts_with_its_own_digest() -> None:
    """A skip is proved too: the manifest promises another `c` than the one held."""
    replica = at_v0()
    manifest, artifact, payload = published(1, V1, V0)
    tensors = tuple(
        TensorInfo(i.name, i.dtype, i.shape, digest(b"other")) if i.name == "c" else i
        for i in manifest.tensors
    )
    lying = PolicyManifest(manifest.run, 1, manifest.state, tensors, manifest.artifacts)
    with pytest.raises(DigestMismatch, match="tensor c"):
        replica.prepare(lying, artifact, payload)


def test_state_digest_that_does_not_follow_from_the_tensors_is_refused() -> None:
    manifest, artifact, payload = published(0, V0)
    lying = PolicyManifest(manifest.run, 0, digest(b"x"), manifest.tensors, manifest.artifacts)
    with pytest.raises(DigestMismatch, match="state is"):
        WeightReplica().prepare(lying, artifact, payload)


def test_delta_on_another_base_is_refused() -> None:
    with pytest.raises(WrongBase, match="held is 0"):
        at_v0().prepare(*published(2, V2, V1))
    with pytest.raises(WrongBase, match="held is -1"):
        WeightReplica().prepare(*published(1, V1, V0))


def test_delta_is_not_applied_twice() -> None:
    replica = at_v0()
    first = published(1, V1, V0)
    again = replica.prepare(*first)
    replica.commit(replica.prepare(*first))
    with pytest.raises(WrongBase):
        replica.prepare(*first)
    with pytest.raises(WrongBase, match="prepare it again"):
        replica.commit(again)
    assert cases.same(replica.policy.state, V1)


def test_snapshot_may_be_committed_over_anything() -> None:
    replica = at_v0()
    snapshot = replica.prepare(*published(2, V2))
    replica.commit(replica.prepare(*published(1, V1, V0)))
    assert replica.commit(snapshot).version == 2


def test_unknown_codec_and_broken_payload_leave_the_policy() -> None:
    replica = at_v0()
    manifest, artifact, payload = published(1, V1, V0)
    newer = Artifact("delta", 0, artifact.base_state, "planes/99", 1, artifact.chunks)
    with pytest.raises(CodecError, match="update this node"):
        replica.prepare(manifest, newer, payload)
    with pytest.raises(CodecError):
        replica.prepare(manifest, artifact, [payload[:-1]])
    assert replica.policy.digest == state_digest(digests(V0))


def test_delta_of_zeros_digest_does_not_fit_an_empty_replica() -> None:
    manifest, artifact, payload = published(1, V1, V0)
    forged = Artifact("delta", -1, NO_DIGEST, artifact.codec, artifact.size, artifact.chunks)
    with pytest.raises(CodecError, match="held state differs"):
        WeightReplica().prepare(manifest, forged, payload)


def test_proof_does_not_depend_on_the_order_of_tensors() -> None:
    backwards = dict(reversed(list(V0.items())))
    manifest, artifact, _ = published(0, V0)
    payload = b"".join(encode_full(backwards))
    assert np.array_equal(
        WeightReplica().prepare(manifest, artifact, payload).policy.state["a"].data, V0["a"].data
    )


def test_a_prepared_delta_says_what_changed_and_a_snapshot_does_not() -> None:
    replica = at_v0()
    changed = replica.prepare(*published(1, V1, V0)).changed
    assert changed is not None
    assert set(changed) == {name for name in V0 if not cases.same({"": V0[name]}, {"": V1[name]})}
    assert replica.prepare(*published(1, V1)).changed is None
