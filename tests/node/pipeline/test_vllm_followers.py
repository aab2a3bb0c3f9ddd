"""Follower ranks, without vLLM: all get the same calls, and none outlives the first rank."""

import os
import select
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support import follower_cases
from support.follower_cases import Worker, follow

from primerl.node.errors import EngineError
from primerl.node.pipeline.vllm_followers import Followers, RankPipes, serve_calls

WAIT_S = 60.0


def line(count: int) -> tuple[RankPipes, list[Connection]]:
    """Connect pipes to workers in threads of this process."""
    ours: list[Connection] = []
    for rank in range(1, count + 1):
        near, far = Pipe()
        ours.append(near)
        threading.Thread(target=serve_calls, args=(far, Worker(rank).call), daemon=True).start()
    return RankPipes(ours), ours


def test_every_rank_gets_the_same_calls_in_the_same_order() -> None:
    found, _ = line(3)
    found.notify("note", 1)
    answers = found.begin("note", np.arange(3).sum())
    assert answers() == [[1, 1, 3], [2, 1, 3], [3, 1, 3]]
    assert RankPipes(()).call("note", 1) == []


def test_calls_for_the_first_rank_reach_no_other() -> None:
    found, _ = line(2)
    found.notify_first("note", 1)
    assert found.call("note", 2) == [[1, 1, 2], [2, 2]]


def test_refusals_and_failures_are_reported_and_the_next_answer_is_the_next_requests() -> None:
    found, _ = line(2)
    with pytest.raises(EngineError, match="rank 1 does not want to"):
        found.call("refuse")
    with pytest.raises(RuntimeError, match="nobody knows what"):
        found.call("what")
    found.begin("note", 1)  # whose asker gave up
    assert found.call("note", 2) == [[1, 1, 2], [2, 1, 2]]


def test_a_rank_that_does_not_answer_in_time_is_named_and_not_waited_for() -> None:
    near, far = Pipe()
    slow = RankPipes([near], answer_s=0.01)
    with pytest.raises(RuntimeError, match="did not answer note"):
        slow.call("note", 1)
    far.send((1, "", False, "late"))
    far.send((2, "", False, "of now"))
    assert slow.call("note", 2) == ["of now"]


def test_an_unknown_call_that_wants_no_answer_ends_its_process() -> None:
    near, far = Pipe()
    near.send((0, "what", ()))
    with pytest.raises(ValueError, match="nobody knows"):
        serve_calls(far, Worker(1).call)
    near.close()
    serve_calls(far, Worker(1).call)


def started(lost: threading.Event | None = None) -> tuple[Followers, list[Any]]:
    followers = Followers(2, lost and lost.set)
    followers.start(follow, "x")
    return followers, followers.ordered.call("pid")


def test_followers_are_processes_and_one_that_dies_is_noticed() -> None:
    lost = threading.Event()
    followers, pids = started(lost)
    try:
        assert len({os.getpid(), *pids}) == 3
        assert followers.concurrent.call("note", 1) == [[1, "x", 1], [2, "x", 1]]
        os.kill(pids[1], signal.SIGKILL)
        assert lost.wait(WAIT_S)
    finally:
        followers.close()


def test_followers_that_are_ended_are_no_loss() -> None:
    lost = threading.Event()
    followers, pids = started(lost)
    ends = [os.pidfd_open(pid) for pid in pids]
    followers.close()
    assert all(select.select([end], [], [], WAIT_S)[0] for end in ends)
    assert not lost.is_set()
    Followers(0).close()


def test_a_follower_ends_with_the_first_rank_however_that_ends() -> None:
    program = [sys.executable, follower_cases.__file__]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        end = os.pidfd_open(int(first.stdout.readline()))
        first.kill()
    assert select.select([end], [], [], WAIT_S)[0]
    os.close(end)
