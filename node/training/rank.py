"""One rank of a trainer: `python -m primerl.node.training.rank`, under torchrun with others.

Imports torch. All ranks perform the calls of rank 0 in the same order, and agree on each result before the next
call. A rank that cannot go on ends its whole process and reports the reason: torchrun ends the others.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..config.training import TrainingConfig
from ..errors import EngineError, StorageError
from ..process.frames import ProcessMessage
from ..process.heap import freeze_libraries
from ..process.serve import ParentGone, ParentSocket
from ..process.spawn import die_with_parent
from .operations import LearnerCall, MethodCall, changes_nothing
from .rank_messages import (
    CALLS,
    ENDED,
    EXIT_LOST,
    MAX_FRAME,
    RankAnswer,
    RankCall,
    RankDone,
    RankEnd,
    RankError,
    RankIdle,
    RankJoin,
    RankRequest,
    RanksBroken,
    RanksJoined,
    RankStart,
    RankWriteStaged,
    name_of,
)
from .world import RankChannel, RanksMissing, World

if TYPE_CHECKING:
    from .learner import Learner

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
IDLE_S = 5.0
"""Interval of rank 0's heartbeats to idle ranks."""
IDLE_TIMEOUT_S = 60.0
"""Deadline of idle ranks, which answer much faster than this."""
AGREE_S = 30.0
"""Time in which an error of all ranks reaches all of them."""
GRACE_S = 3.0
"""Delay before a rank that lost the others exits, so that the rank at fault is noticed first."""
CONFIG_KEY = "primerl/config"
CONFIG_TIMEOUT_S = 120.0

Build = Callable[[RankStart, TrainingConfig, World], "Learner"]


class OutOfStep(Exception):
    """The ranks disagree on the result of a call; `mine` is this rank's answer."""

    def __init__(self, mine: RankAnswer) -> None:
        super().__init__(mine.detail if isinstance(mine, RankError) else "another rank failed")
        self.mine = mine


