"""Ranks on several machines: two torchruns on this one, joined by the command that the daemon prints."""

import asyncio
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from support import fake_rank as fake

from primerl.node.config.training import FsdpConfig, TrainingConfig
from primerl.node.ops.errors import RankFailed, UsageError
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.ranks.calls import Figures, Start, Step
from primerl.node.training.ranks.group import RankGroup
from primerl.node.training.ranks.torchrun import command, environment

FAKE = (fake.__file__,)


def config(port: int, start_timeout_s: float = 60.0) -> TrainingConfig:
    fsdp = FsdpConfig(
        ranks=1,
        nodes=2,
        rendezvous=f"127.0.0.1:{port}",
        timeout_s=10.0,
        start_timeout_s=start_timeout_s,
    )
    return TrainingConfig(device="cpu", threads=1, fsdp=fsdp)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@asynccontextmanager
async def other_machine(config: TrainingConfig) -> AsyncGenerator[asyncio.subprocess.Process]:
    """What its operator does: paste the command, with a number for NODE."""
    line = str(command(config, 1, FAKE)).replace("NODE", "1")
    program = [sys.executable if word == "python" else word for word in shlex.split(line)]
    process = await asyncio.create_subprocess_exec(*program, start_new_session=True)
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def step(number: int, kind: int) -> Step:
    return Step(TrainBatch(number, [Sample([kind, 1], [False, True], [0.0, -1.0], 1.0)]))


@pytest.mark.nightly
async def test_ranks_of_two_machines_train_together_and_end_together() -> None:
    settings = config(free_port())
    ranks = RankGroup(settings, 1, FAKE)
    async with other_machine(settings) as other:
        await ranks.start()
        assert len(ranks.pids) == 2
        assert ranks.pids[1] == 0  # not ours to kill
        await ranks.ask(Start("model", 10, 0, 1.0), 60.0)
        assert await ranks.ask(step(1, fake.FINE), 60.0) == Figures({"steps": 1.0, "ranks": 2.0})
        await ranks.close()
        async with asyncio.timeout(60.0):
            assert await other.wait() == 0


@pytest.mark.nightly
async def test_a_machine_that_dies_ends_all() -> None:
    settings = config(free_port())
    ranks = RankGroup(settings, 1, FAKE)
    async with other_machine(settings) as other:
        await ranks.start()
        await ranks.ask(Start("model", 10, 0, 1.0), 60.0)
        os.killpg(other.pid, signal.SIGKILL)
        with pytest.raises(RankFailed):
            await ranks.ask(step(1, fake.SLOW), 60.0)
        await ranks.close()


@pytest.mark.nightly
async def test_where_nobody_comes_the_error_has_the_command() -> None:
    ranks = RankGroup(config(free_port(), start_timeout_s=4.0), 1, FAKE)
    with pytest.raises(RankFailed, match=r"with NODE 1 to 1, run `python -m torch.distributed.run"):
        await ranks.start()


def test_several_machines_need_a_place_to_meet() -> None:
    for rendezvous in ("", "10.0.0.1", "10.0.0.1:", ":1"):
        fsdp = FsdpConfig(nodes=2, rendezvous=rendezvous)
        with pytest.raises(UsageError, match="rendezvous"):
            command(TrainingConfig(fsdp=fsdp), 1, FAKE)


def test_the_command_for_other_machines_holds_no_secret_and_nothing_of_this_machine() -> None:
    line = str(command(config(29500), 8, ("-m", "primerl.node.training.rank")))
    assert line == (
        "python -m torch.distributed.run --nproc-per-node 8 --max-restarts 0 --nnodes 2 "
        "--node-rank NODE --master-addr 127.0.0.1 --master-port 29500 --rdzv-conf timeout=60 "
        "-m primerl.node.training.rank"
    )


def test_ranks_of_one_machine_listen_to_nobody_else() -> None:
    one = environment({}, TrainingConfig(), 2)
    assert one.get("GLOO_SOCKET_IFNAME") == ("lo" if sys.platform == "linux" else None)
    assert "GLOO_SOCKET_IFNAME" not in environment({}, config(1), 2)
    assert environment({"OMP_NUM_THREADS": "3"}, TrainingConfig(), 2)["OMP_NUM_THREADS"] == "3"
