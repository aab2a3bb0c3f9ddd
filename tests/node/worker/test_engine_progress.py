"""When a worker hands back its leases because nothing comes of them."""

from primerl.node.worker.loop import STALLED, STALLED_S, EngineProgress


def working(usual_s: float) -> EngineProgress:
    progress = EngineProgress()
    progress.lease_ended(usual_s)
    progress.moved(0.0)
    return progress


def test_an_engine_of_which_nothing_comes_is_stalled() -> None:
    assert not working(10.0).stalled(0, STALLED_S - 1)
    assert "no rollout has ended for 60 s" in working(10.0).stalled(0, STALLED_S)
    assert not working(100.0).stalled(0, STALLED * 100 - 1)
    assert working(100.0).stalled(0, STALLED * 100)


def test_long_replies_are_waited_for_while_their_tokens_come() -> None:
    """Handed back, they would be missing from the run: the longest, each time."""
    progress = working(10.0)
    assert not any(progress.stalled(second, float(second)) for second in range(600))
    assert progress.stalled(599, 599 + STALLED_S)


def test_an_engine_that_has_become_slow_does_not_hand_back_all_its_leases() -> None:
    """A batch takes 900 s now, on an engine that says nothing of its tokens."""
    progress, now, returned, done = working(10.0), 0.0, 0, 0
    while done < 3 and now < 90_000:
        ends = now + 900
        progress.moved(now)
        while now < ends and not progress.stalled(0, now):
            now += 1
        if now >= ends:
            done += 1
            progress.lease_ended(900.0)
        else:
            returned += 1
    assert (done, returned) == (3, 2)
