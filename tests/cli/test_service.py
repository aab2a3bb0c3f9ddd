"""`service`: the unit is what systemd reads, and holds only commands that would start."""

import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl.cli.service import Service

from .conftest import Cli

ROOT = ("--run-as", "root")


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.delenv("SUDO_USER", raising=False)


def verified(unit: Path) -> str:
    """What systemd says against a unit."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    return "".join(line for line in done.stderr.splitlines() if unit.name in line)


def test_a_run_is_begun_at_the_first_start_and_resumed_at_the_others(cli: Cli, home: Path) -> None:
    secret = home / "pass phrase"
    secret.write_text("x")
    arguments = ("--passphrase-file", str(secret), "train", "@", "demo", "--output-dir", "my runs")
    ran = cli("service", "install", "--print", *ROOT, *arguments)
    assert ran.code == 0, ran.err
    unit = home / "primerl-train.service"
    unit.write_text(ran.out)
    assert "\nUser=root\n" in ran.out
    assert f"\nLoadCredential=passphrase:{secret}\n" in ran.out
    assert "\nRestartPreventExitStatus=2 3 4 8 9\n" in ran.out
    assert "\nType=notify\n" in ran.out
    assert "WantedBy=multi-user.target" in ran.out
    # the shell that it starts, with a program that prints its arguments
    start = re.search(r"^ExecStart=(.*)$", ran.out, re.MULTILINE)
    assert start is not None
    words = [
        word.replace('\\"', '"').replace("$$", "$")
        for word in re.findall(r'"((?:[^"\\]|\\.)*)"', start[1])
    ]
    assert words[:2] == ["/bin/sh", "-c"]
    run_dir = Path(words[3])
    assert run_dir == home / "my runs" / "demo"
    shown = [*words[:4], "/bin/echo", *words[7:]]
    first = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert first == "train @ demo --output-dir my runs\n"
    (run_dir / "trainer").mkdir(parents=True)
    (run_dir / "trainer/ledger.db").touch()
    again = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert again == first.replace("\n", " --resume\n")
    assert verified(unit) == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "a service runs join, inference, train, rl or judge"),
        (("status",), 2, "a service runs join"),
        (("join", "--ticket", "-"), 2, "no standard input"),
        (("join", "--ticket", "nowhere.txt"), 2, "neither a ticket"),
        (("train", "@", "demo", "--training.lr", "x"), 2, "training.lr on the command line"),
        (("rl", "@", "nowhere.toml"), 2, "no config file nowhere.toml"),
        (("--name", "a b", "train", "@", "demo"), 2, "--name: letters"),
        (("--name", "../x", "train", "@", "demo"), 2, "--name: letters"),
        (("--passphrase-file", "none", "train", "@", "demo"), 2, "is no file"),
    ],
)
def test_what_would_not_start_is_not_installed(
    arguments: tuple[str, ...], code: int, said: str, cli: Cli, home: Path
) -> None:
    cli("service", "install", "--print", *ROOT, *arguments).refused(code, said)


def test_a_service_of_the_system_names_its_user(cli: Cli) -> None:
    cli("service", "install", "--print", "train", "@", "demo").refused(2, "--run-as NAME")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)))
def test_no_argument_ends_a_line_or_becomes_a_specifier(words: list[str]) -> None:
    text = Service("x", ["/bin/true", *words], "x", Path("/tmp")).unit_text()
    start = next(line for line in text.split("\n") if line.startswith("ExecStart="))
    assert text.split("\n")[text.split("\n").index(start) + 1] == "WorkingDirectory=/tmp"
    assert not re.search(r"(?<!%)(?:%%)*%(?!%)", start)


def test_a_plist_has_the_command_word_for_word(tmp_path: Path) -> None:
    command = [sys.executable, "a & <b>", '"c"']
    plist = plistlib.loads(Service("x", command, "join", tmp_path).plist_text().encode())
    assert plist["ProgramArguments"] == command
    assert plist["WorkingDirectory"] == str(tmp_path)
    assert "UserName" not in plist


def test_a_unit_of_somebody_else_is_neither_replaced_nor_removed(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    own = home / ".config/systemd/user/primerl-join.service"
    own.parent.mkdir(parents=True)
    own.write_text("[Service]\nExecStart=/bin/true\n")
    (home / "bin").mkdir()
    (home / "bin/systemctl").write_text("#!/bin/sh\nexit 1\n")
    (home / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    cli("service", "uninstall").refused(2, "was not made by `service install`")
    cli("service", "install", "--name", "join", "train", "@", "demo").refused(2, "was not made by")
    assert own.read_text() == "[Service]\nExecStart=/bin/true\n"


def test_services_that_are_not_there_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for command in ("status", "logs", "uninstall"):
        cli("service", command).refused(2, "none is installed")
