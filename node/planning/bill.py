"""A bill of memory: lines that add up."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Line:
    """What takes memory on one device."""

    name: str
    nbytes: int
    how: str = ""
    """How it was counted, in a few words."""
    estimate: bool = False
    """Whether it is measured on other models rather than counted."""


@dataclass(frozen=True)
class Bill:
    """What stands on one device at its worst moment."""

    lines: tuple[Line, ...]

    @classmethod
    def of(cls, lines: Iterable[Line]) -> "Bill":
        """Those that are not empty."""
        return cls(tuple(line for line in lines if line.nbytes > 0))

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(line.nbytes for line in self.lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(self.lines + other.lines)


def gib(nbytes: float) -> str:
    """For people: "1.4 GiB", "320 MiB"."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:.1f} GiB"
    return f"{nbytes / MIB:.0f} MiB"
