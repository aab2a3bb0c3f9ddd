"""Real processes and a real gloo world, a learner that does as it is told: what happens when ranks go wrong."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support import fake_rank as fake

from primerl.node.config.training import FsdpConfig, TrainingConfig
from primerl.node.errors import EngineError, RankFailed, StorageError
from primerl.node.training.backend import Sample
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.rank_group import RankGroup
from primerl.node.training.rank_messages import RankStart

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

FAKE = (fake.__file__,)
TIMEOUT_S = 5.0
MODEL = Path("model")


def config(timeout_s: float = 20.0) -> TrainingConfig:
    fsdp = FsdpConfig(timeout_s=timeout_s)
    return TrainingConfig(device="cpu", threads=1, fsdp=fsdp)


async def group(timeout_s: float = 20.0) -> RankGroup:
    ranks = RankGroup(config(timeout_s), 2, FAKE)
    await ranks.start()
    return ranks


def backend(ranks: RankGroup) -> FsdpBackend:
    return FsdpBackend(config(), max_steps=10, seed=0, ranks=ranks)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def ranks() -> AsyncIterator[RankGroup]:
    """One group for the tests that leave it alive and for the test after them, which kills a rank of it."""
    found = await group()
    yield found
    await found.close()


@pytest_asyncio.fixture(loop_scope="module")
async def subject(ranks: RankGroup) -> AsyncIterator[FsdpBackend]:
    found = backend(ranks)
    await found.start(MODEL)
    yield found
    await found.close()


async def test_what_all_ranks_refuse_is_an_error_and_they_live_on(subject: FsdpBackend) -> None:
    with pytest.raises(EngineError, match="step 1 is refused"):
        await subject.step(fake.batch(1, fake.REFUSED))
    with pytest.raises(EngineError, match="not for this model"):
        await subject.load(Path("elsewhere"))
    found = await subject.step(fake.batch(2, fake.FINE))
    assert found.values == {"steps": 1.0, "ranks": 2.0}


@pytest.mark.parametrize("rank", [0, 1])
async def test_what_changes_nothing_may_fail_on_one_rank_alone(
    subject: FsdpBackend, rank: int
) -> None:
    sample = Sample([rank, 1], [False, True], [0.0, -1.0], 1.0)
    with pytest.raises(StorageError, match=f"rank {rank}"):
        await subject.evaluate([sample])
    assert (await subject.step(fake.batch(1, fake.FINE))).values["ranks"] == 2.0


async def test_a_cancelled_call_is_finished_and_its_answer_goes_to_no_other_call(
    subject: FsdpBackend,
) -> None:
    call = asyncio.create_task(subject.step(fake.batch(1, fake.SLOW)))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await subject.supervised_step([([1], [2])], 0.5) == 0.5
    assert (await subject.step(fake.batch(2, fake.FINE))).values["steps"] == 2.0


async def test_a_staged_checkpoint_is_written_while_steps_go_on(
    subject: FsdpBackend, tmp_path: Path
) -> None:
    await subject.stage()
    writing = asyncio.create_task(subject.write_staged(tmp_path))
    for step in range(1, fake.STEPS_BESIDE):
        await subject.step(fake.batch(step, fake.FINE))
    assert not writing.done()
    assert os.listdir(tmp_path) == []
    await subject.step(fake.batch(fake.STEPS_BESIDE, fake.FINE))
    await writing
    assert sorted(os.listdir(tmp_path)) == ["rank0", "rank1"]


async def test_every_rank_does_what_rank_0_is_asked_in_a_process_of_its_own(
    subject: FsdpBackend, ranks: RankGroup, tmp_path: Path
) -> None:
    await subject.export(tmp_path)
    await subject.save(tmp_path)
    assert [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)] == ranks.pids
    assert os.getpid() not in ranks.pids
    assert ranks.directory.stat().st_mode & 0o077 == 0


async def fails(ranks: RankGroup, kind: int, match: str, victim: int | None = None) -> None:
    """A step, in which the `victim` is killed, ends with this RankFailed; everything is gone, and stays so."""
    directory = ranks.directory
    try:
        await ranks.ask(RankStart("model", 10, 0, 1.0), 60.0)
        if victim is not None:
            asyncio.get_running_loop().call_later(0.5, os.kill, victim, signal.SIGKILL)
        with pytest.raises(RankFailed, match=match):
            await ranks.ask(fake.step(kind), 60.0)
        await fake.gone(ranks.pid, *ranks.pids)
        with pytest.raises(RankFailed, match=match):
            await ranks.ask(fake.step(fake.FINE), 30.0)
    finally:
        await ranks.close()
    assert not directory.exists()


async def test_a_rank_that_is_killed_in_a_step_ends_all_and_is_named(ranks: RankGroup) -> None:
    await fails(ranks, fake.HANGS, "rank 1 of 2 failed: killed by SIGKILL", ranks.pids[1])


async def test_a_rank_that_has_a_bug_ends_all_and_says_which() -> None:
    await fails(await group(), fake.RAISES, "rank 1 of 2 failed: KeyError: 'a bug of rank 1'")


async def test_a_rank_that_is_stopped_while_no_call_is_running_is_noticed() -> None:
    ranks = await group(TIMEOUT_S)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    await fake.gone(ranks.pid, *ranks.pids)
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: does not answer"):
        await ranks.ask(fake.step(fake.FINE), 30.0)
    await ranks.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (fake.HANGS, "rank 1 of 2 failed: does not answer"),
        (fake.DIFFERS, "rank 1 of 2 failed: .*step 1 is refused"),
        (fake.MEMORY, "rank 1 of 2 failed: RuntimeError: CUDA out of memory"),
    ],
)
async def test_a_rank_that_hangs_or_differs_ends_all(kind: int, match: str) -> None:
    await fails(await group(TIMEOUT_S), kind, match)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1, -1], ids=["rank0", "rank1", "torchrun"])
async def test_when_a_process_dies_while_no_call_is_running_none_is_left(
    rank: int, number: signal.Signals
) -> None:
    ranks = await group(TIMEOUT_S)
    start = RankStart("model", 10, 0, 1.0)
    victim = ranks.pid if rank < 0 else ranks.pids[rank]
    assert victim is not None
    os.kill(victim, number)
    if rank == -1 and number is signal.SIGSTOP:  # its ranks know nothing of it, and go on
        with pytest.raises(EngineError, match="start"):
            await ranks.ask(fake.step(fake.FINE), 60.0)
    else:
        if number is signal.SIGKILL:
            await fake.gone(*ranks.pids)
        with pytest.raises(RankFailed):
            await ranks.ask(start, 2 * TIMEOUT_S)
    await ranks.close()
    await fake.gone(ranks.pid, *ranks.pids)


async def test_ranks_that_cannot_start_are_an_error_that_says_why() -> None:
    ranks = RankGroup(config(), 2, ("-c", "raise SystemExit"))
    with pytest.raises(RankFailed, match="ended before they met"):
        await ranks.start()
    await fake.gone(ranks.pid)
    with pytest.raises(RankFailed):
        await ranks.ask(fake.step(fake.FINE), 5.0)


@pytest.mark.nightly
async def test_a_world_that_cannot_be_divided_is_a_mistake_of_the_config() -> None:
    fsdp = FsdpConfig(replicas=3)
    ranks = RankGroup(config().model_copy(update={"fsdp": fsdp}), 2, FAKE)
    with pytest.raises(EngineError, match=r"2 ranks are not divisible by fsdp.replicas 3") as error:
        await ranks.start()
    assert not isinstance(error.value, RankFailed)
    await fake.gone(ranks.pid)


DAEMON = """
import asyncio, sys
from primerl.node.training.rank_group import RankGroup
from primerl.node.config.training import TrainingConfig

async def main():
    ranks = RankGroup(TrainingConfig.model_validate_json(sys.argv[1]), 2, (sys.argv[2],))
    await ranks.start()
    print(ranks.directory, ranks.pid, *ranks.pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_ranks_end_with_a_daemon_that_is_killed() -> None:
    program = [sys.executable, "-c", DAEMON, config().model_dump_json(), *FAKE]
    daemon = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
    try:
        assert daemon.stdout is not None
        directory, *pids = (await daemon.stdout.readline()).decode().split()
        daemon.kill()
        await fake.gone(*map(int, pids))
        assert Path(directory).name not in os.listdir(Path(directory).parent)
    finally:
        if daemon.returncode is None:
            daemon.kill()
        await daemon.communicate()
