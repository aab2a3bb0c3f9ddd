"""Bounds of noise that a run measures for each class of workers, while it runs.

Invariants:
- bounds of a class are derived only from rollouts of workers that the operator named (references) and that are
  not banned, measured by the trainer itself: a stranger, or a validator, never moves them;
- a worker of no measured class, or whose first rollouts do not fit the class that it claims, is judged by the
  envelope (envelope.py), which the trainer measures alone;
- where the envelope cannot be measured, no bound of noise judges a class before it has its own: only
  deviations beyond any noise are rejected, and in a run with references its strangers wait, as nothing would
  be learned from their work;
- verdicts are final: new bounds apply to submissions that are verified after they were made.

No I/O, no clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import getLogger

from msgspec import structs

from ...protocol.manifests import ProofContract, Thresholds
from ...protocol.numerics import ENVELOPE, MAX_CLASSES, ClassBounds, NumericsClass
from ...protocol.reputation import Placement
from ...protocol.rollouts import MEASURES, Evidence
from ..ops.figures import BoundsRow
from . import envelope
from .class_bounds import ENOUGH, Reference, make_bounds, provisional
from .envelope import envelope_bounds
from .judgement import first_above

logger = getLogger(__name__)

MOST_FAILED_READINGS = 3
KEPT = 2048
"""Newest rollouts of a class, from which its bounds are derived."""
RENEW = 64
"""New rollouts after which a class's bounds are renewed: the noise changes with the policy."""
REFERENCE_SHARE = 0.25
"""Part of the usual rate at which proven references are audited, whom the operator vouches for; their audits
serve to renew the bounds."""
RENEW_STEPS = 8
"""Steps within which bounds are renewed; that may take a higher rate."""
ADVICE = "name a worker of yours in verification.references"

UNKNOWN = NumericsClass()


@dataclass(frozen=True)
class AuditConditions:
    """Bounds and rules for one submission, and whether it may be trained on."""

    contract: ProofContract
    """The run's contract, with the bounds to apply."""
    bounds: ClassBounds | None = None
    """These bounds, in a run that measures them."""
    all_audited: bool = False
    """Whether every rollout is audited, with any record of the worker."""
    placing: bool = False
    """Whether it is among its worker's first: suspects then indicate a wrong class, not fraud."""
    by_trainer: bool = False
    """Whether the trainer has to measure the submission itself."""
    audit_rate: float | None = None
    """Audited share of a proven worker's rollouts; None: the contract's."""
    unlearned: str = ""
    """Reason why none of it is trained on; empty if its clean rollouts are."""
    reads: bool = False
    """Whether some of it is read in float32, before it is judged: see SelfCalibration.read()."""


@dataclass
class ClassState:
    """References of one class, and the bounds derived from them."""

    references: deque[Reference] = field(default_factory=lambda: deque[Reference](maxlen=KEPT))
    bounds: ClassBounds | None = None
    number: int = 0
    """Number of the latest bounds, even after they were withdrawn."""
    fresh: int = 0
    """Rollouts since the latest bounds."""


