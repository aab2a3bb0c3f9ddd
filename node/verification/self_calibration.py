"""The bounds of noise that a run measures for each class of workers, while it runs.

Invariants:
- only rollouts of workers that the operator named (references) and that are not banned make bounds, measured by
  the trainer itself: a stranger, or a validator, never moves them;
- before a class has bounds of its own no bound of noise judges it: only what no noise explains is rejected;
- what was judged stays judged: new bounds apply to what is verified after they were made.
No I/O, no clock.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ...protocol.manifests import ProofContract, Thresholds, Version
from ...protocol.numerics import MAX_CLASSES, ClassBounds, NumericsClass
from ...protocol.rollouts import Evidence
from ..ops.control import BoundsRow
from .auditor import MEASURES
from .bounds import PROVISIONAL, bands, false_positives
from .judge import first_above

KEPT = 2048
"""Rollouts of a class, the newest, that its bounds are made of."""
ENOUGH = 64
"""The first bounds of a class are made of so many rollouts: bands() then extrapolates both tails, and the share
of honest rollouts that they reject is below 5 %, shown with 95 % confidence."""
RENEW = 64
"""New rollouts after which the bounds of a class are made anew: the noise moves with the policy."""
WIDER = 1.5
"""Bounds to reject are WIDER + ENOUGH / N times those of bands() for N rollouts, as the first rollouts of one
machine have not shown the tail. Bounds to suspect are not widened: they tell what lies between."""
ADVICE = "name a worker of yours in verification.references, or run `primerl-node calibrate`"

UNKNOWN = NumericsClass()


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """One measured rollout of a reference worker."""

    node: bytes
    version: Version
    """The newest policy version that drew any of it."""
    evidence: Evidence


@dataclass(frozen=True)
class AuditConditions:
    """How a submission is judged, and whether it may be learned from."""

    contract: ProofContract
    """The run's, with the bounds that judge."""
    bounds: ClassBounds | None = None
    """These bounds, in a run that measures them."""
    all_audited: bool = False
    """Whether every rollout is audited, whatever the worker's record."""
    placing: bool = False
    """Whether it is among the first of its worker: suspects then tell of its class, not of fraud."""
    by_trainer: bool = False
    """Whether the trainer has to measure it itself."""
    unlearned: str = ""
    """Why nothing of it is learned from; empty if what is clean is."""


@dataclass
class ClassState:
    """The references of one class and the bounds made of them."""

    references: deque[Reference] = field(default_factory=lambda: deque[Reference](maxlen=KEPT))
    bounds: ClassBounds | None = None
    number: int = 0
    """Of the last bounds, also where they hold no more."""
    fresh: int = 0
    """Rollouts since they were made."""


