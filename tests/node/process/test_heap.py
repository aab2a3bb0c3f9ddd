"""What was there at the start costs later collections nothing; what comes later is still collected."""

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import pytest

from primerl.node.process.heap import freeze_libraries

LIBRARIES, CYCLES, WINDOW = 600_000, 140_000, 2_000
"""Objects; the cycles are fewer than a quarter of the libraries."""


class Link:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_frozen_is_not_walked_and_later_garbage_is_collected() -> None:
    library = [Link() for _ in range(2_000)]
    before = gc.get_freeze_count()
    freeze_libraries()
    assert library
    assert gc.get_freeze_count() > before + 1_000
    assert len(gc.get_objects()) < 1_000  # the rest of this test's own
    link = Link()
    gone = weakref.ref(link)
    del link
    gc.collect()
    assert gone() is None


class Cycle:
    """An object that only a garbage collection frees."""

    alive: ClassVar[int] = 0

    def __init__(self) -> None:
        Cycle.alive += 1
        self.own = self

    def __del__(self) -> None:
        Cycle.alive -= 1


@pytest.fixture
def small_generations() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.set_threshold(100, 5, 5)
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()
    gc.collect()


@pytest.mark.usefixtures("small_generations")
def test_garbage_that_lived_for_a_while_is_found_however_much_is_frozen() -> None:
    libraries: list[list[int]] = [[] for _ in range(LIBRARIES)]
    freeze_libraries()
    assert gc.get_freeze_count() > LIBRARIES
    window: deque[Cycle] = deque(maxlen=WINDOW)
    most = 0
    for _ in range(CYCLES):
        window.append(Cycle())
        most = max(most, Cycle.alive)
    assert WINDOW <= most < CYCLES // 4
    assert len(libraries) == LIBRARIES
