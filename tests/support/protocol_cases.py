"""Fixed keys, times and documents for the tests of protocol/ and the golden vectors.

Everything here is a constant: changing one changes tests/vectors/wire_N.json, which peers depend on.
"""

from typing import Any

import pytest
from msgspec import Struct, structs

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.crypto.keys import SecretKey, peer_id_text
from primerl.protocol import audits, manifests, rollouts
from primerl.protocol import messages as m
from primerl.protocol.contributions import Assignment, Contribution
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.leaders import REMOVED, LeaderList, Leaders
from primerl.protocol.leases import Lease, TaskRef, prompt_digest
from primerl.protocol.manifests import LearnersContract, OuterStep, WeighedContribution
from primerl.protocol.numerics import ClassBounds, NumericsClass
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage, StageOffer
from primerl.protocol.retirement import Retirement, Succession, retire
from primerl.protocol.trust import EquivocationProof

NOW = 1_800_000_000
TRAINER = SecretKey.from_seed(bytes([1]) * 32)
WORKER = SecretKey.from_seed(bytes([2]) * 32)
STRANGER = SecretKey.from_seed(bytes([3]) * 32)

CHUNK = manifests.ChunkRef(digest(b"chunk"), 5)

PROOFS = manifests.ProofContract(
    fingerprint="projection",
    dtype="bfloat16",
    reject=manifests.Thresholds(0.1, 0.05, 1.0, 0.06, 1.5, 12.0),
    suspect=manifests.Thresholds(0.05, 0.02, 0.5, 0.03, 0.75, 5.0),
    other_scale=0.5,
    audit_rate=0.25,
    false_bans=0.001,
    honest_rollouts=20000,
    honest_tokens=1280000,
    source="hf against vllm",
)

MANIFEST = manifests.RunManifest(
    name="demo",
    created=NOW,
    software="0.1.0",
    trainer=TRAINER.node_id,
    model=manifests.ModelContract(
        name="tiny",
        files=(manifests.FileRef("config.json", CHUNK), manifests.FileRef("tokenizer.json", CHUNK)),
        base_state=digest(b"base state"),
        vocab_size=512,
        stop_token_ids=(1, 2),
    ),
    environments=(
        manifests.EnvironmentContract(
            name="sums",
            id="arithmetic",
            config=b'{"digits":1}',
            seed=7,
            version="verifiers 0.4.0",
            group_size=8,
            max_turns=1,
            sampling=manifests.SamplingContract(1.0, 64),
        ),
    ),
    limits=manifests.RunLimits(max_off_policy_steps=2, max_model_len=256),
    proofs=PROOFS,
    max_steps=40,
    nonce=digest(b"nonce"),
)
RUN = manifests.run_id(manifests.encode(MANIFEST))
MIXED = structs.replace(
    MANIFEST,
    environments=(
        *MANIFEST.environments,
        manifests.EnvironmentContract(
            name="words",
            id="word-game",
            config=b"{}",
            seed=7,
            version="verifiers 0.4.0",
            group_size=4,
            max_turns=6,
            sampling=manifests.SamplingContract(1.0, 16),
            package="words 1.2",
            package_digest=digest(b"words"),
            rewards="sampled",
        ),
    ),
)
"""A run with several environments."""


def played_otherwise(run: manifests.RunManifest, **changes: Any) -> manifests.RunManifest:
    """Replace fields of a run's first environment, or of its sampling."""
    first, *others = run.environments
    names = manifests.SamplingContract.__struct_fields__
    drawn = {name: changes.pop(name) for name in names if name in changes}
    sampling = structs.replace(first.sampling, **drawn)
    one = structs.replace(first, **{"sampling": sampling, **changes})
    return structs.replace(run, environments=(one, *others))


NARROWED = played_otherwise(MANIFEST, top_p=0.9, top_k=40, stop=("</answer>", "\n\n"))
"""A run that draws from its likeliest tokens only, and ends replies by strings."""
ADAPTED = structs.replace(
    MANIFEST,
    adapters=manifests.AdapterContract(
        rank=16, alpha=32.0, target_modules=("q_proj", "o_proj"), base=CHUNK
    ),
    routes=manifests.RouteShape(layers=1, experts=300, top_k=2),
)
"""A run that trains adapters, and replays routes."""
OTHER_RUN = digest(b"another run")