class SelfCalibration:
    """Measures the bounds of each class, and says which bounds judge a worker."""

    def __init__(self, contract: ProofContract, references: Iterable[bytes] = ()) -> None:
        """`references`: node ids of the workers that the operator vouches for."""
        self._contract = contract
        self.references = frozenset(references)
        self._named = bool(self.references)
        """Whether there ever were any: a run whose references are banned is not one that never had some."""
        self._classes: dict[NumericsClass, ClassState] = {}
        self._term = 0

    def vouched(self, makers: Iterable[bytes]) -> bool:
        """Whether all nodes that made a submission together are references."""
        return bool(self.references) and self.references.issuperset(makers)

    # -- what judges a worker ----------------------------------------------------------------------

    def conditions(
        self, makers: Sequence[bytes], own: NumericsClass, *, placed: bool
    ) -> AuditConditions:
        """Choose the bounds for a submission of these nodes, which claims class `own`.

        `placed`: the first rollouts of its worker were found to be of that class.
        """
        measured, vouched = self.bounds_of(own), self.vouched(makers)
        if measured is not None and not vouched:
            applied = measured.applied(self._contract)
            return AuditConditions(applied, measured, all_audited=not placed, placing=not placed)
        bounds = provisional(own)
        unlearned = ""
        if self._named and not vouched:
            unlearned = f"the noise of {own} is not measured in this run"
        return AuditConditions(
            bounds.applied(self._contract),
            bounds,
            all_audited=measured is None,
            by_trainer=vouched,
            unlearned=unlearned,
        )

    def bounds_of(self, numerics: NumericsClass) -> ClassBounds | None:
        """The measured bounds of a class; None while it has none."""
        known = self._classes.get(numerics)
        return known.bounds if known else None

    def misplaced(self, numerics: NumericsClass, seen: Sequence[Evidence]) -> str:
        """Say that rollouts are not those of the class, and of which one they could be."""
        typical = max(seen, key=lambda one: one.fingerprint, default=None)
        said = f"it claims {numerics}, and its first rollouts do not lie within the noise of that class"
        alike = [
            other
            for other, state in self._classes.items()
            if other != numerics and state.bounds and _within(seen, state.bounds.suspect)
        ]
        if alike:
            return f"{said}: they look like {alike[0]}"
        bounds = self.bounds_of(numerics)
        if typical is None or bounds is None:
            return said
        return (
            f"{said}: fingerprint distances up to {typical.fingerprint:.3g}, its bound to suspect is "
            f"{bounds.suspect.fingerprint:.3g}; they look like no class that was measured"
        )

    # -- what bounds are made of -------------------------------------------------------------------

    def add(
        self,
        makers: Sequence[bytes],
        numerics: NumericsClass,
        measured: Sequence[tuple[int, Evidence]],
    ) -> tuple[list[Reference], ClassBounds | None]:
        """Take in clean (version, evidence) that the trainer measured of `makers`, the worker first.

        Rollouts that a node which is no reference had a part in are ignored.

        Returns:
            what was taken, and new bounds of the class if they are due.
        """
        if not self.vouched(makers) or numerics == UNKNOWN:
            return [], None
        if numerics not in self._classes and len(self._classes) >= MAX_CLASSES:
            return [], None
        state = self._classes.setdefault(numerics, ClassState())
        taken = [Reference(makers[0], version, seen) for version, seen in measured]
        state.references.extend(taken)
        state.fresh += len(taken)
        due = ENOUGH if state.bounds is None else RENEW
        if not taken or state.fresh < due or len(state.references) < ENOUGH:
            return taken, None
        return taken, self._renew(numerics, state)

    def drop(self, node: bytes) -> list[ClassBounds]:
        """Forget what a banned reference contributed, and make the bounds that it had a part in anew.

        Returns:
            the new bounds; provisional ones where too few rollouts are left.
        """
        self.references -= {node}
        return self._keep(lambda one: one.node != node)

    def go_back(self, term: int, version: int) -> list[ClassBounds]:
        """Go on from policy `version` in epoch `term`: forget rollouts of later versions. Returns as drop()."""
        self._term = term
        return self._keep(lambda one: one.version <= version)

    def restore(
        self, rows: Mapping[NumericsClass, Sequence[Reference]], made: Iterable[ClassBounds]
    ) -> None:
        """Take over what was kept before a restart: references of each class, oldest first, and bounds."""
        for numerics, references in rows.items():
            state = self._classes.setdefault(numerics, ClassState())
            state.references.extend(one for one in references if one.node in self.references)
            state.fresh = len(state.references)
        for bounds in made:
            state = self._classes.setdefault(bounds.numerics, ClassState())
            state.number = bounds.number
            if not bounds.provisional:
                state.bounds, state.fresh = bounds, 0

    def _keep(self, wanted: Callable[[Reference], bool]) -> list[ClassBounds]:
        changed: list[ClassBounds] = []
        for numerics, state in self._classes.items():
            kept = [one for one in state.references if wanted(one)]
            if len(kept) == len(state.references):
                continue
            state.references = deque(kept, maxlen=KEPT)
            if state.bounds is None:
                state.fresh = len(kept)
            elif len(kept) >= ENOUGH:
                changed.append(self._renew(numerics, state))
            else:
                state.number, state.bounds, state.fresh = state.number + 1, None, len(kept)
                changed.append(replace(provisional(numerics), number=state.number, term=self._term))
        return changed

    def _renew(self, numerics: NumericsClass, state: ClassState) -> ClassBounds:
        state.number, state.fresh = state.number + 1, 0
        state.bounds = make_bounds(
            numerics, list(state.references), self._contract, number=state.number, term=self._term
        )
        return state.bounds

    # -- what operators see ------------------------------------------------------------------------

    def rows(self, claims: Mapping[NumericsClass, int]) -> list[BoundsRow]:
        """List the classes of a run; `claims` counts its workers by the class that they claim."""
        known = [*self._classes, *(one for one in claims if one not in self._classes)]
        return [
            bounds_row(
                self.bounds_of(one) or provisional(one), self._gathered(one), claims.get(one, 0)
            )
            for one in known[: 2 * MAX_CLASSES]
        ]

    def warnings(self, strangers: Counter[NumericsClass]) -> list[str]:
        """Say what is missing; `strangers` counts the workers that are no references, by claimed class."""
        if not self._named:
            return [
                "bounds of noise are provisional: every rollout is audited, and only what no noise explains "
                f"is rejected (weights that are a little off are not): {ADVICE}"
            ]
        return [
            f"nothing is learned from {count} worker{'s' if count > 1 else ''} of {one}: "
            f"{self._missing(one)}"
            for one, count in strangers.items()
            if self.bounds_of(one) is None
        ]

    def _missing(self, numerics: NumericsClass) -> str:
        gathered = self._gathered(numerics)
        if not self.references:
            return f"all workers of verification.references are banned: {ADVICE}"
        if gathered:
            return f"bounds for it are made of {ENOUGH} rollouts of references, {gathered} are in"
        return f"no reference is of that class: {ADVICE}"

    def _gathered(self, numerics: NumericsClass) -> int:
        known = self._classes.get(numerics)
        return len(known.references) if known else 0


