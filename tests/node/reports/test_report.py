import json
import math
import struct
from pathlib import Path

import pytest

from primerl.node.reports.report import points, smooth, terminal_curve, write_picture

CURVE = [[step, 0.3 + step / 200] for step in range(100)]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_summary_becomes_a_png(tmp_path: Path) -> None:
    summary = json.loads(
        json.dumps(
            {
                **{"run": "demo", "seed": 1, "steps": 100, "accepted": 12800},
                **{"exact_match_before": 0.3, "exact_match_after": 0.9, "reward_curve": CURVE},
            }
        )
    )
    path = tmp_path / "out" / "reward.png"
    write_picture(summary, path)
    one = png_size(path)
    write_picture({**summary, "staleness_curve": [[0, 0.0], [99, 1.5]]}, path)
    assert png_size(path)[1] > one[1] > 300
    assert list(path.parent.iterdir()) == [path]


def test_a_run_without_evaluation_has_no_exact_match_in_its_picture(tmp_path: Path) -> None:
    path, summary = tmp_path / "reward.png", {"reward_curve": CURVE[:5]}
    write_picture(summary, path)
    plain = path.read_bytes()
    unmeasured = {"exact_match_before": 0.0, "exact_match_after": 0.0}
    write_picture({**summary, **unmeasured, "eval_prompts": 0}, path)
    assert path.read_bytes() == plain
    write_picture({**summary, **unmeasured, "eval_prompts": 8}, path)
    assert path.read_bytes() != plain


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"reward_curve": []},
        {"reward_curve": [[0, 0.5]], "exact_match_before": None},
        {"reward_curve": [[0, math.nan], [1, None], [2, 0.5]], "exact_match_after": 0.1},
    ],
)
def test_what_a_broken_off_run_lacks_costs_only_itself(
    summary: dict[str, object], tmp_path: Path
) -> None:
    write_picture(summary, tmp_path / "r.png")
    assert png_size(tmp_path / "r.png")[0] > 300


def test_the_terminal_curve_has_the_asked_size_and_rises() -> None:
    lines = terminal_curve(points(CURVE), 60, 12).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 60
    assert "\x1b" not in "".join(lines)
    inside = [line.partition("\u2502")[2] or line.partition("\u2524")[2] for line in lines[1:-3]]
    first = [len(line) - len(line.lstrip()) for line in inside if line.strip(" \u2502")]
    assert first == sorted(first, reverse=True)  # higher rows begin further right


def test_a_second_curve_does_not_show_the_first() -> None:
    once = terminal_curve([(0, 0), (1, 1)], 40, 8)
    terminal_curve([(0, 5), (1, 5.5)], 40, 8)
    assert terminal_curve([(0, 0), (1, 1)], 40, 8) == once


def test_too_few_points_make_no_curve() -> None:
    assert terminal_curve([], 40, 8) == ""
    assert terminal_curve([(0, 0.5), (1, math.inf)], 40, 8) == ""


def test_smoothing_keeps_a_constant_and_starts_at_the_first_value() -> None:
    assert [value for _, value in smooth([(i, 2.0) for i in range(5)])] == pytest.approx([2.0] * 5)
    assert smooth([(0, 1.0), (1, 0.0)])[0] == (0, pytest.approx(1.0))
