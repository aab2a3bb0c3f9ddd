"""NVIDIA MPS: the processes of a run that share a GPU compute at the same time in place of taking turns.

The control daemon runs as a child of the launcher, inside a process of ours that ends it: nothing is left of it
when either of them ends. Clients find it by variables of their environment.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import NoReturn

from ..errors import EngineError, UsageError
from ..gpus import VARIABLE
from ..process.spawn import LoggedProcess, kill_group, leave_with_parent

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
"""<https://docs.nvidia.com/deploy/mps>"""
READY_S = 10.0
POLL_S = 0.05
QUIT_S = 5.0
GRACE_S = 10.0


@contextlib.asynccontextmanager
async def mps_daemon(environ: Mapping[str, str], log: Path) -> AsyncGenerator[dict[str, str]]:
    """Run an MPS control daemon; yield the variables with which CUDA programs find it.

    If `environ` names one already, it is used. Raises UsageError where there is no MPS, EngineError if it does
    not start.
    """
    if PIPES in environ:
        yield {}
        return
    if shutil.which(CONTROL, path=environ.get("PATH")) is None:
        raise UsageError(
            f"launch.mps needs {CONTROL}, which comes with NVIDIA's driver: install it, or leave launch.mps out"
        )
    with tempfile.TemporaryDirectory(prefix="primerl-mps-", ignore_cleanup_errors=True) as name:
        variables = {PIPES: name, LOGS: name}
        # it serves all GPUs: clients name theirs as they would without it
        environment = {key: value for key, value in environ.items() if key != VARIABLE} | variables
        program = (sys.executable, "-m", "primerl.node.launch.mps")
        daemon = LoggedProcess("mps", program, log, environment)
        await daemon.start()
        try:
            await _started(daemon, Path(name) / "control")
            yield variables
        finally:
            await daemon.stop(GRACE_S)


async def _started(daemon: LoggedProcess, pipe: Path) -> None:
    """Wait for the daemon's pipe. Raises EngineError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while True:
                if await asyncio.to_thread(pipe.exists):
                    return
                if daemon.ended:
                    break
                await asyncio.sleep(POLL_S)
    reason = " ".join(daemon.last_lines(1))
    raise EngineError(
        f"{CONTROL} does not start ({reason}): see {daemon.log}, or leave launch.mps out"
    )


class _Ended(Exception):
    """SIGTERM."""


def _end(number: int, frame: object) -> NoReturn:
    raise _Ended


def main() -> int:
    """Run the control daemon until SIGTERM, or until the parent ends; return its exit code."""
    leave_with_parent(os.environ)
    signal.signal(signal.SIGTERM, _end)
    daemon = subprocess.Popen([CONTROL, "-f"], stdin=subprocess.DEVNULL)
    try:
        return daemon.wait()
    except _Ended:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([CONTROL], input=b"quit\n", timeout=QUIT_S, check=False)
            daemon.wait(QUIT_S)
        kill_group(os.getpid())  # of this process, too
        raise


if __name__ == "__main__":
    sys.exit(main())
