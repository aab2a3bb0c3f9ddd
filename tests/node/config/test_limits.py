"""Hours of a week, over midnight and over its end."""

from datetime import datetime, timedelta

import pytest

from primerl.node.config.limits import MAX_RANGES, Hours

MONDAY = datetime(2026, 11, 30)
HOURS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def open_at(text: str, day: str, time: str) -> bool:
    hours, minutes = map(int, time.split(":"))
    return Hours(text).is_open(
        MONDAY + timedelta(days=HOURS.index(day), hours=hours, minutes=minutes)
    )


@pytest.mark.parametrize(
    ("text", "day", "opens", "closes"),
    [
        ("22:00-07:00", "mon", "22:00", "07:00"),
        ("9:30-17:00", "sun", "09:30", "17:00"),
        ("sat-sun 00:00-24:00, 22:00-07:00", "fri", "22:00", "21:59"),
        ("fri 22:00 - 02:00", "fri", "22:00", "21:59"),
        ("FRI-MON 10:00-11:00", "sun", "10:00", "11:00"),
    ],
)
def test_a_range_holds_its_begin_and_not_its_end(
    text: str, day: str, opens: str, closes: str
) -> None:
    assert open_at(text, day, opens)
    assert not open_at(text, day, closes)


def test_a_range_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    assert open_at("fri 22:00-07:00", "sat", "06:59")
    assert not open_at("fri 22:00-07:00", "fri", "06:59")
    assert open_at("sun 22:00-07:00", "mon", "06:59")
    assert open_at("fri-mon 10:00-11:00", "mon", "10:59")
    assert not open_at("fri-mon 10:00-11:00", "tue", "10:59")


@pytest.mark.parametrize(
    "text", ["", "  ", "00:00-24:00", "mon-sun 0:00-24:00", "0:00-12:00,12:00-24:00"]
)
def test_all_hours_never_change(text: str) -> None:
    assert Hours(text).is_open(MONDAY)
    assert Hours(text).next_change(MONDAY) is None


def test_the_next_change_is_that_of_the_whole_week() -> None:
    hours = Hours("22:00-07:00, sat-sun 00:00-24:00")
    friday = MONDAY + timedelta(days=4, hours=23, seconds=30)
    assert hours.next_change(friday) == MONDAY + timedelta(days=7, hours=7)
    assert hours.next_change(MONDAY + timedelta(hours=12)) == MONDAY + timedelta(hours=22)


@pytest.mark.parametrize(
    "text",
    [
        "22",
        "22:00",
        "22:00-",
        "a-b",
        "22:60-23:00",
        "24:01-07:00",
        "mon",
        "xyz 1:00-2:00",
        ",",
        "1:00-1:00",
        "mon--tue 1:00-2:00",
        "1:00-2:00;3:00-4:00",
        ",".join(["1:00-2:00"] * (MAX_RANGES + 1)),
    ],
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|time of day|day|all day"):
        Hours(text)