class SelfCalibration:
    """Measured bounds of each class, and the choice of the bounds for a worker."""

    def __init__(
        self,
        contract: ProofContract,
        references: Iterable[bytes] = (),
        *,
        rollouts_per_step: int = 1,
        reads: bool = False,
    ) -> None:
        """Take the run's contract, and the node ids of the workers that the operator trusts.

        `reads`: the trainer can read texts in float32, so that there is an envelope.
        """
        self._contract = contract
        self.reads = reads
        self._unread = 0.0
        """Share of a reading that is due for the rollouts that were audited since the last."""
        self._reading = 0
        """Texts that are being read."""
        self._read_version = 0
        """Newest policy version whose texts were read."""
        self._failed_readings = 0
        renewing = RENEW / (RENEW_STEPS * rollouts_per_step)
        self._reference_rate = min(
            contract.audit_rate, max(REFERENCE_SHARE * contract.audit_rate, renewing)
        )
        self.references = frozenset(references)
        self._named = bool(self.references)
        """Whether the run ever had references: banned ones are not the same as none."""
        self._classes: dict[NumericsClass, ClassState] = {}
        self._term = 0

    def vouched(self, makers: Iterable[bytes]) -> bool:
        """Return whether all nodes that made a submission together are references."""
        return bool(self.references) and self.references.issuperset(makers)

    # -- bounds for a worker -----------------------------------------------------------------------

    def conditions(
        self, makers: Sequence[bytes], own: NumericsClass, placement: Placement
    ) -> AuditConditions:
        """Choose the bounds for a submission of these nodes, which claims class `own`.

        `placement` compares the first rollouts of its worker with that class.
        """
        placed = placement.placed
        measured, vouched = self.bounds_of(own), self.vouched(makers)
        if self.reads and not vouched and (measured is None or not placed):
            bounds = self.bounds_of(ENVELOPE) or provisional(ENVELOPE)
            undecided = measured is not None and not placement.outside
            return AuditConditions(
                bounds.applied(self._contract),
                bounds,
                all_audited=bounds.provisional or undecided,
                reads=True,
            )
        if measured is not None and not vouched:
            applied = measured.applied(self._contract)
            return AuditConditions(applied, measured, all_audited=not placed, placing=not placed)
        bounds = provisional(own)
        unlearned = ""
        if self.unmeasured(makers, own):
            unlearned = f"the noise of {own} is not measured in this run"
        return AuditConditions(
            bounds.applied(self._contract),
            bounds,
            all_audited=measured is None,
            by_trainer=vouched,
            audit_rate=self._reference_rate if vouched else None,
            unlearned=unlearned,
            reads=self.reads and vouched,
        )

    def unmeasured(self, makers: Sequence[bytes], own: NumericsClass) -> bool:
        """Return whether nothing would be learned from work of these nodes, which claim class `own`."""
        if self.reads or not self._named:
            return False
        return self.bounds_of(own) is None and not self.vouched(makers)

    # -- the envelope ------------------------------------------------------------------------------

    def readings_due(self, audited: int, version: int) -> int:
        """Return how many of the next `audited` rollouts to read, of texts up to policy `version`.

        All of the first, then a small share, and some of every few versions. Those that are waited for are read
        within reading(); then read() or not_read() follows.
        """
        if not self.reads:
            return 0
        missing = ENOUGH - self.gathered(ENVELOPE) - self._reading
        if missing > 0:
            due = min(audited, missing)
        else:
            self._unread += audited * envelope.READ
            late = version >= self._read_version + RENEW_STEPS
            due = min(audited, max(int(self._unread), envelope.RENEW * late))
            due = due if late or due >= envelope.RENEW else 0
            self._unread = max(0.0, self._unread - due)
        self._read_version = max(self._read_version, version) if due else self._read_version
        return due

    @contextmanager
    def reading(self, texts: int) -> Generator[None]:
        """Count texts that are being read and waited for: they are not due again meanwhile."""
        self._reading += texts
        try:
            yield
        finally:  # also when cancelled
            self._reading -= texts

    def read(
        self, readings: Sequence[Reference], conditions: AuditConditions
    ) -> tuple[AuditConditions, ClassBounds | None]:
        """Add readings of a submission.

        Returns what judges it now, and the envelope if it was made anew.
        """
        self._failed_readings = 0
        state = self._classes.setdefault(ENVELOPE, ClassState())
        state.references.extend(readings)
        while len(state.references) > envelope.KEPT:
            state.references.popleft()
        state.fresh += len(readings)
        gathered = len(state.references)
        due = envelope.RENEW if gathered > ENOUGH else 1
        if state.fresh < due or gathered < envelope.FIRST:
            return conditions, None
        bounds = self._renew(ENVELOPE, state)
        return self.newest(conditions), bounds

    @property
    def is_reading(self) -> bool:
        """Whether texts are being read and waited for."""
        return self._reading > 0

    def newest(self, conditions: AuditConditions) -> AuditConditions:
        """Return conditions with the newest envelope, if that judges."""
        bounds, judging = self.bounds_of(ENVELOPE), conditions.bounds
        if bounds is None or judging is None or judging.numerics != ENVELOPE:
            return conditions
        return replace(conditions, contract=bounds.applied(self._contract), bounds=bounds)

    def not_read(self, why: str, conditions: AuditConditions) -> AuditConditions:
        """Record that texts could not be read; return what judges the submission.

        After several failures in a row the run goes on without an envelope.
        """
        self._failed_readings += 1
        if self._failed_readings >= MOST_FAILED_READINGS:
            logger.error(
                "no text can be read in float32 (%s): strangers are judged by their classes' bounds alone",
                why,
            )
            self.reads = False
        known = conditions.bounds is None or not conditions.bounds.provisional
        if known or not self._named or conditions.by_trainer:
            return conditions
        return replace(
            conditions,
            unlearned=f"honest noise could not be measured: the trainer could not read texts: {why}",
        )

    def bounds_of(self, numerics: NumericsClass) -> ClassBounds | None:
        """Return the measured bounds of a class; None if it has none."""
        known = self._classes.get(numerics)
        return known.bounds if known else None

    def misplaced(self, numerics: NumericsClass, measured: Sequence[Evidence]) -> str:
        """Explain that rollouts are not of the claimed class, and name a class that they fit."""
        fault = f"it claims {numerics}, and its first rollouts do not lie within the noise of that class"
        alike = [
            other
            for other, state in self._classes.items()
            if other not in (numerics, ENVELOPE)
            and state.bounds
            and _within(measured, state.bounds.suspect)
        ]
        if alike:
            return f"{fault}: they look like {alike[0]}"
        bounds = self.bounds_of(numerics)
        if not measured or bounds is None:
            return fault
        return f"{fault}: {_furthest(measured, bounds.suspect)}; they look like no class that was measured"

    # -- references and their bounds ---------------------------------------------------------------

    def add(
        self,
        makers: Sequence[bytes],
        numerics: NumericsClass,
        measured: Sequence[tuple[int, Evidence]],
    ) -> tuple[list[Reference], ClassBounds | None]:
        """Add clean (version, evidence) that the trainer measured of `makers`, the worker first.

        Ignored if one of these nodes is not a reference. Returns the added references, and new bounds of the
        class if they are due.
        """
        if not self.vouched(makers) or numerics in (UNKNOWN, ENVELOPE):
            return [], None
        if numerics not in self._classes and len(self._classes) >= MAX_CLASSES:
            return [], None
        state = self._classes.setdefault(numerics, ClassState())
        added = [Reference(makers[0], version, evidence) for version, evidence in measured]
        state.references.extend(added)
        state.fresh += len(added)
        due = ENOUGH if state.bounds is None else RENEW
        if not added or state.fresh < due or len(state.references) < ENOUGH:
            return added, None
        return added, self._renew(numerics, state)

    def drop(self, node: bytes) -> list[ClassBounds]:
        """Drop a banned reference's rollouts; renew the bounds that were derived from them.

        Returns the new bounds; provisional ones if too few rollouts are left.
        """
        self.references -= {node}
        return self._keep(lambda reference: reference.node != node)

    def go_back(self, term: int, version: int) -> list[ClassBounds]:
        """Go back to policy `version` in epoch `term`: drop rollouts of later versions.

        Returns new bounds, as drop().
        """
        self._term = term
        return self._keep(lambda reference: reference.version <= version)

    def restore(
        self, rows: Mapping[NumericsClass, Sequence[Reference]], made: Iterable[ClassBounds]
    ) -> None:
        """Restore the state before a restart: references of each class, oldest first, and bounds."""
        for numerics, references in rows.items():
            state = self._classes.setdefault(numerics, ClassState())
            own = numerics == ENVELOPE
            state.references.extend(
                reference for reference in references if own or reference.node in self.references
            )
            state.fresh = len(state.references)
        for bounds in made:
            state = self._classes.setdefault(bounds.numerics, ClassState())
            state.number = bounds.number
            if not bounds.provisional:
                state.bounds, state.fresh = bounds, 0

    def _keep(self, wanted: Callable[[Reference], bool]) -> list[ClassBounds]:
        changed: list[ClassBounds] = []
        for numerics, state in self._classes.items():
            remaining = [reference for reference in state.references if wanted(reference)]
            if len(remaining) == len(state.references):
                continue
            state.references = deque(remaining, maxlen=KEPT)
            if state.bounds is None:
                state.fresh = len(remaining)
            elif len(remaining) >= (envelope.FIRST if numerics == ENVELOPE else ENOUGH):
                changed.append(self._renew(numerics, state))
            else:
                state.number, state.bounds, state.fresh = state.number + 1, None, len(remaining)
                changed.append(
                    structs.replace(provisional(numerics), number=state.number, term=self._term)
                )
        return changed

    def _renew(self, numerics: NumericsClass, state: ClassState) -> ClassBounds:
        state.number, state.fresh = state.number + 1, 0
        known, contract = list(state.references), self._contract
        if numerics == ENVELOPE:
            state.bounds = envelope_bounds(known, contract, number=state.number, term=self._term)
        else:
            state.bounds = make_bounds(
                numerics, known, contract, number=state.number, term=self._term
            )
        return state.bounds

    # -- reports to operators ----------------------------------------------------------------------

    def rows(self, claims: Mapping[NumericsClass, int]) -> list[BoundsRow]:
        """List the classes of a run; `claims` counts its workers by the class that they claim."""
        workers = Counter(claims)
        if self.reads:  # all others count as one
            others = [numerics for numerics in claims if not self.gathered(numerics)]
            workers[ENVELOPE] = sum(workers.pop(numerics) for numerics in others)
        known = [
            *self._classes,
            *(numerics for numerics in workers if numerics not in self._classes),
        ]
        return [
            bounds_row(
                self.bounds_of(numerics) or provisional(numerics),
                self.gathered(numerics),
                workers[numerics],
            )
            for numerics in known[: 2 * MAX_CLASSES]
        ]

    def warnings(self, strangers: Counter[NumericsClass]) -> list[str]:
        """Describe missing references; `strangers` counts the other workers by claimed class."""
        if self.reads:
            return []
        if not self._named:
            return [
                "bounds of noise are provisional: every rollout is audited, and only what no noise explains "
                f"is rejected (weights that are a little off are not): {ADVICE}"
            ]
        return [
            f"{count} worker{'s' if count > 1 else ''} of {numerics} wait{'' if count > 1 else 's'} for bounds "
            f"of noise, without work: {self.missing(numerics)}{self._remedy(numerics)}"
            for numerics, count in strangers.items()
            if self.bounds_of(numerics) is None
        ]

    def missing(self, numerics: NumericsClass, rest_s: float | None = None) -> str:
        """Say what a class without bounds lacks; `rest_s` seconds until it has them, as far as known."""
        gathered = self.gathered(numerics)
        if not self.references:
            return "all workers of verification.references are banned"
        if gathered:
            when = "" if rest_s is None else f", the rest in about {rest_s:.0f} s"
            return f"they are made of {ENOUGH} rollouts of references, {gathered} are in{when}"
        return "no reference of that class has sent work"

    def _remedy(self, numerics: NumericsClass) -> str:
        return "" if self.references and self.gathered(numerics) else f": {ADVICE}"

    def had_bounds(self, numerics: NumericsClass) -> bool:
        """Return whether a class ever had measured bounds in this run."""
        known = self._classes.get(numerics)
        return known is not None and known.number > 0

    def gathered(self, numerics: NumericsClass) -> int:
        """Count the rollouts of references by which a class may be measured."""
        known = self._classes.get(numerics)
        return len(known.references) if known else 0


