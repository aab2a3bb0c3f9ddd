"""One rank of a trainer: `python -m primerl.node.training.rank`, under torchrun with others. Imports torch.

All ranks do what rank 0 is asked, in the same order, and agree on how it ended before anything else is done. A
rank that cannot go on ends with its whole process, and says why: torchrun ends the others.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from ..config.training import TrainingConfig
from ..ops.errors import EngineError, StorageError
from ..process.frames import Message
from ..process.serve import ParentGone, ParentSocket
from ..process.spawn import die_with_parent
from .backend import Sample, StepMetrics, TrainBatch
from .ranks.calls import (
    ENDED,
    EXIT_LOST,
    KINDS,
    MAX_FRAME,
    READING,
    Answer,
    Ask,
    Broken,
    Call,
    Done,
    End,
    EndSupervised,
    Evaluate,
    Export,
    Failed,
    Figures,
    Idle,
    Join,
    Joined,
    Load,
    Save,
    Stage,
    Start,
    Step,
    Supervise,
    WriteSnapshot,
    WriteStaged,
    WriteState,
    failed,
    read_call,
)
from .ranks.wire import Missing, Wire, hand_out_config, lost_the_others
from .world import World

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
IDLE_S = 5.0
"""A rank that has nothing to do hears from rank 0 so often."""
IDLE_TIMEOUT_S = 60.0
"""A rank that has nothing to do answers much faster than this."""
AGREE_S = 30.0
"""An error that is everybody's comes to all ranks within this time."""
PATIENCE_S = 3.0
"""A rank that lost the others waits so long, for the one at fault to be seen first."""


class Share(Protocol):
    """One rank's share of a learner; every method is collective. See Learner and TrainBackend."""

    def step(self, batch: TrainBatch) -> StepMetrics: ...  # noqa: D102
    def evaluate(self, samples: list[Sample]) -> dict[str, float]: ...  # noqa: D102
    def supervised_step(  # noqa: D102
        self, examples: list[tuple[list[int], list[int]]], lr: float
    ) -> float: ...
    def end_supervised(self) -> None: ...  # noqa: D102
    def write_state(self, path: Path) -> None: ...  # noqa: D102
    def write_snapshot(self, path: Path, whole: bool) -> None: ...  # noqa: D102
    def save(self, directory: Path) -> None: ...  # noqa: D102
    def stage(self) -> None: ...  # noqa: D102
    def write_staged(self, directory: Path) -> None: ...  # noqa: D102
    def load(self, directory: Path) -> None: ...  # noqa: D102
    def export(self, directory: Path) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


Build = Callable[[Start, TrainingConfig, World], Share]


class OutOfStep(Exception):
    """The ranks disagree on how a call ended; `mine` is what this rank made of it."""

    def __init__(self, mine: Answer) -> None:
        super().__init__(mine.detail if isinstance(mine, Failed) else "another rank failed")
        self.mine = mine


class Server:
    """Does what rank 0 is asked until it is asked to end."""

    def __init__(
        self,
        world: World,
        config: TrainingConfig,
        wire: Wire,
        parent: ParentSocket | None,
        build: Build,
    ) -> None:
        self._world = world
        self._config = config
        self._wire = wire
        self._parent = parent
        self._build = build
        self._share: Share | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def serve(self) -> None:
        """Answer calls. Raises whatever this rank cannot go on after."""
        while True:
            call = self._next()
            if isinstance(call.body, End):
                self._close()
                return
            if isinstance(call.body, WriteStaged):
                self._begin_write(call.number, Path(call.body.directory))
                continue
            if not isinstance(call.body, Idle):  # to have heard it is enough
                self._reply(call.number, self._agree(call.body, self._perform(call.body)))

    def _next(self) -> Call:
        """The next call, the same on all ranks; rank 0 has it from the daemon. Raises Missing."""
        raw: bytes | None = None
        if self._parent is not None:
            idle_s = min(IDLE_S, self._wire.timeout_s / 4)
            raw = self._parent.next(idle_s) or msgspec.msgpack.encode(Message(0, Idle()))
        self._wire.meet(min(self._wire.timeout_s, IDLE_TIMEOUT_S))
        return read_call(self._wire.share(raw))

    def _perform(self, ask: Ask) -> Answer:
        """What this rank makes of a call."""
        try:
            return self._do(ask)
        except (ValueError, EngineError, StorageError) as error:
            logger.info("%s failed: %s", type(ask).__name__, error)
            return failed(error)

    def _do(self, ask: Ask) -> Answer:
        match ask:
            case Start():
                self._start(ask)
                return Done()
            case _:
                return self._with(self._started(), ask)

    def _with(self, share: Share, ask: Ask) -> Answer:
        match ask:
            case Step():
                return Figures(share.step(ask.batch).values)
            case Evaluate():
                return Figures(share.evaluate(ask.samples))
            case Supervise():
                return Figures({"loss": share.supervised_step(ask.examples, ask.lr)})
            case EndSupervised():
                share.end_supervised()
            case WriteState():
                share.write_state(Path(ask.path))
            case WriteSnapshot():
                share.write_snapshot(Path(ask.path), ask.whole)
            case Export():
                share.export(Path(ask.directory))
            case _:
                self._checkpoint(share, ask)
        return Done()

    def _checkpoint(self, share: Share, ask: Ask) -> None:
        """Checkpoints are written and read one at a time."""
        self._written()
        match ask:
            case Save():
                share.save(Path(ask.directory))
            case Stage():
                share.stage()
            case Load():
                share.load(Path(ask.directory))
            case _:
                raise ValueError(f"{type(ask).__name__} does not belong here: use one version")

    def _start(self, ask: Start) -> None:
        share, self._share = self._share, None
        if share is not None:
            self._written()
            share.close()
        self._share = self._build(ask, self._config, self._world)

    def _started(self) -> Share:
        if self._share is None:
            raise EngineError("the trainer backend is not running: call start() first")
        return self._share

    def _agree(self, ask: Ask, mine: Answer) -> Answer:
        """The answer of all ranks. Raises Missing, OutOfStep."""
        code = list(KINDS).index(mine.kind) + 1 if isinstance(mine, Failed) else 0
        try:
            self._wire.meet(min(self._wire.timeout_s, AGREE_S) if code else None)
        except Missing as error:
            if code:
                raise OutOfStep(mine) from error
            raise
        codes = self._wire.gather(code)
        if len(set(codes)) == 1:
            return mine
        if not isinstance(ask, READING):
            raise OutOfStep(mine)
        if code:
            return mine
        rank = next(rank for rank, other in enumerate(codes) if other)
        return Failed(list(KINDS)[codes[rank] - 1], f"rank {rank} could not do it: see the log")

    def _begin_write(self, number: int, directory: Path) -> None:
        """Write what was staged in a thread of its own; rank 0 answers when all ranks are done."""
        share = self._started()

        def write() -> None:
            answer: Answer = Done()
            try:
                share.write_staged(directory)
            except (ValueError, EngineError, StorageError) as error:
                answer = failed(error)
            except BaseException as error:  # nobody waits for this thread: the rank ends with it
                end(self._world.rank, self._wire, self._parent, error)
            self._reply(number, answer)

        self._writing = self._writer.submit(write)

    def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _reply(self, number: int, answer: Answer) -> None:
        if self._parent is not None:
            self._parent.reply(Message(number, answer))

    def _close(self) -> None:
        if self._parent is not None:
            self._parent.end()
        self._writer.shutdown(wait=True)
        if self._share is not None:
            self._share.close()


