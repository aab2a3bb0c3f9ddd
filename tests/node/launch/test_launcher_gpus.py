"""The launcher's care for several runs and GPUs of one machine; small programs in the place of nodes."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from primerl.node.config.run import RunConfig
from primerl.node.launch.launcher import LauncherTimeouts, NodeCommands, launch
from primerl.node.launch.placement import GpuPlacement
from primerl.node.ops.control import NodeState
from primerl.node.ops.errors import BusyError, EngineError, StorageError
from primerl.node.storage.run_files import held

QUICK = LauncherTimeouts(poll=0.02, view=0.02, back_off=(0.01, 0.01), leave=60.0, grace=1.0)
CPU = GpuPlacement(None, (None,))
BODY = """
import os, sys, time
run, role = sys.argv[1:3]
seen = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
with open(f"{run}/seen", "a") as file:
    file.write(role + " " + seen + " " + " ".join(sys.argv[3:]) + "\\n")
def lines():
    return open(f"{run}/seen").read().splitlines()
"""
TRAINER = """
open(f"{run}/ticket.txt", "w").write("T")
while sum(line.startswith("worker") for line in lines()) < int(os.environ["WORKERS"]):
    time.sleep(0.02)
open(f"{run}/done", "w")
"""
WORKER = """
while not os.path.exists(f"{run}/done"): time.sleep(0.02)
"""


class Programs(NodeCommands):
    """What each of these says it sees, goes to the file `seen` of the run."""

    def __init__(self, trainer: str = TRAINER, worker: str = WORKER) -> None:
        self._trainer, self._worker = trainer, worker

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", BODY + self._trainer, str(config.run_dir), "trainer", *args]

    def worker(self, config: RunConfig, name: str) -> list[str]:
        share = str(config.engine.vllm.get("gpu_memory_utilization"))
        return [sys.executable, "-c", BODY + self._worker, str(config.run_dir), name, share]


class Notes:
    """A view that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(name="r", output_dir=tmp_path)


async def run(
    config: RunConfig, placement: GpuPlacement, programs: Programs, pace: LauncherTimeouts = QUICK
) -> list[str]:
    """What was said; Placement.workers says how many of them the trainer waits for."""
    view = Notes()
    await launch(config, [], view=view, placement=placement, commands=programs, pace=pace)
    return view.said


def appear(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"never: {path}"
        time.sleep(0.01)


def seen(config: RunConfig) -> list[str]:
    return sorted((config.run_dir / "seen").read_text().splitlines())


async def test_every_process_sees_its_own_gpus(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "2")
    placement = GpuPlacement(("4", "GPU-a"), (("1", "2"), ("7",)), ranks=2, memory=0.25)
    said = await run(config, placement, Programs())
    assert seen(config) == [
        "trainer 4,GPU-a --training.backend fsdp --training.fsdp.ranks 2",
        "worker_1 1,2 0.25",
        "worker_2 7 0.25",
    ]
    assert said == placement.lines()


@pytest.mark.parametrize("variable", [None, "", "3"])
async def test_without_gpus_the_variable_stays_as_it_is(
    variable: str | None, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert await run(config, CPU, Programs()) == []
    now = "unset" if variable is None else variable
    assert seen(config) == [f"trainer {now} ", f"worker_1 {now} None"]


async def test_two_launchers_of_one_run_do_not_meet(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with --clean, and before a node of the first one answers."""
    monkeypatch.setenv("WORKERS", "2")  # one more than there will be: it waits for us
    first = asyncio.create_task(run(config, CPU, Programs()))
    await asyncio.to_thread(appear, config.run_dir / "seen")
    with pytest.raises(BusyError, match="another `primerl-node rl` works in"):
        await run(config.model_copy(update={"clean": True}), CPU, Programs())
    with (config.run_dir / "seen").open("a") as file:
        file.write("worker of nobody\n")
    await first
    with held(config.run_dir):
        pass


async def test_two_runs_of_different_names_do_not_disturb_each_other(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "1")
    other = config.model_copy(update={"name": "other"})
    await asyncio.gather(run(config, CPU, Programs()), run(other, CPU, Programs()))
    assert len(seen(config)) == len(seen(other)) == 2


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write"), held(tmp_path / "file" / "run"):
        pass


async def test_what_a_worker_said_last_is_passed_on(config: RunConfig) -> None:
    dying = "print('primerl-node: error: no memory left', file=sys.stderr); sys.exit(7)"
    with pytest.raises(EngineError, match=r"the last: worker_1 ended with code 7: no memory left"):
        await run(
            config, CPU, Programs("open(f'{run}/ticket.txt', 'w').write('T')\n" + WORKER, dying)
        )


async def test_a_worker_that_is_called_wrongly_is_not_started_again(config: RunConfig) -> None:
    wrong = "print('primerl-node: error: unknown option', file=sys.stderr); sys.exit(2)"
    with pytest.raises(EngineError, match="unknown option"):
        await run(
            config, CPU, Programs("open(f'{run}/ticket.txt', 'w').write('T')\n" + WORKER, wrong)
        )
    assert [line.split()[0] for line in seen(config)] == ["trainer", "worker_1"]


async def test_who_was_well_for_long_has_all_restarts_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "5")
    dying = "if len(lines()) < 6: sys.exit(7)\n" + WORKER
    once = LauncherTimeouts(poll=0.02, view=0.02, back_off=(0.01,), well=0.0, leave=60.0, grace=1.0)
    said = await run(config, CPU, Programs(TRAINER, dying), once)
    assert len(said) == 4
    assert all("starting it again" in line for line in said)