POLICY_MANIFEST = manifests.PolicyManifest(
    run=RUN,
    version=0,
    state=digest(b"state 0"),
    tensors=(
        manifests.TensorInfo("model.embed_tokens.weight", "BF16", (512, 32), digest(b"tensor")),
    ),
    artifacts=(
        manifests.Artifact("anchor", -1, NO_DIGEST, "xor-zstd-1", 5, (CHUNK,)),
        manifests.Artifact("delta", 3, digest(b"state 3"), "xor-zstd-1", 5, (CHUNK,)),
    ),
)
LOCATED = structs.replace(
    POLICY_MANIFEST,
    artifacts=(structs.replace(POLICY_MANIFEST.artifacts[0], offsets=(21,)),),
)
"""A manifest that says where its tensors are."""
WITH_EARLIER = structs.replace(
    POLICY_MANIFEST,
    version=4,
    artifacts=(
        POLICY_MANIFEST.artifacts[1],
        structs.replace(POLICY_MANIFEST.artifacts[0], version=2),
    ),
)
"""A manifest with the snapshot of an earlier version."""

TICKET = manifests.Ticket(
    run=RUN,
    trainer=TRAINER.node_id,
    addresses=("192.0.2.1:4000", "[2001:db8::1]:4000"),
    discovery=("/ip4/192.0.2.1/tcp/4001",),
    issued=NOW,
    expires=NOW + 3600,
    id=bytes(range(16)),
    label="friends",
    uses=8,
)

USUAL_TICKET = manifests.Ticket(
    run=RUN,
    trainer=TRAINER.node_id,
    addresses=("192.0.2.1:40000", "198.51.100.17:40000"),
    discovery=tuple(
        f"/ip4/{host}/tcp/40001/p2p/{peer_id_text(TRAINER.node_id)}"
        for host in ("192.0.2.1", "198.51.100.17")
    ),
    issued=NOW,
    expires=NOW + 7 * 86400,
    id=bytes(range(8)),
    label="default",
)
"""As a trainer of two networks issues its own."""

RECORD = manifests.PeerRecord(
    node=WORKER.node_id,
    role="inference",
    software="0.1.0",
    addresses=("192.0.2.2:4000",),
    discovery=(),
    share_address=True,
)

NAMED_RECORD = structs.replace(RECORD, name="anna")
"""As a node with a name sends it."""

HOLDING = manifests.Holding(node=WORKER.node_id, term=1, version=3, complete=True)

LEASE = Lease(
    lease_id=2**32 + 5,
    tasks=(TaskRef(11, digest(b"task 11")), TaskRef(12, digest(b"task 12"))),
    group_size=2,
    seed=digest(b"lease seed"),
    min_version=3,
    deadline=NOW + 120.5,
    max_bytes=1 << 20,
)
MIXED_LEASE = structs.replace(LEASE, environment=1)
PROMPTS = (rollouts.pack_u32([11, 12, 13]), rollouts.pack_u32([300]))
PROMPTED_LEASE = structs.replace(
    LEASE,
    tasks=tuple(TaskRef(7 + at, prompt_digest(prompt)) for at, prompt in enumerate(PROMPTS)),
    prompts=PROMPTS,
)


def head(
    version: int = 0,
    *,
    term: int = 0,
    previous: bytes = NO_DIGEST,
    state: bytes | None = None,
    manifest: bytes | None = None,
) -> manifests.PolicyHead:
    """Make a head; two heads of one version may differ in `state` and `manifest`."""
    return manifests.PolicyHead(
        term=term,
        version=version,
        previous=previous,
        state=state or digest(b"state %d" % version),
        manifest=manifest or digest(b"manifest %d" % version),
        manifest_size=1000,
        created=NOW,
        expires=NOW + 3600,
    )


def sealed_head(
    what: manifests.PolicyHead,
    key: SecretKey = TRAINER,
    run: bytes = RUN,
    expires: int = NOW + 3600,
) -> bytes:
    """A head as it is gossiped."""
    return seal(key, Purpose.HEAD, run, what, expires=expires, sequence=what.version)


SEALED_LEASE = seal(
    TRAINER,
    Purpose.LEASE,
    RUN,
    LEASE,
    recipient=WORKER.node_id,
    sequence=LEASE.lease_id,
    expires=NOW + 180,
)

