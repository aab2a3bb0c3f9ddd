"""What a trainer gives its learners to train on, and what they give back. Sans I/O.

Invariants: an assignment is for one learner, one version and one outer state, and a contribution is for one
assignment: whatever is given twice, late, or for the data of another is refused; a step's weights are never
above the contributions' shares of its tokens.
"""

from typing import Annotated

import msgspec

from ..crypto.hashing import Digest, digest
from ..crypto.keys import NodeId
from .envelope import Purpose, unseal
from .errors import Reason, RemoteProtocolError
from .leaders import Leaders
from .manifests import (
    MAX_CONTRIBUTIONS,
    Artifact,
    ChunkRef,
    Count,
    LearnersContract,
    OuterStep,
    Version,
)

MAX_DATA = 1 << 30
"""Bytes of the samples of one assignment."""
MAX_DATA_CHUNKS = 1024
ROUNDING = 1e-9
"""By how much a weight may be above its share of the tokens."""


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples that one learner trains on, from one version; sealed by the leader."""

    term: Version
    version: Version
    """The version to begin from."""
    outer: Digest
    """Digest of its outer state."""
    learner: NodeId
    first_step: Version
    """Number of the first inner step, which places it in the schedule of the learning rate."""
    inner_steps: Annotated[int, msgspec.Meta(ge=1, le=64)]
    tokens: Count
    """Trained tokens of the samples."""
    data: Annotated[tuple[ChunkRef, ...], msgspec.Meta(min_length=1, max_length=MAX_DATA_CHUNKS)]
    """Chunks of the samples, which one list of samples for each inner step make."""


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a learner learned from an assignment; sealed by the learner."""

    assignment: Digest
    """Digest of the sealed assignment."""
    term: Version
    version: Version
    outer: Digest
    tokens: Count
    """Trained tokens, at most those of the assignment."""
    artifact: Artifact
    """Delta from the masters of the version to the learner's, where bf16 shows a difference."""


class OpenedContribution(msgspec.Struct, frozen=True):
    """A contribution that its signature and its place in a step allow."""

    node: bytes
    sealed: bytes
    body: Contribution


class WrongMerge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Proof that a leader signed an outer state that does not follow from the contributions that it names.

    Anybody who has the state before, or makes it from the run's first version, can compute this again.
    """

    step: bytes
    """The sealed OuterStep; empty where it contradicts a published version."""
    computed: bytes
    """Digest of the outer state that does follow."""
    why: str
    head: bytes = b""
    """Sealed head of the published version that says otherwise."""
    manifest: bytes = b""


def open_assignment(sealed: bytes, run: bytes, learner: bytes, leaders: Leaders) -> Assignment:
    """Read an assignment for `learner` by a leader of the run. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.ASSIGNMENT, Assignment, now=0, run=run)
    leaders.check(opened.signer)
    if opened.body.learner != learner:
        raise RemoteProtocolError(Reason.WRONG_RECIPIENT, "an assignment of another learner")
    size = sum(chunk.size for chunk in opened.body.data)
    if size > MAX_DATA:
        raise RemoteProtocolError(Reason.TOO_LARGE, f"samples of {size} B, at most {MAX_DATA}")
    return opened.body


def open_outer_step(sealed: bytes, run: bytes, leaders: Leaders) -> OuterStep:
    """Read an outer step that a leader of the run signed. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.OUTER_STEP, OuterStep, now=0, run=run)
    leaders.check(opened.signer)
    return opened.body


def open_contribution(
    sealed: bytes, run: bytes, learners: LearnersContract, leaders: Leaders
) -> OpenedContribution:
    """Read a contribution of a learner of the run, or of a leader. Raises RemoteProtocolError."""
    opened = unseal(sealed, Purpose.CONTRIBUTION, Contribution, now=0, run=run)
    if opened.signer not in learners.nodes:
        leaders.check(opened.signer)
    return OpenedContribution(opened.signer, sealed, opened.body)


def check_answers(
    contribution: OpenedContribution, sealed_assignment: bytes, assignment: Assignment
) -> None:
    """Raise RemoteProtocolError unless a contribution is of its signer's own assignment.

    Reasons: WRONG_TASK for other samples than were assigned, STALE for another version, MALFORMED.
    """
    body = contribution.body
    if (body.term, body.version, body.outer) != (
        assignment.term,
        assignment.version,
        assignment.outer,
    ):
        raise RemoteProtocolError(
            Reason.STALE,
            f"a contribution to version {body.version} of epoch {body.term}, and {assignment.version} of "
            f"{assignment.term} is trained on",
        )
    if contribution.node != assignment.learner or body.assignment != digest(sealed_assignment):
        raise RemoteProtocolError(Reason.WRONG_TASK, "other samples than this learner was given")
    artifact = body.artifact
    if (artifact.kind, artifact.base_state) != ("delta", assignment.outer):
        raise RemoteProtocolError(Reason.WRONG_BASE, "a contribution from another state")
    if body.tokens > assignment.tokens:
        raise RemoteProtocolError(
            Reason.MALFORMED,
            f"{body.tokens} tokens, and {assignment.tokens} were assigned",
        )
    if artifact.size != sum(chunk.size for chunk in artifact.chunks):
        raise RemoteProtocolError(Reason.MALFORMED, "a contribution's size is not its chunks'")


def open_contributions(
    step: OuterStep, run: bytes, learners: LearnersContract, leaders: Leaders
) -> list[OpenedContribution]:
    """Read the contributions of an outer step, in its order.

    Raises RemoteProtocolError where a signature, their number, a base or a weight is not as an honest leader's:
    WRONG_MERGE where the step alone proves that its leader merged what it must not.
    """
    if len(step.contributions) > MAX_CONTRIBUTIONS:
        raise RemoteProtocolError(Reason.TOO_LARGE, "more contributions than learners")
    opened = [open_contribution(part.sealed, run, learners, leaders) for part in step.contributions]
    if len({part.node for part in opened}) < len(opened):
        raise RemoteProtocolError(Reason.WRONG_MERGE, "a learner is merged twice")
    stale = [
        part
        for part in opened
        if (part.body.term, part.body.version + 1, part.body.outer)
        != (step.term, step.version, step.before)
    ]
    if stale:
        raise RemoteProtocolError(Reason.WRONG_MERGE, "a contribution to another version is merged")
    total = sum(part.body.tokens for part in opened)
    for merged, part in zip(step.contributions, opened, strict=True):
        if merged.weight > share_of(part.body.tokens, total) * (1 + ROUNDING):
            raise RemoteProtocolError(
                Reason.WRONG_MERGE, "a contribution has more weight than its tokens give it"
            )
    return opened


def share_of(tokens: int, total: int) -> float:
    """Return the weight of a contribution that is not clipped."""
    return tokens / total if total else 0.0
