"""scripts/tmux.sh with a tmux that only writes down what it is told."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "tmux.sh"
FAKE = """#!/bin/bash
printf '%s\\x1f' "$@" >>"$CALLS"; printf '\\n' >>"$CALLS"
case $1 in
has-session) [[ -e $CALLS.there ]] ;;
new-* | split-*) echo "%$(grep -c pane_id "$CALLS")" ;;
esac
"""


class Ran:
    """What the script did."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._calls = directory / "calls"
        (directory / "bin").mkdir(exist_ok=True)
        tmux = directory / "bin" / "tmux"
        tmux.write_text(FAKE)
        tmux.chmod(0o755)
        path = f"{tmux.parent}:{os.environ['PATH']}"
        self.done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            cwd=directory,
            env={"PATH": path, "CALLS": str(self._calls)},
            check=False,
        )

    def calls(self) -> list[list[str]]:
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line.split("\x1f")[:-1] for line in lines]

    def panes(self) -> list[tuple[str, list[str]]]:
        made = [call for call in self.calls() if call[0].startswith(("new-", "split-"))]
        return [(call[0], call[call.index("--") + 1 :]) for call in made]


def logs(directory: Path, *names: str) -> Path:
    run = directory / "my.run 1"
    (run / "logs").mkdir(parents=True)
    for name in names:
        (run / "logs" / f"{name}.log").touch()
    return run


def test_every_log_has_a_pane_and_the_run_is_watched(tmp_path: Path) -> None:
    run = logs(tmp_path, "worker_10", "trainer", "worker_2")
    ran = Ran(tmp_path, "my.run 1")
    assert (ran.done.returncode, ran.done.stdout) == (0, "")
    (first, status), (_, peers), *tails = ran.panes()
    assert first == "new-session"
    assert (status[0], status[-2:]) == ("bash", ["status", f"{run}/trainer"])
    assert peers[-2:] == ["peers", f"{run}/trainer"]
    assert [words for _, words in tails] == [
        ["tail", "-n", "200", "-F", f"{run}/logs/{name}.log"]
        for name in ("trainer", "worker_2", "worker_10")
    ]
    made = ran.calls()[1]
    assert made[made.index("-s") + 1] == "primerl-my_run 1"
    splits = [call[call.index("-t") + 1] for call in ran.calls() if call[0] == "split-window"]
    assert splits == ["%1", "%2", "%3", "%4"]


def test_many_workers_get_more_windows(tmp_path: Path) -> None:
    logs(tmp_path, "trainer", *(f"worker_{number}" for number in range(1, 11)))
    kinds = [kind for kind, _ in Ran(tmp_path, "my.run 1").panes()]
    assert kinds == [
        "new-session",
        *["split-window"] * 5,
        "new-window",
        *["split-window"] * 5,
        "new-window",
    ]


def test_a_session_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    logs(tmp_path, "trainer")
    (tmp_path / "calls.there").touch()
    ran = Ran(tmp_path, "my.run 1", "mine")
    assert ran.calls() == [["has-session", "-t", "=mine"]]
    assert "tmux attach -t '=mine'" in ran.done.stderr


@pytest.mark.parametrize("arguments", [(), ("nowhere",), (".",), ("a", "b", "c")])
def test_what_is_no_run_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = Ran(tmp_path, *arguments)
    assert ran.done.returncode == 2
    assert ran.calls() == []
    assert "tmux.sh: " in ran.done.stderr
