"""Explain a proof that a trainer merged wrongly (`primerl-node explain FILE`). Works without a network."""

from pathlib import Path

import msgspec

from ...crypto.hashing import digest
from ...protocol.contributions import Contribution, WrongMerge
from ...protocol.envelope import Purpose, read_envelope, unseal
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import OuterStep, PolicyHead, PolicyManifest
from ..errors import BAD_FILE, UsageError, one_line, printable

MAX_PROOF = 64 << 20
"""Bytes of a proof with the manifest of a large model."""


class MergedRow(msgspec.Struct, frozen=True):
    """A contribution of the step."""

    node: str
    tokens: int
    weight: float
    bytes: int


class MergeProof(msgspec.Struct, frozen=True):
    """What a proof says; digests and ids are hex."""

    signer: str
    run: str
    epoch: int
    version: int
    before: str
    """Outer state that the step begins from; empty where the proof is of a published version."""
    signed: str
    """Outer state that the signer states."""
    computed: str
    """Outer state that the contributions make; empty where they cannot be merged at all."""
    why: str
    contributions: list[MergedRow]


def explain(path: Path) -> MergeProof:
    """Read a proof, after checking the signatures in it. Raises UsageError."""
    try:
        if path.stat().st_size > MAX_PROOF:
            raise UsageError(f"{path} is too large to be a proof")
        proof = msgspec.msgpack.decode(path.read_bytes(), type=WrongMerge)
        return _of_step(proof) if proof.step else _of_version(proof)
    except (*BAD_FILE, RemoteProtocolError) as error:
        raise UsageError(f"{path} proves nothing: {one_line(error)}") from error


def _of_step(proof: WrongMerge) -> MergeProof:
    run = read_envelope(proof.step).run
    opened = unseal(proof.step, Purpose.OUTER_STEP, OuterStep, now=0, run=run)
    step = opened.body
    rows: list[MergedRow] = []
    for part in step.contributions:
        given = unseal(part.sealed, Purpose.CONTRIBUTION, Contribution, now=0, run=run)
        size = given.body.artifact.size
        rows.append(MergedRow(given.signer.hex(), given.body.tokens, part.weight, size))
    return MergeProof(
        opened.signer.hex(),
        run.hex(),
        step.term,
        step.version,
        step.before.hex(),
        step.after.hex(),
        proof.computed.hex(),
        printable(proof.why),
        rows,
    )


def _of_version(proof: WrongMerge) -> MergeProof:
    run = read_envelope(proof.head).run
    opened = unseal(proof.head, Purpose.HEAD, PolicyHead, now=0, run=run)
    if digest(proof.manifest) != opened.body.manifest:
        raise RemoteProtocolError(Reason.WRONG_DIGEST, "the manifest is not the head's")
    manifest = msgspec.msgpack.decode(proof.manifest, type=PolicyManifest)
    signed = manifest.outer.after.hex() if isinstance(manifest.outer, OuterStep) else ""
    return MergeProof(
        opened.signer.hex(),
        run.hex(),
        opened.body.term,
        opened.body.version,
        "",
        signed,
        proof.computed.hex(),
        printable(proof.why),
        [],
    )
