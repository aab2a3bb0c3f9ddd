"""The process of an environment, without the library: task i is scored as word i of `args.moods` says.

Run as a program by HostedEnvironment; all but the environment is that of the real one (environments/host.py).
"""

import asyncio
import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from support.counting_environment import ASK, STOP, counting_task

from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.environment import (
    Branch,
    EnvironmentFailed,
    EnvironmentStuck,
    Episode,
    Policy,
    Score,
    Split,
    Task,
)
from primerl.node.environments.host import EnvironmentSetUp, main
from primerl.node.environments.hosted import MOST_QUESTIONS
from primerl.node.environments.policies import (
    EpisodeStuck,
    Exchange,
    RecordedRollout,
    episode_judge,
)

PROMPT = [ASK, 40]
"""Of every task."""


class Moody:
    """Single turns; every reply earns 1, if its task lets it."""

    def __init__(self, set_up: EnvironmentSetUp) -> None:
        self._config = EnvironmentConfig.model_validate_json(set_up.config)
        self._moods: list[str] = self._config.args["moods"].split()

    name = "moody"
    status = ""
    judge_fault = ""

    async def start(self) -> None:
        """Nothing to start, but for one that waits."""
        if "waits-at-start" in self._moods:
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing to stop."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """Task number `index`."""
        if self._mood(index) == "unloadable":
            spin()
        return counting_task(index, split)

    async def prompt(self, task: Task) -> list[int]:
        """See Environment."""
        return list(PROMPT)

    async def demonstration(self, task: Task) -> None:
        """There is none."""

    async def run(self, task: Task, policy: Policy) -> Episode:
        """One turn."""
        try:
            return await self._play(task, policy)
        except (EnvironmentFailed, EnvironmentStuck) as error:
            return Episode(branches=[], score=Score(0.0), error=str(error))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Play again with the recorded turn."""
        return (await self._play(task, RecordedRollout(branches, stop_token_ids=(STOP,)))).score

    async def _play(self, task: Task, policy: Policy) -> Episode:
        deadline = self._config.timeout_s
        exchange = Exchange(policy, max_tokens=4, stop_token_ids=(STOP,), deadline=deadline)
        prompt = PROMPT
        try:
            async with exchange.bounded():
                said = await exchange.sample(prompt)
                await behave(self._mood(task.index))
        except EpisodeStuck as error:
            raise EnvironmentStuck(str(error)) from error
        mask = [False] * len(prompt) + [True] * len(said.token_ids)
        logprobs = [0.0] * len(prompt) + said.logprobs
        return Episode(
            [Branch.of_turns([*prompt, *said.token_ids], mask, logprobs, [said])], Score(1.0)
        )

    def _mood(self, index: int) -> str:
        return self._moods[index % len(self._moods)]


def spin() -> None:
    """Never return; other threads run."""
    while True:
        pass


async def behave(mood: str) -> None:
    """What the code of a reward does."""
    match mood:
        case "raises":
            raise EnvironmentFailed("no such thing")
        case "hangs":
            await asyncio.Event().wait()
        case "yields":
            while True:  # noqa: ASYNC110
                await asyncio.sleep(0)
        case "spins":
            await asyncio.gather(asyncio.sleep(0), spin_in_a_task())
        case "regex":
            re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter for years
        case "blocks":
            time.sleep(3600)  # noqa: ASYNC251
        case "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exits":
            os._exit(3)
        case "allocates":
            bytearray(4 << 30)
        case "connects":
            socket.create_connection(("127.0.0.1", int(os.environ["HOSTILE_PORT"])), 5.0).close()
        case "asks":
            socket.socket(socket.AF_UNIX)
        case "runs":
            subprocess.run(["true"], check=True)  # noqa: ASYNC221
        case "bombs":
            while True:
                os.fork()
        case "hides":
            hide()
        case "hoards":
            hoard()
        case "kills":
            os.kill(os.getppid(), signal.SIGKILL)
        case "strangles":
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (8, 8))
        case "reads":
            read_memory(os.getppid())
        case "judged":
            await ask_judge(1)
        case "floods":
            await ask_judge(MOST_QUESTIONS + 1)
        case "waits":
            await asyncio.sleep(0.3)
        case "heavy":
            end = time.monotonic() + 0.2
            while time.monotonic() < end:
                pass
        case _:
            pass


async def ask_judge(times: int) -> None:
    """Ask the judge several questions at once."""
    ask = episode_judge.get()
    assert ask is not None
    await asyncio.gather(*(ask(b'{"messages": [%d]}' % number) for number in range(times)))


def hide() -> None:
    """Leave a grandchild behind whose parent has ended, in a session of its own if that can be had."""
    if not (child := os.fork()):
        with suppress(OSError):
            os.setsid()
        if not os.fork():
            time.sleep(3600)
        os._exit(0)
    os.waitpid(child, 0)


def hoard() -> None:
    """Hold 160 MiB in each of 8 children."""
    for _ in range(8):
        if not os.fork():
            held = bytearray(os.urandom(1 << 20)) * 160
            time.sleep(3600)
            del held
    time.sleep(3600)


def read_memory(pid: int) -> None:
    """Copy memory of another process, as a debugger does."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.ptrace(16, pid, 0, 0):  # PTRACE_ATTACH
        raise PermissionError(ctypes.get_errno(), "not attached")


async def spin_in_a_task() -> None:
    """What a library does that scores by asyncio.gather()."""
    spin()


if __name__ == "__main__":
    main(Moody)
