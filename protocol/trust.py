"""Trust in a run: its manifest, and heads in order, by its leaders alone, with no rollback. Sans I/O.

Admitting and committing are two calls on purpose: a failed download may be tried again, a loaded version
cannot be rolled back.
"""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from ..crypto.hashing import NO_DIGEST, digest
from .envelope import Purpose, check_age, read_envelope, unseal
from .errors import Reason, RemoteProtocolError
from .leaders import Leaders
from .manifests import PolicyHead, PolicyManifest, RunManifest, run_id
from .session import decode
from .version import MAX_GOSSIP

REMEMBERED_HEADS = 4096


@dataclass(frozen=True)
class RunDocuments:
    """The sealed manifest of a run and its content."""

    run_id: bytes
    sealed: bytes
    manifest: RunManifest


def read_documents(sealed: bytes, run: bytes | None = None, *, now: int) -> RunDocuments:
    """Check a sealed run manifest, at `now` in Unix seconds: the trainer that it names has signed it.

    Raises RemoteProtocolError, also when it is not that of `run`.
    """
    opened = unseal(sealed, Purpose.RUN, RunManifest, now=now, run=run)
    name = run_id(opened.payload)
    # The run id is the digest of the manifest: an envelope that says otherwise is refused here.
    unseal(sealed, Purpose.RUN, RunManifest, now=0, run=name, signer=opened.body.trainer)
    return RunDocuments(name, sealed, opened.body)


def leaders_of(documents: RunDocuments, sealed: bytes = b"") -> Leaders:
    """Return the leaders of a run, by its root's sealed list if there is one. Raises RemoteProtocolError."""
    leaders = Leaders(documents.run_id, documents.manifest.trainer, documents.manifest.root)
    if sealed:
        leaders.admit(sealed)
    return leaders


class EquivocationProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two sealed heads of one (term, version) under one leader's signature: any node can check it."""

    first: Annotated[bytes, msgspec.Meta(max_length=MAX_GOSSIP)]
    second: Annotated[bytes, msgspec.Meta(max_length=MAX_GOSSIP)]


class Equivocation(RemoteProtocolError):
    """A leader signed two different heads of one version."""

    def __init__(self, proof: EquivocationProof, version: int) -> None:
        super().__init__(Reason.EQUIVOCATION, f"two heads of version {version}")
        self.proof = proof


@dataclass(frozen=True)
class AdmittedHead:
    """A head that checked out, with its digest and sealed form."""

    head: PolicyHead
    digest: bytes
    sealed: bytes
    signer: bytes = b""

    @property
    def order(self) -> tuple[int, int]:
        """Heads are ordered by epoch (`term` on the wire), then version."""
        return (self.head.term, self.head.version)


