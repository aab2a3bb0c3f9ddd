"""`primerl-node explain`: finds a verdict in a ledger, checks its signature, and says what it means.

Works without a network and beside a running node. A verdict is explained only if this run's trainer signed it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...protocol.audits import draw, is_audited
from ...protocol.envelope import Purpose, read_envelope, unseal
from ...protocol.errors import RemoteProtocolError
from ...protocol.manifests import ProofContract, RunManifest, run_id
from ...protocol.rollouts import Evidence, PipelineVerdict, Verdict
from ...protocol.session import decode
from ..storage.ledger import MANIFEST, KeptVerdict, LedgerView
from ..verification.judgement import REASONS
from ..verification.meanings import meaning
from .errors import NodeError, StorageError, UsageError

MIN_PREFIX = 4
"""Hex digits of a submission's digest that name it."""


class Run(msgspec.Struct, frozen=True):
    """The run that a ledger is of."""

    id: str
    name: str
    trainer: str


class Measure(msgspec.Struct, frozen=True):
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
    """Whether the challenge picked it: the lot is below the rate. Else another one's guilt did."""
    measures: list[Measure]


class Finding(msgspec.Struct, frozen=True):
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
    """At the boundaries, from the lowest on."""
    stages: list[int]
    """It can be of any of these."""


class Stages(msgspec.Struct, frozen=True):
    """What a verdict says of the stages of the pipeline that made the submission."""

    group: str
    generation: int
    nodes: list[str]
    blamed: list[BlamedRollout]
    suspect: float
    reject: float
    """Bounds of the distances."""


class Explanation(msgspec.Struct, frozen=True):
    """A verdict of the run's trainer, signature checked."""

    run: Run
    number: int
    """In the ledger that it was found in."""
    worker: str
    submission: str
    lease: int
    accepted: int
    rejected: int
    findings: list[Finding]
    """The rejected rollouts that a verdict has room for."""
    audited: int
    rate: float
    challenge: str
    validator: str
    """Who measured; empty for the trainer."""
    evidence: list[AuditedRollout]
    bounds: str
    """Where the bounds come from."""
    honest_rollouts: int
    honest_tokens: int
    stages: Stages | None = None
    """None if one node made it, or did not say who made it with it."""


class Line(msgspec.Struct, frozen=True):
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


@dataclass(frozen=True)
class _Book:
    """One ledger, opened, and the run that it is of."""

    path: Path
    view: LedgerView
    run_id: bytes
    manifest: RunManifest

    def open(self, kept: KeptVerdict) -> Verdict:
        """The verdict. Raises RemoteProtocolError if the run's trainer did not sign it for that node."""
        return unseal(
            kept.sealed,
            Purpose.VERDICT,
            Verdict,
            now=0,
            run=self.run_id,
            signer=self.manifest.trainer,
            recipient=kept.node,
        ).body


def explain(data_dir: Path, wanted: str) -> Explanation:
    """Explain one verdict of a data directory: a lease id, the beginning of a submission's digest, or "".

    Without anything, the newest with rejections, else the newest. Raises UsageError, StorageError, NodeError.
    """
    fallback: Explanation | None = None
    forged: StorageError | None = None
    for book in _books(data_dir):
        for kept in book.view.verdicts():
            if wanted and not _matches(_claimed(kept), wanted):
                continue
            try:
                verdict = book.open(kept)
            except RemoteProtocolError as error:
                forged = forged or _forged(book, kept, error)
                continue
            if wanted or verdict.rejected:
                return _explain(book, kept, verdict)
            fallback = fallback or _explain(book, kept, verdict)
    if fallback is not None:
        return fallback
    if forged is not None:
        raise forged
    what = f"no verdict on {wanted}" if wanted else "no verdict"
    raise NodeError(
        f"{what} in {data_dir}: `primerl-node explain --list` shows what is there; a trainer keeps the last "
        "10000, and a node gets those on its own work"
    )


def listed(data_dir: Path, count: int) -> list[Line]:
    """The newest verdicts of a data directory, the newest first. Raises UsageError, StorageError."""
    lines: list[Line] = []
    for book in _books(data_dir):
        for kept in book.view.verdicts():
            if len(lines) == count:
                return lines
            lines.append(_line(book, kept))
    return lines


def _forged(book: _Book, kept: KeptVerdict, error: RemoteProtocolError) -> StorageError:
    return StorageError(
        f"verdict {kept.number} in {book.path} is not this run's trainer's ({error}): somebody changed it, "
        "and nothing in it can be believed"
    )


def _claimed(kept: KeptVerdict) -> Verdict | None:
    """What a verdict says of itself, unverified: only to find it."""
    try:
        return decode(read_envelope(kept.sealed).payload, Verdict)
    except RemoteProtocolError:
        return None


