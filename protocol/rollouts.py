"""Rollouts as they travel: tokens, mask and logprobs packed as little-endian arrays, and the verdicts on them.

A submission is one sealed bundle of the groups of one lease. Rewards in it are claims.
"""

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from ..crypto.hashing import Digest
from ..crypto.keys import NodeId
from .errors import LocalProtocolError, Reason, RemoteProtocolError
from .manifests import Count, Name, UnixSeconds, Version
from .numerics import ClassBounds, NumericsClass
from .pipelines import MAX_STAGES
from .version import MAX_LEASE

MAX_BRANCHES = 64
"""Branches of a rollout."""
MAX_BRANCH_TOKENS = 2**20
MAX_REJECTIONS = 128
MAX_EVIDENCE = 256
MAX_SPANS = 64
MAX_BLAMED = 48
MAX_ROUTES = 64 * 2**20
"""Bytes of a branch's routes: 48 layers with 8 experts a token take 384 bytes a sampled token."""
FINGERPRINT_NUMBERS = 7
"""Projections of the hidden state that the proof of a token holds, beside its scale."""
MEANS = 2 + FINGERPRINT_NUMBERS
"""Numbers of Evidence.means."""
Mean = Annotated[float, msgspec.Meta(ge=-1000, le=1000)]
MAX_SUPPORT = 255
"""Most tokens of a sampling support that is stated."""
MAX_SUPPORTS = 64 * 2**20
"""Bytes of a branch's supports: at most 1 + 4 (MAX_SUPPORT - 1) a sampled token, some 30 in the mean."""
MAX_DETAIL = 200
"""Bytes of evidence per rejection; a verdict of MAX_REJECTIONS stays below 64 KiB."""

Index = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Packed = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_BRANCH_TOKENS)]


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From sampled token `start` on (counted among the sampled ones), `version` drew."""

    start: Annotated[int, msgspec.Meta(ge=0, le=MAX_BRANCH_TOKENS)]
    version: Version


class BranchRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One training sequence of T tokens, S of them sampled."""

    tokens: Packed
    """T x u32."""
    sampled: Packed
    """T bytes: 1 where the model drew the token, else 0."""
    logprobs: Packed
    """S x f32, of the sampled tokens in order."""
    policy_first: Version
    policy_last: Version
    finish: Literal["stop", "length"]
    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=MAX_SPANS)] = ()
    """Changes of the policy while the branch was drawn; empty if one version drew it all."""
    proof: Packed = b""
    """The fingerprints of the replies, one after the other; sizes follow from the replies' lengths."""
    routes: Annotated[bytes, msgspec.Meta(max_length=MAX_ROUTES)] = b""
    """S routes (manifests.RouteShape): of each sampled token the experts that read the token before it, and so
    led to it. [layer][k] u8, u16 little-endian from 257 experts on. Empty: the trainer's own choice counts."""
    support: Annotated[bytes, msgspec.Meta(max_length=MAX_SUPPORTS)] = b""
    """Sampling support of each sampled token: the tokens that top_p and top_k left to draw from. First S x u8,
    how many others than the drawn one there are (MAX_SUPPORT: too many, not stated); then the others of each
    token that states them, ascending, u32. `logprobs` are over the stated support, else over all tokens. Empty
    where nothing is truncated, and from pipelines."""


WITHDRAWN = "withdrawn: "
"""Begins the `error` of a rollout that its worker withdrew as drawn out of order; see Reason.WITHDRAWN."""


class RolloutRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rollout of a task; `error` says why there are no branches."""

    branches: Annotated[tuple[BranchRecord, ...], msgspec.Meta(max_length=MAX_BRANCHES)]
    reward: float
    error: Annotated[str, msgspec.Meta(max_length=512)]


class GroupRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All rollouts of one task of a lease, in index order: a missing index is a failed index."""

    task_index: Version
    task_digest: Digest
    rollouts: Annotated[tuple[RolloutRecord, ...], msgspec.Meta(max_length=4096)]


class Crossed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Fingerprints that the stages of a pipeline state of the states that they sent for a branch."""

    group: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    rollout: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    branch: Annotated[int, msgspec.Meta(ge=0, le=64)]
    boundaries: Annotated[tuple[Packed, ...], msgspec.Meta(max_length=MAX_STAGES - 1)]
    """Boundary fingerprints of each stage but the last, one of each sampled token in order."""


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that one lease produced. Defaults are left out."""

    lease: Annotated[bytes, msgspec.Meta(max_length=MAX_LEASE)]
    """The sealed lease: a trainer that lost its memory still recognises its own signature."""
    groups: Annotated[tuple[GroupRecord, ...], msgspec.Meta(max_length=4096)]
    engine: Name
    plan: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)] = b""
    """The sealed pipeline plan that `crossed` was made under; empty if one node computed all."""
    crossed: Annotated[tuple[Crossed, ...], msgspec.Meta(max_length=2**16)] = ()
    """Boundaries of the branches that were drawn under it alone, in order; others may be missing."""
    numerics: NumericsClass | None = None
    """How the worker says that it computes; None where it does not."""


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer holds these bytes durably; it says nothing yet of their worth."""

    submission: Digest
    lease_id: Version
    received: UnixSeconds


class Rejection(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Reason why one rollout was not accepted, with the evidence in words."""

    group: Index
    rollout: Index
    reason: Reason
    detail: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL)]


