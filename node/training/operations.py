"""The operations of a learner: each as a request, which may travel to ranks, and as a method of a backend.

A new operation goes into TrainBackend, into Learner and here. No torch.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from .backend import Example, Sample, StepMetrics, TrainBatch

if TYPE_CHECKING:
    from .learner import Learner


class MethodCall(msgspec.Struct, frozen=True, tag="run"):
    """Request to run a method of the learner that gives no figures."""

    method: Literal[
        "compile_step",
        "end_supervised",
        "stage",
        "write_state",
        "write_masters",
        "save",
        "load",
        "export",
    ]
    path: str = ""
    """The file or directory that it writes or reads; empty if it takes none."""

    def perform(self, learner: "Learner") -> dict[str, float]:
        """Run the method."""
        getattr(learner, self.method)(*([Path(self.path)] if self.path else []))
        return {}


class StepCall(msgspec.Struct, frozen=True, tag="step"):
    """Request for one optimizer step."""

    batch: TrainBatch

    def perform(self, learner: "Learner") -> dict[str, float]:
        """Make the step; returns its metrics."""
        return learner.step(self.batch).values

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed."""
        return sum(len(sample.token_ids) for sample in self.batch.samples)


class EvaluateCall(msgspec.Struct, frozen=True, tag="evaluate"):
    """Request to measure cross entropy without learning."""

    samples: list[Sample]

    def perform(self, learner: "Learner") -> dict[str, float]:
        """Measure; returns `loss/mean` and `tokens`."""
        return learner.evaluate(self.samples)

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed."""
        return sum(len(sample.token_ids) for sample in self.samples)


class SupervisedStepCall(msgspec.Struct, frozen=True, tag="supervise"):
    """Request for one warm-up step."""

    examples: list[tuple[list[int], list[int]]]
    lr: float

    def perform(self, learner: "Learner") -> dict[str, float]:
        """Make the step; returns `loss`."""
        return {"loss": learner.supervised_step(self.examples, self.lr)}

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed."""
        return sum(len(prompt) + len(completion) for prompt, completion in self.examples)


class WriteSnapshotCall(msgspec.Struct, frozen=True, tag="snapshot"):
    """Request to write the changes since the last snapshot to a file, or the whole policy."""

    path: str
    whole: bool

    def perform(self, learner: "Learner") -> dict[str, float]:
        """Write the file."""
        learner.write_snapshot(Path(self.path), whole=self.whole)
        return {}


class AdoptCall(msgspec.Struct, frozen=True, tag="adopt"):
    """Request to go on with a published policy, after `step`."""

    path: str
    step: int

    def perform(self, learner: "Learner") -> dict[str, float]:
        """Take over the weights."""
        learner.adopt(Path(self.path), self.step)
        return {}


class ReadMastersCall(msgspec.Struct, frozen=True, tag="masters"):
    """Request to go on with the masters in a file, after `step`."""

    path: str
    step: int

    def perform(self, learner: "Learner") -> dict[str, float]:
        """Take over the masters."""
        learner.read_masters(Path(self.path), self.step)
        return {}


LearnerCall = (
    AdoptCall
    | ReadMastersCall
    | MethodCall
    | StepCall
    | EvaluateCall
    | SupervisedStepCall
    | WriteSnapshotCall
)


def changes_nothing(call: object) -> bool:
    """Return whether the learner stays as it is: if one rank alone fails, all go on."""
    if isinstance(call, MethodCall):
        return call.method in ("write_state", "write_masters", "save", "export")
    return isinstance(call, EvaluateCall | WriteSnapshotCall)


class LearnerBackend(ABC):
    """The methods of a backend that only pass a call on to the learner."""

    async def compile_step(self) -> None:
        """Compile what a step computes, where it is compiled; changes nothing. Raises EngineError."""
        await self._perform(MethodCall("compile_step"))

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Make one optimizer step; an empty batch only advances the schedule. Raises EngineError.

        Steps count upwards: a batch of a step that was trained before raises EngineError.
        """
        return StepMetrics(await self._perform(StepCall(batch)))

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Measure cross entropy per trained token without learning."""
        return await self._perform(EvaluateCall(list(samples)))

    async def save(self, directory: Path) -> None:
        """Write everything needed to resume into `directory`, whole or not at all."""
        await self._perform(MethodCall("save", absolute(directory)))

    async def stage(self) -> None:
        """Copy the content of a checkpoint into the learner's memory; afterwards the weights may change."""
        await self._perform(MethodCall("stage"))

    async def load(self, directory: Path) -> None:
        """Continue exactly from the files that save() wrote. Raises StorageError."""
        await self._perform(MethodCall("load", absolute(directory)))

    async def adopt(self, file: Path, step: int) -> None:
        """See TrainBackend."""
        await self._perform(AdoptCall(absolute(file), step))

    async def write_masters(self, file: Path) -> None:
        """Write the fp32 masters of all trained parameters, whole, as safetensors."""
        await self._perform(MethodCall("write_masters", absolute(file)))

    async def read_masters(self, file: Path, step: int) -> None:
        """See TrainBackend."""
        await self._perform(ReadMastersCall(absolute(file), step))

    async def export(self, directory: Path) -> None:
        """Write the bf16 policy in Hugging Face format, tokenizer and config included."""
        await self._perform(MethodCall("export", absolute(directory)))

    async def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """Make one step of cross entropy on completions; returns the loss per token. For warm_up()."""
        rows = [(list(prompt), list(completion)) for prompt, completion in examples]
        return (await self._perform(SupervisedStepCall(rows, lr)))["loss"]

    async def end_supervised(self) -> None:
        """Reset the optimizer after a warm-up."""
        await self._perform(MethodCall("end_supervised"))

    @abstractmethod
    async def _perform(self, call: LearnerCall) -> dict[str, float]:
        """Have the learner perform `call`, after the calls before it; returns its figures."""


def absolute(path: Path) -> str:
    """Return `path` as a process with another working directory finds it."""
    return os.path.abspath(path)
