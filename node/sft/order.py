"""Which row comes when: a permutation that needs no memory, and the cursor that walks it.

The order is a function of (seed, epoch) and the number of rows alone, on every machine and for ever: a run
resumes at its cursor exactly.
"""

from typing import NamedTuple

import msgspec

from ...crypto.hashing import derive

ROUNDS = 6
"""Four make a Feistel network a pseudorandom permutation (Luby and Rackoff 1988) of ideal functions; ours are
but a mixer."""
_MASK = (1 << 64) - 1


class Cursor(msgspec.Struct, frozen=True):
    """Where the data stand: the next row is number `index` in the order of `epoch`."""

    epoch: int = 0
    index: int = 0
    rows: int = 0
    """Rows looked at, over all epochs; held-out ones not counted."""
    samples: int = 0
    tokens: int = 0
    """Tokens of all samples, trained or context."""
    skipped: dict[str, int] = {}
    """Rows that gave no sample, by reason."""
    bad: int = 0
    """Those of them that are the data's fault."""


class Shuffle(NamedTuple):
    """A permutation of 0 .. size-1: a Feistel network on the next even number of bits, walked until it hits
    a number below `size` (at most four steps on average)."""

    size: int
    half: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, size: int, seed: int, epoch: int) -> "Shuffle":
        """The order of one epoch."""
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        secret = derive("sft order", str(seed).encode(), str(epoch).encode())
        more = derive("sft order 2", secret)
        words = secret + more
        keys = tuple(int.from_bytes(words[8 * n : 8 * n + 8], "little") for n in range(ROUNDS))
        return cls(size, half, keys)

    def at(self, index: int) -> int:
        """The row at place `index`."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        row = self._walk(index)
        while row >= self.size:
            row = self._walk(row)
        return row

    def _walk(self, value: int) -> int:
        mask = (1 << self.half) - 1
        left, right = value >> self.half, value & mask
        for key in self.keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self.half | right


def _mixed(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood 2014): 64 bits in, 64 bits out."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
