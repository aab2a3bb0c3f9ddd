"""What the processes of a node use of their machine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from psutil._pslinux import scputimes
from support.fake_nvml import NvmlError, install_nvml

from primerl.node.gpus import GpuShare
from primerl.node.ops import machine
from primerl.node.ops.machine import Machine, OtherPrograms


def test_gpus_that_the_node_sees_are_counted_with_their_memory_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvml(monkeypatch, ["GPU-a", "GPU-b", "GPU-c"], total=8 << 30, free=3 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    row = Machine(tmp_path).read()
    assert (row.gpus, row.gpu_busy) == (2, 0.5)
    assert (row.gpu_memory_bytes, row.gpu_memory_total_bytes) == (10 << 30, 16 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    none = Machine(tmp_path).read()
    assert (none.gpus, none.gpu_busy) == (0, None)


def test_what_other_programs_take_of_the_gpus_is_told_from_the_node_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, parent, gone = os.getpid(), os.getppid(), 2**22 + 7
    programs = {own: (4 << 30, 90), parent: (2 << 30, 40), gone: (1 << 30, 50)}
    install_nvml(monkeypatch, ["GPU-a", "GPU-b"], total=8 << 30, programs=programs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert OtherPrograms().read().gpu == GpuShare(0.4, 0.25)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert OtherPrograms().read().gpu == GpuShare(0.0, 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert OtherPrograms().read().gpu is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    def lost(uuid: str) -> None:
        raise NvmlError(uuid)

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetHandleByUUID", lost)
    assert OtherPrograms().read().gpu is None


def test_the_work_of_this_node_is_no_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 s of four cores, 40 s, all are busy for 30 s, for 6 s of these with this node's processes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    looks = iter([(100.0, 1000.0, 50.0), (110.0, 1030.0, 56.0), (120.0, 1030.0, 66.0)])
    look = (0.0, 0.0, 0.0)
    """Time, CPU seconds of all programs, and of this node's."""

    def times() -> Any:
        return scputimes(look[1], 0.0, 0.0, 5000.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(machine.time, "monotonic", lambda: look[0])
    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(machine, "_own_processes", lambda: ({(7, 0.0): look[2]}, 0))
    others, read = OtherPrograms(), dict[float, float]()
    for look in looks:
        read[look[0]] = others.read().processor
    assert read == {100.0: 0.0, 110.0: 24 / 40, 120.0: 0.0}


def test_memory_and_processor_time_of_children_count_as_the_node_s(tmp_path: Path) -> None:
    alone = Machine(tmp_path).read()
    program = "b = bytearray(200_000_000); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        looking = Machine(tmp_path)
        both = looking.read()
        child.communicate("\n")
    assert both.memory_bytes > alone.memory_bytes + 190_000_000
    assert both.cpu_cores > 0
    assert both.disk_free_bytes > 0
    assert looking.read() == both, "a reading is given again for a while"
