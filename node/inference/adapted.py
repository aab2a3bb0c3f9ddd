"""Merge adapter policies into the base model, for an engine that does not merge them itself.

Callers see an ordinary Engine; the wrapped engine only ever sees whole, merged states. Memory beside the
engine's own: the base and the merged state, both bf16, and a second merged state while the next one is
computed.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from pathlib import Path

from ...protocol.manifests import RunManifest
from ..errors import EngineError
from ..models.model_files import read_base
from ..weights.adapters import MergedAdapters, changes, merge
from ..weights.state import Changed, State, memory_threads
from .engine import Completion, Engine, EngineStats, GenerateRequest
from .hosted import HostedEngine

logger = logging.getLogger(__name__)


class AdaptedEngine:
    """Engine wrapper for a run with adapters; loads run one at a time."""

    def __init__(
        self, engine: Engine, run: RunManifest, fetched: Awaitable[None] | None = None
    ) -> None:
        """Wrap `engine`; start() waits for `fetched` before it reads the base."""
        self._engine = engine
        self._run = run
        self._fetched = fetched
        self._base: State | None = None
        self._held: MergedAdapters | None = None
        self._loading = asyncio.Lock()

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._engine.policy_version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine; `model_dir` also gets the weights of the base. Raises EngineError."""

        async def read() -> State:
            if self._fetched is not None:
                await self._fetched
            return await asyncio.to_thread(read_base, model_dir, self._run.model.base_state)

        self._base, _ = await asyncio.gather(
            read(), self._engine.start(model_dir, fingerprint=fingerprint)
        )

    async def load(self, version: int, state: State) -> None:
        """See Engine; `state` are adapters."""
        async with self._loading:
            merged, _ = await self._merge(state)
            await self._engine.load(version, merged.state)
            self._held = merged

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine. Ignores `changed`: adapters that did not change are the same objects."""
        async with self._loading:
            merged, differs = await self._merge(state)
            if differs is None:
                await self._engine.load(version, merged.state)
            else:
                await self._engine.update(version, merged.state, differs)
            self._held = merged

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        return await self._engine.generate(request)

    def stats(self) -> EngineStats:
        """See Engine."""
        return self._engine.stats()

    async def close(self) -> None:
        """See Engine."""
        await self._engine.close()
        self._base = self._held = None

    async def _merge(self, adapters: State) -> tuple[MergedAdapters, Changed | None]:
        """Merge `adapters` into the base; return the result and its changes to the loaded state.

        Until the caller has loaded the result, the engine's state counts as unknown.
        """
        base, merged = self._base, self._held
        if base is None:
            raise EngineError("the engine is not started: call start() first")
        self._held = None
        return await asyncio.to_thread(self._compute, base, adapters, merged)

    def _compute(
        self, base: State, adapters: State, merged: MergedAdapters | None
    ) -> tuple[MergedAdapters, Changed | None]:
        contract = self._run.adapters
        assert contract is not None  # this engine is only made for runs with adapters
        began = time.perf_counter()
        threads = memory_threads()
        state = merge(base, adapters, contract, before=merged, threads=threads)
        differs = None if merged is None else changes(merged.state, state, threads=threads)
        logger.debug("adapters merged in %.2f s", time.perf_counter() - began)
        return MergedAdapters(adapters, state), differs


def adapted(engine: Engine, run: RunManifest, fetched: Awaitable[None] | None = None) -> Engine:
    """Wrap `engine`, not started, if `run` has adapters that it does not merge itself.

    vLLM merges adapters itself, on its GPUs. Either starts while the base is still being `fetched` into the
    model's directory.
    """
    merges = isinstance(engine, HostedEngine) and engine.merge_adapters(run, fetched)
    return engine if merges or run.adapters is None else AdaptedEngine(engine, run, fetched)
