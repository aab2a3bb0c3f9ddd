"""The bounds that judge each worker in a run that measures them: chosen, stored and signed.

Invariant: a verdict's evidence about a class is written together with that verdict, or not at all.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ...crypto.hashing import short
from ...protocol.envelope import Purpose
from ...protocol.errors import RemoteProtocolError
from ...protocol.manifests import encode
from ...protocol.numerics import ENVELOPE, MAX_CLASSES, ClassBounds, NumericsClass
from ...protocol.pipelines import PipelinePlan
from ...protocol.reputation import Placement, Reputation
from ...protocol.rollouts import Evidence, Submission
from ...protocol.version import MAX_NAME
from ..ops.figures import BoundsRow
from ..p2p.services import NodeServices
from ..storage.ledger import HonestRollout, readable
from ..verification.auditor import plan_of
from ..verification.class_bounds import ENOUGH, Reference
from ..verification.judgement import first_above
from ..verification.self_calibration import UNKNOWN, AuditConditions, SelfCalibration
from ..verification.verdict import Verified

logger = logging.getLogger(__name__)

BOUNDS_TTL_S = 10 * 365 * 86400


@dataclass(frozen=True)
class MeasuredRows:
    """Rows that a verdict adds to the ledger about a class of workers."""

    honest: Sequence[HonestRollout] = ()
    bounds: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    """Sealed bounds, by encoded class."""

    def __add__(self, more: "MeasuredRows") -> "MeasuredRows":
        """Return both."""
        return MeasuredRows([*self.honest, *more.honest], self.bounds | more.bounds)


class BoundsBook:
    """Chooses the bounds that judge a worker, and checks its rollouts against its class."""

    def __init__(
        self,
        services: NodeServices,
        calibration: SelfCalibration | None,
        reputation: Callable[[bytes], Reputation],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`calibration` is None in a run whose manifest fixes the bounds; `clock` returns seconds."""
        self._clock = clock
        self._began: dict[NumericsClass, tuple[float, int]] = {}
        """When work of a class's references began to come in, and their rollouts by then."""
        self._services = services
        self._calibration = calibration
        self._reputation = reputation
        if calibration is not None:
            calibration.restore(*self._kept())
            for warning in calibration.warnings(Counter()):
                logger.warning("%s", warning)

    def _kept(self) -> tuple[dict[NumericsClass, list[Reference]], list[ClassBounds]]:
        """Read the references and the bounds that the ledger holds."""
        ledger, rows = self._services.ledger, dict[NumericsClass, list[Reference]]()
        for row in ledger.honest():
            with readable(ledger.path, "measurements"):
                numerics = msgspec.msgpack.decode(row.numerics, type=NumericsClass)
                evidence = msgspec.msgpack.decode(row.evidence, type=Evidence)
            rows.setdefault(numerics, []).append(Reference(row.node, row.version, evidence))
        bounds: list[ClassBounds] = []
        for sealed in ledger.bounds():
            try:
                bounds.append(
                    self._services.unseal(sealed, Purpose.BOUNDS, ClassBounds, now=0).body
                )
            except RemoteProtocolError as error:
                logger.error("bounds in the ledger are not this run's: %s", error)
        return rows, bounds

    # -- submissions -------------------------------------------------------------------------------

    def conditions(self, node: bytes, submission: Submission) -> AuditConditions | None:
        """Choose the bounds for a submission of `node`; None: those of the manifest."""
        if self._calibration is None:
            return None
        own = submission.numerics or UNKNOWN
        placement = self._reputation(node).placement.claim(own)
        makers = self._makers(node, submission)
        return self._calibration.conditions(makers, own, placement)

    def waits_for(self, makers: Sequence[bytes], numerics: NumericsClass | None) -> str:
        """Say why work of these nodes would be thrown away, as their class has no bounds; "" if it has.

        `makers`: a worker, and the later stages of its pipeline. Such a worker is leased nothing.
        """
        own, calibration = numerics or UNKNOWN, self._calibration
        if calibration is None or not calibration.unmeasured(makers, own):
            return ""
        reason = calibration.missing(own, self._rest_s(calibration, own))
        if not calibration.gathered(own):
            reason += ": the run's operator has to name one"
        reason = f"nothing would be learned from {own} before it has bounds of noise: {reason}"
        return reason[:MAX_NAME]

    def excused(self, node: bytes, numerics: NumericsClass | None) -> bool:
        """Return whether a node could not know, when it was leased, that its class has no bounds.

        They were withdrawn since, or it is a reference, with which a stage of another node worked. A
        worker that is leased as one class and sends as another is not excused.
        """
        known = self._calibration
        return known is None or self.is_reference(node) or known.had_bounds(numerics or UNKNOWN)

    def _rest_s(self, calibration: SelfCalibration, numerics: NumericsClass) -> float | None:
        """Estimate the seconds until a class has bounds, by the rate of its references so far."""
        since, before = self._began.get(numerics, (0.0, 0))
        came = calibration.gathered(numerics) - before
        if not before or came <= 0:
            return None
        missing = max(0, ENOUGH - before - came)
        return missing * (self._clock() - since) / came

    def _makers(self, node: bytes, submission: Submission) -> list[bytes]:
        """List the nodes that made a submission, its signer first."""
        services = self._services
        try:
            plan = plan_of(submission, services.leaders, node)
        except RemoteProtocolError:
            return [node, b""]  # the verifier refuses it; until then it has no reference
        return makers_of(node, plan)

    def judged(
        self, node: bytes, verified: Verified, numerics: NumericsClass | None = None
    ) -> MeasuredRows:
        """Record a submission's evidence about its class `numerics`; return the ledger rows to store."""
        bounds = verified.verdict.bounds
        if self._calibration is None or not isinstance(bounds, ClassBounds):
            return MeasuredRows()
        read = self._read_rows(verified)
        reputation, audited = self._reputation(node), verified.audited
        makers = makers_of(node, verified.plan)
        if self._calibration.vouched(makers):
            for maker in makers:
                if self._reputation(maker).banned:
                    logger.error(
                        "reference worker %s is banned: its rollouts no longer count in any bounds",
                        short(maker),
                    )
                    self._drop(maker)
                    return read
            clean = [
                (version, evidence)
                for version, evidence, judgement in zip(
                    audited.versions, audited.evidence, audited.judgements, strict=True
                )
                if judgement.reason is None
            ]
            return read + self._add(makers, bounds.numerics, clean)
        if bounds.numerics == ENVELOPE:
            self._place(node, numerics or UNKNOWN, audited.evidence)
            return read
        placement = reputation.placement.claim(bounds.numerics)
        if not bounds.provisional:
            placement = placement.add(judgement.suspect for judgement in audited.judgements)
            if placement.is_odd and not placement.refused:
                why = self._calibration.misplaced(bounds.numerics, audited.evidence)
                logger.warning("%s is given no work: %s", short(node), why)
                placement = placement.refuse(why)
        reputation.placement = placement
        return read

    def _place(self, node: bytes, numerics: NumericsClass, measured: Sequence[Evidence]) -> None:
        """Compare the first rollouts of a worker with the class that it claims, if that is measured."""
        assert self._calibration is not None
        bounds, reputation = self._calibration.bounds_of(numerics), self._reputation(node)
        before = reputation.placement.claim(numerics)
        if bounds is None or before.placed or before.outside:
            reputation.placement = before
            return
        now = before.add(
            first_above(evidence, bounds.suspect) != "" for evidence in measured
        ).leave_class()
        if now.outside:
            why = self._calibration.misplaced(numerics, measured)
            logger.info("%s is judged as a worker of any other class: %s", short(node), why)
        reputation.placement = now

    def _read_rows(self, verified: Verified) -> MeasuredRows:
        """Return the rows of what was read in float32 for a submission, and the envelope that it made."""
        name = encode(ENVELOPE)
        trainer, envelope = self._services.trainer, verified.audited.envelope
        if envelope is not None:
            logger.info(
                "bounds of %s, number %d: of %d readings in float32, reject at most %.2g of them",
                envelope.numerics,
                envelope.number,
                envelope.rollouts,
                envelope.rejected_at_most,
            )
        return MeasuredRows(
            [
                HonestRollout(name, trainer, reading.version, encode(reading.evidence))
                for reading in verified.audited.readings
            ],
            self._seal_all([envelope] if envelope else ()),
        )

    def _add(
        self,
        makers: Sequence[bytes],
        numerics: NumericsClass,
        clean: Sequence[tuple[int, Evidence]],
    ) -> MeasuredRows:
        assert self._calibration is not None
        added, bounds = self._calibration.add(makers, numerics, clean)
        if added and numerics not in self._began:
            self._began[numerics] = self._clock(), self._calibration.gathered(numerics)
        name = encode(numerics)
        if bounds is not None:
            logger.info(
                "bounds of %s, number %d: of %d rollouts, reject at most %.2g of honest ones",
                numerics,
                bounds.number,
                bounds.rollouts,
                bounds.rejected_at_most,
            )
        return MeasuredRows(
            [
                HonestRollout(name, reference.node, reference.version, encode(reference.evidence))
                for reference in added
            ],
            self._seal_all([bounds] if bounds else ()),
        )

    def _drop(self, node: bytes) -> None:
        assert self._calibration is not None
        renewed = self._calibration.drop(node)
        self._began.clear()
        self._services.ledger.drop_honest(self._seal_all(renewed), node=node)

    def _seal_all(self, classes: Iterable[ClassBounds]) -> dict[bytes, bytes]:
        expires = int(time.time()) + BOUNDS_TTL_S
        return {
            encode(bounds.numerics): self._services.seal(
                Purpose.BOUNDS, bounds, sequence=bounds.number, expires=expires
            )
            for bounds in classes
        }

    # -- the chain, workers and operators ----------------------------------------------------------

    def go_back(self, term: int, version: int) -> None:
        """Continue from that version, dropping rollouts of later versions that the trainer lost."""
        if self._calibration is not None:
            renewed = self._calibration.go_back(term, version)
            self._began.clear()
            self._services.ledger.drop_honest(self._seal_all(renewed), above=version)

    def claim(self, node: bytes, numerics: NumericsClass | None) -> None:
        """Record the numerics class that a worker claims; a new class starts anew.

        A reference worker's claim is believed, even if it was refused before its operator named it as a
        reference.
        """
        if self._calibration is None or numerics is None:
            return
        reputation = self._reputation(node)
        known = Placement() if self.is_reference(node) else reputation.placement
        reputation.placement = known.claim(numerics)

    def sealed(self) -> tuple[bytes, ...]:
        """Return the signed bounds of all classes, for any member that asks."""
        return tuple(self._services.ledger.bounds()[:MAX_CLASSES])

    def rows(self, claims: Counter[NumericsClass]) -> list[BoundsRow]:
        """List the classes of a run that measures its bounds; `claims` counts workers by class."""
        return self._calibration.rows(claims) if self._calibration else []

    def is_reference(self, node: bytes) -> bool:
        """Return whether this worker's rollouts measure the noise of its class."""
        return self._calibration is not None and self._calibration.vouched((node,))

    def warnings(self, strangers: Counter[NumericsClass]) -> list[str]:
        """Report missing references of classes; `strangers` counts non-reference workers by class."""
        return self._calibration.warnings(strangers) if self._calibration else []


def makers_of(node: bytes, plan: PipelinePlan | None) -> list[bytes]:
    """List the nodes that made a submission of `node`: itself, and the later stages of its pipeline."""
    return [node, *(stage.node for stage in plan.stages[1:])] if plan else [node]
