"""The daemon's control of a trainer's ranks: start, call, kill and failure attribution.

Every wait has a deadline. After any fault of one rank all of them are ended, and every call raises RankFailed
with the rank at fault. torchrun starts the ranks; a single rank is started directly. The daemon's machine is
node 0, so that rank 0 is beside the daemon: with several machines that needs a static rendezvous.
"""

import asyncio
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.training import TrainingConfig
from ..errors import EngineError, RankFailed, StorageError, UsageError
from ..process.child_process import ChildProcess
from ..process.exit_reason import signal_name
from ..process.frames import ProcessMessage, frame
from ..process.spawn import end_process, kill_group, without_secrets
from ..removal import SCRATCH, remove_scratch
from .rank_messages import (
    ENDED,
    EXIT_LOST,
    MAX_FRAME,
    REPLIES,
    RankAnswer,
    RankEnd,
    RankError,
    RankJoin,
    RankRequest,
    RanksBroken,
    RanksJoined,
    name_of,
)

logger = logging.getLogger(__name__)

PROGRAM = ("-m", f"{__package__}.rank")
NOT_RUNNING = "the trainer backend is not running: call start() first"
ATTRIBUTION_S = 5.0
"""Time for torchrun and the dying ranks to report the rank at fault."""
SILENT_S = 1.5
"""As ATTRIBUTION_S, if rank 0 has already reported the ranks that do not answer."""
LAST_LINES_S = 1.0
REAP_S = 1.0
"""Time from the end of a process's log to its exit."""
END_S = 20.0
"""Time for ranks to shut down when asked."""
KILL_S = 5.0
"""Time for torchrun to reap its killed ranks."""
TORCHRUN = ("-m", "torch.distributed.run")
SHUTDOWN_S = 2
"""Time that torchrun gives ranks to end after SIGTERM."""
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with torch's directory of compiled code."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0"}
"""Environment that torchrun would give a single rank."""
SOCKET = "rank0"
TAIL_LINES = 5
ADVICE = "look at the log above, free memory or lower training.seq_len, then `train --resume`"
_ENDED = re.compile(ENDED.format(rank=r"(\d+)", reason="(.*)"))
_EXIT = re.compile(r"exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


class FailureAttribution:
    """Finds the rank at fault from rank 0's reports and the ranks' and torchrun's output.

    No I/O. A rank that ends because of another one is never at fault: the others always fail a moment after the
    first.
    """

    def __init__(self) -> None:
        self.pids: list[int] = []
        """Process ids of the ranks in order, once they are known."""
        self.known = asyncio.Event()
        """Set when a line or an exit code has named a rank."""
        self._words: dict[int, str] = {}
        self._exits: dict[int, str] = {}
        self.silent: dict[int, str] = {}
        """Reasons why ranks do not answer, as far as rank 0 can tell."""
        self._aborts: dict[int, str] = {}
        """Ranks ended by SIGABRT. NCCL aborts a rank that waited too long, so these are rarely at fault."""
        self._hushed = False
        """Whether torchrun writes its own traceback and table by now, which add nothing."""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def note(self, line: str) -> None:
        """Read and log a line written by a rank or torchrun."""
        if match := _ENDED.search(line):
            self._words.setdefault(int(match[1]), match[2])
            self.known.set()
        if match := _EXIT.search(line):
            self.hush()
            pid, local_rank = int(match[3]), int(match[2])
            self.exited(self.pids.index(pid) if pid in self.pids else local_rank, int(match[1]))
        logger.log(logging.DEBUG if self._hushed else logging.WARNING, "ranks: %s", line)
        if not self._hushed:
            self._tail.append(line)

    def hush(self) -> None:
        """Log further lines at debug level only: torchrun complains of being ended."""
        self._hushed = True

    def mute(self, ranks: Sequence[int], why: str) -> None:
        """Record ranks that do not answer."""
        for rank in ranks:
            self.silent.setdefault(rank, why)

    def exited(self, rank: int, code: int) -> None:
        """Record the exit code of a rank, negative for the signal that killed it."""
        if code == EXIT_LOST:
            return
        reason = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGABRT:
            self._aborts.setdefault(rank, reason)
        else:
            self._exits.setdefault(rank, reason)
        self.known.set()

    def text(self, what: str, size: int) -> str:
        """Return the rank at fault, the reason and advice in one line; `what` if no rank is known."""
        for reasons in (self._words, self._exits, self.silent, self._aborts):
            if reasons:
                rank = min(reasons)
                return f"rank {rank} of {size} failed: {reasons[rank]}; {ADVICE}"
        last = " | ".join(self._tail)
        return f"{what}{f' ({last})' if last else ''}; {ADVICE}"


class RankGroup(ChildProcess):
    """One torchrun and its ranks, or a single rank; unusable after a failure."""

    Error = EngineError
    Lost = RankFailed
    answers = REPLIES
    max_frame = MAX_FRAME

    def __init__(
        self,
        config: TrainingConfig,
        ranks: int,
        program: Sequence[str] = PROGRAM,
        *,
        start_s: float = 0.0,
    ) -> None:
        """Configure `ranks` on this machine; `program` is the program that torchrun runs.

        They have `start_s` seconds to meet; 0: as long as the config says.
        """
        super().__init__("ranks", "the ranks", program, {})
        self._config = config
        self._ranks = ranks
        self._rank_program = program
        self._start_s = start_s
        self._directory: Path | None = None
        self._attribution = FailureAttribution()
        self.pids: list[int] = []
        """Process ids of the ranks in order; 0 for a rank on another machine."""

    @property
    def directory(self) -> Path:
        """Folder that only this user can read, while the group lives."""
        assert self._directory is not None, "start() comes first"
        return self._directory

    async def start(self, parent: Path | None = None) -> None:
        """Start the ranks and wait until they are one world.

        Files are exchanged in a folder below `parent`. Raises EngineError, RankFailed; nothing is left running
        then.
        """
        self._directory = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}ranks-", dir=parent))
        try:
            await self._start()
        except BaseException:  # also when cancelled: half-started ranks are useless
            await self.kill()
            raise

    async def ask(self, request: RankRequest, timeout_s: float) -> RankAnswer:
        """Send a request and return the answer of all ranks.

        Raises RankFailed, also after `timeout_s`, and the learner's errors.
        """
        number = next(self._numbers)
        try:
            data = await asyncio.to_thread(frame, ProcessMessage(number, request), MAX_FRAME)
        except ValueError as error:
            raise EngineError(f"this batch is too large ({error}): make smaller ones") from error
        answer: RankAnswer = await self._exchange(number, data, name_of(request), timeout_s)
        if isinstance(answer, RankError):
            raise (StorageError if answer.of_storage else EngineError)(answer.detail)
        return answer

    async def close(self) -> None:
        """End the ranks, in order if they are healthy; safe to call twice."""
        await self.end(END_S)

    # -- starting ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._program = command(self._config, self._ranks, self._rank_program, here=True)
        self._environment = environment(os.environ, self._config, self._ranks)
        others = self._others()
        if others:
            logger.warning("%d machines are waited for%s", self._config.fsdp.nodes - 1, others)
        limit_s = self._start_s or self._config.fsdp.start_s
        try:
            async with asyncio.timeout(limit_s):
                await self.spawn_at_socket(
                    self.directory / SOCKET, "the ranks ended before they met"
                )
                joined = await self.ask(RankJoin(self._config.model_dump_json()), limit_s)
        except TimeoutError as error:
            await self._lose(f"the ranks did not meet in {limit_s:g} s{others}")
            raise self._failed() from error
        assert isinstance(joined, RanksJoined)
        self.pids = self._attribution.pids = joined.pids

    def _others(self) -> str:
        """Return how to start the ranks of other machines; empty if there are none."""
        if self._config.fsdp.nodes == 1:
            return ""
        line = command(self._config, self._ranks, self._rank_program)
        return (
            f": on the other machines, with NODE 1 to {self._config.fsdp.nodes - 1}, run `{line}`"
        )

    # -- messages ----------------------------------------------------------------------------------

    def _take(self, message: ProcessMessage[Any]) -> None:
        if isinstance(message.body, RanksBroken):
            broken = message.body
            self._attribution.mute(broken.ranks, f"does not answer ({broken.detail})")
            raise EOFError("the ranks end")
        super()._take(message)

    def _note(self, line: str) -> None:
        self._attribution.note(line)

    # -- ending ------------------------------------------------------------------------------------

    def _closed(self) -> EngineError:
        return EngineError(NOT_RUNNING)

    def _request_end(self) -> None:
        self._send(RankEnd())

    async def _find_reason(self, fault: str) -> str:
        """End everything, after giving the ranks and torchrun time to report the rank at fault."""
        await self._hear_out()
        size = len(self.pids) or self._ranks * self._config.fsdp.nodes
        reason = self._attribution.text(fault or "the ranks ended", size)
        logger.error("%s", reason)
        return reason

    async def _hear_out(self) -> None:
        attribution = self._attribution
        if self._log is not None:
            known = asyncio.create_task(attribution.known.wait())
            limit_s = SILENT_S if attribution.silent else ATTRIBUTION_S
            silence = asyncio.create_task(self._log.wait(limit_s))
            await asyncio.wait({known, silence}, return_when=asyncio.FIRST_COMPLETED)
            known.cancel()
            silence.cancel()
        if self._process is not None and is_alone(self._config, self._ranks):
            with suppress(TimeoutError):  # there is no torchrun to report how a single rank ended
                async with asyncio.timeout(REAP_S):
                    attribution.exited(0, await self._process.wait())
        attribution.hush()
        attribution.mute(stopped(self.pids), "is stopped (SIGSTOP, or a debugger)")
        if self._process is not None:
            await self._kill_now(self._process)
        if self._log is not None:
            await self._log.wait(LAST_LINES_S)

    async def _kill_now(self, process: asyncio.subprocess.Process) -> None:
        """Kill ranks first, so that torchrun reaps them; then torchrun. The kernel kills the rest."""
        if process.returncode is None:
            for pid in filter(None, self.pids):
                kill_group(pid)
        await end_process(process, KILL_S)

    async def _bury(self) -> None:
        await super()._bury()
        if self._directory is not None:
            await asyncio.to_thread(remove_scratch, self._directory)


