"""A trainer backend that only counts, for tests of its callers. No torch.

Its policy is a function of the model directory's name, the seed and the batches it was given, in order:
two of them that saw the same agree, and any difference shows.
"""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from support.waiting import ended

from primerl.crypto.hashing import digest
from primerl.node.errors import EngineError, StorageError
from primerl.node.models.model_files import contract_files
from primerl.node.storage.partial import whole_directory
from primerl.node.storage.run_files import written_by_learner, written_to_model
from primerl.node.training.backend import Sample, Snapshot, StepMetrics, TrainBatch
from primerl.node.weights.checkpoint import read_checkpoint, write_checkpoint
from primerl.node.weights.state import Changed, State, Tensor

WORDS = 16
"""bf16 elements of the only tensor; a BLAKE3 digest holds exactly so many."""


class CountingBackend:
    """TrainBackend without a model."""

    def __init__(self, *, seed: int = 0) -> None:
        self.batches: list[TrainBatch] = []
        """Every batch since start() or load(), for tests to look at."""
        self._seed = seed
        self._model_dir: Path | None = None
        self._step = 0
        self._history = b""
        self._last: State | None = None

    async def start(self, model_dir: Path) -> None:
        """Start a new history."""
        self._model_dir = model_dir
        self._history = digest(f"seed {self._seed}".encode())

    async def compile_step(self) -> None:
        """Compile nothing."""
        self._running()

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Hash `batch` into the history; an empty one only increases the step."""
        self._running()
        if batch.step <= self._step:
            raise EngineError(
                f"step {batch.step} came after step {self._step}: number them upwards"
            )
        self._step = batch.step
        self.batches.append(batch)
        if batch.samples:
            self._history = digest(self._history + msgspec.msgpack.encode(batch))
        tokens = sum(sum(sample.mask[1:]) for sample in batch.samples)
        return StepMetrics({"tokens": float(tokens), "optim/skipped": 0.0})

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return a loss that falls with every step."""
        self._running()
        tokens = sum(sum(sample.mask[1:]) for sample in samples)
        return {"loss/mean": 1.0 / (1 + self._step) if tokens else 0.0, "tokens": float(tokens)}

    async def state(self) -> State:
        """See policy()."""
        return self.policy()

    def policy(self) -> State:
        """One tensor whose bits are the history's digest."""
        self._running()
        bits = np.frombuffer(self._history, dtype="<u2").copy()
        return {"history.weight": Tensor("BF16", (WORDS,), bits)}

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """Make a snapshot of the state, with the changes since the last one."""
        base, state = self._last, self.policy()
        self._last = state
        if base is None:
            return ended(Snapshot(state))
        found = {
            name: np.flatnonzero(tensor.data != base[name].data) for name, tensor in state.items()
        }
        changed: Changed = {name: index for name, index in found.items() if index.size}
        return ended(Snapshot(state, base, changed))

    async def save(self, directory: Path) -> None:
        """Write step and history."""
        self._running()
        record = {"step": self._step, "history": self._history.hex()}
        with whole_directory(directory, written_by_learner, fsync=False) as partial:
            (partial / "counting.json").write_bytes(json.dumps(record).encode())

    async def load(self, directory: Path) -> None:
        """Continue from save(). Raises StorageError."""
        self._running()
        try:
            record = json.loads((directory / "counting.json").read_text())
        except (OSError, ValueError) as error:
            raise StorageError(f"{directory} cannot be read: resume from an earlier one") from error
        self._step, self._history = int(record["step"]), bytes.fromhex(record["history"])
        self.batches = []

    async def adopt(self, file: Path, step: int) -> None:
        """Go on with the history whose digest is in `file`."""
        self._running()
        bits = read_checkpoint(file)["history.weight"].data
        self._step, self._history = step, bits.tobytes()

    async def write_masters(self, file: Path) -> None:
        """Write the history as numbers."""
        self._running()
        bits = np.frombuffer(self._history, dtype="<u4").copy()
        write_checkpoint(file, {"history": Tensor("F32", bits.shape, bits)})

    async def read_masters(self, file: Path, step: int) -> None:
        """Go on with the history in `file`."""
        self._running()
        masters = read_checkpoint(file)
        if masters.keys() != {"history"}:
            raise EngineError(f"the masters in {file} are of another model")
        self._step, self._history = step, masters["history"].data.tobytes()

    async def export(self, directory: Path) -> None:
        """Write the state as model.safetensors beside the contract files of the model directory."""
        model_dir = self._running()
        state = await self.state()
        with whole_directory(directory, written_to_model) as partial:
            for name in contract_files(model_dir):
                shutil.copyfile(model_dir / name, partial / name)
            write_checkpoint(partial / "model.safetensors", state)

    async def close(self) -> None:
        """Stop answering."""
        self._model_dir = None

    def _running(self) -> Path:
        if self._model_dir is None:
            raise EngineError("the trainer backend is not running: call start() first")
        return self._model_dir
