"""Which nodes run for this user: one small JSON file each, so that `peers` and `status` find them.

A hint, never a lock: an entry whose process is gone counts for nothing and is removed by whoever sees it.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningEntry:
    """One running node."""

    pid: int
    data_dir: str
    """Absolute."""
    role: str
    run: str
    started: float
    """Unix time."""
    birth: str = ""
    """When the kernel says the process began; tells a recycled pid from the same process."""


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where entries are: the user's runtime directory where there is one, else the home."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "primerl"
    return Path.home() / ".primerl" / "running"


def register(data_dir: Path, role: str, run: str, *, where: Path | None = None) -> Path:
    """Write the entry of this process; returns the path to hand to unregister().

    A registry that cannot be written is logged and costs only the convenience.
    """
    where = where or directory()
    data_dir = data_dir.resolve()
    pid = os.getpid()
    entry = RunningEntry(pid, str(data_dir), role, run, time.time(), _birth(pid))
    mark = hashlib.sha256(str(data_dir).encode()).hexdigest()[:8]
    path = where / f"{pid}-{mark}.json"
    temporary = path.with_suffix(".tmp")
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_text(json.dumps(asdict(entry)) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("this node will not be found without --data-dir: %s", error)
    return path


def unregister(path: Path) -> None:
    """Remove an entry; a missing one is fine."""
    path.unlink(missing_ok=True)


def running(*, where: Path | None = None) -> list[RunningEntry]:
    """Every node that runs, the latest started first. Entries of dead processes are removed."""
    found: list[RunningEntry] = []
    for path in sorted((where or directory()).glob("*.json")):
        entry = _read(path)
        if entry is None or not _alive(entry):
            path.unlink(missing_ok=True)
        else:
            found.append(entry)
    return sorted(found, key=lambda entry: -entry.started)


def _read(path: Path) -> RunningEntry | None:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return RunningEntry(**fields)
    except (OSError, ValueError, TypeError):
        return None  # not ours, half gone, or of a version that wrote other fields


def _alive(entry: RunningEntry) -> bool:
    try:
        os.kill(entry.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody's: it exists
    return entry.birth == _birth(entry.pid)


def _birth(pid: int) -> str:
    """Start time of a process in clock ticks since boot, or "" where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
