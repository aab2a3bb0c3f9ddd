"""Work in a thread of its own: it may fail, hang or be too much, and its caller does not notice."""

import threading
import time

from primerl.node.process.background import BackgroundThread


def test_calls_are_made_in_order_and_the_end_waits_for_them() -> None:
    thread, made = BackgroundThread("side work", 100), list[int]()
    for number in range(50):
        assert thread.put(lambda number=number: made.append(number))
    assert thread.close(10.0)
    assert made == list(range(50))


def test_a_call_that_fails_does_not_cost_the_next_one() -> None:
    thread, made = BackgroundThread("side work", 10), list[str]()

    def fail() -> None:
        raise RuntimeError("no such project")

    thread.put(fail)
    thread.put(lambda: made.append("after"))
    assert thread.close(10.0)
    assert (made, thread.failed) == (["after"], 1)


def test_a_call_that_hangs_costs_no_more_than_the_deadline_and_what_waits() -> None:
    thread, never, begun = BackgroundThread("side work", 3), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        never.wait()

    thread.put(hang)
    begun.wait()
    before = time.monotonic()
    assert [thread.put(begun.set) for _ in range(5)] == [True, True, True, False, False]
    assert not thread.close(0.2)
    assert time.monotonic() - before < 5.0
    assert thread.dropped == 2 + 4
    never.set()


def test_nothing_is_taken_after_the_end() -> None:
    thread = BackgroundThread("side work", 3)
    assert thread.close(1.0), "it was never begun"
    assert not thread.put(lambda: None)
