"""What a fault may cost, apart from how busy the machine is."""

from dataclasses import replace

from support.real_swarm import MOST_STALE, RECONNECT_S, Cost, Limit

LIMIT = Limit(steps=1, stop_s=60.0, pause_s=10.0, back_s=15.0)
MOST = Cost(
    steps=2,
    ends=2,
    pause_s=60.0 + RECONNECT_S + 2.0 * 10.0,
    back_s=RECONNECT_S + 2.0 * 15.0,
    rollouts=MOST_STALE,
)
"""Of two threads that share a core, and a trainer that ended twice."""


def test_a_limit_on_time_grows_with_the_threads_that_share_a_core() -> None:
    assert LIMIT.exceeded(MOST, 2.0) == []
    assert LIMIT.exceeded(MOST, 1.5) == ["pause_s 110, at most 105", "back_s 60, at most 52"]


def test_connections_that_live_on_leave_no_time_to_replace_them() -> None:
    alive = replace(LIMIT, reconnects=False)
    assert alive.exceeded(MOST, 2.0) == ["pause_s 110, at most 80", "back_s 60, at most 30"]


def test_a_step_is_trained_again_only_where_the_trainer_ended() -> None:
    assert LIMIT.exceeded(replace(MOST, ends=1), 2.0) == ["steps 2, at most 1"]
    assert LIMIT.exceeded(replace(MOST, rollouts=769), 2.0) == ["rollouts 769, at most 768"]
