"""Audits by validators, with the trainer's own auditor behind them: for what they leave, and to audit them.

A validator is believed only as long as the share of its jobs that is measured again bears it out.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...crypto.hashing import short
from ...protocol.manifests import ProofContract
from ...protocol.reports import AuditReport, UnreadableRow, rows_by_place
from ..ops.errors import EngineError, UsageError
from ..verification.auditor import Measured, Unreadable
from ..verification.calls import Answer, AuditCall, Audits, Chosen
from ..verification.items import plain_turns
from ..verification.overlap import Level, level
from .audit_queue import AuditDesk

logger = logging.getLogger(__name__)

OVERLAP = 0.05
"""Share of a validator's jobs that is measured again."""
FIRST_JOBS = 4
"""Of a validator that is new in this run, so many are always measured again."""

Found = Sequence[Measured | Unreadable]
"""One entry per branch."""


class RemoteAuditors:
    """Audits, by whoever can make them."""

    def __init__(
        self,
        own: Audits,
        desk: AuditDesk,
        contract: ProofContract,
        *,
        term: Callable[[], int],
        chance: random.Random,
        overlap: float = OVERLAP,
        first_jobs: int = FIRST_JOBS,
    ) -> None:
        """`term` is the current one; `chance` must be secret: it decides which jobs are measured again."""
        self._own = own
        self._desk = desk
        self._contract = contract
        self._term = term
        self._chance = chance
        self._overlap = overlap
        self._first_jobs = first_jobs

    async def audit(self, call: AuditCall) -> Answer:
        """See Audits. Rollouts of several branches are the trainer's: their turns are not in the bundle."""
        plain = [one for one in call.chosen if plain_turns(one.rollout.branches) is not None]
        if not plain:
            return await self._own.audit(call)
        told = await self._desk.report(replace(call, chosen=plain), self._term())
        if told is None:
            return await self._own.audit(call)
        answer = await self._confirm(replace(call, chosen=plain), *told)
        rest = [one for one in call.chosen if plain_turns(one.rollout.branches) is None]
        if not rest:
            return answer
        own = await self._own.audit(replace(call, chosen=rest))
        return _merged(call.chosen, plain, answer, rest, own)

    async def _confirm(self, call: AuditCall, validator: bytes, report: AuditReport) -> Answer:
        """The report as an answer; now and then, the trainer's own measurements in its place."""
        told = _measured(call.chosen, report)
        record = self._desk.seats[validator].record
        record.jobs += 1
        if record.jobs > self._first_jobs and self._chance.random() >= self._overlap:
            return Answer(told, validator)
        try:
            own = await self._own.audit(call)
        except EngineError as error:
            logger.warning("a report of %s is not compared: %s", short(validator), error)
            return Answer(told, validator)
        if record.compare(self._levels(call, told), self._levels(call, own.measured)):
            return Answer(told, validator)
        if record.disqualified:
            logger.error(
                "VALIDATOR %s IS DISQUALIFIED for this run: %s. Take it from verification.validators "
                "unless its operator can explain it",
                validator.hex(),
                record.disqualified,
            )
        return own

    def _levels(self, call: AuditCall, measured: Sequence[Found]) -> list[Level]:
        return [
            level(one.rollout, found, self._contract)
            for one, found in zip(call.chosen, measured, strict=True)
        ]


def read_validators(texts: Sequence[str]) -> list[bytes]:
    """Node ids out of verification.validators. Raises UsageError."""
    try:
        nodes = [bytes.fromhex(text) for text in texts]
    except ValueError:
        nodes = [b""]
    if any(len(node) != 32 for node in nodes):
        raise UsageError(
            "verification.validators holds node ids of 64 hex digits: `primerl-node id` shows them"
        )
    return nodes


def _measured(chosen: Sequence[Chosen], report: AuditReport) -> list[Found]:
    rows = rows_by_place(report)
    crossed = {(row.group, row.rollout): row.distances for row in report.crossed or ()}
    found: list[Found] = []
    for one in chosen:
        place = one.rollout.group, one.rollout.index
        row = rows[place]
        if isinstance(row, UnreadableRow):
            found.append([Unreadable(row.detail, row.proof)])
        else:
            found.append(
                [
                    Measured(
                        row.tokens,
                        row.fingerprint,
                        row.sampling,
                        row.sampling_max,
                        row.logprob,
                        row.logprob_max,
                        row.other_policy,
                        _as_many(one, crossed.get(place, ())),
                    )
                ]
            )
    return found


def _as_many(chosen: Chosen, distances: tuple[float, ...]) -> tuple[float, ...]:
    """Distances of as many boundaries as the rollout has, or none."""
    wanted = len(chosen.items[0].boundaries)
    return distances if len(distances) == wanted else ()


def _merged(
    order: Sequence[Chosen],
    plain: Sequence[Chosen],
    told: Answer,
    rest: Sequence[Chosen],
    own: Answer,
) -> Answer:
    """Both answers as one, in the order of the call."""
    found = {
        id(one): measured
        for chosen, answer in ((plain, told), (rest, own))
        for one, measured in zip(chosen, answer.measured, strict=True)
    }
    return Answer([found[id(one)] for one in order], told.validator)
