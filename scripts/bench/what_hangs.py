"""Why nothing goes on: what a tree of processes waits for, and how the machine does.

Reads /proc, so Linux alone; kernel stacks only as root. Python's own stacks come from PYTHONFAULTHANDLER=1 and
SIGABRT, which ends the process: ask for them last.
"""

import os
import signal
from collections import Counter
from pathlib import Path

PROC = Path("/proc")
MACHINE = ("loadavg", "pressure/cpu", "pressure/io", "pressure/memory")
MEMORY = ("MemTotal", "MemAvailable", "Dirty", "Writeback")
STACK = 6
"""Innermost functions of the kernel that are shown of a thread that sleeps in it."""


def descendants(root: int) -> dict[int, str]:
    """Process -> its command line, of all that descend from `root`."""
    parents: dict[int, int] = {}
    for path in PROC.glob("[0-9]*/stat"):
        fields = _read(path).rpartition(")")[2].split()
        parents[int(path.parent.name)] = int(fields[1]) if fields else 0

    def below(pid: int) -> bool:
        while pid > 1 and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return {
        pid: _read(PROC / str(pid) / "cmdline").replace("\0", " ").strip()[:160]
        for pid in parents
        if pid != root and below(pid)
    }


def report(root: int) -> str:
    """The machine, its UDP counters, and the threads of every process below `root`."""
    lines = ["-- machine"]
    lines += [f"{name}: {' '.join(_read(PROC / name).split())}" for name in MACHINE]
    memory = _read(PROC / "meminfo").splitlines()
    lines += [line for line in memory if line.startswith(MEMORY)]
    lines += [line for line in _read(PROC / "net/snmp").splitlines() if line.startswith("Udp:")]
    lines += [line for line in _read(PROC / "net/sockstat").splitlines() if "UDP" in line]
    for pid, command in sorted(descendants(root).items()):
        lines += [f"-- {pid} {command}", *_threads(PROC / str(pid) / "task")]
    return "\n".join(lines)


def abort(root: int, name: str) -> None:
    """End those below `root` whose command line has `name` in it, each with the stacks of all its threads."""
    for pid, command in descendants(root).items():
        if name in command:
            os.kill(pid, signal.SIGABRT)


def _threads(tasks: Path) -> list[str]:
    """Threads that are in the same state and wait for the same, counted; kernel stacks of stuck ones."""
    found: Counter[str] = Counter()
    for task in tasks.glob("[0-9]*"):
        state = _read(task / "stat").rpartition(")")[2].split()[:1]
        stack = " < ".join(line.split()[-1] for line in _read(task / "stack").splitlines()[:STACK])
        where = stack if state == ["D"] else _read(task / "wchan")
        found[f"{_read(task / 'comm').strip()} {''.join(state)} {where}"] += 1
    return [f"  {count} x {what}" for what, count in found.most_common(25)]


def _read(path: Path) -> str:
    """A file of /proc; empty if it is gone or not for us."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