BRANCH = rollouts.BranchRecord(
    tokens=rollouts.pack_u32([5, 6, 7, 1]),
    sampled=bytes([0, 0, 1, 1]),
    logprobs=rollouts.pack_f32([-0.5, -0.25]),
    policy_first=3,
    policy_last=4,
    finish="stop",
    spans=(rollouts.Span(0, 3), rollouts.Span(1, 4)),
    proof=bytes(range(16)),
)
ROUTED_BRANCH = structs.replace(BRANCH, routes=bytes([7, 0, 43, 1, 0, 0, 1, 0]))
"""Of a run with the routes of ADAPTED."""
SUPPORTED_BRANCH = structs.replace(BRANCH, support=bytes([2, 0]) + rollouts.pack_u32([4, 9]))
"""Of NARROWED: token 7 was drawn from 4, 7 and 9, then token 1 was alone."""

SUBMISSION = rollouts.Submission(
    lease=SEALED_LEASE,
    groups=(
        rollouts.GroupRecord(
            11,
            digest(b"task 11"),
            (
                rollouts.RolloutRecord((BRANCH,), 1.0, ""),
                rollouts.RolloutRecord((), 0.0, "tool failed"),
            ),
        ),
        rollouts.GroupRecord(12, digest(b"task 12"), ()),
    ),
    engine="scripted",
)
SUBMITTED = digest(b"submission")
RECEIPT = rollouts.Receipt(SUBMITTED, LEASE.lease_id, NOW)
VERDICT = rollouts.Verdict(
    submission=SUBMITTED,
    lease_id=LEASE.lease_id,
    accepted=1,
    rejections=(
        rollouts.Rejection(0, 1, Reason.ENVIRONMENT_ERROR, "tool failed"),
        rollouts.Rejection(1, 0, Reason.MISSING_INDEX, ""),
    ),
    audited=1,
    rejected=2,
    challenge=digest(b"challenge"),
    evidence=(rollouts.Evidence(0, 0, 2, 0.01, 0.001, 0.125, 0.002, 0.25, -3.5, 0.125, 0.5),),
    validator=STRANGER.node_id,
)
NUMERICS = NumericsClass("vllm", "0.25.1", "H100", 2, "bfloat16")
BOUNDS = ClassBounds(
    numerics=NUMERICS,
    number=3,
    reject=PROOFS.reject,
    suspect=PROOFS.suspect,
    other_scale=0.25,
    rollouts=640,
    tokens=40960,
    term=1,
    first_version=2,
    last_version=9,
    rejected_at_most=0.0047,
    suspected_at_most=0.02,
)
REPORT = audits.AuditReport(
    job=7,
    submission=SUBMITTED,
    challenge=digest(b"challenge"),
    measured=(rollouts.Evidence(0, 0, 2, 0.01, 0.001, 0.125, 0.002, 0.25, -3.5),),
    unreadable=(audits.UnreadableRow(1, 1, True, "cut short"),),
    failed="",
)
PROOF = EquivocationProof(
    sealed_head(head(1, state=digest(b"left"))), sealed_head(head(1, state=digest(b"right")))
)

PLAN = PipelinePlan(
    group=digest(b"group"),
    generation=2,
    stages=(Stage(WORKER.node_id, 0, 14), Stage(STRANGER.node_id, 14, 28)),
    spares=(TRAINER.node_id,),
    shape=PipelineShape(
        engine="vllm",
        software="0.1.0",
        dtype="bfloat16",
        hidden_size=1024,
        max_model_len=4096,
        max_sequences=64,
        max_step_tokens=2048,
        block_size=16,
        kv_tokens=65536,
        micro_batches=4,
        encoding="fp8",
        fingerprint="projection",
    ),
)
OFFER = StageOffer(
    memory_bytes=24 * 2**30,
    engine="vllm",
    software="0.1.0",
    rank=1,
    world_size=2,
    name="home",
    encoding="fp8",
    round_trips={STRANGER.node_id: 20.5},
    bandwidths={STRANGER.node_id: 1e7},
)

