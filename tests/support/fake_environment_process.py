"""A fake environment process: word i of `args.moods` selects how task i is scored.

Run as a program by HostedEnvironment; all but the environment is that of the real one (environments/host.py).
"""

import asyncio
import ctypes
import errno
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from support.counting_environment import ASK, STOP, counting_task
from support.sandbox_probes import PROBES

from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments import environment
from primerl.node.environments.host import EnvironmentSetUp, main
from primerl.node.environments.policies import (
    EpisodeStuck,
    Exchange,
    RecordedRollout,
    episode_judge,
)

PROMPT = [ASK, 40]
"""Of every task."""
SECRET = Path(os.environ.get("HOSTILE_FILE", ""))
"""A file that is none of its business."""


class Moody:
    """Single turns; a reply of two tokens earns 1, if its task lets it."""

    def __init__(self, set_up: EnvironmentSetUp) -> None:
        self._config = EnvironmentConfig.model_validate_json(set_up.config)
        self._moods: list[str] = self._config.args["moods"].split()

    name = "moody"
    status = ""
    judge_fault = ""
    stops = None

    async def start(self) -> None:
        """Nothing to start, but for one that waits."""
        if "waits-at-start" in self._moods:
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing to stop."""

    async def task(self, index: int, split: environment.Split = "train") -> environment.Task:
        """Task number `index`."""
        if self._mood(index) == "unloadable":
            spin()
        return counting_task(index, split)

    async def prompt(self, task: environment.Task) -> list[int]:
        """See Environment."""
        return list(PROMPT)

    async def demonstration(self, task: environment.Task) -> None:
        """There is none."""

    async def run(self, task: environment.Task, policy: environment.Policy) -> environment.Episode:
        """One turn."""
        try:
            return await self._play(task, policy)
        except (environment.EnvironmentFailed, environment.EnvironmentStuck) as error:
            return environment.Episode(branches=[], score=environment.Score(0.0), error=str(error))

    async def score(
        self, task: environment.Task, branches: Sequence[environment.Branch]
    ) -> environment.Score:
        """Play again with the recorded turn."""
        return (await self._play(task, RecordedRollout(branches, stop_token_ids=(STOP,)))).score

    async def _play(
        self, task: environment.Task, policy: environment.Policy
    ) -> environment.Episode:
        deadline = self._config.timeout_s
        exchange = Exchange(policy, max_tokens=4, stop_token_ids=(STOP,), deadline=deadline)
        prompt = PROMPT
        try:
            async with exchange.bounded():
                said = await exchange.sample(prompt)
                await behave(self._mood(task.index))
        except EpisodeStuck as error:
            raise environment.EnvironmentStuck(str(error)) from error
        mask = [False] * len(prompt) + [True] * len(said.token_ids)
        logprobs = [0.0] * len(prompt) + said.logprobs
        return environment.Episode(
            [environment.Branch.of_turns([*prompt, *said.token_ids], mask, logprobs, [said])],
            environment.Score(float(len(said.token_ids) == 2)),
        )

    def _mood(self, index: int) -> str:
        return self._moods[index % len(self._moods)]


def spin() -> None:
    """Never return; other threads run."""
    while True:
        pass


async def behave(mood: str) -> None:
    """Do what the reward code of this mood does."""
    match mood:
        case "raises":
            raise environment.EnvironmentFailed("no such thing")
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
            ctypes.string_at(0)
        case "exits":
            os._exit(3)
        case "allocates":
            bytearray(4 << 30)
        case "holds":
            bytearray(128 << 20)
        case "connects":
            socket.create_connection(("127.0.0.1", int(os.environ["HOSTILE_PORT"])), 5.0).close()
        case "asks":
            socket.socket(socket.AF_UNIX)
        case "runs":
            subprocess.run(["true"], check=True)  # noqa: ASYNC221
        case "bombs":
            bomb()
        case "shares":
            share(5 << 30)
        case "memfds":
            os.memfd_create("memory")
        case "fills":
            fill()
        case "tells":
            if "HF_TOKEN" not in os.environ:
                raise PermissionError("there is no token")
        case "looks":
            look_at_others()
        case "hides":
            hide()
        case "hoards":
            hoard()
        case "forks":
            fork_a_pool()
        case "kills":
            os.kill(os.getppid(), signal.SIGKILL)
        case "strangles":
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (8, 8))
        case "reads":
            read_memory(os.getppid())
        case "judged":
            await ask_judge(1)
        case "floods":
            from primerl.node.environments.hosted import MOST_QUESTIONS

            await ask_judge(MOST_QUESTIONS + 1)
        case "waits":
            await asyncio.sleep(0.3)
        case "works":
            work()
        case "pours":
            pour()
        case "changes-modes":
            os.chmod(SECRET, 0o777)
            os.utime(SECRET, (1.0, 1.0))
        case probe if probe in PROBES:
            PROBES[probe]()
        case "heavy":
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
        case _:
            pass


async def ask_judge(times: int) -> None:
    """Ask the judge several questions at once."""
    ask = episode_judge.get()
    assert ask is not None
    await asyncio.gather(*(ask(b'{"messages": [%d]}' % number) for number in range(times)))


def bomb() -> None:
    """Double the processes again and again: 512, should nothing stop them, for half a minute."""
    for _ in range(9):
        os.fork()
    time.sleep(30)
    os._exit(1)


def share(nbytes: int) -> None:
    """Hold memory that counts as shared with other processes."""
    with mmap.mmap(-1, nbytes) as held:
        for at in range(0, nbytes, 1 << 20):
            held[at : at + (1 << 20)] = b"x" * (1 << 20)
        time.sleep(30)


def pour() -> None:
    """Take 600 MiB of the home's disk."""
    for number in range(3):
        with Path.home().joinpath(f"{number}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 200 << 20)
    time.sleep(3600)


def fill() -> None:
    """Write 700 MiB to each place that takes files; an error if none has room."""
    full = 0
    for place in ("/tmp", Path.home(), "/dev/shm", "/dev", "/"):
        try:
            with (Path(place) / "filling").open("wb") as file:
                for _ in range(700):
                    file.write(bytes(1 << 20))
        except OSError:
            full += 1
    if full == 5:
        raise OSError(errno.ENOSPC, "no room anywhere")


def work() -> None:
    """Do what honest code does: read about itself and the machine, use threads, keep files."""
    assert Path("/proc/self/status").read_text()
    assert Path("/proc/self/task").is_dir()
    assert "cpu" in Path("/proc/stat").read_text()
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(str, range(3))) == ["0", "1", "2"]
    import numpy as np

    matrix = np.ones((256, 256))
    assert (matrix @ matrix)[0, 0] == 256
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "a")
        file.write_text("a")
        shutil.copy(file, file.with_name("b"))
        file.with_name("b").rename(file.with_name("c"))
        shutil.copytree(directory, Path(directory, "copied"))
        file.unlink()
        file.touch()
        assert file.exists()
        shutil.make_archive(str(Path(directory, "packed")), "tar", directory, "copied")
        shutil.unpack_archive(Path(directory, "packed.tar"), Path(directory, "unpacked"))
        assert Path(directory, "unpacked", "copied", "c").read_text() == "a"
    notes = Path.home() / ".cache" / "own" / "notes"
    notes.parent.mkdir(parents=True, exist_ok=True)
    notes.write_text("kept")
    with open("/dev/null", "w") as nothing:
        nothing.write("nothing")


def look_at_others() -> None:
    """Find a process that is not one's own, by the files about it."""
    own = {os.getpid(), 1, 2}
    others = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - own
    if not others:
        raise PermissionError("nobody else is there")


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
    """Hold 100 MiB in each of 8 children."""
    for _ in range(8):
        if not os.fork():
            held = bytearray(os.urandom(1 << 20)) * 100
            time.sleep(3600)
            del held
    time.sleep(3600)


def fork_a_pool() -> None:
    """Hold 200 MiB that 4 children see too, as a pool of workers does, for a second."""
    held = bytearray(os.urandom(1 << 20)) * 200
    children: list[int] = []
    for _ in range(4):
        if not (child := os.fork()):
            time.sleep(1.0)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    del held


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
