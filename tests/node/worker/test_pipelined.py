"""The engine of a pipeline: stages are in step before anything is computed, and breaks only cost time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from support.waiting import until

from primerl.node.errors import EngineError, EngineLost
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.pipeline.micro_batches import LaneStats
from primerl.node.weights.state import Changed, State
from primerl.node.worker.pipelined_engine import PipelinedEngine
from primerl.node.worker.stage import AHEAD

REQUEST = GenerateRequest((1, 2), 4, 1.0, 7, (0,))


class FakeChain:
    """A ring that a test makes whole and breaks."""

    def __init__(self) -> None:
        self.epoch = 0
        self.asked: list[tuple[int, int]] = []
        self.answer: dict[tuple[int, int], int] = {}
        self.is_whole = asyncio.Event()
        self.is_broken = asyncio.Event()
        self.is_ready = asyncio.Event()
        self.is_ready.set()

    async def wait_whole(self) -> int:
        await self.is_whole.wait()
        self.is_broken.clear()
        self.epoch += 1
        return self.epoch

    async def wait_broken(self, epoch: int) -> None:
        if epoch == self.epoch:
            await self.is_broken.wait()

    async def prepare(self, order: tuple[int, int]) -> int:
        self.asked.append(order)
        await self.is_ready.wait()
        return self.answer.get(order, order[1])

    def fall(self) -> None:
        self.is_whole.clear()
        self.is_broken.set()


class FakeHead:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.fails: list[EngineError] = []
        self.lost: list[EngineError] = []
        self.fault = ""
        self.dead: EngineError | None = None
        self.go = asyncio.Event()
        self.go.set()

    @property
    def policy_version(self) -> int:
        return max((number for what, number in self.told if what != "rejoin"), default=-1)

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None: ...

    async def load(self, version: int, state: State) -> None:
        self.told.append(("load", version))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        self.told.append(("update", version))

    async def rejoin(self, epoch: int) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.told.append(("rejoin", epoch))

    async def generate(self, request: GenerateRequest) -> Completion:
        await self.go.wait()
        if self.lost:
            raise self.lost.pop(0)
        return Completion([3], [-1.0], "length", 0, 0, boundaries=(b"12345678",))

    def lanes(self) -> LaneStats:
        return LaneStats(0, 0, 0.0)

    def stats(self) -> EngineStats:
        if self.dead:
            raise self.dead
        return EngineStats(fault=self.fault)

    async def close(self) -> None: ...


class Bench:
    """An engine over both fakes, with its supervisor."""

    def __init__(self) -> None:
        self.chain, self.head = FakeChain(), FakeHead()
        self.plan = b"first plan"
        self.orders = {version: (0, version) for version in range(9)}
        chain, orders = cast(Any, self.chain), self.orders.get
        self.engine = PipelinedEngine(self.head, chain, orders, lambda: self.plan)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Bench"]:
        task = asyncio.create_task(self.engine.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    def rejoins(self) -> list[int]:
        return [number for what, number in self.head.told if what == "rejoin"]


async def test_a_version_is_loaded_only_when_all_other_stages_have_it_ready() -> None:
    async with Bench().running() as bench:
        bench.chain.is_ready.clear()
        loading = asyncio.create_task(bench.engine.load(0, {}))
        await until(lambda: bench.chain.asked == [(0, 0)])
        assert bench.head.told == []
        bench.chain.is_ready.set()
        await loading
        assert bench.head.told == [("load", 0)]
        assert bench.engine.policy_version == 0


async def test_nothing_is_joined_before_there_is_a_version() -> None:
    async with Bench().running() as bench:
        bench.chain.is_whole.set()
        await asyncio.sleep(0.02)
        assert bench.head.told == []
        await bench.engine.load(3, {})
        await until(lambda: bench.engine.joined)
        assert bench.head.told == [("load", 3), ("rejoin", 1)]


async def test_after_a_break_stages_are_asked_again_and_the_head_joins_a_newer_epoch() -> None:
    async with Bench().running() as bench:
        bench.chain.is_whole.set()
        await bench.engine.load(0, {})
        await until(lambda: bench.engine.joined)
        await bench.engine.update(1, {}, {})
        bench.chain.fall()
        await until(lambda: not bench.engine.joined)
        bench.chain.asked.clear()
        bench.chain.is_whole.set()
        await until(lambda: bench.rejoins() == [1, 2])
        assert bench.chain.asked == [(0, 1)]  # a spare may have come that has nothing


async def test_a_version_that_the_head_was_given_while_the_ring_was_down_is_the_one_to_prepare() -> (
    None
):
    async with Bench().running() as bench:
        await bench.engine.load(0, {})
        bench.chain.is_ready.clear()
        bench.chain.is_whole.set()
        await until(lambda: bench.chain.asked == [(0, 0), (0, 0)])
        updating = asyncio.create_task(bench.engine.update(1, {}, {}))
        await until(lambda: bench.chain.asked[-1] == (0, 1))
        bench.chain.is_ready.set()
        await updating
        await until(lambda: bench.engine.joined)
        # what was asked of version 0 was of no use any more: nobody joins before 1 was asked for
        assert bench.chain.asked[-1] == (0, 1)
        assert bench.rejoins() == [1]


async def test_a_stage_that_is_further_is_waited_for() -> None:
    async with Bench().running() as bench:
        bench.chain.answer[0, 0] = AHEAD
        bench.chain.is_whole.set()
        await bench.engine.load(0, {})
        await until(lambda: len(bench.chain.asked) == 2)
        await asyncio.sleep(0.02)
        assert not bench.engine.joined
        await bench.engine.load(1, {})
        await until(lambda: bench.engine.joined)


async def test_a_chain_that_breaks_while_it_begins_is_begun_again() -> None:
    async with Bench().running() as bench:
        bench.head.fails = [EngineLost("broke again"), EngineError("no answer to the reset")]
        bench.chain.is_whole.set()
        await bench.engine.load(0, {})
        await until(lambda: bench.engine.joined)
        assert bench.rejoins() == [3]


async def test_an_engine_that_is_beyond_help_ends_the_node() -> None:
    bench = Bench()
    bench.head.dead = EngineError("given up")
    bench.head.fails = [EngineError("no")]
    bench.chain.is_whole.set()
    await bench.engine.load(0, {})
    with pytest.raises(EngineError, match="given up"):
        await asyncio.wait_for(bench.engine.run(), 60.0)


async def test_a_request_that_is_lost_with_the_head_is_made_again() -> None:
    bench = Bench()
    bench.head.lost += [EngineLost("died"), EngineLost("died")]
    assert (await bench.engine.generate(REQUEST)).token_ids == [3]


async def test_a_head_that_is_down_gives_its_leases_up() -> None:
    bench = Bench()
    bench.head.lost.append(EngineLost("died"))
    bench.head.fault = "vLLM is being started again"
    with pytest.raises(EngineLost):
        await bench.engine.generate(REQUEST)


async def test_a_completion_says_by_which_plan_it_was_made_unless_that_changed_on_the_way() -> None:
    bench = Bench()
    completion = await bench.engine.generate(REQUEST)
    assert (completion.plan, completion.boundaries) == (b"first plan", (b"12345678",))
    bench.head.go.clear()
    generating = asyncio.create_task(bench.engine.generate(REQUEST))
    await asyncio.sleep(0)
    bench.plan = b"second plan"
    bench.head.go.set()
    completion = await generating
    assert (completion.plan, completion.boundaries) == (b"second plan", ())


async def test_a_version_that_nobody_signed_is_refused() -> None:
    bench = Bench()
    with pytest.raises(EngineError, match="no signed head names version 77"):
        await bench.engine.load(77, {})
