"""Conformance suite of Port."""

import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
from conformance.port_factories import FACTORIES
from support.ring_cases import fields_of, same, step

from primerl.node.pipeline.frames import Frame, Kind
from primerl.node.pipeline.ports import Port, PortClosed, PortTimeout

WAIT_S = 60.0
Ports = tuple[Port, Port]


@pytest.fixture(params=FACTORIES)
def ports(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Ports]:
    with FACTORIES[request.param](tmp_path) as made:
        yield made


def test_frames_come_as_they_were_sent_and_in_order(ports: Ports) -> None:
    near, far = ports
    frames = [
        Frame(Kind.RESET, 7, 0),
        step(7, 1),
        Frame(Kind.SWITCH, 7, 12),
        step(7, 2, tokens=0),
    ]
    for frame in frames:
        near.send(frame)
    assert [fields_of(far.receive(WAIT_S)) for _ in frames] == [
        fields_of(frame) for frame in frames
    ]


def test_both_directions_are_there_at_once(ports: Ports) -> None:
    near, far = ports
    near.send(step(1, 1))
    far.send(step(1, 2))
    assert far.receive(WAIT_S).number == 1
    assert near.receive(WAIT_S).number == 2


def test_sending_does_not_wait_for_the_receiver_until_too_much_waits(ports: Ports) -> None:
    near, far = ports
    sent: list[int] = []

    def flood() -> None:
        for number in range(600):
            near.send(step(1, number, tokens=32))
            sent.append(number)

    thread = threading.Thread(target=flood)
    thread.start()
    until = time.monotonic() + WAIT_S
    while len(sent) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
    assert 3 <= len(sent) < 600
    assert [far.receive(WAIT_S).number for _ in range(600)] == list(range(600))
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_waiting_for_nothing_has_an_end(ports: Ports) -> None:
    near, _ = ports
    with pytest.raises(PortTimeout):
        near.receive(0.02)


def test_what_was_sent_before_the_end_still_arrives(ports: Ports) -> None:
    near, far = ports
    near.send(step(1, 1))
    near.close()
    assert same(far.receive(WAIT_S), step(1, 1))
    with pytest.raises(PortClosed):
        far.receive(WAIT_S)
    with pytest.raises(PortClosed):
        send_until_it_is_noticed(far)


def send_until_it_is_noticed(port: Port) -> None:
    for _ in range(1000):
        port.send(step(1, 2))
        time.sleep(0.01)


def test_closing_wakes_waiters_and_is_harmless_twice(ports: Ports) -> None:
    near, _ = ports
    woken: list[bool] = []

    def wait() -> None:
        try:
            near.receive(WAIT_S)
        except PortClosed:
            woken.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    near.close()
    near.close()
    thread.join(WAIT_S)
    assert woken == [True]
    with pytest.raises(PortClosed):
        near.send(step(1, 1))
    with pytest.raises(PortClosed):
        near.receive(WAIT_S)


def test_closing_wakes_blocked_senders(ports: Ports) -> None:
    near, _ = ports
    woken: list[bool] = []

    def flood() -> None:
        try:
            while True:
                near.send(step(1, 0, tokens=32))
        except PortClosed:
            woken.append(True)

    thread = threading.Thread(target=flood)
    thread.start()
    time.sleep(0.2)
    near.close()
    thread.join(WAIT_S)
    assert woken == [True]


def test_the_time_in_a_queue_is_added_to_the_waiting_time_before(ports: Ports) -> None:
    near, far = ports
    near.send(replace(step(1, 1), busy_us=77, waited_us=1_000_000))
    time.sleep(0.1)
    frame = far.receive(WAIT_S)
    assert frame.busy_us == 77
    assert 1_050_000 <= frame.waited_us < 11_000_000
