"""The process that audits for a node: holds states, measures what it is sent, and may be killed at any time.

Only what the input says is done, one request after the other; whoever started it need not believe it.
"""

import os
import sys
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..errors import EngineError, StorageError, one_line
from ..frames import frame
from ..processes import leave_with_parent
from ..weights.checkpoint import read_checkpoint
from ..weights.state import State
from .frames import (
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

if TYPE_CHECKING:
    from .replay import Replay


class Server:
    """Answers requests; a Setup comes first."""

    def __init__(self) -> None:
        self._replay: Replay | None = None
        self._states: dict[int, State] = {}

    def answer(self, request: Request) -> Answer:
        """What `request` leads to. Raises whatever nobody can answer for."""
        try:
            return self._answer(request)
        except (EngineError, StorageError) as error:
            return Failed(str(error), always=True)
        except RuntimeError as error:  # torch's own: no memory, no such device
            return Failed(one_line(error), always=isinstance(request, Setup))

    def _answer(self, request: Request) -> Answer:
        match request:
            case Setup():
                self._replay = _set_up(request)
            case Hold():
                for number in request.evict:
                    self._states.pop(number, None)
                self._states[request.number] = read_checkpoint(Path(request.path))
            case Measure():
                return self._measure(request)
        return Done()

    def _measure(self, request: Measure) -> Answer:
        if self._replay is None:
            raise EngineError("nothing was set up: send a Setup first")
        if lost := set(request.states.values()) - self._states.keys():
            raise EngineError(f"state {min(lost)} was never held: send a Hold first")
        states = {version: self._states[number] for version, number in request.states.items()}
        found = results(self._replay.measure(request.items, states, request.others))
        self._replay.free_spare_memory()
        return found


def serve(source: BufferedIOBase, sink: BinaryIO) -> None:
    """Answer until the input ends."""
    server = Server()
    while (request := read_request(source)) is not None:
        sink.write(frame(server.answer(request), MAX_FRAME))
        sink.flush()


def _set_up(setup: Setup) -> "Replay":
    from .replay import Replay
    from .terms import Terms

    replay = Replay(
        Terms(
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


def main() -> None:
    """Answer at the standard input and output; what libraries print goes to the standard error."""
    leave_with_parent(os.environ)
    answers = os.dup(1)
    os.dup2(2, 1)
    with open(0, "rb", closefd=False) as source, open(answers, "wb") as sink:
        serve(source, sink)


if __name__ == "__main__":
    sys.exit(main())
