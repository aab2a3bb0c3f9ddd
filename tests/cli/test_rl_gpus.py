"""`primerl-node rl --dry-run` on a machine whose nvidia-smi is ours."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl.node.config.loader import load
from primerl.node.config.run import RunConfig
from primerl.node.ops import gpus

from .conftest import Ran

Cli = Callable[..., Ran]


@pytest.fixture(autouse=True)
def four_gpus(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = home / "bin" / "nvidia-smi"
    program.parent.mkdir()
    lines = "".join(f"GPU {index}: H200 (UUID: GPU-{index})\n" for index in range(4))
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && printf "{lines}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    torch_is("2.13.0+cu130", monkeypatch)


def torch_is(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        return release

    monkeypatch.setattr(gpus, "version", version)


def comments(text: str) -> list[str]:
    """What is said of the processes; keys that are not set are comments too."""
    lines = text.splitlines()
    return [line for line in lines if line.startswith("#") and not line.endswith(" is not set")]


def test_a_dry_run_shows_who_gets_which_gpus_and_reads_back(cli: Cli, home: Path) -> None:
    ran = cli(
        *("rl", "--engine", "vllm", "--trainer-gpus", "2", "--inference-gpus", "2", "--tp", "2"),
        "--dry-run",
    )
    assert (ran.code, ran.err) == (0, "")
    assert comments(ran.out) == [
        "# trainer: GPUs 0,1 (--training.backend fsdp --training.fsdp.ranks 2)",
        "# worker_1: GPUs 2,3",
    ]
    (home / "back.toml").write_text(ran.out)
    back = load(RunConfig, ["@", "back.toml"], {})
    assert (back.training.backend, back.training.fsdp.ranks) == ("fsdp", 2)
    assert (back.launch.trainer_gpus, back.engine.tp) == ("2", 2)
    assert cli("rl", "@", "back.toml", "--dry-run").out == ran.out


def test_a_dry_run_as_json_is_json(cli: Cli) -> None:
    ran = cli("rl", "@", "demo", "--dry-run", "--json")
    assert json.loads(ran.out)["launch"]["workers"] == 2
    assert ran.err.splitlines()[0] == "trainer: GPU 0"


def test_the_variable_counts(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1")
    shown = comments(cli("rl", "--trainer-gpus", "1,", "--dry-run").out)
    assert shown == ["# trainer: GPU GPU-1", "# worker_1: GPU 3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = comments(cli("rl", "--dry-run").out)
    assert shown == ["# trainer: CPU", "# worker_1: CPU", "# worker_2: CPU"]


def test_a_torch_for_cpus_uses_none(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_is("2.13.0+cpu", monkeypatch)
    assert comments(cli("rl", "--dry-run").out)[0] == "# trainer: CPU"
    ran = cli("rl", "--trainer-gpus", "1", "--dry-run")
    assert ran.code == 2
    assert "whose version ends in +cpu" in ran.err


def test_what_cannot_be_is_one_line_before_anything_starts(cli: Cli, home: Path) -> None:
    ran = cli("rl", "--trainer-gpus", "3", "--inference-gpus", "2")
    assert ran.code == 2
    assert ran.err.startswith("primerl-node: error: --inference-gpus 2: 4 visible, 1 of them free")
    assert not (home / "outputs").exists()
