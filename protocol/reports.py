"""What a validator reports of an audit: measurements, never a judgement; the trainer judges by the manifest.

A report is bound to one job, one submission and one challenge, and signed by the validator to the trainer.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Annotated

import msgspec
from msgspec.structs import astuple

from ..crypto.hashing import Digest
from .errors import Reason, RemoteProtocolError
from .manifests import Name, Version
from .pipelines import MAX_STAGES

MAX_CHOSEN = 2048
"""Rollouts of one job; a report on so many stays below MAX_REPORT."""
MAX_UNREADABLE_DETAIL = 100
MAX_REPORT = 512 * 1024

Index = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**24)]


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rollout of a submission."""

    group: Index
    rollout: Index


class MeasuredRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What was measured on one rollout; the fields are explained at rollouts.py: Evidence."""

    group: Index
    rollout: Index
    tokens: Tokens
    fingerprint: float
    sampling: float
    sampling_max: float
    logprob: float
    logprob_max: float
    other_policy: float


class UnreadableRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rollout whose proof is no proof, or whose audit came to no end."""

    group: Index
    rollout: Index
    proof: bool
    """Whether the proof is at fault; if not, nobody is to blame."""
    detail: Annotated[str, msgspec.Meta(max_length=MAX_UNREADABLE_DETAIL)]


class CrossedRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Distances at the boundaries of one measured rollout of a pipeline."""

    group: Index
    rollout: Index
    distances: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_STAGES - 1)]


class AuditReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row for each chosen rollout, measured or unreadable; none if the validator could not audit."""

    job: Version
    submission: Digest
    challenge: Digest
    measured: Annotated[tuple[MeasuredRow, ...], msgspec.Meta(max_length=MAX_CHOSEN)]
    unreadable: Annotated[tuple[UnreadableRow, ...], msgspec.Meta(max_length=MAX_CHOSEN)] = ()
    failed: Name = ""
    """Why there are no rows."""
    crossed: (
        Annotated[tuple[CrossedRow, ...], msgspec.Meta(max_length=MAX_CHOSEN)] | msgspec.UnsetType
    ) = msgspec.UNSET
    """Of measured rollouts, at most one row each; left out where there is none."""


def check_rows(report: AuditReport, places: Sequence[tuple[int, int]]) -> None:
    """Raises RemoteProtocolError(MALFORMED) unless there is one row for each place, or none and why."""
    rows = (*report.measured, *report.unreadable)
    if report.failed and not rows:
        return
    if sorted((row.group, row.rollout) for row in rows) != sorted(places):
        raise RemoteProtocolError(Reason.MALFORMED, "not one row for each rollout of the job")
    crossed = report.crossed or ()
    of = {(row.group, row.rollout) for row in report.measured}
    if len({(row.group, row.rollout) for row in crossed} & of) != len(crossed):
        raise RemoteProtocolError(Reason.MALFORMED, "boundaries of what was not measured, or twice")
    numbers = [value for row in report.measured for value in astuple(row)]
    numbers += [value for row in crossed for value in row.distances]
    if not all(isfinite(value) for value in numbers):
        raise RemoteProtocolError(Reason.MALFORMED, "a measurement is not a number")


def rows_by_place(report: AuditReport) -> dict[tuple[int, int], MeasuredRow | UnreadableRow]:
    """The row of each rollout of a checked report."""
    rows = (*report.measured, *report.unreadable)
    return {(row.group, row.rollout): row for row in rows}
