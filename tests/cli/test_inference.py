"""The command `inference`: what it refuses before anything starts, and what it prints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Ran

Cli = Callable[..., Ran]


def test_without_a_policy_there_is_nothing_to_serve(cli: Cli) -> None:
    ran = cli("inference")
    assert ran.code == 2
    assert "give --model.name with a directory or a hub id, or --ticket" in ran.err


def test_a_model_and_a_ticket_are_two_policies(cli: Cli) -> None:
    ran = cli("inference", "--model.name", "x", "--ticket", "primerl1-x")
    assert ran.code == 2
    assert "one server serves one policy" in ran.err


def test_the_ticket_is_checked_before_anything_is_sent(cli: Cli) -> None:
    ran = cli("inference", "--ticket", "primerl1-nonsense")
    assert ran.code == 3
    assert "no ticket that can be trusted" in ran.err


def test_an_open_address_without_a_key_is_refused_also_by_a_dry_run(cli: Cli) -> None:
    ran = cli("inference", "--model.name", "x", "--api.host", "0.0.0.0", "--dry-run")
    assert ran.code == 2
    assert "set api.key_variable" in ran.err


def test_a_key_variable_without_a_key_is_refused(cli: Cli) -> None:
    ran = cli("inference", "--model.name", "x", "--api.key-variable", "NO_SUCH_KEY")
    assert ran.code == 2
    assert "NO_SUCH_KEY" in ran.err


def test_the_key_itself_is_never_printed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-open")
    ran = cli("inference", "--model.name", "x", "--api.key-variable", "MY_KEY", "--dry-run")
    assert ran.code == 0
    assert "sesame-open" not in ran.out
    assert 'key_variable = "MY_KEY"' in ran.out


def test_a_dry_run_shows_the_server_and_starts_nothing(cli: Cli, home: Path) -> None:
    ran = cli("inference", "--model.name", "x", "--api.port", "9000", "--dry-run")
    assert ran.code == 0
    assert "port = 9000" in ran.out
    assert 'host = "127.0.0.1"' in ran.out
    assert list(home.iterdir()) == []


def test_a_model_that_is_not_there_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = cli("inference", "--model.name", "./nothing-here", "--api.port", "0")
    assert ran.code == 7
    assert "correct model.name" in ran.err or "cannot download" in ran.err
    assert ran.err.rstrip().splitlines()[-1].startswith("primerl-node: error: ")


def test_the_help_names_the_keys_of_the_server(cli: Cli) -> None:
    ran = cli("inference", "--help")
    assert ran.code == 0
    for key in ("--api.key-variable", "--api.host", "--model.base", "--engine.dtype"):
        assert key in ran.out
    assert "--rollouts" not in ran.out
