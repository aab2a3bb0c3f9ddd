"""Find a verdict in a ledger, check its signature, and explain it (`primerl-node explain`).

Works without a network and beside a running node. A verdict is explained only if this run's trainer signed it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...protocol.audits import draw, is_audited
from ...protocol.envelope import Purpose, read_envelope
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.manifests import ProofContract, RunManifest
from ...protocol.numerics import ENVELOPE, ClassBounds
from ...protocol.rollouts import Evidence, PipelineVerdict, Verdict
from ...protocol.session import decode
from ...protocol.trust import leaders_of, read_documents
from ...protocol.validators import decode_records
from ..errors import NodeError, StorageError, UsageError, printable
from ..storage.ledger import LEADERS, MANIFEST, VALIDATORS, KeptVerdict, LedgerView
from ..verification.judgement import REASONS


@dataclass(frozen=True)
class Meaning:
    """Explain one check: its subject, what a failure proves and does not, where an honest operator looks."""

    check: str
    proves: str
    proves_not: str
    look_at: tuple[str, ...]


NUMERICS = (
    "engine.dtype and engine.device: the run's manifest says which dtype it is computed in",
    "the version of vLLM or torch and its attention kernels, against those of nodes that are accepted",
    "quantised weights or a quantised KV cache in --engine.vllm",
    "the hardware: an overclocked or overheated GPU, memory errors (nvidia-smi -q -d ECC)",
)
WEIGHTS = (
    "the log of this node: `policy N loaded` with the state digest that the trainer published",
    "whether an engine was kept running while its weights were replaced by anything but this program",
)
ENVIRONMENT = (
    "the versions of `verifiers` and of the taskset, against the trainer's",
    "changes made to the taskset on this machine",
)

MEANINGS: dict[Reason, Meaning] = {
    Reason.WRONG_MODEL: Meaning(
        "activation fingerprint: the proof, against the hidden states of a prefill of the same tokens",
        "the hidden states that were committed to are not those of the claimed policy on these tokens",
        "why: other weights, quantisation, an edited text and faulty hardware look alike",
        (*NUMERICS, *WEIGHTS),
    ),
    Reason.WRONG_POLICY: Meaning(
        "likelihood ratio of the proof under the claimed policy version and a neighbouring one",
        "another version than the claimed one made these rollouts",
        "intent: an engine that did not take the last update does the same",
        WEIGHTS,
    ),
    Reason.BAD_SAMPLING: Meaning(
        "seeded sampling: every token, against the one that the lease's seed draws from the same logits",
        "tokens were not drawn with the seed, temperature and limits of the lease, or other tokens than those "
        "that top_p and top_k leave are said to be left",
        "that the model was another: where a model is sure, every seed draws the same token",
        (
            "sampling options in --engine.vllm that are not the run's: top-k, top-p, penalties",
            "a proxy or a plugin that changes what the engine draws",
            *NUMERICS,
        ),
    ),
    Reason.BAD_ROUTES: Meaning(
        "routes of a mixture of experts: those claimed, against the choice of the auditor's own routers",
        "experts were claimed that no near tie explains, or too many that only a near tie does",
        "that the tokens are wrong: routes decide which experts are trained, not what was drawn",
        NUMERICS,
    ),
    Reason.BAD_LOGPROBS: Meaning(
        "log-probabilities: those claimed, against those of a prefill under the claimed policy",
        "the claimed log-probabilities are not those of the distribution that the run samples from",
        "that the tokens are wrong; honest engines of another dtype differ too, by less than the bound",
        ("logprobs of raw logits where the run asks for processed ones", *NUMERICS),
    ),
    Reason.BAD_PROOF: Meaning(
        "form of the proof: its size, its numbers, its claimed versions",
        "the bytes are no proof that this software makes: zero, constant, cut short or out of range",
        "who changed them: this node signed the bundle",
        (
            "the version of primerl-node on this machine",
            "changes made to the program or to its upload queue",
        ),
    ),
    Reason.AUDIT_FAILED: Meaning(
        "the audit itself",
        "nothing: the trainer could not measure this rollout and does not learn from it unmeasured",
        "anything about this node; it counts neither for nor against a node",
        ("nothing here; the trainer's operator finds the cause in its log",),
    ),
    Reason.UNCALIBRATED: Meaning(
        "the class of numerics that the worker states, against those that the run has bounds for",
        "nothing about this rollout: how much honest noise its class has is not measured in this run",
        "anything about honesty; it counts neither for nor against a node",
        (
            "`primerl-node status` of the trainer: it says which class lacks a reference worker",
            "engine, release and GPU of this node, against those of nodes that are accepted",
        ),
    ),
    Reason.BAD_REWARD: Meaning(
        "reward: the trainer scores the same text again",
        "the claimed reward is not what the environment gives for this text",
        "intent: another version of the environment scores differently",
        ENVIRONMENT,
    ),
    Reason.BAD_PROMPT: Meaning(
        "prompt and environment turns, played again",
        "the text does not answer the leased task, or the environment's words in it are not its own",
        "intent: another version of the environment, of its chat template or tokenizer does the same",
        ENVIRONMENT,
    ),
    Reason.BAD_TERMINATION: Meaning(
        "ending: every reply ends by a stop token or by its full length",
        "a reply was cut short or goes on after its end",
        "who cut it: an engine with a smaller limit does the same",
        ("engine.max_model_len, and the limits in --engine.vllm, against the run's",),
    ),
    Reason.MISSING_INDEX: Meaning(
        "exact group: every index of every task of the lease",
        "a rollout of the lease is missing; it counts as failed, so that leaving some out gains nothing",
        "why it is missing",
        ("the log of this node around that lease",),
    ),
    Reason.DUPLICATE: Meaning(
        "copies: the same text as in a submission that was received earlier",
        "another submission with this text was received before; the first one is not blamed",
        "that it was copied: very short replies may coincide",
        ("whether two nodes run with copies of one data directory",),
    ),
    Reason.STALE: Meaning(
        "staleness: the oldest policy version that drew any of its tokens",
        "the rollout came too late to be learned from",
        "anything about honesty; it does not lower trust",
        (
            "the speed of this node against rollouts.lease_timeout_s; a smaller --engine.max-batch",
            "how fast policy versions arrive here: `primerl-node status`",
        ),
    ),
    Reason.FUTURE_POLICY: Meaning(
        "claimed policy version, against the newest published one",
        "the claim is of a version that did not exist",
        "anything else",
        WEIGHTS,
    ),
    Reason.WRONG_ORDER: Meaning(
        "the order of a group's samples: each time the policy changed, no sample may have drawn more than one "
        "that began before it and still went on",
        "the samples of the group were not drawn in order by one engine, so their policy versions could be "
        "chosen one by one",
        "that they were: this program gives such samples up itself, so something else changed or made them",
        (
            "a proxy or a plugin between this program and its engine that keeps or reorders requests",
        ),
    ),
    Reason.TOKEN_OUT_OF_RANGE: Meaning(
        "token ids, against the vocabulary",
        "a token id that the model does not have",
        "anything about the weights",
        ("whether the engine pads the vocabulary and draws from the padding",),
    ),
    Reason.ENVIRONMENT_ERROR: Meaning(
        "the environment's own report",
        "the environment failed, here or when it was played again at the trainer",
        "anything about honesty; it does not lower trust",
        ENVIRONMENT,
    ),
    Reason.WITHDRAWN: Meaning(
        "nothing: the worker withdrew the sample itself",
        "the sample was begun anew (its engine died, or had no room) after later samples of its group, and a "
        "new policy came in between; see wrong_order",
        "anything about honesty; it does not lower trust",
        (
            "where there are many: the engine's restarts, and `in flight at most` in this node's log",
        ),
    ),
    Reason.MALFORMED: Meaning(
        "form of the bundle",
        "arrays, masks or version spans do not fit each other",
        "who changed them: this node signed the bundle",
        ("the version of primerl-node on this machine",),
    ),
    Reason.WRONG_TASK: Meaning(
        "tasks, against those of the lease",
        "the bundle is of other tasks than the lease names",
        "intent: another version of the environment makes other tasks",
        ENVIRONMENT,
    ),
    Reason.TOO_LARGE: Meaning(
        "sizes, against the lease and the run's limits",
        "more tokens, turns or rollouts than were asked for",
        "anything about the weights",
        ("engine.max_model_len and the environment's max_turns, against the run's",),
    ),
}

UNKNOWN = Meaning(
    "the trainer's rules",
    "what the reason and its detail say",
    "anything else",
    ("the log of this node, and docs/proofs.md",),
)


def meaning(reason: Reason) -> Meaning:
    """Return the meaning of a reason."""
    return MEANINGS.get(reason, UNKNOWN)


MIN_PREFIX = 4
MAX_SCANNED = 1000
"""Verdicts that are looked through for audits: of a proven worker's work few are."""
"""Fewest hex digits that identify a submission or a node."""


