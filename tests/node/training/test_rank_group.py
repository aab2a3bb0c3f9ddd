"""Ranks as the daemon starts and ends them: alone, under torchrun, on several machines, and the one at fault.

Lines of torchrun are those of torch 2.11 and 2.13.
"""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import fake_rank as fake

from primerl.node.config.training import FsdpConfig, TrainingConfig
from primerl.node.errors import EngineError, RankFailed, UsageError
from primerl.node.training.rank_group import (
    COMPILED,
    FailureAttribution,
    RankGroup,
    command,
    environment,
    stopped,
)
from primerl.node.training.rank_messages import ENDED, EXIT_LOST, RankDone, RanksBroken, RankStart

FAKE = (fake.__file__,)
CONFIG = TrainingConfig(device="cpu", threads=1, fsdp=FsdpConfig(timeout_s=20.0))
LOST = (
    "rank 0 lost the others: RuntimeError: gloo/transport/tcp/pair.cc:553 Connection closed by peer"
)


def failed(code: int, local_rank: int, pid: int) -> str:
    return (
        "E1121 20:46:32.962000 27362 torch/distributed/elastic/multiprocessing/api.py:1002] "
        f"failed (exitcode: {code}) local_rank: {local_rank} (pid: {pid}) of binary: python"
    )


def blamed(*lines: str, broken: RanksBroken | None = None) -> str:
    found = FailureAttribution()
    found.pids = [70, 71, 72, 0]
    for line in lines:
        found.note(line)
    if broken is not None:
        found.mute(broken.ranks, f"does not answer ({broken.detail})")
    return found.text("the ranks ended", 4)


def test_a_killed_rank_is_named_by_its_signal() -> None:
    assert blamed(LOST, failed(-9, 1, 71)).startswith("rank 1 of 4 failed: killed by SIGKILL;")


def test_the_last_words_say_more_than_an_exit_code() -> None:
    last = ENDED.format(rank=2, reason="RuntimeError: CUDA out of memory")
    text = blamed(LOST, last, failed(1, 2, 72))
    assert text.startswith("rank 2 of 4 failed: RuntimeError: CUDA out of memory;")


def test_a_rank_that_ends_because_of_others_is_not_blamed() -> None:
    text = blamed(failed(EXIT_LOST, 0, 70), broken=RanksBroken([3], "timed out"))
    assert text.startswith("rank 3 of 4 failed: does not answer (timed out);")
    assert "rank" not in blamed(failed(EXIT_LOST, 0, 70)).partition(";")[0].replace("ranks", "")


def test_a_rank_that_nccl_aborts_is_blamed_only_if_no_rank_is_silent() -> None:
    aborted = failed(-signal.SIGABRT, 0, 70)
    assert blamed(aborted).startswith("rank 0 of 4 failed: killed by SIGABRT;")
    text = blamed(aborted, broken=RanksBroken([1], "no answer"))
    assert text.startswith("rank 1 of 4 failed: does not answer")


def test_without_a_rank_to_blame_the_error_has_the_last_lines() -> None:
    assert "No module named torch" in blamed("python: No module named torch")


def test_torchruns_own_traceback_is_left_out() -> None:
    assert "ChildFailedError" not in blamed(failed(EXIT_LOST, 0, 70), "ChildFailedError: rank 0")


def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert stopped([os.getpid(), process.pid]) == []
            process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 60
            while stopped([os.getpid(), process.pid]) != [1]:
                assert time.monotonic() < deadline
        finally:
            process.kill()


async def started() -> RankGroup:
    found = RankGroup(CONFIG, 1, FAKE)
    await found.start()
    await found.ask(RankStart("model", 10, 0, 1.0), 60.0)
    return found


async def fails(rank: RankGroup, kind: int, match: str, timeout_s: float = 60.0) -> None:
    """A step ends with this RankFailed, and everything is gone."""
    directory, pid = rank.directory, rank.pids[0]
    try:
        with pytest.raises(RankFailed, match=match):
            await rank.ask(fake.step(kind), timeout_s)
        await fake.gone(pid)
    finally:
        await rank.close()
    assert not directory.exists()


