"""How much memory the GPUs of this machine have, and how much of it is free; CUDA itself is never started."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from . import gpus

FIELDS = "index,uuid,name,memory.total,memory.free,driver_version"
COMMAND = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
ANSWER_S = 20.0
MIB = 1 << 20


class GpuMemory(NamedTuple):
    """One GPU."""

    number: str
    """What CUDA_VISIBLE_DEVICES calls it."""
    uuid: str
    name: str
    total: int
    """Bytes."""
    free: int
    driver: str


Ask = Callable[[], Sequence[GpuMemory]]


def installed() -> list[GpuMemory]:
    """The GPUs of this machine, by nvidia-smi, about 0.1 s; empty where it is missing or knows none."""
    try:
        done = subprocess.run(
            COMMAND, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse(done.stdout) if done.returncode == 0 else []


def parse(listing: str) -> list[GpuMemory]:
    """What COMMAND prints; a GPU whose memory it does not tell (a MIG parent, say) is left out."""
    found: list[GpuMemory] = []
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS.split(",")):
            continue
        number, uuid, name, total, free, driver = cells
        if total.isdigit() and free.isdigit():
            found.append(GpuMemory(number, uuid, name, int(total) * MIB, int(free) * MIB, driver))
    return found


def visible(environ: Mapping[str, str] | None = None, ask: Ask = installed) -> list[GpuMemory]:
    """Those that a process with this environment may use, in torch's order; None: this one's."""
    there = ask()
    known = [gpus.Gpu(one.number, one.uuid) for one in there]
    names = gpus.visible(os.environ if environ is None else environ, lambda: known)
    return [
        one for name in names for one in there if gpus.Gpu(one.number, one.uuid).answers_to(name)
    ]