class LedgerRun(msgspec.Struct, frozen=True):
    """The run of a ledger."""

    id: str
    name: str
    trainer: str


class MeasuredBound(msgspec.Struct, frozen=True):
    """One measurement of an audit beside its bounds."""

    name: str
    value: float
    suspect: float
    reject: float
    mark: str
    """`!` above the bound to reject, `?` above the bound to suspect, or nothing."""


class AuditedRollout(msgspec.Struct, frozen=True):
    """One row of evidence."""

    group: int
    rollout: int
    tokens: int
    lot: float
    """Drawn from the challenge, in [0, 1)."""
    drawn: bool
    """Whether its lot is below the rate; if not, it was audited because another rollout failed."""
    measures: list[MeasuredBound]


class RejectedRollout(msgspec.Struct, frozen=True):
    """One rejected rollout."""

    group: int
    rollout: int
    reason: str
    detail: str
    check: str
    proves: str
    proves_not: str
    look_at: list[str]


class BlamedRollout(msgspec.Struct, frozen=True):
    """One rollout of a pipeline that was not clean."""

    group: int
    rollout: int
    distances: list[float]
    """Distances at the boundaries, from the lowest on."""
    stages: list[int]
    """Any of these may have caused it."""


class StageEvidence(msgspec.Struct, frozen=True):
    """The stages of the pipeline that made the submission, and those that the verdict blames."""

    group: str
    generation: int
    nodes: list[str]
    blamed: list[BlamedRollout]
    suspect: float
    reject: float
    """Bounds of the distances."""