class Evidence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The measurements of one audited rollout: the worker's claims against a prefill by the validator.

    Nats are of log-probability; the manifest's Thresholds have the same names. Measures may be infinite, for
    what cannot be compared at all.
    """

    group: Index
    rollout: Index
    tokens: Count
    """Sampled tokens that were audited."""
    fingerprint: float
    """Distance of the proof from the validator's own hidden states, relative, 0 is equal; root mean square over
    64 tokens at least."""
    sampling: float
    """Mean per token of the margin, clipped at 1 nat: how much better than the claimed token the best one
    scores under the seeded noise; 0 where the claimed token is the one to draw."""
    sampling_max: float
    """The largest margin, nats."""
    logprob: float
    """Mean absolute difference of claimed and recomputed logprobs, nats."""
    logprob_max: float
    """The largest of these differences, nats."""
    other_policy: float
    """How much likelier another policy version than the claimed one makes the proof, nats; below 0 is less."""
    routing: float = 0.0
    """Share of the experts of its routes that the validator's own router does not choose; over 64 tokens at
    least."""
    routing_max: float = 0.0
    """The largest margin by which one of these misses the validator's choice, in the router's scores (logits,
    or scores with a bias)."""
    means: Annotated[tuple[Mean, ...], msgspec.Meta(max_length=MEANS)] = ()
    """Signed means over the tokens, which honest noise leaves near 0 over many rollouts: of claimed less
    recomputed logprobs, nats; the slope of these over the logprob; the relative differences of the seven
    numbers of the proof. Empty where one is not finite."""


MEASURES: tuple[str, ...] = Evidence.__struct_fields__[3:-1]
"""Names of the measures that have bounds: Thresholds has the same."""


class Blamed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One audited rollout of a pipeline that is not clean, and the stages that may be at fault."""

    group: Index
    rollout: Index
    distances: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_STAGES - 1)]
    """Distances of the states that each stage but the last says it sent, like Evidence.fingerprint."""
    stages: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)], ...],
        msgspec.Meta(max_length=MAX_STAGES),
    ]
    """One of these stages computed something else than it should have; none: it cannot be told."""


class PipelineVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of audits about the stages that made a submission."""

    group: Digest
    generation: Version
    stages: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MAX_STAGES)]
    blamed: Annotated[tuple[Blamed, ...], msgspec.Meta(max_length=MAX_BLAMED)] = ()
    """The first of them."""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer's decision on a submission."""

    submission: Digest
    lease_id: Version
    accepted: Count
    rejections: Annotated[tuple[Rejection, ...], msgspec.Meta(max_length=MAX_REJECTIONS)]
    """The first of them, so that a verdict always fits a message."""
    audited: Count
    """Rollouts that were audited."""
    rejected: Count = 0
    """How many there are in all."""
    challenge: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """Randomness drawn after the upload, which decided the audited rollouts."""
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the rollouts that was to be audited; once one of them is guilty, all are."""
    evidence: Annotated[tuple[Evidence, ...], msgspec.Meta(max_length=MAX_EVIDENCE)] = ()
    """Evidence of the first audited rollouts."""
    validator: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """The validator that audited, if it was not the trainer."""
    pipeline: PipelineVerdict | msgspec.UnsetType = msgspec.UNSET
    """Pipeline verdict of a submission that states its boundaries; else it is left out."""
    bounds: ClassBounds | msgspec.UnsetType = msgspec.UNSET
    """The bounds of noise that judged, in a run that measures them; else the manifest's did."""


def clipped(detail: str) -> str:
    """Cut a detail by bytes to fit a Rejection: a verdict of MAX_REJECTIONS must fit a message."""
    return detail.encode()[:MAX_DETAIL].decode(errors="ignore")


def pack_u32(values: list[int]) -> bytes:
    """Pack token ids as little-endian u32."""
    return _little(array("I", values))


def pack_f32(values: list[float]) -> bytes:
    """Pack log-probabilities as little-endian f32. Raises LocalProtocolError for NaN and infinities."""
    packed = array("f", values)
    # Checked after the narrowing: a finite f64 may be infinite as f32.
    if not all(math.isfinite(value) for value in packed):
        raise LocalProtocolError("a logprob is not finite")
    return _little(packed)


def unpack_u32(data: bytes) -> list[int]:
    """Unpack token ids. Raises RemoteProtocolError(MALFORMED)."""
    values: array[int] = array("I")
    return _fill(values, data).tolist()


def unpack_f32(data: bytes) -> list[float]:
    """Unpack log-probabilities. Raises RemoteProtocolError(MALFORMED), also for NaN and infinities."""
    filled: array[float] = array("f")
    values = _fill(filled, data).tolist()
    if not all(map(math.isfinite, values)):
        raise RemoteProtocolError(Reason.MALFORMED, "a logprob is not finite")
    return values


A = TypeVar("A", "array[int]", "array[float]")


def _little(values: A) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _fill(values: A, data: bytes) -> A:
    if len(data) % values.itemsize:
        raise RemoteProtocolError(Reason.MALFORMED, "an array is cut short")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def cut_support(data: bytes, tokens: int, first: int) -> bytes:
    """Return the supports of the `first` of so many tokens, as BranchRecord.support; nothing of nothing."""
    others = sum(count for count in data[:first] if count < MAX_SUPPORT)
    return data[:first] + data[tokens : tokens + 4 * others]


def join_support(parts: Sequence[tuple[bytes, int]]) -> bytes:
    """Join the supports of several replies, (supports, tokens) each; empty if a reply has none."""
    if not all(data for data, _ in parts):
        return b""
    heads = (data[:tokens] for data, tokens in parts)
    return b"".join((*heads, *(data[tokens:] for data, tokens in parts)))
