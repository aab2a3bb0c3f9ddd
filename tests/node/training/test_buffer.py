import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training_cases import group

from primerl.node.trainer.lease_book import LeadTime
from primerl.node.training.buffer import (
    BufferSnapshot,
    RolloutBuffer,
    buffer_capacity,
    peer_cap,
    peer_room,
)
from primerl.node.weights.state_history import StateHistory
from primerl.protocol.audits import audited_versions, held_versions

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


@pytest.mark.parametrize("bound", [0, 1, 3, 8, 64])
def test_a_runs_buffer_refuses_no_group_that_may_be_leased(bound: int) -> None:
    leased = int(LeadTime().depth(bound, training=False) * 32)  # the most: nothing returned yet
    rollouts = buffer(bound, buffer_capacity(bound, 32))
    assert [rollouts.add(group([0, 1], oldest=0), 0) for _ in range(leased)] == [None] * leased


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


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_what_may_be_trained_can_be_audited_even_if_a_version_is_published_on_the_way(
    bound: int,
) -> None:
    newest = 9
    held = StateHistory(held_versions(bound))
    for version in range(newest + 1):
        held.add(version, {})
    subject = buffer(bound)
    fresh = {v for v in range(newest + 1) if subject.add(group([0, 1], oldest=v), newest) is None}
    read = fresh | {version - 1 for version in fresh}
    assert len(read) == audited_versions(bound)
    assert read <= held.keys()
    held.add(newest + 1, {})
    assert read == {*held} - {newest + 1}


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
    assert buffer().add(group([1.0]), 0) == "too_few"


def test_a_full_buffer_refuses_instead_of_dropping() -> None:
    rollouts = buffer(capacity=1)
    assert rollouts.add(group([0, 1], task=b"kept"), 0) is None
    assert rollouts.add(group([0, 1], task=b"late"), 0) == "full"
    assert [g.task for g in rollouts.cut(1) or []] == [b"kept"]


def test_a_batch_takes_the_oldest_version_first_and_among_equals_the_first_to_arrive() -> None:
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


# -- no worker has more than its share of a batch -----------------------------------------------------

A, B, C = b"a", b"b", b"c"


@pytest.mark.parametrize(
    ("share", "waiting", "cap"),
    [
        (0.5, {A: 16}, 16),  # alone: all of it
        (0.5, {A: 16, B: 16}, 8),
        (0.5, {A: 16, B: 16, C: 16}, 8),
        (0.3, {A: 16, B: 16}, 8),  # two cannot have less than half each
        (0.3, {A: 16, B: 16, C: 16}, 6),  # three: a third
        (0.1, {A: 16, B: 16, C: 16}, 6),
        (1.0, {A: 16, B: 16, C: 16}, 16),
        (0.5, {A: 16, B: 0}, 16),  # whose last group is gone is not there
        (0.5, {}, 16),
    ],
)
def test_a_share_is_no_less_than_an_even_one(
    share: float, waiting: dict[bytes, int], cap: int
) -> None:
    assert peer_cap(16, share, waiting, {}) == cap


def test_workers_on_lease_are_waited_for() -> None:
    assert peer_cap(16, 0.5, {A: 30}, {B: 8}) == 8
    assert peer_cap(16, 0.5, {A: 12, B: 4}, {A: 4, B: 4}) == 8


def test_a_cap_rises_only_as_far_as_the_work_that_is_there_makes_it() -> None:
    assert peer_cap(16, 0.5, {A: 30}, {B: 4}) == 12  # 12 of A, 4 of B
    assert peer_cap(16, 0.5, {A: 30, B: 1}, {C: 2}) == 13
    assert peer_cap(16, 0.5, {A: 10}, {B: 2}) == 8  # too few: more will be leased


@given(
    wanted=st.integers(1, 20),
    share=st.floats(0.01, 1.0),
    there=st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 40)),
)
def test_whatever_waits_makes_a_batch_if_it_is_enough(
    wanted: int, share: float, there: dict[bytes, int]
) -> None:
    """Nothing is on lease, so nothing more may ever come: the cap must not stand in the way."""
    rollouts = buffer()
    for node, count in there.items():
        for _ in range(count):
            rollouts.add(group([0, 1], node=node), 0)
    cap = peer_cap(wanted, share, rollouts.by_node(), {})
    batch = rollouts.cut(wanted, per_node=cap)
    assert (batch is not None) == (min(sum(there.values()), rollouts.capacity) >= wanted)


class Flood:
    """A trainer's buffer with a book of leases, as far as a batch is concerned."""

    def __init__(self) -> None:
        self.rollouts = buffer()
        self.leased: dict[bytes, int] = {}

    def deliver(self, node: bytes, groups: int) -> None:
        for _ in range(groups):
            self.rollouts.add(group([0, 1], node=node), 0)

    def cut(self) -> list[bytes] | None:
        cap = peer_cap(8, 0.5, self.rollouts.by_node(), self.leased)
        batch = self.rollouts.cut(8, per_node=cap)
        return None if batch is None else [one.node for one in batch]


def test_a_flood_by_one_worker_does_not_fill_a_batch_while_others_deliver() -> None:
    swarm = Flood()
    swarm.deliver(b"flood", 40)
    swarm.leased = {B: 4, C: 4}
    assert swarm.cut() is None
    swarm.deliver(B, 4)
    swarm.leased = {C: 4, B: 4}
    batch = swarm.cut()
    assert batch is not None
    assert batch.count(b"flood") == batch.count(B) == 4


def test_a_batch_is_made_without_a_worker_that_died() -> None:
    swarm = Flood()
    swarm.deliver(A, 12)
    swarm.leased = {B: 8}
    assert swarm.cut() is None
    swarm.leased = {}  # its leases ran out
    assert swarm.cut() == [A] * 8


def test_a_flood_leaves_room_for_the_leases_of_others() -> None:
    assert peer_room(8, 0.5, 8, 2, 5, 4) == 3
    assert peer_room(8, 0.5, 8, 2, 12, 4) < 1
    assert peer_room(8, 0.5, 8, 2, 4, 12) == 4
    assert peer_room(8, 0.75, 8, 2, 5, 4) == 7
    assert peer_room(8, 0.5, 26, 2, 12, 4) == 1  # more batches are generated ahead
    assert peer_room(8, 0.5, 26, 2, 12, 13) == 1  # two workers use all that is allowed
    assert peer_room(8, 0.5, 26, 3, 9, 9) == 0  # and leave a third its part
    assert peer_room(8, 0.5, 8, 2, 12, 0) > 1000  # alone
