"""Every rule by which the number of sequences in flight follows the engine; all together in a model of one."""

import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from primerl.node.config.engine import ConcurrencyConfig
from primerl.node.inference.concurrency import (
    BURST_S,
    CALM_S,
    NOTHING,
    OVERLOAD_POLLS,
    SETTLE_S,
    Concurrency,
)
from primerl.node.inference.engine import EngineStats

QUIET = EngineStats(running=100, kv_use=0.5, kv_tokens=100 * 1024)


class CapClock:
    """A cap that was begun with, and a clock: one look a second."""

    def __init__(self, *, max_batch: int = 1000, **config: int) -> None:
        self.concurrency = Concurrency(
            ConcurrencyConfig.model_validate({"max_inflight": 1000, **config}),
            max_batch=max_batch,
            max_model_len=1024,
        )
        self.now = 1000.0
        self.version = 0
        self.look(QUIET)
        self.pass_by(SETTLE_S)

    @property
    def cap(self) -> int:
        return self.concurrency.cap

    def look(self, stats: EngineStats, inflight: int | None = None) -> tuple[int, int]:
        """(cap, sequences to take back) after a look at `stats`, a second later."""
        decision = self.concurrency.observe(
            stats,
            inflight=self.cap if inflight is None else inflight,
            version=self.version,
            now=self.now,
        )
        self.now += 1.0
        return self.cap, decision.take_back

    def pass_by(self, seconds: float) -> None:
        """Time in which all is quiet, and nothing to do."""
        until = self.now + seconds
        while self.now < until:
            self.look(QUIET, inflight=0)

    def finish(self, count: int) -> None:
        for _ in range(count):
            self.concurrency.finished()


def test_it_begins_with_what_the_cache_holds_at_full_length() -> None:
    assert CapClock().cap == 100
    assert CapClock(max_batch=60).cap == 66  # the engine always has some waiting
    assert CapClock(initial_inflight=7).cap == 7
    assert CapClock(max_inflight=50).cap == 50
    assert CapClock(min_inflight=200).cap == 200


def test_it_grows_no_further_than_half_as_many_again_as_the_engine_computes() -> None:
    world = CapClock(max_batch=60)
    for _ in range(9):
        world.finish(1000)
        world.look(QUIET)
    assert world.cap == 90
    assert CapClock(max_batch=60, initial_inflight=200).cap == 200


def test_it_grows_by_a_quarter_when_all_have_come_and_gone() -> None:
    world = CapClock()
    world.finish(99)
    assert world.look(QUIET) == (100, 0)
    world.finish(1)
    assert world.look(QUIET) == (125, 0)
    world.finish(100)
    assert world.look(QUIET) == (125, 0)
    world.finish(25)
    assert world.look(QUIET) == (156, 0)


@pytest.mark.parametrize(
    ("stats", "inflight"),
    [
        (replace(QUIET, kv_use=0.6), 100),
        (QUIET, 89),
        (replace(QUIET, waiting=11), 100),
    ],
    ids=["the cache is rather full", "there is not enough work", "the engine has a queue"],
)
def test_it_does_not_grow_when(stats: EngineStats, inflight: int) -> None:
    world = CapClock()
    world.finish(1000)
    assert world.look(stats, inflight) == (100, 0)
    assert world.look(QUIET, 90) == (125, 0)


def test_it_stays_within_its_bounds() -> None:
    world = CapClock(max_inflight=110, min_inflight=95)
    world.finish(1000)
    assert world.look(QUIET) == (110, 0)
    assert world.look(replace(QUIET, kv_use=0.99)) == (95, 15)


def test_a_cap_of_one_grows_too() -> None:
    world = CapClock(initial_inflight=1)
    world.finish(1)
    assert world.look(QUIET) == (2, 0)


def test_a_rather_full_cache_lowers_the_cap_and_takes_nothing_back() -> None:
    world = CapClock()
    assert world.look(replace(QUIET, kv_use=0.85)) == (82, 0)


def test_a_full_cache_takes_the_youngest_back() -> None:
    world = CapClock()
    assert world.look(replace(QUIET, kv_use=0.95)) == (73, 27)


def test_while_the_last_cut_goes_through_it_cuts_no_deeper() -> None:
    """Sequences end one by one; the share of the cache falls with them."""
    world = CapClock()
    caps = [
        world.look(replace(QUIET, running=running, kv_use=running * 0.0088), running)[0]
        for running in range(100, 78, -2)
    ]
    assert set(caps) == {79}


def test_what_waits_in_the_engine_fills_no_cache() -> None:
    world = CapClock(initial_inflight=200)
    assert world.look(replace(QUIET, waiting=100, kv_use=0.95)) == (73, 200 - 73)


