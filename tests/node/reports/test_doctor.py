"""Each check of the machine judges what it is given; what asks the machine is asked here once."""

import socket
from pathlib import Path
from typing import Any

import pytest

from primerl.node.config.run import NodeConfig, RunConfig, VerificationConfig
from primerl.node.errors import UsageError
from primerl.node.gpus import GpuMemory, visible_memory
from primerl.node.memory_plan.memory import Device
from primerl.node.memory_plan.shape import read_shape
from primerl.node.reports import doctor

GPUS = [
    GpuMemory("0", "GPU-aaaa", "NVIDIA H200", 140 << 30, 139 << 30, "575.57.08"),
    GpuMemory("1", "GPU-bbbb", "NVIDIA H200", 140 << 30, 9 << 30, "575.57.08"),
]


@pytest.mark.parametrize(
    ("listed", "numbers"),
    [(None, ["0", "1"]), ("1", ["1"]), ("1,0", ["1", "0"]), ("GPU-b", ["1"]), ("", []), ("-1", [])],
)
def test_only_visible_gpus_count_in_their_order(listed: str | None, numbers: list[str]) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [gpu.number for gpu in visible_memory(environ, lambda: GPUS)] == numbers


def states(*checks: doctor.MachineCheck) -> list[str]:
    return [check.state for check in checks]


def test_an_old_python_is_a_problem() -> None:
    assert states(doctor.check_python((3, 10, 9)), doctor.check_python((3, 12, 0))) == [
        "problem",
        "ok",
    ]


def test_torch_has_to_fit_the_machine() -> None:
    cpu, cuda = doctor.TorchBuild("2.13.0+cpu", ""), doctor.TorchBuild("2.14.0", "13.0")
    assert doctor.check_torch(cpu, gpus=0).state == "ok"
    assert doctor.check_torch(cuda, gpus=1).found == "2.14.0, CUDA 13.0"
    assert "CUDA build" in doctor.check_torch(cpu, gpus=1).advice
    assert doctor.check_torch(None, gpus=0).state == "problem"


def test_a_libp2p_that_is_missing_is_a_warning_with_the_command_that_installs_it() -> None:
    assert doctor.check_libp2p(True, wanted=True).state == "ok"
    assert doctor.check_libp2p(False, wanted=False).state == "ok"
    missing = doctor.check_libp2p(False, wanted=True)
    assert missing.state == "warning"
    assert "pip install --no-deps libp2p==" in missing.advice


def test_the_torch_that_is_here_is_read_without_importing_it() -> None:
    import torch

    build = doctor.torch_build()
    assert build is not None
    assert (build.version, build.cuda) == (torch.__version__, torch.version.cuda or "")


@pytest.mark.parametrize(
    ("release", "wanted", "state"),
    [
        ("0.32.0", True, "ok"),
        ("0.24.0", True, "problem"),
        ("0.34.0", False, "warning"),
        ("", True, "problem"),
        ("", False, "ok"),
    ],
)
def test_vllm_has_to_be_one_that_is_known(release: str, wanted: bool, state: str) -> None:
    assert doctor.check_vllm(release, wanted=wanted).state == state


def test_a_run_with_exact_numerics_says_what_every_engine_has_to_be() -> None:
    calibrated = RunConfig.model_validate({"engine": {"type": "vllm", "device": "cpu"}})
    assert list(doctor.check_exact_numerics(calibrated, "0.32.0")) == []
    exact = calibrated.model_copy(update={"verification": VerificationConfig(numerics="exact")})
    [found] = doctor.check_exact_numerics(exact, "0.32.0")
    assert found.state == "ok"
    assert "vLLM 0.32.0, " in found.found
    [found] = doctor.check_exact_numerics(exact, "")
    assert found.state == "problem"
    assert "set engine.type to vllm" in found.advice


def test_a_gpu_that_others_use_is_named_with_the_share_that_is_left() -> None:
    free, used = doctor.check_gpus(GPUS, None)
    assert free.state == "ok"
    assert used.state == "warning"
    assert "0.06" in used.advice
    (none,) = doctor.check_gpus([], "")
    assert none.state == "ok"
    assert "CUDA_VISIBLE_DEVICES" in none.found


def test_a_busy_cpu_and_little_memory_are_warnings() -> None:
    assert states(doctor.check_cpu(8, 3.0), doctor.check_cpu(2, 9.0)) == ["ok", "warning"]
    assert states(
        doctor.check_memory(doctor.HostMemory(64 * doctor.GIB, 32 * doctor.GIB)),
        doctor.check_memory(doctor.HostMemory(64 * doctor.GIB, doctor.GIB)),
    ) == ["ok", "warning"]


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    info, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    info.write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n")
    assert doctor.machine_memory(info, limit) == doctor.HostMemory(16 * doctor.GIB, 8 * doctor.GIB)
    limit.write_text("max\n")
    assert doctor.machine_memory(info, limit) == doctor.HostMemory(16 * doctor.GIB, 8 * doctor.GIB)
    limit.write_text(f"{4 * doctor.GIB}\n")
    assert doctor.machine_memory(info, limit) == doctor.HostMemory(4 * doctor.GIB, 4 * doctor.GIB)


