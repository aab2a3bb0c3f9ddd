import io
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support.figures import PEER, STATUS

from primerl.cli.live import LiveView, PlainView, open_view, plain_line, print_summary, screen_of
from primerl.cli.tables import duration, rejected, size, sources, sparkline
from primerl.node.ops.control import NodeState
from primerl.node.ops.figures import BoundsRow, EngineRow, Status

WORKER = msgspec.structs.replace(
    STATUS, role="inference", short=PEER.short, version=2, phase="running", history=[]
)


def nodes(worker: Status | None = WORKER) -> dict[str, NodeState]:
    return {
        "trainer": NodeState("trainer", Path("t"), "running", STATUS, [PEER]),
        "worker_1": NodeState("worker_1", Path("w"), "running", worker),
    }


def drawn(states: dict[str, NodeState], width: int = 120) -> str:
    screen = Console(file=io.StringIO(), width=width, height=40)
    screen.print(screen_of("primerl-node rl demo", states, 75, screen.width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_screen_shows_what_a_run_is_about() -> None:
    shown = drawn(nodes())
    for part in (
        *("primerl-node rl demo  1 min 15 s", "3 of 10", "0.50", "9 accepted"),
        *("7 rejected (bad_reward 5, stale 2)", "direct", "30/4"),
    ):
        assert part in shown
    [row] = [line for line in shown.splitlines() if "worker_1" in line]
    assert f"{PEER.short}  running, version 2" in row


def test_the_screen_fits_a_terminal_from_the_first_moment_on() -> None:
    for states in ({}, {"trainer": NodeState("trainer", Path("t"))}, nodes(None), nodes()):
        for width in (80, 120):
            lines = drawn(states, width).splitlines()
            assert len(lines) <= 30
            assert max(map(len, lines)) <= width
            assert "\u2026" not in "".join(lines)  # nothing cut off


def test_a_node_that_has_not_answered_is_a_line_that_says_so() -> None:
    states = nodes(None)
    states["worker_1"].note = "restarting"
    [row] = [line for line in drawn(states).splitlines() if "worker_1" in line]
    assert "restarting" in row


def test_nodes_that_joined_from_elsewhere_have_rows_and_strangers_none() -> None:
    joined = msgspec.structs.replace(PEER, short="0123456789", trust=0.75)
    silent = msgspec.structs.replace(joined, short="silent1234", silent_s=61.0, path="-")
    long_gone = msgspec.structs.replace(silent, short="gone123456", last_seen_s=301.0)
    connected = msgspec.structs.replace(
        joined, short="stranger12", role="?", version=-1, accepted=0
    )
    states = nodes()
    states["trainer"].peers = [PEER, joined, silent, long_gone, connected]
    for width in (80, 120):
        lines = drawn(states, width).splitlines()
        [row] = [line for line in lines if "0123456789" in line]
        for cell in (" inference ", " 7 ", " 1 ", " 30/4 ", " 0.75 "):
            assert cell in row
        assert any("silent1234" in line and "silent 1 min 01 s" in line for line in lines)
        assert "gone123456" not in "".join(lines)
        assert "stranger12" not in "".join(lines)
        assert "\u2026" not in "".join(lines)


def test_a_screen_has_room_for_its_rows_and_says_how_many_more_there_are() -> None:
    states = nodes()
    states["trainer"].peers = [msgspec.structs.replace(PEER, short=f"n{at:09}") for at in range(99)]
    lines = drawn(states, 80).splitlines()
    assert len(lines) <= 40
    assert "primerl-node peers" in lines[-2]
    shown = sum("n0000" in line for line in lines)
    assert f"and {99 + len(states) - shown - len(states)} more" in lines[-2]


def test_what_a_run_waits_for_is_said_on_the_screen_and_in_the_line() -> None:
    states = nodes()
    said = "every group of the last 3 batches had equal rewards (0.00): no signal"
    warning = "3 leases of newcomers with ticket ab did not come back"
    states["trainer"].status = msgspec.structs.replace(STATUS, waiting_for=said, warnings=[warning])
    for width in (80, 120):
        shown = " ".join(drawn(states, width).replace("\u2502", " ").split())
        assert said in shown
        assert f"warning {warning}" in shown
    assert f"waiting: {said}" in plain_line(states)


def test_the_bounds_of_noise_have_one_line_of_the_screen() -> None:
    states = nodes()
    row = BoundsRow("hf 2.13.0 on cpu, tp 1, bfloat16", 0, 0, 0, 0, 0, 1.0, 24, 1)
    states["trainer"].status = msgspec.structs.replace(STATUS, bounds=[row])
    [line] = [line for line in drawn(states).splitlines() if "bounds" in line]
    assert "provisional, 24 rollouts of references are in" in line
    assert "bounds" not in drawn(nodes())


JOINED = msgspec.structs.replace(
    WORKER,
    version=7,
    newest_version=8,
    leases=2,
    trust=0.97,
    engine=EngineRow("hf", inflight=8, cap=8, running=8, tokens_per_s=123.4),
    bytes_sent=1_200_000,
    bytes_received=34_000_000,
)


def test_a_node_that_joined_shows_what_its_work_comes_to_and_what_it_waits_for() -> None:
    joined = {"inference": NodeState("inference", Path("w"), "starting", JOINED)}
    for width in (80, 120):
        shown = " ".join(drawn(joined, width).replace("\u2502", " ").split())
        for part in (
            *("9 accepted, 7 rejected (bad_reward 5, stale 2), trust 0.97", "123 tokens/s"),
            *("version 7, 1 behind version 8", "1.2 MB sent, 34.0 MB received", "waiting -"),
        ):
            assert part in shown
    line = plain_line(joined)
    for part in ("9 accepted", "trust 0.97", "123 tokens/s", "1 behind", "1.2 MB sent"):
        assert part in line
    waits = "no work is leased: enough work is out for the next steps"
    joined["inference"].status = msgspec.structs.replace(JOINED, waiting_for=waits)
    assert waits in " ".join(drawn(joined, 80).replace("\u2502", " ").split())
    assert f"waiting: {waits}" in plain_line(joined)
    silent = {"inference": NodeState("inference", Path("w"), "starting")}
    assert "starting" in drawn(silent)
    assert plain_line(silent) == "inference: starting"


def test_a_line_that_says_nothing_new_comes_again_after_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    moments = [0.0, 3.0, 59.0, 61.0, 90.0]
    with PlainView(every_s=2, clock=iter(moments).__next__) as view:
        for _ in moments:
            view.show(nodes())
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_markup_in_what_others_say_is_only_text() -> None:
    states = nodes()
    assert states["trainer"].status is not None
    states["trainer"].status = msgspec.structs.replace(STATUS, detail="[/nonsense] [red]x")
    assert "[/nonsense] [red]x" in drawn(states)


def test_plain_lines_come_when_something_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainView(every_s=-1) as view:
        view.show(nodes())
        view.show(nodes())
        states = nodes()
        states["worker_1"].note = "left"
        view.show(states)
    first, second = capsys.readouterr().out.splitlines()
    assert "step 3/10 | reward 0.50" in first
    assert "worker_1 at 2" in first
    assert "worker_1 left" in second
    with PlainView(every_s=3600) as view:
        view.show(nodes(None))
        view.show(nodes())
        view.say("a word")
    assert capsys.readouterr().out.splitlines() == [plain_line(nodes(None)), "a word"]


def test_a_launched_node_prints_only_what_it_is_told_to_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_PARENT_PID", "1")
    with open_view("t") as view:
        assert isinstance(view, PlainView)
        assert view.pace_s == float("inf")  # nothing is asked
        view.say("ticket")
    assert capsys.readouterr().out == "ticket\n"


def test_a_screen_is_drawn_when_something_is_new_or_its_time_is_old() -> None:
    screen = Console(file=io.StringIO(), width=100, height=20, force_terminal=True)
    now = [0.0]
    states = nodes()
    assert isinstance(screen.file, io.StringIO)
    with LiveView("t", screen, clock=lambda: now[0]) as view:
        sizes = [screen.file.tell()]
        for now[0], states["worker_1"].note in (
            (1, ""),
            (2, ""),
            (3, "left"),
            (4, "left"),
            (8, "left"),
        ):
            assert states["trainer"].status is not None
            states["trainer"].status = msgspec.structs.replace(STATUS, uptime_s=now[0])
            view.show(states)
            sizes.append(screen.file.tell())
    drawn = [after > before for before, after in itertools.pairwise(sizes)]
    assert drawn == [True, False, True, False, True]


def test_what_is_said_above_the_screen_stays_whole() -> None:
    screen = Console(file=io.StringIO(), width=40, height=20, force_terminal=True)
    ticket = "primerl1-" + "x" * 300
    with LiveView("t", screen) as view:
        view.show(nodes())
        view.say(ticket)
    assert isinstance(screen.file, io.StringIO)
    assert ticket in screen.file.getvalue()


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_600_000, 7e15)] == [
        *("0 B", "999 B", "1.0 kB", "2.6 MB", "7000.0 TB"),
    ]
    assert [duration(s) for s in (0, 59, 61, 3700, 200_000)] == [
        *("0 s", "59 s", "1 min 01 s", "1 h 01 min", "2 d 7 h"),
    ]
    assert rejected({}) == "none rejected"
    assert sources({}) == ""


