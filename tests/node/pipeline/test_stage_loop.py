"""The loop of a later stage: order, old ring epochs, faults."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support import ring_cases
from support.ring_cases import MemoryPort, step

from primerl.node.errors import EngineError
from primerl.node.pipeline import stage_loop
from primerl.node.pipeline.frames import Frame, Kind
from primerl.node.pipeline.ports import DEPTH, PortClosed, PortTimeout
from primerl.node.pipeline.stage_loop import Later

WAIT_S = 60.0


class Compute:
    """Records its calls; fails at micro-batch 13."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.versions = {1, 2}

    def reset(self) -> None:
        self.told.append("reset")

    def switch(self, version: int) -> None:
        if version not in self.versions:
            raise EngineError(f"version {version} was not prepared")
        self.told.append(version)

    def step(self, frame: Frame) -> Frame | Later:
        if frame.number == 13:
            raise EngineError("out of memory")
        if frame.number == 14:
            raise ZeroDivisionError
        self.told.append(("step", frame.number))
        return replace(frame, kind=Kind.DRAWN, tensors=(), busy_us=0)


@contextmanager
def stage(compute: Compute, rank: int = 1) -> Generator[MemoryPort]:
    near, far = ring_cases.pair()
    thread = threading.Thread(target=stage_loop.serve, args=(far, compute), kwargs={"rank": rank})
    thread.start()
    try:
        yield near
    finally:  # else a failed test keeps the process of its suite
        near.close()
        thread.join(WAIT_S)
    assert not thread.is_alive()


def test_what_is_sent_is_done_in_order_and_passed_on() -> None:
    compute = Compute()
    with stage(compute) as port:
        sent = [Frame(Kind.RESET, 5, 0), step(5, 1), Frame(Kind.SWITCH, 5, 2), step(5, 2)]
        for frame in [*sent, Frame(Kind.PING, 0, 9)]:
            port.send(frame)
        kinds = [port.receive(WAIT_S).kind for _ in range(5)]
    assert kinds == [Kind.RESET, Kind.DRAWN, Kind.SWITCH, Kind.DRAWN, Kind.PING]
    assert compute.told == ["reset", ("step", 1), 2, ("step", 2)]


def test_what_is_of_another_chain_is_dropped() -> None:
    compute = Compute()
    with stage(compute) as port:
        for frame in (
            step(4, 1),
            Frame(Kind.RESET, 5, 0),
            step(4, 2),
            step(6, 3),
            Frame(Kind.RESET, 5, 0),
            Frame(Kind.RESET, 3, 0),
            Frame(Kind.SWITCH, 4, 2),
            step(5, 4),
        ):
            port.send(frame)
        assert port.receive(WAIT_S).kind is Kind.RESET
        assert port.receive(WAIT_S).number == 4
    assert compute.told == ["reset", ("step", 4)]


def test_after_a_fault_nothing_of_that_chain_is_computed_until_another_begins() -> None:
    compute = Compute()
    with stage(compute, rank=2) as port:
        port.send(Frame(Kind.RESET, 5, 0))
        port.send(step(5, 13))
        port.send(step(5, 1))
        port.send(Frame(Kind.SWITCH, 5, 1))
        assert port.receive(WAIT_S).kind is Kind.RESET
        fault = port.receive(WAIT_S)
        assert (fault.kind, fault.epoch, fault.number) == (Kind.FAULT, 5, 2)
        assert fault.body == b"out of memory"
        with pytest.raises(PortTimeout):
            port.receive(0.05)
        port.send(Frame(Kind.RESET, 6, 0))
        port.send(step(6, 1))
        assert port.receive(WAIT_S).kind is Kind.RESET
        assert port.receive(WAIT_S).kind is Kind.DRAWN
    assert compute.told == ["reset", "reset", ("step", 1)]


def test_a_version_that_was_not_prepared_is_a_fault() -> None:
    with stage(Compute()) as port:
        port.send(Frame(Kind.RESET, 1, 0))
        port.send(Frame(Kind.SWITCH, 1, 7))
        port.receive(WAIT_S)
        assert port.receive(WAIT_S).body == b"version 7 was not prepared"


def test_a_bug_closes_the_port() -> None:
    near, far = ring_cases.pair()
    near.send(Frame(Kind.RESET, 1, 0))
    near.send(step(1, 14))
    with pytest.raises(ZeroDivisionError):
        stage_loop.serve(far, Compute(), rank=1)
    assert near.receive(WAIT_S).kind is Kind.RESET
    with pytest.raises(PortClosed):
        near.receive(WAIT_S)


