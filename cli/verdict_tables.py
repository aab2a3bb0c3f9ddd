"""Verdicts for people: what `primerl-node explain` prints. Turns rows into renderables and asks nobody."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..node.ops.explain import (
    AuditedRollout,
    Explanation,
    RejectedRollout,
    StageEvidence,
    VerdictLine,
)
from .tables import NONE

SHORT = 10
MAX_ROWS = 32
"""Of evidence; --json has them all."""
WIDTH = 100


def verdict_list(lines: Sequence[VerdictLine]) -> Any:
    """`primerl-node explain --list`."""
    if not lines:
        return "no verdicts yet"
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    right = {"NO", "LEASE", "ACCEPTED", "REJECTED", "AUDITED"}
    for name in (
        *("NO", "LEASE", "SUBMISSION", "NODE", "ACCEPTED", "REJECTED", "AUDITED", "REASON"),
    ):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for line in lines:
        if line.fault:
            fault = f"NOT GENUINE: {escape(line.fault)}"
            table.add_row(str(line.number), NONE, NONE, line.worker[:SHORT], "", "", "", fault)
            continue
        table.add_row(
            str(line.number),
            str(line.lease),
            line.submission[:SHORT],
            line.worker[:SHORT],
            str(line.accepted),
            str(line.rejected),
            str(line.audited),
            escape(line.reason) or NONE,
        )
    return table


def explanation(found: Explanation) -> Any:
    """`primerl-node explain`."""
    parts: list[Any] = [_head(found)]
    for _, group in groupby(sorted(found.findings, key=_kind), key=_kind):
        parts += ["", _findings(list(group))]
    unlisted = found.rejected - len(found.findings)
    if unlisted > 0:
        parts += [
            "",
            f"{unlisted} more rejected rollouts are not in the verdict: it has no room for them",
        ]
    if found.evidence:
        parts += ["", _evidence(found)]
        parts += ["", *(_wrapped(line) for line in _reading(found))]
    if found.stages:
        parts += ["", *_stages(found.stages)]
    return Group(*parts)


def _head(found: Explanation) -> Any:
    audited = f"{found.audited} rollouts, by {_measurer(found)}"
    rows = [
        (
            "verdict",
            f"{found.number} of run {found.run.name}, signed by its trainer {found.run.trainer[:SHORT]}",
        ),
        (
            "on",
            f"submission {found.submission[:16]} of node {found.worker[:SHORT]}, lease {found.lease}",
        ),
        ("result", f"{found.accepted} accepted, {found.rejected} rejected"),
        ("audited", audited if found.audited else "nothing"),
    ]
    if found.challenge:
        rows.append(("challenge", f"{found.challenge}  (rate {found.rate:.3g})"))
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _measurer(found: Explanation) -> str:
    return f"validator {found.validator[:SHORT]}" if found.validator else "the trainer"


def _kind(finding: RejectedRollout) -> str:
    return finding.reason


def _findings(findings: Sequence[RejectedRollout]) -> Any:
    """All rejections of one reason: the rollouts, and once what it means."""
    first = findings[0]
    count = f"{len(findings)} rollout{'s' if len(findings) > 1 else ''}"
    lines: list[Any] = [Text(f"{first.reason}: {count}", style="bold")]
    for one in findings:
        detail = f": {one.detail}" if one.detail else ""
        lines.append(_wrapped(f"  group {one.group}, rollout {one.rollout}{detail}"))
    meaning = Table.grid(padding=(0, 2, 0, 0))
    meaning.add_column(no_wrap=True)
    meaning.add_column(overflow="fold", max_width=WIDTH)
    for name, value in (
        ("check", first.check),
        ("shows", first.proves),
        ("does not show", first.proves_not),
    ):
        meaning.add_row(name, escape(value))
    for number, place in enumerate(first.look_at):
        meaning.add_row("look at" if not number else "", escape(f"- {place}"))
    lines.append(Padding(meaning, (0, 0, 0, 2)))
    return Group(*lines)


def _evidence(found: Explanation) -> Any:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("ROLLOUT", "TOKENS", "WHY"):
        table.add_column(name, justify="right" if name == "TOKENS" else "left", no_wrap=True)
    for measure in found.evidence[0].measures:
        table.add_column(measure.name.upper().replace("_", " "), justify="right", no_wrap=True)
    for row in found.evidence[:MAX_ROWS]:
        cells = (f"{one.value:.4g}{one.mark or ' '}" for one in row.measures)
        table.add_row(f"{row.group}/{row.rollout}", str(row.tokens), _why(row, found), *cells)
    for label, bounds in (
        ("suspect above", [one.suspect for one in found.evidence[0].measures]),
        ("reject above", [one.reject for one in found.evidence[0].measures]),
    ):
        table.add_row(label, "", "", *(f"{bound:.4g} " for bound in bounds), style="dim")
    return table


def _stages(found: StageEvidence) -> list[Any]:
    """Who made it together, and which of them the audits name."""
    head = f"made by {len(found.nodes)} stages of pipeline {found.group[:SHORT]}:{found.generation}"
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("STAGE", "NODE", "CAN BE OF IT", "OF IT ALONE"):
        table.add_column(name, justify="left" if name == "NODE" else "right", no_wrap=True)
    for rank, node in enumerate(found.nodes):
        laid = [one.stages for one in found.blamed if rank in one.stages]
        alone = sum(len(stages) == 1 for stages in laid)
        table.add_row(str(rank), node[:SHORT], str(len(laid)), str(alone))
    lines: list[Any] = [Text(head, style="bold"), table]
    for one in found.blamed[:MAX_ROWS]:
        where = ", ".join(f"{distance:.4g}" for distance in one.distances)
        whose = " or ".join(map(str, one.stages))
        said = f"distances behind stages 0.. are {where}: {whose}"
        said = said if one.stages else "no boundaries are stated: it cannot be told whose it is"
        lines.append(_wrapped(f"  {one.group}/{one.rollout}: {said}"))
    lines.append(
        _wrapped(
            f"What a stage sent is off where its distance is above {found.reject:.4g}, odd above "
            f"{found.suspect:.4g}. The first that is off, after one that is right, is of the stage that "
            "computed something else. Stage 0 vouches for what is said of all."
        )
    )
    return lines


def _why(row: AuditedRollout, found: Explanation) -> str:
    if row.drawn:
        return f"lot {row.lot:.3f} < {found.rate:.3g}"
    return f"guilt of another (lot {row.lot:.3f})"


def _reading(found: Explanation) -> list[str]:
    lines = [
        "! is above the bound to reject, ? above the bound to suspect: one in a hundred honest rollouts is, so "
        "only many of them tell against a node. Distances are relative, the others in nats.",
        "A rollout is audited if its lot is below the rate. The lot is a hash of the rollout's place and of "
        "the challenge, which was drawn after the receipt: anybody can compute it again.",
        f"The bounds are the run's, from its signed manifest: {found.bounds} ({_sample(found)}).",
    ]
    if len(found.evidence) > MAX_ROWS:
        lines.append(f"{len(found.evidence) - MAX_ROWS} more rows: --json shows all.")
    return lines


def _sample(found: Explanation) -> str:
    if not found.honest_rollouts:
        return "not measured on this model"
    return f"{found.honest_rollouts} honest rollouts, {found.honest_tokens} tokens"


def _wrapped(line: str) -> Any:
    return Text(line, overflow="fold")
