"""Asking vLLM's worker for what it drew: in batches, and losing nothing on the way."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from primerl.node.errors import EngineError
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.vllm import MOST_FORGOTTEN, CompletionCollector
from primerl.protocol.manifests import RouteShape


@dataclass
class Worker:
    """Keeps what was drawn until it is told to forget it, as Recorder does; `late` answers come later."""

    drawn: dict[int, list[list[float]]]
    late: dict[int, int] = field(default_factory=dict[int, int])
    questions: list[tuple[list[list[int]], list[int]]] = field(default_factory=list)  # type: ignore[type-arg]
    hold: asyncio.Event | None = None

    async def ask(self, wanted: list[list[int]], forget: list[int]) -> list[list[Any]]:
        self.questions.append((wanted, forget))
        for key in forget:
            self.drawn.pop(key, None)
        if self.hold is not None:
            await self.hold.wait()
        answers: list[list[Any]] = []
        for key, count in wanted:
            self.late[key] = self.late.get(key, 0) - 1
            if self.late[key] < 0:
                rows = np.array(self.drawn[key][:count], np.float32)
                answers.append([key, rows.tobytes(), [[0, 3], [1, 4]], False, b""])
        return answers


def rows(key: int) -> list[list[float]]:
    return [[-float(key), *([0.5 * key] * 7)], [-0.25, *([1.0] * 7)]]


def worker(count: int = 8) -> Worker:
    return Worker({key: rows(key) for key in range(count)})


async def test_what_many_want_is_asked_for_at_once() -> None:
    asked = worker()
    collector = CompletionCollector(asked.ask, "projection")
    found = await asyncio.gather(*(collector.collect(key, 2) for key in range(8)))
    assert [one.logprobs for one in found] == [[-float(key), -0.25] for key in range(8)]
    assert {one.spans for one in found} == {((0, 3), (1, 4))}
    for one in found:
        Projection().check(one.proof, 2)
    assert len(asked.questions) == 1
    assert sorted(asked.questions[0][0]) == [[key, 2] for key in range(8)]


async def test_the_more_is_under_way_the_longer_a_question_waits_for_company() -> None:
    asked = worker()
    collector = CompletionCollector(asked.ask, "", lambda: 1000)
    first = asyncio.create_task(collector.collect(0, 2))
    await asyncio.sleep(0.005)
    second = asyncio.create_task(collector.collect(1, 2))
    await asyncio.gather(first, second)
    assert [sorted(wanted) for wanted, _ in asked.questions] == [[[0, 2], [1, 2]]]


async def test_what_was_collected_is_forgotten_with_the_next_question() -> None:
    asked = worker()
    collector = CompletionCollector(asked.ask, "")
    for key in range(3):
        assert (await collector.collect(key, 1)).proof == b""
    assert [forgotten for _, forgotten in asked.questions] == [[], [0], [1]]


async def test_what_has_not_come_is_asked_for_again() -> None:
    asked = worker()
    asked.late = {1: 2}
    collector = CompletionCollector(asked.ask, "")
    slow, quick = await asyncio.gather(collector.collect(1, 1), collector.collect(2, 1))
    assert (slow.logprobs, quick.logprobs) == ([-1.0], [-2.0])
    assert [wanted for wanted, _ in asked.questions] == [[[1, 1], [2, 1]], [[1, 1]], [[1, 1]]]


async def test_a_caller_that_gives_up_in_mid_question_takes_nothing_from_the_others() -> None:
    asked = worker()
    asked.hold = asyncio.Event()
    collector = CompletionCollector(asked.ask, "")
    tasks = [asyncio.create_task(collector.collect(key, 1)) for key in range(3)]
    await asyncio.sleep(0.02)
    tasks[0].cancel()  # it is the one that asks
    await asyncio.sleep(0.02)
    asked.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert [(await task).logprobs for task in tasks[1:]] == [[-1.0], [-2.0]]
    await collector.collect(5, 1)
    assert set(asked.drawn) == {3, 4, 5, 6, 7}  # of the one that gave up nothing is kept either


async def test_requests_that_were_given_up_do_not_pile_up() -> None:
    asked = worker()
    collector = CompletionCollector(asked.ask, "")
    for key in range(MOST_FORGOTTEN):
        await collector.tidy()
        assert not asked.questions
        collector.forget(key)
    await collector.tidy()
    assert asked.questions == [([], list(range(MOST_FORGOTTEN)))]
    await collector.tidy()
    assert len(asked.questions) == 1


async def test_records_are_fetched_by_no_more_calls_where_many_requests_begin_meanwhile() -> None:
    """Each call costs a step: one for every request that begins would keep the records from coming."""
    asked = worker()
    collector = CompletionCollector(asked.ask, "", lambda: 50)
    for key in range(100, 100 + MOST_FORGOTTEN):
        collector.forget(key)
    wanted = [asyncio.create_task(collector.collect(key, 1)) for key in range(8)]
    await asyncio.sleep(0)
    beginning = [asyncio.create_task(collector.tidy()) for _ in range(50)]
    await asyncio.gather(*wanted, *beginning)
    assert [len(forgotten) for _, forgotten in asked.questions] == [MOST_FORGOTTEN]


async def test_requests_that_begin_at_once_tell_the_worker_once_what_was_given_up() -> None:
    asked = worker()
    collector = CompletionCollector(asked.ask, "")
    for key in range(MOST_FORGOTTEN):
        collector.forget(key)
    await asyncio.gather(*(collector.tidy() for _ in range(20)))
    assert len(asked.questions) == 1


@pytest.mark.parametrize("fingerprint", ["", "projection"])
async def test_numbers_that_are_none_are_an_error_and_never_an_empty_proof(
    fingerprint: str,
) -> None:
    asked = Worker({1: [[float("nan"), *[1.0] * 7]], 2: [[-1.0, float("inf"), *[1.0] * 6]]})
    collector = CompletionCollector(asked.ask, fingerprint)
    with pytest.raises(EngineError, match="finite"):
        await collector.collect(1, 1)
    if fingerprint:
        with pytest.raises(EngineError, match="proof"):
            await collector.collect(2, 1)


async def test_a_worker_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = worker()
    asked.late = {1: 10**6}
    monkeypatch.setattr("primerl.node.inference.vllm.PATIENCE_S", 0.05)
    with pytest.raises(EngineError, match="restart"):
        await CompletionCollector(asked.ask, "").collect(1, 1)


async def test_routes_come_as_the_bits_behind_the_numbers() -> None:
    """Whatever numbers these bits would be; what fills the last one up is cut off."""
    shape = RouteShape(layers=3, experts=256, top_k=2)
    routes = bytes(range(250, 256)) + bytes([255, 192, 127, 255, 127, 0])
    padded = [routes[:6] + b"\0\0", routes[6:] + b"\0\0"]
    bits = np.frombuffer(b"".join(padded), np.float32).reshape(2, 2)
    numbers = np.concatenate([np.array(rows(1), np.float32), bits], axis=1)

    async def ask(wanted: list[list[int]], forget: list[int]) -> list[list[Any]]:
        return [[key, numbers.tobytes(), [[0, 3]], False, b""] for key, _ in wanted]

    found = await CompletionCollector(ask, "projection", routes=shape).collect(1, 2)
    assert found.routes == routes
    assert found.logprobs == [-1.0, -0.25]
    Projection().check(found.proof, 2)
