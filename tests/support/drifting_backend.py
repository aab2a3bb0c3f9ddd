"""A trainer backend with masters that drift: each batch moves them in a direction of its own. No torch."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.witness import Fakes, WitnessBackend

from primerl.crypto.hashing import digest
from primerl.node.errors import EngineError
from primerl.node.training.backend import StepMetrics, TrainBatch
from primerl.node.weights.checkpoint import read_checkpoint, write_checkpoint
from primerl.node.weights.state import State, Tensor

SIZE = 64
"""Elements of each of the two masters."""
NAMES = ("a", "b")
SCALE = 1e-3
MASTERS = "drifting.safetensors"
Floats = NDArray[np.float32]


class DriftingBackend(WitnessBackend):
    """TrainBackend whose policy is its masters, rounded. What a step learned is multiplied by `factor`."""

    def __init__(self, fakes: Fakes, factor: float = 1.0) -> None:
        super().__init__(fakes)
        self.masters: dict[str, Floats] = {name: np.ones(SIZE, np.float32) for name in NAMES}
        self._factor = factor
        self._staged: dict[str, Floats] = {}

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Move every master by SCALE or so, mostly along the same way."""
        figures = await super().step(batch)
        if batch.samples:
            for name in NAMES:
                seed = int.from_bytes(digest(self._history + name.encode())[:8], "little")
                noise = np.random.default_rng(seed).standard_normal(SIZE)
                move = (SCALE * (1 + 0.5 * noise)).astype(np.float32)
                self.masters[name] = (self.masters[name] + self._factor * move).astype(np.float32)
        return figures

    def policy(self) -> State:
        """The masters in bf16."""
        self._running()
        bits = {name: own.view(np.uint32) for name, own in self.masters.items()}
        rounded = {
            name: ((own + 0x7FFF + ((own >> 16) & 1)) >> 16).astype("<u2")
            for name, own in bits.items()
        }
        return {name: Tensor("BF16", (SIZE,), own) for name, own in rounded.items()}

    async def write_masters(self, file: Path) -> None:
        """See TrainBackend."""
        self._running()
        write_checkpoint(file, _state(self.masters))

    async def read_masters(self, file: Path, step: int) -> None:
        """See TrainBackend."""
        self._running()
        masters = read_checkpoint(file)
        if set(masters) != set(NAMES):
            raise EngineError(f"the masters in {file} are of another model")
        self.masters = {name: own.data.view(np.float32) for name, own in masters.items()}
        self._step = step

    async def adopt(self, file: Path, step: int) -> None:
        """See TrainBackend."""
        policy = read_checkpoint(file)
        bits = {name: policy[name].data.astype(np.uint32) << 16 for name in NAMES}
        self.masters = {name: own.view(np.float32) for name, own in bits.items()}
        self._step = step

    async def stage(self) -> None:
        """See StagingBackend."""
        self._staged = dict(self.masters)

    async def write_staged(self, directory: Path) -> None:
        """See StagingBackend."""
        await self.save(directory)
        write_checkpoint(directory / MASTERS, _state(self._staged))

    async def load(self, directory: Path) -> None:
        """Continue from write_staged()."""
        await super().load(directory)
        masters = read_checkpoint(directory / MASTERS)
        self.masters = {name: own.data.view(np.float32) for name, own in masters.items()}


def _state(masters: dict[str, Floats]) -> State:
    return {
        name: Tensor("F32", own.shape, np.ascontiguousarray(own).view("<u4"))
        for name, own in masters.items()
    }
