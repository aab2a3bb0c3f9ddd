"""Harmless probes of a sandbox: each raises OSError where it is confined, and changes nothing where it is not.

HOSTILE_NODE is the process id of the node that started the environment, HOSTILE_FILE a file that is none of the
environment's business, HOSTILE_SOCKET a datagram socket beside it, HOSTILE_HOME the home of the node's owner.
"""

import ctypes
import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

NODE = int(os.environ.get("HOSTILE_NODE", "0"))
SECRET = Path(os.environ.get("HOSTILE_FILE", ""))
USERFAULTFD = 282 if os.uname().machine == "aarch64" else 323
PTRACE_SEIZE = 0x4206


def shared_file(node: int) -> Path:
    """Return the file of shared memory that a probe writes."""
    return Path(f"/dev/shm/primerl-planted-{node}")


def _refused(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def _call(*arguments: int) -> None:
    _refused(ctypes.CDLL(None, use_errno=True).syscall(*arguments))


def _trace() -> None:
    _refused(ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_SEIZE, NODE, 0, 0))


def _write_back(file: str) -> None:
    with open(f"/proc/{NODE}/{file}", "r+") as opened:
        text = opened.read()
        opened.seek(0)
        opened.write(text)


def _whisper() -> None:
    """Send to a socket that has a path by a socket that has none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.sendto(b"hello", os.environ["HOSTILE_SOCKET"])


def _empty() -> None:
    os.close(os.open(SECRET.with_name("beside"), os.O_RDONLY | os.O_TRUNC))


def _unfiltered_thread() -> None:
    """Succeed if a thread of this process is not held by the filter of system calls."""
    for thread in Path("/proc/self/task").iterdir():
        if "Seccomp:\t2" not in (thread / "status").read_text():
            return
    raise PermissionError(errno.EPERM, "every thread is filtered")


def _capability() -> None:
    """Succeed if this process may do what only root may."""
    fields = dict(
        line.split(":\t")
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    if not any(int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")):
        raise PermissionError(errno.EPERM, "no capability is left")


MEMORY: dict[str, Callable[[], object]] = {
    "opens-memory": lambda: open(f"/proc/{NODE}/mem", "r+b").close(),
    "reads-variables": lambda: Path(f"/proc/{NODE}/environ").read_bytes(),
    "follows-descriptors": lambda: [os.readlink(it) for it in Path(f"/proc/{NODE}/fd").iterdir()],
    "reads-maps": lambda: Path(f"/proc/{NODE}/maps").read_bytes(),
    "follows-cwd": lambda: os.listdir(f"/proc/{NODE}/cwd"),
    "traces": _trace,
}
"""Of the node's memory, variables and open files."""
CALLS: dict[str, Callable[[], object]] = {
    "slows": lambda: os.setpriority(os.PRIO_PROCESS, NODE, os.getpriority(os.PRIO_PROCESS, NODE)),
    "slows-all": lambda: os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_USER, 0)),
    "pins": lambda: os.sched_setaffinity(NODE, os.sched_getaffinity(NODE)),
    "schedules": lambda: os.sched_setscheduler(NODE, os.SCHED_OTHER, os.sched_param(0)),
    "signals": lambda: os.kill(NODE, 0),
    "watches-faults": lambda: _call(USERFAULTFD, 1),
    "points": lambda: os.close(os.pidfd_open(NODE)),
    "whispers": _whisper,
    "escapes-in-a-thread": _unfiltered_thread,
    "is-root": _capability,
}
"""Of the node's scheduling, and of the kernel."""
FILES: dict[str, Callable[[], object]] = {
    "eases-its-end": lambda: _write_back("oom_score_adj"),
    "reads-command": lambda: Path(f"/proc/{NODE}/cmdline").read_bytes(),
    "steals": lambda: SECRET.read_bytes(),
    "lists": lambda: os.listdir(SECRET.parent),
    "reads-home": lambda: Path(os.environ["HOSTILE_HOME"], "notes").read_bytes(),
    "writes": lambda: SECRET.with_name("planted").write_text("planted"),
    "appends": lambda: SECRET.open("ab").close(),
    "removes": lambda: SECRET.with_name("beside").unlink(),
    "moves": lambda: SECRET.with_name("beside").rename("/tmp/primerl-moved"),
    "links": lambda: os.link(SECRET, SECRET.with_name("linked")),
    "empties": _empty,
    "truncates": lambda: os.truncate(SECRET.with_name("beside"), 0),
    "marks": lambda: os.setxattr(SECRET, "user.mark", b"1"),
    "shares-memory": lambda: shared_file(NODE).write_text("planted"),
}
"""Of files that are not the environment's."""
PROBES = {**MEMORY, **CALLS, **FILES, "ends": lambda: os.kill(NODE, signal.SIGKILL)}
