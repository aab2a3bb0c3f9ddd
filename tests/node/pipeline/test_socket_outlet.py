"""The outlet of a computing process: complete frames or faults, in order, until the peer is gone."""

import socket
import threading
import time
from collections.abc import Generator

import numpy as np
import pytest
from support.ring_cases import SHAPE, step

from primerl.node.errors import EngineError
from primerl.node.pipeline.frames import Array, Frame, FrameLimits, Kind
from primerl.node.pipeline.ports import DEPTH, PortClosed, SocketInlet, SocketOutlet

WAIT_S = 60.0
LIMITS = FrameLimits.of(SHAPE)


class Far:
    """The reader at the other end of the outlet's socket."""

    def __init__(self, outlet: SocketOutlet) -> None:
        self.near, self.far = socket.socketpair()
        outlet.connect(self.near)
        self._inlet = SocketInlet(self.far, LIMITS, lambda why: self._inlet.end(why))
        self._inlet.start()

    def next(self) -> Frame:
        return self._inlet.receive(WAIT_S)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def outlet() -> Generator[SocketOutlet]:
    made = SocketOutlet(LIMITS, rank=0)
    yield made
    made.finish()


@pytest.fixture
def far(outlet: SocketOutlet) -> Generator[Far]:
    made = Far(outlet)
    yield made
    made.close()


class Held:
    """A frame whose states wait for release(), and a full queue behind it."""

    def __init__(self, outlet: SocketOutlet) -> None:
        self._ready, asked = threading.Event(), threading.Event()

        def load() -> tuple[tuple[Array, ...], bytes]:
            asked.set()
            assert self._ready.wait(WAIT_S)
            return states()

        outlet.put(Frame(Kind.STEP, 4, 0), load)
        assert asked.wait(WAIT_S)
        for number in range(1, DEPTH + 1):
            outlet.put(step(4, number))

    def release(self) -> None:
        self._ready.set()


def states(count: int = 3) -> tuple[tuple[Array, ...], bytes]:
    return (np.zeros((count, SHAPE.hidden_size), np.float32),), b"trail"


def test_a_step_waits_for_its_states_and_what_is_behind_it_waits_for_the_step(
    outlet: SocketOutlet, far: Far
) -> None:
    ready = threading.Event()

    def load() -> tuple[tuple[Array, ...], bytes]:
        assert ready.wait(WAIT_S)
        return states()

    outlet.put(Frame(Kind.STEP, 4, 0, b"step"), load, time.monotonic())
    outlet.put(Frame(Kind.SWITCH, 4, 9))
    time.sleep(0.02)
    ready.set()
    first, second = far.next(), far.next()
    assert (first.kind, first.body, first.trail) == (Kind.STEP, b"step", b"trail")
    assert first.tensors[0].shape == (3, SHAPE.hidden_size)
    assert 20_000 <= first.busy_us < 60e6
    assert (second.kind, second.number) == (Kind.SWITCH, 9)


def test_states_that_cannot_be_sent_are_a_fault_of_this_stage(
    outlet: SocketOutlet, far: Far
) -> None:
    def fail() -> tuple[tuple[Array, ...], bytes]:
        raise EngineError("not finite")

    outlet.put(Frame(Kind.STEP, 4, 0), fail)
    told = far.next()
    assert (told.kind, told.epoch, told.number, told.body) == (Kind.FAULT, 4, 0, b"not finite")
    outlet.put(Frame(Kind.STEP, 4, 1), lambda: states(1 << 16))
    assert far.next().kind is Kind.FAULT
    outlet.put(step(4, 2))
    assert far.next().number == 2


def test_a_newer_connection_takes_all_that_is_put_from_then_on(
    outlet: SocketOutlet, far: Far
) -> None:
    outlet.put(step(1, 1))
    newer = Far(outlet)
    outlet.put(step(1, 2))
    assert far.next().number == 1
    with pytest.raises(PortClosed):
        far.next()
    assert newer.next().number == 2
    newer.close()


def test_a_node_that_is_gone_keeps_no_other_waiting(outlet: SocketOutlet) -> None:
    outlet.put(step(1, 0))  # to nobody
    gone = Far(outlet)
    gone.close()
    for number in range(500):
        outlet.put(step(1, number, tokens=32))
    newer = Far(outlet)
    outlet.put(step(1, 7))
    assert newer.next().number == 7
    newer.close()


def test_a_connection_with_a_full_queue_ends_behind_it(outlet: SocketOutlet, far: Far) -> None:
    held = Held(outlet)
    outlet.finish()
    held.release()
    assert [far.next().number for _ in range(DEPTH + 1)] == [*range(DEPTH + 1)]
    with pytest.raises(PortClosed):
        far.next()


def test_a_writer_that_waits_for_room_when_the_connection_ends_is_released(
    outlet: SocketOutlet, far: Far
) -> None:
    held = Held(outlet)
    late = threading.Thread(target=outlet.put, args=(step(4, 99),))
    late.start()
    late.join(0.05)
    assert late.is_alive(), "there is no room"
    outlet.finish()
    held.release()
    late.join(WAIT_S)
    assert [far.next().number for _ in range(DEPTH + 1)] == [*range(DEPTH + 1)]
    with pytest.raises(PortClosed):
        far.next()
    newer = Far(outlet)
    outlet.put(step(4, 7))
    assert newer.next().number == 7
    newer.close()
