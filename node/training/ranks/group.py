"""The ranks of a trainer, as the daemon sees them: they are started, rank 0 is asked, all can be killed.

Every wait has a deadline. Once anything is wrong with one rank all of them are ended, and whoever asks is told
which one it was: RankFailed.
"""

import asyncio
import hmac
import itertools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ...errors import EngineError, RankFailed
from ...frames import HEAD_BYTES, body_length, frame
from ...processes import LogTail, end_process, kill_group, to_the_end
from ...training_config import TrainingConfig
from ...unix_sockets import short
from .blame import Blame
from .calls import (
    MAX_FRAME,
    SOCKET_VARIABLE,
    TOKEN_VARIABLE,
    Answer,
    Ask,
    Broken,
    Call,
    End,
    Failed,
    Hello,
    Join,
    Joined,
    Reply,
    raised,
)
from .torchrun import command, environment, is_alone

logger = logging.getLogger(__name__)

PROGRAM = ("-m", f"{(__package__ or '').rpartition('.')[0]}.rank")
NOT_RUNNING = "the trainer backend is not running: call start() first"
HELLO_S = 10.0
BLAME_S = 5.0
"""How long torchrun and the dying ranks may take to say who was at fault."""
SILENT_S = 1.5
"""As BLAME_S, where rank 0 has said already who does not answer."""
LAST_WORDS_S = 1.0
REAP_S = 1.0
"""From the end of what a process writes to its own end."""
END_S = 20.0
"""How long ranks may take to end in peace."""
KILL_S = 5.0
"""How long torchrun may take to reap its killed ranks."""
MAX_HELLO = 1024
SOCKET = "rank0"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RankGroup:
    """One torchrun and its ranks, or one rank alone: start(), ask(), close(). Broken once, it stays so."""

    def __init__(
        self, config: TrainingConfig, ranks: int, program: Sequence[str] = PROGRAM
    ) -> None:
        """`ranks` on this machine; `program` is what torchrun is to run."""
        self._config = config
        self._ranks = ranks
        self._program = program
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tail: LogTail | None = None
        self._blame = Blame()
        self._streams: Streams | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._failing = asyncio.Lock()
        self.pids: list[int] = []
        """Of the ranks in order; 0 for one on another machine."""

    @property
    def directory(self) -> Path:
        """A folder that only we can read, while the group lives."""
        assert self._directory is not None, "start() comes first"
        return self._directory

    @property
    def pid(self) -> int | None:
        """Of torchrun, or of the rank alone; None before start()."""
        return self._process.pid if self._process else None

    async def start(self, parent: Path | None = None) -> None:
        """Start the ranks and wait until they are one world; files are exchanged in a folder below `parent`.

        Raises EngineError, RankFailed; nothing is left running then.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="primerl-ranks-", dir=parent))
        try:
            await self._start()
        except BaseException:  # also when cancelled: half started, the ranks are of no use
            await self.kill()
            raise

    async def ask(self, ask: Ask, timeout_s: float) -> Answer:
        """The answer of all ranks. Raises RankFailed, also after `timeout_s`, and what a learner raised."""
        self._check()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._asked[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(Call(number, ask))
                found = await answer
        except TimeoutError:
            await self._fail(f"no answer to {type(ask).__name__} in {timeout_s:g} s")
            self._check()
            raise
        finally:
            self._asked.pop(number, None)
        if isinstance(found, Failed):
            raise raised(found)
        return found

    async def close(self) -> None:
        """End the ranks, in peace if they are well; safe to call twice."""
        if self._failure is None and self._streams is not None and self._process is not None:
            self._failure = EngineError(NOT_RUNNING)
            try:
                async with asyncio.timeout(END_S):
                    await self._send(Call(0, End()))
                    await self._process.wait()
            except (TimeoutError, EngineError):
                logger.warning("the ranks did not end in %g s: they are killed", END_S)
            except asyncio.CancelledError:
                await self.kill()
                raise
        await self.kill()

    async def kill(self) -> None:
        """End everything now, also when cancelled meanwhile; safe to call twice."""
        self._failure = self._failure or EngineError(NOT_RUNNING)
        await to_the_end(self._bury(self._failure))

    async def _bury(self, failure: EngineError) -> None:
        process, directory = self._process, self._directory
        if process is not None:
            await self._kill(process)
        self._tell_all(failure)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._streams is not None:
            await _hang_up(self._streams[1])
        if self._tail is not None:
            await self._tail.close()
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    # -- starting ----------------------------------------------------------------------------------

    async def _start(self) -> None:
        path = self.directory / SOCKET
        token = secrets.token_hex(32)
        fsdp = self._config.fsdp
        server, connected = await _listen(path, token)
        try:
            await self._launch(path, token)
            async with asyncio.timeout(fsdp.start_timeout_s):
                self._streams = await self._first(connected)
                self._reading = asyncio.create_task(self._read(), name="ranks")
                joined = await self.ask(Join(self._config.model_dump_json()), fsdp.start_timeout_s)
        except TimeoutError:
            await self._fail(
                f"the ranks did not meet in {fsdp.start_timeout_s:g} s{self._others()}"
            )
            self._check()
            raise
        finally:
            connected.cancel()
            server.close()
        assert isinstance(joined, Joined)
        self.pids = joined.pids
        self._blame.pids = joined.pids

    def _others(self) -> str:
        """What to do about other machines, if there are to be any."""
        if self._config.fsdp.nodes == 1:
            return ""
        line = command(self._config, self._ranks, self._program)
        return (
            f": on the other machines, with NODE 1 to {self._config.fsdp.nodes - 1}, run `{line}`"
        )

    async def _launch(self, path: Path, token: str) -> None:
        line = command(self._config, self._ranks, self._program, here=True)
        if others := self._others():
            logger.warning("%d machines are waited for%s", self._config.fsdp.nodes - 1, others)
        variables = {SOCKET_VARIABLE: str(path), TOKEN_VARIABLE: token}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *line,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment(os.environ, self._config, self._ranks) | variables,
                start_new_session=True,  # a terminal's ctrl-C is not for it
            )
        except OSError as error:
            raise EngineError(
                f"the ranks cannot be started ({error}): free memory or processes"
            ) from error
        assert self._process.stdout is not None
        self._tail = LogTail(self._process.stdout, self._blame.note)
        self._tail.start()

    async def _first(self, connected: "asyncio.Future[Streams]") -> Streams:
        """Rank 0's connection, unless everything ends before it comes."""
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({connected, ended}, return_when=asyncio.FIRST_COMPLETED)
            if connected.done():
                return connected.result()
            await self._fail("the ranks ended before they met")
            self._check()
            raise AssertionError("a failure was noted")
        finally:
            ended.cancel()

    # -- talking -----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._streams is None:
            raise EngineError(NOT_RUNNING)

    async def _send(self, call: Call) -> None:
        assert self._streams is not None
        try:
            self._streams[1].write(await asyncio.to_thread(frame, call, MAX_FRAME))
            await self._streams[1].drain()
        except OSError:
            pass  # the end of the answers says more
        except ValueError as error:
            raise EngineError(f"this batch is too large ({error}): make smaller ones") from error

    async def _read(self) -> None:
        """Hand out answers until there are no more."""
        assert self._streams is not None
        reader, _ = self._streams
        try:
            while True:
                head = await reader.readexactly(HEAD_BYTES)
                body = await reader.readexactly(body_length(head, MAX_FRAME))
                reply = msgspec.msgpack.decode(body, type=Reply)
                if isinstance(reply.answer, Broken):
                    self._blame.told(reply.answer)
                    break
                self._hand_out(reply)
        except (OSError, asyncio.IncompleteReadError):
            pass
        except ValueError as error:
            await self._fail(f"rank 0 speaks no sense ({error})")
        await self._fail("the ranks ended")

    def _hand_out(self, reply: Reply) -> None:
        waiting = self._asked.get(reply.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply.answer)

    # -- ending ------------------------------------------------------------------------------------

    async def _fail(self, what: str) -> None:
        """End everything, and tell whoever waits who was at fault."""
        async with self._failing:
            if self._failure is not None:
                return
            await self._hear_out()
            size = len(self.pids) or self._ranks * self._config.fsdp.nodes
            self._failure = RankFailed(self._blame.text(what, size))
        logger.error("%s", self._failure)
        self._tell_all(self._failure)

    def _tell_all(self, failure: EngineError) -> None:
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(failure)

    async def _hear_out(self) -> None:
        """Let those who know whose fault it was say so, then end everything."""
        if self._tail is not None:
            known = asyncio.create_task(self._blame.known.wait())
            limit = SILENT_S if self._blame.silent else BLAME_S
            silence = asyncio.create_task(self._tail.wait(limit))
            await asyncio.wait({known, silence}, return_when=asyncio.FIRST_COMPLETED)
            known.cancel()
            silence.cancel()
        if self._process is not None and is_alone(self._config, self._ranks):
            await self._see_end(self._process)
        self._blame.hush()
        self._blame.mute(stopped(self.pids), "is stopped (SIGSTOP, or a debugger)")
        if self._process is not None:
            await self._kill(self._process)
        if self._tail is not None:
            await self._tail.wait(LAST_WORDS_S)

    async def _see_end(self, process: asyncio.subprocess.Process) -> None:
        """How the only rank ended, if it did: torchrun is not there to say so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                self._blame.exited(0, await process.wait())

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        """Ranks first, so that torchrun reaps them; then torchrun. What outlives it is killed by the kernel."""
        if process.returncode is None:
            for pid in filter(None, self.pids):
                kill_group(pid)
        await end_process(process, KILL_S)


def stopped(pids: Sequence[int]) -> list[int]:
    """The places in `pids` of processes that a signal has stopped; none where there is no /proc."""
    found: list[int] = []
    for place, pid in enumerate(pids):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "Tt":
            found.append(place)
    return found


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(HELLO_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        pass  # the other end is dead


async def _listen(path: Path, token: str) -> tuple[asyncio.Server, "asyncio.Future[Streams]"]:
    """A socket at `path`, and the first connection on it that knows `token`."""
    connected: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                head = await reader.readexactly(HEAD_BYTES)
                body = await reader.readexactly(body_length(head, MAX_HELLO))
            said = msgspec.msgpack.decode(body, type=Hello).token
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            said = ""
        if hmac.compare_digest(said.encode(), token.encode()) and not connected.done():
            connected.set_result((reader, writer))
        else:
            logger.warning("somebody else wants to be rank 0: turned away")
            writer.close()

    with short(path) as name:
        return await asyncio.start_unix_server(accept, name), connected