class ValidatorStanding(msgspec.Struct, frozen=True):
    """How far a trainer trusts a validator, and why."""

    id: str
    jobs: int
    rollouts: int
    """Rollouts that it measured."""
    compared: int
    """Those that the trainer measured, too, drawn by lot."""
    rechecked: int
    """Those that the trainer measured because the validator did not call them clean."""
    overturned: int
    """Those measured twice that the trainer judged differently."""
    disqualified: str
    """Why it is not trusted; empty while it is."""
    passed: list[str]
    """Workers whose rejected work it called clean."""


class Explanation(msgspec.Struct, frozen=True):
    """A verdict of the run's trainer, signature checked."""

    run: LedgerRun
    number: int
    """Its number in the ledger."""
    worker: str
    submission: str
    lease: int
    accepted: int
    rejected: int
    findings: list[RejectedRollout]
    """The rejected rollouts that a verdict has room for."""
    audited: int
    rate: float
    challenge: str
    validator: str
    """The validator that measured; empty for the trainer."""
    evidence: list[AuditedRollout]
    bounds: str
    """Origin of the bounds."""
    honest_rollouts: int
    honest_tokens: int
    stages: StageEvidence | None = None
    """None if one node made it, or did not name the other stages."""
    numerics: str = ""
    """Class of workers that the bounds were measured for; empty where the manifest's hold for all."""
    rejected_at_most: float = 1.0
    """Share of honest rollouts that these bounds reject, 95 % upper bound; 1 where it was not measured."""
    standing: ValidatorStanding | None = None
    """The standing of the validator, in the ledger of its trainer."""


class VerdictLine(msgspec.Struct, frozen=True):
    """One verdict in a list."""

    number: int
    lease: int
    submission: str
    worker: str
    accepted: int
    rejected: int
    audited: int
    reason: str
    """The first, or empty."""
    fault: str = ""
    """Why the verdict is not genuine; the other fields then say nothing."""


class AuditLine(msgspec.Struct, frozen=True):
    """The audit of one submission in a list."""

    number: int
    """Of its verdict."""
    lease: int
    worker: str
    submission: str
    audited: int
    """Rollouts that were audited."""
    rollouts: int
    tokens: int
    """Sampled tokens that the auditor read again: its cost, as that of one prefill each."""
    result: str
    """clean, suspect, rejected, or forged: the trainer did not sign it."""
    measure: MeasuredBound | None
    """The measure that came closest to its bound, or furthest beyond it."""
    reason: str
    """Of the first rejection by an audit, with its detail; empty for none."""
    validator: str
    """The validator that measured; empty for the trainer."""
    version: int = -1
    """Newest policy version that sampled any of it; -1 where that is not known any more."""