def main(build: Build | None = None) -> None:
    """Be one rank until the daemon ends it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:  # alone, it is the daemon's own child, and ParentSocket ends it
        die_with_parent()
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(name)s: %(message)s")
    wire = parent = None
    try:
        parent = ParentSocket.open(os.environ, CONNECT_S, MAX_FRAME) if rank == 0 else None
        first = _first_call(parent)
        config = _configuration(first, rank, size)
        world = _join(config, parent, first)
        wire = Wire.open(config.fsdp.timeout_s)
        here = os.environ.get("GROUP_RANK", "0") == "0"
        pids = wire.gather(os.getpid() if here else 0)
        if parent is not None and first is not None:
            parent.reply(Message(first.number, Joined(pids)))
        Server(world, config, wire, parent, build or _build).serve()
        world.close()
    except BaseException as error:  # whatever it is: this rank says why it ends, and ends
        end(rank, wire, parent, error)


def end(
    rank: int, wire: Wire | None, parent: ParentSocket | None, error: BaseException
) -> NoReturn:
    """Say why, and end the process at once: a group that has lost a rank cannot be closed in order."""
    if isinstance(error, ParentGone) and parent is not None:
        parent.abandon()
    mine = error.mine if isinstance(error, OutOfStep) else None
    others = mine is not None and not isinstance(mine, Failed)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if others or lost_the_others(error):
        began = time.monotonic()
        _say(f"rank {rank} lost the others: {reason}")
        _tell(parent, Broken(_missing(wire, error), reason))
        time.sleep(max(0.0, began + PATIENCE_S - time.monotonic()))
        os._exit(EXIT_LOST)
    _say("".join(traceback.format_exception(error)) + ENDED.format(rank=rank, reason=reason))
    _tell(parent, Broken([rank], reason))
    os._exit(1)


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody reads it any more


def _missing(wire: Wire | None, error: BaseException) -> list[int]:
    """The ranks that do not come any more; only rank 0 can tell."""
    if isinstance(error, Missing):
        return error.ranks
    try:
        if wire is not None:
            wire.meet(PATIENCE_S)
    except Missing as missing:
        return missing.ranks
    return []


def _tell(parent: ParentSocket | None, answer: Broken) -> None:
    try:
        if parent is not None:
            parent.reply(Message(0, answer))
    except ParentGone:
        pass  # nobody is left to be told


def _first_call(parent: ParentSocket | None) -> Call | None:
    """What rank 0 is asked first; None on the others."""
    if parent is None:
        return None
    raw = parent.next(CONNECT_S)
    if raw is None:
        raise EngineError("the daemon did not say what to train: use one version")
    return read_call(raw)


def _configuration(first: Call | None, rank: int, size: int) -> TrainingConfig:
    said: str | None = None
    if first is not None:
        if not isinstance(first.body, Join):
            raise EngineError("the daemon did not say what to train: use one version")
        said = first.body.config
    return TrainingConfig.model_validate_json(hand_out_config(said, size, rank))


def _join(config: TrainingConfig, parent: ParentSocket | None, first: Call | None) -> World:
    try:
        return World.join(config)
    except EngineError as error:
        if parent is not None and first is not None:
            parent.reply(Message(first.number, failed(error)))
        raise


def _build(ask: Start, config: TrainingConfig, world: World) -> Share:
    from .ranks.share import LearnerShare

    return LearnerShare.build(ask, config, world)


if __name__ == "__main__":
    main()
