"""Hand weights to engine processes of this user in a file: a whole state, or its changes.

A file is in shared memory if there is room, and is deleted when its `async with` ends.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import RunManifest
from ..errors import EngineError, EngineLost, StorageError
from ..models.model_files import base_layout
from ..weights.adapters import LowRank, check_adapters
from ..weights.checkpoint import read_checkpoint, read_metadata, write_checkpoint
from ..weights.payload import ordered
from ..weights.state import BITS, Changed, State, Tensor, memory_threads, numel
from ..weights.state_history import StepChanges, TensorLayout, layout, state_bytes, take
from .engine import Replica, WeightsFault, Written

logger = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R", bound=Replica)

ADAPTERS = "adapters"
"""Metadata key of a file of adapters: JSON of the directory of their base, and of the scale
of their product."""
WHOLE, POSITIONS, VALUES = "whole:", "positions:", "values:"
"""Prefixes of tensor names in a file of changes. WHOLE + name is one complete tensor.
POSITIONS + dtype and VALUES + dtype are the changed positions and new values of all tensors of that dtype,
concatenated; the metadata name these tensors with their counts. A few long arrays travel to a GPU much
faster than many short ones."""
WHOLE_FROM = 8
"""Share of changed elements, one in this many, above which a tensor is written whole.

