"""What `join` asks at a terminal about a run's environment."""

import io
import json
import sys
from pathlib import Path

import pytest

from primerl.cli.join import asked, with_allowed
from primerl.node.config.run import JoinConfig
from primerl.node.environments.allowed import EnvironmentNotAllowed, Package

REFUSED = EnvironmentNotAllowed(Package("sort-digits", "sort-digits 0.1.0", bytes(range(32))))


class Terminal(io.StringIO):
    """A person who types this."""

    def isatty(self) -> bool:
        return True


def answer(config: JoinConfig, typed: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> JoinConfig:
    monkeypatch.setattr(sys, "stdin", typed)
    return asked(config, REFUSED)


def test_yes_allows_it_for_this_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_allowed(JoinConfig(data_dir=tmp_path), ["other"])
    found = answer(config, Terminal("y\n"), monkeypatch)
    assert found.environments.allow == ["other", "sort-digits"]
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert "wants to run the environment 'sort-digits'" in said
    assert "package sort-digits 0.1.0, digest 000102030405" in said
    assert "[y/N/always]" in said


def test_always_is_kept_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(JoinConfig(data_dir=tmp_path), Terminal("always\n"), monkeypatch)
    held = json.loads((tmp_path / "allowed_environments.json").read_text())
    assert held == {"sort-digits": bytes(range(32)).hex()}


@pytest.mark.parametrize("typed", [Terminal("\n"), Terminal("no\n"), io.StringIO("y\n")])
def test_anything_else_and_whoever_is_no_terminal_refuses(
    tmp_path: Path, typed: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentNotAllowed):
        answer(JoinConfig(data_dir=tmp_path), typed, monkeypatch)
    assert list(tmp_path.iterdir()) == []
