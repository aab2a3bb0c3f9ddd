"""The books of stage 0 against a stage that only remembers tokens.

Whatever is done to lanes, a row that draws has read exactly its own tokens, by one version of the weights, and
no more cache is used than the plan has.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from engine_cases import request
from pipeline_cases import shape_of

from primerl.node.engines.engine import GenerateRequest
from primerl.node.engines.pipelined.hf_rows import Pending, Step
from primerl.node.engines.pipelined.hf_schedule import Schedule
from primerl.node.engines.pipelined.lane_step import NOTHING, LaneStep, pack_step, read_step
from primerl.protocol.pipelines import PipelineShape


@dataclass
class Row:
    tokens: list[int]
    seed: int | None = None
    versions: set[int] = field(default_factory=set[int])
    """Of the weights that read them."""

    def copy(self) -> "Row":
        return Row(list(self.tokens), self.seed, set(self.versions))


@dataclass
class RememberingStage:
    """Does to lists of tokens what a stage does to its cache."""

    shape: PipelineShape
    lanes: dict[int, list[Row]] = field(default_factory=dict[int, list[Row]])
    slots: dict[int, int] = field(default_factory=dict[int, int])
    most: int = 0
    version: int = 0

    def do(self, step: LaneStep, tokens: list[int]) -> list[Row]:
        rows = self.lanes.get(step.lane, [])
        if step.keep is not None:
            rows = [rows[at].copy() for at in step.keep]
        self._seeds(rows, step.draws.seeds if step.draws else None)
        for taken in step.taken:
            source = [Row([])] if taken.lane == NOTHING else self.lanes[taken.lane]
            more = [source[at].copy() for at in taken.rows]
            self._seeds(more, taken.draws.seeds if taken.draws else None)
            rows = [*rows, *more]
        for over in step.over:
            self.lanes.pop(over, None)
            self.slots.pop(over, None)
        self.lanes[step.lane], self.slots[step.lane] = rows, step.slots
        used = sum(len(rows) * self.slots[lane] for lane, rows in self.lanes.items())
        self.most = max(self.most, used)
        assert used <= self.shape.kv_tokens
        assert 0 < len(tokens) <= self.shape.max_step_tokens
        at = 0
        for row, count in step.fill or [(row, 1) for row in range(len(rows))]:
            rows[row].tokens += tokens[at : at + count]
            at += count
            rows[row].versions.add(self.version)
            assert len(rows[row].tokens) <= step.slots or not step.fill
        assert at == len(tokens)
        return rows

    def _seeds(self, rows: list[Row], seeds: tuple[int, ...] | None) -> None:
        if seeds is not None:
            for row, seed in zip(rows, seeds, strict=True):
                row.seed = seed


def pending(asked: GenerateRequest) -> Pending:
    return Pending(asked, len(asked.prompt) + asked.max_tokens, lambda: False)


def check(step: Step, rows: list[Row]) -> None:
    """A row that draws has read its own tokens, and draws by its own seed."""
    assert len(rows) == len(step.rows)
    for row, owner in zip(rows, step.rows, strict=True):
        if owner.open:
            assert row.tokens == [*owner.known, owner.last]
            assert row.seed == owner.request.seed
            assert len(row.versions) == 1


@dataclass
class World:
    """A schedule, what it is told, and micro-batches that come back in order, some time later."""

    schedule: Schedule
    stage: RememberingStage
    rng: random.Random
    lanes_for: Callable[[int], int]
    flight: list[Step] = field(default_factory=list[Step])
    sizes: list[int] = field(default_factory=list[int])

    def send(self) -> bool:
        self.schedule.admit(self.lanes_for)
        step = self.schedule.next(self.lanes_for)
        if step is None:
            return False
        body = read_step(pack_step(step.step))
        rows = self.stage.do(body, step.tokens)
        if not step.step.fill:
            check(step, rows)
            self.sizes.append(len(rows))
        self.flight.append(step)
        return True

    def receive(self) -> None:
        step = self.flight.pop(0)
        for one in step.rows:
            if one.open:
                one.add(self.rng.randrange(100), -1.0, 0, b"", ())
        if step.lane is not None:
            self.schedule.drawn(step.lane)

    def run(self, all_of: list[Pending], breaks: float = 0.0, switches: float = 0.0) -> None:
        for _ in range(20_000):
            if self.rng.random() < switches:
                self.stage.version += 1
                self.schedule.renew()
            if self.rng.random() < breaks:
                self.flight.clear()
                self.stage.lanes.clear()
                self.stage.slots.clear()
                self.schedule.replay()
            more = len(self.flight) < 6 and self.rng.random() < 0.6
            sent = more and self.send()
            if not sent and self.flight:
                self.receive()
            if not any(one.open for one in all_of):
                return
        raise AssertionError("some request never ended")


def world(seed: int, *, kv_tokens: int = 4000, most_rows: int = 32, step_tokens: int = 24) -> World:
    rng = random.Random(seed)
    shape = shape_of(kv_tokens=kv_tokens, max_step_tokens=step_tokens)
    wanted = [1]

    def lanes_for(rows: int) -> int:
        if rng.random() < 0.05:
            wanted[0] = rng.randint(1, 6)
        return max(1, min(wanted[0], rows))

    return World(Schedule(shape, most_rows), RememberingStage(shape), rng, lanes_for)


def asked(rng: random.Random, seed: int) -> Pending:
    prompt = rng.choice(["a", "ab", "the same prompt", "x" * rng.randint(1, 60)])
    return pending(request(prompt, seed=seed, max_tokens=rng.randint(1, 30), stop=(7,)))


@pytest.mark.parametrize("seed", range(8))
def test_a_row_that_draws_has_read_its_own_tokens_whatever_is_done_to_lanes(seed: int) -> None:
    one = world(seed)
    waiting = [asked(one.rng, number) for number in range(80)]
    for request_ in waiting:
        one.schedule.add(request_)
    one.run(waiting, breaks=0.01 * (seed & 1), switches=0.01 * (seed & 2))
    assert one.schedule.running == 0


def test_little_cache_makes_requests_wait_and_loses_none() -> None:
    one = world(1, kv_tokens=100)
    waiting = [asked(one.rng, number) for number in range(40)]
    for request_ in waiting:
        one.schedule.add(request_)
    one.run(waiting)
    assert 60 < one.stage.most <= 100


def test_whoever_is_given_up_is_forgotten() -> None:
    one = world(3)
    gone = [asked(one.rng, number) for number in range(20)]
    for request_ in gone:
        request_.given_up = lambda: True
        one.schedule.add(request_)
    last = asked(one.rng, 99)
    one.schedule.add(last)
    one.run([last])
    assert max(one.sizes) == 1


def steady(rows: int, lanes: int, steps: int) -> World:
    """So many requests at once, in so many lanes, for some steps."""
    one = world(0, kv_tokens=256 * 256, most_rows=256, step_tokens=256)
    one.lanes_for = lambda _: lanes
    for number in range(rows):
        one.schedule.add(pending(request("abc", seed=number, max_tokens=200, stop=())))
    for _ in range(steps):
        if not one.send():
            one.receive()
    return one


def test_requests_are_spread_over_as_many_lanes_as_are_wanted() -> None:
    one = steady(24, 4, 40)
    assert one.schedule.lanes == 4
    assert set(one.sizes) == {6}


def test_lanes_are_cut_when_more_are_wanted_and_joined_when_fewer_are() -> None:
    one = steady(24, 2, 40)
    assert set(one.sizes) == {12}
    one.lanes_for = lambda _: 4
    for _ in range(40):
        if not one.send():
            one.receive()
    assert one.schedule.lanes == 4
    assert set(one.sizes[-4:]) == {6}
    one.lanes_for = lambda _: 1
    for _ in range(40):
        if not one.send():
            one.receive()
    assert one.schedule.lanes == 1
    assert one.sizes[-1] == 24


def test_equal_prompts_are_read_once() -> None:
    one = world(0)
    one.lanes_for = lambda _: 1
    for number in range(8):
        one.schedule.add(pending(request("abcd", seed=number)))
    assert one.send()
    assert one.flight[0].step.fill == ((0, 3),)
    assert one.send()
    assert len(one.flight[1].rows) == 8


def test_what_was_under_way_is_read_again_before_what_waits() -> None:
    one = world(0, most_rows=2)
    one.lanes_for = lambda _: 1
    first = [pending(request("abcd", seed=number, stop=())) for number in range(4)]
    for request_ in first:
        one.schedule.add(request_)
    for _ in range(4):
        if not one.send():
            one.receive()
    assert one.schedule.replay() == 2
    assert list(one.schedule.waiting) == first
