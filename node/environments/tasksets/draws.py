"""Draw numbers, choices and orders from a name: equal on every machine, unlike `random`."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

HELD_OUT_BELOW = 26
"""Bound of the first byte of a text's hash: about a tenth of all texts is held out."""
DIGEST_BYTES = 64


class Draws:
    """A stream of draws that is a function of its name alone."""

    def __init__(self, *name: object) -> None:
        self._name = "/".join(map(str, name)).encode()
        self._number = 0
        self._left = 1
        self._block = 0

    def below(self, count: int) -> int:
        """Draw a number in 0..count-1, uniform up to 2**-256; `count` is below 2**128."""
        if self._left < count << 256:
            # a new block; the rest of the last one is dropped, as no draw may depend on two blocks
            name = self._name + b"/%d" % self._block
            self._number = int.from_bytes(hashlib.shake_128(name).digest(DIGEST_BYTES), "big")
            self._left = 1 << 8 * DIGEST_BYTES
            self._block += 1
        self._number, number = divmod(self._number, count)
        self._left //= count
        return number

    def between(self, low: int, high: int) -> int:
        """Draw a number in low..high."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        """Draw one of `items`."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Draw `count` items at different indices, in random order (Fisher-Yates)."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]


def is_held_out(text: str) -> bool:
    """Return whether the hash of a text assigns it to the evaluation."""
    return hashlib.blake2b(text.encode()).digest()[0] < HELD_OUT_BELOW
