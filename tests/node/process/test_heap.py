"""What was there at the start costs later collections nothing; what comes later is still collected."""

import gc
import weakref

from primerl.node.process.heap import freeze_libraries


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
