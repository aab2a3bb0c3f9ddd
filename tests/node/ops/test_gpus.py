"""Which GPUs are visible: what nvidia-smi prints, and how CUDA reads its variable."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from primerl.node import gpus
from primerl.node.gpus import Gpu, device_files, installed, parse, shown, visible

UUIDS = [f"GPU-{index}1b2c3d4-0000-1111-2222-333344445555" for index in range(4)]
LISTING = "".join(f"GPU {index}: NVIDIA H200 (UUID: {uuid})\n" for index, uuid in enumerate(UUIDS))
SLICED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 4g.20gb     Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-6c89852c-d268-c3f3-1b07-005d5ae1dc3f)
"""


def four() -> list[Gpu]:
    return parse(LISTING)


def never() -> list[Gpu]:
    raise AssertionError("asked, though all are hidden")


def test_the_listing_is_read() -> None:
    assert four() == [Gpu(str(index), uuid) for index, uuid in enumerate(UUIDS)]
    assert parse("No devices found.\n") == []


def test_a_gpu_that_is_cut_into_slices_is_its_slices() -> None:
    assert [gpu.name for gpu in parse(SLICED)] == [
        "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
        "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d",
        "1",
    ]


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
    assert visible(environ, four) == names


@pytest.mark.parametrize("nothing", ["", "-1", " ", "-1,0"])
def test_no_program_is_asked_where_all_gpus_are_hidden(nothing: str) -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": nothing}, never) == ()


def test_a_variable_that_was_left_over_makes_no_gpu() -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": "0,GPU-1,MIG-GPU-1/1/0"}, list) == ()


def test_device_files_are_counted_where_nvidia_smi_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia5", "nvidiactl", "nvidia-uvm", "nvidia0x", "sda"):
        (tmp_path / name).touch()
    assert device_files(tmp_path) == [Gpu("0"), Gpu("1")]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    assert len(installed()) == 2
    assert visible({"CUDA_VISIBLE_DEVICES": "GPU-any,1"}) == ("GPU-any", "1")


@pytest.mark.parametrize(("script", "count"), [("echo 'GPU 0: X (UUID: GPU-1)'", 1), ("exit 9", 0)])
def test_nvidia_smi_is_asked(
    script: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(installed()) == count


def test_what_a_child_is_shown_it_sees() -> None:
    for names in ((), ("2",), ("3", UUIDS[0])):
        assert visible({"CUDA_VISIBLE_DEVICES": shown(names)}, four) == names