def bounds_row(bounds: ClassBounds, gathered: int = 0, workers: int = 0) -> BoundsRow:
    """Show the bounds of a class; `gathered` rollouts of references are in, `workers` claim it."""
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


def provisional(numerics: NumericsClass) -> ClassBounds:
    """Make the bounds of a class of which nothing was measured."""
    return ClassBounds(numerics, 0, PROVISIONAL, PROVISIONAL, 0.0, 0, 0)


def make_bounds(
    numerics: NumericsClass,
    references: Sequence[Reference],
    contract: ProofContract,
    *,
    number: int,
    term: int,
) -> ClassBounds:
    """Make the bounds of a class of at least ENOUGH rollouts; no wider than provisional ones."""
    honest = [one.evidence for one in references]
    found = bands(honest)
    errors = false_positives(honest, contract)
    factor = WIDER + ENOUGH / len(honest)
    reject = {name: factor * getattr(found.reject, name) for name in MEASURES}
    # rounding that auditor and worker share scatters it without end: the sequential test weighs it instead
    reject["other_policy"] = PROVISIONAL.other_policy
    versions = [one.version for one in references]
    return ClassBounds(
        numerics=numerics,
        number=number,
        reject=_narrower(Thresholds(**reject)),
        suspect=_narrower(found.suspect),
        other_scale=found.other_scale,
        rollouts=len(honest),
        tokens=sum(one.tokens for one in honest),
        term=term,
        first_version=min(versions),
        last_version=max(versions),
        rejected_at_most=errors.rejected_at_most,
        suspected_at_most=errors.suspected_at_most,
    )


def _narrower(found: Thresholds) -> Thresholds:
    return Thresholds(*(min(getattr(found, name), getattr(PROVISIONAL, name)) for name in MEASURES))


def _within(seen: Sequence[Evidence], bounds: Thresholds) -> bool:
    """Whether rollouts lie within a class's noise: no more than one in eight is above a bound to suspect."""
    odd = sum(first_above(one, bounds) != "" for one in seen)
    return 8 * odd <= len(seen)