TO_WORKER = WORKER.node_id
RETIREMENT = Retirement(TO_WORKER, NOW)
NEW_KEY = SecretKey.from_seed(bytes(31) + b"n")
SUCCESSION = Succession(TO_WORKER, NOW)
LISTED = LeaderList(2, (TRAINER.node_id, REMOVED, STRANGER.node_id), 120)
LEADERS = Leaders(RUN, TRAINER.node_id)
LEARNERS = LearnersContract((WORKER.node_id, STRANGER.node_id), 4, 0.5, 0.75)
ASSIGNMENT = Assignment(1, 7, digest(b"state"), WORKER.node_id, 29, 4, 1000, (CHUNK,))
SEALED_ASSIGNMENT = seal(
    TRAINER, Purpose.ASSIGNMENT, RUN, ASSIGNMENT, recipient=WORKER.node_id, expires=NOW + 3600
)
CONTRIBUTION = Contribution(
    digest(SEALED_ASSIGNMENT),
    1,
    7,
    digest(b"state"),
    990,
    manifests.Artifact("delta", 7, digest(b"state"), "planes/3", CHUNK.size, (CHUNK,)),
)
OUTER_STEP = OuterStep(
    1,
    8,
    digest(b"state"),
    digest(b"the next state"),
    (
        WeighedContribution(
            seal(WORKER, Purpose.CONTRIBUTION, RUN, CONTRIBUTION, expires=NOW + 3600), 1.0
        ),
    ),
)
ENVELOPES: dict[Purpose, tuple[SecretKey, Struct, bytes]] = {
    Purpose.RUN: (TRAINER, MANIFEST, bytes(32)),
    Purpose.TICKET: (TRAINER, TICKET, bytes(32)),
    Purpose.HEAD: (TRAINER, head(0), bytes(32)),
    Purpose.PEER: (WORKER, RECORD, bytes(32)),
    Purpose.LEASE: (TRAINER, LEASE, TO_WORKER),
    Purpose.SUBMISSION: (WORKER, SUBMISSION, TRAINER.node_id),
    Purpose.RECEIPT: (TRAINER, RECEIPT, TO_WORKER),
    Purpose.VERDICT: (TRAINER, VERDICT, TO_WORKER),
    Purpose.EQUIVOCATION: (WORKER, PROOF, bytes(32)),
    Purpose.HOLDING: (WORKER, HOLDING, bytes(32)),
    Purpose.AUDIT: (STRANGER, REPORT, TRAINER.node_id),
    Purpose.PIPELINE: (TRAINER, PLAN, bytes(32)),
    Purpose.BOUNDS: (TRAINER, BOUNDS, bytes(32)),
    Purpose.RETIREMENT: (WORKER, RETIREMENT, bytes(32)),
    Purpose.SUCCESSION: (NEW_KEY, SUCCESSION, bytes(32)),
    Purpose.LEADERS: (TRAINER, LISTED, bytes(32)),
    Purpose.ASSIGNMENT: (TRAINER, ASSIGNMENT, TO_WORKER),
    Purpose.CONTRIBUTION: (WORKER, CONTRIBUTION, bytes(32)),
    Purpose.OUTER_STEP: (TRAINER, OUTER_STEP, bytes(32)),
}
"""Purpose -> signer, message and recipient."""


SPLIT_SUBMISSION = structs.replace(
    SUBMISSION,
    plan=seal(TRAINER, Purpose.PIPELINE, RUN, PLAN, sequence=9, expires=NOW + 3600),
    crossed=(rollouts.Crossed(0, 0, 0, (bytes(range(16)),)),),
)
"""One whose tokens were drawn by a pipeline, and what is found out about it."""
SPLIT_VERDICT = structs.replace(
    VERDICT,
    pipeline=rollouts.PipelineVerdict(
        PLAN.group,
        PLAN.generation,
        (WORKER.node_id, STRANGER.node_id),
        (rollouts.Blamed(0, 0, (0.25,), (1,)),),
    ),
)
QUANTIZED = structs.replace(MANIFEST, proofs=structs.replace(PROOFS, quantization="fp8"))
"""A run of FP8 rollouts."""
MEASURED = structs.replace(MANIFEST, proofs=structs.replace(PROOFS, bounds="measured"))
"""A run that measures its bounds of noise, what a worker of it sends, and the verdict on it."""
CLASSED_SUBMISSION = structs.replace(SUBMISSION, numerics=NUMERICS)
CLASSED_VERDICT = structs.replace(VERDICT, bounds=BOUNDS)
SPLIT_REPORT = structs.replace(REPORT, crossed=(audits.CrossedRow(0, 0, (0.25,)),))


def sealed(purpose: Purpose) -> bytes:
    """The envelope of one purpose."""
    key, body, recipient = ENVELOPES[purpose]
    return seal(key, purpose, RUN, body, recipient=recipient, sequence=9, expires=NOW + 3600)


SEALED_RECORD = sealed(Purpose.PEER)
SEALED_LIST = sealed(Purpose.LEADERS)
NOTICE = m.HeadNotice(sealed_head(head(0)), manifests.encode(POLICY_MANIFEST))
STATS = m.WorkerStats(3, 0.5, 0.25, chunk_bytes={"trainer": 1000, "aabbccddee": 2**40})

