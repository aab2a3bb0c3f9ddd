"""Audit process of a node, and its messages (frames: node/process/frames.py).

The process holds states, measures items, and may be killed at any time. Requests are handled one by one in a
thread, so that the end of the input is noticed meanwhile. An unexpected error ends the process: the node then
tries the other items without the one that caused it.
"""

import asyncio
import os
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from ..errors import EngineError, StorageError, one_line
from ..process.frames import ProcessMessage
from ..process.serve import Outbox, serve_parent
from ..weights.checkpoint import read_checkpoint
from ..weights.state import State
from .auditor import AuditItem, AuditTerms, Measured, Reading, Unreadable

MAX_FRAME = 128 * 2**20
"""Largest message, bytes: far above a portion of items and the longest branch."""


class AuditSetUp(msgspec.Struct, frozen=True, tag="setup"):
    """First request: the terms that all audits share."""

    terms: AuditTerms
    threads: int
    """Threads of torch; 0 leaves its choice."""


class HoldState(msgspec.Struct, frozen=True, tag="hold"):
    """Request to read the state in the safetensors file `path` and drop those in `evict`."""

    number: int
    path: str
    evict: list[int]


class MeasureItems(msgspec.Struct, frozen=True, tag="measure"):
    """Request to measure `items`; `states` maps each version to the number of its held state."""

    items: list[AuditItem]
    states: dict[int, int]


class ReadItems(msgspec.Struct, frozen=True, tag="read"):
    """Request to read `items` as a worker of the terms' dtype; `states` as in MeasureItems."""

    items: list[AuditItem]
    states: dict[int, int]


class AuditReady(msgspec.Struct, frozen=True, tag="ready"):
    """Answer to a setup or a HoldState that succeeded."""


class MeasuredItems(msgspec.Struct, frozen=True, tag="measured"):
    """One answer for each item, in order."""

    answers: list[Measured | Unreadable]


class ReadingsOfItems(msgspec.Struct, frozen=True, tag="readings"):
    """One answer for each item, in order."""

    answers: list[Reading | Unreadable]


class AuditError(msgspec.Struct, frozen=True, tag="error"):
    """Failure of a request; `always`: it would fail with other items, too."""

    detail: str
    always: bool


AuditProcessRequest = AuditSetUp | HoldState | MeasureItems | ReadItems
AuditProcessReply = AuditReady | MeasuredItems | ReadingsOfItems | AuditError
REQUESTS: msgspec.msgpack.Decoder[ProcessMessage[AuditProcessRequest]] = msgspec.msgpack.Decoder(
    ProcessMessage[AuditProcessRequest]
)
REPLIES: msgspec.msgpack.Decoder[ProcessMessage[AuditProcessReply]] = msgspec.msgpack.Decoder(
    ProcessMessage[AuditProcessReply]
)


class Measurer(Protocol):
    """Measurement and reading of items under states: reader.TextReader, or a fake in tests."""

    def measure(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """See Auditor.audit()."""
        ...

    def read(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Reading | Unreadable]:
        """See HfAuditor.read()."""
        ...

    def free_spare_memory(self) -> None:
        """Release memory that the next audit may not need."""
        ...


class AuditServer:
    """Server of requests; a setup is the first of them."""

    def __init__(self, outbox: Outbox, build: Callable[[AuditSetUp], Measurer]) -> None:
        self._outbox = outbox
        self._build = build
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._tasks: set[asyncio.Task[None]] = set()
        self._measurer: Measurer | None = None
        self._states: dict[int, State] = {}

    def take(self, request: ProcessMessage[AuditProcessRequest]) -> None:
        """Queue a request; requests are answered in order."""
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop; a running measurement ends with the process."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: ProcessMessage[AuditProcessRequest]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._worker, self._try, request.body)
            self._outbox.put(request.number, answer)
        except Exception:  # a bug: an answer would never be sent, so the process ends
            traceback.print_exc()
            os._exit(1)

    def _try(self, request: AuditProcessRequest) -> AuditProcessReply:
        try:
            return self._do(request)
        except (EngineError, StorageError) as error:
            return AuditError(str(error), always=True)
        except RuntimeError as error:  # torch's own: no memory, no such device
            return AuditError(one_line(error), always=isinstance(request, AuditSetUp))

    def _do(self, request: AuditProcessRequest) -> AuditProcessReply:
        match request:
            case AuditSetUp():
                self._measurer = self._build(request)
            case HoldState():
                for number in request.evict:
                    self._states.pop(number, None)
                self._states[request.number] = read_checkpoint(Path(request.path))
            case MeasureItems():
                with self._measuring(request.states) as (measurer, states):
                    return MeasuredItems(measurer.measure(request.items, states))
            case ReadItems():
                with self._measuring(request.states) as (measurer, states):
                    return ReadingsOfItems(measurer.read(request.items, states))
        return AuditReady()

    @contextmanager
    def _measuring(
        self, numbers: Mapping[int, int]
    ) -> Generator[tuple[Measurer, dict[int, State]]]:
        """Return the measurer and the states of these numbers; free spare memory afterwards."""
        if self._measurer is None:
            raise EngineError("nothing was set up: send the setup first")
        if lost := set(numbers.values()) - self._states.keys():
            raise EngineError(f"state {min(lost)} was never held: hand it over first")
        yield self._measurer, {version: self._states[number] for version, number in numbers.items()}
        self._measurer.free_spare_memory()


def build_replay(setup: AuditSetUp) -> Measurer:
    """Load torch and prepare a TextReader."""
    from .reader import TextReader

    reader = TextReader(setup.terms)
    reader.prepare(threads=setup.threads)
    return reader


def main(build: Callable[[AuditSetUp], Measurer] = build_replay) -> None:
    """Serve requests on standard input and output; libraries' prints go to standard error."""
    serve_parent(REQUESTS.decode, lambda outbox: AuditServer(outbox, build), max_frame=MAX_FRAME)


if __name__ == "__main__":
    main()