async def test_a_rank_alone_is_the_process_itself_and_its_end_is_seen() -> None:
    rank = await started()
    assert rank.pids == [rank.pid]
    with pytest.raises(EngineError, match="step 1 is refused"):
        await rank.ask(fake.step(fake.REFUSED), 60.0)
    asyncio.get_running_loop().call_later(0.3, os.kill, rank.pids[0], signal.SIGKILL)
    await fails(rank, fake.HANGS, "rank 0 of 1 failed: killed by SIGKILL")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "match", "timeout_s"),
    [
        (fake.RAISES, "rank 0 of 1 failed: KeyError: 'a bug of rank 0'", 30.0),
        (fake.MEMORY, "rank 0 of 1 failed: RuntimeError: CUDA out of memory", 30.0),
        (fake.HANGS, "no answer to StepCall in 1 s", 1.0),
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
    await fake.gone(pid)
    assert not directory.exists()
    with pytest.raises(EngineError, match="start"):
        await rank.ask(fake.step(fake.FINE), 5.0)


def test_a_rank_alone_is_started_without_torchrun_and_knows_that_it_is_alone() -> None:
    assert command(CONFIG, 1, ["-m", "rank"], here=True) == [sys.executable, "-P", "-m", "rank"]
    inherited = {"RANK": "3", "WORLD_SIZE": "8", "OMP_NUM_THREADS": "5"}
    found = environment(inherited, CONFIG, 1)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("0", "1", "0")
    assert found["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in environment({}, CONFIG, 1)
    two = CONFIG.model_copy(update={"fsdp": FsdpConfig(nodes=2, rendezvous="here:1")})
    assert "torch.distributed.run" in command(two, 1, ["-m", "rank"], here=True)


def config(port: int) -> TrainingConfig:
    fsdp = FsdpConfig(
        ranks=1,
        nodes=2,
        rendezvous=f"127.0.0.1:{port}",
        timeout_s=10.0,
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


@pytest.mark.nightly
async def test_ranks_of_two_machines_train_together_and_end_together() -> None:
    settings = config(free_port())
    ranks = RankGroup(settings, 1, FAKE)
    async with other_machine(settings) as other:
        await ranks.start()
        assert len(ranks.pids) == 2
        assert ranks.pids[1] == 0  # not ours to kill
        await ranks.ask(RankStart("model", 10, 0, 1.0), 60.0)
        assert await ranks.ask(fake.step(fake.FINE), 60.0) == RankDone({"steps": 1.0, "ranks": 2.0})
        await ranks.close()
        async with asyncio.timeout(60.0):
            assert await other.wait() == 0


@pytest.mark.nightly
async def test_a_machine_that_dies_ends_all() -> None:
    settings = config(free_port())
    ranks = RankGroup(settings, 1, FAKE)
    async with other_machine(settings) as other:
        await ranks.start()
        await ranks.ask(RankStart("model", 10, 0, 1.0), 60.0)
        os.killpg(other.pid, signal.SIGKILL)
        with pytest.raises(RankFailed):
            await ranks.ask(fake.step(fake.SLOW), 60.0)
        await ranks.close()


@pytest.mark.nightly
async def test_where_no_other_machine_comes_the_error_has_the_command() -> None:
    ranks = RankGroup(config(free_port()), 1, FAKE, start_s=4.0)
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
        "--node-rank NODE --master-addr 127.0.0.1 --master-port 29500 --rdzv-conf timeout=600 "
        "-m primerl.node.training.rank"
    )


def test_what_ranks_compile_is_kept_at_home_unless_the_operator_names_another_place() -> None:
    assert environment({}, CONFIG, 1)[COMPILED] == f"{Path.home()}/.primerl/compiled"
    assert environment({COMPILED: "/own"}, CONFIG, 2)[COMPILED] == "/own"


def test_ranks_of_one_machine_listen_to_no_other_machine() -> None:
    one = environment({}, TrainingConfig(), 2)
    assert one.get("GLOO_SOCKET_IFNAME") == ("lo" if sys.platform == "linux" else None)
    assert "GLOO_SOCKET_IFNAME" not in environment({}, config(1), 2)
    assert environment({"OMP_NUM_THREADS": "3"}, TrainingConfig(), 2)["OMP_NUM_THREADS"] == "3"
