"""List the GPUs that this process may use, without starting CUDA.

Names are those of CUDA_VISIBLE_DEVICES, passed on as they were found: a position, a UUID or a MIG slice.
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from .errors import UsageError

VARIABLE = "CUDA_VISIBLE_DEVICES"
ANSWER_S = 20.0
"""Longest wait for nvidia-smi."""
DEVICES = Path("/dev")
_GPU = re.compile(r"GPU (\d+): (.*?) ?\(UUID: ([^)\s]+)\)")
_SLICE = re.compile(r"\s+MIG .*\(UUID: ([^)\s]+)\)")


class Gpu(NamedTuple):
    """A GPU, or a MIG slice of one."""

    name: str
    """Number for CUDA_VISIBLE_DEVICES, or the UUID of a MIG slice."""
    uuid: str = ""
    """Empty where only the device files could be counted."""

    def answers_to(self, name: str) -> bool:
        """Say whether `name` is its number, its UUID or the beginning of it."""
        if name.isdigit():
            return self.name == str(int(name))
        return bool(self.uuid) and self.uuid.startswith(name)


Installed = Callable[[], Sequence[Gpu]]


def installed() -> list[Gpu]:
    """List the GPUs of this machine or container; of a GPU that is cut into MIG slices, these.

    Asks nvidia-smi, about 0.1 s; without it the device files are counted. Empty where there is none.
    """
    listing = _nvidia_smi("-L")
    return device_files(DEVICES) if listing is None else parse(listing)


def _nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi, empty if it fails; None if it is missing or does not answer."""
    command = ("nvidia-smi", *arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else ""


def parse(listing: str) -> list[Gpu]:
    """Read the output of `nvidia-smi -L`."""
    found: list[Gpu] = []
    whole: Gpu | None = None
    for line in listing.splitlines():
        if gpu := _GPU.match(line):
            whole = Gpu(gpu[1], gpu[3])
            found.append(whole)
        elif part := _SLICE.match(line):
            if whole is not None and whole in found:
                found.remove(whole)  # CUDA gives it to no process as a whole
            found.append(Gpu(part[1], part[1]))
    return found


def device_files(directory: Path) -> list[Gpu]:
    """Count /dev/nvidia0, nvidia1 ..: a container has only its own."""
    count = sum(path.name[6:].isdigit() for path in directory.glob("nvidia[0-9]*"))
    return [Gpu(str(index)) for index in range(count)]


def visible(environ: Mapping[str, str], installed: Installed = installed) -> tuple[str, ...]:
    """Name the GPUs that a process with this environment sees, in torch's order: the first is cuda:0.

    As CUDA reads the variable: the list ends before the first name without a GPU. Where the variable hides
    all of them, nvidia-smi is not called.
    """
    listed = environ.get(VARIABLE)
    if listed is None:
        return tuple(gpu.name for gpu in installed())
    wanted = [name.strip() for name in listed.split(",")]
    if wanted[0] in ("", "-1"):
        return ()
    there = installed()
    found: list[str] = []
    for name in wanted:
        if not _exists(name, there):
            break
        found.append(name)
    return tuple(found)


def usable(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Name the visible() GPUs of a process with this environment; None: of this process.

    No GPUs if torch is a CPU build, by its version ("+cpu"), without importing it.
    """
    environ = os.environ if environ is None else environ
    try:
        release = version("torch")
    except PackageNotFoundError:
        return visible(environ)
    return () if release.endswith("+cpu") else visible(environ)


def is_on_gpu(device: str, visible: Callable[[], Sequence[str]]) -> bool:
    """Say whether `device`, as a config names it, is a GPU; "auto" is one if one is `visible`."""
    return bool(visible()) if device == "auto" else device != "cpu"


def check_device(key: str, device: str, visible: Callable[[], Sequence[str]] = usable) -> None:
    """Raise UsageError if the config's `key` names a CUDA device, and this process sees none."""
    if device.startswith("cuda") and not visible():
        why = "torch is a CPU build" if torch_without_gpus() else "no GPU is visible"
        raise UsageError(
            f"{key} is {device}, and {why} here: leave it out, and a GPU is used where there is one"
        )


def _exists(name: str, there: Sequence[Gpu]) -> bool:
    if any(gpu.answers_to(name) for gpu in there):
        return True
    # of device files the UUIDs are not known, and older drivers name slices MIG-GPU-<uuid>/1/0
    unknown = bool(there) and not any(gpu.uuid for gpu in there)
    return bool(there) and (name.startswith("MIG-GPU-") or (unknown and not name.isdigit()))


def shown(names: Sequence[str]) -> str:
    """Make the value of CUDA_VISIBLE_DEVICES that shows these and no others."""
    return ",".join(names)


def is_slice(name: str) -> bool:
    """Say whether it is a MIG slice, which CUDA does not join with others in one process."""
    return name.startswith("MIG-")


FIELDS = "index,uuid,name,memory.total,memory.free,driver_version"
MIB = 1 << 20


class GpuMemory(NamedTuple):
    """One GPU."""

    number: str
    """Name in CUDA_VISIBLE_DEVICES."""
    uuid: str
    name: str
    total: int
    """Bytes."""
    free: int
    driver: str


Ask = Callable[[], Sequence[GpuMemory]]


def installed_memory() -> list[GpuMemory]:
    """Ask nvidia-smi for the GPUs of this machine, about 0.1 s; empty where it is missing or knows none."""
    return parse_memory(_nvidia_smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits") or "")


def parse_memory(listing: str) -> list[GpuMemory]:
    """Read the FIELDS that nvidia-smi lists; a GPU without a memory size (a MIG parent, say) is left out."""
    found: list[GpuMemory] = []
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS.split(",")):
            continue
        number, uuid, name, total, free, driver = cells
        if total.isdigit() and free.isdigit():
            found.append(GpuMemory(number, uuid, name, int(total) * MIB, int(free) * MIB, driver))
    return found


def visible_memory(
    environ: Mapping[str, str] | None = None, ask: Ask = installed_memory
) -> list[GpuMemory]:
    """List the GPUs of a process with this environment, in torch's order; None: of this process."""
    there = ask()
    known = [Gpu(one.number, one.uuid) for one in there]
    names = visible(os.environ if environ is None else environ, lambda: known)
    return [one for name in names for one in there if Gpu(one.number, one.uuid).answers_to(name)]


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the machine, or of the container."""

    total: int
    available: int


def machine_memory(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> HostMemory:
    """Read the memory of this machine, or of this container."""
    try:
        text = meminfo.read_text(encoding="utf-8")
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return HostMemory(total, total)
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+): +(\d+) kB", text, re.M)}
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    try:
        most = limit.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        most = ""
    if most.isdigit():
        total, available = min(total, int(most)), min(available, int(most))
    return HostMemory(total, available)


@dataclass(frozen=True)
class TorchBuild:
    """The torch that is installed."""

    version: str
    cuda: str  # empty for a CPU build


def torch_build() -> TorchBuild | None:
    """Read which torch is installed, without importing it."""
    found = importlib.util.find_spec("torch")
    for place in (found.submodule_search_locations or ()) if found else ():
        text = Path(place, "version.py").read_text(encoding="utf-8")
        version = re.search(r"^__version__ = '([^']+)'", text, re.M)
        cuda = re.search(r"^cuda: .*= '([^']+)'", text, re.M)
        return TorchBuild(version[1] if version else "?", cuda[1] if cuda else "")
    return None


def torch_without_gpus() -> bool:
    """Return whether the installed torch computes on the CPU alone."""
    build = torch_build()
    return build is not None and not build.cuda
