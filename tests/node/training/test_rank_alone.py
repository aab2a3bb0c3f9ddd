"""A learner in a process of its own, which no torchrun watches: how it ends, and who says so."""

import asyncio
import os
import signal
import sys

import pytest
from support import fake_rank as fake

from primerl.node.config.training import FsdpConfig, TrainingConfig
from primerl.node.ops.errors import EngineError, RankFailed
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.ranks.calls import Start, Step
from primerl.node.training.ranks.group import RankGroup
from primerl.node.training.ranks.torchrun import command, environment

FAKE = (fake.__file__,)
CONFIG = TrainingConfig(
    device="cpu", threads=1, fsdp=FsdpConfig(timeout_s=20.0, start_timeout_s=60.0)
)


def step(kind: int) -> Step:
    return Step(TrainBatch(1, [Sample([kind, 1], [False, True], [0.0, -1.0], 1.0)]))


async def gone(pid: int) -> None:
    """Wait until this process is left not even as a zombie."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.05)


async def started() -> RankGroup:
    found = RankGroup(CONFIG, 1, FAKE)
    await found.start()
    await found.ask(Start("model", 10, 0, 1.0), 60.0)
    return found


async def fails(rank: RankGroup, kind: int, match: str, timeout_s: float = 60.0) -> None:
    """A step ends with this RankFailed, and everything is gone."""
    directory, pid = rank.directory, rank.pids[0]
    try:
        with pytest.raises(RankFailed, match=match):
            await rank.ask(step(kind), timeout_s)
        await gone(pid)
    finally:
        await rank.close()
    assert not directory.exists()


async def test_a_rank_alone_is_the_process_itself_and_its_end_is_seen() -> None:
    rank = await started()
    assert rank.pids == [rank.pid]
    with pytest.raises(EngineError, match="step 1 is refused"):
        await rank.ask(step(fake.REFUSED), 60.0)
    asyncio.get_running_loop().call_later(0.3, os.kill, rank.pids[0], signal.SIGKILL)
    await fails(rank, fake.HANGS, "rank 0 of 1 failed: killed by SIGKILL")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "match", "timeout_s"),
    [
        (fake.RAISES, "rank 0 of 1 failed: KeyError: 'a bug of rank 0'", 30.0),
        (fake.MEMORY, "rank 0 of 1 failed: RuntimeError: CUDA out of memory", 30.0),
        (fake.HANGS, "no answer to Step in 1 s", 1.0),
    ],
)
async def test_a_rank_alone_that_breaks_or_hangs_says_why(
    kind: int, match: str, timeout_s: float
) -> None:
    await fails(await started(), kind, match, timeout_s)


@pytest.mark.nightly
async def test_a_rank_alone_that_is_asked_to_end_ends_in_peace() -> None:
    rank = await started()
    directory, pid = rank.directory, rank.pids[0]
    await rank.close()
    await gone(pid)
    assert not directory.exists()
    with pytest.raises(EngineError, match="start"):
        await rank.ask(step(fake.FINE), 5.0)


def test_a_rank_alone_is_started_without_torchrun_and_knows_that_it_is_alone() -> None:
    assert command(CONFIG, 1, ["-m", "rank"], here=True) == [sys.executable, "-P", "-m", "rank"]
    inherited = {"RANK": "3", "WORLD_SIZE": "8", "OMP_NUM_THREADS": "5"}
    found = environment(inherited, CONFIG, 1)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("0", "1", "0")
    assert found["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in environment({}, CONFIG, 1)
    two = CONFIG.model_copy(update={"fsdp": FsdpConfig(nodes=2, rendezvous="here:1")})
    assert "torch.distributed.run" in command(two, 1, ["-m", "rank"], here=True)