MESSAGES: tuple[m.Message, ...] = (
    m.Hello(2, "inference", "0.1.0", sealed(Purpose.TICKET), SEALED_RECORD, NOW),
    m.Welcome(sealed(Purpose.RUN), "0.1.0", 2, NOW),
    m.WatchHeads(1, -1),
    NOTICE,
    m.RunEnded("40 steps are done", "stopped"),
    m.GetHeads(-1),
    m.Heads((NOTICE, m.HeadNotice(sealed_head(head(1))))),
    m.LeaseRequest(2, STATS, environments=(0, 2), paused="outside its hours"),
    m.LeaseReply(
        (SEALED_LEASE,), (sealed(Purpose.VERDICT),), (SEALED_RECORD,), 500, (SEALED_RECORD,)
    ),
    m.SubmitOffer(SUBMITTED, 4096, LEASE.lease_id),
    m.SubmitFrom(1024),
    m.Submitted(sealed(Purpose.RECEIPT)),
    m.GetVerdicts(12),
    m.Verdicts((sealed(Purpose.VERDICT),), 13),
    m.GetBounds(),
    m.GetBackup(digest(b"the backup that it has")),
    m.BackupWait(2000),
    m.GetAssignment(7, digest(b"state")),
    m.AssignmentWait(2000),
    m.Assigned(sealed(Purpose.ASSIGNMENT)),
    m.Stepped(sealed(Purpose.OUTER_STEP)),
    m.FetchOuter(1, CHUNK, b"{}"),
    m.Contribute(sealed(Purpose.CONTRIBUTION)),
    m.Backup(7, (m.BackupFile("config.json", (CHUNK,)),), (CHUNK,)),
    m.MeasuredBounds((sealed(Purpose.BOUNDS),)),
    m.AuditRequest(1, (2, 3), STATS),
    m.AuditWait(50),
    m.AuditJob(
        job=7,
        node=TO_WORKER,
        submission=SUBMITTED,
        size=4096,
        challenge=digest(b"challenge"),
        chosen=(audits.Place(0, 0), audits.Place(1, 1)),
        versions=(2, 3),
        others=(m.OtherPolicies(3, (2,)),),
        seconds=120.5,
    ),
    m.AuditDone(sealed(Purpose.AUDIT)),
    m.OfferStage(OFFER, PLAN.group, 2, (STRANGER.node_id,)),
    m.StageWait(2000, (SEALED_RECORD,)),
    m.StagePlanned(sealed(Purpose.PIPELINE), (SEALED_RECORD,), 5000),
    m.OpenLine(sealed(Purpose.PIPELINE), 3),
    m.PrepareVersion(PLAN.group, 2, 0, 7),
    m.Prepared(7),
    m.Probe(b"how far", 64),
    m.SyncRecords((SEALED_RECORD,)),
    m.RetireKey(retire(WORKER, NOW)),
    m.Goodbye("stopped by its owner"),
    m.Accepted(),
    m.GetChunk(CHUNK.digest, 2000),
    m.GetAnyChunk((CHUNK.digest, digest(b"another chunk")), urgent=True),
    m.ChunkFollows(5, 1),
    m.InLine(),
    m.WatchChunks((CHUNK.digest, digest(b"another chunk"))),
    m.HaveChunks(b"\x02"),
    m.Refusal(Reason.BUSY, "the inbox is full"),
)
"""One of each message, every field said."""

LED: tuple[m.Message, ...] = (
    m.Welcome(sealed(Purpose.RUN), "0.1.0", 2, NOW, leaders=SEALED_LIST),
    structs.replace(NOTICE, leaders=SEALED_LIST),
    m.LeaseReply((), (), (), 500, successors=(SEALED_RECORD,)),
    m.SyncRecords((), successors=(SEALED_RECORD,)),
    m.BackupWait(0, lead=True),
)
"""Those messages that say more in a run that has successors to its trainer."""

TRIED = m.Welcome(
    sealed(Purpose.RUN),
    "0.1.0",
    2,
    NOW,
    "192.0.2.7:4433",
    workers=3,
    rollouts_per_hour=360.0,
    tokens_per_rollout=50.5,
)
"""The answer to a trial hello."""


class refuses:
    """`with refuses(Reason.X):` - the block must raise RemoteProtocolError for exactly that reason.

    `case` names what is refused, where a test goes through many.
    """

    def __init__(self, *reasons: Reason, case: object = "") -> None:
        self._reasons = reasons
        self._case = case

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            pytest.fail(f"nothing was refused; expected {self._reasons} {self._case}")
        if not isinstance(error, RemoteProtocolError):
            return False
        assert error.reason in self._reasons, f"{error} {self._case}"
        return True
