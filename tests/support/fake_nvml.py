"""NVML of a machine with GPUs of the test's, in the place of pynvml."""

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


class LibraryNotFound(NvmlError):
    """Stands for pynvml.NVMLError_LibraryNotFound."""


def install_nvml(
    monkeypatch: pytest.MonkeyPatch,
    uuids: Sequence[str],
    *,
    slices: Mapping[str, Sequence[str]] | None = None,
    total: int = 141 << 30,
    free: int = 140 << 30,
    fault: type[NvmlError] | None = None,
    programs: Mapping[int, tuple[int, int]] | None = None,
) -> None:
    """Let NVML list GPUs of these UUIDs, some of them cut into `slices`; `fault` is what its start raises.

    `programs` are on the last GPU: bytes and percent of its time by pid.
    """
    cut = slices or {}

    def start() -> None:
        if fault is not None:
            raise fault

    def memory(_: str) -> Any:
        if not total:
            raise NvmlError
        return SimpleNamespace(total=total, free=free)

    def busy(uuid: str) -> Any:
        if uuid not in uuids:
            raise NvmlError  # a slice
        return SimpleNamespace(gpu=50, memory=10)

    def mode(uuid: str) -> tuple[int, int]:
        return int(uuid in cut), 0

    def slice_of(uuid: str, index: int) -> str:
        if index >= len(cut[uuid]):
            raise NvmlError
        return cut[uuid][index]

    def running(uuid: str) -> list[Any]:
        here = (programs or {}) if uuid == uuids[-1] else {}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, (size, _) in here.items()]

    def samples(uuid: str, since: int) -> list[Any]:
        here = (programs or {}) if uuid == uuids[-1] else {}
        if not here:
            raise NvmlError  # nobody computed
        newest = [
            SimpleNamespace(pid=pid, timeStamp=since + 2, smUtil=share)
            for pid, (_, share) in here.items()
        ]
        return [*newest, *(SimpleNamespace(pid=pid, timeStamp=since, smUtil=99) for pid in here)]

    found: dict[str, Any] = {
        "NVMLError": NvmlError,
        "NVMLError_LibraryNotFound": LibraryNotFound,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetCount": lambda: len(uuids),
        "nvmlDeviceGetHandleByIndex": uuids.__getitem__,
        "nvmlDeviceGetHandleByUUID": str,
        "nvmlDeviceGetComputeRunningProcesses": running,
        "nvmlDeviceGetGraphicsRunningProcesses": running,
        "nvmlDeviceGetProcessUtilization": samples,
        "nvmlDeviceGetUUID": str,
        "nvmlDeviceGetName": "NVIDIA H200{:.0}".format,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": busy,
        "nvmlDeviceGetMigMode": mode,
        "nvmlDeviceGetMaxMigDeviceCount": len,  # more places than slices
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_of,
    }
    module = ModuleType("pynvml")
    vars(module).update(found)
    monkeypatch.setitem(sys.modules, "pynvml", module)
