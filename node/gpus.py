"""List the GPUs that this process may use, without starting CUDA.

Names are those of CUDA_VISIBLE_DEVICES, passed on as they were found: a position, a UUID or a MIG slice. NVML
(nvidia-ml-py) lists the GPUs of a machine; where it or the driver is missing there are none.
"""

import importlib.util
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UsageError

VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


class Gpu(NamedTuple):
    """A GPU, or a MIG slice of one."""

    name: str
    """Number for CUDA_VISIBLE_DEVICES, or the UUID of a MIG slice."""
    uuid: str = ""
    """Empty where only the device files could be counted."""

    def answers_to(self, name: str) -> bool:
        """Return whether `name` is its number, its UUID or the beginning of it."""
        if name.isdigit():
            return self.name == str(int(name))
        return bool(self.uuid) and self.uuid.startswith(name)


Installed = Callable[[], Sequence[Gpu]]


def installed() -> list[Gpu]:
    """List the GPUs of this machine or container; in place of a GPU with MIG slices, its slices.

    Asks NVML; without it the device files are counted. Empty where there is none.
    """
    listed = _nvml()
    if listed is None:
        return device_files(DEVICES)
    return [Gpu(gpu.number, gpu.uuid) for gpu in listed]


def _nvml() -> "list[GpuMemory] | None":
    """Ask NVML for all GPUs and slices; None if it is not installed, empty if it fails.

    Memory is 0 where a device does not report it.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = pynvml.NVMLError_LibraryNotFound  # pyright: ignore[reportAttributeAccessIssue] - made at import
        return None if isinstance(error, missing) else []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        listed: list[GpuMemory] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            whole = pynvml.nvmlDeviceGetHandleByIndex(index)
            slices = _slices(whole)  # CUDA gives a GPU that is cut to no process as a whole
            for device in slices or [whole]:
                uuid, name = pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetName(device)
                number = uuid if slices else str(index)
                listed.append(
                    GpuMemory(number, uuid, name, *_memory(device), driver, _busy(device))
                )
        return listed
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _slices(whole: Any) -> list[Any]:
    """Return the handles of a GPU's MIG slices; empty if it is not cut."""
    import pynvml

    try:
        if pynvml.nvmlDeviceGetMigMode(whole)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
    except pynvml.NVMLError:  # a GPU that cannot be cut
        return []
    slices: list[Any] = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
        with suppress(pynvml.NVMLError):  # a place without a slice
            slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index))
    return slices


def _memory(device: Any) -> tuple[int, int]:
    """Return total and free bytes; zeros if the device does not report them."""
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    except pynvml.NVMLError:
        return 0, 0
    return int(memory.total), int(memory.free)


def _busy(device: Any) -> float | None:
    """Return the share of the last second or less in which a device computed; None if it does not say."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100
    except pynvml.NVMLError:  # a MIG slice
        return None


def device_files(directory: Path) -> list[Gpu]:
    """Count /dev/nvidia0, nvidia1 ..: a container has only its own."""
    count = sum(path.name[6:].isdigit() for path in directory.glob("nvidia[0-9]*"))
    return [Gpu(str(index)) for index in range(count)]


def visible(environ: Mapping[str, str], installed: Installed = installed) -> tuple[str, ...]:
    """Name the GPUs that a process with this environment sees, in torch's order: the first is cuda:0.

    As CUDA reads the variable: the list ends before the first name without a GPU. Where the variable hides
    all of them, NVML is not asked.
    """
    listed = environ.get(VARIABLE)
    if listed is None:
        return tuple(gpu.name for gpu in installed())
    wanted = [name.strip() for name in listed.split(",")]
    if wanted[0] in ("", "-1"):
        return ()
    there = installed()
    names: list[str] = []
    for name in wanted:
        if not _exists(name, there):
            break
        names.append(name)
    return tuple(names)


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
    """Return whether a config's `device` is a GPU; "auto" is one if any GPU is `visible`."""
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
    """Return whether it is a MIG slice; CUDA uses only one of these in a process."""
    return name.startswith("MIG-")


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
    busy: float | None = None
    """Share of the last second or less in which it computed; None for a MIG slice, which does not say."""


Ask = Callable[[], Sequence[GpuMemory]]


def installed_memory() -> list[GpuMemory]:
    """Ask NVML for the GPUs of this machine that report their memory; empty where there is none."""
    return [gpu for gpu in _nvml() or () if gpu.total]


def visible_memory(
    environ: Mapping[str, str] | None = None, ask: Ask = installed_memory
) -> list[GpuMemory]:
    """List the GPUs of a process with this environment, in torch's order; None: of this process."""
    there = ask()
    known = [Gpu(gpu.number, gpu.uuid) for gpu in there]
    names = visible(os.environ if environ is None else environ, lambda: known)
    return [gpu for name in names for gpu in there if Gpu(gpu.number, gpu.uuid).answers_to(name)]


class GpuShare(NamedTuple):
    """What some programs take of a GPU, 0 to 1."""

    busy: float
    """Share of the time in which they compute."""
    memory: float


def taken_by_others(
    own: Collection[int],
    seconds: float,
    environ: Mapping[str, str] | None = None,
    ask: Ask = installed_memory,
) -> GpuShare | None:
    """Return what programs other than the processes `own` took of a visible GPU in the last `seconds`.

    Of several GPUs the most of any. None where none is visible, or the driver fails. Programs that are not in
    the table of processes here are left out: the driver names those of a container by numbers of its host.
    """
    gpus = visible_memory(environ, ask)
    if not gpus:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        shares = [_taken(gpu, own, seconds) for gpu in gpus]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return GpuShare(max(share.busy for share in shares), max(share.memory for share in shares))


def _taken(gpu: GpuMemory, own: Collection[int], seconds: float) -> GpuShare:
    import pynvml

    device = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    memory, busy = dict[int, int](), dict[int, tuple[int, int]]()
    for listed in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with suppress(pynvml.NVMLError):
            memory |= {program.pid: program.usedGpuMemory or 0 for program in listed(device)}
    with suppress(pynvml.NVMLError):  # a MIG slice, or nobody computed
        since = int((time.time() - seconds) * 1e6)
        for sample in pynvml.nvmlDeviceGetProcessUtilization(device, since):
            busy[sample.pid] = max(
                busy.get(sample.pid, (0, 0)), (sample.timeStamp, int(sample.smUtil))
            )
    others = {pid for pid in {*memory, *busy} if pid not in own and Path(f"/proc/{pid}").exists()}
    computing = sum(share for pid, (_, share) in busy.items() if pid in others) / 100
    used = sum(size for pid, size in memory.items() if pid in others) / gpu.total
    return GpuShare(min(1.0, computing), min(1.0, used))


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
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        text = Path(place, "version.py").read_text(encoding="utf-8")
        version = re.search(r"^__version__ = '([^']+)'", text, re.M)
        cuda = re.search(r"^cuda: .*= '([^']+)'", text, re.M)
        return TorchBuild(version[1] if version else "?", cuda[1] if cuda else "")
    return None


def torch_without_gpus() -> bool:
    """Return whether the installed torch computes on the CPU alone."""
    build = torch_build()
    return build is not None and not build.cuda
