"""Lanes: even split, no waiting for other lanes' tokens, round-robin order."""

from collections import deque
from dataclasses import dataclass

from primerl.node.pipeline.micro_batches import LaneAssignment, is_ready, without


@dataclass
class One:
    """A request with the fields that lanes read."""

    request_id: str
    num_tokens: int = 5
    num_computed_tokens: int = 4


class Scheduler:
    """Admits requests and samples their tokens by the rules of vLLM's scheduler."""

    def __init__(self, lanes: int, requests: int, cap: int = 64) -> None:
        self.wanted = lanes
        self.lanes = LaneAssignment(lambda rows: min(self.wanted, rows))
        self.running: list[One] = []
        self.waiting = deque(One(f"r{index}", 5, 0) for index in range(requests))
        self.cap = cap
        self.flying: deque[tuple[int, list[One]]] = deque()

    def pick(self) -> int | None:
        return self.lanes.pick(self.running, len(self.waiting), self.cap - len(self.running))

    def step(self) -> list[str]:
        """Send one micro-batch; return its requests."""
        lane = self.pick()
        assert lane is not None
        free = self.cap - len(self.running)
        mine, most = self.lanes.take(lane, self.running, len(self.waiting), free)
        others = without(self.running, mine)
        room = min(most, free + len(mine))
        while self.waiting and len(mine) < room:
            mine.append(self.waiting.popleft())
        sent = [one for one in mine if is_ready(one)]
        for one in sent:
            one.num_computed_tokens = one.num_tokens
        self.running = others + mine
        self.lanes.set_members(lane, mine)
        self.lanes.record_send(lane)
        self.flying.append((lane, sent))
        return sorted(one.request_id for one in sent)

    def come(self) -> None:
        """Return the oldest micro-batch."""
        lane, sent = self.flying.popleft()
        for one in sent:
            one.num_tokens += 1
        self.lanes.record_return(lane)


def test_sequences_are_split_evenly_and_every_lane_has_its_turn() -> None:
    world = Scheduler(4, 10)
    sizes = [len(world.step()) for _ in range(4)]
    assert sorted(sizes) == [1, 3, 3, 3]
    assert world.pick() is None  # all are under way
    world.come()
    first = world.step()
    assert world.pick() is None
    assert len(first) == 3
    for _ in range(4):
        world.come()
    turns = [tuple(world.step()) for _ in range(4)]
    assert len(set(turns)) == 4


def test_a_lane_waits_for_its_own_tokens_only() -> None:
    world = Scheduler(2, 4)
    one, other = world.step(), world.step()
    world.come()
    assert world.step() == one
    world.come()
    assert world.step() == other


def test_more_lanes_are_made_of_what_runs() -> None:
    world = Scheduler(1, 8)
    assert len(world.step()) == 8
    world.wanted = 4
    assert world.pick() is None
    world.come()
    assert [len(world.step()) for _ in range(4)] == [2, 2, 2, 2]


def test_fewer_lanes_are_joined_once_they_are_back() -> None:
    world = Scheduler(4, 8)
    for _ in range(4):
        world.step()
    world.wanted = 2
    for _ in range(4):
        world.come()
    assert [len(world.step()) for _ in range(2)] == [4, 4]
    assert world.pick() is None


def test_a_lane_that_is_gone_by_its_turn_is_the_one_its_sequences_went_to() -> None:
    world = Scheduler(4, 8)
    for _ in range(3):
        world.step()
    lane = world.pick()
    assert lane == 3
    world.wanted = 2  # what came back meanwhile says so
    mine, most = world.lanes.take(lane, world.running, len(world.waiting), 2)
    assert most == 4
    assert {one.request_id for one in mine} == {"r2", "r3"}


def test_a_lane_waits_for_its_half_that_is_under_way() -> None:
    world = Scheduler(2, 4)
    world.step()
    world.step()
    world.wanted = 1
    world.come()
    assert world.pick() is None
    world.come()
    assert len(world.step()) == 4


