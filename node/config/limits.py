"""Limits of a home: when a node works, and how fast and how much it sends and receives.

Hours are the wall clock's: they keep their meaning when summer time begins. Time is an argument.
"""

import re
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .base import BaseConfig

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY = 24 * 60
WEEK = 7 * DAY
RANGE = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))? +)?"
    r"(?P<begin>\d\d?:\d\d) *- *(?P<end>\d\d?:\d\d)"
)
MAX_RANGES = 32


class Hours:
    """The hours of a week in which a node works; `Hours("")` are all of them."""

    def __init__(self, text: str) -> None:
        """Read "22:00-07:00, sat-sun 00:00-24:00"; a range over midnight belongs to the day that it begins on.

        Raises ValueError.
        """
        self._open = [not text.strip()] * WEEK
        parts = text.split(",") if text.strip() else []
        if len(parts) > MAX_RANGES:
            raise ValueError(f"at most {MAX_RANGES} ranges")
        for part in parts:
            self._add(part.strip().lower())

    def _add(self, text: str) -> None:
        match = RANGE.fullmatch(text)
        if match is None:
            raise ValueError(
                f'{text[:40]!r} is no range of hours: write "22:00-07:00" or "sat-sun 00:00-24:00"'
            )
        begin, end = _minutes(match["begin"]), _minutes(match["end"])
        if begin == end:
            raise ValueError(f"{text[:40]!r} begins when it ends: all day is 00:00-24:00")
        length = end - begin if end > begin else end + DAY - begin
        for day in _days(match["first"], match["last"]):
            for minute in range(day * DAY + begin, day * DAY + begin + length):
                self._open[minute % WEEK] = True

    def is_open(self, now: datetime) -> bool:
        """Return whether a node works at the local time `now`."""
        return self._open[_minute_of_week(now)]

    def next_change(self, now: datetime) -> datetime | None:
        """Return the local time at which is_open() changes next; None if it never does."""
        at = _minute_of_week(now)
        state = self._open[at]
        for minutes in range(1, WEEK):
            if self._open[(at + minutes) % WEEK] != state:
                return now.replace(second=0, microsecond=0) + timedelta(minutes=minutes)
        return None


def _minutes(text: str) -> int:
    hours, minutes = map(int, text.split(":"))
    if minutes > 59 or hours * 60 + minutes > DAY:
        raise ValueError(f"{text} is no time of day")
    return hours * 60 + minutes


def _days(first: str | None, last: str | None) -> list[int]:
    """List the days from `first` to `last`, over the end of the week if need be; all without `first`."""
    for name in (first, last):
        if name is not None and name not in DAYS:
            raise ValueError(f"{name!r} is no day: write {', '.join(DAYS)}")
    if first is None:
        return list(range(7))
    begin = DAYS.index(first)
    count = (DAYS.index(last or first) - begin) % 7 + 1
    return [(begin + number) % 7 for number in range(count)]


def _minute_of_week(now: datetime) -> int:
    return now.weekday() * DAY + now.hour * 60 + now.minute


def _check_hours(text: str) -> str:
    Hours(text)
    return text


LEAST_UPLOAD, LEAST_DOWNLOAD = 0.5, 1.0
"""Mbit/s below which peers would take this node for one that hangs, and hang up in the middle of a chunk."""


def _at_least(least: float, value: float) -> float:
    if 0 < value < least:
        raise ValueError(f"should be 0 (no limit) or at least {least:g}: peers hang up on less")
    return value


Upload = Annotated[
    float, Field(ge=0, le=1e6), AfterValidator(lambda value: _at_least(LEAST_UPLOAD, value))
]
Download = Annotated[
    float, Field(ge=0, le=1e6), AfterValidator(lambda value: _at_least(LEAST_DOWNLOAD, value))
]


class RateLimitsConfig(BaseConfig):
    """How fast this node sends and receives; `primerl-node reload` applies changes."""

    upload: Upload = 0.0
    """Mbit/s of chunks to peers and of its submissions, which go first; 0: no limit."""
    download: Download = 0.0
    """Mbit/s of chunks from peers and seeds; 0: no limit."""


class LimitsConfig(RateLimitsConfig):
    """When a node works, and how fast and how much it sends and receives; `primerl-node reload` applies
    changes."""

    hours: Annotated[str, AfterValidator(_check_hours)] = ""
    """Local hours in which it works, "22:00-07:00, sat-sun 00:00-24:00"; outside them it is paused. Empty: it
    always works."""
    when: Literal["always", "idle"] = "always"
    """`idle` pauses it while other programs use its GPU or, without one, the processor."""
    monthly_gb: Annotated[float, Field(ge=0)] = 0.0
    """GB sent and received in a calendar month: from nine tenths on it serves no chunks, at all of them it is
    paused until the next month; 0: no limit."""