def test_a_sparkline_goes_from_the_lowest_block_to_the_highest() -> None:
    line = sparkline([float(i) for i in range(100)], 10)
    assert len(line) == 10
    assert (line[0], line[-1]) == ("\u2581", "\u2588")
    assert sorted(line) == list(line)
    assert sparkline([], 10) == ""
    assert len(sparkline([1.0, 1.0], 10)) == 2


# -- the summary -----------------------------------------------------------------------------------

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


def printed(directory: Path, summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    (directory / "summary.json").write_text(json.dumps(summary))
    print_summary(directory)
    return capsys.readouterr().out


def test_a_summary_tells_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = {**SUMMARY["chunk_bytes_by_source"], "cccccccccc": {}}
    out = printed(tmp_path, {**SUMMARY, "chunk_bytes_by_source": sources}, capsys)
    for part in (
        *("0.310 before, 0.860 after", "2560 accepted, 3 rejected (stale 3)", "0.1% of rollouts"),
        *("4.00e-04", "250.0 kB, 25% of the 1.0 MB", "bbbbbbbbbb 70 B (70%), trainer 30 B (30%)"),
        *(
            "training 20.2 s, warm-up 9.5 s",
            "weights/step_20",
            "primerl-node chat outputs/demo ",
            "reward.png",
            "Mean reward",
        ),
    ):
        assert part in out
    assert "cccccccccc" not in out  # a worker that told of no chunks has no line about them


def test_what_is_missing_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(tmp_path, {"run": "[demo]", "exact_match_before": None}, capsys)
    assert "[demo]" in out
    for absent in ("exact match", "Mean reward", "rollouts", "deltas"):
        assert absent not in out


def test_a_run_without_evaluation_shows_no_figures_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unmeasured = {"reward_before": 0.0, "reward_after": 0.0}
    environments = {name: unmeasured | {"accepted": 7} for name in ("sums", "words")}
    mixture = {**SUMMARY, "environments": environments, "eval_prompts": 8}
    assert "reward 0.000 before, 0.000 after, 7 accepted" in printed(tmp_path, mixture, capsys)
    out = printed(tmp_path, {**mixture, "eval_prompts": 0}, capsys)
    assert "held-out" not in out
    assert "before" not in out
    assert out.count(" 7 accepted") == 2


def test_a_run_that_was_stopped_has_no_summary_and_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(tmp_path)
    assert "--resume begins the warm-up again" in capsys.readouterr().out
