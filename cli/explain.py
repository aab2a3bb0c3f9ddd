"""`primerl-node explain`: why the trainer accepted or rejected a submission, with the evidence."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..node.config.paths import expand_home
from .command import AsJson, DataDir, default_data_dir, find_node

if TYPE_CHECKING:
    from ..node.reports.explain import (
        Explanation,
        RejectedRollout,
        StageEvidence,
        ValidatorStanding,
        VerdictLine,
    )
    from ..node.reports.merges import MergeProof

SHORT = 10
MAX_ROWS = 32
"""Rows of evidence that are shown; --json has them all."""
WIDTH = 100
READING = (
    "! marks a measure above the bound for rejection, ? one above the bound for suspicion. One honest rollout "
    "in a hundred exceeds the latter, so a few of them do not count against a node. Fingerprints are relative "
    "distances, the other measures are in nats.",
    "A rollout is audited if its draw is below the rate. The draw is a hash of the rollout's place and of the "
    "challenge, which the trainer chose after the receipt: anybody can compute it again.",
)


def run(
    verdict: Annotated[
        str,
        typer.Argument(
            metavar="VERDICT",
            help="A lease id, or the first digits of a submission's digest or of a node's id (its latest "
            "rejected one, or of a validator its standing); a learner's proof (wrong_merge.msgpack); else the "
            "latest rejected one.",
        ),
    ] = "",
    data_dir: DataDir = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--list", "-l", help="One line for each of the newest verdicts, of a node if named."
        ),
    ] = False,
    last: Annotated[int, typer.Option("--last", min=1, help="How many --list shows.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Explain a verdict: the failed check, the measurements, what they prove, and where to look.

    Without an argument: the latest verdict with rejections, or the latest if nothing was rejected.
    Reads the ledger of a worker or of a trainer; needs no network, and the node may run or be gone. The
    trainer's signature is checked first.

    \b
    Examples:
      primerl-node explain --data-dir worker       the latest that was rejected
      primerl-node explain 4294967298 -d worker    by lease
      primerl-node explain 1f0c -d outputs/demo    by digest, or by worker or validator as `peers` shows it
      primerl-node explain --list
    """
    import msgspec

    from ..node.reports import explain, merges
    from .tables import write

    if (file := expand_home(verdict.strip())).is_file():
        proof = merges.explain(file)
        encoded = msgspec.json.format(msgspec.json.encode(proof)).decode()
        return typer.echo(encoded) if as_json else write(merge_proof(proof))
    directory = _directory(data_dir)
    validator = None if everything else explain.standing(directory, verdict.strip())
    verdicts = explain.listed(directory, last, verdict.strip()) if everything else None
    shown = explain.explain(directory, verdict.strip()) if not (everything or validator) else None
    if as_json:
        encoded = msgspec.json.encode(validator or (shown if verdicts is None else verdicts))
        typer.echo(msgspec.json.format(encoded).decode())
    elif validator is not None:
        write(validator_standing(validator))
    elif shown is None:
        write(verdict_list(verdicts or ()))
    else:
        if not verdict.strip() and not shown.rejected:
            write("nothing was rejected; the latest accepted submission:\n")
        write(explanation(shown))


def merge_proof(proof: "MergeProof") -> str:
    """Describe a proof that a trainer merged wrongly."""
    rows = [
        f"  {row.node[:SHORT]}  {row.tokens:>9,} tokens  weight {row.weight:.4f}  {row.bytes:>12,} B"
        for row in proof.contributions
    ]
    return "\n".join(
        [
            f"version {proof.version} of epoch {proof.epoch} was merged wrongly: {proof.why}",
            "",
            f"signed by   {proof.signer}",
            f"of the run  {proof.run}",
            *([f"from state  {proof.before}"] if proof.before else []),
            f"signed      {proof.signed}",
            f"computed    {proof.computed or '(these contributions cannot be merged)'}",
            *(["", "contributions, each signed by its learner:", *rows] if rows else []),
            "",
            "Signatures are genuine. Whoever has the state before, or makes it from the run's first version, "
            "computes the same: the merge is the same bits on every machine.",
        ]
    )


def _directory(data_dir: Path | None) -> Path:
    """Find the ledger to read: the named node's, the running node's, or the default. Raises UsageError."""
    from ..node.errors import NetworkError, UsageError

    if data_dir is not None:
        return expand_home(data_dir)
    try:
        return find_node(None)
    except NetworkError as error:
        if default_data_dir().exists():
            return default_data_dir()
        raise UsageError(
            "no node of yours runs on this machine: give --data-dir of the node to explain"
        ) from error


