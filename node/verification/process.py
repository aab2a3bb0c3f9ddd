"""The process that audits for a node: holds states, measures what it is sent, may be killed at any time.

Requests are done one after the other in a thread of their own, so that the end of the input is noticed
meanwhile. An unexpected error ends the process: the node then tries the other items without that one.
"""

import asyncio
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ..ops.errors import EngineError, StorageError, one_line
from ..process.frames import Message
from ..process.serve import Outbox, serve_parent
from ..weights.checkpoint import read_checkpoint
from ..weights.state import State
from .auditor import AuditItem, Measured, Unreadable
from .messages import (
    MAX_FRAME,
    Answer,
    Done,
    Failed,
    Hold,
    Measure,
    Request,
    Setup,
    read_request,
    results,
)


class Measurer(Protocol):
    """Measures items under states: replay.Replay; tests have another one."""

    def measure(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> list[Measured | Unreadable]:
        """See Auditor.audit()."""
        ...

    def free_spare_memory(self) -> None:
        """Give back memory that the next audit may not need."""
        ...


class AuditServer:
    """Answers requests; a Setup comes first."""

    def __init__(self, outbox: Outbox, build: Callable[[Setup], Measurer]) -> None:
        self._outbox = outbox
        self._build = build
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._tasks: set[asyncio.Task[None]] = set()
        self._measurer: Measurer | None = None
        self._states: dict[int, State] = {}

    def take(self, request: Message[Request]) -> None:
        """Begin to answer a request, after those before it."""
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up; what is being measured ends with the process."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: Message[Request]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._worker, self._perform, request.body)
            self._outbox.put(Message(request.number, answer))
        except Exception:  # an error of ours: an answer would never come, so the process ends
            traceback.print_exc()
            os._exit(1)

    def _perform(self, request: Request) -> Answer:
        try:
            return self._do(request)
        except (EngineError, StorageError) as error:
            return Failed(str(error), always=True)
        except RuntimeError as error:  # torch's own: no memory, no such device
            return Failed(one_line(error), always=isinstance(request, Setup))

    def _do(self, request: Request) -> Answer:
        match request:
            case Setup():
                self._measurer = self._build(request)
            case Hold():
                for number in request.evict:
                    self._states.pop(number, None)
                self._states[request.number] = read_checkpoint(Path(request.path))
            case Measure():
                return self._measure(request)
        return Done()

    def _measure(self, request: Measure) -> Answer:
        if self._measurer is None:
            raise EngineError("nothing was set up: send a Setup first")
        if lost := set(request.states.values()) - self._states.keys():
            raise EngineError(f"state {min(lost)} was never held: send a Hold first")
        states = {version: self._states[number] for version, number in request.states.items()}
        found = results(self._measurer.measure(request.items, states, request.others))
        self._measurer.free_spare_memory()
        return found


def build_replay(setup: Setup) -> Measurer:
    """Load torch and what measures with it."""
    from .replay import Replay
    from .terms import AuditTerms

    replay = Replay(
        AuditTerms(
            model_dir=Path(setup.model_dir),
            temperature=setup.temperature,
            dtype=setup.dtype,
            device=setup.device,
            adapters=setup.adapters,
            base_state=setup.base_state,
        )
    )
    replay.prepare(threads=setup.threads)
    return replay


def main(build: Callable[[Setup], Measurer] = build_replay) -> None:
    """Answer at the standard input and output; what libraries print goes to the standard error."""
    serve_parent(read_request, lambda outbox: AuditServer(outbox, build), max_frame=MAX_FRAME)


if __name__ == "__main__":
    main()