@dataclass(frozen=True)
class _Book:
    """An open ledger and its run."""

    path: Path
    view: LedgerView
    run_id: bytes
    manifest: RunManifest
    leaders: Leaders

    def open(self, record: KeptVerdict) -> Verdict:
        """Open a verdict. Raises RemoteProtocolError if no leader of the run signed it for that node."""
        return self.leaders.unseal(
            record.sealed, Purpose.VERDICT, Verdict, recipient=record.node
        ).body


def explain(data_dir: Path, wanted: str) -> Explanation:
    """Explain one verdict of a data directory: a lease id, or the beginning of a submission's digest.

    If `wanted` is the beginning of a node's id, or empty, it is the newest verdict with rejections (of that
    node), else the newest. Raises UsageError, StorageError, NodeError.
    """
    fallback: Explanation | None = None
    forged: StorageError | None = None
    for book in _books(data_dir):
        for record in book.view.verdicts():
            of_node = _is_of(record, wanted)
            if not of_node and not _matches(_claimed(record), wanted):
                continue
            try:
                verdict = book.open(record)
            except RemoteProtocolError as error:
                forged = forged or _forged(book, record, error)
                continue
            if verdict.rejected or not of_node:
                return _explain(book, record, verdict)
            fallback = fallback or _explain(book, record, verdict)
    if fallback is not None:
        return fallback
    if forged is not None:
        raise forged
    if not wanted:
        raise NodeError(f"no verdicts yet in {data_dir}: nothing was submitted and verified")
    raise NodeError(
        f"no verdict on {wanted} in {data_dir}: `primerl-node explain --list` shows all of them; a trainer "
        "keeps the last 10000, and a node gets those on its own work"
    )


def standing(data_dir: Path, wanted: str) -> ValidatorStanding | None:
    """Return the standing of the validator whose id begins with `wanted`, if a trainer's ledger here has it.

    None also if several begin with it. Raises UsageError, StorageError.
    """
    if len(wanted) < MIN_PREFIX:
        return None
    for book in _books(data_dir):
        matching = [known for known in _standings(book) if known.id.startswith(wanted.lower())]
        if len(matching) == 1:
            return matching[0]
    return None


def _standings(book: _Book) -> list[ValidatorStanding]:
    try:
        records = decode_records(book.view.get(VALIDATORS))
    except msgspec.DecodeError as error:
        raise StorageError(
            f"the records of validators in {book.path} cannot be read ({error}): restore the file from a copy"
        ) from error
    return [
        ValidatorStanding(
            id=node,
            jobs=record.jobs,
            rollouts=record.rollouts,
            compared=record.compared,
            rechecked=record.rechecked,
            overturned=record.overturned,
            disqualified=printable(record.disqualified, None),
            passed=list(record.passed),
        )
        for node, record in records.items()
    ]


def listed(data_dir: Path, count: int, wanted: str = "") -> list[VerdictLine]:
    """List the newest verdicts of a data directory, or of those that explain() finds by `wanted`, the newest
    first.

    Raises UsageError, StorageError.
    """
    lines: list[VerdictLine] = []
    for book in _books(data_dir):
        for record in book.view.verdicts():
            if len(lines) == count:
                return lines
            if _is_of(record, wanted) or _matches(_claimed(record), wanted):
                lines.append(_line(book, record))
    return lines


def audits(data_dir: Path, count: int) -> list[AuditLine]:
    """List the newest audits of a data directory, the newest first, from its newest MAX_SCANNED verdicts.

    Raises UsageError, StorageError.
    """
    lines: list[AuditLine] = []
    for book in _books(data_dir):
        for record in itertools.islice(book.view.verdicts(), MAX_SCANNED):
            if len(lines) == count:
                return lines
            claimed = _claimed(record)
            if claimed is None or claimed.audited:
                lines.append(_audit_line(book, record))
    return lines


