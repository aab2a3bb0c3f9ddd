"""Everything said between nodes. One stream carries one request and its reply; a watch carries many.

protocol/version.py says how they may change.
"""

from typing import Annotated, Literal

import msgspec

from ..crypto.hashing import NO_DIGEST, Digest
from ..crypto.keys import NodeId
from .audits import MAX_CHOSEN, MAX_REPORT, Place
from .errors import Reason
from .leaders import MAX_LEADERS
from .manifests import (
    MAX_CONTRIBUTION,
    MAX_CONTRIBUTIONS,
    MAX_ENVIRONMENTS,
    ChunkRef,
    Count,
    Name,
    Role,
    UnixSeconds,
    Version,
)
from .numerics import MAX_CLASSES, NumericsClass
from .pipelines import MAX_STAGES, StageOffer
from .version import (
    KIB,
    MAX_GOSSIP,
    MAX_LEASE,
    MAX_NAME,
    MAX_SUBMISSION,
    WIRE_VERSION,
    WireRange,
)

MAX_SEALED = 64 * 1024
Sealed = Annotated[bytes, msgspec.Meta(max_length=MAX_SEALED)]
SealedLease = Annotated[bytes, msgspec.Meta(max_length=MAX_LEASE)]
SmallSealed = Annotated[bytes, msgspec.Meta(max_length=MAX_GOSSIP)]
Document = Annotated[bytes, msgspec.Meta(max_length=256 * 1024)]
MAX_HEADS = 64
MAX_RECORDS = 64
MAX_LEASES = 64
MAX_HELD = 4096
MAX_SHELF = 256
"""Policy versions that a validator may say it holds."""
MAX_BACKUP_CHUNKS = 2**15
"""Chunks of one file of a backup; a message holds about 20,000 in all."""
MAX_OUTER_STEP = MAX_CONTRIBUTIONS * (MAX_CONTRIBUTION + KIB)
MAX_PROBE = 512 * KIB
"""Bytes of a probe, one way."""
MAX_WATCHED = 4096
"""Chunks of one watch or one choice; a larger artifact is fetched a window at a time."""
Digests = Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=MAX_WATCHED)]
WireVersion = Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=2**32)]
Figure = Annotated[float, msgspec.Meta(ge=0, le=2**32)]
Bitmap = Annotated[bytes, msgspec.Meta(max_length=MAX_WATCHED // 8)]
"""Bit i % 8 of byte i // 8 stands for the i-th of the chunks that were asked about."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


class Hello(Message, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """First request of a worker to a trainer. Unknown fields are passed over."""

    wire_version: WireVersion
    """The newest that it speaks."""
    role: Role
    software: Name
    ticket: Sealed
    record: SmallSealed
    """The worker's sealed PeerRecord."""
    unix_time: UnixSeconds = 0
    """The worker's clock; 0: not stated."""
    oldest_wire_version: WireVersion = 0
    """The oldest that it speaks; 0: `wire_version` alone."""
    trial: bool = False
    """Whether to answer as to any node with this ticket, and admit nobody: the record may then be empty."""

    @property
    def spoken(self) -> WireRange:
        """Wire versions that the worker speaks."""
        return WireRange(self.oldest_wire_version or self.wire_version, self.wire_version)


class Welcome(Message, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """The worker is admitted, or a trial hello would be. Unknown fields are passed over."""

    manifest: Sealed
    """The sealed RunManifest."""
    software: Name
    wire_version: WireVersion = 1
    """The newest that both speak. Version 1 for a trainer that does not state it."""
    unix_time: UnixSeconds = 0
    """The trainer's clock; 0: not stated."""
    seen_from: Name = ""
    """Address and port from which a trial hello came; empty in other replies, and over a relay."""
    leaders: SmallSealed = b""
    """The root's sealed LeaderList, without which a node that was begun elsewhere does not lead; or empty."""
    workers: Count | msgspec.UnsetType = msgspec.UNSET
    """Workers whose work came back within a lease's time. This and what follows is in replies to a trial hello;
    it is shown, never believed. Unset: not stated."""
    rollouts_per_hour: Figure = 0.0
    """Of one worker: the median of theirs."""
    tokens_per_rollout: Figure = 0.0
    """Sampled tokens of the newest accepted rollouts, mean; 0: not known."""


class WatchHeads(Message, frozen=True):
    """Send me heads newer than this, now and as they come. Any node answers."""

    term: Version
    after: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]


class HeadNotice(Message, frozen=True):
    """A sealed head, with its manifest where that is small enough (else fetch it as a chunk)."""

    head: SmallSealed
    manifest: Document = b""
    leaders: SmallSealed | msgspec.UnsetType = msgspec.UNSET
    """The root's sealed LeaderList; unset where the run has none, and in replies that have it elsewhere."""


Outcome = Literal["finished", "failed", "stopped"]
"""How a trainer ends: with the last step; because the run cannot go on; or for now, and it may be resumed."""


class RunEnded(Message, frozen=True):
    """Heads and leases from me have ended; for a run that was stopped, perhaps only for now."""

    detail: Name = ""
    outcome: Outcome = "finished"


class GetHeads(Message, frozen=True):
    """The heads that a plan from `after` to the newest version may need, oldest first."""

    after: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]


class Heads(Message, frozen=True):
    """At most MAX_HEADS of them; ask again from the last one."""

    notices: Annotated[tuple[HeadNotice, ...], msgspec.Meta(max_length=MAX_HEADS)]


class WorkerStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Statistics that a worker reports; shown, never believed."""

    version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
    working_s: Seconds = 0.0
    """Seconds since it held its first policy version."""
    generating_s: Seconds = 0.0
    """Seconds of these in which it rolled out at least one lease."""
    chunk_bytes: Annotated[dict[Name, Count], msgspec.Meta(max_length=64)] = {}
    """Chunk bytes fetched so far, by source."""


class LeaseRequest(Message, frozen=True, omit_defaults=True):
    """I have room for `wanted` leases."""

    wanted: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEASES)]
    stats: WorkerStats
    holding: Annotated[tuple[Version, ...], msgspec.Meta(max_length=MAX_HELD)] | None = None
    """Leases that I work on or have not delivered yet: any other was lost on its way to me."""
    numerics: NumericsClass | None = None
    """How I compute, as my submissions will say, signed."""
    environments: (
        Annotated[
            tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_ENVIRONMENTS)], ...],
            msgspec.Meta(min_length=1, max_length=MAX_ENVIRONMENTS),
        ]
        | None
    ) = None
    """Places in RunManifest.environments of those that I can play; None: all."""
    paused: Name = ""
    """Why my owner wants me to work on nothing for now; empty while I work."""


class LeaseReply(Message, frozen=True, omit_defaults=True):
    """Leases (may be none: come again), verdicts since the last request, and other nodes that hold weights."""

    leases: Annotated[tuple[SealedLease, ...], msgspec.Meta(max_length=MAX_LEASES)]
    verdicts: Annotated[tuple[Sealed, ...], msgspec.Meta(max_length=MAX_LEASES)]
    upstreams: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_RECORDS)]
    """Sealed PeerRecords to fetch chunks from, best first; the trainer itself is always the last resort."""
    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)]
    downstreams: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()
    """Peers as in upstreams, but admitted later: where there are too few chunks to share out, we get them
    first."""
    why: Name = ""
    """Why there are no leases, for the worker's operator."""
    successors: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_LEADERS)] = ()
    """Sealed PeerRecords of nodes that may lead after us: watch their heads, too."""