def is_alone(config: TrainingConfig, ranks: int) -> bool:
    """Return whether there is one rank on this machine and no other machine."""
    return ranks * config.fsdp.nodes == 1


def command(
    config: TrainingConfig, ranks: int, program: Sequence[str], *, here: bool = False
) -> "Command":
    """Return the command line for this machine, or without `here` for another one.

    There NODE stands for the machine's number, from 1. A single rank runs `program` itself. Raises UsageError
    for several machines without a rendezvous address.
    """
    fsdp = config.fsdp
    if is_alone(config, ranks):
        return Command([sys.executable, "-P", *program])
    places = ["--nproc-per-node", str(ranks), "--max-restarts", "0"]
    if fsdp.nodes == 1:
        places += ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        host, port = _meeting(fsdp.rendezvous)
        places += ["--nnodes", str(fsdp.nodes), "--node-rank", "0" if here else "NODE"]
        places += ["--master-addr", host, "--master-port", port]
        places += ["--rdzv-conf", f"timeout={int(fsdp.start_s)}"]
    python = [sys.executable, "-P"] if here else ["python"]
    return Command([*python, *TORCHRUN, *places, *program])


class Command(list[str]):
    """A command line that prints as a shell would read it."""

    def __str__(self) -> str:
        return shlex.join(self)


