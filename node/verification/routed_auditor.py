"""An Auditor that uses two: vLLM for whole engines, hf for pipelines over nodes."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

from ...protocol.manifests import RunManifest
from ..weights.state import State
from .auditor import AuditItem, Auditor, Measured, Unreadable


class RoutedAuditor:
    """Router of items with stage boundaries to an auditor that can measure them.

    The process of `staged` starts when needed, so a run without such items has one process. Where there are no
    pipelines, with exact numerics or a kept cache, `whole` gets all items.
    """

    def __init__(self, whole: Auditor, staged: Auditor) -> None:
        self._whole = whole
        self._staged = staged
        self._both = False

    @property
    def loading_s(self) -> float:
        """See Auditor."""
        return self._whole.loading_s + self._staged.loading_s

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor."""
        await self._whole.start(model_dir, run)
        if not run.proofs.vllm_alone:
            await self._staged.start(model_dir, run)
            self._both = True

    async def audit(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """See Auditor."""
        staged = [self._both and bool(item.boundaries) for item in items]
        whole = [not one for one in staged]
        parts = [(self._whole, list(compress(items, whole)))]
        parts.append((self._staged, list(compress(items, staged))))
        found = [iter(await auditor.audit(part, states) if part else []) for auditor, part in parts]
        return [next(found[one]) for one in staged]

    async def close(self) -> None:
        """See Auditor."""
        await asyncio.gather(self._whole.close(), self._staged.close())
