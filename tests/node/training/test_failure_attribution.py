"""Whose fault it was, from what ranks and torchrun write; the lines are those of torch 2.11 and 2.13."""

import os
import signal
import subprocess
import time

from primerl.node.training.rank_group import FailureAttribution, stopped
from primerl.node.training.rank_messages import ENDED, EXIT_LOST, RanksBroken

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


def test_whoever_ends_because_of_others_is_not_blamed() -> None:
    text = blamed(failed(EXIT_LOST, 0, 70), broken=RanksBroken([3], "timed out"))
    assert text.startswith("rank 3 of 4 failed: does not answer (timed out);")
    assert "rank" not in blamed(failed(EXIT_LOST, 0, 70)).partition(";")[0].replace("ranks", "")


def test_a_rank_that_nccl_aborts_is_blamed_only_if_nobody_is_silent() -> None:
    aborted = failed(-signal.SIGABRT, 0, 70)
    assert blamed(aborted).startswith("rank 0 of 4 failed: killed by SIGABRT;")
    text = blamed(aborted, broken=RanksBroken([1], "no answer"))
    assert text.startswith("rank 1 of 4 failed: does not answer")


def test_where_nobody_is_to_blame_the_last_lines_are_told() -> None:
    assert "No module named torch" in blamed("python: No module named torch")


def test_torchruns_own_traceback_is_not_told() -> None:
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
