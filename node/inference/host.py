"""Process that holds an engine for a node: answers concurrent requests on standard input.

It ends when its input or its parent ends (node/process/serve.py).
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol, runtime_checkable

from ..config.engine import EngineConfig
from ..errors import EngineError, EngineLost, NodeError, named_line
from ..process.frames import ProcessMessage
from ..process.heap import freeze_libraries
from ..process.serve import Outbox, serve_parent
from ..process.spawn import kill_group
from ..tasks import end_tasks
from .engine import EngineStats, Replica, Written
from .host_messages import (
    FAULT,
    LOST,
    MAX_FRAME,
    REQUESTS,
    USAGE,
    ApiOptions,
    EngineAnswer,
    EngineCheck,
    EngineDone,
    EngineDraw,
    EngineDrawn,
    EngineDrop,
    EngineFailed,
    EngineImport,
    EngineKeep,
    EngineKept,
    EngineLoad,
    EnginePing,
    EnginePong,
    EnginePrefill,
    EnginePrefilled,
    EngineRecall,
    EngineRejoin,
    EngineRequest,
    EngineSetUp,
    EngineStage,
    EngineWrite,
)
from .place import StagePlace, decode_place
from .prefill import PrefillRequest

logger = logging.getLogger(__name__)

BUSY_S = 0.25
"""Interval between two checks of the engine's load."""


class EngineCore(Replica, Protocol):
    """Engine inside its process: VllmCore, HfCore, and fakes in tests."""

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Start the engine. Raises EngineError, UsageError."""
        ...

    def stats(self) -> EngineStats:
        """Return how busy the engine is."""
        ...

    def stuck_s(self) -> float:
        """Return the seconds for which the engine has drawn no token although it has work."""
        ...

    async def sleep(self) -> None:
        """Release the GPU memory; no request may be under way."""
        ...

    async def wake(self) -> None:
        """Undo sleep()."""
        ...

    async def close(self) -> None:
        """End the engine, also after a failed start."""
        ...


@runtime_checkable
class RejoiningCore(Protocol):
    """EngineCore that is stage 0 of a pipeline."""

    async def rejoin(self, epoch: int) -> None:
        """Begin a chain of this epoch. Raises EngineError."""
        ...


@runtime_checkable
class PrefillingCore(Protocol):
    """EngineCore that measures texts sampled by other nodes."""

    async def prefill(self, requests: Sequence[PrefillRequest]) -> list[bytes]:
        """Measure each text under the loaded policy. Raises EngineError, EngineLost."""
        ...


@runtime_checkable
class CopyingCore(Protocol):
    """EngineCore that copies its weights, to switch between a few versions."""

    async def keep(self, key: int) -> list[int]:
        """Copy the weights; return the keys of all copies. Raises EngineLost."""
        ...

    async def recall(self, version: int, key: int) -> Written:
        """Write a copy again. Raises EngineError, and changes nothing, if there is none; EngineLost."""
        ...


@runtime_checkable
class ServingCore(Protocol):
    """EngineCore with an OpenAI server of its own."""

    def prepare_api(self, options: ApiOptions) -> None:
        """Make start() prepare the server."""
        ...

    async def serve_api(self, sleeper: "Sleeper") -> None:
        """Serve until close(). Raises EngineError, UsageError."""
        ...


class Sleeper:
    """Controller that puts an idle engine to sleep; work is allowed only inside awake()."""

    def __init__(self, core: EngineCore, after_s: float) -> None:
        """`after_s`: idle seconds before the engine releases its GPU memory; 0 means never."""
        self._core = core
        self._after_s = after_s
        self._working = 0
        self._idle_since = time.monotonic()
        self._asleep = False
        self._turning = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to count the idle time."""
        if self._after_s:
            self._watching = asyncio.create_task(self._watch(), name="sleep")

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncGenerator[None]:
        """Keep the engine awake inside the block, waking it first. Raises the errors of wake()."""
        self._working += 1
        try:
            async with self._turning:
                if self._asleep:
                    await self._core.wake()
                    self._asleep = False
            yield
        finally:
            self._working -= 1
            self._idle_since = time.monotonic()

    async def close(self) -> None:
        """Stop counting; a sleeping engine stays asleep."""
        await end_tasks(self._watching)

    async def _watch(self) -> None:
        while True:
            remaining_s = self._idle_since + self._after_s - time.monotonic()
            if self._working or self._asleep:
                remaining_s = self._after_s
            if remaining_s > 0:
                await asyncio.sleep(remaining_s)
                continue
            async with self._turning:
                if not self._working:
                    await self._sleep()

    async def _sleep(self) -> None:
        try:
            await self._core.sleep()
            self._asleep = True
        except EngineError as error:
            logger.warning("the engine did not go to sleep: %s", error)
            self._idle_since = time.monotonic()


MakeCore = Callable[..., EngineCore]
"""Factory of the core: make(config), or make(config, place) for a pipeline stage."""


