import json
from pathlib import Path
from typing import Any

import pytest

from primerl.cli.live import print_summary

SUMMARY: dict[str, Any] = {
    "run": "demo",
    "run_id": "ab" * 32,
    "seed": 1,
    "steps": 20,
    "exact_match_before": 0.31,
    "exact_match_after": 0.86,
    "reward_before": 0.31,
    "reward_after": 0.86,
    "mismatch_kl": 0.0004,
    "accepted": 2560,
    "rejected": {"stale": 3},
    "stale_fraction": 0.001,
    "delta_bytes": 250_000,
    "full_bytes": 1_000_000,
    "chunk_bytes_by_source": {"aaaaaaaaaa": {"trainer": 30, "bbbbbbbbbb": 70}},
    "seconds": {"warm-up": 9.5, "training": 20.25},
    "reward_curve": [[step, step / 20] for step in range(20)],
    "weights": "outputs/demo/weights/step_20",
    "picture": "outputs/demo/reward.png",
    "workers": {"aaaaaaaaaa": {"accepted": 2560, "rejected": 3}},
}


def test_a_summary_tells_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    print_summary(tmp_path)
    out = capsys.readouterr().out
    for part in (
        *("0.310 before, 0.860 after", "2560 accepted, 3 rejected (stale 3)", "0.1% of rollouts"),
        *("4.00e-04", "250.0 kB, 25% of the 1.0 MB", "bbbbbbbbbb 70 B (70%), trainer 30 B (30%)"),
        *("training 20.2 s, warm-up 9.5 s", "weights/step_20", "reward.png"),
    ):
        assert part in out
    assert "Mean reward" in out


def test_a_worker_that_told_of_no_chunks_has_no_line_about_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {**SUMMARY["chunk_bytes_by_source"], "cccccccccc": {}}
    (tmp_path / "summary.json").write_text(
        json.dumps({**SUMMARY, "chunk_bytes_by_source": sources})
    )
    print_summary(tmp_path)
    out = capsys.readouterr().out
    assert "aaaaaaaaaa" in out
    assert "cccccccccc" not in out


def test_what_is_missing_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text('{"run": "[demo]", "exact_match_before": null}')
    print_summary(tmp_path)
    out = capsys.readouterr().out
    assert "[demo]" in out
    for absent in ("exact match", "Mean reward", "rollouts", "deltas"):
        assert absent not in out


def test_a_run_that_was_stopped_has_no_summary_and_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(tmp_path)
    assert "go on with --resume" in capsys.readouterr().out
