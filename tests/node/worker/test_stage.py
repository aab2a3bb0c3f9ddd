"""A later stage: it gets ready what stage 0 names, if the trainer signed it, and never goes back."""

import asyncio
from typing import Any

import pytest

from primerl.node.errors import EngineError
from primerl.node.worker.stage import StageRole
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import PrepareVersion

Order = tuple[int, int]


class FakeBook:
    """Heads up to a newest one."""

    def __init__(self) -> None:
        self.newest: Order = (1, 5)
        self.ended = ""

    def order(self) -> Order:
        return self.newest

    async def wait(self, ready: Any, timeout: float) -> bool:
        return ready()

    async def wait_news(self, known: Order, timeout: float) -> bool:
        await asyncio.sleep(0.01)
        return False

    async def end_without_trainer(self, version: int, last: int) -> None:
        self.ended = "gone" if version == last else ""


class FakeWeightSync:
    """Reaches what a test lets it reach."""

    def __init__(self) -> None:
        self.order: Order = (1, 3)
        self.reachable: Order = (1, 5)
        self.asked: list[Order] = []

    async def reach(self, order: Order, timeout: float) -> bool:
        self.asked.append(order)
        if self.order < order <= self.reachable:
            self.order = order
        return self.order == order

    async def run(self) -> None:
        await asyncio.Event().wait()


class FakeEngine:
    """Computes by a version."""

    def __init__(self) -> None:
        self.policy_version = 3
        self.fault: EngineError | None = None

    def stats(self) -> None:
        if self.fault:
            raise self.fault


class Bench:
    """A role over fakes."""

    def __init__(self) -> None:
        self.book, self.weight_sync, self.engine = FakeBook(), FakeWeightSync(), FakeEngine()
        fakes: dict[str, Any] = {
            "book": self.book,
            "weight_sync": self.weight_sync,
            "engine": self.engine,
            "run": type("Run", (), {"max_steps": 9}),
        }
        self.role = StageRole(**fakes, answer_s=0.0)

    async def asks(self, epoch: int, version: int) -> Reason | None:
        """Why stage 0 is refused; None if it is not."""
        try:
            await self.role.prepare(PrepareVersion(b"g" * 32, 1, epoch, version))
        except RemoteProtocolError as error:
            return error.reason
        return None


async def test_what_is_asked_for_is_got_ready() -> None:
    bench = Bench()
    assert await bench.asks(1, 4) is None
    assert await bench.asks(1, 4) is None
    assert bench.weight_sync.order == (1, 4)


async def test_what_is_still_on_its_way_is_to_be_asked_for_again() -> None:
    bench = Bench()
    bench.weight_sync.reachable = (1, 3)
    assert await bench.asks(1, 4) is Reason.NOT_YET


async def test_a_version_that_the_trainer_never_signed_is_not_even_looked_for() -> None:
    """It would be waited for for ever, also for the next stage 0."""
    bench = Bench()
    for epoch, version in ((1, 6), (1, 2**50), (2, 0)):
        assert await bench.asks(epoch, version) is Reason.NOT_YET
    assert bench.weight_sync.asked == []


async def test_what_it_computes_by_is_ready_though_more_was_prepared() -> None:
    bench = Bench()
    bench.weight_sync.order = (1, 4)
    assert await bench.asks(1, 3) is None


async def test_it_does_not_go_back() -> None:
    bench = Bench()
    bench.weight_sync.order, bench.engine.policy_version = (1, 5), 5
    assert await bench.asks(1, 4) is Reason.ROLLBACK
    bench.weight_sync.order = (1, 0)  # a later epoch began, with a lower version
    assert await bench.asks(0, 5) is Reason.ROLLBACK


async def test_the_last_version_ends_it() -> None:
    bench = Bench()
    bench.engine.policy_version = 9
    await asyncio.wait_for(bench.role.run(), 60.0)
    assert bench.book.ended


async def test_an_engine_that_is_given_up_ends_the_node() -> None:
    bench = Bench()
    bench.engine.fault = EngineError("started again too often")
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(bench.role.run(), 60.0)
    assert caught.group_contains(EngineError, match="too often")