Positions and values take three times the bytes of the values in the file, and five times on a GPU.
"""


FEW = 2**20
"""Most positions that one thread gathers alone."""


@dataclass(frozen=True)
class AdapterBase:
    """A base model in a directory, into which engines merge adapters."""

    directory: Path
    contract: LowRank
    layout: Mapping[str, TensorLayout]
    """Layouts of the base's tensors, by name."""

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of a file of adapters on this base."""
        scale = self.contract.alpha / self.contract.rank
        return {ADAPTERS: json.dumps({"directory": str(self.directory), "scale": scale})}


def read_adapter_base(directory: Path, run: RunManifest) -> AdapterBase | None:
    """Read and prove the base of a run whose policies are adapters; None for another run.

    Raises EngineError.
    """
    if run.adapters is None:
        return None
    return AdapterBase(directory, run.adapters, base_layout(directory, run.model.base_state))


@dataclass(frozen=True)
class Delta:
    """Content of a file that turns a known state into a new one."""

    tensors: State
    metadata: dict[str, str]
    """dtype -> JSON of [[name, count], ...]; or the metadata of a file of adapters."""


def make_delta(state: State, changed: Changed, whole: Collection[str]) -> Delta:
    """Collect the changes of `state`; positions must have been checked.

    `whole` names tensors that can only be written whole.
    """
    if isinstance(changed, StepChanges) and not any(name in whole for name in changed):
        return _delta_of_step(changed)
    tensors: dict[str, Tensor] = {}
    sparse: dict[str, dict[str, NDArray[np.int64]]] = {}
    layouts = layout(state)
    for name, positions in changed.items():
        dtype, shape = layouts[name]
        if positions is None or name in whole or WHOLE_FROM * len(positions) > numel(shape):
            tensors[WHOLE + name] = state[name]
        elif len(positions):
            sparse.setdefault(dtype, {})[name] = positions
    spans: dict[str, str] = {}
    for dtype, group in sparse.items():
        narrow = all(numel(layouts[name][1]) <= 2**31 for name in group)
        tensors |= _gathered(state, dtype, group, narrow=narrow)
        spans[dtype] = json.dumps([[name, len(positions)] for name, positions in group.items()])
    return Delta(tensors, spans)


def _delta_of_step(step: StepChanges) -> Delta:
    """Hand over the differences of neighbours as a history has them: nothing is gathered."""
    dtype, counts, positions, _, _ = step.edits
    where = Tensor("I32" if positions.itemsize == 4 else "I64", positions.shape, positions)
    values = Tensor(dtype, step.new_bits.shape, step.new_bits)
    tensors = {POSITIONS + dtype: where, VALUES + dtype: values}
    return Delta(tensors, {dtype: json.dumps(list(counts.items()))})


def read_spans(text: str) -> list[tuple[str, int]]:
    """Decode the (name, count) pairs of one dtype."""
    return [(name, count) for name, count in json.loads(text)]


def read_update(path: Path, base: State) -> tuple[State, Changed]:
    """Apply a file of changes to a copy of `base`; the inverse of make_delta().

    Raises StorageError, and ValueError or LookupError for an update of another state.
    """
    spans, tensors = read_metadata(path), read_checkpoint(path)
    state = dict(base)
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
            data = base[name].data.copy()
            data[where] = values[at : at + count]
            state[name] = Tensor(dtype, base[name].shape, data)
            changed[name] = where
            at += count
    return state, changed


@contextlib.asynccontextmanager
async def shared_file(
    state: State, metadata: Mapping[str, str] | None = None
) -> AsyncGenerator[str]:
    """Write `state` to a private safetensors file, deleted on exit. Raises EngineError."""
    with tempfile.TemporaryDirectory(
        prefix="primerl-", dir=_shared_memory(state_bytes(state)), ignore_cleanup_errors=True
    ) as directory:
        path = Path(directory) / "state.safetensors"
        try:
            await asyncio.to_thread(write_checkpoint, path, state, metadata=metadata)
        except StorageError as error:
            raise EngineError(f"the weights cannot be handed to the engine: {error}") from error
        yield str(path)


class HostedPolicy:
    """Policy of the replicas, given to them in one file: all check it, stage it, then write it.

    Its methods are called one after the other. A replica that is lost meanwhile is skipped: it gets the newest
    policy when it is back.
    """

    def __init__(self, *, renews: bool = True) -> None:
        """`renews`: keep the state in memory, so that renew() can give it to a restarted replica."""
        self._renews = renews
        self.version = -1
        """Newest version that an engine has; -1 before the first load()."""
        self.base: AdapterBase | None = None
        """Base that engines merge adapters into, set before the first load(); None without adapters."""
        self._state: State = {}
        self._layout: dict[str, TensorLayout] = {}
        self._placeless: frozenset[str] = frozenset()
        self.gate = asyncio.Lock()
        """Lock held while the replicas are given a version, or while one of them rejoins."""
        self.replicas_changed = asyncio.Event()
        """Event set when a replica is lost or works again."""

    async def load(self, engines: Sequence[Replica], version: int, state: State) -> None:
        """Give all `engines` a whole state.

        Raises EngineError, and changes nothing, if it does not fit; EngineLost if no engine has it now.
        """
        if self.base is not None:
            check_adapters(self.base.layout, state, self.base.contract)
        async with shared_file(state, self._metadata) as path:
            await self._check(engines, path)
            written = await _of_all(engines, lambda engine: engine.load(version, path))
        self._hold(version, state, [result for _, result in written])

    async def update(
        self, engines: Sequence[Replica], version: int, state: State, changed: Changed
    ) -> None:
        """Give all `engines` the changes; an engine that cannot prepare them gets the whole state.

        Raises as load().
        """
        if self.version < 0 or layout(state) != self._layout:
            await self.load(engines, version, state)  # reports what does not fit
            return
        if self.base is None:
            delta = await asyncio.to_thread(make_delta, state, changed, self._placeless)
        else:  # an engine that merges adapters finds the changed weights itself
            check_adapters(self.base.layout, state, self.base.contract)
            delta = Delta(state, self._metadata)
        async with shared_file(delta.tensors, delta.metadata) as path:
            staged = await _of_all(engines, lambda engine: engine.stage(path))
            ready = [engine for engine, answer in staged if not answer.fault]
            refused = [engine for engine, answer in staged if answer.fault]
            written = await _of_all(ready, lambda engine: engine.write(version)) if ready else []
        if written:
            self._hold(version, state, [result for _, result in written])
        if refused:
            fault = next(answer.fault for _, answer in staged if answer.fault)
            logger.warning("policy %d is loaded whole: %s", version, fault)
            await self.load(refused, version, state)

    async def renew(self, engine: Replica) -> None:
        """Give a restarted engine the newest policy, if there is one. Raises EngineError."""
        if self.version >= 0:
            async with shared_file(self._state, self._metadata) as path:
                if fault := (await engine.check(path)).fault:
                    raise EngineError(f"the engine refuses the policy that it held: {fault}")
                await engine.load(self.version, path)

    @property
    def _metadata(self) -> dict[str, str]:
        return {} if self.base is None else self.base.metadata

    async def _check(self, engines: Sequence[Replica], path: str) -> None:
        checks: list[WeightsFault] = [
            check for _, check in await _of_all(engines, lambda engine: engine.check(path))
        ]
        if fault := next((check.fault for check in checks if check.fault), ""):
            raise EngineError(f"the state does not fit the model: {fault}")
        placeless = frozenset().union(*(check.placeless for check in checks))
        if placeless - self._placeless:
            logger.info("the engines keep these in forms of their own: %s", sorted(placeless))
        self._placeless = placeless

    def _hold(self, version: int, state: State, written: Sequence[Written]) -> None:
        self.version, self._layout = version, layout(state)
        self._state = state if self._renews else {}
        pause, writing = (
            max(result.paused_s for result in written),
            max(result.writing_s for result in written),
        )
        logger.info("policy %d loaded, paused for %.4f s, %.4f s to write", version, pause, writing)


def _gathered(
    state: State, dtype: str, group: dict[str, NDArray[np.int64]], *, narrow: bool
) -> dict[str, Tensor]:
    count = sum(map(len, group.values()))
    where = np.empty(count, "<u4" if narrow else "<u8")
    values = np.empty(count, BITS[dtype])

    def gather(name: str, positions: NDArray[np.int64], end: int) -> None:
        part = slice(end - len(positions), end)
        where[part] = positions
        take(state, name, positions, values[part])  # positions were checked: none is clipped

    ends = accumulate(map(len, group.values()))
    threads = memory_threads() if count > FEW else 1  # numpy releases the GIL
    for _ in ordered(gather, zip(group, group.values(), ends, strict=True), threads):
        pass
    return {
        POSITIONS + dtype: Tensor("I32" if narrow else "I64", (count,), where),
        VALUES + dtype: Tensor(dtype, (count,), values),
    }


async def _of_all(
    engines: Sequence[R], ask: Callable[[R], Coroutine[Any, Any, A]]
) -> list[tuple[R, A]]:
    """Ask all `engines`; return the answers of those that were not lost.

    Raises the first other error; EngineLost if all were lost.
    """
    answers = await asyncio.gather(*map(ask, engines), return_exceptions=True)
    answered: list[tuple[R, A]] = []
    lost: EngineLost | None = None
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, EngineLost):
            lost = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answered.append((engine, answer))
    if not answered:
        raise lost or EngineLost("no engine is there: wait until it is started again")
    return answered


def _shared_memory(size: int) -> str | None:
    """Return a directory in memory with ample room for `size` bytes; None if there is none."""
    memory = "/dev/shm"
    # containers often have 64 MiB there, and writing past the end of a tmpfs kills the process
    roomy = os.path.isdir(memory) and shutil.disk_usage(memory).free > 2 * size
    return memory if roomy else None
