"""What the verifier asks for: an audit of some rollouts of one submission, wherever it is made.

The trainer's own auditor answers it here; validators answer it from afar (roles/auditing.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...protocol.leases import Lease
from ..weights.state import State
from .auditor import AuditItem, Auditor, Measured, Unreadable
from .checks import CheckedRollout


@dataclass(frozen=True)
class AuditTarget:
    """One rollout to audit, with its items: one per branch."""

    rollout: CheckedRollout
    items: Sequence[AuditItem]


@dataclass(frozen=True)
class AuditCall:
    """Rollouts of one submission."""

    sealed: bytes
    """The submission as it came, sealed by the worker."""
    digest: bytes
    lease: Lease
    node: bytes
    challenge: bytes
    """What was drawn after the receipt, and decided what is audited."""
    chosen: Sequence[AuditTarget]
    states: Mapping[int, State]
    """Every version that is claimed, and every one in `others`."""
    others: Mapping[int, Sequence[int]]
    """Claimed version -> versions that might have been used instead."""


@dataclass(frozen=True)
class AuditAnswer:
    """`measured` holds one list per chosen rollout, one entry per branch."""

    measured: Sequence[Sequence[Measured | Unreadable]]
    validator: bytes = b""
    """Who measured, if not this node."""


class AuditService(Protocol):
    """Whoever can have rollouts audited."""

    async def audit(self, call: AuditCall) -> AuditAnswer:
        """Measure every chosen rollout. Raises EngineError when nobody can."""
        ...


class LocalAudits:
    """Audits by this node's own auditor."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor

    async def audit(self, call: AuditCall) -> AuditAnswer:
        """See Audits."""
        items = [item for one in call.chosen for item in one.items]
        measured = iter(await self._auditor.audit(items, call.states, call.others))
        return AuditAnswer([[next(measured) for _ in one.items] for one in call.chosen])
