"""The policy that this node holds, or its share of it, kept equal to the trainer's bit for bit.

A state becomes the held one only after every tensor in it was hashed and equals the digest in the signed
manifest; until commit() nothing changes.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ...crypto.hashing import NO_DIGEST, short
from ...protocol.manifests import Artifact, PolicyManifest, TensorInfo
from .chain import NOTHING
from .codec import CODEC, apply_delta, decode_full
from .payload import TensorShare, everything, part_of, wanted_of
from .state import (
    Changed,
    CodecError,
    DigestMismatch,
    State,
    Tensor,
    WrongBase,
    state_digest,
    tensor_digest,
)


@dataclass(frozen=True)
class Policy:
    """A proved state: its version, tensors, their digests, and the digest of the whole."""

    version: int
    state: State
    """Only the tensors of the node's share."""
    digests: Mapping[str, bytes]
    digest: bytes
    """Digest of all tensors of the version: the manifest's digests stand for those that are not in the share.
    """


@dataclass(frozen=True)
class PreparedPolicy:
    """A proved policy, and the digest of the state that it was made from."""

    policy: Policy
    base: bytes = field(repr=False)
    changed: Changed | None = field(default=None, repr=False)
    """Positions at which `policy` differs from its base; None for a snapshot."""


EMPTY = Policy(NOTHING, {}, {}, NO_DIGEST)
"""The policy of a node before its first snapshot."""


def prove(version: int, state: State, *, known: Policy = EMPTY, threads: int = 1) -> Policy:
    """Hash `state`, for the trainer, which made it, or to compare with a manifest's base state.

    Tensors that are the same objects as in `known` are not hashed again.
    """
    hashes = _digests(state, known, {}, threads)
    return Policy(version, state, hashes, state_digest(hashes))


def tensor_table(policy: Policy) -> tuple[TensorInfo, ...]:
    """List the tensors of a policy as its manifest does."""
    return tuple(
        TensorInfo(name, tensor.dtype, tensor.shape, policy.digests[name])
        for name, tensor in sorted(policy.state.items())
    )


class WeightReplica:
    """Hold one policy; prepare() the next beside it, commit() to swap."""

    def __init__(
        self, policy: Policy = EMPTY, *, threads: int = 1, share: TensorShare = everything
    ) -> None:
        """Decode, prove and hold only the tensors of `share`."""
        self._policy = policy
        self._threads = threads
        self._share = share

    @property
    def policy(self) -> Policy:
        """The policy held now."""
        return self._policy

    def prepare(
        self, manifest: PolicyManifest, artifact: Artifact, payload: bytes | Iterable[bytes]
    ) -> PreparedPolicy:
        """Decode `payload` into a copy and prove it; the held policy does not change.

        For a share, `payload` is the chunks that chunks_for() names. Blocks for as long as decoding and hashing
        take. Raises CodecError, WrongBase or DigestMismatch.
        """
        current = self._policy
        if artifact.codec != CODEC:
            raise CodecError(f"codec {artifact.codec!r} is unknown, update this node")
        delta = artifact.kind != "anchor"
        if delta:
            _check_base(current, artifact)
        decoded: dict[str, bytes] = {}
        state, changed = self._decode(manifest, artifact, payload, decoded)
        hashes = _digests(state, current, decoded, self._threads)
        policy = _proved(manifest, state, hashes)
        return PreparedPolicy(policy, current.digest if delta else EMPTY.digest, changed)

    def commit(self, prepared: PreparedPolicy) -> Policy:
        """Hold `prepared` from now on. Raises WrongBase if the base was replaced meanwhile."""
        if prepared.base not in (EMPTY.digest, self._policy.digest):
            raise WrongBase(
                f"version {prepared.policy.version} was prepared on state {short(prepared.base)}, "
                f"but {short(self._policy.digest)} is held by now: prepare it again"
            )
        self._policy = prepared.policy
        return self._policy

    def _decode(
        self,
        manifest: PolicyManifest,
        artifact: Artifact,
        payload: bytes | Iterable[bytes],
        hashes: dict[str, bytes],
    ) -> tuple[State, Changed | None]:
        """Decode the state, put the digest of each tensor into `hashes`, and find where a delta changed it."""
        wanted = wanted_of(manifest.tensors, self._share)
        infos = [info for info in manifest.tensors if info.name in wanted]
        chunks = [payload] if isinstance(payload, bytes) else payload
        payload = part_of(artifact, manifest.tensors, wanted, chunks)

        def done(name: str, tensor: Tensor) -> None:
            hashes[name] = tensor_digest(tensor)

        if artifact.kind == "anchor":
            return decode_full(payload, infos, threads=self._threads, done=done), None
        current = self._policy.state
        return apply_delta(current, payload, infos, threads=self._threads, done=done)


def _digests(
    state: State, current: Policy, known: Mapping[str, bytes], threads: int
) -> dict[str, bytes]:
    """Return the digest of every tensor; those in `known`, and of tensors that `current` has too, are not
    computed again."""
    digests = {
        name: current.digests[name] for name in state if state[name] is current.state.get(name)
    }
    digests |= known
    fresh = [name for name in state if name not in digests]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        tensors = [state[name] for name in fresh]
        digests.update(zip(fresh, pool.map(tensor_digest, tensors), strict=True))
    return {name: digests[name] for name in state}


def _proved(manifest: PolicyManifest, state: State, hashes: Mapping[str, bytes]) -> Policy:
    """Make the policy of `state`, or raise DigestMismatch."""
    for info in manifest.tensors:
        if hashes.get(info.name, info.digest) != info.digest:
            raise DigestMismatch(
                f"version {manifest.version}: tensor {info.name} is "
                f"{short(hashes[info.name])}, the manifest says {short(info.digest)}"
            )
    whole = state_digest({info.name: info.digest for info in manifest.tensors})
    if whole != manifest.state:
        raise DigestMismatch(
            f"version {manifest.version}: state is {short(whole)}, "
            f"the manifest says {short(manifest.state)}"
        )
    return Policy(manifest.version, state, hashes, whole)


def _check_base(current: Policy, artifact: Artifact) -> None:
    if artifact.base_state != current.digest:
        raise WrongBase(
            f"the delta is for version {artifact.base_version} ({short(artifact.base_state)}), "
            f"held is {current.version} ({short(current.digest)})"
        )
