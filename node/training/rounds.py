"""A learner's part of an outer step: inner steps on its samples, and what of them is sent.

Invariants: every round begins from the masters of one version; samples travel as numbers alone, and how they
are trained is the run's, where they are trained this node's.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ...protocol.manifests import Artifact
from ..config.training import ComputeConfig, LossConfig, TrainingConfig
from ..errors import EngineError, StorageError
from ..storage.chunk_store import Disk, Store, read_chunk
from ..weights.artifacts import store_artifact
from ..weights.checkpoint import read_checkpoint, write_checkpoint
from ..weights.state import State, Tensor, floats
from .backend import RUINED, SKIPPED, Sample, SampleTerms, TrainBackend, TrainBatch
from .outer import Floats, Gated, OuterState, SparseChange, decode, encode, gate

FILE = "masters.safetensors"
OUTER, RESIDUAL = "outer.safetensors", "residual.safetensors"
"""Files in a checkpoint of the leader."""
LAST = ("optim/lr",)
"""Figures of which the last inner step's counts."""
SUMS = ("tokens", "samples/malformed", "samples/too_long")
MOST = (SKIPPED, RUINED)
Batches = list[list[Sample]]


class LearnerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How all learners of a run train."""

    training: Annotated[str, msgspec.Meta(max_length=32_768)]
    """TrainingConfig as JSON."""
    max_steps: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Inner steps of the run, which shape the schedule of the learning rate."""
    seed: int
    temperature: float
    own: Annotated[dict[str, SampleTerms], msgspec.Meta(max_length=64)] = {}

    def config(self, own: ComputeConfig) -> TrainingConfig:
        """Return the run's config with what `own` says of this machine. Raises EngineError."""
        try:
            config = TrainingConfig.model_validate_json(self.training)
        except ValueError as error:
            raise EngineError(
                f"the run's training config is of another release: {error}"
            ) from error
        own_losses = [LossConfig.model_validate_json(terms.loss) for terms in self.own.values()]
        if not all(loss.is_plain for loss in (config.loss, *own_losses)):
            raise EngineError(
                "this run's loss is code of its trainer's, or reads a reference model: no learner does"
            )
        return config.model_copy(
            update={name: getattr(own, name) for name in ComputeConfig.model_fields}
        )


def split(samples: Sequence[Sample], shares: Sequence[float], inner_steps: int) -> list[Batches]:
    """Cut samples, in their order, into a share for each learner, and each of these into inner batches.

    Shares are of tokens, of rollouts and of demonstrations alike; every inner batch has a sample if there are
    enough. Equal arguments, equal parts.
    """
    weights = [share / inner_steps for share in shares for _ in range(inner_steps)]
    flat: Batches = [[] for _ in weights]
    for given in (False, True):
        kind = [sample for sample in samples if sample.given == given]
        sizes = np.array([len(sample.token_ids) for sample in kind], np.float64)
        bounds = np.cumsum(weights) / sum(weights) * sizes.sum()
        middles = np.cumsum(sizes) - sizes / 2
        places = np.minimum(np.searchsorted(bounds, middles), len(weights) - 1)
        for place, sample in zip(places.tolist(), kind, strict=True):
            flat[place].append(sample)
    return [flat[at : at + inner_steps] for at in range(0, len(flat), inner_steps)]


def trained_tokens(batches: Batches, *, given: bool = True) -> int:
    """Count the tokens that are trained; those of demonstrations too, unless `given` is False."""
    return sum(
        sum(sample.mask[1:]) for batch in batches for sample in batch if given or not sample.given
    )


def encode_samples(batches: Batches) -> bytes:
    """Encode the samples of an assignment."""
    return msgspec.msgpack.encode(batches)


def decode_samples(data: bytes) -> Batches:
    """Decode samples. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Batches)


def store_change(store: Store, outer: OuterState, gated: Gated, keep: set[bytes]) -> Artifact:
    """Store what a node sends of its change since `outer`, and keep it. Raises StorageError."""
    return store_artifact(
        store,
        encode(outer.masters, gated),
        base_version=outer.version,
        base_state=outer.digest,
        keep=keep,
    )


def read_change(store: Store, outer: OuterState, artifact: Artifact) -> SparseChange:
    """Decode a contribution whose chunks are here. Raises ContributionError, StorageError."""
    return decode(outer, (read_chunk(store, chunk.digest) for chunk in artifact.chunks))


class InnerLoop:
    """Rounds of inner steps of one backend."""

    def __init__(self, backend: TrainBackend, directory: Path) -> None:
        """`directory` is for the files by which masters come and go."""
        self._backend = backend
        self._file = directory / FILE
        self.residual: Mapping[str, Floats] = {}
        """What was not sent."""

    async def masters(self) -> State:
        """Return the masters. Raises EngineError, StorageError."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._backend.write_masters(self._file)
            return await asyncio.to_thread(read_checkpoint, self._file)
        finally:
            self._file.unlink(missing_ok=True)

    async def rebase(self, masters: State, step: int) -> None:
        """Go on with these masters after inner step `step`. Raises EngineError, StorageError."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.to_thread(write_checkpoint, self._file, masters, disk=Disk(fsync=False))
            await self._backend.read_masters(self._file, step)
        finally:
            self._file.unlink(missing_ok=True)

    async def train(self, first_step: int, batches: Batches) -> dict[str, float]:
        """Take the inner steps of a round; return their figures, weighed by tokens. Raises EngineError."""
        figures = [
            (await self._backend.step(TrainBatch(step, samples))).values
            for step, samples in enumerate(batches, first_step)
        ]
        return together(figures)

    async def change(self, outer: OuterState) -> Gated:
        """Split the change since `outer` into what is sent and what is kept; the latter becomes the residual.

        Raises EngineError, StorageError.
        """
        local = await self.masters()
        gated = await asyncio.to_thread(gate, outer.masters, local, self.residual)
        self.residual = gated.residual
        return gated


def together(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of several inner steps as those of one: means by tokens, sums, or the worst."""
    weights = [max(1.0, values.get("tokens", 0.0)) for values in figures]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for values in figures for name in values):
        given = [
            (values[name], weight)
            for values, weight in zip(figures, weights, strict=True)
            if name in values
        ]
        if name in LAST:
            merged[name] = given[-1][0]
        elif name in SUMS:
            merged[name] = math.fsum(value for value, _ in given)
        elif name in MOST:
            merged[name] = max(value for value, _ in given)
        else:
            total = math.fsum(weight for _, weight in given)
            merged[name] = math.fsum(value * weight for value, weight in given) / total
    return merged


def as_state(residual: Mapping[str, Floats], like: State) -> State:
    """Return a residual as a state laid out as `like`, for a file."""
    return {
        name: Tensor("F32", like[name].shape, values.view("<u4"))
        for name, values in residual.items()
    }


def read_residual(path: Path) -> Mapping[str, Floats]:
    """Read a residual of as_state(). Raises StorageError."""
    state = read_checkpoint(path)
    if any(tensor.dtype != "F32" for tensor in state.values()):
        raise StorageError(f"{path} is no residual: resume from an earlier checkpoint")
    return {name: floats(tensor) for name, tensor in state.items()}
