"""Weight updates for programs that use primerl as a library: make and sign them, verify and apply them.

These names stay as they are from release to release (docs/library.md), and check all that a node checks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...crypto.hashing import NO_DIGEST, digest
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import (
    Artifact,
    ChunkRef,
    PolicyHead,
    PolicyManifest,
    check_sizes,
    encode,
)
from ...protocol.trust import TrustedRun
from ...protocol.version import MAX_MANIFEST
from ..weights.codec import CODEC, encode_delta, encode_full
from ..weights.replica import EMPTY, Policy, WeightReplica, prove, tensor_table
from ..weights.state import State

CHUNK = 8 << 20
"""Bytes of a chunk of an update."""


@dataclass(frozen=True)
class WeightUpdate:
    """A policy version as it travels: what a trainer signs, and the bytes that it vouches for."""

    head: bytes
    """Sealed: the fact that the version exists, with the digest of `manifest`."""
    manifest: bytes
    """Digest of every tensor and chunk."""
    chunks: tuple[bytes, ...]
    """The payload: a delta to the version before, or a whole state."""
    policy: Policy
    """Number, tensors and digests of the version."""
    digest: bytes
    """The head's, which the next one names."""


def make_update(
    key: SecretKey,
    run: bytes,
    state: State,
    *,
    after: WeightUpdate | None = None,
    now: int,
    expires: int,
) -> WeightUpdate:
    """Encode and sign a version of a run: whole, or as the difference to the version `after` which it comes.

    `run` is 32 bytes, times are Unix seconds. Raises CodecError if names, types or shapes have changed, and
    LocalProtocolError if the manifest is too large to be read.
    """
    base = after.policy if after else EMPTY
    policy = prove(base.version + 1, state, known=base)
    payload = b"".join(encode_delta(base.state, state) if after else encode_full(state))
    chunks = tuple(payload[start : start + CHUNK] for start in range(0, len(payload), CHUNK))
    artifact = Artifact(
        "delta" if after else "anchor",
        base.version,
        base.digest if after else NO_DIGEST,
        CODEC,
        len(payload),
        tuple(ChunkRef(digest(chunk), len(chunk)) for chunk in chunks),
    )
    manifest = PolicyManifest(run, policy.version, policy.digest, tensor_table(policy), (artifact,))
    document = check_sizes(encode(manifest), MAX_MANIFEST)
    head = PolicyHead(
        term=0,
        version=policy.version,
        previous=after.digest if after else NO_DIGEST,
        state=policy.digest,
        manifest=digest(document),
        manifest_size=len(document),
        created=now,
        expires=expires,
    )
    sealed = seal(key, Purpose.HEAD, run, head, expires=expires)
    return WeightUpdate(sealed, document, chunks, policy, digest(encode(head)))


class WeightFollower:
    """Follows the versions of one run: holds the newest that checked out."""

    def __init__(self, run: bytes, trainer: bytes) -> None:
        """`run` and `trainer` (its key's node_id) are 32 bytes each, as a ticket has them."""
        self._trusted = TrustedRun(run, trainer)
        self._replica = WeightReplica()

    @property
    def policy(self) -> Policy:
        """The version held; -1 and no tensors before the first."""
        return self._replica.policy

    def apply(self, head: bytes, manifest: bytes, chunks: Sequence[bytes], *, now: int) -> Policy:
        """Verify a version, and hold it. If a check fails the version before stays.

        Checked are signature, run, signer, time and order of the head, and the digests of the manifest, of
        every chunk and of every tensor that results.

        Raises:
            RemoteProtocolError: a document, or chunks that are not those of the manifest.
            Equivocation: the trainer signed two different versions of one number.
            WeightsError: the payload, its base, or a state whose digest is not the signed one.
        """
        admitted, _ = self._trusted.admit(head, now=now)
        described = self._trusted.check_manifest(admitted, manifest)
        given = [digest(chunk) for chunk in chunks]
        for artifact in described.artifacts:
            if [chunk.digest for chunk in artifact.chunks] == given:
                break
        else:
            raise RemoteProtocolError(Reason.WRONG_DIGEST, "the chunks are not of the manifest")
        policy = self._replica.commit(self._replica.prepare(described, artifact, chunks))
        self._trusted.commit(admitted)
        return policy
