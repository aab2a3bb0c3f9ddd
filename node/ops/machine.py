"""What the processes of a node use of their machine.

Reading it walks /proc: not often, and in a thread of its own, as those that the node's loop lends may all be
busy for long, with a status waiting.
"""

import asyncio
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from ..gpus import visible_memory
from .figures import MachineRow

SAME_S = 10.0
"""Age up to which a reading is given again."""


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

        this = psutil.Process()
        known, self._cpu, memory = self._cpu, {}, 0
        for process in [this, *this.children(recursive=True)]:
            try:
                with process.oneshot():
                    times, name = process.cpu_times(), (process.pid, process.create_time())
                    memory += process.memory_info().rss
            except psutil.Error:
                continue  # it has ended meanwhile
            self._cpu[name] = times.user + times.system
        since = self._at if known else now - (time.time() - this.create_time())
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