class SubmitOffer(Message, frozen=True):
    """I have a submission of this digest and size; the raw bytes follow once you say from where."""

    digest: Digest
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_SUBMISSION)]
    lease_id: Version


class SubmitFrom(Message, frozen=True):
    """Send the bytes from this offset on."""

    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_SUBMISSION)]


class Submitted(Message, frozen=True):
    """The sealed Receipt."""

    receipt: Sealed


class GetVerdicts(Message, frozen=True):
    """The verdicts on my submissions after that number; answered also where I am leased nothing any more."""

    after: Version


class Verdicts(Message, frozen=True):
    """Sealed Verdicts, oldest first; there may be more after number `next`, until there is none."""

    verdicts: Annotated[tuple[Sealed, ...], msgspec.Meta(max_length=MAX_LEASES)]
    next: Version


class GetBounds(Message, frozen=True):
    """The bounds of noise that this run has measured, for each class of workers."""


class MeasuredBounds(Message, frozen=True):
    """Sealed ClassBounds, the newest of each class."""

    bounds: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_CLASSES)]


class AuditRequest(Message, frozen=True):
    """A validator has time: I hold these versions of that epoch."""

    term: Version
    versions: Annotated[tuple[Version, ...], msgspec.Meta(max_length=MAX_SHELF)]
    stats: WorkerStats


class AuditWait(Message, frozen=True):
    """Nothing to audit right now."""

    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)]