@dataclass
class TrustedRun:
    """The chain of heads that one client has admitted."""

    run: bytes
    trainer: bytes
    """The leader by whose ticket the run was joined; it is asked until a head has come."""
    committed: tuple[int, int] = (0, -1)
    """Highest (epoch, version) ever loaded; survives restarts, so an old head is never news again."""
    heads: dict[tuple[int, int], AdmittedHead] = field(
        default_factory=dict[tuple[int, int], AdmittedHead]
    )
    leaders: Leaders = None  # type: ignore[assignment]
    """By default the node by which the run was joined alone."""

    def __post_init__(self) -> None:
        self.leaders = self.leaders or Leaders(self.run, self.trainer)

    @property
    def leader(self) -> bytes:
        """The node that leads the run: the signer of the newest head."""
        newest = self.latest()
        return newest.signer if newest else self.trainer

    def trust(self, documents: RunDocuments, leaders: bytes = b"") -> None:
        """Believe the leaders of a run whose manifest is known, by its root's sealed list if there is one.

        Raises RemoteProtocolError.
        """
        if self.leaders.listed is None:
            self.leaders = leaders_of(documents)
        if leaders:
            self.admit_leaders(leaders)

    def admit_leaders(self, sealed: bytes) -> bool:
        """Take a newer list of leaders, and drop the heads of those that lead no more; return whether it was.

        Raises RemoteProtocolError.
        """
        if not self.leaders.admit(sealed):
            return False
        for order in [key for key, head in self.heads.items() if head.signer not in self.leaders]:
            del self.heads[order]
        return True

    def latest(self) -> AdmittedHead | None:
        """Return the newest admitted head."""
        return self.heads[max(self.heads)] if self.heads else None

    def admit(self, sealed: bytes, *, now: int) -> tuple[AdmittedHead, bool]:
        """Check a sealed head; the flag says whether it was news.

        Raises:
            Equivocation: it contradicts a known head.
            RemoteProtocolError: what unseal() raises; WRONG_CLOCK for one from the future; ROLLBACK when it
                belongs to an abandoned epoch; WRONG_BASE when it does not follow the head before it.
        """
        envelope = read_envelope(sealed, Purpose.HEAD)
        self.leaders.check(envelope.signer)
        opened = unseal(envelope, Purpose.HEAD, PolicyHead, now=now, run=self.run)
        self.leaders.check_epoch(opened.signer, opened.body.term)
        admitted = AdmittedHead(opened.body, digest(opened.payload), sealed, opened.signer)
        known = self.heads.get(admitted.order)
        if known is not None:
            if known.digest != admitted.digest:
                raise Equivocation(EquivocationProof(known.sealed, sealed), admitted.head.version)
            return known, False
        check_age("head", admitted.head.created, now)
        self._check_order(admitted)
        self._check_links(admitted)
        self.heads[admitted.order] = admitted
        while len(self.heads) > REMEMBERED_HEADS:
            del self.heads[min(self.heads)]
        return admitted, True

    def check_proof(self, proof: EquivocationProof) -> None:
        """Check an equivocation proof, from any peer.

        Raises:
            Equivocation: it is one.
            RemoteProtocolError: it is none: other signer, other run, or heads that do not contradict.
        """
        opened = [
            unseal(sealed, Purpose.HEAD, PolicyHead, now=0, run=self.run)
            for sealed in (proof.first, proof.second)
        ]
        first, second = opened
        self.leaders.check(first.signer)
        same = (first.signer, first.body.term, first.body.version) == (
            second.signer,
            second.body.term,
            second.body.version,
        )
        if not same or first.payload == second.payload:
            raise RemoteProtocolError(Reason.MALFORMED, "these two heads do not contradict")
        raise Equivocation(proof, first.body.version)

    def commit(self, admitted: AdmittedHead) -> None:
        """Take note that a version is loaded: from now on nothing older may be loaded.

        Raises:
            RemoteProtocolError: ROLLBACK.
        """
        if admitted.order < self.committed:
            raise RemoteProtocolError(Reason.ROLLBACK, f"{admitted.order} after {self.committed}")
        self.committed = admitted.order

    def check_manifest(self, admitted: AdmittedHead, document: bytes) -> PolicyManifest:
        """Decode the manifest that a head names. Raises RemoteProtocolError(WRONG_DIGEST, WRONG_RUN)."""
        if digest(document) != admitted.head.manifest:
            raise RemoteProtocolError(
                Reason.WRONG_DIGEST, "the manifest is not the one in the head"
            )
        manifest = decode(document, PolicyManifest)
        head = admitted.head
        if (manifest.run, manifest.version, manifest.state) != (self.run, head.version, head.state):
            raise RemoteProtocolError(Reason.WRONG_RUN, "the manifest is of another version")
        return manifest

    def _check_order(self, admitted: AdmittedHead) -> None:
        if len(self.heads) >= REMEMBERED_HEADS and admitted.order < min(self.heads):
            raise RemoteProtocolError(Reason.ROLLBACK, "older than all that is remembered")
        newest = max((epoch for epoch, _ in self.heads), default=self.committed[0])
        if admitted.head.term < max(newest, self.committed[0]):
            raise RemoteProtocolError(Reason.ROLLBACK, f"epoch {admitted.head.term} was left")

    def _check_links(self, admitted: AdmittedHead) -> None:
        epoch, version = admitted.order
        before = self.heads.get((epoch, version - 1))
        after = self.heads.get((epoch, version + 1))
        if before is not None and admitted.head.previous != before.digest:
            raise RemoteProtocolError(Reason.WRONG_BASE, f"version {version} does not follow ours")
        if after is not None and after.head.previous not in (admitted.digest, NO_DIGEST):
            raise RemoteProtocolError(
                Reason.WRONG_BASE, f"version {version} is not followed by ours"
            )