def bounds_row(bounds: ClassBounds, gathered: int = 0, workers: int = 0) -> BoundsRow:
    """Format the bounds of a class; `gathered` rollouts of references, `workers` that claim it."""
    return BoundsRow(
        str(bounds.numerics),
        0 if bounds.provisional else bounds.number,
        bounds.rollouts,
        bounds.tokens,
        bounds.first_version,
        bounds.last_version,
        bounds.rejected_at_most,
        gathered,
        workers,
    )


def _furthest(measured: Sequence[Evidence], bounds: Thresholds) -> str:
    """Describe the measure that most rollouts have above its bound; of several, the one furthest above."""

    def above(name: str) -> tuple[int, float]:
        values, bound = [getattr(evidence, name) for evidence in measured], getattr(bounds, name)
        # NaN is above every bound
        return sum(not value <= bound for value in values), max(values) / max(bound, 1e-12)

    name = max(MEASURES, key=above)
    most = max(getattr(evidence, name) for evidence in measured)
    return (
        f"{name} is up to {most:.3g} in {above(name)[0]} of {len(measured)}, the bound is "
        f"{getattr(bounds, name):.3g}"
    )


def _within(measured: Sequence[Evidence], bounds: Thresholds) -> bool:
    """Return whether rollouts are within a class's noise.

    At most one in eight may be above a bound to suspect.
    """
    odd = sum(first_above(evidence, bounds) != "" for evidence in measured)
    return 8 * odd <= len(measured)