def test_after_a_cut_nothing_grows_for_a_while() -> None:
    world = CapClock()
    world.look(replace(QUIET, kv_use=0.85))
    for _ in range(int(CALM_S) - 1):
        world.finish(1000)
        assert world.look(QUIET) == (82, 0)
    world.finish(1000)
    assert world.look(QUIET)[0] == 102


def test_a_queue_that_stays_long_lowers_the_cap() -> None:
    world = CapClock()
    queue = replace(QUIET, waiting=51)
    for _ in range(OVERLOAD_POLLS - 1):
        assert world.look(queue) == (100, 0)
    world.look(QUIET)
    for _ in range(OVERLOAD_POLLS - 1):
        assert world.look(queue) == (100, 0)
    assert world.look(queue) == (90, 0)
    for _ in range(OVERLOAD_POLLS - 1):
        assert world.look(queue) == (90, 0)
    assert world.look(queue) == (81, 0)


def test_a_preemption_costs_a_fifth_and_the_next_one_half() -> None:
    world = CapClock()
    assert world.look(replace(QUIET, preemptions=3)) == (100, 0)
    assert world.look(replace(QUIET, preemptions=3)) == (80, 0)
    assert world.look(replace(QUIET, preemptions=3)) == (80, 0)
    world.look(replace(QUIET, preemptions=4))
    assert world.look(replace(QUIET, preemptions=4)) == (40, 0)
    world.pass_by(CALM_S)
    world.look(replace(QUIET, preemptions=5))
    assert world.look(replace(QUIET, preemptions=5)) == (32, 0)


def test_preemptions_before_a_cut_is_through_do_not_count_again() -> None:
    world = CapClock()
    world.look(replace(QUIET, preemptions=1))
    assert world.look(replace(QUIET, preemptions=2)) == (80, 0)
    for number in range(3, 9):
        assert world.look(replace(QUIET, preemptions=number), inflight=81) == (80, 0)


def test_sequences_that_a_new_version_threw_out_are_no_overload() -> None:
    """The engine counts them before it tells of the version, or after."""
    world = CapClock()
    assert world.look(replace(QUIET, preemptions=100)) == (100, 0)
    world.version = 1
    for preemptions in (100, 180, 180, 180, 180):
        assert world.look(replace(QUIET, preemptions=preemptions)) == (100, 0)
    world.look(replace(QUIET, preemptions=181))
    assert world.look(replace(QUIET, preemptions=181)) == (80, 0)


@pytest.mark.parametrize(
    "stats",
    [
        replace(QUIET, running=0, waiting=100, kv_use=0.99),
        replace(QUIET, fault="it is being started", kv_use=0.99),
        replace(QUIET, kv_tokens=0, waiting=1000),
    ],
    ids=["paused", "down", "without a bound"],
)
def test_an_engine_that_tells_nothing_changes_nothing(stats: EngineStats) -> None:
    world = CapClock()
    for _ in range(3 * OVERLOAD_POLLS):
        world.finish(1000)
        assert world.look(stats) == (100, 0)


def test_an_engine_without_a_bound_keeps_what_it_batches() -> None:
    concurrency = Concurrency(ConcurrencyConfig(), max_batch=16, max_model_len=64)
    for second in range(100):
        concurrency.finished()
        stats = EngineStats(running=16, waiting=second)
        assert concurrency.observe(stats, inflight=16, version=0, now=second) == NOTHING
    assert concurrency.cap == 16


def test_equal_bounds_fix_the_number() -> None:
    world = CapClock(min_inflight=300, max_inflight=300)
    for stats in (QUIET, replace(QUIET, kv_use=0.99), replace(QUIET, preemptions=9)):
        world.finish(1000)
        assert world.look(stats) == (300, 0)
    assert world.concurrency.room(0, world.now) == 300


def test_what_surely_fits_begins_at_once_and_the_rest_in_bursts() -> None:
    world = CapClock(initial_inflight=500)
    room, now = world.concurrency.room, world.now + BURST_S
    assert room(0, now) == 100
    assert room(100, now + 1) == 0
    assert room(100, now + BURST_S) == 100
    assert room(200, now + BURST_S + 1) == 0
    assert room(180, now + BURST_S + 2) == 20  # what ended is replaced
    assert room(480, now + 9 * BURST_S) == 20


def test_a_burst_holds_a_group() -> None:
    world = CapClock(initial_inflight=500)
    world.concurrency.groups_of(160)
    assert world.concurrency.room(100, world.now + BURST_S) == 160


# -- all rules together --------------------------------------------------------------------------


@dataclass
class Sequence:
    length: int
    drawn: int = 0


