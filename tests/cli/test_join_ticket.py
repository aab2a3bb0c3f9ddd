import io
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from primerl.cli.join import ticket_text, with_checked_ticket
from primerl.crypto.keys import SecretKey
from primerl.node.app.tickets import remember, run_directory
from primerl.node.config.run import JoinConfig
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.ops.errors import TicketError
from primerl.node.storage.ledger import Ledger
from primerl.protocol.manifests import Ticket
from primerl.protocol.tickets import issue

from .conftest import Ran

KEY = SecretKey.from_seed(bytes(32))


def ticket(*, expires_in: int = 3600) -> str:
    now = int(time.time())
    body = Ticket(bytes(32), KEY.node_id, ("127.0.0.1:1",), (), now, now + expires_in)
    return issue(KEY, body)


def test_a_good_ticket_passes_as_text_and_out_of_a_file(home: Path) -> None:
    text = ticket()
    (home / "t").write_text(text + "\n")
    for given in (text, f"  {text}\n", "t", "~/t"):
        assert with_checked_ticket(JoinConfig(ticket=given)).ticket == text


def test_a_ticket_comes_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("primerl1-x\n"))
    assert ticket_text("-") == "primerl1-x"


@pytest.mark.parametrize("command", ["join", "inference"])
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("name", "said"),
    [("/dev/zero", "no file"), (".", "no file"), ("large", "too large"), ("none", "neither")],
)
def test_what_cannot_hold_a_ticket_is_refused_before_anything_else(
    command: str, dry: tuple[str, ...], name: str, said: str, cli: Callable[..., Ran], home: Path
) -> None:
    (home / "large").write_text("primerl1-" + "a" * 2**20)
    ran = cli(command, "--ticket", name, "--data-dir", "d", *dry)
    assert ran.code == 3
    assert said in ran.err


def test_a_ticket_comes_through_a_named_pipe(home: Path) -> None:
    os.mkfifo(home / "pipe")
    with ThreadPoolExecutor(1) as pool:
        pool.submit((home / "pipe").write_text, "primerl1-x\n")
        assert ticket_text("pipe") == "primerl1-x"


def test_no_ticket_says_where_to_get_one(cli: Callable[..., Ran]) -> None:
    ran = cli("join")
    assert ran.code == 3
    assert "primerl-node ticket" in ran.err


def test_an_expired_ticket_is_refused_offline_and_the_clock_named(cli: Callable[..., Ran]) -> None:
    ran = cli("join", "--ticket", ticket(expires_in=-3600))
    assert ran.code == 3
    assert "expired 3600 s ago by our clock (" in ran.err or "expired 3601 s ago" in ran.err
    assert "check the clock of this machine" in ran.err


def test_a_directory_that_was_admitted_passes_with_an_expired_ticket_and_with_none(
    home: Path,
) -> None:
    old = ticket(expires_in=-3600)
    ledger = Ledger(run_directory(home / "node", bytes(32)) / "ledger.db", fsync=False)
    config = JoinConfig(ticket=old, data_dir=home / "node")
    with pytest.raises(TicketError, match="expired"):
        with_checked_ticket(config)
    remember(ledger, old)
    ledger.close()
    assert with_checked_ticket(config).ticket == old
    assert with_checked_ticket(JoinConfig(data_dir=home / "node")).ticket == old
    with pytest.raises(TicketError, match="never admitted"):
        with_checked_ticket(JoinConfig(data_dir=home / "other"))


def test_damaged_and_invented_tickets_are_refused_offline(cli: Callable[..., Ran]) -> None:
    text = ticket()
    middle = len(text) // 2
    flipped = text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :]
    for bad in (flipped, text[:-20], "primerl1-", "primerl1-!!", "primerl1-AAAA"):
        ran = cli("join", "--ticket", bad)
        assert ran.code == 3, bad
        assert ran.err.count("\n") == 1


def test_a_ticket_that_is_nothing_and_a_file_that_is_no_ticket(
    cli: Callable[..., Ran], home: Path
) -> None:
    (home / "binary").write_bytes(b"\xff\x00\xfe")
    (home / "note").write_text("see you at nine")
    for bad in ("nothing-here", "binary", "note", ".", "/dev/zero"):
        ran = cli("join", "--ticket", bad)
        assert ran.code == 3, bad
        assert ran.err.count("\n") == 1


def test_an_unknown_role_is_a_usage_error(cli: Callable[..., Ran]) -> None:
    ran = cli("join", "--role", "miner", "--ticket", ticket())
    assert ran.code == 2
    assert "role" in ran.err


@pytest.mark.skipif(is_installed(), reason="there is a vLLM here")
def test_an_engine_that_is_not_installed_is_named_before_anything_is_sent(
    cli: Callable[..., Ran],
) -> None:
    ran = cli("join", "--ticket", ticket(), "--engine.type", "vllm")
    assert ran.code == 7
    assert "vLLM is not installed" in ran.err
    assert ran.err.count("\n") == 1
