"""A ring's bookkeeping: unanswered engine input, pings in flight, queued packets."""

import asyncio

import pytest
from support.ring_cases import LIMITS, step

from primerl.node.pipeline.frames import Frame, Head, Kind, Packet, packet
from primerl.node.pipeline.links import PacketQueue
from primerl.node.pipeline.ring import ProcessMonitor, RingPings


def head(kind: Kind, number: int, epoch: int = 1) -> Head:
    return Head(kind, epoch, number, 0, 0)


def small(number: int) -> Packet:
    return packet(Frame(Kind.PING, 1, number), LIMITS)


def test_an_engine_that_owes_nothing_is_not_silent() -> None:
    monitor = ProcessMonitor()
    assert monitor.silent_s(100.0) == 0.0
    monitor.record_input(head(Kind.STEP, 1), 100.0)
    assert monitor.silent_s(103.0) == 3.0
    monitor.record_input(head(Kind.STEP, 2), 104.0)
    monitor.record_output(head(Kind.DRAWN, 1), 105.0)
    assert monitor.silent_s(106.0) == 1.0
    monitor.record_output(head(Kind.DRAWN, 2), 107.0)
    assert monitor.silent_s(200.0) == 0.0


def test_steps_before_a_reset_are_not_waited_for() -> None:
    monitor = ProcessMonitor()
    for number in range(3):
        monitor.record_input(head(Kind.STEP, number), 0.0)
    monitor.record_input(head(Kind.RESET, 0, epoch=2), 1.0)
    monitor.record_output(head(Kind.RESET, 0, epoch=2), 2.0)
    assert monitor.silent_s(100.0) == 0.0


def test_what_it_was_never_given_changes_nothing() -> None:
    monitor = ProcessMonitor()
    monitor.record_input(head(Kind.STEP, 1), 0.0)
    monitor.record_output(head(Kind.DRAWN, 7), 1.0)
    assert monitor.silent_s(3.0) == 2.0


def test_time_without_work_within_a_chain_is_idle() -> None:
    monitor = ProcessMonitor()
    monitor.record_input(head(Kind.RESET, 0), 0.0)
    monitor.record_output(head(Kind.RESET, 0), 0.5)
    monitor.record_input(head(Kind.STEP, 1), 10.0)
    monitor.record_output(head(Kind.STEP, 1), 11.0)
    monitor.record_input(head(Kind.STEP, 2), 14.0)
    monitor.record_input(head(Kind.STEP, 3), 14.5)
    monitor.record_output(head(Kind.STEP, 2), 15.0)
    monitor.record_output(head(Kind.STEP, 3), 16.0)
    assert (monitor.busy_s, monitor.idle_s) == (3.0, 3.0)
    assert monitor.stall_share == 0.5
    monitor.record_input(head(Kind.RESET, 0, epoch=2), 50.0)
    monitor.record_input(head(Kind.STEP, 4, epoch=2), 60.0)
    assert monitor.idle_s == 3.0


def test_a_ping_before_a_failure_does_not_show_that_the_ring_is_healthy() -> None:
    pings = RingPings()
    for number in (1, 2):
        assert pings.next(number * 10.0, healthy=False) == number
        pings.record_send(number, number * 10.0)
    pings.reset()
    assert not pings.record_return(2, 21.0)
    pings.record_send(3, 22.0)
    assert pings.record_return(3, 22.5)
    assert pings.round_ms == pytest.approx(500.0)
    assert not pings.record_return(3, 23.0)


def test_a_ring_that_moves_is_not_silent_however_long_a_round_takes() -> None:
    pings = RingPings()
    pings.record_send(1, 0.0)
    assert pings.silent_s(5.0) == 5.0
    pings.record_activity(4.0)
    assert pings.silent_s(5.0) == 1.0
    assert pings.record_return(1, 6.0)
    assert pings.silent_s(99.0) == 0.0


def test_however_many_pings_were_lost_the_next_one_may_get_through() -> None:
    pings = RingPings()
    for second in range(10_000):
        number = pings.next(float(second), healthy=False)
        assert number is not None
        pings.record_send(number, float(second))
    assert pings.silent_s(10_000.0) < 1000.0  # the oldest were given up
    assert pings.record_return(10_000, 10_000.0)
    assert pings.silent_s(10_000.0) == 0.0


async def test_a_full_box_waits_and_one_packet_always_fits() -> None:
    box = PacketQueue(frames=2, size=10)
    await box.put(packet(step(1, 1, tokens=32), LIMITS))
    putting = asyncio.create_task(box.put(small(2)))
    await asyncio.sleep(0)
    assert not putting.done()
    assert (await box.take()).kind is Kind.STEP
    await putting
    assert (await box.take()).head.number == 2


async def test_a_packet_may_jump_the_queue_and_some_may_be_dropped() -> None:
    box = PacketQueue()
    for number in (1, 2, 3):
        await box.put(small(number))
    box.put_first(small(0))
    box.drop(lambda one: one.head.number == 2)
    assert [(await box.take()).head.number for _ in range(3)] == [0, 1, 3]
    assert len(box) == 0


async def test_a_take_that_is_given_up_loses_nothing() -> None:
    box = PacketQueue()
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    await box.put(small(1))
    taking.cancel()
    await asyncio.wait([taking])
    if taking.cancelled():
        assert (await box.take()).head.number == 1
