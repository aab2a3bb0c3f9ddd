"""An auditor in this process, for tests and benchmarks, where nothing hostile is audited.

A node audits with node/verification/hf_auditor.py, which survives a crash in here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError, one_line
from primerl.node.inference.hf import ComputeThread
from primerl.node.verification.auditor import AuditItem, Measured, Unreadable
from primerl.node.verification.local_audits import portion_size, prefill_costs
from primerl.node.weights.state import State
from primerl.protocol.manifests import RunManifest

if TYPE_CHECKING:
    from primerl.node.verification.prefill_audit import PrefillAudit


class PrefillCore:
    """An Auditor in a thread."""

    loading_s = 0.0

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._thread: ComputeThread | None = None
        self._prefill: PrefillAudit | None = None

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor."""
        if self._thread is not None:
            raise EngineError("the auditor was started before: make another one")
        self._thread = ComputeThread("prefill")
        self._prefill = await self._thread.run(self._open, model_dir, run)

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """See Auditor."""
        if self._thread is None or self._prefill is None:
            raise EngineError("the auditor is not running: call start() first")
        found: list[Measured | Unreadable] = []
        try:
            while len(found) < len(items):
                rest = items[len(found) :]
                portion = rest[: portion_size(prefill_costs(rest))]
                found += await self._thread.run(self._prefill.measure, portion, states)
        except RuntimeError as error:  # torch's own: no memory, no such device
            raise EngineError(
                f"the audit failed ({one_line(error)}): check engine.device and free memory"
            ) from error
        return found

    async def close(self) -> None:
        """See Auditor."""
        self._prefill = None
        if self._thread is not None:
            await self._thread.close()

    def _open(self, model_dir: Path, run: RunManifest) -> "PrefillAudit":
        from primerl.node.verification.auditor import audit_terms
        from primerl.node.verification.prefill_audit import PrefillAudit

        prefill = PrefillAudit(audit_terms(model_dir, run, self._config.device))
        prefill.prepare()
        return prefill