def test_the_longest_time_of_a_stage_travels_along() -> None:
    with stage(Compute()) as port:
        port.send(Frame(Kind.RESET, 1, 0))
        port.send(replace(step(1, 1), busy_us=9_000_000, waited_us=5))
        port.receive(WAIT_S)
        frame = port.receive(WAIT_S)
    assert frame.busy_us == 9_000_000
    assert frame.waited_us >= 5


class Device(Compute):
    """Begins micro-batches at once; each ends when its number is released."""

    def __init__(self) -> None:
        super().__init__()
        self.done = {number: threading.Event() for number in range(20)}

    def step(self, frame: Frame) -> Later:
        self.told.append(("step", frame.number))
        answer = replace(frame, kind=Kind.DRAWN, tensors=(), busy_us=0)

        def later() -> Frame:
            assert self.done[frame.number].wait(WAIT_S)
            if frame.number == 13:
                raise EngineError("other states than it signed for")
            if frame.number == 14:
                raise ZeroDivisionError
            return answer

        return later


def let_go(compute: Device, *numbers: int) -> None:
    for number in numbers:
        compute.done[number].set()


def test_the_next_micro_batch_is_begun_while_a_device_computes_one() -> None:
    compute = Device()
    with stage(compute) as port:
        for frame in (Frame(Kind.RESET, 1, 0), step(1, 1), step(1, 2), Frame(Kind.SWITCH, 1, 2)):
            port.send(frame)
        assert port.receive(WAIT_S).kind is Kind.RESET
        while 2 not in compute.told:
            time.sleep(0.001)
        let_go(compute, 2)
        with pytest.raises(PortTimeout):
            port.receive(0.05)  # what was sent first comes back first
        let_go(compute, 1)
        found = [port.receive(WAIT_S) for _ in range(3)]
    assert [(one.kind, one.number) for one in found] == [
        (Kind.DRAWN, 1),
        (Kind.DRAWN, 2),
        (Kind.SWITCH, 2),
    ]
    assert found[1].waited_us > 0  # for the one before it


def test_what_a_device_could_not_do_is_a_fault_of_that_chain_alone() -> None:
    compute = Device()
    let_go(compute, *range(20))
    with stage(compute, rank=2) as port:
        for frame in (Frame(Kind.RESET, 5, 0), step(5, 12), step(5, 13), step(5, 15)):
            port.send(frame)
        kinds = [port.receive(WAIT_S).kind for _ in range(3)]
        assert kinds == [Kind.RESET, Kind.DRAWN, Kind.FAULT]
        for frame in (step(5, 16), Frame(Kind.RESET, 6, 0), step(6, 17)):
            port.send(frame)
        found = [port.receive(WAIT_S) for _ in range(2)]
    assert [(one.kind, one.epoch) for one in found] == [(Kind.RESET, 6), (Kind.DRAWN, 6)]


def test_a_bug_behind_a_device_closes_the_port_too() -> None:
    compute = Device()
    let_go(compute, *range(20))
    near, far = ring_cases.pair()
    near.send(Frame(Kind.RESET, 1, 0))
    near.send(step(1, 14))
    with pytest.raises(ZeroDivisionError):
        stage_loop.serve(far, compute, rank=1)


def test_a_stage_whose_answers_nobody_takes_computes_no_more_until_somebody_does() -> None:
    compute = Compute()
    near, far = ring_cases.pair(depth=4)
    count = 2 * DEPTH + 20
    stage = threading.Thread(target=stage_loop.serve, args=(far, compute), kwargs={"rank": 1})

    def flood() -> None:
        near.send(Frame(Kind.RESET, 1, 0))
        for number in range(100, 100 + count):
            near.send(step(1, number))

    threads = [stage, threading.Thread(target=flood)]
    for thread in threads:
        thread.start()
    while len(compute.told) < DEPTH:
        time.sleep(0.001)
    time.sleep(0.2)
    assert len(compute.told) < count
    assert near.receive(WAIT_S).kind is Kind.RESET
    found = [near.receive(WAIT_S).number for _ in range(count)]
    assert found == list(range(100, 100 + count))
    near.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_stage_whose_answers_nobody_takes_ends_with_its_port() -> None:
    near, far = ring_cases.pair(depth=4)
    stage = threading.Thread(target=stage_loop.serve, args=(far, Compute()), kwargs={"rank": 1})
    stage.start()
    near.send(Frame(Kind.RESET, 1, 0))
    for number in range(100, 100 + DEPTH):
        near.send(step(1, number))
    far.close()
    stage.join(WAIT_S)
    assert not stage.is_alive()