def _matches(verdict: Verdict | None, wanted: str) -> bool:
    if verdict is None:
        return False
    if wanted.isdecimal() and verdict.lease_id == int(wanted):
        return True
    return len(wanted) >= MIN_PREFIX and verdict.submission.hex().startswith(wanted.lower())


def _line(book: _Book, kept: KeptVerdict) -> Line:
    try:
        verdict = book.open(kept)
    except RemoteProtocolError as error:
        return Line(kept.number, 0, "", kept.node.hex(), 0, 0, 0, "", fault=_printable(str(error)))
    first = verdict.rejections[0].reason.value if verdict.rejections else ""
    return Line(
        number=kept.number,
        lease=verdict.lease_id,
        submission=verdict.submission.hex(),
        worker=kept.node.hex(),
        accepted=verdict.accepted,
        rejected=verdict.rejected,
        audited=verdict.audited,
        reason=first,
    )


def _books(data_dir: Path) -> Iterator[_Book]:
    """The ledgers of a data directory, the one that was written last first."""
    paths = [data_dir / "ledger.db", data_dir / "trainer" / "ledger.db"]
    paths += (data_dir / "runs").glob("*/ledger.db")
    found = [path for path in paths if path.is_file()]
    if not found:
        raise UsageError(
            f"no ledger in {data_dir}: give --data-dir of a node that worked for a run, or the run's directory"
        )
    for path in sorted(found, key=_written, reverse=True):
        view = LedgerView(path)
        try:
            yield _book(path, view)
        finally:
            view.close()


def _written(path: Path) -> float:
    wal = path.with_name(path.name + "-wal")
    return max(one.stat().st_mtime for one in (path, wal) if one.exists())


def _book(path: Path, view: LedgerView) -> _Book:
    sealed = view.get(MANIFEST)
    if sealed is None:
        raise StorageError(f"{path} names no run yet: start its node once with this version")
    try:
        opened = unseal(sealed, Purpose.RUN, RunManifest, now=0)
        name = run_id(opened.payload)
        unseal(sealed, Purpose.RUN, RunManifest, now=0, run=name, signer=opened.body.trainer)
    except RemoteProtocolError as error:
        raise StorageError(f"the run manifest in {path} is not genuine ({error})") from error
    return _Book(path, view, name, opened.body)


def _explain(book: _Book, kept: KeptVerdict, verdict: Verdict) -> Explanation:
    proofs = book.manifest.proofs
    return Explanation(
        run=Run(book.run_id.hex(), _printable(book.manifest.name), book.manifest.trainer.hex()),
        number=kept.number,
        worker=kept.node.hex(),
        submission=verdict.submission.hex(),
        lease=verdict.lease_id,
        accepted=verdict.accepted,
        rejected=verdict.rejected,
        findings=_findings(verdict),
        audited=verdict.audited,
        rate=verdict.rate,
        challenge=verdict.challenge.hex(),
        validator=verdict.validator.hex(),
        evidence=[_audited(book, verdict, seen) for seen in verdict.evidence],
        bounds=_printable(proofs.source),
        honest_rollouts=proofs.honest_rollouts,
        honest_tokens=proofs.honest_tokens,
        stages=_stages(verdict.pipeline, proofs) if verdict.pipeline else None,
    )


def _stages(said: PipelineVerdict, proofs: ProofContract) -> Stages:
    return Stages(
        said.group.hex(),
        said.generation,
        [node.hex() for node in said.stages],
        [
            BlamedRollout(one.group, one.rollout, list(one.distances), list(one.stages))
            for one in said.blamed
        ],
        proofs.suspect.fingerprint,
        proofs.reject.fingerprint,
    )


def _findings(verdict: Verdict) -> list[Finding]:
    found: list[Finding] = []
    for one in verdict.rejections:
        means = meaning(one.reason)
        found.append(
            Finding(
                group=one.group,
                rollout=one.rollout,
                reason=one.reason.value,
                detail=_printable(one.detail),
                check=means.check,
                proves=means.proves,
                proves_not=means.proves_not,
                look_at=list(means.look_at),
            )
        )
    return found


def _audited(book: _Book, verdict: Verdict, seen: Evidence) -> AuditedRollout:
    place = (seen.group, seen.rollout)
    return AuditedRollout(
        group=seen.group,
        rollout=seen.rollout,
        tokens=seen.tokens,
        lot=draw(verdict.challenge, *place),
        drawn=is_audited(verdict.challenge, *place, verdict.rate),
        measures=[_measure(book, seen, name) for name in REASONS],
    )


def _measure(book: _Book, seen: Evidence, name: str) -> Measure:
    value = getattr(seen, name)
    suspect = getattr(book.manifest.proofs.suspect, name)
    reject = getattr(book.manifest.proofs.reject, name)
    # as judgement.py: NaN is above every bound
    mark = "!" if not value <= reject else "?" if not value <= suspect else ""
    return Measure(name, value, suspect, reject, mark)


def _printable(text: str) -> str:
    """Others chose this text: no control characters reach a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