def test_shared_memory_has_to_hold_a_state_twice() -> None:
    assert doctor.check_shared_memory(64 << 20).state == "warning"  # a container's default
    assert doctor.check_shared_memory(doctor.GIB).state == "ok"
    assert "--shm-size of 8.0 GiB" in doctor.check_shared_memory(doctor.GIB, 4 * doctor.GIB).advice


def test_a_disk_has_to_hold_some_versions(tmp_path: Path) -> None:
    assert states(
        doctor.check_disk(tmp_path, 100 * doctor.GIB),
        doctor.check_disk(tmp_path, 5 * doctor.GIB),
        doctor.check_disk(tmp_path, doctor.GIB // 2),
        doctor.check_disk(tmp_path, 20 * doctor.GIB, 30 * doctor.GIB),
    ) == ["ok", "warning", "problem", "problem"]
    assert doctor.existing(tmp_path / "not" / "yet") == tmp_path


def test_few_open_files_are_a_warning_and_fewer_a_problem() -> None:
    assert states(*map(doctor.check_open_files, (65536, 2048, 256, -1))) == [
        "ok",
        "warning",
        "problem",
        "ok",
    ]


def test_a_port_that_is_taken_is_a_problem_with_the_flag_to_change() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        network: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        udp, tcp = doctor.check_ports(NodeConfig.model_validate({"network": network}))
    assert udp.state == "problem"
    assert "--network.port" in udp.advice
    assert tcp.state == "ok"
    (alone,) = doctor.check_ports(NodeConfig.model_validate({"network": {"libp2p": False}}))
    assert alone.state == "ok"


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    assert doctor.bind_fault("192.0.2.1", 0, socket.SOCK_DGRAM)


def test_a_clock_before_the_program_is_wrong() -> None:
    assert states(doctor.check_clock(1e9, 1.7e9), doctor.check_clock(1.8e9, 1.7e9)) == [
        "problem",
        "ok",
    ]


def test_everything_is_asked_of_this_machine(tmp_path: Path) -> None:
    config = NodeConfig(data_dir=tmp_path / "node")
    names = [check.name for check in doctor.examine(config, {"CUDA_VISIBLE_DEVICES": ""})]
    assert names[:5] == ["Python", "torch", "vLLM", "libp2p", "GPU"]
    assert {"memory", "disk", "open files", "UDP port", "clock"} < set(names)
    assert not (tmp_path / "node").exists()  # it only looks


def test_the_disk_of_a_run_is_that_of_its_own_directory(tmp_path: Path) -> None:
    def disk(config: NodeConfig) -> str:
        checks = doctor.examine(config, {"CUDA_VISIBLE_DEVICES": ""})
        return next(check.found for check in checks if check.name == "disk")

    assert disk(RunConfig(output_dir=tmp_path, name="big")).endswith(f"free at {tmp_path}/big")
    assert disk(RunConfig()).endswith(f"free at {Path.home()}/.primerl")
    assert disk(NodeConfig(data_dir=tmp_path)).endswith(f"free at {tmp_path}")


# -- memory ----------------------------------------------------------------------------------------

SHAPE = read_shape(
    {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }
)
"""Qwen3-1.7B's."""
ENGINE: dict[str, Any] = {"type": "vllm", "dtype": "bfloat16", "max_model_len": 4096}


def planned(gib: float, *, gpus: int = 1, shared: bool = False, **engine: Any) -> doctor.RunMemory:
    config = RunConfig.model_validate({"engine": {**ENGINE, **engine}})
    return doctor.plan_run(
        config, SHAPE, Device("cuda", int(gib * doctor.GIB)), gpus=gpus, shared=shared
    )


def test_worker_and_trainer_are_planned_apart_on_gpus_of_their_own() -> None:
    plan = planned(80)
    assert plan.worker.device.taken == 0
    assert plan.share is None
    assert plan.learner.total <= plan.room


def test_on_a_shared_gpu_each_leaves_room_for_the_other() -> None:
    plan = planned(80, shared=True)
    both = plan.learner.total + plan.beside.total
    assert plan.worker.device.taken == both
    assert plan.share is not None
    assert both + plan.worker.budget <= 80 * doctor.GIB
    assert plan.worker.fits
    assert not planned(24, shared=True).worker.fits


def test_auto_takes_the_gpus_that_there_are() -> None:
    assert planned(80, gpus=4, tp="auto", pp=2).engine.tp == 2


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(UsageError, match="16 attention heads cannot be shared by 3"):
        planned(80, tp=3)
