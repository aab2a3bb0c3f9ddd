"""One pipeline, as the trainer keeps it: its plan, whether it works, and who of it is missing."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal
from ...protocol.pipelines import PipelinePlan, StageOffer
from ..ops.control import GroupRow
from ..pipeline.planner import Offered, is_measured, ring_ms

LEDGER = "pipelines"
PLAN_TTL_S = 7 * 86400
"""A plan is sealed anew at half of it. Nobody has to hear of that in time: lines open by the old one as well,
and what ends a plan is a newer generation."""
NEVER = -1e18


class Kept(msgspec.Struct, frozen=True):
    """What survives a restart of the trainer."""

    plans: tuple[PipelinePlan, ...]
    excluded: dict[bytes, str]


@dataclass
class Group:
    """One pipeline."""

    plan: PipelinePlan
    """The newest."""
    heard: float
    """Monotonic seconds of the last word of any stage."""
    missing: set[bytes] = field(default_factory=set[bytes])
    """Stages that are lost and that nobody can replace; the others keep their places and wait."""
    missing_since: float = 0.0
    doubts: dict[bytes, float] = field(default_factory=dict[bytes, float])
    """Stages that call stage 0 lost, and the monotonic seconds at which each first did."""
    void: bool = False
    """The plan counts no more: those that were in it are free for another one."""
    sealed: bytes = b""
    sealed_at: float = NEVER
    """Unix seconds."""

    @property
    def head(self) -> bytes:
        """Stage 0, which has work in its hands."""
        return self.plan.stages[0].node

    @property
    def nodes(self) -> list[bytes]:
        """Its stages, in order."""
        return [stage.node for stage in self.plan.stages]

    def use(self, plan: PipelinePlan, now: float) -> None:
        """A new plan is in force."""
        self.plan, self.heard, self.sealed_at = plan, now, NEVER
        self.missing, self.doubts, self.void = set(), {}, False

    def seal(self, key: SecretKey, run_id: bytes, now: float) -> bytes:
        """The sealed plan; `now` in Unix seconds."""
        if now - self.sealed_at > PLAN_TTL_S / 2:
            expires, sequence = int(now) + PLAN_TTL_S, self.plan.generation
            self.sealed = seal(
                key, Purpose.PIPELINE, run_id, self.plan, expires=expires, sequence=sequence
            )
            self.sealed_at = now
        return self.sealed

    def row(self, offer_of: Callable[[bytes], StageOffer | None]) -> GroupRow:
        """For `status`."""
        plan = self.plan
        offers = ((node, offer_of(node)) for node in self.nodes)
        order = [Offered(node, offer) for node, offer in offers if offer is not None]
        known = len(order) == len(plan.stages) and is_measured(order)
        return GroupRow(
            group=short(plan.group),
            generation=plan.generation,
            stages=[short(node) for node in self.nodes],
            layers=[f"{stage.first}-{stage.end - 1}" for stage in plan.stages],
            spares=len(plan.spares),
            round_trip_ms=round(ring_ms(order, 0), 1) if known else None,
            kv_tokens=plan.shape.kv_tokens,
            state="waiting" if self.void or self.missing else "planned",
        )