def environment(inherited: Mapping[str, str], config: TrainingConfig, ranks: int) -> dict[str, str]:
    """Return the environment of torchrun and its ranks, or of a single rank.

    What they compile is kept for the next start, also where /tmp, torch's own choice, is emptied meanwhile.
    """
    inherited = without_secrets(inherited)
    home = Path(os.path.expanduser("~"))
    if os.access(home, os.W_OK):
        inherited = {COMPILED: str(home / ".primerl" / "compiled"), **inherited}
    if is_alone(config, ranks):
        return {**inherited, **ALONE, "PYTHONSAFEPATH": "1"}
    threads = config.threads or max(1, (os.cpu_count() or 1) // ranks)
    alone = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        "OMP_NUM_THREADS": str(threads),
        **(alone if config.fsdp.nodes == 1 else {}),  # no other machine has to reach the ranks
        **inherited,
        "PYTHONSAFEPATH": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
    }


def _meeting(rendezvous: str) -> tuple[str, str]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            "training.fsdp.rendezvous must be host:port of this machine where fsdp.nodes > 1, "
            "e.g. 10.0.0.1:29500"
        )
    return host.strip("[]"), port


def stopped(pids: Sequence[int]) -> list[int]:
    """Return the indices in `pids` of processes stopped by a signal; empty without /proc."""
    indices: list[int] = []
    for place, pid in enumerate(pids):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "Tt":
            indices.append(place)
    return indices
