"""Which GPUs are visible: what NVML lists, and how CUDA reads its variable."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.fake_nvml import LibraryNotFound, NvmlError, install_nvml

from primerl.node import gpus

UUIDS = [f"GPU-{index}1b2c3d4-0000-1111-2222-333344445555" for index in range(4)]
SLICES = ["MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"]


def four() -> list[gpus.Gpu]:
    return [gpus.Gpu(str(index), uuid) for index, uuid in enumerate(UUIDS)]


def never() -> list[gpus.Gpu]:
    raise AssertionError("asked, though all are hidden")


def test_nvml_lists_gpus_by_number_and_uuid_with_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_nvml(monkeypatch, UUIDS, total=8 << 30, free=3 << 30)
    assert gpus.installed() == four()
    assert gpus.installed_memory()[2] == gpus.GpuMemory(
        "2", UUIDS[2], "NVIDIA H200", 8 << 30, 3 << 30, "570.1", 0.5
    )
    install_nvml(monkeypatch, UUIDS, total=0)
    assert gpus.installed() == four()
    assert gpus.installed_memory() == []


def test_a_gpu_that_is_cut_into_slices_is_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, UUIDS[:2], slices={UUIDS[0]: SLICES})
    assert gpus.installed() == [*(gpus.Gpu(uuid, uuid) for uuid in SLICES), gpus.Gpu("1", UUIDS[1])]
    assert [gpu.number for gpu in gpus.installed_memory()] == [*SLICES, "1"]
    assert [gpu.busy for gpu in gpus.installed_memory()] == [None, None, 0.5]


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ("0", "1", "2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ("2", "0")),
        ({"CUDA_VISIBLE_DEVICES": " 1 , 3"}, ("1", "3")),
        ({"CUDA_VISIBLE_DEVICES": "1,9,0"}, ("1",)),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ("0",)),
        ({"CUDA_VISIBLE_DEVICES": f"{UUIDS[3]},GPU-11b2"}, (UUIDS[3], "GPU-11b2")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ffff,0"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-01b2c3d4/1/0"}, ("MIG-GPU-01b2c3d4/1/0",)),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(
    environ: Mapping[str, str], names: tuple[str, ...]
) -> None:
    assert gpus.visible(environ, four) == names


@pytest.mark.parametrize("nothing", ["", "-1", " ", "-1,0"])
def test_no_program_is_asked_where_all_gpus_are_hidden(nothing: str) -> None:
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": nothing}, never) == ()


def test_a_variable_that_was_left_over_makes_no_gpu() -> None:
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": "0,GPU-1,MIG-GPU-1/1/0"}, list) == ()


def test_device_files_are_counted_where_the_driver_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia5", "nvidiactl", "nvidia-uvm", "nvidia0x", "sda"):
        (tmp_path / name).touch()
    assert gpus.device_files(tmp_path) == [gpus.Gpu("0"), gpus.Gpu("1")]
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    install_nvml(monkeypatch, [], fault=LibraryNotFound)
    assert len(gpus.installed()) == 2
    assert gpus.installed_memory() == []
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-any,1"}) == ("GPU-any", "1")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert len(gpus.installed()) == 2


def test_a_driver_that_does_not_answer_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvml(monkeypatch, UUIDS, fault=NvmlError)
    assert (gpus.installed(), gpus.installed_memory()) == ([], [])


def test_what_a_child_is_shown_it_sees() -> None:
    for names in ((), ("2",), ("3", UUIDS[0])):
        assert gpus.visible({"CUDA_VISIBLE_DEVICES": gpus.shown(names)}, four) == names
