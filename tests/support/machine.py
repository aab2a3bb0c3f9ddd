"""The machine under a test: its processes, and small disks that a test can fill."""

import asyncio
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest

DEADLINE_S = 60.0


async def gone(pid: int) -> None:
    """Wait until no process runs under this id; init reaps the zombie of an orphan."""
    async with asyncio.timeout(DEADLINE_S):
        while psutil.pid_exists(pid):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
            await asyncio.sleep(0.02)


@contextmanager
def small_disk(where: Path, kib: int = 256) -> Generator[Path]:
    """A file system of that size at `where`; the test is skipped where none can be mounted."""
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def make_read_only(where: Path) -> None:
    """Allow no more writing on a small_disk()."""
    subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)


def fill(where: Path) -> Path:
    """Leave no byte free; returns the file to delete to make room again."""
    path = where / "filling"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path
    raise AssertionError("a disk without end")