class RankServer:
    """Answers the calls of rank 0 until it is asked to end."""

    def __init__(
        self,
        world: World,
        config: TrainingConfig,
        channel: RankChannel,
        parent: ParentSocket | None,
        build: Build,
    ) -> None:
        self._world = world
        self._config = config
        self._channel = channel
        self._parent = parent
        self._build = build
        self._learner: Learner | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def serve(self) -> None:
        """Answer calls. Raises every error after which this rank cannot go on."""
        while True:
            call = self._next()
            match call.body:
                case RankEnd():
                    self._close()
                    return
                case RankIdle():
                    pass  # a heartbeat needs no answer
                case RankWriteStaged(directory):
                    self._begin_write(call.number, Path(directory))
                case request:
                    self._reply(call.number, self._agree(request, self._perform(request)))

    def _next(self) -> RankCall:
        """Receive the next call, the same on all ranks; rank 0 has it from the daemon.

        Raises RanksMissing.
        """
        raw: bytes | None = None
        if self._parent is not None:
            idle_s = min(IDLE_S, self._channel.timeout_s / 4)
            raw = self._parent.next(idle_s) or msgspec.msgpack.encode(ProcessMessage(0, RankIdle()))
        self._channel.meet(min(self._channel.timeout_s, IDLE_TIMEOUT_S))
        return CALLS.decode(self._channel.broadcast(raw, MAX_FRAME))

    def _perform(self, request: RankRequest) -> RankAnswer:
        """Perform a call and return this rank's answer."""
        try:
            return RankDone(self._figures(request))
        except (ValueError, EngineError, StorageError) as error:
            logger.info("%s failed: %s", name_of(request), error)
            return RankError(str(error), isinstance(error, StorageError))

    def _figures(self, request: RankRequest) -> dict[str, float]:
        if isinstance(request, RankStart):
            self._finish_write()
            learner, self._learner = self._learner, None
            if learner is not None:
                learner.close(keep_world=True)
            self._learner = self._build(request, self._config, self._world)
            return {}
        if not isinstance(request, LearnerCall):
            raise ValueError(f"{name_of(request)} does not belong here: use one version")
        if isinstance(request, MethodCall) and request.method in ("save", "stage", "load"):
            self._finish_write()  # checkpoints are written and read one at a time
        return request.perform(self._started())

    def _started(self) -> "Learner":
        if self._learner is None:
            raise EngineError("the trainer backend is not running: call start() first")
        return self._learner

    def _agree(self, request: RankRequest, mine: RankAnswer) -> RankAnswer:
        """Agree with all ranks on an answer. Raises RanksMissing, OutOfStep."""
        code = 1 + mine.of_storage if isinstance(mine, RankError) else 0
        try:
            self._channel.meet(min(self._channel.timeout_s, AGREE_S) if code else None)
        except RanksMissing as error:
            if code:
                raise OutOfStep(mine) from error
            raise
        codes = self._channel.gather(code)
        if len(set(codes)) == 1:
            return mine
        if not changes_nothing(request):
            raise OutOfStep(mine)
        if code:
            return mine
        rank = next(rank for rank, other in enumerate(codes) if other)
        return RankError(f"rank {rank} could not do it: see the log", codes[rank] == 2)

    def _begin_write(self, number: int, directory: Path) -> None:
        """Write the staged checkpoint in a thread; rank 0 answers when all ranks are done."""
        learner = self._started()

        def write() -> None:
            answer: RankAnswer = RankDone()
            try:
                learner.write_staged(directory)
            except (ValueError, EngineError, StorageError) as error:
                answer = RankError(str(error), isinstance(error, StorageError))
            except BaseException as error:  # the thread has no caller: the rank ends with it
                end(self._world.rank, self._channel, self._parent, error)
            self._reply(number, answer)

        self._writing = self._writer.submit(write)

    def _finish_write(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _reply(self, number: int, answer: RankAnswer) -> None:
        if self._parent is not None:
            self._parent.reply(number, answer)

    def _close(self) -> None:
        if self._parent is not None:
            self._parent.end()
        self._writer.shutdown(wait=True)
        if self._learner is not None:
            self._learner.close(keep_world=True)


def main(build: Build | None = None) -> None:
    """Run one rank until the daemon ends it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:  # a single rank is the daemon's own child, and ParentSocket ends it
        die_with_parent()
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(name)s: %(message)s")
    channel = parent = None
    try:
        parent = ParentSocket.open(os.environ, CONNECT_S, MAX_FRAME) if rank == 0 else None
        number, config = _first_call(parent, size)
        try:
            world = World.join(config)
        except EngineError as error:
            if parent is not None:
                parent.reply(number, RankError(str(error), of_storage=False))
            raise
        channel = RankChannel.open(config.fsdp.timeout_s)
        here = os.environ.get("GROUP_RANK", "0") == "0"
        pids = channel.gather(os.getpid() if here else 0)
        if parent is not None:
            parent.reply(number, RanksJoined(pids))
        RankServer(world, config, channel, parent, build or _build).serve()
        world.close()
    except BaseException as error:  # report any error before ending
        end(rank, channel, parent, error)


def end(
    rank: int, channel: RankChannel | None, parent: ParentSocket | None, error: BaseException
) -> NoReturn:
    """Report the reason and end the process at once.

    A group that has lost a rank cannot be closed in order.
    """
    if isinstance(error, ParentGone) and parent is not None:
        parent.abandon()
    others = isinstance(error, OutOfStep) and not isinstance(error.mine, RankError)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if others or lost_the_others(error):
        began = time.monotonic()
        _say(f"rank {rank} lost the others: {reason}")
        _tell(parent, RanksBroken(_missing(channel, error), reason))
        time.sleep(max(0.0, began + GRACE_S - time.monotonic()))
        os._exit(EXIT_LOST)
    _say("".join(traceback.format_exception(error)) + ENDED.format(rank=rank, reason=reason))
    _tell(parent, RanksBroken([rank], reason))
    os._exit(1)


def lost_the_others(error: BaseException) -> bool:
    """Return whether a rank failed because another one did not answer, as far as known."""
    known = (RanksMissing, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or "gloo/" in str(error)


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # the reader has gone


def _missing(channel: RankChannel | None, error: BaseException) -> list[int]:
    """Return the ranks that stopped answering; only rank 0 can tell."""
    if isinstance(error, RanksMissing):
        return error.ranks
    try:
        if channel is not None:
            channel.meet(GRACE_S)
    except RanksMissing as missing:
        return missing.ranks
    return []


def _tell(parent: ParentSocket | None, answer: RanksBroken) -> None:
    try:
        if parent is not None:
            parent.reply(0, answer)
    except ParentGone:
        pass


def _first_call(parent: ParentSocket | None, size: int) -> tuple[int, TrainingConfig]:
    """Receive the first call's number, 0 except on rank 0, and its configuration."""
    if parent is None:
        return 0, TrainingConfig.model_validate_json(_share_config(None, size))
    raw = parent.next(CONNECT_S)
    call = CALLS.decode(raw) if raw is not None else None
    if call is None or not isinstance(call.body, RankJoin):
        raise EngineError("the daemon did not send the configuration: use one version")
    shared = _share_config(call.body.config, size)
    return call.number, TrainingConfig.model_validate_json(shared)


def _share_config(config: str | None, size: int) -> str:
    """Share rank 0's configuration with every rank, before a process group exists.

    The other ranks pass None. It goes through torchrun's store. Raises torch's RuntimeError.
    """
    if size == 1 and config is not None:
        return config
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=CONFIG_TIMEOUT_S)
    store = TCPStore(address, port, size, is_master=False, timeout=timeout, multi_tenant=True)
    if config is not None:
        store.set(CONFIG_KEY, config)
        return config
    return store.get(CONFIG_KEY).decode()


def _build(start: RankStart, config: TrainingConfig, world: World) -> "Learner":
    from .learner import Learner

    learner = Learner.build(
        Path(start.model_dir),
        config,
        max_steps=start.max_steps,
        seed=start.seed,
        temperature=start.temperature,
        own=start.own,
        world=world,
    )
    freeze_libraries()
    return learner


if __name__ == "__main__":
    main()
