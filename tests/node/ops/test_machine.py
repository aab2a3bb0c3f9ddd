"""What the processes of a node use of their machine."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_nvml import install_nvml

from primerl.node.ops.machine import Machine


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


def test_memory_and_processor_time_of_children_count_as_the_node_s(tmp_path: Path) -> None:
    alone = Machine(tmp_path).read()
    program = "b = bytearray(200_000_000); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        machine = Machine(tmp_path)
        both = machine.read()
        child.communicate("\n")
    assert both.memory_bytes > alone.memory_bytes + 190_000_000
    assert both.cpu_cores > 0
    assert both.disk_free_bytes > 0
    assert machine.read() == both, "a reading is given again for a while"
