"""How much memory this machine has, and what of it is free; a container's limit counts where it is lower."""

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Bytes of the machine, or of the container."""

    total: int
    available: int


def machine_memory(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> Memory:
    """Of this machine, or of this container."""
    try:
        text = meminfo.read_text(encoding="utf-8")
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Memory(total, total)
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+): +(\d+) kB", text, re.M)}
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    try:
        most = limit.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        most = ""
    if most.isdigit():
        total, available = min(total, int(most)), min(available, int(most))
    return Memory(total, available)