def test_no_more_run_than_may() -> None:
    world = Scheduler(2, 9, cap=5)
    assert len(world.step()) + len(world.step()) == 5
    assert world.pick() is None
    world.come()
    assert len(world.step()) <= 3
    assert len(world.running) == 5


def test_parts_of_a_prompt_do_not_wait_for_each_other() -> None:
    lanes = LaneAssignment(lambda _: 2)
    prompt = One("long", 100, 0)
    assert lanes.pick([], 1, 8) == 0
    lanes.take(0, [], 1, 8)
    lanes.set_members(0, [prompt])
    prompt.num_computed_tokens = 32
    assert lanes.pick([prompt], 0, 7) == 0
    lanes.take(0, [prompt], 0, 7)
    prompt.num_computed_tokens = 100
    lanes.record_send(0)
    assert lanes.pick([prompt], 0, 7) is None


def test_finished_sequences_are_forgotten() -> None:
    lanes = LaneAssignment(lambda _: 2)
    lanes.set_members(0, [One("a"), One("b")])
    assert len(lanes) == 2
    lanes.prune({"b"}.__contains__)
    assert len(lanes) == 1


def test_a_single_sequence_is_one_lane() -> None:
    world = Scheduler(8, 1)
    assert world.step() == ["r0"]
    assert world.pick() is None
    world.come()
    assert world.step() == ["r0"]


def test_what_has_left_is_in_no_lane() -> None:
    world = Scheduler(2, 6)
    assert [world.step(), world.step()] == [["r0", "r1", "r2"], ["r3", "r4", "r5"]]
    for name in ("r1", "r3", "r4", "r5"):
        world.running = [one for one in world.running if one.request_id != name]
    world.come()
    world.come()
    assert world.step() == ["r0"]  # one of the two goes to the lane that has none
    assert world.step() == ["r2"]


def test_what_comes_takes_the_place_of_what_left_its_lane() -> None:
    world = Scheduler(2, 4)
    assert [world.step(), world.step()] == [["r0", "r1"], ["r2", "r3"]]
    world.running = [one for one in world.running if one.request_id != "r2"]
    world.waiting.append(One("new", 5, 0))
    world.come()
    world.come()
    assert world.step() == ["r0", "r1"]
    assert world.step() == ["new", "r3"]


def test_a_number_of_lanes_that_was_set_back_before_use_moves_no_request() -> None:
    world = Scheduler(4, 8)
    before = [world.step() for _ in range(4)]
    world.wanted = 2
    assert world.pick() is None
    world.wanted = 4
    for _ in range(4):
        world.come()
    assert [world.step() for _ in range(4)] == before


def test_sequences_of_lanes_that_were_joined_stay_together_until_they_are_too_many() -> None:
    world = Scheduler(4, 4)
    for _ in range(4):
        world.step()
    for _ in range(4):
        world.come()
    world.wanted = 2
    assert [world.step(), world.step()] == [["r0", "r2"], ["r1", "r3"]]
    world.wanted = 3
    world.come()
    world.come()
    assert [len(world.step()), len(world.step())] == [2, 2]
    assert world.pick() is None


def test_what_is_moved_to_another_lane_keeps_its_place_in_what_runs() -> None:
    world = Scheduler(1, 4)
    world.step()
    world.come()
    world.wanted = 2
    assert world.step() == ["r0", "r1"]
    assert [one.request_id for one in world.running] == ["r2", "r3", "r0", "r1"]
    world.step()
    assert [one.request_id for one in world.running] == ["r0", "r1", "r2", "r3"]


def test_the_rest_keeps_its_order_wherever_a_lane_stands_in_what_runs() -> None:
    running = [One(name) for name in "abcd"]
    for mine, others in (("ab", "cd"), ("bc", "ad"), ("d", "abc"), ("", "abcd"), ("abcd", "")):
        found = without(running, [one for one in running if one.request_id in mine])
        assert "".join(one.request_id for one in found) == others