def _audit_line(book: _Book, record: KeptVerdict) -> AuditLine:
    number, worker = record.number, record.node.hex()
    try:
        verdict = book.open(record)
    except RemoteProtocolError as error:
        why = printable(str(error), None)
        return AuditLine(number, 0, worker, "", 0, 0, 0, "forged", None, why, "")
    names, proofs = _measured(book.manifest), contract_of(book.manifest, verdict)
    measures = [_measure(proofs, row, name) for row in verdict.evidence for name in names]
    found = [finding for finding in verdict.rejections if finding.reason in REASONS.values()]
    suspect = any(measure.mark for measure in measures)
    return AuditLine(
        number,
        verdict.lease_id,
        worker,
        verdict.submission.hex(),
        verdict.audited,
        verdict.accepted + verdict.rejected,
        sum(row.tokens for row in verdict.evidence),
        "rejected" if found else "suspect" if suspect else "clean",
        max(measures, key=_closeness, default=None),
        printable(f"{found[0].reason.value}: {found[0].detail}", None) if found else "",
        verdict.validator.hex(),
    )


def _closeness(measure: MeasuredBound) -> tuple[int, float]:
    """Rank a measure by how close it comes to its bound to reject; NaN is beyond every bound."""
    share = measure.value / measure.reject if measure.reject > 0 else 0.0
    return ("", "?", "!").index(measure.mark), math.inf if math.isnan(share) else share


def _measured(manifest: RunManifest) -> list[str]:
    """Name the measures of a run's audits."""
    routed = manifest.routes is not None
    return [name for name in REASONS if routed or not name.startswith("routing")]


def _forged(book: _Book, record: KeptVerdict, error: RemoteProtocolError) -> StorageError:
    return StorageError(
        f"verdict {record.number} in {book.path} is not this run's trainer's ({error}): the file was changed, "
        "and nothing in it can be believed"
    )


def _claimed(record: KeptVerdict) -> Verdict | None:
    """Read a verdict unverified, only to find it."""
    try:
        return decode(read_envelope(record.sealed).payload, Verdict)
    except RemoteProtocolError:
        return None


def _is_of(record: KeptVerdict, wanted: str) -> bool:
    """Return whether the verdict is on work of the wanted node; "" is any node."""
    return not wanted or (
        len(wanted) >= MIN_PREFIX and record.node.hex().startswith(wanted.lower())
    )


def _matches(verdict: Verdict | None, wanted: str) -> bool:
    if verdict is None:
        return False
    if wanted.isdecimal() and verdict.lease_id == int(wanted):
        return True
    return len(wanted) >= MIN_PREFIX and verdict.submission.hex().startswith(wanted.lower())


def _line(book: _Book, record: KeptVerdict) -> VerdictLine:
    try:
        verdict = book.open(record)
    except RemoteProtocolError as error:
        return VerdictLine(
            record.number, 0, "", record.node.hex(), 0, 0, 0, "", fault=printable(str(error), None)
        )
    first = verdict.rejections[0].reason.value if verdict.rejections else ""
    return VerdictLine(
        number=record.number,
        lease=verdict.lease_id,
        submission=verdict.submission.hex(),
        worker=record.node.hex(),
        accepted=verdict.accepted,
        rejected=verdict.rejected,
        audited=verdict.audited,
        reason=first,
    )


def _books(data_dir: Path) -> Iterator[_Book]:
    """Open the ledgers of a data directory, the latest written first."""
    paths = [data_dir / "ledger.db", data_dir / "trainer" / "ledger.db"]
    paths += (data_dir / "runs").glob("*/ledger.db")
    ledgers = [path for path in paths if path.is_file()]
    if not ledgers:
        raise UsageError(
            f"no ledger in {data_dir}: give --data-dir of a node that worked for a run, or the run's directory"
        )
    for path in sorted(ledgers, key=_written, reverse=True):
        view = LedgerView(path)
        try:
            yield _book(path, view)
        finally:
            view.close()


def _written(path: Path) -> float:
    wal = path.with_name(path.name + "-wal")
    return max(file.stat().st_mtime for file in (path, wal) if file.exists())


def _book(path: Path, view: LedgerView) -> _Book:
    sealed = view.get(MANIFEST)
    if sealed is None:
        raise StorageError(f"{path} has no run: no trainer has admitted this node yet")
    try:
        documents = read_documents(sealed, now=0)
        leaders = leaders_of(documents, view.get(LEADERS) or b"")
    except RemoteProtocolError as error:
        raise StorageError(f"the run manifest in {path} is not genuine ({error})") from error
    return _Book(path, view, documents.run_id, documents.manifest, leaders)