class OtherPolicies(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Versions that a worker might have used in place of the claimed one."""

    claimed: Version
    others: Annotated[tuple[Version, ...], msgspec.Meta(max_length=16)]


class AuditJob(Message, frozen=True):
    """Measure these rollouts of a submission; its `size` bytes, as the worker sealed them, follow."""

    job: Version
    node: NodeId
    """The worker that made it."""
    submission: Digest
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_SUBMISSION)]
    challenge: Digest
    """Drawn after the receipt; it decided which rollouts are audited."""
    chosen: Annotated[tuple[Place, ...], msgspec.Meta(min_length=1, max_length=MAX_CHOSEN)]
    versions: Annotated[tuple[Version, ...], msgspec.Meta(min_length=1, max_length=MAX_SHELF)]
    """Every version that is needed."""
    others: Annotated[tuple[OtherPolicies, ...], msgspec.Meta(max_length=MAX_SHELF)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """Time for the answer, from now on."""


class AuditDone(Message, frozen=True):
    """The sealed AuditReport."""

    report: Annotated[bytes, msgspec.Meta(max_length=MAX_REPORT)]


class GetBackup(Message, frozen=True):
    """A standby asks for the newest backup of the run, unless it is the one that it has."""

    known: Digest
    """Digest of that one, as encoded; zeros for none."""


class BackupWait(Message, frozen=True, omit_defaults=True):
    """There is no newer backup yet."""

    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)]
    lead: bool = False
    """There will be none: the run is handed over, go on with it at once."""


class BackupFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file of a backup: the bytes of its chunks, one after the other."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    """Below the run's directory; the receiver checks that a run has such a file."""
    chunks: Annotated[tuple[ChunkRef, ...], msgspec.Meta(max_length=MAX_BACKUP_CHUNKS)]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(chunk.size for chunk in self.chunks)


class Backup(Message, frozen=True):
    """All that a trainer needs to go on after `step` on another disk, its key apart."""

    step: Version
    files: Annotated[tuple[BackupFile, ...], msgspec.Meta(min_length=1, max_length=4096)]
    chunks: Annotated[tuple[ChunkRef, ...], msgspec.Meta(max_length=MAX_BACKUP_CHUNKS)]
    """Of published versions and of the model: they are in the trainer's store."""


class GetAssignment(Message, frozen=True):
    """A learner that has this outer state asks what to do next. The answer may take ASSIGNMENT_WAIT_S."""

    version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
    """-1: it has none."""
    outer: Digest


ASSIGNMENT_WAIT_S = 10.0


class AssignmentWait(Message, frozen=True, omit_defaults=True):
    """There is nothing to train on yet: ask again."""

    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)]
    why: Name = ""


class Assigned(Message, frozen=True):
    """Train on this."""

    assignment: Annotated[bytes, msgspec.Meta(max_length=MAX_SEALED)]
    """The sealed Assignment."""


class Stepped(Message, frozen=True, omit_defaults=True):
    """The outer state that you have has a successor: make the same step."""

    step: Annotated[bytes, msgspec.Meta(max_length=MAX_OUTER_STEP)]
    """The sealed OuterStep."""
    why: Name = ""
    """Why your own contribution is not in it, if you sent one."""


class FetchOuter(Message, frozen=True):
    """Your outer state leads nowhere: take this one, and these settings."""

    term: Version
    table: ChunkRef
    """An encoded PolicyManifest of the outer state, whose one artifact is a snapshot."""
    settings: Annotated[bytes, msgspec.Meta(max_length=MAX_SEALED)]
    """LearnerSettings as JSON (node/training/rounds.py)."""


class Contribute(Message, frozen=True):
    """I have trained on my assignment; fetch the chunks from me."""

    contribution: Annotated[bytes, msgspec.Meta(max_length=MAX_CONTRIBUTION)]
    """The sealed Contribution."""


class OfferStage(Message, frozen=True):
    """I have memory for some layers; or, with a plan that I am in, I tell that it does not work."""

    offer: StageOffer
    group: Digest = NO_DIGEST
    """Group of the plan that I am in; zeros for none."""
    generation: Version = 0
    lost: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    """Stages of it that I cannot reach, or that stall."""


class StageWait(Message, frozen=True):
    """No plan yet. Measure the way to these, and offer again."""

    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)]
    others: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()
    """Sealed PeerRecords of the other nodes that offer."""


