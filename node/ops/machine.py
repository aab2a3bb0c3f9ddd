"""Measure what the processes of a node use of their machine.

Reading it walks /proc: not often, and in a thread of its own, as those that the node's loop lends may all be
busy for long, with a status waiting.
"""

import asyncio
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..gpus import GpuShare, taken_by_others, visible_memory
from .figures import MachineRow

SAME_S = 10.0
"""Age up to which a reading is given again."""
NOT_BUSY = ("idle", "iowait", "steal", "guest")
"""Times of processors in which no program of this machine computes; a guest's are in those of users, too."""
LATE_SAMPLES_S = 2.0
"""Age beyond the last reading of what the driver measured: it measures every second or so."""


class Machine:
    """The processes of this node: this one and all below it."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._thread = ThreadPoolExecutor(1, "machine")
        self._row: MachineRow | None = None
        self._at = 0.0
        self._cpu: dict[tuple[int, float], float] = {}
        """CPU seconds of each process so far, by pid and time of its start."""

    async def look(self) -> MachineRow:
        """Return the present figures."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.read)

    def read(self) -> MachineRow:
        """Do look(), in this thread."""
        now = time.monotonic()
        if self._row is None or now - self._at >= SAME_S:
            self._row = self._read(now)
            self._at = now
        return self._row

    def _read(self, now: float) -> MachineRow:
        import psutil  # loaded by the first view

        known = self._cpu
        self._cpu, memory = _own_processes()
        since = self._at if known else now - (time.time() - psutil.Process().create_time())
        used = sum(spent - known.get(name, 0.0) for name, spent in self._cpu.items())
        free = shutil.disk_usage(self._data_dir).free
        gpus = visible_memory()
        busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
        return MachineRow(
            cpu_cores=round(used / max(now - since, 0.001), 3),
            memory_bytes=memory,
            disk_free_bytes=free,
            gpus=len(gpus),
            gpu_busy=fmean(busy) if busy else None,
            gpu_memory_bytes=sum(gpu.total - gpu.free for gpu in gpus),
            gpu_memory_total_bytes=sum(gpu.total for gpu in gpus),
        )


Birth = tuple[int, float]
"""Pid of a process, and the time of its start."""


def _own_processes() -> tuple[dict[Birth, float], int]:
    """Return the CPU seconds so far of this process and all below it, and their resident memory, bytes."""
    import psutil

    this, memory = psutil.Process(), 0
    cpu: dict[Birth, float] = {}
    for process in [this, *this.children(recursive=True)]:
        try:
            with process.oneshot():
                times, name = process.cpu_times(), (process.pid, process.create_time())
                memory += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended meanwhile
        cpu[name] = times.user + times.system
    return cpu, memory


class OthersUse(NamedTuple):
    """What programs that are not this node's take of the machine, 0 to 1."""

    processor: float
    """Share of all cores since the reading before this one; 0 in the first."""
    gpu: GpuShare | None
    """None without a GPU."""


class OtherPrograms:
    """All programs of the machine but this node's processes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "others")
        self._at = time.monotonic()
        self._busy = 0.0
        """Seconds that all cores were busy until the last reading."""
        self._own: dict[Birth, float] | None = None

    async def look(self) -> OthersUse:
        """Return what they take now."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.read)

    def read(self) -> OthersUse:
        """Do look(), in this thread."""
        import psutil

        now, times, (own, _) = time.monotonic(), psutil.cpu_times(), _own_processes()
        busy = sum(times) - sum(getattr(times, name, 0.0) for name in NOT_BUSY)
        known, elapsed = self._own, max(now - self._at, 0.001)
        used = 0.0
        if known is not None:
            ours = sum(spent - known.get(name, 0.0) for name, spent in own.items())
            cores = os.cpu_count() or 1
            used = min(1.0, max(0.0, busy - self._busy - ours) / (elapsed * cores))
        self._at, self._busy, self._own = now, busy, own
        return OthersUse(used, taken_by_others({pid for pid, _ in own}, elapsed + LATE_SAMPLES_S))