def _explain(book: _Book, record: KeptVerdict, verdict: Verdict) -> Explanation:
    proofs, bounds = contract_of(book.manifest, verdict), verdict.bounds
    measures = _measured(book.manifest)
    measured = bounds if isinstance(bounds, ClassBounds) else None
    return Explanation(
        run=LedgerRun(
            book.run_id.hex(), printable(book.manifest.name, None), book.manifest.trainer.hex()
        ),
        number=record.number,
        worker=record.node.hex(),
        submission=verdict.submission.hex(),
        lease=verdict.lease_id,
        accepted=verdict.accepted,
        rejected=verdict.rejected,
        findings=_findings(verdict),
        audited=verdict.audited,
        rate=verdict.rate,
        challenge=verdict.challenge.hex(),
        validator=verdict.validator.hex(),
        evidence=[_audited(proofs, verdict, evidence, measures) for evidence in verdict.evidence],
        bounds=_source(measured) if measured else printable(proofs.source, None),
        honest_rollouts=measured.rollouts if measured else proofs.honest_rollouts,
        honest_tokens=measured.tokens if measured else proofs.honest_tokens,
        numerics=str(measured.numerics) if measured else "",
        rejected_at_most=measured.rejected_at_most if measured else 1.0,
        stages=_stages(verdict.pipeline, proofs) if verdict.pipeline else None,
        standing=next(
            (known for known in _standings(book) if known.id == verdict.validator.hex()), None
        ),
    )


def contract_of(manifest: RunManifest, verdict: Verdict) -> ProofContract:
    """Return the run's proof contract with the bounds that judged."""
    bounds = verdict.bounds
    if isinstance(bounds, ClassBounds):
        return bounds.applied(manifest.proofs)
    return manifest.proofs


def _source(bounds: ClassBounds) -> str:
    versions = f"policies {bounds.first_version} to {bounds.last_version}"
    if bounds.numerics == ENVELOPE and not bounds.provisional:
        return f"number {bounds.number}, of the trainer's own readings in float32, {versions}"
    if bounds.numerics == ENVELOPE:
        return "provisional, as the trainer had read too few texts in float32 by then"
    if bounds.provisional:
        return (
            "provisional, as its noise was not measured when this was judged, or the worker is a reference, by "
            "which it is measured: they reject only what no noise explains"
        )
    return f"number {bounds.number}, of reference workers and {versions}"


def _stages(verdict: PipelineVerdict, proofs: ProofContract) -> StageEvidence:
    return StageEvidence(
        verdict.group.hex(),
        verdict.generation,
        [node.hex() for node in verdict.stages],
        [
            BlamedRollout(
                rollout.group, rollout.rollout, list(rollout.distances), list(rollout.stages)
            )
            for rollout in verdict.blamed
        ],
        proofs.suspect.fingerprint,
        proofs.reject.fingerprint,
    )


def _findings(verdict: Verdict) -> list[RejectedRollout]:
    findings: list[RejectedRollout] = []
    for rejection in verdict.rejections:
        means = meaning(rejection.reason)
        findings.append(
            RejectedRollout(
                group=rejection.group,
                rollout=rejection.rollout,
                reason=rejection.reason.value,
                detail=printable(rejection.detail, None),
                check=means.check,
                proves=means.proves,
                proves_not=means.proves_not,
                look_at=list(means.look_at),
            )
        )
    return findings


def _audited(
    proofs: ProofContract, verdict: Verdict, evidence: Evidence, measures: Sequence[str]
) -> AuditedRollout:
    place = (evidence.group, evidence.rollout)
    return AuditedRollout(
        group=evidence.group,
        rollout=evidence.rollout,
        tokens=evidence.tokens,
        lot=draw(verdict.challenge, *place),
        drawn=is_audited(verdict.challenge, *place, verdict.rate),
        measures=[_measure(proofs, evidence, name) for name in measures],
    )


def _measure(proofs: ProofContract, evidence: Evidence, name: str) -> MeasuredBound:
    value = getattr(evidence, name)
    suspect, reject = getattr(proofs.suspect, name), getattr(proofs.reject, name)
    # as judgement.py: NaN is above every bound
    mark = "!" if not value <= reject else "?" if not value <= suspect else ""
    return MeasuredBound(name, value, suspect, reject, mark)
