"""NVIDIA MPS for the processes of a run, with a script in the place of NVIDIA's control daemon."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from primerl.node.config.run import LaunchConfig, RunConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.launch.launcher import NodeCommands, launch
from primerl.node.launch.mps import CONTROL, LOGS, PIPES, mps_daemon
from primerl.node.launch.placement import GpuPlacement
from primerl.node.ops.control import NodeState
from primerl.node.process.spawn import PARENT_VARIABLE

DAEMON = """#!/bin/sh
if [ "$1" != -f ]; then read command; echo "$command" > "$CUDA_MPS_PIPE_DIRECTORY/said"; exit; fi
echo $$ > {told}
echo "sees ${{CUDA_VISIBLE_DEVICES-everything}}" >> {told}
{start}
until [ -e "$CUDA_MPS_PIPE_DIRECTORY/said" ]; do sleep 0.02; done
cat "$CUDA_MPS_PIPE_DIRECTORY/said" >> {told}
"""


@pytest.fixture
def daemon_notes(tmp_path: Path) -> Path:
    """The file in which the daemon notes its pid, the GPUs that it sees, and the command that ends it."""
    return tmp_path / "told"


def environ(
    tmp_path: Path, daemon_notes: Path, start: str = 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"'
) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / CONTROL
    script.write_text(DAEMON.format(told=daemon_notes, start=start))
    script.chmod(0o755)
    return {
        **os.environ,
        **{"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "3"},
        PARENT_VARIABLE: str(os.getpid()),
    }


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


CLIENT = """
import os, time
open({found!r}, "a").write(os.environ[{variable!r}] + "\\n")
"""
TRAINER = """
open({ticket!r}, "w").write("T")
while len(open({found!r}).readlines()) < 2:
    time.sleep(0.02)
"""


class Clients(NodeCommands):
    """A trainer and workers that note where they look for the daemon."""

    def __init__(self, found: Path) -> None:
        self.found = found

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        return self._python(CLIENT + TRAINER, config)

    def worker(self, config: RunConfig, name: str) -> list[str]:
        return self._python(CLIENT, config)

    def _python(self, program: str, config: RunConfig) -> list[str]:
        ticket = str(config.run_dir / "ticket.txt")
        text = program.format(found=str(self.found), variable=PIPES, ticket=ticket)
        return [sys.executable, "-c", text]


class Silent:
    """A view that shows nothing."""

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def notes(daemon_notes: Path) -> list[str]:
    return daemon_notes.read_text().splitlines() if daemon_notes.exists() else []


def mode(path: Path) -> int:
    """Mode of a file that exists, else 0."""
    return path.stat().st_mode & 0o777 if path.exists() else 0


async def test_a_daemon_for_all_gpus_runs_as_long_as_the_run(
    tmp_path: Path, daemon_notes: Path
) -> None:
    async with mps_daemon(environ(tmp_path, daemon_notes), tmp_path / "mps.log") as variables:
        assert set(variables) == {PIPES, LOGS}
        directory = Path(variables[PIPES])
        assert mode(directory / "control")
        assert mode(directory) == 0o700, "other users cannot reach it"
        pid, sees = notes(daemon_notes)
        assert sees == "sees everything", "a client names its GPUs as it would without MPS"
        assert alive(int(pid))
    assert not alive(int(pid))
    assert notes(daemon_notes)[2:] == ["quit"], "it is asked to end before it is killed"
    assert not mode(directory)


async def test_a_daemon_that_runs_already_is_used(tmp_path: Path, daemon_notes: Path) -> None:
    own = {**environ(tmp_path, daemon_notes), PIPES: "/run/mps"}
    async with mps_daemon(own, tmp_path / "mps.log") as variables:
        assert variables == {}
    assert not notes(daemon_notes)


async def test_all_processes_of_a_run_find_its_daemon(
    tmp_path: Path, daemon_notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environ(tmp_path, daemon_notes)["PATH"])
    config = RunConfig(name="r", output_dir=tmp_path, launch=LaunchConfig(workers=1, mps=True))
    commands = Clients(tmp_path / "found")
    shared = GpuPlacement(("0",), (("0",),))
    await launch(config, [], view=Silent(), commands=commands, placement=shared)
    pipes, again = notes(commands.found)
    assert pipes == again
    assert notes(daemon_notes)[2:] == ["quit"]


async def test_without_mps_the_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"launch.mps needs {CONTROL}.*leave launch.mps out"):
        async with mps_daemon({"PATH": str(tmp_path)}, tmp_path / "mps.log"):
            pass


async def test_a_daemon_that_does_not_start_ends_the_run_with_its_reason(
    tmp_path: Path, daemon_notes: Path
) -> None:
    failing = environ(tmp_path, daemon_notes, start="echo 'no permission'; exit 1")
    with pytest.raises(EngineError, match=r"does not start \(no permission\): see .*mps.log"):
        async with mps_daemon(failing, tmp_path / "mps.log"):
            pass


LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from primerl.node.config.run import LaunchConfig, RunConfig
from primerl.node.launch.launcher import NodeCommands, launch
from primerl.node.launch.mps import mps_daemon
from primerl.node.process.spawn import PARENT_VARIABLE

async def main():
    async with mps_daemon({**os.environ, PARENT_VARIABLE: str(os.getpid())}, Path(sys.argv[1])):
        print("runs", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def launcher(tmp_path: Path, daemon_notes: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "mps.log")]
    variables = environ(tmp_path, daemon_notes)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        yield process
        process.kill()


def test_a_daemon_does_not_outlive_a_launcher_that_is_killed(
    launcher: subprocess.Popen[str], daemon_notes: Path
) -> None:
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "runs\n"
    pid = int(daemon_notes.read_text().split()[0])
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))
