"""Where the time of a worker goes while worker.py measures it: its threads, its processes, its own status.

Looking costs next to nothing, so it is always on: 50 looks a second at what the event loop's thread does, two a
second at what the node says of itself.
"""

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

LOOK_S = 0.02
ASK_S = 0.5
IDLE = frozenset({"select", "poll", "epoll", "_run_once"})
PACKAGE = f"{os.sep}primerl{os.sep}"
ROW = ("inflight", "cap", "running", "waiting", "kv_use")


class Sampler:
    """What the thread that made it does, by share of the looks since the last read()."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._found: Counter[str] = Counter()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def read(self, most: int = 12) -> dict[str, float]:
        """Place in our own code (outside of it: in a library's) -> share of the time; `idle` is waiting."""
        found, self._found = self._found, Counter()
        total = max(1, sum(found.values()))
        return {name: round(count / total, 4) for name, count in found.most_common(most)}

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
            if frame is not None:
                self._found[place(frame)] += 1


def place(frame: FrameType) -> str:
    """The innermost function of ours in a stack, else the innermost of all."""
    if frame.f_code.co_name in IDLE:
        return "idle"
    inner: FrameType | None = frame
    while inner is not None:
        path = inner.f_code.co_filename
        if PACKAGE in path or f"{os.sep}node{os.sep}" in path:
            return f"{Path(path).stem}.{inner.f_code.co_name}"
        inner = inner.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def cpu_by_process(root: int) -> dict[str, float]:
    """CPU seconds of a process and of each that descends from it and lives, by name and number; from /proc."""
    found: dict[int, tuple[int, str, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue  # it has just ended
        fields = rest.split()
        ticks = int(fields[11]) + int(fields[12])
        found[int(path.parent.name)] = (int(fields[1]), head.partition("(")[2], ticks)

    def below(pid: int) -> bool:
        while pid > 1 and pid != root:
            pid = found[pid][0] if pid in found else 0
        return pid == root

    rate = os.sysconf("SC_CLK_TCK")
    return {f"{name}:{pid}": t / rate for pid, (_, name, t) in found.items() if below(pid)}


def cores(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """Cores that each process took; those that took next to nothing are left out."""
    used = {name: (after[name] - before.get(name, 0.0)) / seconds for name in after}
    return {name: round(one, 2) for name, one in sorted(used.items()) if one >= 0.02}


async def follow(status: Callable[[], dict[str, Any]], seconds: float) -> dict[str, float]:
    """Means of what a node says of its engine and of its event loop over so many seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    seen: list[dict[str, Any]] = []
    while (left := end - loop.time()) > 0:
        seen.append(await asyncio.to_thread(status))
        await asyncio.sleep(max(0.0, min(ASK_S, left, end - loop.time())))
    rows: list[dict[str, Any]] = [one["engine"] for one in seen if one.get("engine")]
    found = {name: round(fmean(row[name] for row in rows), 3) for name in ROW if rows}
    found |= {
        name: rows[-1][name] - rows[0][name] for name in ("preemptions", "taken_back") if rows
    }
    leases = [one["leases"] for one in seen if "leases" in one]
    late = [one["event_loop_lag"] for one in seen if one.get("event_loop_lag")]
    if leases:
        found["leases"] = round(fmean(leases), 2)
    if late:
        found |= {f"lag_{name}": value for name, value in late[-1].items()}
    return found
