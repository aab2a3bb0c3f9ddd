"""Permits to generate: oldest work first, groups together, the youngest taken back, none ever lost."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.waiting import until

from primerl.node.errors import EngineError, EngineLost
from primerl.node.inference.concurrency import SETTLE_S, Concurrency, ConcurrencyLimits
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.weights.state import Changed, State
from primerl.node.worker.rollouts import MAX_LOSSES, AdmissionControl, TurnLimiter

Begun = tuple[int, ...]


@dataclass
class HeldEngine:
    """An Engine whose completions end when the test says so."""

    begun: list[Begun] = field(default_factory=list[Begun])
    running: dict[Begun, "asyncio.Future[None]"] = field(
        default_factory=dict[Begun, "asyncio.Future[None]"]
    )
    told: EngineStats = field(default_factory=EngineStats)
    policy_version: int = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.begun.append(request.prompt)
        self.running[request.prompt] = asyncio.get_running_loop().create_future()
        try:
            await self.running[request.prompt]
        finally:
            del self.running[request.prompt]
        return Completion([request.seed], [0.0], "stop", 0, 0)

    def end(self, *prompts: Begun) -> None:
        for prompt in prompts:
            self.running[prompt].set_result(None)

    def fail(self, prompt: Begun, error: Exception) -> None:
        self.running[prompt].set_exception(error)

    def stats(self) -> EngineStats:
        return self.told

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None: ...
    async def load(self, version: int, state: State) -> None: ...
    async def update(self, version: int, state: State, changed: Changed) -> None: ...
    async def close(self) -> None: ...


class AdmissionBench:
    """An admission over a held engine, and the sequences that were asked for."""

    def __init__(self, cap: int, **config: int) -> None:
        self.now = 0.0
        self.engine = HeldEngine()
        concurrency = Concurrency(
            max_batch=cap,
            max_model_len=8,
            limits=ConcurrencyLimits(initial_inflight=cap, **config),
        )
        self.admission = AdmissionControl(self.engine, concurrency, clock=lambda: self.now)
        self.asked: dict[Begun, asyncio.Task[Completion]] = {}

    async def ask(self, lease: int, place: int = 0, index: int = 0) -> None:
        prompt = (lease, place, index)
        request = GenerateRequest(prompt, 8, 1.0, lease, ())
        asked = self.admission.generate(request, (lease, place))
        self.asked[prompt] = asyncio.create_task(asked)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    async def look(self, **told: float) -> None:
        """The engine holds 100 tokens and is as `told` says; time enough passes that this counts."""
        self.engine.told = EngineStats(kv_tokens=100, **told)  # type: ignore[arg-type]
        self.admission.look()
        self.now += SETTLE_S
        self.admission.look()
        await self.settle()

    async def end(self, *prompts: Begun) -> None:
        self.engine.end(*prompts)
        await self.settle()

    def check_none_is_lost(self) -> None:
        assert self.admission.inflight == len(self.engine.running) == 0


async def test_no_more_begin_than_the_cap_allows() -> None:
    bench = AdmissionBench(cap=2)
    for lease in range(5):
        await bench.ask(lease)
    assert bench.admission.inflight == len(bench.engine.running) == 2
    await bench.end((0, 0, 0))
    assert bench.engine.begun == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    for lease in range(1, 5):
        await bench.end((lease, 0, 0))
    assert [(await task).token_ids for task in bench.asked.values()] == [[0], [1], [2], [3], [4]]
    bench.check_none_is_lost()


async def test_the_oldest_lease_goes_first_and_a_group_stays_together() -> None:
    bench = AdmissionBench(cap=1)
    await bench.ask(0)
    for index in range(2):
        for lease, place in ((7, 1), (3, 1), (3, 0), (7, 0)):
            await bench.ask(lease, place, index)
    for number in range(8):
        await bench.end(bench.engine.begun[number])
    assert [prompt[:2] for prompt in bench.engine.begun[1:]] == [
        *((3, 0), (3, 0), (3, 1), (3, 1)),
        *((7, 0), (7, 0), (7, 1), (7, 1)),
    ]


async def test_the_next_turn_of_an_old_rollout_goes_before_new_leases() -> None:
    bench = AdmissionBench(cap=1)
    for lease in (1, 2, 3):
        await bench.ask(lease)
    await bench.ask(1, index=1)
    await bench.end((1, 0, 0))
    assert bench.engine.begun == [(1, 0, 0), (1, 0, 1)]


async def test_the_youngest_are_taken_back_and_made_again_with_the_same_seed() -> None:
    bench = AdmissionBench(cap=10)
    for lease in range(10):
        await bench.ask(lease)
    await bench.look(running=10, kv_use=0.95)
    assert set(bench.engine.running) == {(lease, 0, 0) for lease in range(7)}
    assert bench.admission.taken_back == 3
    assert bench.admission.cap == 7
    await bench.end((0, 0, 0), (1, 0, 0), (2, 0, 0))
    assert bench.engine.begun[10:] == [(7, 0, 0), (8, 0, 0), (9, 0, 0)]
    await bench.end(*bench.engine.running)
    assert [(await task).token_ids[0] for task in bench.asked.values()] == list(range(10))
    bench.check_none_is_lost()


async def test_those_taken_back_go_before_the_others_of_their_group_that_wait() -> None:
    bench = AdmissionBench(cap=10)
    for index in range(12):
        await bench.ask(0, index=index)
    await bench.look(running=10, kv_use=0.95)
    assert bench.admission.taken_back == 3
    await bench.end(*[(0, 0, index) for index in range(7)])
    assert bench.engine.begun[10:] == [(0, 0, index) for index in range(7, 12)]
    await bench.end(*bench.engine.running)
    bench.check_none_is_lost()


async def test_looking_again_before_stopped_requests_have_ended_stops_none_twice() -> None:
    bench = AdmissionBench(cap=10)
    for lease in range(10):
        await bench.ask(lease)
    await bench.look(running=10, kv_use=0.95)
    bench.admission.look()
    bench.admission.look()
    await bench.settle()
    assert len(bench.engine.running) == 7
    assert bench.admission.taken_back == 3


async def test_one_that_ends_in_the_moment_in_which_it_is_taken_back_is_made_again() -> None:
    bench = AdmissionBench(cap=2, min_inflight=1)
    await bench.ask(0)
    await bench.ask(1)
    await bench.look(running=2, kv_use=0.5)
    bench.engine.told = EngineStats(running=2, kv_use=0.99, kv_tokens=100)
    bench.admission.look()
    bench.engine.end((1, 0, 0))
    await bench.settle()
    await bench.end((0, 0, 0))
    while not bench.asked[1, 0, 0].done():
        await bench.end(*bench.engine.running)
    assert (await bench.asked[1, 0, 0]).token_ids == [1]
    bench.check_none_is_lost()


async def test_a_caller_that_gives_up_waiting_or_is_cancelled_leaves_no_permit_behind() -> None:
    bench = AdmissionBench(cap=1)
    for lease in range(4):
        await bench.ask(lease)
    bench.asked[1, 0, 0].cancel()
    bench.asked[0, 0, 0].cancel()
    await bench.settle()
    assert list(bench.engine.running) == [(2, 0, 0)]
    # The permit has been given to the last one, which has not come to run yet.
    bench.engine.end((2, 0, 0))
    await asyncio.sleep(0)
    bench.asked[3, 0, 0].cancel()
    await bench.settle()
    bench.check_none_is_lost()
    await bench.ask(5)
    assert list(bench.engine.running) == [(5, 0, 0)]
    await bench.end((5, 0, 0))


async def test_what_one_engine_loses_others_make_at_once() -> None:
    bench = AdmissionBench(cap=2)
    await bench.ask(0)
    bench.engine.fail((0, 0, 0), EngineLost("the process died"))
    await bench.settle()
    assert bench.engine.begun == [(0, 0, 0), (0, 0, 0)]
    await bench.end((0, 0, 0))
    assert (await bench.asked[0, 0, 0]).token_ids == [0]


async def test_a_sequence_that_kills_every_engine_is_not_asked_for_for_ever() -> None:
    bench = AdmissionBench(cap=2)
    await bench.ask(0)
    for _ in range(MAX_LOSSES + 1):
        bench.engine.fail((0, 0, 0), EngineLost("the process died"))
        await bench.settle()
    with pytest.raises(EngineLost):
        await bench.asked[0, 0, 0]
    bench.check_none_is_lost()


@pytest.mark.parametrize("error", [EngineError("no"), EngineLost("no"), TimeoutError()], ids=repr)
async def test_where_no_engine_is_left_the_caller_hears_it(error: Exception) -> None:
    bench = AdmissionBench(cap=2)
    await bench.ask(0)
    bench.engine.told = EngineStats(fault="it is being started")
    bench.engine.fail((0, 0, 0), error)
    with pytest.raises(type(error)):
        await bench.asked[0, 0, 0]
    bench.check_none_is_lost()


async def test_those_that_take_the_places_do_not_wait_for_the_work_that_comes_after() -> None:
    """Many sequences end at once, and what their callers do then takes its time."""
    bench = AdmissionBench(cap=8)
    scored: list[tuple[int, int]] = []

    async def score(lease: int) -> None:
        await bench.asked[lease, 0, 0]
        scored.append((lease, len(bench.engine.begun)))

    for lease in range(16):
        await bench.ask(lease)
    scoring = [asyncio.create_task(score(lease)) for lease in range(8)]
    bench.engine.end(*bench.engine.running)
    await asyncio.wait(scoring)
    assert [lease for lease, _ in scored] == list(range(8))
    assert [begun for _, begun in scored[2:]] == [16] * 6
    await bench.end(*bench.engine.running)
    bench.check_none_is_lost()


async def test_a_caller_cancelled_in_the_queue_stops_no_other() -> None:
    turnstile = TurnLimiter()
    tasks = [asyncio.create_task(turnstile.pass_through()) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[4].cancel()
    done, waiting = await asyncio.wait(tasks, timeout=60.0)
    assert [task.cancelled() for task in tasks] == [False, True, False, False, True]
    assert (len(done), waiting) == (5, set())
    await turnstile.pass_through()


async def test_it_looks_by_itself() -> None:
    bench = AdmissionBench(cap=4)
    bench.engine.told = EngineStats(running=4, kv_use=0.99, kv_tokens=100)
    bench.now = 10.0
    following = asyncio.create_task(bench.admission.run())
    await bench.settle()
    bench.now = 20.0
    await until(lambda: bench.admission.cap == 2)
    following.cancel()