# -- tables ----------------------------------------------------------------------------------------


def verdict_list(lines: "Sequence[VerdictLine]") -> Any:
    """Draw one line for each verdict."""
    from .tables import NONE, fitted

    if not lines:
        return "no verdicts yet"
    names = ("NO", "LEASE", "SUBMISSION", "NODE", "ACCEPTED", "REJECTED", "AUDITED", "REASON")
    rows: list[Sequence[str]] = []
    for line in lines:
        node, number = line.worker[:SHORT], str(line.number)
        if line.fault:
            rows.append((number, NONE, NONE, node, "", "", "", f"NOT GENUINE: {line.fault}"))
            continue
        counts = map(str, (line.accepted, line.rejected, line.audited))
        reason = line.reason or NONE
        rows.append((number, str(line.lease), line.submission[:SHORT], node, *counts, reason))
    right = set(names) - {"SUBMISSION", "NODE", "REASON"}
    return fitted(names, rows, right=right, elastic=("REASON",), drop=("AUDITED", "NO"))


def validator_standing(standing: "ValidatorStanding") -> Any:
    """Draw how far the trainer trusts a validator."""
    from rich.console import Group

    from .tables import label_table

    facts = [("validator", standing.id), *_standing_facts(standing)]
    if standing.passed:
        names = ", ".join(worker[:SHORT] for worker in standing.passed[-MAX_ROWS:])
        facts.append(("covered for", f"{names}: the trainer measures their work itself"))
    note = (
        "The trainer measures by itself a share of what a validator calls clean, and whatever it does not call "
        "clean: nothing counts against a worker on a validator's word."
    )
    return Group(label_table(facts), "", _folded(note))


def _standing_facts(standing: "ValidatorStanding") -> list[tuple[str, str]]:
    again = standing.compared + standing.rechecked
    return [
        ("measured", f"{standing.rollouts} rollouts in {standing.jobs} jobs"),
        (
            "measured again",
            f"{again}: {standing.compared} drawn by lot, {standing.rechecked} that it did not call clean; "
            f"{standing.overturned} judged differently",
        ),
        (
            "standing",
            f"disqualified: {standing.disqualified}" if standing.disqualified else "believed",
        ),
    ]


def explanation(verdict: "Explanation") -> Any:
    """Draw a verdict: the facts, a paragraph for each reason, the evidence, and the stages."""
    from rich.console import Group

    from .tables import label_table

    measurer = f"validator {verdict.validator[:SHORT]}" if verdict.validator else "the trainer"
    run, node = verdict.run, verdict.worker[:SHORT]
    facts = [
        (
            "verdict",
            f"{verdict.number} of run {run.name}, signed by its trainer {run.trainer[:SHORT]}",
        ),
        ("on", f"submission {verdict.submission[:16]} of node {node}, lease {verdict.lease}"),
        ("result", f"{verdict.accepted} accepted, {verdict.rejected} rejected"),
        (
            "audited",
            f"{verdict.audited} rollout{'s' * (verdict.audited > 1)}, by {measurer}"
            if verdict.audited
            else "nothing",
        ),
    ]
    if verdict.standing is not None:
        rows = _standing_facts(verdict.standing)
        facts.append(("validator", f"{rows[0][1]}; {rows[2][1]}"))
    if verdict.challenge:
        facts.append(("challenge", f"{verdict.challenge}  (rate {verdict.rate:.3g})"))
    parts: list[Any] = [label_table(facts)]
    for _, group in groupby(sorted(verdict.findings, key=_reason), key=_reason):
        parts += ["", *_findings(list(group))]
    unlisted = verdict.rejected - len(verdict.findings)
    if unlisted > 0:
        more = f"{unlisted} more rejected rollouts are not in the verdict: it has no room for them"
        parts += ["", more]
    if verdict.evidence:
        parts += ["", *_evidence(verdict)]
    if verdict.stages:
        parts += ["", *_stages(verdict.stages)]
    return Group(*parts)


def _reason(finding: "RejectedRollout") -> str:
    return finding.reason


