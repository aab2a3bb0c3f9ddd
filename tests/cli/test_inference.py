"""The command `inference`: what it refuses before anything starts, and what it prints."""

from pathlib import Path

import pytest

from .conftest import Cli


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ("", 2, "give --model.name with a directory or a hub id, or --ticket"),
        ("--model.name x --ticket primerl1-x", 2, "one server serves one policy"),
        ("--ticket primerl1-nonsense", 3, "the ticket is damaged"),
        ("--model.name x --api.host 0.0.0.0 --dry-run", 2, "set api.key_variable"),
        ("--model.name x --api.key-variable NO_SUCH_KEY", 2, "NO_SUCH_KEY"),
    ],
)
def test_a_server_that_cannot_be_is_refused_in_one_line(
    cli: Cli, args: str, code: int, message: str
) -> None:
    cli("inference", *args.split()).refused(code, message)


def test_a_dry_run_shows_the_server_but_not_its_key_and_starts_nothing(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-open")
    given = "--model.name x --api.port 9000 --api.key-variable MY_KEY --dry-run"
    ran = cli("inference", *given.split())
    assert ran.code == 0
    for line in ("port = 9000", 'host = "127.0.0.1"', 'key_variable = "MY_KEY"'):
        assert line in ran.out
    assert "sesame-open" not in ran.out
    assert list(home.iterdir()) == []


def test_a_model_that_is_not_there_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = cli("inference", "--model.name", "./nothing-here", "--api.port", "0")
    assert ran.code == 7
    assert "correct model.name" in ran.err or "cannot download" in ran.err
    assert ran.err.rstrip().splitlines()[-1].startswith("primerl-node: error: ")
