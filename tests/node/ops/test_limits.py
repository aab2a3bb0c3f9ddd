"""When a node is paused, what it counts, and that a restart changes neither."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from primerl.node.config.limits import LimitsConfig
from primerl.node.errors import StorageError, UsageError
from primerl.node.gpus import GpuShare
from primerl.node.ops import limits as module
from primerl.node.ops.limits import HomeLimits, Idleness
from primerl.node.ops.machine import OthersUse

MONDAY = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
NOON = MONDAY.timestamp()
HOUR, DAY = 3600.0, 86400.0
QUIET, GAME = OthersUse(0.0, GpuShare(0.02, 0.1)), OthersUse(0.9, GpuShare(0.8, 0.5))


def local(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def opened(directory: Path, now: float = NOON, **config: object) -> HomeLimits:
    """Open the limits of a node, as at a start."""
    limits = HomeLimits(LimitsConfig.model_validate(config), directory, now, local=local)
    limits.open(now)
    return limits


def test_without_limits_a_node_works_and_serves_whatever_happens(tmp_path: Path) -> None:
    limits = opened(tmp_path)
    limits.look(NOON + 400 * DAY, (10**15, 10**15), GAME)
    assert (limits.why, limits.serves, limits.text(NOON)) == ("", True, "")


def test_a_pause_of_its_owner_outlives_a_restart_and_ends_by_its_time_or_word(
    tmp_path: Path,
) -> None:
    limits = opened(tmp_path)
    limits.pause(None, NOON)
    again = opened(tmp_path, NOON + 30 * DAY)
    assert again.why == "by its owner"
    assert not again.serves
    again.resume(NOON + 30 * DAY)
    assert opened(tmp_path, NOON + 31 * DAY).why == ""

    limits.pause(2 * HOUR, NOON)
    assert limits.text(NOON) == "by its owner, until 14:00"
    again = opened(tmp_path, NOON + HOUR)
    assert again.why == "by its owner"
    again.look(NOON + 2 * HOUR, (0, 0))
    assert again.why == ""


def test_hours_pause_it_and_its_owner_s_word_does_not_open_them(tmp_path: Path) -> None:
    limits = opened(tmp_path, hours="22:00-07:00")
    limits.resume(NOON)
    assert limits.text(NOON) == "outside its hours, until 22:00"
    limits.look(NOON + 10 * HOUR, (0, 0))
    assert limits.why == ""
    limits.pause(DAY, NOON + 10 * HOUR)
    assert limits.text(NOON + 10 * HOUR) == "by its owner, until Tue 22:00"
    limits.resume(NOON + 10 * HOUR)
    limits.look(NOON + 19 * HOUR - 1, (0, 0))
    assert limits.why == ""
    limits.look(NOON + 19 * HOUR, (0, 0))
    assert limits.why == "outside its hours"


def test_the_last_tenth_of_a_month_s_bytes_is_for_its_own_work_and_then_it_is_paused(
    tmp_path: Path,
) -> None:
    limits = opened(tmp_path, monthly_gb=1.0)
    limits.look(NOON, (5 * 10**8, 3 * 10**8))
    assert limits.serves
    limits.look(NOON, (6 * 10**8, 3 * 10**8))
    assert (limits.why, limits.serves) == ("", False)
    limits.look(NOON, (6 * 10**8, 4 * 10**8))
    assert limits.text(NOON) == "the month's bytes are used, until Tue 00:00"
    assert not limits.serves
    limits.look(NOON + 12 * HOUR, (6 * 10**8 + 5, 4 * 10**8 + 7))
    assert (limits.why, limits.serves) == ("", True)
    row = limits.row(NOON + 12 * HOUR)
    assert (row.month, row.month_sent, row.month_received) == ("2026-12", 5, 7)


def test_a_month_is_counted_over_restarts_of_which_each_counts_from_zero(tmp_path: Path) -> None:
    limits = opened(tmp_path)
    limits.look(NOON, (100, 10))
    limits.look(NOON, (150, 20))
    limits.save(NOON)
    limits.look(
        NOON, (10**6, 10**6)
    )  # and a crash: at most what came since the last save() is lost
    again = opened(tmp_path)
    again.look(NOON, (1, 2))
    row = again.row(NOON)
    assert (row.month_sent, row.month_received) == (151, 22)


def test_the_count_is_written_after_a_minute_or_many_bytes(tmp_path: Path) -> None:
    limits = opened(tmp_path)
    limits.look(NOON, (1, 0))
    assert not limits.is_due(NOON)
    assert limits.is_due(NOON + module.SAVE_S)
    limits.look(NOON, (module.SAVE_BYTES, 1))
    assert limits.is_due(NOON)
    limits.save(NOON)
    assert not limits.is_due(NOON + DAY)


def test_a_clock_that_goes_back_over_the_end_of_a_month_forgets_nothing(tmp_path: Path) -> None:
    limits = opened(tmp_path, NOON + DAY)
    limits.look(NOON + DAY, (7, 0))
    assert limits.row(NOON).month == "2026-12"
    limits.look(NOON, (9, 0))
    assert (limits.row(NOON).month, limits.row(NOON).month_sent) == ("2026-12", 9)
    limits.look(NOON - 70 * DAY, (10, 0))  # it was wrong before
    assert (limits.row(NOON).month, limits.row(NOON).month_sent) == ("2026-09", 1)


def test_the_year_ends(tmp_path: Path) -> None:
    limits = opened(tmp_path, NOON + 20 * DAY, monthly_gb=0.001)
    limits.look(NOON + 20 * DAY, (10**6, 0))
    assert limits.text(NOON + 20 * DAY) == "the month's bytes are used, until 2027-01-01"


def test_other_limits_count_from_the_moment_on(tmp_path: Path) -> None:
    limits = opened(tmp_path, hours="22:00-07:00")
    assert limits.why
    limits.configure(LimitsConfig(hours="08:00-20:00"), NOON)
    assert not limits.why


def test_a_stage_that_others_wait_for_is_not_paused(tmp_path: Path) -> None:
    limits = opened(tmp_path, hours="22:00-07:00")
    limits.free("others wait")
    limits.look(NOON, (0, 0))
    assert limits.serves
    with pytest.raises(UsageError, match="others wait"):
        limits.pause(None, NOON)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"month": "2026-13"}',
        b'{"month": "x"}',
        b'{"month": "2026-11", "sent": -1}',
        b'{"month": "2026-11", "more": 1}',
        b"\xff",
        b'{"month": "2026-11", "sent": 1' + b" " * 5000 + b"}",
    ],
)
def test_a_damaged_file_counts_as_none_and_is_named(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / module.FILE).write_bytes(text)
    limits = opened(tmp_path)
    assert (limits.why, limits.row(NOON).month_sent) == ("", 0)
    assert caplog.text.count("is damaged") == 1
    limits.save(NOON)
    opened(tmp_path)
    assert caplog.text.count("is damaged") == 1


def test_what_cannot_be_read_at_all_ends_the_start_and_is_named(tmp_path: Path) -> None:
    (tmp_path / module.FILE).mkdir()
    with pytest.raises(StorageError, match=r"limits\.json"):
        opened(tmp_path)


# -- others ----------------------------------------------------------------------------------------


def answers(readings: Sequence[tuple[float, OthersUse]]) -> list[bool]:
    idleness, said = Idleness(), list[bool]()
    for at, use in readings:
        idleness.observe(use, at)
        said.append(idleness.used)
    return said


def test_a_game_pauses_within_seconds_and_its_end_wakes_after_minutes() -> None:
    readings = [(0.0, QUIET), (5.0, GAME), (10.0, GAME), (15.0, GAME), (20.0, QUIET)]
    readings += [(319.0, QUIET), (320.0, QUIET)]
    assert answers(readings) == [False, False, False, True, True, True, False]


def test_peaks_and_short_rests_change_nothing() -> None:
    peaks = [(5.0 * step, GAME if step % 2 else QUIET) for step in range(200)]
    assert not any(answers(peaks))
    rests = [(0.0, GAME)] + [(5.0 * step, GAME if step % 50 == 0 else QUIET) for step in range(200)]
    assert all(answers(rests))


def test_what_is_used_at_the_start_counts_at_once() -> None:
    assert answers([(0.0, GAME)]) == [True]


def test_between_the_bounds_everything_stays() -> None:
    desktop = OthersUse(0.5, GpuShare(0.15, 0.25))
    assert answers([(0.0, QUIET), *((float(at), desktop) for at in range(5, 4000, 5))])[-1] is False
    assert answers([(0.0, GAME), *((float(at), desktop) for at in range(5, 4000, 5))])[-1] is True


@pytest.mark.parametrize(
    ("use", "used"),
    [
        (OthersUse(0.9, GpuShare(0.0, 0.0)), False),
        (OthersUse(0.0, GpuShare(0.0, 0.3)), True),
        (OthersUse(0.0, GpuShare(0.3, 0.0)), True),
        (OthersUse(0.25, None), True),
        (OthersUse(0.2, None), False),
    ],
)
def test_the_processor_counts_where_there_is_no_gpu_and_memory_alone_is_use(
    use: OthersUse, used: bool
) -> None:
    assert answers([(0.0, use)]) == [used]


def test_a_node_that_works_when_idle_is_paused_by_others_and_others_are_not_read_else(
    tmp_path: Path,
) -> None:
    limits = opened(tmp_path, when="idle")
    assert limits.watches_others
    limits.look(NOON, (0, 0), GAME)
    assert limits.text(NOON) == "other programs use the GPU"
    limits.configure(LimitsConfig(), NOON)
    assert (limits.why, limits.watches_others) == ("", False)


def test_text_of_a_far_end_has_a_date(tmp_path: Path) -> None:
    limits = opened(tmp_path)
    limits.pause(timedelta(days=10).total_seconds(), NOON)
    assert limits.text(NOON) == "by its owner, until 2026-12-10"
