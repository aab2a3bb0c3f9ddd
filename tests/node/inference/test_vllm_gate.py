"""New requests reach vLLM together; the steps are counted by hand."""

import asyncio

import pytest

from primerl.node.inference.vllm import GATE_SHARE, GATE_STEPS, PromptGate


class Requests:
    """Requests that pass a gate, in the order in which they do."""

    def __init__(self, under_way: int) -> None:
        self.under_way = under_way
        self.gate = PromptGate(lambda: self.under_way)
        self.passed: list[int] = []

    def send(self, number: int) -> "asyncio.Task[None]":
        """Send one."""

        async def enter() -> None:
            await self.gate.enter()
            self.passed.append(number)

        return asyncio.create_task(enter())


async def settle() -> None:
    """Let all tasks go on as far as they can."""
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request pass because of the time."""
    monkeypatch.setattr("primerl.node.inference.vllm.GATE_S", 3600.0)


@pytest.mark.parametrize("under_way", [0, 1, GATE_SHARE])
async def test_a_request_passes_at_once_while_few_are_under_way(under_way: int) -> None:
    requests = Requests(under_way)
    requests.send(0)
    await settle()
    assert requests.passed == [0]


async def test_requests_wait_for_a_share_of_those_under_way_and_keep_their_order() -> None:
    requests = Requests(4 * GATE_SHARE)
    for number in range(3):
        requests.send(number)
        await settle()
        assert not requests.passed
    requests.send(3)
    await settle()
    assert requests.passed == [0, 1, 2, 3]
    requests.send(4)  # the next ones wait anew
    await settle()
    assert len(requests.passed) == 4


async def test_a_request_waits_for_a_few_steps_that_begin_after_it_came() -> None:
    requests = Requests(1000)
    for _ in range(GATE_STEPS - 1):
        requests.gate.stepped()  # before it came
    requests.send(0)
    await settle()
    for _ in range(GATE_STEPS - 1):
        requests.gate.stepped()
    requests.send(1)
    await settle()
    assert not requests.passed
    requests.gate.stepped()
    await settle()
    assert requests.passed == [0, 1]


async def test_a_request_passes_an_engine_that_makes_no_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("primerl.node.inference.vllm.GATE_S", 0.001)
    requests = Requests(1000)
    await asyncio.wait_for(requests.send(0), 30)
    assert requests.passed == [0]


async def test_a_request_that_is_given_up_holds_up_no_other() -> None:
    requests = Requests(2 * GATE_SHARE)
    given_up = requests.send(0)
    await settle()
    given_up.cancel()
    await settle()
    requests.send(1)
    await settle()
    assert requests.passed == [1]