class EngineHost:
    """Server of the parent's requests until close(); an EngineSetUp is the first that is answered."""

    def __init__(self, outbox: Outbox, make: MakeCore, load: Callable[[], None]) -> None:
        """`load` imports the libraries of the core, which takes seconds."""
        self._outbox = outbox
        self._make = make
        self._load = load
        self._loading: asyncio.Task[None] | None = None
        self._core: EngineCore | None = None
        self._sleeper: Sleeper | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, request: ProcessMessage[EngineRequest]) -> None:
        """Begin to answer a request."""
        number = request.number
        match request.body:
            case EngineImport():
                self._loading = asyncio.create_task(asyncio.to_thread(self._load))
            case EngineDrop():
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case EnginePing():
                stuck_s = self._core.stuck_s() if self._core else 0.0
                self._outbox.put(number, EnginePong(stuck_s))
            case body:
                task = asyncio.create_task(self._answer(number, body))
                self._tasks[number] = task
                task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def close(self) -> None:
        """Cancel every request and end the engine."""
        await end_tasks(*self._tasks.values(), self._reporting)
        if self._sleeper is not None:
            await self._sleeper.close()
        if self._core is not None:
            await self._core.close()

    async def _answer(self, number: int, request: EngineRequest) -> None:
        try:
            self._outbox.put(number, await self._do(request))
        except NodeError as error:
            kind = FAULT if isinstance(error, EngineError) else USAGE
            kind = LOST if isinstance(error, EngineLost) else kind
            self._outbox.put(number, EngineFailed(str(error), kind))
        except Exception as error:  # the engine's libraries may raise anything
            logger.exception("a request failed by an error in the program")
            # a change of the weights that failed halfway leaves them unknown
            harmless = isinstance(request, EngineSetUp | EngineCheck | EngineDraw | EnginePrefill)
            detail = f"an error in the engine's process ({named_line(error)}): report it"
            self._outbox.put(number, EngineFailed(detail, FAULT if harmless else LOST))

    async def _do(self, request: EngineRequest) -> EngineAnswer:
        if isinstance(request, EngineSetUp):
            return await self._set_up(request)
        core, sleeper = self._core, self._sleeper
        if core is None or sleeper is None:
            raise EngineError("nothing was set up: send an EngineSetUp first")
        async with sleeper.awake():
            match request:
                case EngineDraw():
                    return EngineDrawn(await core.generate(request.request))
                case EnginePrefill() if isinstance(core, PrefillingCore):
                    return EnginePrefilled(await core.prefill(request.requests))
                case EngineCheck():
                    return await core.check(request.path)
                case EngineStage():
                    return await core.stage(request.path)
                case EngineLoad():
                    return await core.load(request.version, request.path)
                case EngineWrite():
                    return await core.write(request.version)
                case EngineKeep() if isinstance(core, CopyingCore):
                    return EngineKept(await core.keep(request.key))
                case EngineRecall() if isinstance(core, CopyingCore):
                    return await core.recall(request.version, request.key)
                case EngineRejoin() if isinstance(core, RejoiningCore):
                    await core.rejoin(request.epoch)
                    return EngineDone()
                case _:
                    raise EngineError("this engine cannot answer that: update primerl-node")

    async def _set_up(self, request: EngineSetUp) -> EngineDone:
        config = EngineConfig.model_validate_json(request.config)
        place = (decode_place(request.place),) if request.place else ()
        if self._loading is not None:
            await asyncio.wait([self._loading])  # an import that failed fails again below
        core = self._core = self._make(config, *place)  # close() ends it even after a failed start
        api = request.api if isinstance(core, ServingCore) else None
        if api is not None and isinstance(core, ServingCore):
            core.prepare_api(api)
        await core.start(Path(request.model_dir), fingerprint=request.fingerprint)
        freeze_libraries()
        self._sleeper = Sleeper(core, config.sleep_after_s)
        if api is not None and isinstance(core, ServingCore):
            await core.serve_api(self._sleeper)
        self._sleeper.start()
        self._reporting = asyncio.create_task(self._report(core), name="busy")
        return EngineDone()

    async def _report(self, core: EngineCore) -> None:
        """Send the engine's load whenever it has changed."""
        sent = EngineStats()
        while True:
            if (stats := core.stats()) != sent:
                self._outbox.put(0, stats)
                sent = stats
            await asyncio.sleep(BUSY_S)


def load_nothing() -> None:
    """Import no libraries ahead."""


def main(make: MakeCore, load: Callable[[], None] = load_nothing) -> None:
    """Serve requests on standard input and output; library output goes to standard error."""
    if os.getpgrp() == os.getpid():
        # vLLM's own processes watch this one only after their start
        signal.signal(signal.SIGTERM, _end_all)
    serve_parent(
        REQUESTS.decode, lambda outbox: EngineHost(outbox, make, load), max_frame=MAX_FRAME
    )


def make_core(config: EngineConfig, *place: StagePlace) -> EngineCore:
    """Make the core that `config.type` names; other engines are not imported."""
    if config.type == "hf":
        from .hf import HfCore

        return HfCore(config)
    from .vllm import VllmCore

    return VllmCore(config, *place)


def load_vllm() -> None:
    """Import vLLM, for an engine without batch-invariant kernels and drafts. Raises ImportError."""
    from .vllm import load_library

    load_library()


def _end_all(_number: int, _frame: FrameType | None) -> None:
    kill_group(os.getpid())


if __name__ == "__main__":
    main(make_core, load_vllm)
