"""HfEngine as the core of a process of its own (host.py): weights come to it in files.

It keeps the state that it computes with on the host, too: an update in a file says only what differs from it.
"""

import asyncio
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config.engine import EngineConfig
from ..ops.errors import EngineError, EngineLost, StorageError
from ..weights.checkpoint import read_checkpoint, read_metadata
from ..weights.state import Changed, State, Tensor
from .engine import Completion, EngineStats, GenerateRequest, WeightsFault, Written
from .handover import POSITIONS, VALUES, WHOLE, read_spans
from .hf import HfEngine


class HfCore:
    """Implements host.Core."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = HfEngine(config)
        self._state: State = {}
        self._staged: tuple[State, Changed] | None = None

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See host.Core."""
        await self._engine.start(model_dir, fingerprint=fingerprint)

    async def check(self, path: str) -> WeightsFault:
        """Nothing is found here: load() refuses what does not fit, and has changed nothing then."""
        return WeightsFault("", [])

    async def load(self, version: int, path: str) -> Written:
        """See Replica."""
        try:
            state = await asyncio.to_thread(read_checkpoint, Path(path))
        except StorageError as error:
            raise EngineError(f"policy {version} cannot be read: {error}") from error
        began = time.monotonic()
        await self._engine.load(version, state)
        self._state = state
        return _written(began)

    async def stage(self, path: str) -> WeightsFault:
        """See Replica."""
        try:
            self._staged = await asyncio.to_thread(read_update, Path(path), self._state)
        except (StorageError, ValueError, LookupError) as error:
            return WeightsFault(f"the update cannot be read ({error})", [])
        return WeightsFault("", [])

    async def write(self, version: int) -> Written:
        """See Replica."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise EngineError("no update is ready: stage one first")
        began = time.monotonic()
        await self._engine.update(version, *staged)
        self._state, _ = staged
        return _written(began)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Replica."""
        try:
            return await self._engine.generate(request)
        except EngineError as error:
            if self._engine.dead:  # another process may do better
                raise EngineLost(str(error)) from error
            raise

    def stats(self) -> EngineStats:
        """See host.Core."""
        return self._engine.stats()

    def stuck_s(self) -> float:
        """Not known: a batch is one call, and a long one takes long."""
        return 0.0

    async def sleep(self) -> None:
        """See Sleepy. Raises EngineError."""
        raise EngineError("hf keeps its memory: set engine.sleep_after_s to 0")

    async def wake(self) -> None:
        """It never slept."""

    async def close(self) -> None:
        """See host.Core."""
        await self._engine.close()


def read_update(path: Path, held: State) -> tuple[State, Changed]:
    """The state that a file of changes (handover.py) makes of `held`, which stays as it is.

    Raises StorageError, and ValueError or LookupError for an update of another state.
    """
    spans, tensors = read_metadata(path), read_checkpoint(path)
    state = dict(held)
    changed: dict[str, NDArray[np.int64] | None] = {}
    for name, tensor in tensors.items():
        if name.startswith(WHOLE):
            state[name.removeprefix(WHOLE)] = tensor
            changed[name.removeprefix(WHOLE)] = None
    for dtype, text in spans.items():
        positions, values = tensors[POSITIONS + dtype].data, tensors[VALUES + dtype].data
        at = 0
        for name, count in read_spans(text):
            where = positions[at : at + count].astype(np.int64)
            data = held[name].data.copy()
            data[where] = values[at : at + count]
            state[name] = Tensor(dtype, held[name].shape, data)
            changed[name] = where
            at += count
    return state, changed


def _written(began: float) -> Written:
    """Nothing is generated while it writes."""
    took = time.monotonic() - began
    return Written(took, took)