class StagePlanned(Message, frozen=True):
    """You are in this plan."""

    plan: Sealed
    """The sealed PipelinePlan."""
    records: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_RECORDS)]
    """Sealed PeerRecords of the other stages."""
    retry_after_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 10_000
    """Offer again then, with this plan's group and generation, to hear of a newer one."""


class OpenLine(Message, frozen=True):
    """First on a stream of ALPN_PIPELINE: frames of that plan follow, from me to you, once you accept."""

    plan: Sealed
    epoch: Version
    """Rises with each line between us two; an older one is closed for it."""


class PrepareVersion(Message, frozen=True):
    """Stage 0 to the others: get your part of this policy version ready, and tell me when it is."""

    group: Digest
    generation: Version
    term: Version
    version: Version


class Prepared(Message, frozen=True):
    """Ready; it takes effect where the switch comes by between two micro-batches."""

    version: Version


class Probe(Message, frozen=True):
    """Answer with a Probe that has `answer` bytes: to measure the way between two that may share a model."""

    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PROBE)] = b""
    answer: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROBE)] = 0


class SyncRecords(Message, frozen=True, omit_defaults=True):
    """Anti-entropy of peer records: these are mine, tell me yours."""

    records: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_RECORDS)]
    version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] = -1
    """Policy version that I have loaded, for a node that asks for no lease; -1: none, or not stated."""
    successors: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=MAX_LEADERS)] = ()
    """As those of a LeaseReply."""


LEAVING = "leaving"


class Goodbye(Message, frozen=True):
    """I leave; lease my work to other workers."""

    detail: Name = LEAVING
    """LEAVING, or the error that ended this node."""


class RetireKey(Message, frozen=True):
    """This key is retired; anybody may hand that on."""

    retirement: SmallSealed


class Accepted(Message, frozen=True):
    """Plain yes."""


class GetChunk(Message, frozen=True):
    """Send me this chunk; wait up to `wait_ms` for it if you are fetching it yourself.

    The asker ends its direction of the stream when it has all of the chunk, or wants no more.
    """

    digest: Digest
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0


class GetAnyChunk(Message, frozen=True):
    """Send me the one of these chunks that helps the swarm most: the one that you sent least often.

    A trainer refuses with NOT_YET a chunk that it has just sent to others, which will pass it on, unless
    `urgent`.
    """

    wanted: Digests
    urgent: bool = False
    """No peer that I know passes them on."""


class ChunkFollows(Message, frozen=True, omit_defaults=True):
    """`size` raw bytes follow this frame: chunk number `index` of those that were wanted."""

    size: Annotated[int, msgspec.Meta(ge=0, le=2**26)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WATCHED)] = 0


class InLine(Message, frozen=True):
    """Wait for your chunk; repeated until it is your turn, so that silence means that the node is gone."""


class WatchChunks(Message, frozen=True):
    """Tell me which of these chunks you hold, now and each time you get another."""

    chunks: Digests


class HaveChunks(Message, frozen=True):
    """The chunks of a watch that are held by now. The stream ends when all are, or when no more will come."""

    held: Bitmap


class Refusal(Message, frozen=True, forbid_unknown_fields=False):
    """No, and why. Unknown fields are passed over."""

    reason: Reason
    detail: Name = ""


class Beginning(msgspec.Struct, frozen=True):
    """The common fields of a Hello, a Welcome and a Refusal of every wire version, read where the whole does
    not decode: a later version may have other roles and reasons.
    """

    type: str = ""
    software: str = "?"
    wire_version: WireVersion = WIRE_VERSION
    oldest_wire_version: WireVersion = 0
    reason: str = ""
    detail: str = ""

    @property
    def spoken(self) -> WireRange:
        """Wire versions that the sender of a Hello speaks, or the one that a Welcome names."""
        return WireRange(self.oldest_wire_version or self.wire_version, self.wire_version)


ControlRequest = (
    Hello
    | WatchHeads
    | GetHeads
    | LeaseRequest
    | SubmitOffer
    | GetVerdicts
    | AuditRequest
    | AuditDone
    | SyncRecords
    | Goodbye
    | OfferStage
    | GetBounds
    | RetireKey
    | GetBackup
    | GetAssignment
    | Contribute
)
"""Requests that may open a stream on ALPN_CONTROL."""
PipelineRequest = OpenLine | PrepareVersion | Probe
"""Requests that may open a stream on ALPN_PIPELINE."""
BlobRequest = GetChunk | GetAnyChunk | WatchChunks
"""Requests that may open a stream on ALPN_BLOBS."""