@dataclass
class Cache:
    """An engine that draws a token for each of its sequences in a step, until its cache is full."""

    tokens: int
    slots: int
    prompt: int
    chance: random.Random
    mean: float
    """Of a reply's tokens; none is longer than 1024 with its prompt."""
    running: list[Sequence] = field(default_factory=list[Sequence])
    waiting: list[Sequence] = field(default_factory=list[Sequence])
    used: int = 0
    preemptions: int = 0
    ended: list[Sequence] = field(default_factory=list[Sequence])

    def ask(self) -> None:
        length = min(1024 - self.prompt, max(1, int(self.chance.expovariate(1 / self.mean))))
        self.waiting.append(Sequence(length))

    def step(self) -> int:
        """Returns how many ended."""
        while self.waiting and len(self.running) < self.slots:
            if self.used + self.prompt + len(self.running) > self.tokens:
                break
            self.running.append(self.waiting.pop(0))
            self.used += self.prompt
        while self.used + len(self.running) > self.tokens:
            self.waiting.insert(0, self.throw_out())
            self.preemptions += 1
        for one in self.running:
            one.drawn += 1
        self.used += len(self.running)
        done = [one for one in self.running if one.drawn >= one.length]
        self.running = [one for one in self.running if one.drawn < one.length]
        self.used -= sum(self.prompt + one.drawn for one in done)
        self.ended += done
        return len(done)

    def throw_out(self) -> Sequence:
        thrown = self.running.pop()
        self.used -= self.prompt + thrown.drawn
        thrown.drawn = 0
        return thrown

    def stop_youngest(self, count: int) -> None:
        for _ in range(count):
            if self.waiting:
                self.waiting.pop()
            else:
                self.throw_out()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_use=self.used / self.tokens,
            kv_tokens=self.tokens,
            preemptions=self.preemptions,
        )


def capped(cache: Cache) -> Concurrency:
    return Concurrency(ConcurrencyConfig(), max_batch=cache.slots, max_model_len=1024)


def simulate(
    cache: Cache, seconds: range, concurrency: Concurrency
) -> tuple[list[int], list[float], int]:
    """(cap, share of the cache by second, sequences taken back) of an engine of 25 tokens a second that is kept
    as full as the cap allows."""
    caps, uses, stopped = list[int](), list[float](), 0
    for second in seconds:
        inflight = len(cache.running) + len(cache.waiting)
        decision = concurrency.observe(cache.stats(), inflight=inflight, version=0, now=second)
        cache.stop_youngest(decision.take_back)
        stopped += decision.take_back
        caps.append(concurrency.cap)
        uses.append(cache.stats().kv_use)
        for _ in range(25):
            inflight = len(cache.running) + len(cache.waiting)
            for _ in range(concurrency.room(inflight, second)):
                cache.ask()
            for _ in range(cache.step()):
                concurrency.finished()
    return caps, uses, stopped


def test_it_fills_the_cache_and_stays_there_and_gives_way_when_replies_get_longer() -> None:
    cache = Cache(65536, 2048, 16, random.Random(6), mean=50.0)
    concurrency = capped(cache)
    caps, uses, stopped = simulate(cache, range(200), concurrency)
    assert caps[0] == 64  # 65536 / 1024
    assert min(caps[50:]) > 8 * 64
    assert max(caps[50:]) / min(caps[50:]) < 1.3
    assert 0.65 < min(uses[50:]) <= max(uses[50:]) < 0.85
    assert cache.preemptions == stopped == 0
    cache.mean, short = 400.0, len(cache.ended)
    caps, uses, stopped = simulate(cache, range(200, 500), concurrency)
    assert max(caps[150:]) < 250
    assert 0.5 < sum(uses[150:]) / 150 < 0.8
    assert stopped + cache.preemptions < 0.5 * (len(cache.ended) - short)


def test_a_small_cache_of_long_replies_is_not_thrashed() -> None:
    cache = Cache(8192, 512, 16, random.Random(6), mean=400.0)
    caps, _, stopped = simulate(cache, range(400), capped(cache))
    assert 8 <= sum(caps) / 400 <= 20
    assert cache.preemptions == 0
    assert stopped < 0.1 * len(cache.ended)


def test_where_the_slots_are_the_limit_the_queue_stays_short() -> None:
    cache = Cache(1024 * 1024, 64, 16, random.Random(7), mean=50.0)
    caps, _, stopped = simulate(cache, range(120), capped(cache))
    assert 64 <= min(caps[20:])
    assert max(caps) <= 100
    assert len(cache.running) + len(cache.waiting) >= 64
    assert stopped == 0


def test_every_sequence_ends_in_the_end_however_small_the_cache() -> None:
    cache = Cache(1024, 64, 16, random.Random(8), mean=300.0)
    caps, _, _ = simulate(cache, range(200), capped(cache))
    assert min(caps) >= 1
    assert len(cache.ended) > 5
