"""The process that holds an engine for a node: answers what comes at its standard input, many requests at once.

It ends with its input and with its parent. Answers of one turn of the event loop go out in one write.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol, runtime_checkable

from ..config.engine import EngineConfig
from ..ops.errors import EngineError, EngineLost, NodeError
from ..pipeline.place import StagePlace, decode_place
from ..process.serve import Outbox, serve, take_standard_output
from ..process.spawn import kill_group, leave_with_parent
from .engine import EngineStats, Replica, Written
from .host_frames import (
    FAULT,
    LOST,
    USAGE,
    Answer,
    ApiOptions,
    Busy,
    Check,
    Checked,
    Done,
    Draw,
    Drop,
    Failed,
    Load,
    Ping,
    Pong,
    Rejoin,
    Request,
    SetUp,
    Stage,
    Write,
    Wrote,
    as_drawn,
    as_request,
    read_request,
)
from .sleeping import Sleeper, Sleepy

BUSY_S = 0.25
"""Between two looks at how busy vLLM is."""


class Core(Replica, Sleepy, Protocol):
    """What is hosted: vllm.py, hf_core.py; tests have another one."""

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Start it. Raises EngineError, UsageError."""
        ...

    def stats(self) -> EngineStats:
        """How busy it is."""
        ...

    def stuck_s(self) -> float:
        """How long it has given nothing though there is work."""
        ...

    async def close(self) -> None:
        """End it; also after a start that failed."""
        ...


@runtime_checkable
class Rejoining(Protocol):
    """A core that is stage 0 of a pipeline."""

    async def rejoin(self, epoch: int) -> None:
        """Begin a chain. Raises EngineError."""
        ...


Make = Callable[..., Core]
"""make(config), or make(config, place) for a stage of a pipeline."""


@runtime_checkable
class Serving(Protocol):
    """A core with an OpenAI server of its own."""

    def prepare_api(self, options: ApiOptions) -> None:
        """Start with what the server needs; before start()."""
        ...

    async def serve_api(self, sleeper: Sleeper) -> None:
        """Serve until close(). Raises EngineError, UsageError."""
        ...


class EngineHost:
    """Answers requests until close(); a SetUp comes first."""

    def __init__(self, outbox: Outbox, make: Make) -> None:
        self._outbox = outbox
        self._make = make
        self._core: Core | None = None
        self._sleeper: Sleeper | None = None
        self._telling: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, request: Request) -> None:
        """Begin to answer."""
        match request:
            case Drop():
                if (task := self._tasks.get(request.number)) is not None:
                    task.cancel()
            case Ping():
                stuck_s = self._core.stuck_s() if self._core else 0.0
                self._outbox.put(Pong(request.number, stuck_s))
            case _:
                task = asyncio.create_task(self._answer(request))
                self._tasks[request.number] = task
                task.add_done_callback(lambda _: self._tasks.pop(request.number, None))

    async def close(self) -> None:
        """Give everything up and end vLLM's processes."""
        tasks = [*self._tasks.values(), *([self._telling] if self._telling else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._sleeper is not None:
            await self._sleeper.close()
        if self._core is not None:
            await self._core.close()

    async def _answer(self, request: Request) -> None:
        number = request.number
        try:
            answer = await self._do(request)
        except EngineLost as error:
            answer = Failed(number, str(error), LOST)
        except EngineError as error:
            answer = Failed(number, str(error), FAULT)
        except NodeError as error:
            answer = Failed(number, str(error), USAGE)
        self._outbox.put(answer)

    async def _do(self, request: Request) -> Answer:
        if isinstance(request, SetUp):
            return await self._set_up(request)
        core, sleeper, number = self._core, self._sleeper, request.number
        if core is None or sleeper is None:
            raise EngineError("nothing was set up: send a SetUp first")
        async with sleeper.awake():
            match request:
                case Draw():
                    return as_drawn(number, await core.generate(as_request(request)))
                case Check():
                    return Checked(number, *await core.check(request.path))
                case Stage():
                    return Checked(number, *await core.stage(request.path))
                case Load():
                    return _wrote(number, await core.load(request.version, request.path))
                case Write():
                    return _wrote(number, await core.write(request.version))
                case Rejoin() if isinstance(core, Rejoining):
                    await core.rejoin(request.epoch)
                    return Done(number)
                case _:
                    raise EngineError("this is not to be answered: update primerl-node")

    async def _set_up(self, request: SetUp) -> Done:
        config = EngineConfig.model_validate_json(request.config)
        place = (decode_place(request.place),) if request.place else ()
        core = self._core = self._make(config, *place)  # close() ends it also after half a start
        if request.api is not None and isinstance(core, Serving):
            core.prepare_api(request.api)
        await core.start(Path(request.model_dir), fingerprint=request.fingerprint)
        self._sleeper = Sleeper(core, config.sleep_after_s)
        if request.api is not None and isinstance(core, Serving):
            await core.serve_api(self._sleeper)
        self._sleeper.start()
        self._telling = asyncio.create_task(self._tell(core), name="busy")
        return Done(request.number)

    async def _tell(self, core: Core) -> None:
        """Say how busy vLLM is when that has changed."""
        told = Busy()
        while True:
            found = core.stats()
            now = Busy(**{name: getattr(found, name, 0) for name in Busy.__struct_fields__})
            if now != told:
                self._outbox.put(now)
                told = now
            await asyncio.sleep(BUSY_S)


def _wrote(number: int, written: Written) -> Wrote:
    return Wrote(number, written.paused_s, written.writing_s)


def _end_all(_number: int, _frame: FrameType | None) -> None:
    kill_group(os.getpid())


def main(make: Make) -> None:
    """Answer at the standard input and output; what libraries print goes to the standard error."""
    if os.getpgrp() == os.getpid():
        # vLLM's processes watch this one only once they work
        signal.signal(signal.SIGTERM, _end_all)
    leave_with_parent(os.environ)
    answers = take_standard_output()
    asyncio.run(
        serve(sys.stdin.buffer, answers, read_request, lambda outbox: EngineHost(outbox, make))
    )
    sys.stderr.flush()
    os._exit(0)  # everything is closed; taking torch and vLLM apart would take seconds


def make_core(config: EngineConfig, *place: StagePlace) -> Core:
    """The real ones; only the one that is wanted is loaded."""
    if config.type == "hf":
        from .hf_core import HfCore

        return HfCore(config)
    from .vllm import VllmCore

    return VllmCore(config, *place)


if __name__ == "__main__":
    main(make_core)
