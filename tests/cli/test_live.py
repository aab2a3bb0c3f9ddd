import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from primerl.cli.live import LiveView, PlainView, open_view, plain_line, screen_of
from primerl.cli.tables import duration, rejected, size, sources, sparkline
from primerl.node.control import Status
from primerl.node.watch import NodeState

from .test_control_commands import PEER, STATUS

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
    screen.print(screen_of("primerl-node rl  demo", states, 75, screen.width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_screen_shows_what_a_run_is_about() -> None:
    shown = drawn(nodes())
    for part in (
        *("primerl-node rl  demo 1 min 15 s", "step 3 of 10", "0.50", "9 accepted"),
        *("7 rejected (bad_reward 5, stale 2)", "direct", "30/4", "100 B, 75% from peers"),
    ):
        assert part in shown
    [row] = [line for line in shown.splitlines() if "worker_1" in line]
    assert row.split()[4:7] == ["direct", "2", "1"]  # path, version, lag behind the trainer's 3


def test_the_screen_fits_a_terminal_from_the_first_moment_on() -> None:
    for states in ({}, {"trainer": NodeState("trainer", Path("t"))}, nodes(None), nodes()):
        for width in (80, 120):
            lines = drawn(states, width).splitlines()
            assert len(lines) <= 20
            assert max(map(len, lines)) <= width
            assert "\u2026" not in "".join(lines)  # nothing cut off


def test_a_node_that_has_not_answered_is_a_line_that_says_so() -> None:
    states = nodes(None)
    states["worker_1"].note = "restarting"
    [row] = [line for line in drawn(states).splitlines() if "worker_1" in line]
    assert "restarting" in row


def test_who_joined_from_elsewhere_is_named_once_ours_are_known() -> None:
    stranger = msgspec.structs.replace(PEER, short="0123456789")
    states = nodes()
    states["trainer"].peers = [PEER, stranger]
    shown = drawn(states)
    assert "joined from elsewhere: 0123456789 (inference)" in shown
    states["worker_1"].status = None
    assert "elsewhere" not in drawn(states)


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


def test_plain_lines_do_not_come_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainView(every_s=3600) as view:
        view.show(nodes(None))
        view.show(nodes())
        view.say("a word")
    assert capsys.readouterr().out.splitlines() == [plain_line(nodes(None)), "a word"]


def test_a_pipe_gets_plain_lines_and_a_launched_node_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_PARENT_PID", "1")
    with open_view("t") as view:
        assert isinstance(view, PlainView)
        view.show(nodes())
        view.show({})
        view.say("ticket")
    assert capsys.readouterr().out.splitlines()[-1] == "ticket"
    assert "step" not in "".join(capsys.readouterr().out.splitlines()[:-1])


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
