"""Wait for the end of processes in tests."""

import asyncio

import psutil  # pyright: ignore[reportMissingModuleSource]

DEADLINE_S = 60.0


async def gone(pid: int) -> None:
    """Wait until no process runs under this id; init reaps the zombie of an orphan."""
    async with asyncio.timeout(DEADLINE_S):
        while psutil.pid_exists(pid):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
            await asyncio.sleep(0.02)
