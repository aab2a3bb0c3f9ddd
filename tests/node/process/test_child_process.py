"""Real child processes: requests, every way of failing, and that no process is left behind."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import echo_process as echo
from support.machine import DEADLINE_S, gone

from primerl.node.errors import EngineError, EngineLost
from primerl.node.process.child_process import ChildProcess
from primerl.node.process.spawn import PARENT_VARIABLE
from primerl.node.process.unix_sockets import TOKEN_VARIABLE, connected
from primerl.node.removal import SCRATCH

PROGRAM = (sys.executable, "-P", echo.__file__)


class Child(ChildProcess):
    """Asks echo_process.py."""

    Error = EngineError
    Lost = EngineLost
    answers = echo.MESSAGES
    max_frame = echo.MAX_FRAME

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
        super().__init__("echo", "the echo", program, environment)

    async def ask(self, body: str, timeout_s: float | None = DEADLINE_S) -> str:
        answer = await self._answer(body, timeout_s)
        await self._expect(answer, str)
        return answer

    def watch(self, every_s: float, silent_s: float) -> None:
        self._watch("ping", every_s, silent_s)


@asynccontextmanager
async def running(program: Sequence[str] = PROGRAM) -> AsyncGenerator[Child]:
    """Run a child that answers; afterwards its process is gone."""
    child = Child(program)
    try:
        await child.spawn()
        assert await child.ask("there?") == "there?"
        yield child
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await child.kill()
        assert child.pid is not None
        assert not psutil.pid_exists(child.pid)  # a zombie exists: it was reaped, too


async def lost(child: Child, body: str, timeout_s: float | None = DEADLINE_S) -> str:
    """Return the reason why this request loses the child; pending and later requests get the same one."""
    beside = asyncio.create_task(child.ask("wait 600"))
    await asyncio.sleep(0)
    with pytest.raises(EngineLost) as caught:
        await child.ask(body, timeout_s)
    for call in (beside, child.ask("there?")):
        with pytest.raises(EngineLost) as again:
            await call
        assert str(again.value) == str(caught.value) == child.fault
    assert child.lost.is_set()
    return child.fault


async def test_many_requests_are_under_way_and_answers_come_when_they_are_ready() -> None:
    async with running() as child:
        slow = asyncio.create_task(child.ask("wait 0.3"))
        found = await asyncio.gather(*(child.ask(f"number {n}") for n in range(100)))
        assert found == [f"number {n}" for n in range(100)]
        assert not slow.done()
        assert await slow == "wait 0.3"


async def test_a_caller_that_gives_up_takes_no_answer_of_another() -> None:
    async with running() as child:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await child.ask("wait 0.2")
        assert [await child.ask("wait 0.3"), await child.ask("next")] == ["wait 0.3", "next"]


async def test_printed_lines_go_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running() as child:
        assert await child.ask("print hello from a library") == "print hello from a library"
    assert "echo: hello from a library" in caplog.text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("die", "the echo ended with exit code 3 (I was told to die): look at its log lines above"),
        (
            "kill SIGKILL",
            "the echo was killed from outside: unless you did that, the machine ran out",
        ),
        ("kill SIGSEGV", "the echo crashed (SIGSEGV): look at its log lines above"),
        ("garbage", "the process for the echo speaks no sense"),
        ("huge", "a frame of 4294967295 bytes, at most 4096 are allowed"),
    ],
)
async def test_a_child_that_dies_or_sends_garbage_is_lost_with_the_reason(
    body: str, reason: str
) -> None:
    async with running() as child:
        assert reason in await lost(child, body)


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_child_that_hangs_is_lost_at_the_deadline(stopped: bool) -> None:
    async with running() as child:
        if stopped:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGSTOP)
        assert "the echo gave no answer to str in 0.5 s" in await lost(
            child, "there?" if stopped else "hang", 0.5
        )


async def test_a_child_that_hangs_misses_its_heartbeat() -> None:
    async with running() as child:
        child.watch(0.05, 1.0)
        await asyncio.sleep(1.5)
        assert child.fault == ""
        assert child.silent_s < 1.0
        assert "the echo gave no answer within 1 s" in await lost(child, "hang", None)


async def test_a_request_that_is_too_long_is_refused_and_the_child_lives_on() -> None:
    async with running() as child:
        with pytest.raises(ValueError, match="at most 4096 are allowed"):
            await child.ask("x" * echo.MAX_FRAME)
        assert await child.ask("next") == "next"


async def test_a_child_with_an_unexpected_answer_is_lost() -> None:
    async with running() as child:
        with pytest.raises(EngineLost, match="speaks another language: install one version"):
            await child._expect(b"", str)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(EngineLost, match="another language"):
            await child.ask("next")


async def test_end_asks_first_then_kills_the_child_and_its_descendants(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running() as child:
        pending = asyncio.create_task(child.ask("wait 600"))
        descendant = int(await child.ask("descend"))
        assert psutil.pid_exists(descendant)
        await child.end(1.0)  # the descendant has its pipes still: so it is not at an end by itself
        assert "closed in peace" in caplog.text
        await gone(descendant)
        for call in (pending, child.ask("next")):
            with pytest.raises(EngineError, match="the echo was closed: start another") as caught:
                await call
            assert type(caught.value) is EngineError
        assert not child.lost.is_set()
    caplog.clear()
    async with running() as child:
        await child.end(DEADLINE_S)
        assert "did not end within" not in caplog.text
    async with running() as child:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        await child.end(0.1)
        assert "did not end within 0.1 s" in caplog.text


async def test_a_cancelled_end_still_kills_the_child() -> None:
    async with running() as child:
        pending = asyncio.create_task(child.ask("hang"))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(child.end(DEADLINE_S))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert child.pid is not None
        assert not psutil.pid_exists(child.pid)
        with pytest.raises(EngineError):
            await pending


async def test_a_child_that_is_killed_while_it_is_being_started_does_not_stay() -> None:
    child = Child()
    starting = asyncio.create_task(child.spawn())
    await asyncio.sleep(0)
    await child.kill()
    assert child.pid is None, "it is not there yet"
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineError):
            await starting
    assert child.pid is not None
    assert not psutil.pid_exists(child.pid)


async def test_a_program_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    for socket in (False, True):
        child = Child((str(tmp_path / "nothing"),))
        start = child.spawn_at_socket(tmp_path / "s", "") if socket else child.spawn()
        with pytest.raises(EngineError, match="cannot be started") as caught:
            await start
        assert type(caught.value) is EngineError
        with pytest.raises(EngineError):
            await child.ask("anything")
        await child.kill()


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
from test_child_process import Child, PROGRAM

async def main():
    if sys.argv[2]:
        child = Child((*PROGRAM, "socket"))
        await child.spawn_at_socket(Path(sys.argv[2]), "")
        print(child.pid, flush=True)
    else:
        child = Child()
        await child.spawn()
        print(child.pid, await child.ask("descend"), flush=True)
    if sys.argv[3]:
        await child.ask("hang", None)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("socket", [False, True])
async def test_a_child_ends_with_a_parent_that_is_killed(
    tmp_path: Path, socket: bool, busy: bool
) -> None:
    """Also one that hangs, and so does not see the end of its input."""
    folder = tmp_path / f"{SCRATCH}of the socket"
    folder.mkdir()
    arguments = [
        f"{Path(__file__).parent}:{Path(echo.__file__).parents[1]}",
        str(folder / "s") if socket else "",
        "1" * busy,
    ]
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pids = [int(one) for one in (await parent.stdout.readline()).split()]
    try:
        assert len(pids) == 1 + (not socket)
        parent.kill()
        for pid in pids[:1]:
            await gone(pid)
        assert folder.exists() != socket
    finally:
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        if parent.returncode is None:
            parent.kill()
        await parent.communicate()


async def test_only_a_process_with_the_token_connects_to_the_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "socket"
    child = Child((*PROGRAM, "socket"))
    starting = asyncio.create_task(child.spawn_at_socket(path, ""))
    async with asyncio.timeout(DEADLINE_S):
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    with await asyncio.to_thread(connected, path) as stranger:
        stranger.sendall(b"\xff\xff\xff\xff")
        try:
            await starting
            assert [await child.ask("one"), await child.ask("two")] == ["one", "two"]
            assert "without the right token" in caplog.text
            assert child.pid is not None
            assert TOKEN_VARIABLE not in os.environ
            with pytest.raises(EngineLost, match=r"no answer to str in 0\.3 s"):
                await child.ask("hang", 0.3)
        finally:
            await child.kill()
    assert not psutil.pid_exists(child.pid)


async def test_a_child_that_ends_before_it_connects_is_lost(tmp_path: Path) -> None:
    child = Child((*PROGRAM, "unconnected"))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineLost, match="ended before it connected"):
            await child.spawn_at_socket(tmp_path / "socket", "ended before it connected")
    await child.kill()
