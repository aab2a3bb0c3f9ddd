"""Fingerprint trails: every stage appends to them, stage 0 splits them."""

import pytest

from primerl.node.pipeline.frames import FINGERPRINT_BYTES
from primerl.node.pipeline.trails import BadTrail, append, check, latest


def own(stage: int, rows: int) -> bytes:
    """Make a stage's fingerprints."""
    return b"".join(bytes([stage, row]) * (FINGERPRINT_BYTES // 2) for row in range(rows))


def trail(stages: int, rows: int) -> bytes:
    """Make the trail after `stages` stages."""
    found = b""
    for stage in range(stages):
        found = append(found, own(stage, rows))
    return found


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("count", [1, 2, 15])
def test_fingerprints_lie_in_the_order_of_the_stages(rows: int, count: int) -> None:
    found = trail(count, rows)
    check(found, rows, count)
    assert found == b"".join(own(stage, rows) for stage in range(count))


def test_a_step_that_draws_nothing_leaves_no_trail() -> None:
    assert append(b"", b"") == b""
    check(b"", 0, 3)
    assert latest(b"", 0, 3) == b""


def test_a_stage_sees_what_the_one_before_it_said() -> None:
    assert latest(trail(2, 5), 5, 2) == own(1, 5)


@pytest.mark.parametrize("change", [1, -1, FINGERPRINT_BYTES, -FINGERPRINT_BYTES])
def test_a_trail_of_another_size_is_refused(change: int) -> None:
    whole = trail(2, 3)
    wrong = whole[:change] if change < 0 else whole + bytes(change)
    with pytest.raises(BadTrail):
        check(wrong, 3, 2)
    with pytest.raises(BadTrail):
        latest(wrong, 3, 2)
    with pytest.raises(BadTrail):
        check(bytes(8), 0, 1)


def test_a_stage_that_adds_half_a_row_is_stopped_at_home() -> None:
    with pytest.raises(ValueError, match="bug"):
        append(b"", bytes(FINGERPRINT_BYTES + 1))