def _findings(findings: "Sequence[RejectedRollout]") -> list[Any]:
    """Draw the rejections for one reason: the rollouts, then the meaning of the reason."""
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    first = findings[0]
    count = f"{len(findings)} rollout{'s' if len(findings) > 1 else ''}"
    lines: list[Any] = [Text(f"{first.reason}: {count}", style="bold")]
    for finding in findings:
        detail = f": {finding.detail}" if finding.detail else ""
        lines.append(_folded(f"  group {finding.group}, rollout {finding.rollout}{detail}"))
    meaning = Table.grid(padding=(0, 2, 0, 0))
    meaning.add_column(no_wrap=True)
    meaning.add_column(overflow="fold", max_width=WIDTH)
    rows = [("check", first.check), ("shows", first.proves), ("does not show", first.proves_not)]
    rows += [("" if number else "look at", f"- {at}") for number, at in enumerate(first.look_at)]
    for name, value in rows:
        meaning.add_row(name, escape(value))
    return [*lines, Padding(meaning, (0, 0, 0, 2))]


def _evidence(verdict: "Explanation") -> list[Any]:
    """Draw the measurements beside their bounds, and how to read them."""
    from .tables import fitted

    measures = [measure.name.upper().replace("_", "\n") for measure in verdict.evidence[0].measures]
    rows: list[Sequence[str]] = []
    for row in verdict.evidence[:MAX_ROWS]:
        why = (
            f"{row.lot:.3f} < {verdict.rate:.3g}"
            if row.drawn
            else f"another failed ({row.lot:.3f})"
        )
        cells = (f"{measure.value:.3g}{measure.mark or ' '}" for measure in row.measures)
        rows.append((f"{row.group}/{row.rollout}", *cells, str(row.tokens), why))
    for label, bounds in (
        ("suspect above", [measure.suspect for measure in verdict.evidence[0].measures]),
        ("reject above", [measure.reject for measure in verdict.evidence[0].measures]),
    ):
        rows.append((label, *(f"{bound:.3g} " for bound in bounds), "", ""))
    names = ("ROLLOUT", *measures, "TOKENS", "DRAW")
    table = fitted(names, rows, right=("TOKENS", *measures), drop=("TOKENS", "DRAW"), dim=2)
    sample = "not measured on this model"
    if verdict.honest_rollouts:
        sample = f"{verdict.honest_rollouts} honest rollouts, {verdict.honest_tokens} tokens"
    whose = f"The bounds are the run's, from its signed manifest: {verdict.bounds} ({sample})."
    if verdict.numerics:
        whose = f"The bounds are those of {verdict.numerics} in this run: {verdict.bounds}"
        if verdict.honest_rollouts:
            whose += (
                f" ({sample}; at most {verdict.rejected_at_most:.2%} of honest ones are rejected)"
            )
    notes = [*READING, whose]
    if len(verdict.evidence) > MAX_ROWS:
        notes.append(f"{len(verdict.evidence) - MAX_ROWS} more rows: --json shows all.")
    return [table, "", *map(_folded, notes)]


def _stages(evidence: "StageEvidence") -> list[Any]:
    """Draw the nodes that made a submission together, and which of them the audits name."""
    from rich.text import Text

    from .tables import plain_table

    head = f"made by {len(evidence.nodes)} stages of pipeline {evidence.group[:SHORT]}:{evidence.generation}"
    names = ("STAGE", "NODE", "CAN BE OF IT", "OF IT ALONE")
    table = plain_table(*names, right=set(names) - {"NODE"})
    for rank, node in enumerate(evidence.nodes):
        named = [rollout.stages for rollout in evidence.blamed if rank in rollout.stages]
        alone = sum(len(stages) == 1 for stages in named)
        table.add_row(str(rank), node[:SHORT], str(len(named)), str(alone))
    lines: list[Any] = [Text(head, style="bold"), table]
    for rollout in evidence.blamed[:MAX_ROWS]:
        text = "no boundaries are stated: no stage can be named"
        if rollout.stages:
            where = ", ".join(f"{distance:.4g}" for distance in rollout.distances)
            stages = " or ".join(map(str, rollout.stages))
            text = f"distances behind stages 0.. are {where}: {stages}"
        lines.append(_folded(f"  {rollout.group}/{rollout.rollout}: {text}"))
    note = (
        f"A stage's output is off where its distance is above {evidence.reject:.4g}, odd above "
        f"{evidence.suspect:.4g}. The first output that is off, after one that is right, names the stage that "
        "computed something else. Stage 0 vouches for the statements about all stages."
    )
    return [*lines, _folded(note)]


def _folded(line: str) -> Any:
    from rich.text import Text

    return Text(line, overflow="fold")
