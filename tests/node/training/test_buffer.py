import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_cases import group

from primerl.node.training.buffer import BufferSnapshot, RolloutBuffer

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-1, 6)),
        st.tuples(st.just("advance"), st.integers(0, 3)),
        st.tuples(st.just("cut"), st.integers(1, 3)),
    ),
    max_size=60,
)


def buffer(bound: int = 2, capacity: int = 100) -> RolloutBuffer:
    return RolloutBuffer(max_off_policy_steps=bound, capacity=capacity)


@given(bound=st.integers(0, 3), moves=MOVES)
def test_no_batch_ever_holds_a_group_older_than_the_bound(
    bound: int, moves: list[tuple[str, int]]
) -> None:
    rollouts = buffer(bound, capacity=8)
    version = 0
    for move, number in moves:
        if move == "add":
            rollouts.add(group([0, 1], oldest=version - number), version)
        elif move == "advance":
            version += number
            rollouts.advance(version)
        else:
            for cut in rollouts.cut(number) or []:
                assert 0 <= version - cut.policy_oldest <= bound
        counts = rollouts.counts
        assert counts["added"] == counts["cut"] + counts["swept"] + len(rollouts)


def test_a_group_that_waited_past_the_bound_is_swept_though_it_was_fresh_on_arrival() -> None:
    rollouts = buffer(bound=1)
    assert rollouts.add(group([0, 1], oldest=4), 4) is None
    assert rollouts.advance(5) == []
    assert [swept.policy_oldest for swept in rollouts.advance(6)] == [4]
    assert rollouts.cut(1) is None
    assert rollouts.counts["swept"] == 1


def test_a_bound_of_zero_admits_only_the_version_being_trained() -> None:
    rollouts = buffer(bound=0)
    assert rollouts.add(group([0, 1], oldest=2), 3) == "stale"
    assert rollouts.add(group([0, 1], oldest=3), 3) is None
    rollouts.advance(4)
    assert len(rollouts) == 0


def test_a_group_from_the_future_is_refused() -> None:
    assert buffer().add(group([0, 1], oldest=4), 3) == "future"


def test_an_old_trained_version_cannot_make_a_stale_group_fresh() -> None:
    rollouts = buffer(bound=1)
    rollouts.advance(9)
    assert rollouts.add(group([0, 1], oldest=3), 3) == "stale"
    assert rollouts.version == 9


def test_a_lone_rollout_is_refused_for_it_can_be_compared_with_nothing() -> None:
    assert buffer().add(group([1.0]), 0) == "thin"


def test_a_full_buffer_refuses_instead_of_dropping() -> None:
    rollouts = buffer(capacity=1)
    assert rollouts.add(group([0, 1], task=b"kept"), 0) is None
    assert rollouts.add(group([0, 1], task=b"late"), 0) == "full"
    assert [g.task for g in rollouts.cut(1) or []] == [b"kept"]


def test_a_batch_takes_the_oldest_version_first_and_among_equals_who_came_first() -> None:
    rollouts = buffer()
    for task, oldest in ((b"a", 2), (b"b", 1), (b"c", 2), (b"d", 1)):
        rollouts.add(group([0, 1], oldest=oldest, task=task), 2)
    assert [g.task for g in rollouts.cut(3) or []] == [b"b", b"d", b"a"]
    assert rollouts.cut(2) is None
    assert len(rollouts) == 1


def test_no_node_fills_more_of_a_batch_than_its_share() -> None:
    rollouts = buffer()
    for node in (b"flood", b"flood", b"flood", b"small"):
        rollouts.add(group([0, 1], node=node), 0)
    assert rollouts.cut(4, per_node=2) is None
    assert [g.node for g in rollouts.cut(3, per_node=2) or []] == [b"flood", b"flood", b"small"]
    assert [g.node for g in rollouts.cut(1) or []] == [b"flood"]


def test_a_batch_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one"):
        buffer().cut(0)


def test_staleness_is_counted_from_the_oldest_version() -> None:
    rollouts = buffer()
    rollouts.add(group([0, 1], oldest=3), 5)
    rollouts.add(group([0, 1], oldest=5), 5)
    stats = rollouts.staleness()
    assert (stats.count, stats.mean, stats.max) == (2, 1.0, 2)
    cut = rollouts.cut(1) or []
    assert rollouts.staleness(cut).max == 2
    assert rollouts.staleness([]).count == 0


def test_a_buffer_restored_from_bytes_cuts_what_the_original_would_have() -> None:
    first, second = buffer(), buffer()
    for task in (b"a", b"b", b"c"):
        first.add(group([0, 1], oldest=1, task=task), 2)
    stored = msgspec.msgpack.encode(first.snapshot())
    assert second.restore(msgspec.msgpack.decode(stored, type=BufferSnapshot)) == []
    assert second.counts == first.counts
    assert second.cut(2) == first.cut(2)
    assert second.snapshot() == first.snapshot()


def test_restoring_under_a_tighter_bound_sweeps() -> None:
    loose, tight = buffer(bound=2), buffer(bound=0)
    loose.add(group([0, 1], oldest=1), 2)
    assert len(tight.restore(loose.snapshot())) == 1
    assert tight.cut(1) is None


def test_a_snapshot_does_not_change_with_the_buffer() -> None:
    rollouts = buffer()
    rollouts.add(group([0, 1]), 0)
    snapshot = rollouts.snapshot()
    rollouts.cut(1)
    assert len(snapshot.groups) == 1
    assert "cut" not in snapshot.counts
